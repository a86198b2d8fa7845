"""Which family runs a problem, with which config, and why: by records of measurements, else by rules.

Nothing is measured here. What must be run before a choice can be made, code above this one runs (choose/measuring.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from haloconv import env
from haloconv.choose import trust
from haloconv.choose.buckets import size_of
from haloconv.choose.measured import by_measured_rule
from haloconv.choose.measuring import measuring, wanted
from haloconv.choose.records import Record, Shelf, shelf_of
from haloconv.choose.whole import is_ahead, known_instead, saved_ms
from haloconv.device import device_facts, has_facts, stand_in
from haloconv.families import FAMILIES, UNIVERSAL, check_family
from haloconv.families.base import Config
from haloconv.problem import Problem, Request, dense_request

DISABLED = f"{env.DISABLE} is set, so that PyTorch's own convolution runs"


class Choice(NamedTuple):
    """The family that runs a problem and why; ``refused`` if our kernels do not take the problem at all.

    ``measured`` if a record of the whole problem made the choice. ``kernel`` and ``config`` (its key) are those of a
    record, else empty: the family's own choice. In a plan they are what runs.
    """

    family: str
    reason: str
    refused: bool = False
    measured: bool = False
    kernel: str = ""
    config: str = ""

    @property
    def in_terms(self) -> bool:
        """Whether tf32x3 runs as TF32 products on tensor cores; families without them compute full fp32."""
        return FAMILIES[self.family].tensor_cores


def choose(problem: Problem, device: torch.device, family: str = "auto", examines: bool = True) -> Choice:
    """Which family runs ``problem`` on ``device``, and why. ``family`` is ``"auto"`` or the one asked for.

    ``"auto"`` follows records of measurements where there are any, else rules, with care on a GPU model that was not
    measured (choose/measured.py). Without ``examines`` a shipped record is believed unseen, for a choice that nothing
    hangs on. Raises ValueError for an unknown family.
    """
    check_family(family)
    if family == "aten":
        return Choice("aten", "asked for")
    if env.disabled():
        return Choice("aten", DISABLED)
    reason = FAMILIES[UNIVERSAL if family == "auto" else family].why_not(problem, device)
    if reason is not None:
        return Choice("aten", reason, refused=True)
    if family != "auto":
        return Choice(family, "asked for")
    choice = _choose_measured(problem, device, examines)
    if problem.precision != "tf32x3":
        return choice
    return choice._replace(reason=f"{choice.reason}; computed in {'tf32x3' if choice.in_terms else 'full fp32'}")


def _choose_measured(problem: Problem, device: torch.device, examines: bool) -> Choice:
    """Choose by records of the problem, else by rules; where these have nothing in tf32x3, those of full fp32 count."""
    found = recorded(problem, device, examines)
    if found is not None:
        return found
    if stand_in() is not None:
        return _choose_own(problem, device)
    ruled = Choice(*by_measured_rule(problem, device))
    if problem.precision != "tf32x3" or ruled.in_terms:
        return ruled
    in_full = recorded(replace(problem, precision="ieee"), device, examines)
    return ruled if in_full is None else in_full._replace(measured=False)


def _choose_own(problem: Problem, device: torch.device) -> Choice:
    """The most special of our families that takes the problem: for stand-ins for a GPU, where nothing is fast."""
    takes = (name for name in reversed(FAMILIES) if FAMILIES[name].why_not(problem, device) is None)
    return Choice(next(takes), "the most special of our families that takes the problem")


def choose_now(request: Request, family: str) -> Choice:
    """The choice for tensors of these forms: measured now if the user asked for it and there is no record."""
    choice = choose(request.problem, request.device, family)
    code = measuring() if may_be_measured(choice, family) else None
    if code is None:
        return choice
    obstacle = code.measure_now(request)
    if obstacle is None:
        return choose(request.problem, request.device, family)
    return choice._replace(reason=f"{choice.reason}; {obstacle}")


def may_be_measured(choice: Choice, family: str) -> bool:
    """Whether measuring at first use has a say in the choice for the ``family`` asked for, and no record had."""
    open_to_it = family == "auto" and not choice.refused and not choice.measured
    return open_to_it and wanted() and not env.disabled()


def config_of(choice: Choice, request: Request) -> Config:
    """The config to bind: the chosen one if the family offers it for these tensors, else the best that it offers.

    A config that was measured at another size need not run, or be good, at this one; its kernel is asked first.
    """
    offered = FAMILIES[choice.family].configs(request)
    of_kernel = [config for config in offered if config.kernel == choice.kernel]
    named = [config for config in of_kernel if config.key == choice.config]
    return [*named, *of_kernel, *offered][0]


def recorded(problem: Problem, device: torch.device, examines: bool = True) -> Choice | None:
    """The choice that records hold for a problem on a device, or None.

    A problem that has none is chosen by that of the same convolution with or without a bias, and the passes over y that
    are saved beyond it (choose/whole.py). A record of the user's own is believed because this machine verified it
    before it timed it, one that came with the package if it is trusted.
    """
    if problem.is_empty or not has_facts(device):
        return None
    shelf = shelf_of(device_facts(device.index))
    known = (_looked_up(shelf, problem, asked) for asked in (problem, *known_instead(problem)))
    found = next((each for each in known if each is not None), None)
    if found is None:
        return None
    record, shipped, choice = found
    if FAMILIES[choice.family].why_not(problem, device) is not None:
        return None
    if problem.epilogue.residual and not choice.measured:
        choice = _with_residual(choice, problem, device)
    if shipped and examines and not trust.knows(record):
        request = dense_request(problem, device)
        return choice if trust.examine(record, request, config_of(choice, request)) else None
    return choice


def _with_residual(choice: Choice, problem: Problem, device: torch.device) -> Choice:
    """The choice by a record without a residual: the family decides where it has another kernel first for one.

    ``halo_sm90/conv`` may take three times as long with one (a VAE decoder's layer on an NVIDIA H200: 0.14 and 0.48
    ms), which a record of the convolution alone does not know.
    """
    first = FAMILIES[choice.family].configs(dense_request(problem, device))[0]
    return choice if first.kernel == choice.kernel else choice._replace(kernel="", config="")


def _looked_up(shelf: Shelf, problem: Problem, asked: Problem) -> tuple[Record, bool, Choice] | None:
    """The record of what is asked in the problem's place, whether it was shipped, and what it chooses for the problem.

    None if there is no record, or if what is saved beyond it is not known.
    """
    found = shelf.find(asked)
    if found is None:
        return None
    record, shipped = found
    why = record.why(size_of(problem), shipped)
    if asked is not problem and record.own is not None and record.own_ms is not None:
        family, (n, h, w) = record.own.partition("/")[0], record.size
        saved = saved_ms(replace(problem, n=n, h=h, w=w), replace(asked, n=n, h=h, w=w), family, record.gpu)
        if saved is None:
            return None
        if saved:
            aten_ms = record.aten_ms + saved
            why += f"; as asked here {aten_ms / record.own_ms:.2f}x, with passes over the result at the copy rate"
            wins = is_ahead(record.own_ms, aten_ms, problem.direction)
            record = record if wins == (record.family != "aten") else _with_the_other_choice(record)
    return record, shipped, Choice(record.family, why, False, asked is problem, record.kernel, record.config)


@cache
def _with_the_other_choice(record: Record) -> Record:
    """The record with the other choice: the fastest of ours in place of PyTorch, or PyTorch."""
    if record.family != "aten" or record.own is None or record.own_ms is None:
        return replace(record, family="aten", kernel="aten", config="", ms=record.aten_ms)
    return replace(record, family=record.own.partition("/")[0], kernel=record.own, ms=record.own_ms)
