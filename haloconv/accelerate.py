"""Swap the convolutions of a model for ours, by type, keeping every weight."""

from __future__ import annotations

from typing import NamedTuple

import torch

from haloconv.module import Conv2d


class Swap(NamedTuple):
    """One replaced module. ``names`` are all the places in the model where it stands; shared modules have several."""

    names: tuple[str, ...]
    module: Conv2d

    @property
    def name(self) -> str:
        return self.names[0]


def accelerate(
    model: torch.nn.Module, *, family: str = "auto", precision: str | None = None, strict: bool = False
) -> list[Swap]:
    """Replace every child of ``model`` whose type is exactly torch.nn.Conv2d by a haloconv.Conv2d, in place.

    The new modules hold the same Parameters. A module that stands in several places stays one module. Subclasses of
    torch.nn.Conv2d are left alone, because they may compute something else. ``family``, ``precision`` and ``strict``
    mean what they mean for haloconv.Conv2d.

    Raises ValueError if the model is itself a torch.nn.Conv2d: it has no parent in which it could be replaced.
    """
    if type(model) is torch.nn.Conv2d:
        raise ValueError("the model is itself a torch.nn.Conv2d; use haloconv.Conv2d.from_torch(model) instead")
    places: dict[torch.nn.Conv2d, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is torch.nn.Conv2d:
            places.setdefault(module, []).append(name)
    swaps = []
    for conv, names in places.items():
        module = Conv2d.from_torch(conv, precision=precision, family=family, strict=strict)
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)
        swaps.append(Swap(tuple(names), module))
    return swaps
