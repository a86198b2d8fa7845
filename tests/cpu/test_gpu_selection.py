"""How a run of the GPU tests is cut: by family for a stamp, by unit for the workers of pytest-xdist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from haloconv.families import FAMILIES
from tests.gpu import sanitizer_driver as driver
from tests.gpu.conftest import unit_of
from tools import sanitize

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("test", "unit"),
    [
        ("test_cases.py::test_case[halo_sm90-one_row-fp16-fprop]", "test_cases.py fp16 halo_sm90"),
        ("test_cases.py::test_results_have_the_layout_asked_for[direct-one_row]", "test_cases.py direct fp32"),
        ("test_redzones.py::test_fences_stay_intact[one_row-direct-bf16]", "test_redzones.py bf16 direct"),
        ("test_large.py::test_offsets[halo_sm80-fp32]", "test_large.py"),
        ("test_grouped.py::test_run[halo_sm80-a-fp16]", "test_grouped.py::test_run[halo_sm80-a-fp16]"),
    ],
)
def test_tests_that_share_kernels_go_to_one_worker(test: str, unit: str) -> None:
    assert unit_of(f"tests/gpu/{test}") == f"tests/gpu/{unit}"


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_redzones.py", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_a_run_for_one_family_leaves_out_the_others() -> None:
    every, ours = collected(), collected("--family", "halo_sm80")
    assert ours == [name for name in every if re.search(r"[-\[]halo_sm80[-\]]", name)]
    assert 0 < len(ours) < len(every)


def test_a_run_for_a_family_that_nobody_chooses_runs_those_that_launch_it() -> None:
    ours = collected("--family", "reduce")
    assert ours and ours == collected("--family", "direct")


@pytest.mark.parametrize(
    ("wanted", "families"),
    [
        (["depthwise"], ["depthwise"]), (["reduce"], ["direct"]),
        (["reduce", "halo_sm90", "direct"], ["direct", "halo_sm90"]),
        ([], sorted(name for name in FAMILIES if name != "aten")),
    ],
)  # fmt: skip
def test_the_sanitizer_makes_the_calls_that_a_familys_stamps_need(wanted: list[str], families: list[str]) -> None:
    assert sanitize.families_of(wanted) == families


def test_the_driver_makes_the_calls_of_the_families_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Subject, "missing", lambda self: "")
    calls = driver.calls_here(["depthwise"])
    assert calls and {call.one.spec.family for call in calls} == {"depthwise"}
    both = driver.calls_here(["depthwise", "direct"])
    assert {call.one.spec.family for call in both} == {"depthwise", "direct"} and len(both) > len(calls)
    monkeypatch.setattr(driver.Subject, "missing", lambda self: "another GPU" if self.name == "direct" else "")
    assert driver.calls_here(["depthwise", "direct"]) == calls
