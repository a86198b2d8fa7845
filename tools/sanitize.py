"""Run tiny problems of every direction under the four tools of compute-sanitizer; exit code 1 unless all is clean.

The kernels are compiled first, without the sanitizer; then every tool runs over some of the calls at a time, several
processes side by side. A planted fault shows that memcheck is really watching. What each process found is added to
build/sanitizer.jsonl as it ends; calls that were clean on the same sources before are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from haloconv.env import environment_stamp
from tests.gpu import sanitizer_driver
from tools.jobs import OUT_OF_TIME, Ended, Job, Pool
from tools.result_lines import append_line, read_lines
from tools.sanitizer_results import TOOLS, SanitizerResults, in_words, is_clean
from tools.stamps import ROOT, all_hashes, kernel_families, tested_by

DRIVER = ("-m", "tests.gpu.sanitizer_driver")
FINDINGS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
ASKED = re.compile(r"sanitizer driver: (\d+) calls asked for$", re.MULTILINE)
SO_FAR = re.compile(r"sanitizer driver: (\d+) calls so far")
FINISHED = re.compile(r"sanitizer driver: (\d+) calls checked, (\d+) kernels compiled")
NOT_TRACKED = "didn't track the launch. Errors might go undetected. (Unable to allocate enough memory"
CORES_OF_JOB = 2
PLANTED = "planted fault"
ALTERNATING = "alternating warps"
NO_RACE = "NOT taken for a race: let racecheck meet the calls that have them (sanitizer_driver.Call.alternates)"


class Verdict(NamedTuple):
    """What one process of a tool found, in a few words, and whether it is clean.

    ``clean``: the run ended, made every call that it was asked for, and nothing was found.
    """

    text: str
    clean: bool


class Part(NamedTuple):
    """What one process does: a tool over some of a family's calls, by number and by name."""

    tool: str
    family: str
    numbers: tuple[int, ...]
    calls: tuple[str, ...]


def find_sanitizer() -> str | None:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def driver_environment(cache: Path) -> dict[str, str]:
    """No caching allocator: each tensor is an allocation of its own, so that memcheck sees where it ends."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    ours = {"HALOCONV_CACHE_DIR": str(cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    return {**os.environ, **ours}


def judge(code: int, output: str) -> Verdict:
    """What a tool's output says; strictly, so that a run that did less than it was asked for is not clean."""
    asked, finished, so_far = ASKED.search(output), FINISHED.search(output), SO_FAR.findall(output)
    wanted = int(asked[1]) if asked else 0
    made = int(finished[1]) if finished else int(so_far[-1]) if so_far else 0
    made_of = f"{made} calls" if made == wanted else f"{made} of {wanted} calls"
    counts = [int(a or b) for a, b in FINDINGS.findall(output)]
    if not counts:
        text = "out of time" if code == OUT_OF_TIME else f"did not finish (exit code {code})"
        return Verdict(f"{text} in {made_of}", False)
    if sum(counts):
        text = f"{sum(counts)} findings in {made_of}"
        lost = output.count(NOT_TRACKED)
        return Verdict(f"{text}, {lost} of them for want of GPU memory: take fewer --jobs" if lost else text, False)
    if code or not finished or made != wanted or not made:
        return Verdict(f"the driver failed (exit code {code}) in {made_of}", False)
    return Verdict(f"0 findings in {made_of}", True)


def per_tool(text: str) -> tuple[str, int]:
    """``TOOL=NUMBER`` of the command line."""
    tool, _, number = text.partition("=")
    if tool not in TOOLS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form TOOL=NUMBER with one of {', '.join(TOOLS)}")
    return tool, int(number)


def side_by_side() -> int:
    """Jobs that this machine's cores are enough for."""
    return max(1, (os.cpu_count() or 1) // CORES_OF_JOB)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitizer.jsonl")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "sanitizer-kernels", help="compiled kernels")
    parser.add_argument(
        "--family", action="append", default=[], choices=kernel_families(),
        help="only the calls that this family's stamps need; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--kernel", action="append", default=[], choices=sorted(all_hashes()), metavar="FAMILY/NAME",
        help="only the calls that launch this kernel; may be repeated",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for compiling, and for each process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no process later than this")
    parser.add_argument("--jobs", type=int, default=side_by_side(), help="how many processes run side by side")
    parser.add_argument("--calls", type=int, default=48, help="how many calls a process makes at most")
    form: dict[str, Any] = {"type": per_tool, "action": "append", "default": [], "metavar": "TOOL=NUMBER"}
    parser.add_argument("--limit", **form, help="seconds for one tool, instead of --timeout; may be repeated")
    parser.add_argument("--every", **form, help="let one tool make one call in NUMBER; the verdict says how many")
    return parser.parse_args(arguments)


def families_of(wanted: list[str]) -> list[str]:
    """The families whose calls the stamps of those families need; of all if none are named."""
    return sorted({each for name in wanted or kernel_families() for each in tested_by(name)})


def driver(*arguments: str) -> list[str]:
    """The command of the driver."""
    return [sys.executable, *DRIVER, *arguments]


def compile_and_note(
    families: list[str], pool: Pool, folder: Path, limit_s: float, only: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Compile what the families' calls need; gives the kernels that each call launches. Exits if that fails.

    ``only``: what those calls need that launch one of these kernels.
    """
    noted, ended = folder / "calls.json", dict[str, Ended]()
    chosen = [*(f"--family={name}" for name in families), *(f"--launching={kernel}" for kernel in only)]
    pool.run({"compiling": Job(driver(*chosen, "--compile", str(noted)), limit_s)}, folder, ended.__setitem__)
    print(ended["compiling"].output)
    if ended["compiling"].code:
        sys.exit(f"sanitize: the kernels cannot be compiled (exit code {ended['compiling'].code})")
    return json.loads(noted.read_text(encoding="utf-8"))


def plan_of(kernels: dict[str, list[str]], families: list[str], every: dict[str, int]) -> dict:
    """The line of a run that begins now: sources, calls, and which tools are to meet each call."""
    calls: dict[str, dict] = {name: {"kernels": found, "tools": []} for name, found in kernels.items()}
    for tool in TOOLS:
        for call in sanitizer_driver.calls_here(families, every.get(tool, 1)):
            if tool != "racecheck" or not call.alternates:
                calls[call.name]["tools"].append(tool)
    return {
        "kind": "plan", "plan": f"{time.time():.0f}-{os.getpid()}", "environment": environment_stamp(),
        "hashes": all_hashes(), "families": families, "calls": calls,
    }  # fmt: skip


def parts_of(plan: dict, before: SanitizerResults, most_calls: int, only: Sequence[str] = ()) -> list[Part]:
    """What is to be done of a plan: each tool over the calls that it was not clean in, those of a kernel together.

    ``only``: the calls that launch one of these kernels; none for all.
    """
    calls, parts = plan["calls"], []
    kernels = {name: about["kernels"] for name, about in calls.items()}
    for tool in TOOLS:
        done = before.done(tool, kernels, plan["hashes"], plan["environment"]["gpu"])
        for family in plan["families"]:
            own = [name for name in calls if name.split()[0] == family]
            asked = [name for name in own if not only or {*only} & {*kernels[name]}]
            left = [name for name in asked if tool in calls[name]["tools"] and name not in done]
            left.sort(key=kernels.__getitem__)
            for first in range(0, len(left), most_calls):
                some = tuple(left[first : first + most_calls])
                parts.append(Part(tool, family, tuple(map(own.index, some)), some))
    return parts


def jobs_of(sanitizer: str, options: argparse.Namespace, parts: list[Part]) -> dict[str, Job]:
    """The planted fault under memcheck, what racecheck takes for a race under it, and then every part."""
    limits, fill = dict(options.limit), {"initcheck": ("--fill",)}

    def job(tool: str, *arguments: str) -> Job:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *TOOLS[tool]]
        return Job([*command, *driver(*arguments)], limits.get(tool, options.timeout))

    jobs = {PLANTED: job("memcheck", "--plant-fault"), ALTERNATING: job("racecheck", "--alternating")}
    for index, part in enumerate(parts):
        only = ",".join(map(str, part.numbers))
        jobs[str(index)] = job(part.tool, f"--family={part.family}", f"--only={only}", *fill.get(part.tool, ()))
    return jobs


def noted_line(name: str, ended: Ended, plan: dict, parts: list[Part]) -> dict:
    """The line about a job that ended; what is not clean is printed."""
    if name == PLANTED:
        found = "Invalid __global__ write" in ended.output
        print(f"planted fault: {'found' if found else 'NOT found, so memcheck proves nothing'}", flush=True)
        if not found:
            print(ended.output[-8000:])
        return {"kind": "planted", "plan": plan["plan"], "found": found}
    if name == ALTERNATING:
        taken = any(int(hazards or 0) for _, hazards in FINDINGS.findall(ended.output))
        print(f"alternating warps: {'racecheck takes them for a race' if taken else NO_RACE}", flush=True)
        return {"kind": "alternating", "plan": plan["plan"], "taken_for_a_race": taken}
    part, verdict, finished = parts[int(name)], judge(ended.code, ended.output), FINISHED.search(ended.output)
    compiled = f", compiling {finished[2]} kernels" if finished and int(finished[2]) else ""
    launched = sorted({kernel for call in part.calls for kernel in plan["calls"][call]["kernels"]})
    print(f"{part.tool}, {', '.join(launched)}: {verdict.text}, {ended.seconds:.0f} s{compiled}", flush=True)
    if not verdict.clean:
        print(ended.output[-8000:])
    return {
        "kind": "job", "plan": plan["plan"], "tool": part.tool, "calls": part.calls, "verdict": verdict.text,
        "clean": verdict.clean, "seconds": round(ended.seconds, 1),
    }  # fmt: skip


def report(results: SanitizerResults, plan: dict, not_begun: int, only: Sequence[str] = ()) -> int:
    """Print a line a kernel of the plan, or of ``only`` these kernels; the exit code."""
    kernels = {kernel for about in plan["calls"].values() for kernel in about["kernels"]}
    asked = {kernel for kernel in {*only} or kernels if set(tested_by(kernel.split("/")[0])) <= set(plan["families"])}
    verdicts = {kernel: results.of_kernel(kernel, plan["hashes"][kernel]) for kernel in sorted(asked)}
    for kernel, found in verdicts.items():
        print(f"{kernel}: {in_words(found)}")
    if not_begun:
        print(f"{not_begun} processes are left for another run")
    return 0 if verdicts and all(map(is_clean, verdicts.values())) and not results.sees_no_race else 1


def main() -> int:
    options, start = options_of(None), time.monotonic()
    sanitizer = find_sanitizer()
    if not torch.cuda.is_available() or sanitizer is None:
        print("sanitize: needs a CUDA device and compute-sanitizer on PATH or under CUDA_HOME", file=sys.stderr)
        return 1
    families = families_of(options.family or [kernel.split("/")[0] for kernel in options.kernel])
    environment = driver_environment(options.cache)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kernels = compile_and_note(families, Pool(ROOT, environment), folder, options.timeout, options.kernel)
        plan = plan_of(kernels, families, dict(options.every))
        parts = parts_of(plan, SanitizerResults(read_lines([options.out])), options.calls, options.kernel)
        append_line(options.out, plan)
        pool = Pool(ROOT, environment, options.jobs, start + options.seconds)
        jobs = jobs_of(sanitizer, options, parts)
        left = pool.run(jobs, folder, lambda job, ended: append_line(options.out, noted_line(job, ended, plan, parts)))
    return report(SanitizerResults(read_lines([options.out])), plan, len(left), options.kernel)


if __name__ == "__main__":
    sys.exit(main())
