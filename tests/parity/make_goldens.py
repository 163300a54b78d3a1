"""Writes what transformers computes for the tiny models of `cases`, a folder for each.

    .venv-parity/bin/python tests/parity/make_goldens.py tests/parity/goldens

A folder holds `config.json` and the weights as `save_pretrained` writes them; where there is a
RoPE, `config-v4.json`, the same configuration as transformers 4 wrote it; and
`golden.safetensors`: `tokens` (int32 [B, T]), `logits` (float32 [B, T, V]), `loss` (float32, the
mean over B × (T − 1) predictions) and `grad.NAME` for each tensor of the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cases import CASES, Case
from safetensors.torch import save_file

B, T = 2, 24
STD = 0.3  # large enough that a missing bias or a wrong frequency moves every logit


def main(folder: Path) -> None:
    for case in CASES:
        loss = write(case, folder / case.name)
        print(f"{case.name}: loss {loss:.4f}")


def be_deterministic() -> None:
    """One thread, nothing random, and nothing printed but errors."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def write(case: Case, folder: Path) -> float:
    """Writes a case's files into a new folder; returns the loss."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(drawn(rng, name, parameter.shape))
    tokens_BT = torch.from_numpy(rng.integers(config.vocab_size, size=(B, T), dtype=np.int32))

    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard_size)
    (folder / "generation_config.json").unlink()
    written = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in written:
        older = json.dumps(older_form(written, case.old_key), indent=2, sort_keys=True)
        (folder / "config-v4.json").write_text(older + "\n")

    golden = computed(load(folder), tokens_BT)
    save_file(golden, folder / "golden.safetensors")
    return golden["loss"].item()


def drawn(rng: np.random.Generator, name: str, shape: torch.Size) -> np.ndarray:
    """Values of one parameter: vectors that are no bias scale a norm, so are around 1."""
    values = STD * rng.standard_normal(tuple(shape))
    is_gain = len(shape) == 1 and not name.endswith("bias")
    return (values + is_gain).astype(np.float32)


def load(folder: Path, **settings: Any) -> Any:
    """The model of a folder, in float32 with plain attention; `settings` as in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **settings
    )


def computed(
    model: transformers.PreTrainedModel, tokens_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of golden.safetensors."""
    logits_BTV = model(input_ids=tokens_BT.long()).logits
    loss = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten().long()
    )
    loss.backward()
    golden = {"tokens": tokens_BT, "logits": logits_BTV.detach(), "loss": loss.detach()}
    return golden | {f"grad.{name}": p.grad for name, p in model.named_parameters()}


def older_form(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A configuration as transformers 4 wrote it: `rope_theta` and `rope_scaling` beside each
    other, `torch_dtype`, no `layer_types`, a window even where it is not used, and no head width
    that the others give."""
    older = dict(config)
    rope = older.pop("rope_parameters")
    older["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    older["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    older["torch_dtype"] = older.pop("dtype")
    older["transformers_version"] = "4.44.0"
    older.pop("layer_types", None)
    if "use_sliding_window" in older:
        older["sliding_window"] = older["sliding_window"] or 4096
    if older.get("head_dim") == older["hidden_size"] // older["num_attention_heads"]:
        del older["head_dim"]
    return older


if __name__ == "__main__":
    be_deterministic()
    main(Path(sys.argv[1]))
