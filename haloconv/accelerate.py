"""Swap the convolutions of a model for ours and back: a layer changes its class and stays the same object.

Because it stays the same object, all that refers to it holds: hooks and what they closed over, optimisers, shared
modules, DDP and FSDP2 (which puts gathered weights into the very module that it was given), lists outside the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from haloconv import env
from haloconv.changes import Changes, Left, Swap, extents, shown, tell_disabled
from haloconv.choose.choice import DISABLED
from haloconv.functional import check_names
from haloconv.layer import OWN_NAMES, Layer
from haloconv.precision import Precision
from haloconv.precompile import Inputs, precompile
from haloconv.reclass import change_class, is_convolution, own_class
from haloconv.subclasses import check_also, replacement


@dataclass(frozen=True, repr=False)
class Acceleration(Changes[Swap]):
    """What ``accelerate`` did: a sequence of the swaps; ``print`` shows them with all that was left, and why.

    ``swaps`` are the layers that became ours, ``already`` those that were, ``left`` what stays PyTorch's.
    """

    swaps: tuple[Swap, ...]
    already: tuple[Swap, ...]
    left: tuple[Left, ...]

    @property
    def _changed(self) -> tuple[Swap, ...]:
        return self.swaps

    @property
    def summary(self) -> str:
        """One line of counts."""
        missed = sum(each.convolution for each in self.left)
        others = len(self.left) - missed
        parts = [f"{len(self.swaps)} of {len(self.swaps) + missed} convolutions swapped"]
        parts += [f"{len(self.already)} were haloconv's already"] if self.already else []
        parts += [f"{others} of other kinds left"] if others else []
        return ", ".join(parts)

    def _lines(self) -> Iterator[tuple[str, str, str, str]]:
        """The table row by row: name, extents, state, reason."""
        for swap in self.swaps:
            yield shown(swap.names), extents(swap.module), "swapped", swap.expected
        for swap in self.already:
            state = "haloconv's already" if swap.before is None else f"set anew: {swap.module.settings()}"
            yield shown(swap.names), extents(swap.module), state, swap.expected
        for left in self.left:
            yield shown(left.names), extents(left.module), "left" if left.convolution else "other", left.reason


def accelerate(
    model: torch.nn.Module,
    *,
    strict: bool = False,
    family: str = "auto",
    precision: Precision | None = None,
    also: Collection[type[torch.nn.Conv2d]] = (),
    example_inputs: Inputs | None = None,
) -> Acceleration:
    """Make every torch.nn.Conv2d, Conv1d, ConvTranspose1d and ConvTranspose2d of ``model`` one of haloconv's, in place.

    So is a Conv3d of the kinds that haloconv.conv3d does not leave to PyTorch.

    A layer changes its class and stays the same object: parameters, hooks, names, device, memory format, mode, sharing
    and parametrisations are untouched. Other kinds of convolution are left and listed with the reason, and so are
    subclasses, which may compute something else: but for those of timm that haloconv knows and finds unchanged, and
    those in ``also`` (or derived from one there) of which it is proven that our convolution may take the place of
    PyTorch's. They stay instances of their class. ``family``, ``precision`` and ``strict`` mean what they mean for
    haloconv.Conv2d; layers that were swapped before take them, too. ``restore`` undoes it.

    With ``example_inputs``, as haloconv.precompile takes them, the kernels of the swapped model are compiled now, side
    by side: those of inference, and in training mode those of gradients, too.

    With HALOCONV_DISABLE=1 nothing is changed, ``strict`` or not, and a warning says so once.

    Raises ValueError for an unknown precision or family, TypeError if something in ``also`` is no subclass of
    torch.nn.Conv2d, and RuntimeError if ``strict`` is set and a 1-D or 2-D convolution cannot be swapped; nothing is
    changed then. What the model raises for ``example_inputs``, after its layers were swapped.
    """
    check_names(precision, family)
    check_also(also)
    places = _places(model)
    if env.disabled():
        tell_disabled("accelerate")
        return _nothing_done(places)
    found = {module: replacement(module, also) for module in places if not isinstance(module, Layer)}
    left = tuple(
        Left(places[module], module, reason, is_convolution(module))
        for module, reason in found.items()
        if isinstance(reason, str)
    )
    missed = [each for each in left if each.convolution]
    if strict and missed:
        lines = "\n".join(f"  {shown(each.names)}: {each.reason}" for each in missed)
        raise RuntimeError(f"haloconv.accelerate(strict=True) cannot swap every convolution of the model:\n{lines}")
    swaps, already = [], []
    for module, names in places.items():
        if isinstance(module, Layer):
            before = module.settings()
            if module.swapped:
                module.set_up(precision, family, strict)
            already.append(Swap(names, module, None if before == module.settings() else before))
        elif not isinstance(ours := found[module], str):
            layer = _changed(module, ours, names[0])
            layer.set_up(precision, family, strict)
            swaps.append(Swap(names, layer))
    if example_inputs is not None:
        precompile(model, example_inputs)
    return Acceleration(tuple(swaps), tuple(already), left)


def _changed(module: torch.nn.Module, ours: type[torch.nn.Module], name: str) -> Any:
    """The module, which is a layer of ours from now on."""
    change_class(module, own_class(module), ours)
    layer: Any = module
    layer.swapped = True
    vars(module)["_layer_name"] = name
    return layer


def _nothing_done(places: dict[torch.nn.Module, tuple[str, ...]]) -> Acceleration:
    """What ``accelerate`` gives under HALOCONV_DISABLE: every layer left."""
    already = tuple(Swap(names, module) for module, names in places.items() if isinstance(module, Layer))
    left = tuple(
        Left(
            names,
            module,
            reason if isinstance(reason := replacement(module), str) else DISABLED,
            is_convolution(module),
        )
        for module, names in places.items()
        if not isinstance(module, Layer)
    )
    return Acceleration((), already, left)


def restore(model: torch.nn.Module) -> list[str]:
    """Undo what ``accelerate`` and ``fuse`` changed, in place. Returns the names of these modules.

    Nothing of haloconv stays in them, and outputs are PyTorch's own again, bit by bit. Layers that were built as
    layers of haloconv are left. Calling it again changes nothing.

    Raises RuntimeError if a layer got a ``padding_mode`` since that PyTorch's has not; nothing is changed then.
    """
    restored: list[str] = []
    swapped = {
        module: names
        for module, names in _places(model).items()
        if isinstance(module, Layer) and module.swapped and "original" in vars(own_class(module))
    }
    for module, names in swapped.items():
        if not isinstance(module.padding_mode, str):
            raise RuntimeError(
                f"haloconv.restore: {shown(names)} has padding_mode={module.padding_mode!r}, and layers of PyTorch "
                "have one name for all dimensions; assign one first"
            )
    for module, names in swapped.items():
        ours: Any = own_class(module)
        change_class(module, ours, ours.original)
        for name in OWN_NAMES:
            vars(module).pop(name, None)
        restored.extend(names)
    fusion: Any = import_module("haloconv.fusion.module")
    fused = {module for module in model.modules() if fusion.set_back(module)}
    restored.extend(name for name, module in model.named_modules(remove_duplicate=False) if module in fused)
    return restored


def _places(model: torch.nn.Module) -> dict[torch.nn.Module, tuple[str, ...]]:
    """Every convolution of any kind in the model, with all the names that it has there."""
    places: dict[torch.nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.modules.conv._ConvNd) or is_convolution(module):
            places[module] = (*places.get(module, ()), name)
    return places
