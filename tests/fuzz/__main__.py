"""``python -m tests.fuzz``: draw problems until time is up, or check one line again."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from haloconv import emulator
from haloconv.env import environment_stamp
from tests.fuzz.campaign import Tally, all_draws, commit_seed
from tests.fuzz.check import check
from tests.fuzz.draw import SUBJECTS
from tests.fuzz.front_draw import FUNCTIONS, parsed_line
from tests.fuzz.outcome import Failure
from tests.fuzz.shrink import shrunk
from tools.result_lines import append_line

EVERY = (*SUBJECTS, *FUNCTIONS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to draw")
    parser.add_argument("--seed", type=int, default=None, help="of the draws; the commit's hash if it is not given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="cpu: the emulator")
    parser.add_argument("--family", action="append", choices=EVERY, help="draw for this one only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, with seeds that follow the first")
    parser.add_argument(
        "--keep", metavar="FILE", help="add a line of what came of it, such as benchmarks/verified/fuzz.jsonl"
    )
    parser.add_argument("--replay", metavar="LINE", help="check this one problem")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="spent on making a failure small")
    return parser.parse_args()


def _replay(line: str, device: str) -> int:
    outcome = check(parsed_line(line), device)
    if isinstance(outcome, Failure):
        print(outcome)
        return 1
    for each in outcome:
        print(f"right: {' '.join(sorted(each.kernels))}, {each.kind}")
    return 0


def _fuzz(arguments: argparse.Namespace, device: str, seed: int) -> int:
    subjects = tuple(arguments.family or EVERY)
    print(f"seed {seed}, {device}, {arguments.seconds:g} s", flush=True)
    tally, begin, where = Tally(), time.monotonic(), environment_stamp()  # of the code that is loaded now
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was checked is kept then, too
    try:
        for draw in all_draws(seed, device, subjects):
            if time.monotonic() >= begin + arguments.seconds:
                break
            outcome = check(draw, device)
            tally.add(outcome)
            if isinstance(outcome, Failure):
                print(f"WRONG {outcome}", flush=True)
                print(f"shrunk: {shrunk(outcome, device, arguments.shrink_seconds)}", flush=True)
    finally:
        print(tally)
        if arguments.keep and tally.problems:
            seconds = round(time.monotonic() - begin)
            how = {"device": device, "seed": seed, "seconds": seconds}
            append_line(Path(arguments.keep), {"kind": "fuzz", **where, **how, **tally.as_json()})
    return 1 if tally.failures or not tally.problems else 0


def _side_by_side(arguments: argparse.Namespace, first_seed: int) -> int:
    """The same in several processes; 0 if each of them ended so."""
    given = [
        f"--{name}={value}" for name in ("seconds", "device", "keep") if (value := getattr(arguments, name)) is not None
    ]
    given += [f"--family={each}" for each in arguments.family or ()]
    command = [sys.executable, "-m", "tests.fuzz", *given, f"--shrink-seconds={arguments.shrink_seconds}"]
    jobs = [subprocess.Popen([*command, f"--seed={first_seed + i}"]) for i in range(arguments.jobs)]
    return max([abs(job.wait()) for job in jobs])


def main() -> int:
    arguments = _arguments()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    missing = emulator.available() if device == "cpu" else None
    if missing is not None:
        print(missing)
        return 2
    seed = commit_seed() if arguments.seed is None else arguments.seed
    if arguments.jobs > 1 and not arguments.replay:
        return _side_by_side(arguments, seed)
    with tempfile.TemporaryDirectory(prefix="haloconv-fuzz-") as folder:  # random kernels are not worth keeping
        os.environ.setdefault("HALOCONV_CACHE_DIR", folder)
        return _replay(arguments.replay, device) if arguments.replay else _fuzz(arguments, device, seed)


if __name__ == "__main__":
    sys.exit(main())
