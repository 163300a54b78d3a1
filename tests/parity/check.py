"""Makes the goldens anew and compares them with the ones kept; then loads what tpjax exported.

    .venv-parity/bin/python tests/parity/check.py [EXPORTS]

EXPORTS holds a folder for each case, exported by tpjax from the case's weights: transformers has
to load it without a complaint, to find the same tensors in it and to compute the same logits.
Exit status 1 if anything differs, with a line for each difference.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import make_goldens
import peft
import smollm2
import torch
import transformers
from cases import CASES
from safetensors import safe_open
from safetensors.torch import load_file

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
TOLERANCE = 1e-5  # of the largest value: sums in another processor's order are off by 3e-6
GOLDEN = "golden.safetensors"


def main(exports: Path | None) -> int:
    found = list(differences(exports))
    print("\n".join(found) if found else "no difference")
    return 1 if found else 0


def differences(exports: Path | None) -> Iterator[str]:
    """A line for each."""
    for name in sorted({path.name for path in GOLDENS.iterdir()} ^ {case.name for case in CASES}):
        yield f"{name}: not both a case and a folder of goldens"
    for case in CASES:
        kept = GOLDENS / case.name
        if not kept.is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_goldens.write(case, Path(folder))
            lines = [*remade(Path(folder), kept), *older(kept)]
        lines += exported(exports / case.name, kept) if exports else []
        yield from (f"{case.name}: {line}" for line in lines)
    for adapters in sorted(exports.glob("*.adapters")) if exports else []:
        yield from (f"{adapters.stem}: {line}" for line in adapted(adapters))
    yield from (f"smollm2: {line}" for line in pretrained())


def remade(new: Path, kept: Path) -> Iterator[str]:
    """How a case's new folder differs from the one kept."""
    names, kept_names = ({path.name for path in folder.iterdir()} for folder in (new, kept))
    for name in sorted(names ^ kept_names):
        yield f"{name} is in one folder only"
    for name in sorted(name for name in names & kept_names if name.endswith(".json")):
        if settings(new / name) != settings(kept / name):
            yield f"{name} differs"
    yield from compared(weights(new), weights(kept))
    yield from compared(load_file(new / GOLDEN), load_file(kept / GOLDEN), TOLERANCE)


def older(kept: Path) -> Iterator[str]:
    """Whether the older form of a configuration means the same model."""
    path = kept / "config-v4.json"
    if path.exists():
        model = make_goldens.load(kept, config=transformers.AutoConfig.from_pretrained(path))
        yield from (f"config-v4.json: {line}" for line in logits_differ(model, kept))


def exported(export: Path, kept: Path) -> Iterator[str]:
    """How a folder exported by tpjax differs from the one it was imported from."""
    if not (export / "config.json").is_file():
        yield f"no export in {export}"
        return
    found = compared(widened(weights(export)), widened(weights(kept)))
    yield from (f"exported {line}" for line in found)
    try:
        model, report = make_goldens.load(export, output_loading_info=True)
    except Exception as error:  # whatever transformers makes of a wrong folder
        yield f"exported folder does not load: {error!r}"
        return
    yield from (f"exported {problem}: {names}" for problem, names in report.items() if names)
    tied = transformers.AutoConfig.from_pretrained(kept).tie_word_embeddings
    if model.config.tie_word_embeddings != tied:  # not tied where the weights say otherwise
        yield f"exported tie_word_embeddings is not {tied}"
    yield from (f"exported {line}" for line in logits_differ(model, kept))


def adapted(adapters: Path) -> Iterator[str]:
    """How adapters in PEFT's hands differ from the folder that tpjax has merged them into."""
    tokens = load_file(GOLDENS / adapters.stem / GOLDEN)["tokens"].long()
    base = make_goldens.load(GOLDENS / adapters.stem)
    merged = make_goldens.load(adapters.with_suffix(".merged"))
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        found = peft.PeftModel.from_pretrained(base, adapters)(input_ids=tokens).logits
        wanted = merged(input_ids=tokens).logits
    if (found - before).abs().max() < 0.1:
        yield "adapters change nothing"
    yield from compared({"adapted logits": found}, {"adapted logits": wanted}, TOLERANCE)


def pretrained() -> Iterator[str]:
    """How the pretrained model's figures differ from the ones kept."""
    golden, texts = smollm2.made()
    path = HERE / "smollm2.safetensors"
    with safe_open(path, "pt") as file:
        if file.metadata() != texts:
            yield "the texts differ"
    yield from compared(golden, load_file(path), TOLERANCE)


def settings(path: Path) -> dict[str, object]:
    """A JSON file without the version that wrote it."""
    content = json.loads(path.read_text())
    content.pop("transformers_version", None)
    return content


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's weights, in one file or more."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != GOLDEN]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float32, which holds every value of the narrower types."""
    return {name: tensor.float() for name, tensor in tensors.items()}


def logits_differ(model: transformers.PreTrainedModel, kept: Path) -> Iterator[str]:
    """How a model's logits on a case's tokens differ from the golden ones."""
    golden = load_file(kept / GOLDEN)
    with torch.no_grad():
        logits_BTV = model(input_ids=golden["tokens"].long()).logits
    yield from compared({"logits": logits_BTV}, {"logits": golden["logits"]}, TOLERANCE)


def compared(
    new: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], tolerance: float = 0.0
) -> Iterator[str]:
    """How tensors differ: integers in any bit, the others beyond `tolerance` of the greatest."""
    for name in sorted(new.keys() ^ kept.keys()):
        yield f"{name} is {'new' if name in new else 'missing'}"
    for name in sorted(new.keys() & kept.keys()):
        a, b = new[name], kept[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        elif tolerance and b.is_floating_point():
            off, greatest = (a - b).abs().max().item(), b.abs().max().item()
            if not off <= tolerance * greatest:  # nor is it NaN
                yield f"{name} is off by {off:.3g} of {greatest:.3g}"
        elif not torch.equal(a, b):
            yield f"{name} has {(a != b).sum().item()} other values of {a.numel()}"


if __name__ == "__main__":
    make_goldens.be_deterministic()
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
