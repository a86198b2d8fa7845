"""Run tiny problems of every direction under the four tools of compute-sanitizer; exit code 1 on any finding.

The kernels are compiled first, without the sanitizer; then every tool runs for every family, side by side. A planted
fault shows that memcheck is really watching. The verdicts, with the calls that each tool made, go to
build/sanitizer.json, family by family, with the hash of the sources that they are about.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tests.families import SPECIALS, SUBJECTS
from tools.stamps import ROOT, all_hashes, kernel_families

TOOLS: dict[str, tuple[str, ...]] = {
    # cuda-bindings asks the driver for every symbol that it knows; our own calls check their status themselves.
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": ("--num-cuda-barriers", "65536"),  # of all blocks: halo_sm90 has some forty in each
}
DRIVER = ("-m", "tests.gpu.sanitizer_driver")
FINDINGS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
ASKED = re.compile(r"sanitizer driver: (\d+) of (\d+) calls$", re.MULTILINE)
SO_FAR = re.compile(r"sanitizer driver: (\d+) calls so far")
FINISHED = re.compile(r"sanitizer driver: (\d+) calls checked, (\d+) kernels compiled")
OUT_OF_TIME = 124
CORES_OF_JOB = 2


class Name(NamedTuple):
    """What a job is: one tool over the calls of one family."""

    tool: str
    family: str


COMPILING, PLANTED = Name("none", "compiling"), Name("memcheck", "planted fault")


class Job(NamedTuple):
    """A command, and the seconds that it may take."""

    command: list[str]
    limit_s: float


class Ended(NamedTuple):
    """How a command ended: its exit code (OUT_OF_TIME if it was stopped), what it printed, and the seconds it took."""

    code: int
    output: str
    seconds: float


class Verdict(NamedTuple):
    """The verdict on one tool in a few words, whether it is clean, and the calls made of those of the whole driver.

    ``clean``: the run ended, made every call that it was asked for, and nothing was found.
    """

    text: str
    clean: bool
    calls: int
    of_calls: int


def find_sanitizer() -> str | None:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def driver_environment(cache: str) -> dict[str, str]:
    """No caching allocator: each tensor is an allocation of its own, so that memcheck sees where it ends."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    ours = {"HALOCONV_CACHE_DIR": cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    return {**os.environ, **ours}


def execute(jobs: dict[Name, Job], environment: dict[str, str], folder: str, most: int = 1) -> dict[Name, Ended]:
    """Run the jobs, ``most`` of them side by side.

    One that takes too long is stopped with its children, and what it printed is kept.
    """
    waiting, running, ended = dict(jobs), {}, {}
    try:
        while waiting or running:
            for name in list(waiting)[: most - len(running)]:
                running[name] = _start(waiting.pop(name), environment, Path(folder, f"{name.tool} {name.family}.log"))
            for name, (process, start, log) in list(running.items()):
                seconds = time.monotonic() - start
                late = process.poll() is None
                if late and seconds < jobs[name].limit_s:
                    continue
                code = OUT_OF_TIME if late else process.returncode
                _stop(running.pop(name)[0])
                output = log.read_text(encoding="utf-8", errors="replace")
                ended[name] = Ended(code, output + (f"\nstopped after {seconds:.0f} s" if late else ""), seconds)
            time.sleep(0.05)
    finally:
        for process, *_ in running.values():
            _stop(process)
    return ended


def _start(job: Job, environment: dict[str, str], log: Path) -> tuple[subprocess.Popen, float, Path]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            job.command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, time.monotonic(), log


def _stop(process: subprocess.Popen) -> None:
    """End the process and what it started: the sanitizer runs the driver as a child of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(code: int, output: str) -> Verdict:
    """What a tool's output says; strictly, so that a run that did less than it was asked for is not clean."""
    asked, finished, so_far = ASKED.search(output), FINISHED.search(output), SO_FAR.findall(output)
    wanted, total = (int(asked[1]), int(asked[2])) if asked else (0, 0)
    made = int(finished[1]) if finished else int(so_far[-1]) if so_far else 0
    made_of = f"{made} calls" if made == total else f"{made} of {total} calls"
    counts = [int(a or b) for a, b in FINDINGS.findall(output)]
    if not counts:
        text = "out of time" if code == OUT_OF_TIME else f"did not finish (exit code {code})"
        return Verdict(f"{text} in {made_of}", False, made, total)
    if sum(counts):
        return Verdict(f"{sum(counts)} findings in {made_of}", False, made, total)
    if code or not finished or made != wanted or not made:
        return Verdict(f"the driver failed (exit code {code}) in {made_of}", False, made, total)
    return Verdict(f"0 findings in {made_of}", True, made, total)


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
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitizer.json")
    parser.add_argument(
        "--family", action="append", default=[], choices=kernel_families(),
        help="only the calls of this family; may be repeated",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for compiling, and for each run")
    parser.add_argument("--jobs", type=int, default=side_by_side(), help="how many tools run side by side")
    form = {"type": per_tool, "action": "append", "default": [], "metavar": "TOOL=NUMBER"}
    parser.add_argument("--limit", **form, help="seconds for one tool, instead of --timeout; may be repeated")
    parser.add_argument("--every", **form, help="let one tool make one call in NUMBER; the verdict says how many")
    return parser.parse_args(arguments)


def driver(*families: str) -> list[str]:
    """The command that makes the calls of these families."""
    return [sys.executable, *DRIVER, *(f"--family={name}" for name in families)]


def families_here(wanted: list[str]) -> list[str]:
    """Those of the families that this device runs; of all if none are named."""
    here = {subject.name for subject in (*SUBJECTS, *SPECIALS) if not subject.missing()}
    return [name for name in kernel_families() if name in here and (name in wanted or not wanted)]


def jobs_of(sanitizer: str, options: argparse.Namespace, families: list[str]) -> dict[Name, Job]:
    """What runs side by side: every tool over every family, and memcheck over the planted fault."""
    limits, every = dict(options.limit), dict(options.every)

    def job(name: Name, *arguments: str) -> Job:
        command = [sanitizer, "--tool", name.tool, "--error-exitcode", "9", *TOOLS[name.tool]]
        of_family = driver() if name == PLANTED else driver(name.family)
        return Job([*command, *of_family, *arguments], limits.get(name.tool, options.timeout))

    fill = {"initcheck": ("--fill",)}
    names = [Name(tool, family) for tool in TOOLS for family in families]
    jobs = {name: job(name, "--every", str(every.get(name.tool, 1)), *fill.get(name.tool, ())) for name in names}
    return jobs | {PLANTED: job(PLANTED, "--plant-fault")}


def main() -> int:
    options = options_of(None)
    sanitizer = find_sanitizer()
    if not torch.cuda.is_available() or sanitizer is None:
        print("sanitize: needs a CUDA device and compute-sanitizer on PATH or under CUDA_HOME", file=sys.stderr)
        return 1
    families, hashes = families_here(options.family), all_hashes()
    with tempfile.TemporaryDirectory() as folder:
        environment = driver_environment(str(Path(folder, "cache")))
        compiling = Job([*driver(*families), "--compile-only"], options.timeout)
        compiled = execute({COMPILING: compiling}, environment, folder)[COMPILING]
        print(compiled.output)
        if compiled.code:
            print(f"sanitize: the kernels cannot be compiled (exit code {compiled.code})", file=sys.stderr)
            return 1
        ended = execute(jobs_of(sanitizer, options, families), environment, folder, options.jobs)
    planted = ended.pop(PLANTED).output
    return report(ended, planted, {family: hashes[family] for family in families}, options.out)


def report(ended: dict[Name, Ended], planted: str, hashes: dict[str, str], path: Path) -> int:
    """Print the verdicts, the output of every run that is not clean, and write the file."""
    saw_fault = "Invalid __global__ write" in planted
    families = {family: {"hash": digest, "clean": saw_fault, "tools": {}} for family, digest in hashes.items()}
    for (tool, family), (code, output, seconds) in ended.items():
        verdict, finished = judge(code, output), FINISHED.search(output)
        compiled = int(finished[2]) if finished else None
        of_family = families[family]
        of_family["tools"][tool] = {
            "verdict": verdict.text, "clean": verdict.clean, "calls": verdict.calls, "of_calls": verdict.of_calls,
            "seconds": round(seconds, 1), "kernels_compiled": compiled,
        }  # fmt: skip
        of_family["clean"] = of_family["clean"] and verdict.clean
        more = f", compiling {compiled} kernels" if compiled else ""
        print(f"{family}, {tool}: {verdict.text}, {seconds:.0f} s{more}")
        if not verdict.clean:
            print(output[-8000:])
    print(f"planted fault: {'found' if saw_fault else 'NOT found, so memcheck proves nothing'}")
    if not saw_fault:
        print(planted[-8000:])
    clean = saw_fault and all(found["clean"] for found in families.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"clean": clean, "planted_fault_found": saw_fault, "families": families}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
