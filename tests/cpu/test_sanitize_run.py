"""tools/sanitize.py from end to end, with a program in the sanitizer's place: what it runs, keeps, and says is left."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.families import Subject
from tests.gpu import sanitizer_driver as driver
from tools import sanitize
from tools.result_lines import read_lines
from tools.sanitizer_results import TOOLS, SanitizerResults, is_clean
from tools.stamps import all_hashes

FAKE = """#!{python}
import sys
arguments = dict(each.split("=", 1) for each in sys.argv if each.startswith("--") and "=" in each)
if "--plant-fault" in sys.argv:
    print("========= Invalid __global__ write of size 4 bytes")
    sys.exit(9)
if "--alternating" in sys.argv:
    print("========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)")
    sys.exit(9)
count = len(arguments["--only"].split(","))
tool = sys.argv[sys.argv.index("--tool") + 1]
print(f"sanitizer driver: {{count}} calls asked for")
print(f"sanitizer driver: {{count}} calls checked, 0 kernels compiled")
print("========= ERROR SUMMARY: 0 errors" if tool != "{broken}" else "========= ERROR SUMMARY: 2 errors")
"""
FAMILIES = ("depthwise_toeplitz", "halo_sm90")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[driver.Call]:
    """The calls of two families, on a machine that seems to have a GPU for them."""
    monkeypatch.setattr(Subject, "missing", lambda self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "environment_stamp", lambda: {"gpu": "a GPU"})
    found = driver.calls_here(FAMILIES)
    kernels = {call.name: [f"{call.one.spec.family}/{'wgrad' if call.result == 'wgrad' else 'conv'}"] for call in found}
    names = {"depthwise_toeplitz/conv": "depthwise_toeplitz/toeplitz"}
    kernels = {name: [names.get(kernel, kernel) for kernel in each] for name, each in kernels.items()}

    def compile_and_note(families: list[str], *_: object) -> dict[str, list[str]]:
        return {name: each for name, each in kernels.items() if name.split()[0] in families}

    monkeypatch.setattr(sanitize, "compile_and_note", compile_and_note)
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[driver.Call]) -> Callable[..., int]:
    """``run(*arguments, broken=TOOL, hazards=N)``: the exit code of the program.

    That tool finds something in every call; racecheck, hazards in the program that is right.
    """
    fake = tmp_path / "compute-sanitizer"

    def go(*arguments: str, broken: str = "none", hazards: int = 3) -> int:
        fake.write_text(FAKE.format(python=sys.executable, broken=broken, hazards=hazards))
        fake.chmod(0o755)
        monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(fake))
        given = ["sanitize", f"--out={tmp_path / 'found.jsonl'}", "--jobs=2", *arguments]
        monkeypatch.setattr(
            sys, "argv", [*given, *(f"--family={name}" for name in FAMILIES if "--family" not in given)]
        )
        return sanitize.main()

    return go


def lines_of(folder: Path, kind: str) -> list[dict]:
    return [line for line in read_lines([folder / "found.jsonl"]) if line["kind"] == kind]


def test_every_tool_meets_every_call_once_and_what_was_clean_is_kept(
    run: Callable[..., int], calls: list[driver.Call], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("--calls=60", broken="racecheck") == 1
    made = Counter((job["tool"], name) for job in lines_of(tmp_path, "job") for name in job["calls"])
    alternating = [call.name for call in calls if call.alternates]
    assert alternating and all("edges_joined" in name for name in alternating)
    wanted = Counter((tool, call.name) for tool in TOOLS for call in calls)
    assert made == wanted - Counter(("racecheck", name) for name in alternating)
    assert "halo_sm90/conv: initcheck: 0 findings in" in capsys.readouterr().out
    results, hashes = SanitizerResults(read_lines([tmp_path / "found.jsonl"])), all_hashes()
    assert not is_clean(results.of_kernel("halo_sm90/conv", hashes["halo_sm90/conv"]))
    before = len(lines_of(tmp_path, "job"))
    assert run("--calls=60") == 0
    again = lines_of(tmp_path, "job")[before:]
    of_racecheck = sum(job["tool"] == "racecheck" for job in lines_of(tmp_path, "job")[:before])
    assert {job["tool"] for job in again} == {"racecheck"} and len(again) == of_racecheck
    results = SanitizerResults(read_lines([tmp_path / "found.jsonl"]))
    for kernel in ("halo_sm90/conv", "halo_sm90/wgrad", "depthwise_toeplitz/toeplitz", "depthwise_toeplitz/wgrad"):
        assert is_clean(results.of_kernel(kernel, hashes[kernel])), kernel
    assert run() == 0 and len(lines_of(tmp_path, "job")) == before + len(again)


def test_a_racecheck_that_knows_better_is_no_longer_kept_from_calls(
    run: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert run("--calls=60") == 0 and "alternating warps: racecheck takes them for a race\n" in capsys.readouterr().out
    assert run("--calls=60", hazards=0) == 1
    assert "alternating warps: NOT taken for a race: let racecheck meet" in capsys.readouterr().out


def test_what_the_time_was_too_short_for_is_said_to_be_left(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("--seconds=-1") == 1
    printed = capsys.readouterr().out
    assert "processes are left for another run" in printed and "calls left" in printed
    assert not lines_of(tmp_path, "job") and not lines_of(tmp_path, "planted")


def test_the_driver_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch, calls: list[driver.Call]) -> None:
    """The command that a process runs makes the calls that its line names."""
    made: list[tuple] = []
    monkeypatch.setattr(driver, "check_all", lambda calls, fill: made.append(([call.name for call in calls], fill)))
    kernels = {call.name: ["halo_sm90/conv"] for call in calls}
    plan = sanitize.plan_of(kernels, list(FAMILIES), {"initcheck": 3})
    parts = sanitize.parts_of(plan, SanitizerResults([]), 25)
    jobs = sanitize.jobs_of("sanitizer", sanitize.options_of([]), parts)
    for index, part in enumerate(parts):
        command = jobs[str(index)].command
        monkeypatch.setattr(sys, "argv", command[command.index("tests.gpu.sanitizer_driver") :])
        driver.main()
        assert made.pop() == (list(part.calls), part.tool == "initcheck")
    assert json.loads(json.dumps(plan)) == plan
