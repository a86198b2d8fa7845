"""Several settings of networks, one after another on one device, or shared among several by a process each."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from haloconv.bench.networks.network import Effort, Outcome, RunControl, Setting, bench_network, ignore
from haloconv.bench.networks.workers import Place, shared
from haloconv.bench.targets import TargetError
from haloconv.bench.values import ModelError
from haloconv.problem_file import ProblemFileError

Wanted = Mapping[Setting, Collection[tuple[str, str]]]
"""Cases and directions of the rows that a setting is to have."""

Result = tuple[Setting, "Outcome | str"]
"""A setting and what came of it, or a sentence that says why nothing did."""


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
    if len(devices) > 1:
        control.announce(f"{len(settings)} settings on {len(devices)} devices")
        control = replace(control, announce=ignore)
    for setting, outcome in shared(partial(_attempt, effort, wanted, control), settings, devices):
        yield setting, "cut, --limit was used up" if outcome is None else outcome


def _attempt(
    effort: Effort, wanted: Wanted | None, control: RunControl, setting: Setting, place: Place
) -> Outcome | str | None:
    """None if the time is up: ``time.time()``, which processes share, is behind the deadline."""
    if time.time() > control.deadline:
        return None
    if wanted is not None:
        control = replace(control, wanted=wanted[setting])
    device = place.device
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
