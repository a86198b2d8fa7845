"""The sanitizer's driver compiles what its calls load and no more; tools/sanitize.py says what each tool really did."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from haloconv.env import DeviceFacts
from haloconv.families.direct import direct
from haloconv.families.halo_sm80 import conv
from haloconv.families.halo_sm80_wgrad import wgrad
from haloconv.jit import cache
from haloconv.problem import Request, TensorForm
from tests import oracle
from tests.cases import pick
from tests.families import DIRECT, HALO_SM90, SPECIALS, SUBJECTS, Subject
from tests.gpu import sanitizer_driver as driver
from tests.texts import compile_all, noted_texts
from tests.tilings import chosen_sources
from tools import make_stamps, sanitize

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")


# the calls and their texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", (*SUBJECTS, *SPECIALS), ids=str)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_part_of_the_calls_meets_every_case_dtype_and_result(subject: Subject, every: int) -> None:
    calls, whole = driver.calls_of(subject, every), driver.calls_of(subject)
    assert len(set(calls)) == len(calls) and set(calls) <= set(whole)
    alone = list(Counter(call.one.name for call in whole).values()).count(1)  # cases of one call are in every part
    assert len(whole) / every - 2 <= len(calls) <= (len(whole) - alone) / min(every, 2) + alone + 2
    assert {call.one.name for call in calls} == {one.name for one, _ in driver.results_of(subject)}
    for kind in ("dtype", "result"):
        assert {getattr(call, kind) for call in calls} == {getattr(call, kind) for call in whole}


MAIN = {
    "direct": "direct/direct",
    "halo_sm80": "halo_sm80/conv",
    "halo_sm80_wgrad": "halo_sm80_wgrad/wgrad",
    "halo_sm90": "halo_sm90/conv",
    "grouped_sm90": "grouped_sm90/conv",
    "depthwise_window": "depthwise_window/window",
    "depthwise_toeplitz": "depthwise_toeplitz/toeplitz",
    "depthwise": "",
}  # the kernel that takes every call of a family


def expected_texts(call: driver.Call) -> set[str]:
    """The text of the one tiling that is chosen for a call, by the families' own functions."""
    one, t = call.one, driver.placed(call, "cpu")[1]
    first, second = {"fprop": (t.x, t.w), "dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x)}[call.result]
    forms = [TensorForm(each.stride(), each.data_ptr() % 16 == 0) for each in (first, second)]
    layout = oracle.layout_of(one.w_storage if call.result == "wgrad" else one.storage)
    problem = oracle.problem_of(call.result, t, one.spec)
    request = Request(problem, *forms, layout, torch.device("cpu"))
    if one.spec.family == "halo_sm80":
        with noted_texts(H200):
            seen, tiling = conv.configs(request)[0].derived
        return {conv.source(seen.problem, tiling).digest}
    if one.spec.family == "halo_sm90":
        return {source.digest for source in chosen_sources(request)}
    if one.spec.family == "halo_sm80_wgrad":
        with noted_texts(H200):
            derived = wgrad.configs(request)[0].derived
        return {wgrad.source(*derived).digest}
    return {direct.source(request, direct.best_tiling(problem, H200.max_smem_bytes)).digest}


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_each_call_needs_the_chosen_tiling_alone(subject: Subject) -> None:
    for call in driver.calls_of(subject):
        texts = driver.texts_of([call], H200)
        if call.result == "bgrad":
            assert sorted(text.entry for text in texts) in (["bgrad"], ["bgrad_parts", "sum_partials"])
            continue
        own = {text.digest for text in texts if text.kernel == MAIN[subject.name]}
        assert own == expected_texts(call)
        beside = {text.entry for text in texts if text.kernel != MAIN[subject.name]}
        assert beside <= {"halo_sm80_pack", "halo_sm90_pack", "halo_sm90_fixup", "halo_sm90_sum", "sum_partials"}


@pytest.mark.parametrize("subject", SPECIALS, ids=str)
def test_special_families_take_all_calls(subject: Subject) -> None:
    texts = driver.texts_of(driver.calls_of(subject), H200)
    assert {text.kernel for text in texts} >= {MAIN[subject.name]} or subject.name == "depthwise"


def test_texts_are_noted_once_and_nothing_else_is_left_behind() -> None:
    call = driver.Call(DIRECT.on(*pick("one_row"), torch.float32), torch.float32, "fprop")
    assert len(driver.texts_of([call, call], H200)) == 1
    with noted_texts(H200), pytest.raises(RuntimeError, match="already"), noted_texts(H200):
        pass
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        oracle.run("fprop", driver.placed(call, "cpu")[1], call.one)


def test_compile_only_leaves_nothing_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HALOCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HALOCONV_CACHE", raising=False)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(driver, "device_facts", lambda index: H200)
    one, dtype = pick("one_pixel_output")[0], torch.float16
    calls = [driver.Call(each.on(one, dtype), dtype, "fprop") for each in (DIRECT, HALO_SM90)]
    driver.compile_only(calls)
    assert "2 calls noted" in capsys.readouterr().out
    monkeypatch.setattr(cache, "_in_memory", {})
    before = cache.statistics()
    texts = [*driver.texts_of(calls, H200), driver.PLANTED]
    compile_all(texts, "sm_90a")
    after = cache.statistics()
    assert len(texts) == 4  # two kernels, the packing of one, and the planted fault
    assert after.compiles == before.compiles and after.disk_hits == before.disk_hits + len(texts)


# tools/sanitize.py --------------------------------------------------------------------------------------------------


def output(asked: int = 12, of: int = 12, made: int = 12, end: str = "ERROR SUMMARY: 0 errors") -> str:
    lines = (f"{asked} of {of} calls", "10 calls so far", f"{made} calls checked, 0 kernels compiled")
    return "\n".join([*(f"sanitizer driver: {line}" for line in lines), f"========= {end}"])


@pytest.mark.parametrize(
    ("code", "text", "clean", "says"),
    [
        (0, output(), True, "0 findings in 12 calls"),
        (0, output(end="RACECHECK SUMMARY: 0 hazards displayed"), True, "0 findings in 12 calls"),
        (0, output(of=36), True, "0 findings in 12 of 36 calls"),
        (9, output(end="ERROR SUMMARY: 3 errors"), False, "3 findings in 12 calls"),
        (0, output(end="RACECHECK SUMMARY: 1 hazard displayed"), False, "1 findings in 12 calls"),
        (0, output(made=11), False, "the driver failed (exit code 0) in 11 of 12 calls"),
        (0, output(0, 0, 0), False, "the driver failed (exit code 0) in 0 calls"),
        (0, "========= ERROR SUMMARY: 0 errors", False, "the driver failed (exit code 0) in 0 calls"),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors", False, "the driver failed (exit code 1) in 0 calls"),
        (124, "stopped after 150 s", False, "out of time in 0 calls"),
        (124, output().partition("12 calls checked")[0], False, "out of time in 10 of 12 calls"),
        (0, output(end=""), False, "did not finish (exit code 0) in 12 calls"),
    ],
)  # fmt: skip
def test_output_is_judged_strictly(code: int, text: str, clean: bool, says: str) -> None:
    verdict = sanitize.judge(code, text)
    assert verdict.clean is clean and verdict.text == says


def test_the_driver_prints_what_the_judge_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(driver, "placed", lambda call, device: (None, None))
    monkeypatch.setattr(driver.oracle, "run", lambda *arguments: torch.zeros(()))
    monkeypatch.setattr(driver.oracle, "check", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = driver.calls_of(DIRECT, 3)
    driver.check_all(calls, 324)
    verdict = sanitize.judge(0, capsys.readouterr().out + "========= ERROR SUMMARY: 0 errors\n")
    assert verdict == (f"0 findings in {len(calls)} of 324 calls", True, len(calls), 324)


def test_each_tool_has_its_own_time_and_calls() -> None:
    options = sanitize.options_of(["--timeout", "200", "--limit", "initcheck=400", "--every", "initcheck=3"])
    jobs = sanitize.jobs_of("/bin/compute-sanitizer", options, ["direct", "halo_sm90"])
    names = {sanitize.Name(tool, family) for tool in sanitize.TOOLS for family in ("direct", "halo_sm90")}
    assert set(jobs) == {*names, sanitize.PLANTED}
    assert {name for name, job in jobs.items() if job.limit_s == 400} == {
        name for name in names if name.tool == "initcheck"
    }
    assert jobs["initcheck", "direct"].command[-4:] == ["--family=direct", "--every", "3", "--fill"]
    assert jobs["memcheck", "halo_sm90"].command[-3:] == ["--family=halo_sm90", "--every", "1"]
    assert jobs[sanitize.PLANTED].command[-1] == "--plant-fault"


@pytest.mark.parametrize("text", ["initcheck", "initcheck=0", "initcheck=x", "other=3"])
def test_wrong_numbers_for_a_tool_are_refused(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        sanitize.options_of(["--every", text])
    assert "TOOL=NUMBER" in capsys.readouterr().err


LATE, QUICK = sanitize.Name("memcheck", "late"), sanitize.Name("memcheck", "quick")


def test_no_more_jobs_than_asked_for_run_side_by_side(tmp_path: Path) -> None:
    note = "import sys, time; print(time.monotonic()); time.sleep(0.3); print(time.monotonic())"
    jobs = {name: sanitize.Job([sys.executable, "-c", note], 30.0) for name in (LATE, QUICK)}
    ended = sanitize.execute(jobs, dict(os.environ), str(tmp_path))
    assert float(ended[LATE].output.split()[1]) < float(ended[QUICK].output.split()[0])


def test_a_late_job_is_stopped_with_its_children_and_its_output_kept(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    late = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    jobs = {
        LATE: sanitize.Job([sys.executable, "-c", late], 1.5),
        QUICK: sanitize.Job([sys.executable, "-c", "print('done'); raise SystemExit(3)"], 30.0),
    }
    start = time.monotonic()
    ended = sanitize.execute(jobs, dict(os.environ), str(tmp_path), 2)
    assert time.monotonic() - start < 20
    assert ended[QUICK].code == 3 and ended[QUICK].output == "done\n" and list(ended) == [QUICK, LATE]
    code, printed, seconds = ended[LATE]
    assert code == sanitize.OUT_OF_TIME and printed.endswith("stopped after 2 s") and 1.5 <= seconds < 10
    assert not is_running(int(printed.split()[0]))


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie that nobody has waited for."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_the_report_and_the_stamp_say_how_many_calls_each_tool_made(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, planted = tmp_path / "build" / "sanitizer.json", "Invalid __global__ write"
    hashes = {"direct": "abc", "halo_sm90": "def"}
    ended = {
        sanitize.Name("memcheck", "direct"): sanitize.Ended(0, output(), 61.26),
        sanitize.Name("initcheck", "direct"): sanitize.Ended(0, output(of=36), 80.0),
        sanitize.Name("memcheck", "halo_sm90"): sanitize.Ended(0, output(), 60.0),
    }
    assert sanitize.report(ended, planted, hashes, path) == 0
    assert "direct, initcheck: 0 findings in 12 of 36 calls, 80 s\n" in capsys.readouterr().out
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["clean"] and record["planted_fault_found"]
    assert record["families"]["direct"]["tools"]["initcheck"] == {
        "verdict": "0 findings in 12 of 36 calls", "clean": True, "calls": 12, "of_calls": 36, "seconds": 80.0,
        "kernels_compiled": 0,
    }  # fmt: skip
    text = make_stamps.sanitizer_text(make_stamps.sanitizer_of(record, "direct", "abc"))
    assert text == "memcheck: 0 findings in 12 calls, initcheck: 0 findings in 12 of 36 calls"
    assert sanitize.report(ended, "nothing", hashes, path) == 1


def test_one_familys_finding_does_not_count_for_another(tmp_path: Path) -> None:
    path = tmp_path / "sanitizer.json"
    ended = {
        sanitize.Name("memcheck", "direct"): sanitize.Ended(0, output(), 60.0),
        sanitize.Name("racecheck", "depthwise"): sanitize.Ended(124, "stopped", 80.0),
    }
    hashes = {"direct": "abc", "depthwise": "def"}
    assert sanitize.report(ended, "Invalid __global__ write", hashes, path) == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert not record["clean"]
    assert record["families"]["direct"]["clean"] and not record["families"]["depthwise"]["clean"]
