"""Several settings of networks, one after another on one device, or shared among several by a process each."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import Queue, get_context
from typing import Any

import torch

from haloconv.bench.networks.network import Effort, Outcome, RunControl, Setting, bench_network, ignore
from haloconv.bench.targets import TargetError
from haloconv.bench.values import ModelError
from haloconv.problem_file import ProblemFileError

Attempt = Callable[[Setting, torch.device, RunControl], "Outcome | str | None"]
Wanted = Mapping[Setting, Collection[tuple[str, str]]]
"""Cases and directions of the rows that a setting is to have."""

Result = tuple[Setting, "Outcome | str"]
"""A setting and what came of it, or a sentence that says why nothing did."""

_device: torch.device  # of a worker


def outcomes(
    settings: Sequence[Setting],
    effort: Effort,
    devices: Sequence[torch.device],
    control: RunControl,
    wanted: Wanted | None = None,
) -> Iterator[Result]:
    """Each setting as it ends; None for ``wanted``: with all its rows.

    On several devices a spawned process for each takes the next setting when it is done with one; they share the
    records of tuning, whose files are made for that. ``control.keep`` is called there, and nothing is told.
    """
    attempt = partial(_attempt, effort, wanted)
    found: Iterator[tuple[Setting, Outcome | str | None]]
    if len(devices) == 1:
        found = ((setting, attempt(setting, devices[0], control)) for setting in settings)
    else:
        control.announce(f"{len(settings)} settings on {len(devices)} devices")
        found = _shared(attempt, replace(control, announce=ignore), settings, devices)
    for setting, outcome in found:
        yield setting, "cut, --limit was used up" if outcome is None else outcome


def _shared(
    attempt: Attempt, control: RunControl, settings: Sequence[Setting], devices: Sequence[torch.device]
) -> Iterator[tuple[Setting, Outcome | str | None]]:
    context = get_context("spawn")
    free: Queue[Any] = context.Queue()
    for device in devices:
        free.put(str(device))
    with ProcessPoolExecutor(len(devices), context, _take, (free,)) as pool:
        futures = {pool.submit(_in_worker, attempt, control, setting): setting for setting in settings}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _take(free: Queue[Any]) -> None:
    """A worker's first deed: a device for itself."""
    global _device
    _device = torch.device(free.get())


def _in_worker(attempt: Attempt, control: RunControl, setting: Setting) -> Outcome | str | None:
    return attempt(setting, _device, control)


def _attempt(
    effort: Effort, wanted: Wanted | None, setting: Setting, device: torch.device, control: RunControl
) -> Outcome | str | None:
    """None if the time is up: ``time.time()``, which processes share, is behind the deadline."""
    if time.time() > control.deadline:
        return None
    if wanted is not None:
        control = replace(control, wanted=wanted[setting])
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            return bench_network(setting, effort, device, control)
        except (ModelError, ProblemFileError, TargetError) as error:
            return str(error)
        except torch.cuda.OutOfMemoryError:
            return "the GPU's memory does not hold it beside its copy in float64"
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
