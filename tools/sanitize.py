"""Run tiny problems of every direction under the four tools of compute-sanitizer; exit code 1 on any finding.

The kernels are compiled first, without the sanitizer. A planted fault shows that memcheck is really watching. The
verdict goes to build/sanitizer.json with the hashes of the sources that it is about.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tools.stamps import ROOT, all_hashes

TOOLS: dict[str, tuple[str, ...]] = {
    # cuda-bindings asks the driver for every symbol that it knows; our own calls check their status themselves.
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": ("--num-cuda-barriers", "65536"),  # of all blocks: halo_sm90 has some forty in each
}
DRIVER = ("-m", "tests.gpu.sanitizer_driver")
FINDINGS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
FINISHED = re.compile(r"sanitizer driver: (\d+) calls checked")


def find_sanitizer() -> str | None:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def driver_environment(cache: str) -> dict[str, str]:
    """No caching allocator: each tensor is an allocation of its own, so that memcheck sees where it ends."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    ours = {"HALOCONV_CACHE_DIR": cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    return {**os.environ, **ours}


def execute(command: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"stopped after {timeout_s:.0f} s"
    return done.returncode, done.stdout


def judge(code: int, output: str) -> tuple[str, bool]:
    """The verdict in a few words, and whether the run is clean: it ended, it was complete, and nothing was found."""
    counts = [int(a or b) for a, b in FINDINGS.findall(output)]
    if not counts:
        return f"did not finish (exit code {code})", False
    finished = FINISHED.search(output)
    if sum(counts):
        return f"{sum(counts)} findings", False
    if code or not finished:
        return f"the driver failed (exit code {code})", False
    return f"0 findings in {finished[1]} calls", True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitizer.json")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each tool")
    options = parser.parse_args()
    sanitizer = find_sanitizer()
    if not torch.cuda.is_available() or sanitizer is None:
        print("sanitize: needs a CUDA device and compute-sanitizer on PATH or under CUDA_HOME", file=sys.stderr)
        return 1
    hashes = all_hashes()
    with tempfile.TemporaryDirectory() as cache:
        environment = driver_environment(cache)
        code, output = execute([sys.executable, *DRIVER], environment, options.timeout)
        if code:
            print(f"{output}\nsanitize: the driver fails without the sanitizer ({code})", file=sys.stderr)
            return 1

        def under(tool: str, flags: tuple[str, ...], *arguments: str) -> tuple[int, str]:
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *flags, sys.executable, *DRIVER, *arguments]
            return execute(command, environment, options.timeout)

        with ThreadPoolExecutor(len(TOOLS) + 1) as pool:
            runs = {tool: pool.submit(under, tool, flags) for tool, flags in TOOLS.items()}
            planted = pool.submit(under, "memcheck", TOOLS["memcheck"], "--plant-fault")
            outputs = {tool: run.result() for tool, run in runs.items()}
            saw_fault = "Invalid __global__ write" in planted.result()[1]
    return report(outputs, saw_fault, planted.result()[1], hashes, options.out)


def report(
    outputs: dict[str, tuple[int, str]], saw_fault: bool, planted: str, hashes: dict[str, str], path: Path
) -> int:
    """Print the verdicts, the whole output of every run that is not clean, and write the file."""
    clean, verdicts = saw_fault, {}
    for tool, (code, output) in outputs.items():
        text, good = judge(code, output)
        verdicts[tool] = {"verdict": text, "clean": good}
        clean = clean and good
        print(f"{tool}: {text}")
        if not good:
            print(output[-8000:])
    print(f"planted fault: {'found' if saw_fault else 'NOT found, so memcheck proves nothing'}")
    if not saw_fault:
        print(planted[-8000:])
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"clean": clean, "planted_fault_found": saw_fault, "tools": verdicts, "hashes": hashes}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
