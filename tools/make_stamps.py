"""Write stamps from what GPU tests and tools/sanitize.py left in build/: one a kernel, in benchmarks/verified.

Refuses a kernel (exit code 1) if a check of it failed, a part of its tests did not run on its present sources, it ran
on GPUs of several models, the sanitizer was not clean in all that it was to run, or one of its CI sources spills
registers: make test compiles only a part of them.
With ``--family`` or ``--kernel`` the stamps of these alone are written; those of others stay as they are in any case.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from haloconv.families import FAMILIES, OWN
from haloconv.jit import KernelSource, compile_source
from tools.gpu_results import GpuResults, KernelResults
from tools.result_lines import read_lines
from tools.sanitizer_results import SanitizerResults, ToolVerdict, in_words, is_clean, total_calls
from tools.stamps import ROOT, VERIFIED, all_hashes, kernel_families, kernels, launched, write_stamps

STAMP_KEYS = ("gpu", "torch", "cudnn", "cuda_driver", "cuda_runtime", "driver", "python", "haloconv", "commit")
GPU_TESTS = ROOT / "build" / "gpu-tests.jsonl"
SANITIZER = ROOT / "build" / "sanitizer.jsonl"
ARCH = "sm_90a"  # of the GPUs that stamps are made on


def objections(found: KernelResults, verdicts: dict[str, ToolVerdict]) -> list[str]:
    """Why the results do not vouch for a kernel; empty if they do."""
    gpus = ", ".join(sorted(found.gpus))
    against = {
        f"{found.failed} of its GPU tests failed": found.failed,
        f"{found.astray} GPU tests failed before a kernel was launched": found.astray,
        f"{found.left} of its GPU tests are left on these sources": found.left,
        "no run of all its GPU tests was begun": found.left is None,
        "none of its GPU tests passed on these sources": not found.checks,
        "no error of it was recorded": not found.errors,
        f"it ran on GPUs of several models: {gpus} (--gpu takes one)": len(found.gpus) > 1,
        f"the sanitizer was not clean ({in_words(verdicts)})": not is_clean(verdicts),
    }
    return [sentence for sentence, holds in against.items() if holds]


def stamp_of(digest: str, found: KernelResults, verdicts: dict[str, ToolVerdict]) -> dict:
    """The stamp of a kernel to which there is no objection."""
    by_precision: dict[str, float] = {}
    for per_precision in found.errors.values():
        for precision, error in per_precision.items():
            by_precision[precision] = max(by_precision.get(precision, 0.0), error)
    return {
        "hash": digest,
        **{key: found.environment[key] for key in STAMP_KEYS},
        "checks": found.checks,
        "failed": 0,
        "skipped": found.skipped,
        "exact_runs": found.counts["exact"],
        "fuzz_problems": found.counts["fuzz"],
        "sanitizer_calls": total_calls(verdicts),
        "worst_errors": by_precision,
        "errors": found.errors,
        "sanitizer": in_words(verdicts),
        "date": found.environment["date"][:10],
    }


def spilling(sources: Iterable[KernelSource]) -> list[str]:
    """The sources that spill registers on ``ARCH``, by what they spill and their constants; a thread for each core."""
    sources = list(sources)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        spilled = list(pool.map(lambda source: compile_source(source, ARCH).spill_bytes, sources))
    return [
        f"{spill_bytes} bytes with {dict(source.constants)}"
        for source, spill_bytes in zip(sources, spilled, strict=True)
        if spill_bytes
    ]


def ci_sources() -> dict[str, list[KernelSource]]:
    """For each kernel every CI source of the .cu files that its stamp covers."""
    every = {source.digest: source for family in OWN for source in FAMILIES[family].sources()}.values()
    return {kernel: [source for source in every if source.kernel in launched(kernel)] for kernel in kernels()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpu-results", type=Path, action="append", default=[], help="may be repeated: the later counts"
    )
    parser.add_argument("--sanitizer", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--family", action="append", default=[], choices=kernel_families(), help="may be repeated")
    parser.add_argument("--kernel", action="append", default=[], choices=kernels(), help="may be repeated")
    parser.add_argument("--gpu", help="only tests on this GPU model")
    parser.add_argument("--out", type=Path, default=VERIFIED)
    options = parser.parse_args()
    tests = GpuResults(read_lines(options.gpu_results or [GPU_TESTS]), options.gpu)
    if not tests.runs:
        print("no stamp: run `pytest tests/gpu` on a machine with a GPU first", file=sys.stderr)
        return 1
    sanitizer = SanitizerResults(read_lines(options.sanitizer or [SANITIZER]))
    options.out.mkdir(parents=True, exist_ok=True)
    stamps, families = {}, options.family or kernel_families()
    hashes = {kernel: digest for kernel, digest in all_hashes().items() if kernel.split("/")[0] in families}
    hashes = {kernel: digest for kernel, digest in hashes.items() if kernel in (options.kernel or hashes)}
    sources = ci_sources()
    for kernel, digest in hashes.items():
        found, verdicts = tests.of_kernel(kernel, digest), sanitizer.of_kernel(kernel, digest)
        against = objections(found, verdicts)
        if not against and (spilled := spilling(sources[kernel])):
            against = [f"{len(spilled)} of its {len(sources[kernel])} CI sources spill: {spilled[0]}"]
        if against:
            print(f"no stamp of {kernel}: {'; '.join(against)}", file=sys.stderr)
        else:
            stamps[kernel] = stamp_of(digest, found, verdicts) | {"sources": len(sources[kernel])}
            print(f"{kernel}: {found.checks} checks on {found.environment['gpu']}, sanitizer {in_words(verdicts)}")
    write_stamps(stamps, options.out)
    return int(len(stamps) < len(hashes))


if __name__ == "__main__":
    sys.exit(main())
