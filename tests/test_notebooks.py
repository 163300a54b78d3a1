"""Notebooks: paired, saved with their outputs, and running from top to bottom.

    python tests/test_notebooks.py

executes them all and saves them. Their own assertions check what their text claims.
"""

from __future__ import annotations

import time
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
LIMIT_S = 300  # the first takes about a minute of CPU time, on a busy machine twice that


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def execute(path: Path, folder: Path) -> NotebookNode:
    """The notebook of a `.py`, run in a folder, with its outputs."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same at every run
    end = time.monotonic() + LIMIT_S
    client = NotebookClient(
        notebook,
        timeout_func=lambda cell: max(1, int(end - time.monotonic())),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    return client.execute()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def saved(path: Path) -> NotebookNode:
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def test_each_notebook_has_both_files():
    assert NOTEBOOKS
    assert {p.stem for p in NOTEBOOKS} == {p.stem for p in FOLDER.glob("*.ipynb")}


def test_the_pair_says_the_same(path):
    assert cells(jupytext.read(path)) == cells(saved(path)), "run: python tests/test_notebooks.py"


def test_outputs_are_saved(path):
    code = [cell for cell in saved(path).cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_it_runs_from_top_to_bottom(path, tmp_path):
    execute(path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def main() -> None:
    """Executes and saves; what libraries print on stderr is left out."""
    for path in NOTEBOOKS:
        notebook = execute(path, FOLDER)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        nbformat.write(notebook, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
