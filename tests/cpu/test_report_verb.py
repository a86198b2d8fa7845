"""``haloconv report``: stored rows, a problem file or a model by name become a page; what cannot says why."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from haloconv.bench import targets
from haloconv.bench.suite import Case
from tests.cpu.test_report import WIN, report
from tests.cpu.test_report_page import ROOT, Page
from tests.cpu.test_run import MODEL
from tests.verbs import invoke, run, words

LATEST = ROOT / "benchmarks" / "results" / "nvidia-h200" / "latest.jsonl"

pytestmark = pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs:RuntimeWarning")


def problem(folder: Path) -> Path:
    layers = "self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))"
    path = folder / "net.py"
    path.write_text(MODEL.format(layers=layers, forward="return self.c(self.b(self.a(x)))", input="2, 3, 20, 24"))
    return path


def test_stored_results_become_a_page(tmp_path: Path) -> None:
    """The committed rows, which need no GPU: every row, a roofline for each precision, bytes from the suite."""
    result = invoke("report", "--results", LATEST, "--html", tmp_path / "p.html", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in LATEST.read_text("utf-8").splitlines()]
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == len(records) and all(row["bytes"] for row in rows)
    page = Page((tmp_path / "p.html").read_text("utf-8"))
    precisions = {record["precision"] for record in records}
    headings = re.findall(r"<figcaption>Roofline, (\w+)", (tmp_path / "p.html").read_text("utf-8"))
    assert set(headings) == precisions and page.cells.count("passed") == len(records)


def test_problems_of_the_suite_are_those_of_its_layers() -> None:
    case = Case("small", (2, 4, 9, 11), 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
    layer = case.layer("tf32", "nhwc", "auto", torch.device("cpu"))
    assert all(case.problem(each, "tf32", "nhwc") == layer.problem(each) for each in ("fprop", "dgrad", "wgrad"))


@pytest.mark.usefixtures("without_gpu")
def test_a_problem_file_becomes_a_page(tmp_path: Path) -> None:
    page, rows = tmp_path / "p.html", tmp_path / "r.json"
    options = ("--layout", "nhwc", "--precision", "bf16")
    result = invoke("report", problem(tmp_path), "--html", page, "--json", rows, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(rows.read_text())["rows"]
    assert {row["case"] for row in found} == {"net.a", "net (model)"}  # three layers alike are measured once
    assert {row["count"] for row in found if row["case"] == "net.a"} == {3}
    assert {(row["precision"], row["layout"]) for row in found} == {("bf16", "nhwc")}
    assert "net (model)" in page.read_text("utf-8")


@pytest.mark.usefixtures("without_gpu")
def test_named_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Dropout(0.5))
    monkeypatch.setitem(targets._BUILDERS, "timm", lambda name: net)
    result = invoke("report", "timm:tiny", "--batch", 2, "--pixels", 18, "--html", tmp_path / "p.html")
    assert result.exit_code == 0 and "tiny" in result.output and net[1].p == 0.0, result.output


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    result = invoke("report", f"{library}:resnet50", "--html", tmp_path / "p.html")
    assert result.exit_code == 2 and f"not installed: pip install {library}" in words(result)


@pytest.mark.parametrize(
    "options, message",
    [
        (["x.py"], "and --html FILE"),
        (["--html", "p.html"], "give a model or a problem file"),
        (["x.py", "--results", "y.jsonl", "--html", "p.html"], "give a model or a problem file"),
        (["x.py", "--html", "p.html"], "there is no such file"),
        (["jax:resnet50", "--html", "p.html"], "not from jax"),
        (["--results", "y.jsonl", "--html", "p.html"], "y.jsonl: there is no such file"),
        (["x.py", "--device", "emulator", "--precision", "bf16", "--html", "p.html"], "no whole model under"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    result = invoke("report", *options)
    assert result.exit_code == 2 and message in words(result)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'a page needs matplotlib, .*: pip install "haloconv\[cli\]"'):
        report(WIN).to_html()
    result = invoke("report", "--results", LATEST, "--html", tmp_path / "p.html")
    assert result.exit_code == 2 and 'pip install "haloconv[cli]"' in result.output
    result = run(problem(tmp_path), "--html", tmp_path / "p.html")
    assert result.exit_code == 2 and 'pip install "haloconv[cli]"' in result.output
