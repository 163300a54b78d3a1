"""The shape of the package: who may import whom, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import tpjax

ROOT = Path(__file__).parent.parent
RANKS = [
    {"checks", "health", "preemption"},
    {"architecture"},
    {"hf.files"},
    {"hf.tensors"},
    {"hf.families", "hf.gguf"},
    {"hf.config"},
    {"hf.model"},
    {"config"},
    {"presets", "gpus", "precision", "remat", "pool", "folder"},
    {"mesh"},
    {"sharding"},
    {"quant"},
    {"moments", "resolve", "rope"},
    {"layers"},
    {"adapters"},
    {"attention", "mlp", "hf.names"},
    {"model", "cache", "sampling", "lora", "hf.pieces"},
    {"loss", "optim"},
    {"updates"},
    {"state"},
    {"tables", "hf.load", "hf.save"},
    {"layerwise"},
    {"chat"},
    {"vocabulary"},
    {"gguf_tokenizer"},
    {"tokenizer"},
    {"step", "data", "corpus", "generate"},
    {"memory.forms", "memory.text"},
    {"flops", "memory.hlo", "memory.paths", "memory.records"},
    {"memory.buffers", "memory.scene", "memory.live"},
    {"memory.names", "memory.picture"},
    {"memory.ledger", "memory.traffic", "memory.needs", "memory.policies"},
    {"memory.compiled"},
    {"memory.loops", "memory.advice", "memory.timing"},
    {"memory.lint"},
    {"memory.explain"},
    {"memory.ladder", "memory.generation"},
    {"memory.chart"},
    {"checkpoint"},
    {"saver", "resume"},
    {"log", "restore"},
    {"run", "inference"},
    {"answer", "evaluate", "export"},
    {"training"},
    {"loop"},
]


def imports(path: Path) -> set[str]:
    """The modules of tpjax that a file names in imports, at any depth of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("tpjax.") for name in found if name.startswith("tpjax")}


def test_files_import_lower_ranks_only():
    rank = {name: number for number, names in enumerate(RANKS) for name in names}
    seen = set()
    for path in (ROOT / "tpjax").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "tpjax").with_suffix("").parts)
        if name.endswith("__init__"):
            continue
        seen.add(name)
        for other in imports(path) & rank.keys():
            assert rank[other] < rank[name], f"{name} imports {other}"
    assert seen == rank.keys()


def test_config_needs_the_standard_library_only():
    allowed = sys.stdlib_module_names | {"tpjax"}
    for name in ("checks", "architecture", "config"):
        tree = ast.parse((ROOT / "tpjax" / f"{name}.py").read_text())
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert {str(module).partition(".")[0] for module in modules} <= allowed


def test_public_names_are_there_and_the_import_is_light():
    for name in tpjax.__all__:
        assert getattr(tpjax, name) is not None
    code = "import sys, tpjax; print(sorted({'jax', 'rich', 'tyro', 'flax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_readable():
    for folder in ("tpjax", "experiments", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 320, f"{path} has {lines} lines"
