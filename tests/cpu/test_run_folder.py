"""``haloconv run`` on many files, as KernelBench has them: which run, which are left out and why, and the summary."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv import emulator, plan
from haloconv.problem_file import candidates, load_problem_file
from haloconv.report import FileOutcome, Row
from haloconv.report.summary import fast_p, geometric_mean, score_lines, scores
from tests.verbs import run, words

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "kernelbench").glob("*.py"))
MISSING = emulator.available()

pytestmark = [
    pytest.mark.usefixtures("emulator_cache", "without_gpu"),
    pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs:RuntimeWarning"),
]

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, channels, extent=3):
        super(Model, self).__init__()
        self.layer = {layer}

    def forward(self, x):
        return self.layer(x)

batch_size = 2
channels = 4

def get_inputs():
    return [torch.rand({input})]

def get_init_inputs():
    return [channels]
"""


def write(folder: Path, name: str, layer: str, input: str = "batch_size, channels, 9, 10") -> Path:
    path = folder / f"{name}.py"
    path.write_text(PROBLEM.format(layer=layer, input=input))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten kinds of files in one folder; two of them are ours."""
    level = tmp_path / "level"
    level.mkdir()
    write(level, "2_dense", "nn.Conv2d(channels, 6, extent, bias=False)")
    write(level, "10_depthwise", "nn.Conv2d(channels, channels, (extent, 1), groups=channels)")
    write(level, "3_transposed", "nn.ConvTranspose2d(channels, 6, extent)")
    write(level, "4_volume", "nn.Conv3d(channels, 6, extent)", "batch_size, channels, 5, 5, 5")
    write(level, "5_relu", "nn.ReLU()")
    (level / "setup.py").write_text("raise SystemExit('a file of a folder that is no problem must not run')\n")
    (level / "half.py").write_text("Model = None\ndef get_inputs():\n    return []\n")
    (level / "broken.py").write_text("def get_inputs(:\n")
    (level / "notes.txt").write_text("no Python\n")
    return level


# --- which files


def test_files_of_a_folder_stand_in_counting_order_and_are_not_run(folder: Path) -> None:
    found = {candidate.path.name: candidate.reason for candidate in candidates([folder])}
    order = "2_dense 3_transposed 4_volume 5_relu 10_depthwise broken half setup"
    assert list(found) == [f"{name}.py" for name in order.split()]
    assert {name for name, reason in found.items() if reason is None} == {name for name in found if name[0].isdigit()}
    assert found["setup.py"] == "no problem file: it defines no Model, no get_inputs, no get_init_inputs"
    assert found["half.py"] == "no problem file: it defines no get_init_inputs"
    assert "cannot be read as Python" in found["broken.py"]


def test_names_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from other import *\n")
    (tmp_path / "b.py").write_text("from other import Net as Model, get_inputs\nget_init_inputs = list\n")
    (tmp_path / "c.py").write_text("from other import Model as Net\n")
    assert [candidate.reason is None for candidate in candidates([tmp_path])] == [True, True, False]


def test_what_is_not_ours_is_skipped_with_its_reason(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    text = words(result)
    assert "skipped 4_volume: torch.nn.Conv3d: a filter spans more than frames or time" in text
    assert "skipped 5_relu: it holds no torch.nn.Conv2d" in text
    assert "skipped setup.py: no problem file" in text and "3 of 3 files correct, 5 skipped." in text
    content = json.loads((tmp_path / "rows.json").read_text())
    verdicts = {file["name"]: file["verdict"] for file in content["files"]}
    assert verdicts == {
        "2_dense": "passed", "10_depthwise": "passed", "3_transposed": "passed", "4_volume": "skipped",
        "5_relu": "skipped", "setup.py": "skipped", "half.py": "skipped", "broken.py": "skipped",
    }  # fmt: skip
    assert content["passed"] and {row["case"] for row in content["rows"]} == {
        "2_dense", "2_dense (model)", "3_transposed (mirrored)", "3_transposed (model)", "10_depthwise",
        "10_depthwise (model)",
    }  # fmt: skip
    assert content["files"][0]["forward_ratio"] is None and content["scores"]["step"]["geometric_mean"] is None


def test_a_subclass_is_left_alone(tmp_path: Path) -> None:
    layer = "type('Standardised', (nn.Conv2d,), {})(channels, 2, 1)".replace("{", "{{").replace("}", "}}")
    result = run(write(tmp_path, "standardised", layer.format()))
    assert result.exit_code == 2 and "Standardised may compute something else" in words(result)


def test_an_unusable_file_leaves_the_others_alone(tmp_path: Path) -> None:
    write(tmp_path, "1_wrong_channels", "nn.Conv2d(channels + 1, 2, 1)")
    write(tmp_path, "2_dense", "nn.Conv2d(channels, 2, 1)")
    (tmp_path / "3_import.py").write_text(PROBLEM.format(layer="None", input="1") + "\nimport no_such_module\n")
    result = run(tmp_path, "--json", tmp_path / "rows.json")
    text = words(result)
    assert result.exit_code == 2 and "1_wrong_channels: Model's forward raised RuntimeError" in text
    assert "importing it raised ModuleNotFoundError" in text and "1 of 1 files correct, 2 unusable." in text
    content = json.loads((tmp_path / "rows.json").read_text())
    assert not content["passed"] and [file["verdict"] for file in content["files"]] == [
        "unusable",
        "passed",
        "unusable",
    ]


def test_a_failed_check_outranks_an_unusable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "1_wrong_channels", "nn.Conv2d(channels + 1, 2, 1)")
    write(tmp_path, "2_dense", "nn.Conv2d(channels, 2, 1)")
    right = plan.fprop
    monkeypatch.setattr(plan, "fprop", lambda *arguments: right(*arguments) * 1.01)
    result = run(tmp_path)
    assert result.exit_code == 1 and "0 of 1 files correct, 1 unusable." in words(result)


@pytest.mark.parametrize("name, message", [("empty", "no Python file in there"), ("none", "there is no such file")])
def test_nothing_to_run(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / name)
    assert result.exit_code == 2 and message in words(result)


def test_help_states_what_exit_codes_mean() -> None:
    text = words(run("--help"))
    assert "skipped files do not count" in text and "KernelBench" in text and "or there was nothing to check" in text


# --- the score


def outcome(name: str, forward: float | None, step: float | None, complaint: str | None = None) -> FileOutcome:
    base = Row(name, "forward", "tf32", "nchw", "direct", "", 1e-6, 1e-6, 1e-5, 0.0, None, None, 0.0, 9)
    times = (("forward", forward), ("step", step))
    rows = [
        replace(base, direction=d, complaint=complaint, aten_ms=ratio, haloconv_ms=ratio and 1.0) for d, ratio in times
    ]
    return FileOutcome(name, rows)


def test_fast_p_counts_files_that_are_correct_and_faster() -> None:
    outcomes = [
        outcome("a", 4.0, 0.5), outcome("b", 2.0, 2.5), outcome("c", 1.0, 1.5), outcome("d", 9.0, 9.0, "wrong"),
        FileOutcome("e", skipped="not ours"), FileOutcome("f", unusable="broken"),
    ]  # fmt: skip
    assert [fast_p(outcomes, "forward", p) for p in (1, 2)] == [(2, 4), (1, 4)]
    assert [fast_p(outcomes, "step", p) for p in (1, 2)] == [(2, 4), (1, 4)]
    assert geometric_mean(outcomes, "forward") == pytest.approx(2.0)
    assert scores(outcomes)["forward"] == {"fast_1": 0.5, "fast_2": 0.25, "geometric_mean": 2.0}
    assert score_lines(outcomes) == [
        "3 of 4 files correct, 1 skipped, 1 unusable.",
        "forward: fast_1 2/4, fast_2 1/4, geometric mean 2.00x of PyTorch's speed",
        f"step: fast_1 2/4, fast_2 1/4, geometric mean {math.prod((0.5, 2.5, 1.5)) ** (1 / 3):.2f}x of PyTorch's speed",
    ]


def test_files_that_were_not_timed_have_no_score() -> None:
    assert score_lines([outcome("a", None, None)]) == ["1 of 1 files correct."]
    assert scores([FileOutcome("a", skipped="x")])["step"] == {"fast_1": None, "fast_2": None, "geometric_mean": None}


# --- the examples


def test_examples_are_problems() -> None:
    assert len(EXAMPLES) == 8 and all(candidate.reason is None for candidate in candidates([EXAMPLES[0].parent]))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_legal_at_full_size(path: Path) -> None:
    with torch.device("meta"):
        file = load_problem_file(path)
        y = file.model()(*file.inputs())
    assert y.numel() > 10_000_000


@pytest.fixture(scope="module")
def small_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example files with one image of 20x23 pixels."""
    folder = tmp_path_factory.mktemp("kernelbench")
    for path in EXAMPLES:
        text, batches = re.subn(r"^batch_size = \d+$", "batch_size = 1", path.read_text("utf-8"), flags=re.M)
        sizes = re.compile(r"^height(?: = width = \d+|, width = \d+, \d+)$", re.M)
        text, extents = sizes.subn("height, width = 20, 23", text)
        assert batches == extents == 1
        (folder / path.name).write_text(text)
    return folder


def test_examples_pass(small_examples: Path, tmp_path: Path) -> None:
    result = run(small_examples, "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    assert "8 of 8 files correct." in words(result)
    for speed in ("geometric mean", "fast_1", "TFLOP", "ratio", " ms"):
        assert speed not in result.output, "a time on a CPU says nothing about the kernels"
    assert "on a GPU every row is also timed" in words(result)


@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
def test_an_example_passes_on_the_emulator(small_examples: Path, tmp_path: Path) -> None:
    """One of them: the kind with two layers, which no other test takes the whole way."""
    rows = tmp_path / "rows.json"
    result = run(small_examples / "depthwise_separable.py", "--device", "emulator", "--json", rows)
    assert result.exit_code == 0, result.output
    content = json.loads(rows.read_text())
    assert all(row["error"] > 0 and row["family"] not in ("", "aten") for row in content["rows"])
    assert {file["verdict"] for file in content["files"]} == {"passed"}
    assert content["scores"]["forward"] == {"fast_1": None, "fast_2": None, "geometric_mean": None}
