"""``haloconv run --device emulator``: our kernels on a machine without a GPU, what it reports, and when it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv import emulator, plan
from haloconv.bench.emulation.emulated import EmulatedLayer
from haloconv.bench.emulation.model import Modelled
from haloconv.bench.emulation.traffic import Launched, conflict_table, traffic_table
from haloconv.bench.trial import UNTIMED, try_step
from haloconv.emulator import LaunchStatistics, SiteStatistics
from haloconv.problem import ConvSpec, Problem
from tests.mutations import MUTATIONS
from tests.mutations.mutation import planted
from tests.verbs import run, words

MISSING = emulator.available()
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
pytestmark = pytest.mark.usefixtures("emulator_cache", "without_gpu")

PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (3, 4), padding=(1, 2), dilation=(1, 2))

    def forward(self, x):
        return torch.relu(self.conv(x))

def get_inputs():
    return [torch.rand(2, 3, 60, 61)]

def get_init_inputs():
    return []
"""
STEPS = {"fprop", "dgrad", "wgrad", "bgrad", "forward", "step"}


@pytest.fixture
def problem(tmp_path: Path) -> str:
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return str(path)


def content_of(folder: Path, *arguments: str) -> dict:
    result = run(*arguments, "--device", "emulator", "--json", str(folder / "rows.json"), "--force")
    assert result.exit_code == 0, result.output
    return json.loads((folder / "rows.json").read_text())


@needs_emulator
def test_our_kernels_run_and_are_checked(problem: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    content = content_of(tmp_path, problem, "--html", str(page))
    rows = {row["direction"]: row for row in content["rows"]}
    assert content["passed"] and set(rows) == STEPS and "launches" not in content
    assert rows["fprop"]["family"] == rows["dgrad"]["family"] == "halo_sm90" and rows["fprop"]["precision"] == "tf32"
    assert rows["wgrad"]["family"] == "direct" and rows["wgrad"]["precision"] == "fp32"
    assert rows["bgrad"]["family"] == "reduce" and rows["forward"]["family"] == "direct"
    assert rows["step"]["family"] == "direct+reduce"
    assert rows["step"]["precision"] == "fp32" and rows["step"]["error_limit"] < 1e-5
    assert all(row["haloconv_ms"] is None and row["aten_ms"] is None and row["ratio"] is None for row in rows.values())
    assert 1e-5 < rows["fprop"]["error"] < rows["fprop"]["error_limit"] == 5e-4
    assert rows["wgrad"]["error"] < rows["wgrad"]["error_limit"] < 1e-5
    assert any("Kernels that ran: halo_sm90 and direct and reduce, in " in note for note in content["notes"])
    assert any("inputs cut from (2, 3, 60, 61)" in note for note in content["notes"])
    text = page.read_text()
    assert "problem (model)" in text and "<h2>Times</h2>" not in text and "ratio" not in text.split("</style>")[1]
    assert ">Emulated launches: bytes moved, and multiplies on tensor cores</h2>" in text
    assert ">Bank conflicts: passes of a warp" in text and "families/direct/direct.cu:" in text


@needs_emulator
def test_precision_and_family_are_those_asked_for(problem: str, tmp_path: Path) -> None:
    for options in (("--precision", "ieee"), ("--family", "direct")):
        rows = content_of(tmp_path, problem, *options)["rows"]
        families = {row["direction"]: row["family"] for row in rows}
        assert (families.pop("bgrad"), families.pop("step")) == ("reduce", "direct+reduce")
        assert {*families.values()} == {"direct"} and {row["precision"] for row in rows} == {"fp32"}


@needs_emulator
def test_the_cost_model_of_another_kernel_is_held_against_no_launch(tmp_path: Path) -> None:
    layer = "nn.Conv2d(3, 5, (3, 4), padding=(1, 2), dilation=(1, 2))"
    file = tmp_path / "one_pixel.py"
    file.write_text(PROBLEM.replace(layer, "nn.Conv2d(16, 64, 1)").replace("(2, 3, 60, 61)", "(1, 16, 8, 8)"))
    launches = content_of(tmp_path, file, "--stats", "--family", "halo_sm90")["launches"]
    found = {launch["kernel"]: launch for launch in launches if launch["direction"] == "fprop"}
    assert found["halo_sm90_pointwise"]["multiplies"] > 0
    assert all(launch["modelled_multiplies"] is None for launch in found.values())


@needs_emulator
def test_statistics(problem: str, tmp_path: Path) -> None:
    launches = content_of(tmp_path, problem, "--stats")["launches"]
    kernels = {(launch["direction"], launch["kernel"]) for launch in launches}
    assert {("fprop", "halo_sm90"), ("wgrad", "direct_wgrad"), ("bgrad", "bgrad")} <= kernels
    main = {launch["direction"]: launch for launch in launches if launch["kernel"] in ("halo_sm90", "direct_wgrad")}
    assert main["fprop"]["global_write_bytes"] == 4 * 5 * 34 * 32  # the output, once
    assert main["fprop"]["multiplies"] >= main["fprop"]["problem_multiplies"] > 0
    for direction in ("fprop", "dgrad"):  # the cost model counts exactly what the tensor cores and TMA do
        own = [launch for launch in launches if (launch["direction"], launch["kernel"]) == (direction, "halo_sm90")]
        assert sum(launch["multiplies"] for launch in own) == own[0]["modelled_multiplies"] > 0
        assert sum(launch["async_read_bytes"] for launch in own) == own[0]["modelled_copied_bytes"] > 0
    assert main["wgrad"]["modelled_multiplies"] is None
    assert main["wgrad"]["multiplies"] == 0 and main["wgrad"]["shared_read_bytes"] > 0
    assert all(site["degree"] >= 1 for launch in launches for site in launch["sites"])
    output = words(run(problem, "--device", "emulator", "--stats"))
    assert "Emulated launches" in output and "halo_sm90_pack" in output


@needs_emulator
def test_seed_fixes_tensors_and_schedule(problem: str, tmp_path: Path) -> None:
    errors = []
    for seed in ("3", "3", "4"):
        rows = content_of(tmp_path, problem, "--seed", seed)["rows"]
        errors.append([row["error"] for row in rows])
    assert errors[0] == errors[1] != errors[2]


@needs_emulator
@pytest.mark.parametrize("name", ["no barrier between stages", "the last row is not written"])
def test_planted_faults_fail(problem: str, name: str) -> None:
    """A finding of the emulator, and a wrong result: both end with exit code 1 and a sentence."""
    (mutation,) = (one for one in MUTATIONS if one.name == name)
    with planted(mutation):
        result = run(problem, "--device", "emulator", "--family", "direct", "--seed", "5")
    assert result.exit_code == 1, result.output
    assert "FAILED problem fprop: " in words(result) and "FAILED problem (model) " in words(result)
    if name.startswith("no barrier"):
        assert "race at" in words(result) and "emulated_device(seed=5)" in words(result)


def test_without_a_compiler_it_says_so(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "available", lambda: "the emulator builds kernels with g++, which is not installed")
    result = run(problem, "--device", "emulator", "--stats")
    assert result.exit_code == 2, "PyTorch's own convolution would be compared with itself, and pass"
    assert "--device emulator: the emulator builds kernels with g++, which is not installed" in words(result)
    assert "passed" not in result.output


def test_statistics_need_the_emulator(problem: str) -> None:
    result = run(problem, "--stats")
    assert result.exit_code == 2 and "add --device emulator" in words(result)


# Tables -------------------------------------------------------------------------------------------------------------

COUNTERS = ("global_read", "global_write", "shared_read", "shared_write", "async_read", "async_write")


def launched(entry: str, degree: float, multiplies: int = 0, step: str = "fprop") -> Launched:
    counters = {f"{name}_bytes": 1000 * 2**i for i, name in enumerate(COUNTERS)} | {"multiplies": multiplies}
    sites = (
        SiteStatistics("a.cuh:7", False, 64, 256, 2, degree, 4.0),
        SiteStatistics("a.cuh:9", True, 64, 256, 2, 1.0, 1.0),
    )
    problem = None if step == "bgrad" else Problem("fprop", 1, 4, 8, 8, 4, 1, 1)
    return Launched("layer", step, problem, LaunchStatistics(entry, 3, 128, counters, sites))


def column(table: object, head: str) -> list[str]:
    (found,) = (each for each in table.columns if each.header.replace("\n", " ") == head)
    return list(found.cells)


def test_ratios_are_those_of_all_launches_of_a_direction() -> None:
    table = traffic_table([launched("pack", 1.0), launched("main", 1.0, 2048), launched("sum", 1.0, 0, "bgrad")])
    problem = Problem("fprop", 1, 4, 8, 8, 4, 1, 1)
    moved = 2 * (1000 + 2000 + 16000 + 32000)
    assert column(table, "of the tensors") == ["", f"{moved / problem.bytes:.2f}x", "–"]
    assert column(table, "of the definition") == ["", "2.00x", "–"]
    assert column(table, "global read") == ["1 kB"] * 3 and column(table, "async written") == ["32 kB"] * 3


def test_ratio_to_the_model() -> None:
    seen = launched("main", 1.0, 2048)
    assert column(traffic_table([seen]), "of the model") == ["–"]
    assert column(traffic_table([replace(seen, modelled=Modelled(1024, 1))]), "of the model") == ["2.00x"]


def test_conflicts_are_listed_worst_first_or_not_at_all() -> None:
    assert conflict_table([launched("main", 1.0)]) is None
    table = conflict_table([launched("main", 1.5), launched("other", 2.5)])
    assert column(table, "line") == ["a.cuh:7"] * 2 and column(table, "passes") == ["1.50", "2.50"]
    assert column(table, "access") == ["read"] * 2 and column(table, "worst") == ["4.00"] * 2


@needs_emulator
def test_in_tf32_rounding_alone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum of 27 products, of which much cancels; what errs by more than the rounding of its operands is wrong."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((1, 3, 3, 3), (1, 3, 3, 3), (1, 1, 1, 1)))
    layer = EmulatedLayer("one", x, w, None, dy, ConvSpec(precision="tf32"))
    row = try_step(layer, "fprop", UNTIMED)
    assert row.precision == "tf32" and row.error > 1e-3 and row.passed
    right = plan.fprop
    monkeypatch.setattr(plan, "fprop", lambda *arguments: right(*arguments) * 1.01)
    assert not try_step(layer, "fprop", UNTIMED).passed
