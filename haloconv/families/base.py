"""The contract between the planner and a family: what it takes, and how it is bound to tensors of one form."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from haloconv.problem import Problem, Request, TensorForm

BoundCall = Callable[..., torch.Tensor]
"""What binding gives: ``fprop(x, w, b) -> y``, ``dgrad(dy, w) -> dx`` or ``wgrad(dy, x) -> dw``."""


@dataclass(frozen=True)
class Config:
    """What a kernel was chosen to do for a request.

    ``kernel`` and ``key`` name it in records and rows: a pair of twins such as ``halo_sm90/conv``, and its parameters
    as one line that is the same in every process (empty if it has none). ``derived`` is what the kernel's ``bind``
    needs, worked out once; nobody else looks into it.
    """

    kernel: str
    key: str = ""
    derived: Any = field(default=None, compare=False, repr=False)


class Family(Protocol):
    """One algorithm for some problems."""

    name: str

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """None if the family takes the problem on the device, else a sentence that says why not."""

    def bind(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> BoundCall:
        """Everything that does not depend on the elements: compile, load, fix the launch.

        ``first`` and ``second`` are the forms of (x, w) in fprop, (dy, w) in dgrad, (dy, x) in wgrad. ``result_layout``
        is the memory order of the result, ``"nchw"`` or ``"nhwc"``.
        """


@runtime_checkable
class SeveralConfigs(Family, Protocol):
    """A family that has more than one config to offer, so that measuring may find a better one than its model does."""

    def candidates(
        self, problem: Problem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Hashable]:
        """At most ``MOST_CANDIDATES`` configs that run the problem, the model's best first; none twice.

        The arguments are those of ``bind``. A config is a frozen dataclass or a tuple of such.
        """

    def bind(
        self,
        problem: Problem,
        first: TensorForm,
        second: TensorForm,
        result_layout: str,
        device: torch.device,
        config: Hashable | None = None,
    ) -> BoundCall:
        """As ``Family.bind``, with one of ``candidates`` of the same arguments; None is the model's best."""


@runtime_checkable
class Activates(Family, Protocol):
    """A family whose kernels apply activations on the way out: ``bind`` applies that of the problem if it is listed."""

    activations: tuple[str, ...]


MOST_CANDIDATES = MOST_CONFIGS = 3
Item = TypeVar("Item")


def candidates_of(
    family: Family,
    problem: Problem,
    first: TensorForm,
    second: TensorForm,
    result_layout: str,
    device: torch.device,
) -> list[Hashable | None]:
    """What a family offers for a problem that it takes; ``[None]`` if it has one config for it."""
    if hasattr(family, "configs"):
        return list(family.configs(Request(problem, first, second, result_layout, device)))
    if isinstance(family, SeveralConfigs):
        return list(family.candidates(problem, first, second, result_layout, device))
    return [None]


def bind_config(
    family: Family,
    problem: Problem,
    first: TensorForm,
    second: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Hashable | None,
) -> BoundCall:
    """``family.bind`` with one of its candidates; None is the model's best."""
    if hasattr(family, "configs"):
        request = Request(problem, first, second, result_layout, device)
        return family.bind(request, family.configs(request)[0] if config is None else config)
    if config is None:
        return family.bind(problem, first, second, result_layout, device)
    return family.bind(problem, first, second, result_layout, device, config=config)


def config_key(config: object) -> str:
    """A config as one line that is the same in every process: ``run128 runs2 boxes``; empty for None.

    Fields are named, flags stand there if they are set; parts of a tuple are joined by `` | ``, or said once if they
    are all the same. A config class may have a ``__str__`` of its own.
    """
    if config is None:
        return ""
    if isinstance(config, Config):
        return config.key
    if isinstance(config, tuple):
        keys = [config_key(part) for part in config]
        return keys[0] if len(set(keys)) == 1 else " | ".join(keys)
    if not is_dataclass(config) or type(config).__str__ is not object.__str__:
        return str(config)
    values = [(each.name, getattr(config, each.name)) for each in fields(config)]
    return " ".join(name if value is True else f"{name}{value}" for name, value in values if value is not False)
