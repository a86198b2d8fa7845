"""Run a scenario in several processes, one per rank, and collect what they say.

python -m tests.ranks SCENARIO DEVICE FAMILY RANK WORLD_SIZE MEETING_FILE     # one rank; DEVICE: cpu, emulator or cuda

A scenario is a function of tests/distributed.py, or of another module of tests: ``MODULE.FUNCTION``. Several, between
commas, run one after the other in one process group.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from haloconv.emulator import emulated_device
from haloconv.env import child_environment
from tests.usages import Place

STRIDE_WARNING = "Grad strides do not match bucket view strides"
DONE = "rank done"


def run_ranks(
    scenario: str,
    device: str,
    family: str,
    meeting: Path,
    limit_s: float,
    world_size: int = 2,
    ending: Collection[int] = (),
) -> str:
    """What all ranks wrote to their error streams. Ranks in ``ending`` end before they are done, as the scenario means.

    Raises AssertionError if a rank fails or is not done in time.
    """
    command = [sys.executable, "-m", "tests.ranks", scenario, device, family]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(meeting)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(OMP_NUM_THREADS="1"),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    deadline, said, failed = time.monotonic() + limit_s, [], []
    for number, rank in enumerate(ranks):
        try:
            output, errors = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            output, errors = rank.communicate()
            errors += f"\nnot done after {limit_s} s"
        said.append(errors)
        if rank.returncode != 0 or (DONE in output) == (number in ending):
            about = f"rank {number} of {scenario} on {device} with {family} exited with {rank.returncode}"
            failed.append((f"{about}: {_raised(errors)}", f"{about}:\n{errors[-8000:]}"))
    assert not failed, "\n".join([*(short for short, _ in failed), *(whole for _, whole in failed)])
    return "\n".join(said)


def _raised(errors: str) -> str:
    """Of what a rank wrote the line that says what it raised: first, so that a log that is cut has it."""
    return next((line for line in reversed(errors.splitlines()) if re.match(r"[\w.]*(Error|Exception)\b", line)), "")


def fork_ranks(
    work: Callable[..., None], arguments: tuple, meeting: Path, limit_s: float, world_size: int
) -> list[int]:
    """The exit codes of ranks on CPUs that each run ``work(*arguments)``; the module of ``work`` is imported once.

    They are forked by a process without threads. Raises AssertionError if one is not done in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    ranks = [
        context.Process(target=_forked, args=(work, arguments, rank, world_size, str(meeting)))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + limit_s
    for rank in ranks:
        rank.join(max(0.1, deadline - time.monotonic()))
    late = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
    for number in late:
        ranks[number].kill()
    assert not late, f"ranks {late} were not done after {limit_s} s"
    return [rank.exitcode for rank in ranks if rank.exitcode is not None]


def _forked(work: Callable[..., None], arguments: tuple, rank: int, world_size: int, meeting: str) -> None:
    _meet("gloo", rank, world_size, meeting)
    work(*arguments)
    dist.destroy_process_group()


def _meet(backend: str, rank: int, world_size: int, meeting: str) -> None:
    method, limit = f"file://{meeting}", timedelta(seconds=60)
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size, timeout=limit)


def main(scenario: str, device: str, family: str, rank: str, world_size: str, meeting: str) -> None:
    """One rank: meet the others, run the scenario, say so."""
    if device == "cuda":
        torch.cuda.set_device(int(rank))
        torch.backends.cudnn.allow_tf32 = False
    _meet("nccl" if device == "cuda" else "gloo", int(rank), int(world_size), meeting)
    place = Place("cpu" if device == "emulator" else device, family, strict=device != "cpu" and family != "auto")
    try:
        with emulated_device() if device == "emulator" else nullcontext():
            for each in scenario.split(","):
                module, _, function = each.rpartition(".")
                getattr(import_module(f"tests.{module or 'distributed'}"), function)(place)
    except Exception:
        traceback.print_exc()  # now: what follows may wait for ranks that wait for this one
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
    print(DONE, flush=True)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort now and then while the interpreter ends


if __name__ == "__main__":
    main(*sys.argv[1:])
