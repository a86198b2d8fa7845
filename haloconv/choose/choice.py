"""Which family runs a problem, with which config, and why: by records of measurements, else by rules.

Nothing is measured here. What must be run before a choice can be made, code above this one runs (choose/measuring.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from haloconv import env
from haloconv.choose import trust
from haloconv.choose.buckets import size_of
from haloconv.choose.measured import by_measured_rule
from haloconv.choose.measuring import measuring, wanted
from haloconv.choose.records import shelf_of
from haloconv.device import device_facts, has_facts, stand_in
from haloconv.families import FAMILIES, check_family
from haloconv.families.base import Config
from haloconv.problem import NO_EPILOGUE, Problem, Request, dense_request

DISABLED = f"{env.DISABLE} is set, so that PyTorch's own convolution runs"


class Choice(NamedTuple):
    """The family that runs a problem and why; ``refused`` if our kernels do not take the problem at all.

    ``measured`` if a record made the choice; ``kernel`` and ``config`` (its key) are then those of the record, else
    empty: the family's own choice. In a plan they are what runs.
    """

    family: str
    reason: str
    refused: bool = False
    measured: bool = False
    kernel: str = ""
    config: str = ""


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
    reason = FAMILIES["direct" if family == "auto" else family].why_not(problem, device)
    if reason is not None:
        return Choice("aten", reason, refused=True)
    if family != "auto":
        return Choice(family, "asked for")
    found = recorded(problem, device, examines)
    if found is not None:
        return found
    return _choose_own(problem, device) if stand_in() is not None else Choice(*by_measured_rule(problem, device))


def _choose_own(problem: Problem, device: torch.device) -> Choice:
    """On a stand-in for a GPU, where nothing is fast: the most special of our families that takes the problem."""
    takes = (name for name, family in reversed(FAMILIES.items()) if family.why_not(problem, device) is None)
    return Choice(next(takes), "the most special of our families that takes the problem")


def choose_now(request: Request, family: str) -> Choice:
    """The choice for tensors of these forms: measured now if the user asked for it and there is no record."""
    asked = replace(request, problem=replace(request.problem, epilogue=NO_EPILOGUE))  # what is measured and recorded
    choice = choose(asked.problem, asked.device, family)
    code = measuring() if may_be_measured(choice, family) else None
    if code is None:
        return choice
    obstacle = code.measure_now(asked)
    if obstacle is None:
        return choose(asked.problem, asked.device, family)
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

    A record of the user's own is believed because this machine verified it before it timed it, one that came with the
    package if it is trusted.
    """
    if problem.is_empty or not has_facts(device):
        return None
    found = shelf_of(device_facts(device.index)).find(problem)
    if found is None or FAMILIES[found[0].family].why_not(problem, device) is not None:
        return None
    record, shipped = found
    why = record.why(size_of(problem), shipped)
    choice = Choice(record.family, why, measured=True, kernel=record.kernel, config=record.config)
    if shipped and examines and not trust.knows(record):
        request = dense_request(problem, device)
        return choice if trust.examine(record, request, config_of(choice, request)) else None
    return choice
