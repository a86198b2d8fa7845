"""What ``accelerate`` and ``fuse`` did to a model: what changed and what was left, which prints as a table."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple, TypeVar, overload

import torch

from haloconv.choose.choice import DISABLED
from haloconv.layer import Layer
from haloconv.reclass import SERVED, torch_class_of

T = TypeVar("T")
TABLES = "haloconv.report.changes"  # loaded when something is shown
_ROOT = "(the model itself)"
_told_disabled: set[str] = set()


class Swap(NamedTuple):
    """One layer that is ours now. ``names`` are all the places in the model where it stands: shared ones have several.

    ``before`` names settings that it had as a layer of ours and has no longer; None if there are none.
    """

    names: tuple[str, ...]
    module: Layer
    before: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def expected(self) -> str:
        """The family that runs the layer and why, as far as that is known: fully only after its first input."""
        choice = self.module.choice()
        return "chosen at its first input" if choice is None else f"{choice.family}: {choice.reason}"


class Left(NamedTuple):
    """One module that was left as it is, and why. ``convolution`` if strict refuses it: 1-D, 2-D, and transposed."""

    names: tuple[str, ...]
    module: torch.nn.Module
    reason: str
    convolution: bool

    @property
    def name(self) -> str:
        return self.names[0]


class Changes(Sequence[T]):
    """What was done to a model: a sequence that prints as a table of what changed and of all that was left, and why."""

    @property
    def _changed(self) -> tuple[T, ...]:
        """The items of the sequence."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """One line of counts."""
        raise NotImplementedError

    def _lines(self) -> Iterator[tuple[str, str, str, str]]:
        """The table row by row: name, extents, state, reason."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._changed)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._changed[index]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    def __str__(self) -> str:
        text: str = import_module(TABLES).as_text(self.summary, self._lines())
        return text

    def __rich__(self) -> object:
        return import_module(TABLES).change_table(self.summary, self._lines())


def tell_disabled(function: str) -> None:
    """Warn once in a process that a function of haloconv does nothing under HALOCONV_DISABLE."""
    if function not in _told_disabled:
        _told_disabled.add(function)
        warnings.warn(f"haloconv.{function} changes nothing: {DISABLED}", RuntimeWarning, stacklevel=3)


def shown(names: tuple[str, ...]) -> str:
    """Names of modules as tables have them."""
    return ", ".join(name or _ROOT for name in names)


def extents(module: torch.nn.Module) -> str:
    """What the layer's constructor was told, as its repr has it."""
    if isinstance(module, torch.nn.Conv2d):
        told: str = torch.nn.Conv2d.extra_repr(module)
        return told
    if isinstance(module, SERVED):
        return f"{torch_class_of(module).__name__}: {torch.nn.modules.conv._ConvNd.extra_repr(module)}"
    return type(module).__name__
