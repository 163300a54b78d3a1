"""`experiments.plan` as a person uses it: figures, files, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.plan import main
from tpjax.mesh import gpu_driver_present

ROOT = Path(__file__).parent.parent
SMALL = ("--model=smollm2-135m", "--gpu=h100", "--mesh=tensor=3", "--batch-size=2", "--seq-len=384")


def plan(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "experiments.plan", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture
def refusal(monkeypatch, capsys):
    """The one line with which a plan is refused."""

    def of(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan", *flags])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        assert stopped.value.code == 2
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
        return said.err

    return of


@pytest.fixture(scope="module")
def two_plans(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a.json and b.json, and what the first plan printed."""
    folder = tmp_path_factory.mktemp("plan")
    first = plan(*SMALL, "--json=a.json", "--timeline=a.html", cwd=folder)
    second = plan(*SMALL, "--json=b.json", "--remat=none", "--timeline=b.png", cwd=folder)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    return folder, first.stdout


def test_plan_prints_what_its_file_says(two_plans):
    folder, printed = two_plans
    report = json.loads((folder / "a.json").read_text())
    assert f"{report['peak_bytes'] / 1024**2:.1f} MiB per device" in printed
    assert report["peak_bytes"] == sum(line["bytes"] for line in report["ledger"])
    assert report["fits"] is True
    assert "yes, the card has 79.11 GiB" in printed
    assert "FLOP on all devices" in printed
    assert "dots ←" in printed
    assert "% of the model's" in printed
    for kind in report["bytes_by_kind"]:
        assert kind in printed


def test_pictures_are_written(two_plans):
    folder, _ = two_plans
    assert (folder / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert (folder / "b.png").read_bytes().startswith(b"\x89PNG")


def test_difference_names_what_grew(two_plans):
    folder, _ = two_plans
    done = plan("diff", str(folder / "a.json"), str(folder / "b.json"))
    assert done.returncode == 0, done.stderr
    a, b = (json.loads((folder / name).read_text())["peak_bytes"] for name in ("a.json", "b.json"))
    assert f"+{(b - a) / 1024**2:.1f} MiB" in done.stdout
    assert "mlp" in done.stdout


def test_what_does_not_fit_is_said_with_status_0(tmp_path):
    done = plan("--model=llama3.1-8b", "--gpu=rtx4060", "--mesh=tensor=1", "--seq-len=512",
                "--batch-size=1", "--json=plan.json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False
    assert "no, the card has" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu=h10",), "gpu 'h10' is unknown. Did you mean h100"),
        (("--gpus=h100",), "there is no flag --gpus. Did you mean --gpu"),
        (("--gpu=h100", "--mesh=tensor=3"), "tensor=3 does not split nano"),
        (("--gpu=h100", "--mesh=tensor=2", "--nodes=3"), "nodes=3 does not divide the 2 devices"),
        (("--gpu=h100", "--nodes=0"), "nodes=0"),
        (("--gpu=h100", "--timeline=a.pdf"), "must end in .png or .html"),
        (("--gpu=h100", "--json=nowhere/a.json"), "there is no folder"),
        (("diff", "a.json"), "diff takes two files"),
        (("diff", "a.json", "b.json"), "a.json cannot be read"),
        (("diff", "pyproject.toml", "b.json"), "pyproject.toml cannot be read"),
    ],
)
def test_wrong_input_ends_in_one_line(flags, said, refusal):
    assert said in refusal(*flags)


def test_a_json_file_that_is_no_report_is_refused(tmp_path, refusal):
    (tmp_path / "a.json").write_text('{"peak_bytes": 3}')
    assert "is no report" in refusal("diff", str(tmp_path / "a.json"), str(tmp_path / "a.json"))


def test_without_a_gpu_a_kind_has_to_be_named(refusal):
    if not gpu_driver_present():
        assert "there is no GPU in this machine; name a kind: --gpu a100-40g|" in refusal()
