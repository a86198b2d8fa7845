"""Several settings of networks, one after another on one device, or shared among several by a process each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from multiprocessing import Queue, get_context
from typing import Any

import torch

from haloconv.bench.networks.network import Effort, Outcome, Setting, bench_network
from haloconv.bench.targets import TargetError
from haloconv.bench.values import ModelError
from haloconv.problem_file import ProblemFileError

Announce = Callable[[str], None]
Attempt = Callable[[Setting, torch.device, Announce], "Outcome | str | None"]
Result = tuple[Setting, "Outcome | str"]
"""A setting and what came of it, or a sentence that says why nothing did."""

_device: torch.device  # of a worker


def outcomes(
    settings: Sequence[Setting],
    effort: Effort,
    devices: Sequence[torch.device],
    limit_s: float | None,
    announce: Announce,
) -> Iterator[Result]:
    """Each setting as it ends. After ``limit_s`` seconds no further one is begun.

    On several devices a spawned process for each takes the next setting when it is done with one; they share the
    records of tuning, whose files are made for that.
    """
    attempt = partial(_attempt, effort, math.inf if limit_s is None else time.time() + limit_s)
    found: Iterator[tuple[Setting, Outcome | str | None]]
    if len(devices) == 1:
        found = ((setting, attempt(setting, devices[0], announce)) for setting in settings)
    else:
        announce(f"{len(settings)} settings on {len(devices)} devices")
        found = _shared(attempt, settings, devices)
    for setting, outcome in found:
        yield setting, f"cut, --limit {limit_s:g} was used up" if outcome is None else outcome


def _shared(
    attempt: Attempt, settings: Sequence[Setting], devices: Sequence[torch.device]
) -> Iterator[tuple[Setting, Outcome | str | None]]:
    context = get_context("spawn")
    free: Queue[Any] = context.Queue()
    for device in devices:
        free.put(str(device))
    with ProcessPoolExecutor(len(devices), context, _take, (free,)) as pool:
        futures = {pool.submit(_in_worker, attempt, setting): setting for setting in settings}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _take(free: Queue[Any]) -> None:
    """A worker's first deed: a device for itself."""
    global _device
    _device = torch.device(free.get())


def _in_worker(attempt: Attempt, setting: Setting) -> Outcome | str | None:
    return attempt(setting, _device, lambda what: None)


def _attempt(
    effort: Effort, deadline: float, setting: Setting, device: torch.device, announce: Announce
) -> Outcome | str | None:
    """None if the time is up: ``time.time()``, which processes share, is behind ``deadline``."""
    if time.time() > deadline:
        return None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            return bench_network(setting, effort, device, announce)
        except (ModelError, ProblemFileError, TargetError) as error:
            return str(error)
        except torch.cuda.OutOfMemoryError:
            return "the GPU's memory does not hold it beside its copy in float64"
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
