"""The sanitizer's driver compiles what its calls load and no more; tools/sanitize.py says what each tool really did."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from haloconv.device import DeviceFacts
from haloconv.families.direct import direct
from haloconv.families.halo_sm80 import conv
from haloconv.families.halo_sm80_wgrad import wgrad
from haloconv.jit import cache
from haloconv.problem import Request, TensorForm
from tests import oracle
from tests.cases import pick
from tests.conformance import on_emulator
from tests.families import DIRECT, FACTS, HALO_SM90, SPECIALS, SUBJECTS, Subject
from tests.gpu import sanitizer_driver as driver
from tests.measured import MOMENTS, check_measured, on_cpu, with_moments
from tests.sources import compile_all, noted_sources
from tests.tilings import chosen_sources
from tools import sanitize, stamps
from tools.jobs import Ended
from tools.result_lines import append_line, read_lines
from tools.sanitizer_results import TOOLS, SanitizerResults, in_words, is_clean, total_calls

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
MAIN_RESULTS = ("fprop", "dgrad")


# the calls and their sources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", (*SUBJECTS, *SPECIALS), ids=str)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_part_of_the_calls_meets_every_case_dtype_and_result(subject: Subject, every: int) -> None:
    calls, whole = driver.calls_of(subject, every), driver.calls_of(subject)
    assert len(set(calls)) == len(calls) and set(calls) <= set(whole)
    alone = list(Counter((call.one.name, call.shape) for call in whole).values()).count(1)  # which are in every part
    assert len(whole) / every - 2 <= len(calls) <= (len(whole) - alone) / min(every, 2) + alone + 2
    assert {call.one.name for call in calls} == {tiny.one.name for tiny in driver.problems_of(subject)}
    assert len({call.name for call in whole}) == len(whole)
    for kind in ("dtype", "result"):
        assert {getattr(call, kind) for call in calls} == {getattr(call, kind) for call in whole}


def expected_digests(call: driver.Call) -> set[str]:
    """The source's digest of the one tiling that is chosen for a call, by the families' own functions."""
    one, t = call.one, driver.placed(call, "cpu")[1]
    first, second = {"dgrad": (t.dy, t.w), "wgrad": (t.dy, t.x)}.get(call.result, (t.x, t.w))
    forms = [TensorForm(each.stride(), each.data_ptr() % 16 == 0) for each in (first, second)]
    layout = oracle.layout_of(one.w_storage if call.result == "wgrad" else one.storage)
    problem = oracle.problem_of(call.result, t, one.spec)
    request = Request(problem, *forms, layout, torch.device("cpu"))
    if one.spec.family == "halo_sm80":
        with noted_sources(H200):
            seen, tiling = conv.configs(request)[0].derived
        return {conv.source(seen.problem, tiling).digest}
    if one.spec.family == "halo_sm90":
        return {source.digest for source in chosen_sources(request)}
    if one.spec.family == "halo_sm80_wgrad":
        with noted_sources(H200):
            derived = wgrad.configs(request)[0].derived
        return {wgrad.source(*derived).digest}
    return {direct.source(request, direct.best_tiling(problem, H200.max_smem_bytes)).digest}


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_each_call_needs_the_chosen_tiling_alone(subject: Subject) -> None:
    for call in (each for each in driver.calls_of(subject) if each.one.name in {one.name for one in driver.TINY}):
        sources = driver.note([call], H200).sources
        if call.result == "bgrad":
            assert sorted(source.entry for source in sources) in (["bgrad"], ["bgrad_parts", "sum_partials"])
            continue
        own = {source.digest for source in sources if source.kernel == FACTS[subject.name].main}
        assert own == expected_digests(call)
        beside = {source.entry for source in sources if source.kernel != FACTS[subject.name].main}
        assert beside <= {"halo_sm80_pack", "halo_sm90_pack", "halo_sm90_fixup", "sum_partials"}


@pytest.mark.parametrize("subject", SPECIALS, ids=str)
def test_special_families_take_all_calls(subject: Subject) -> None:
    sources = driver.note(driver.calls_of(subject), H200).sources
    assert {source.kernel for source in sources} >= {FACTS[subject.name].main} - {""}


def test_every_kernel_is_launched_by_a_call_of_the_families_that_verify_it() -> None:
    calls = [call for subject in (*SUBJECTS, *SPECIALS) for call in driver.calls_of(subject)]
    noted = driver.note(calls, H200).kernels
    assert len(noted) == len(calls) and all(noted.values())
    met = {kernel: {name.split()[0] for name in noted if kernel in noted[name]} for kernel in stamps.kernels()}
    for kernel, families in met.items():
        assert families & {*stamps.tested_by(kernel.split("/")[0])}, kernel


def test_values_that_are_not_finite_meet_the_fixup_of_halo_sm90() -> None:
    calls = [call for call in driver.calls_of(HALO_SM90) if not call.finite]
    assert {(call.dtype, call.result) for call in calls} == set(product((torch.float32, torch.float16), MAIN_RESULTS))
    for call in calls:
        here, there = driver.placed(call, "cpu")
        assert not here.x.isfinite().all() and not there.dy.isfinite().all()
        assert "halo_sm90/fixup" in {source.kernel for source in driver.note([call], H200).sources}, call.name


def test_sources_are_noted_once_and_nothing_else_is_left_behind() -> None:
    call = driver.Call(DIRECT.on(*pick("one_row"), torch.float32), torch.float32, "fprop")
    noted = driver.note([call, call], H200)
    assert len(noted.sources) == 1 and noted.kernels == {"direct one_row fp32 fprop": ["direct/direct"]}
    with noted_sources(H200), pytest.raises(RuntimeError, match="already"), noted_sources(H200):
        pass
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        oracle.run("fprop", driver.placed(call, "cpu")[1], call.one)


def test_compile_leaves_nothing_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HALOCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HALOCONV_CACHE", raising=False)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(driver, "device_facts", lambda index: H200)
    one, dtype = pick("one_pixel_output")[0], torch.float16
    calls = [driver.Call(each.on(one, dtype), dtype, "fprop") for each in (DIRECT, HALO_SM90)]
    driver.compile_calls(calls, tmp_path / "calls.json")
    assert "2 calls noted" in capsys.readouterr().out
    assert json.loads((tmp_path / "calls.json").read_text(encoding="utf-8")) == {
        "direct one_pixel_output fp16 fprop": ["direct/direct"],
        "halo_sm90 one_pixel_output fp16 fprop": ["halo_sm90/conv"],
    }
    monkeypatch.setattr(cache, "_in_memory", {})
    before = cache.statistics()
    sources = [*driver.note(calls, H200).sources, driver.PLANTED, driver.conformance.BY_NAME["alternating"].source()]
    compile_all(sources, "sm_90a")
    after = cache.statistics()
    assert len(sources) == 5  # two kernels, the packing of one, the planted fault, and warps that write alternately
    assert after.compiles == before.compiles and after.disk_hits == before.disk_hits + len(sources)


def test_alternating_warps_are_no_race() -> None:
    """On the emulator, which tells of races: what racecheck says of them on a GPU is not so."""
    case = driver.conformance.BY_NAME["alternating"]
    setup = case.setup()
    for seed in range(3):
        (got,) = on_emulator.run(case, setup, seed)
        assert (got == setup.expected[0]).all()


# tools/sanitize.py --------------------------------------------------------------------------------------------------


UNTRACKED = (
    "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching halo_sm90 and didn't track "
    "the launch. Errors might go undetected. (Unable to allocate enough memory to perform the requested operation)"
)


def output(asked: int = 12, made: int = 12, end: str = "ERROR SUMMARY: 0 errors") -> str:
    lines = (f"{asked} calls asked for", "10 calls so far", f"{made} calls checked, 0 kernels compiled")
    return "\n".join([*(f"sanitizer driver: {line}" for line in lines), f"========= {end}"])


@pytest.mark.parametrize(
    ("code", "text", "clean", "says"),
    [
        (0, output(), True, "0 findings in 12 calls"),
        (0, output(end="RACECHECK SUMMARY: 0 hazards displayed"), True, "0 findings in 12 calls"),
        (9, output(end="ERROR SUMMARY: 3 errors"), False, "3 findings in 12 calls"),
        (0, output(end="RACECHECK SUMMARY: 1 hazard displayed"), False, "1 findings in 12 calls"),
        (9, f"{UNTRACKED}\n{UNTRACKED}\n" + output(end="ERROR SUMMARY: 3 errors"), False,
         "3 findings in 12 calls, 2 of them for want of GPU memory: take fewer --jobs"),
        (0, output(made=11), False, "the driver failed (exit code 0) in 11 of 12 calls"),
        (0, output(0, 0), False, "the driver failed (exit code 0) in 0 calls"),
        (0, "========= ERROR SUMMARY: 0 errors", False, "the driver failed (exit code 0) in 0 calls"),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors", False, "the driver failed (exit code 1) in 0 calls"),
        (124, "stopped after 150 s", False, "out of time in 0 calls"),
        (124, output().partition("12 calls checked")[0], False, "out of time in 10 of 12 calls"),
        (0, output(end=""), False, "did not finish (exit code 0) in 12 calls"),
    ],
)  # fmt: skip
def test_output_is_judged_strictly(code: int, text: str, clean: bool, says: str) -> None:
    assert sanitize.judge(code, text) == (says, clean)


def test_the_driver_prints_what_the_judge_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(driver, "placed", lambda call, device: (None, None))
    monkeypatch.setattr(driver.oracle, "run", lambda *arguments: torch.zeros(()))
    monkeypatch.setattr(driver.oracle, "check", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = driver.calls_of(DIRECT, 3)
    driver.check_all(calls)
    verdict = sanitize.judge(0, capsys.readouterr().out + "========= ERROR SUMMARY: 0 errors\n")
    assert verdict == (f"0 findings in {len(calls)} calls", True)


CALLS = {
    "direct a": {"kernels": ["direct/direct"], "tools": ["memcheck", "initcheck"]},
    "direct b": {"kernels": ["direct/direct", "reduce/partials"], "tools": ["memcheck"]},
    "direct c": {"kernels": ["direct/direct"], "tools": ["memcheck"]},
    "halo_sm90 a": {"kernels": ["halo_sm90/conv"], "tools": ["memcheck"]},
}
HASHES = {"direct/direct": "abc", "reduce/partials": "def", "halo_sm90/conv": "ghi"}


def plan(name: str = "1", calls: dict = CALLS, gpu: str = "a GPU", **hashes: str) -> dict:
    families = sorted({call.split()[0] for call in calls})
    about = {"environment": {"gpu": gpu}, "hashes": HASHES | hashes, "families": families, "calls": calls}
    return {"kind": "plan", "plan": name, **about}


def job(tool: str, *calls: str, clean: bool = True, of: str = "1") -> dict:
    verdict = f"{0 if clean else 2} findings in {len(calls)} calls"
    return {"kind": "job", "plan": of, "tool": tool, "calls": calls, "verdict": verdict, "clean": clean, "seconds": 1.0}


SEEN = {"kind": "planted", "plan": "1", "found": True}
DIRECT_CALLS = ("direct a", "direct b", "direct c")


def test_a_process_makes_calls_of_one_family_and_those_of_a_kernel_stand_together() -> None:
    parts = sanitize.parts_of(plan(), SanitizerResults([]), 2)
    assert parts == [
        ("memcheck", "direct", (0, 2), ("direct a", "direct c")), ("memcheck", "direct", (1,), ("direct b",)),
        ("memcheck", "halo_sm90", (0,), ("halo_sm90 a",)), ("initcheck", "direct", (0,), ("direct a",)),
    ]  # fmt: skip


def test_of_one_kernel_only_the_calls_that_launch_it_are_made() -> None:
    parts = sanitize.parts_of(plan(), SanitizerResults([]), 100, ["reduce/partials"])
    assert [(part.tool, part.numbers, part.calls) for part in parts] == [("memcheck", (1,), ("direct b",))]


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ([plan(), SEEN, job("memcheck", "direct a", "direct b")], {"direct c", "halo_sm90 a"}),
        ([plan(), job("memcheck", *CALLS)], {*CALLS}),
        ([plan(), SEEN | {"found": False}, job("memcheck", *CALLS)], {*CALLS}),
        ([plan(), SEEN, job("memcheck", *CALLS, clean=False)], {*CALLS}),
        ([plan(), SEEN, job("memcheck", *CALLS), job("memcheck", "direct a", clean=False)], {"direct a"}),
        ([plan(), SEEN, job("memcheck", "direct a", clean=False), job("memcheck", *CALLS)], set()),
        ([plan(**{"reduce/partials": "old"}), SEEN, job("memcheck", *CALLS)], {"direct b"}),
        ([plan(gpu="another"), SEEN, job("memcheck", *CALLS)], {*CALLS}),
        ([plan(), SEEN, job("racecheck", *CALLS)], {*CALLS}),
    ],
)
def test_what_was_clean_on_the_same_sources_is_not_run_again(before: list[dict], left: set[str]) -> None:
    parts = sanitize.parts_of(plan("2"), SanitizerResults(before), 100)
    assert {call for part in parts if part.tool == "memcheck" for call in part.calls} == left


def test_each_tool_has_its_own_time_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    options = sanitize.options_of(["--timeout", "200", "--limit", "initcheck=400", "--every", "initcheck=3"])
    monkeypatch.setattr(Subject, "missing", lambda self: None)
    whole, part = driver.calls_here(["direct"]), driver.calls_here(["direct"], 3)
    kernels = {call.name: ["direct/direct"] for call in whole}
    made = sanitize.plan_of(kernels, ["direct"], dict(options.every))
    tools = {tool: [name for name, about in made["calls"].items() if tool in about["tools"]] for tool in TOOLS}
    assert tools.pop("initcheck") == [call.name for call in part] and len(part) < len(whole) / 2
    assert set(map(tuple, tools.values())) == {tuple(call.name for call in whole)}
    parts = sanitize.parts_of(made, SanitizerResults([]), options.calls)
    jobs = sanitize.jobs_of("/bin/compute-sanitizer", options, parts)
    assert list(jobs)[0] == sanitize.PLANTED and jobs[sanitize.PLANTED].command[-1] == "--plant-fault"
    for index, each in enumerate(parts):
        command, limit_s = jobs[str(index)]
        assert command[2] == each.tool and limit_s == (400 if each.tool == "initcheck" else 200)
        assert "--family=direct" in command and ("--fill" in command) == (each.tool == "initcheck")
        only = next(argument for argument in command if argument.startswith("--only="))
        assert [whole[int(i)].name for i in only.removeprefix("--only=").split(",")] == list(each.calls)


@pytest.mark.parametrize("text", ["initcheck", "initcheck=0", "initcheck=x", "other=3"])
def test_wrong_numbers_for_a_tool_are_refused(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        sanitize.options_of(["--every", text])
    assert "TOOL=NUMBER" in capsys.readouterr().err


# what the lines come to ---------------------------------------------------------------------------------------------


def all_tools(calls: dict = CALLS) -> dict:
    return {name: {**about, "tools": list(TOOLS)} for name, about in calls.items()}


def clean_lines(calls: dict) -> list[dict]:
    return [plan(calls=calls), SEEN, *(job(tool, *calls) for tool in TOOLS)]


def test_every_kernel_has_a_verdict_of_its_own() -> None:
    lines = clean_lines(all_tools())
    lines.append(job("racecheck", "direct b", clean=False))
    results = SanitizerResults(lines)
    direct, sums, conv = (results.of_kernel(name, digest) for name, digest in HASHES.items())
    assert is_clean(conv) and in_words(conv) == ", ".join(f"{tool}: 0 findings in 1 calls" for tool in sorted(TOOLS))
    assert not is_clean(direct) and not is_clean(sums)
    assert str(direct["racecheck"]) == str(sums["racecheck"]) == "2 findings in 1 calls"
    assert str(direct["memcheck"]) == "0 findings in 3 calls" and total_calls(direct) == 11
    again = SanitizerResults([*lines, job("racecheck", "direct b")])
    assert is_clean(again.of_kernel("direct/direct", "abc")) and is_clean(again.of_kernel("reduce/partials", "def"))


def test_runs_of_families_add_up_and_what_is_left_is_said() -> None:
    only_conv = {name: about for name, about in all_tools().items() if name.startswith("halo_sm90")}
    lines = clean_lines(only_conv)
    assert is_clean(SanitizerResults(lines).of_kernel("halo_sm90/conv", "ghi"))
    assert SanitizerResults(lines).of_kernel("reduce/partials", "def") == {}
    only_direct = {name: about for name, about in all_tools().items() if name.startswith("direct")}
    second = [plan("2", only_direct), SEEN | {"plan": "2"}]
    second += [job(tool, *DIRECT_CALLS[: 2 if tool == "synccheck" else 3], of="2") for tool in TOOLS]
    results = SanitizerResults([*lines, *second])
    assert is_clean(results.of_kernel("halo_sm90/conv", "ghi"))
    assert is_clean(results.of_kernel("reduce/partials", "def"))
    direct = results.of_kernel("direct/direct", "abc")
    assert not is_clean(direct) and str(direct["synccheck"]) == "1 of 3 calls left"
    assert in_words(results.of_kernel("direct/direct", "new sources")) == "not run"


def test_a_part_of_the_calls_is_said_to_be_one() -> None:
    verdicts = SanitizerResults([plan(), SEEN, job("memcheck", *CALLS), job("initcheck", "direct a")]).of_kernel(
        "direct/direct", "abc"
    )
    assert str(verdicts["initcheck"]) == "0 findings in 1 of 3 calls" and verdicts["initcheck"].clean
    assert not verdicts["racecheck"].clean and not is_clean(verdicts)


def test_a_run_that_missed_its_planted_fault_proves_nothing() -> None:
    for planted in ([], [SEEN | {"found": False}], [SEEN | {"plan": "2"}]):
        lines = [line for line in clean_lines(all_tools()) if line != SEEN] + planted
        assert not is_clean(SanitizerResults(lines).of_kernel("direct/direct", "abc"))


def test_the_lines_of_jobs_are_what_the_results_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, made = tmp_path / "build" / "sanitizer.jsonl", plan(calls=all_tools())
    parts = sanitize.parts_of(made, SanitizerResults([]), 100)
    append_line(path, made)
    fault = Ended(9, "========= Invalid __global__ write of size 4", 5.0)
    append_line(path, sanitize.noted_line(sanitize.PLANTED, fault, made, parts))
    for index, part in enumerate(parts):
        ended = Ended(0, output(len(part.calls), len(part.calls)), 61.26)
        append_line(path, sanitize.noted_line(str(index), ended, made, parts))
    assert "memcheck, direct/direct, reduce/partials: 0 findings in 3 calls, 61 s\n" in capsys.readouterr().out
    results = SanitizerResults(read_lines([path]))
    assert sanitize.report(results, made, 0) == 0
    assert "direct/direct: initcheck: 0 findings in 3 calls, memcheck" in capsys.readouterr().out
    late = Ended(124, "stopped", 240.0)
    append_line(path, sanitize.noted_line("0", late, made, parts))
    results = SanitizerResults(read_lines([path]))
    assert sanitize.report(results, made, 2) == 1
    printed = capsys.readouterr().out
    assert "memcheck: out of time in 0 calls" in printed and "2 processes are left for another run" in printed
    append_line(path, sanitize.noted_line(sanitize.PLANTED, Ended(0, "nothing", 5.0), made, parts))
    assert "NOT found" in capsys.readouterr().out


def test_what_was_measured_is_compared_on_the_cpu_too() -> None:
    """The statistics of a result go with its copy, and a copy without any has none."""
    y = torch.randn(2, 3, 4, 5)
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    kept = on_cpu(with_moments(y, mean.float(), variance.float()))
    check_measured(MOMENTS, kept)
    with pytest.raises(AssertionError, match="a mean is off"):
        check_measured(MOMENTS, on_cpu(with_moments(y, mean.float() + 1, variance.float())))
    assert not hasattr(on_cpu(torch.ones(2)), "moments")


def test_only_what_asked_kernels_need_is_compiled() -> None:
    """Every call's kernels are noted; sources are those of calls that launch one of the kernels asked for."""
    of_moments, others = [], []
    for call in driver.calls_of(HALO_SM90):
        (of_moments if call.result == MOMENTS else others if call.shape else []).append(call)
    assert of_moments
    every = driver.note([*of_moments[:2], *others[:2]], H200)
    asked = driver.note([*of_moments[:2], *others[:2]], H200, ["halo_sm90/moments"])
    alone = driver.note(of_moments[:2], H200)
    assert asked.kernels == every.kernels
    assert {each.digest for each in asked.sources} == {each.digest for each in alone.sources}
    assert len(asked.sources) < len(every.sources)
