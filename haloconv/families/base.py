"""The contract between the planner and a family: what it takes, how it would run it, and how it is bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch

from haloconv.jit import KernelSource
from haloconv.problem import Direction, Problem, Request

BoundCall = Callable[..., torch.Tensor]
"""What binding gives: ``fprop(x, w, b) -> y``, ``dgrad(dy, w) -> dx`` or ``wgrad(dy, x) -> dw``.

fprop gets a fourth tensor, as y and of any strides, where the problem's epilogue has a residual.
``dgrad(dy, w, b)`` of a problem with a bias, which only a family that ``has_epilogue`` is asked for.
"""


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


class Kernel(Protocol):
    """The host half of a kernel, a module: what it takes, what it offers, and how it is launched."""

    KERNEL: str

    def why_not(self, request: Request) -> str | None:
        """None if the kernel takes the request, else a sentence."""

    def configs(self, request: Request) -> list[Config]:
        """At most ``MOST_CONFIGS``, best first, none twice; none if the kernel does not take the request."""

    def bind(self, request: Request, config: Config) -> BoundCall:
        """The launch for a request, with everything fixed that does not depend on the elements; see ``Family.bind``."""


class Family(Protocol):
    """One algorithm on one kind of hardware, for some problems.

    ``directions`` and ``dtypes`` are those that it may take. With ``tensor_cores`` fp32 is multiplied in TF32. With
    ``has_epilogue`` its kernels apply any Epilogue to fp32 sums; else PyTorch's kernels apply it to what they wrote.
    With ``has_padding_modes`` they take what stands outside an image from inside it as ``Request.modes`` says, and
    ``configs`` is empty where none does. A ``depthwise`` one takes layers of one channel a group alone. It runs on GPUs
    of the compute ``capability`` and, with ``newer``, on those that came after it.
    """

    name: str
    directions: tuple[Direction, ...]
    dtypes: tuple[torch.dtype, ...]
    tensor_cores: bool
    has_epilogue: bool
    has_padding_modes: bool
    depthwise: bool
    capability: tuple[int, int]
    newer: bool

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """None if the family takes the problem on the device, whatever the tensors' forms, else a sentence."""

    def configs(self, request: Request) -> list[Config]:
        """What runs what the family takes, the model's best first, none twice; never empty.

        The first ``MOST_CONFIGS`` are those to measure; a record may name any.
        """

    def bind(self, request: Request, config: Config) -> BoundCall:
        """Everything that does not depend on the elements: compile, load, fix the launch.

        ``config`` is one that ``configs`` returned for this request.
        """

    def sources(self) -> list[KernelSource]:
        """Sources that stand for all of the family's kernels: what CI compiles."""


MOST_CONFIGS = 3


def config_key(config: object) -> str:
    """What a config is made of as one line that is the same in every process: ``run128 runs2 boxes``.

    Fields are named, flags stand there if they are set; parts of a tuple are joined by `` | ``, or said once if they
    are all the same. A config class may have a ``__str__`` of its own.
    """
    if isinstance(config, tuple):
        keys = [config_key(part) for part in config]
        return keys[0] if len(set(keys)) == 1 else " | ".join(keys)
    if not is_dataclass(config) or type(config).__str__ is not object.__str__:
        return str(config)
    values = [(each.name, getattr(config, each.name)) for each in fields(config)]
    return " ".join(name if value is True else f"{name}{value}" for name, value in values if value is not False)
