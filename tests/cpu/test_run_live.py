"""``haloconv run`` shows rows as they come, keeps them if it is interrupted, and says what was done."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from haloconv.bench.emulation.emulated import Emulation
from haloconv.bench.layer import Layer
from haloconv.bench.networks import swapped
from haloconv.bench.networks.swapped import Options, contest_of
from haloconv.bench.trial import UNTIMED
from haloconv.emulator import available
from haloconv.problem import ConvSpec
from haloconv.report import Report, StreamedTable, as_table
from tests.cpu.test_report import ENVIRONMENT, FAILED, LOSS, WIN
from tests.verbs import invoke, run, words

pytestmark = pytest.mark.usefixtures("without_gpu")

PROBLEM = """
import json
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)

    def forward(self, x):
        {before}
        return self.conv(x)

def get_inputs():
    return [torch.rand(1, 2, 17, 17)]

def get_init_inputs():
    return []
"""


def write(folder: Path, **before: str) -> Path:
    folder.mkdir()
    for name, line in before.items():
        (folder / f"{name}.py").write_text(PROBLEM.format(before=line))
    return folder


def test_a_row_is_printed_before_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, printed = swapped.tried_step, {}

    def note(layer: Layer, step: str, budget: object) -> object:
        sys.stdout.flush()
        printed[step] = sys.stdout.buffer.getvalue().decode()
        return made(layer, step, budget)

    monkeypatch.setattr(swapped, "tried_step", note)
    result = run(write(tmp_path / "problems", one="pass"))
    assert result.exit_code == 0, result.output
    steps = ["fprop", "dgrad", "wgrad", "bgrad"]
    for i, step in enumerate(steps):
        assert [each for each in steps if f" {each} " in printed[step]] == steps[:i]
    assert result.output.count("check") - result.output.count("every check") == 1, "the table has one head"


def test_an_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "problems", a="pass", b="if torch.is_grad_enabled(): raise KeyboardInterrupt", c="pass")
    found, page = tmp_path / "rows.json", tmp_path / "page.html"
    result = run(folder, "--json", found, "--html", page)
    assert result.exit_code == 130, result.output
    sentence = "Interrupted: 1 of 3 files done, 1 cut short, 1 not begun; 11 rows."
    content = json.loads(found.read_text())
    assert sentence in words(result) and sentence in content["notes"] and sentence in page.read_text()
    assert content["complete"] is False and content["passed"] is False
    assert [(file["name"], file["verdict"]) for file in content["files"]] == [("a", "passed"), ("b", "interrupted")]
    assert [row["case"] for row in content["rows"]] == ["a"] * 4 + ["a (model)"] * 2 + ["b"] * 4 + ["b (model)"]
    assert "11 of 11 rows passed every check" in words(result)
    assert "1 of 1 files correct, 1 interrupted." in words(result) and "error:" not in result.output


def test_an_interrupted_report_says_so(tmp_path: Path) -> None:
    """The line about rows that passed does not tell that there are more."""
    file = write(tmp_path / "problems", b="if torch.is_grad_enabled(): raise KeyboardInterrupt") / "b.py"
    result = invoke("report", file, "--html", tmp_path / "page.html")
    assert result.exit_code == 130, result.output
    assert "Interrupted: 0 of 1 files done, 1 cut short, 0 not begun; 5 rows. wrote" in words(result)


def test_rows_are_kept_as_each_file_is_done(tmp_path: Path) -> None:
    """The second file reads them: were the process killed there, they would be left."""
    found = tmp_path / "rows.json"
    look = f"kept = json.load(open({str(found)!r})); assert len(kept['rows']) == 6 and not kept['complete']"
    result = run(write(tmp_path / "problems", a="pass", b=look), "--json", found)
    assert result.exit_code == 0, result.output
    content = json.loads(found.read_text())
    assert len(content["rows"]) == 12 and content["complete"] and content["passed"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.json"]


def test_a_run_of_unusable_files_alone_still_writes_why(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    result = run(write(tmp_path / "problems", a="raise OSError('no disk')"), "--json", found)
    assert result.exit_code == 2 and "Nothing was checked." in result.output
    assert "no disk" in json.loads(found.read_text())["files"][0]["reason"]


def test_an_incomplete_report_has_not_passed() -> None:
    made = Report("a report", ENVIRONMENT, [WIN])
    assert made.passed
    made.complete = False
    assert not made.passed and json.loads(made.to_json())["complete"] is False


@pytest.mark.parametrize("timed", [False, True])
def test_streamed_rows_stand_in_the_same_columns(timed: bool) -> None:
    rows = [WIN, LOSS, FAILED, replace(WIN, case="much.longer", family="halo_sm90+halo_sm80_wgrad+direct")]
    console = Console(width=60, file=io.StringIO())
    table = StreamedTable(console, [row.case for row in rows], timed=timed)
    for row in rows:
        table.print_row(row)
    lines = console.file.getvalue().splitlines()
    rule = next(i for i, line in enumerate(lines) if "──" in line)
    head = lines[rule - 1]
    assert sum("──" in line for line in lines) == 1 and "…" not in console.file.getvalue()
    assert len({line.index(word) for line in lines[rule + 1 :] for word in ("fprop", "bgrad") if word in line}) == 1
    assert ("ratio" in head, "1.60x" in "".join(lines)) == (timed, timed)
    assert head.rstrip().endswith("check") and "layout" not in head and "times" not in head


# The emulator -------------------------------------------------------------------------------------------------------


def layers() -> list[Layer]:
    """A dense and a depthwise layer without bias."""
    x, dense, depthwise, dy = (torch.rand(shape) for shape in ((1, 4, 9, 9), (4, 4, 3, 3), (4, 1, 3, 3), (1, 4, 7, 7)))
    return [Layer("dense", x, dense, None, dy, ConvSpec()), Layer("dw", x, depthwise, None, dy, ConvSpec(groups=4))]


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize("precision", [None, "tf32"])
def test_the_model_has_the_families_that_run_it(precision: str | None) -> None:
    """Single layers run in TF32 beside the emulator, the whole in full precision, and so on other kernels."""
    model = torch.nn.Conv2d(4, 4, 3)
    options = Options(torch.device("cpu"), precision, "auto", 0, UNTIMED, Emulation())
    contest = contest_of(model, model, (torch.rand(1, 4, 9, 9),), layers(), [], options)
    forward, step = (set(contest.ran[each][0].split("+")) for each in ("forward", "step"))
    assert ("halo_sm90" in forward) == (precision == "tf32") and forward <= step
    assert any("depthwise" in family for family in forward) and contest.norm_limit > 0
    assert contest.label == ("fp32" if precision is None else "mixed")
    assert len(contest.ran["forward"][1].split(" + ")) == 2


def test_tables_for_the_terminal_stand_on_the_page_too() -> None:
    table = as_table([WIN, FAILED], title="Bytes moved")
    page = Report("a report", ENVIRONMENT, [WIN], tables=[table]).to_html()
    assert ">Bytes moved</h2>" in page and '<th scope="row">&lt;b&gt;</th>' in page
    assert "1.60x" in page.split("Bytes moved")[-1]
