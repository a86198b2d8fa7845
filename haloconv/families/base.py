"""The contract between the planner and a family: what it takes, and how it is bound to tensors of one form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from haloconv.problem import Conv2dProblem

BoundCall = Callable[..., torch.Tensor]
"""What binding gives: ``fprop(x, w, b) -> y``, ``dgrad(dy, w) -> dx`` or ``wgrad(dy, x) -> dw``."""


class TensorForm(NamedTuple):
    """What a plan may rely on about a tensor: strides in elements, and whether it starts at a multiple of 16 bytes."""

    strides: tuple[int, ...]
    aligned: bool


class Family(Protocol):
    """One algorithm for some problems."""

    name: str

    def why_not(self, problem: Conv2dProblem, device: torch.device) -> str | None:
        """None if the family takes the problem on the device, else a sentence that says why not."""

    def bind(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> BoundCall:
        """Everything that does not depend on the elements: compile, load, fix the launch.

        ``first`` and ``second`` are the forms of (x, w) in fprop, (dy, w) in dgrad, (dy, x) in wgrad. ``result_layout``
        is the memory order of the result, ``"nchw"`` or ``"nhwc"``.
        """


@runtime_checkable
class SeveralConfigs(Family, Protocol):
    """A family that has more than one config to offer, so that measuring may find a better one than its model does."""

    def candidates(
        self, problem: Conv2dProblem, first: TensorForm, second: TensorForm, result_layout: str, device: torch.device
    ) -> list[Hashable]:
        """At most ``MOST_CANDIDATES`` configs that run the problem, the model's best first; none twice.

        The arguments are those of ``bind``. A config is a frozen dataclass or a tuple of such.
        """

    def bind(
        self,
        problem: Conv2dProblem,
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


MOST_CANDIDATES = 3
Item = TypeVar("Item")


def candidates_of(
    family: Family,
    problem: Conv2dProblem,
    first: TensorForm,
    second: TensorForm,
    result_layout: str,
    device: torch.device,
) -> list[Hashable | None]:
    """What a family offers for a problem that it takes; ``[None]`` if it has one config for it."""
    if isinstance(family, SeveralConfigs):
        return list(family.candidates(problem, first, second, result_layout, device))
    return [None]


def bind_config(
    family: Family,
    problem: Conv2dProblem,
    first: TensorForm,
    second: TensorForm,
    result_layout: str,
    device: torch.device,
    config: Hashable | None,
) -> BoundCall:
    """``family.bind`` with one of its candidates; None is the model's best."""
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
    if isinstance(config, tuple):
        keys = [config_key(part) for part in config]
        return keys[0] if len(set(keys)) == 1 else " | ".join(keys)
    if not is_dataclass(config) or type(config).__str__ is not object.__str__:
        return str(config)
    values = [(field.name, getattr(config, field.name)) for field in fields(config)]
    return " ".join(name if value is True else f"{name}{value}" for name, value in values if value is not False)


def few_apart(ordered: Iterable[Item], kind: Callable[[Item], Hashable], most: int = MOST_CANDIDATES) -> list[Item]:
    """The first of each kind, in their order, ``most`` at most: neighbours in a model's order are often the same."""
    found: dict[Hashable, Item] = {}
    for item in ordered:
        if found.setdefault(kind(item), item) is item and len(found) == most:
            break
    return list(found.values())


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def strides_of(shape: tuple[int, int, int, int], layout: str) -> tuple[int, int, int, int]:
    """Strides in elements of a dense 4-D tensor stored as ``"nchw"`` or ``"nhwc"``."""
    _, c, h, w = shape
    if layout == "nhwc":
        return (c * h * w, 1, w * c, c)
    return (c * h * w, h * w, w, 1)


def is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a 4-D tensor counts as channels_last, by the rule that PyTorch derives output layouts from.

    The rule of ``is_channels_last_strides_2d`` in c10/core/MemoryFormat.h: strides grow in the order C, W, H, N, and
    forms that are both contiguous and channels_last count as contiguous.
    """
    if strides[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def dense_call(
    launch: Callable[..., None], problem: Conv2dProblem, out_shape: tuple[int, ...], out_strides: tuple[int, ...]
) -> BoundCall:
    """fprop(x, w, b) -> y or dgrad(dy, w) -> dx of a kernel that takes (input, w, bias, output)."""

    def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty_strided(out_shape, out_strides)
        if b is not None and not b.is_contiguous():
            b = b.contiguous()
        launch(x.data_ptr(), w.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr())
        return y

    def dgrad(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = dy.new_empty_strided(out_shape, out_strides)
        launch(dy.data_ptr(), w.data_ptr(), 0, dx.data_ptr())
        return dx

    return dgrad if problem.direction == "dgrad" else fprop


def summed_call(
    launch: Callable[..., None],
    sum_parts: Callable[..., None],
    partial_elems: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> BoundCall:
    """wgrad(dy, x) -> dw of a kernel that takes (x, dy, partial sums) and of one that sums the parts, in fp32."""

    def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        partials = x.new_empty(partial_elems, dtype=torch.float32)
        launch(x.data_ptr(), dy.data_ptr(), partials.data_ptr())
        dw = x.new_empty_strided(shape, strides)
        sum_parts(dw.data_ptr(), partials.data_ptr())
        return dw

    return wgrad
