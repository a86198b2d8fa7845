"""Subclasses of torch.nn.Conv2d that accelerate may swap, on what grounds, and the classes that take their place.

A class is swapped for one that is made of a class of ours and of itself, so that its layers stay instances of it. Of
classes that the caller names, only the method ``_conv_forward`` is replaced, and only where it is PyTorch's: it gets
the same arguments and gives the same result, whatever else the class does. Layers of timm that pad by the size of the
image or standardise their weights are known by name, and one of each is compared with the class of ours first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch

from haloconv.front import Front
from haloconv.fronts import Conv1d, Conv3d, ConvTranspose1d, ConvTranspose2d
from haloconv.functional import conv2d
from haloconv.layer import OWN_NAMES, Layer
from haloconv.module import Conv2d
from haloconv.reclass import (
    change_class,
    name_of,
    own_class,
    torch_class_of,
    why_no_subclass,
    why_not_as_it_is,
    why_not_plain,
)

FRONTS: tuple[type[Front], ...] = (Conv1d, Conv3d, ConvTranspose1d, ConvTranspose2d)
"""Layers that are swapped where they are exactly PyTorch's."""
_TIMM = ("timm.layers.", "timm.models.layers.")
_READ = frozenset(
    ("weight", "bias", "stride", "padding", "dilation", "groups", "kernel_size", "padding_mode", "qconfig")
) | {"_reversed_padding_repeated_twice", "_parameters", "_call_impl", "_wrapped_call_impl"}
_PYTHON = frozenset(("__call__", "__getattr__", "__getattribute__", "__slots__", "__reduce__", "__reduce_ex__"))
_EXTENDED = frozenset(("forward", "extra_repr"))
_OURS = {name for cls in (Layer, Conv2d) for name in vars(cls) if not name.startswith("__")}
_NOT_OVERRIDDEN = _READ | _PYTHON | _OURS - _EXTENDED


class SamePadded(Conv2d):
    """timm's Conv2dSame: ceil(H / stride) output rows for any H, by zeros above and below, one more below if uneven."""

    one_spec = False

    @staticmethod
    def padding_for(layer: torch.nn.Conv2d, image: Sequence[int]) -> int | tuple[int, ...] | str:
        """(top, bottom, left, right) for an image of these extents (H, W)."""
        if not getattr(layer, "same_pad", True):  # timm found at construction that the extents do not matter
            return Conv2d.padding_for(layer, image)
        sides: list[int] = []
        for size, taps, stride, dilation in zip(image, layer.kernel_size, layer.stride, layer.dilation, strict=True):
            total = max(0, int((size - 1) // stride * stride + (taps - 1) * dilation + 1 - size))
            sides += [total // 2, total - total // 2]
        return tuple(sides)


class Standardised(Conv2d):
    """timm's StdConv2d and ScaledStdConv2d: filters of mean 0 and variance 1, times gain and scale if there are."""

    eps: float
    scale: float  # of the scaled ones

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, K, P, Q) of ``input`` (N, C, H, W), or (K, P, Q) of (C, H, W)."""
        if isinstance(input, torch.fx.Proxy):
            return self._traced(input, None, None)
        weight = self.weight
        gain = getattr(self, "gain", None)
        gain = None if gain is None else (gain * self.scale).view(-1)
        rows = weight.reshape(1, self.out_channels, -1)
        rows = torch.nn.functional.batch_norm(rows, None, None, gain, training=True, momentum=0.0, eps=self.eps)
        return self._conv_forward(input, rows.reshape_as(weight), self.bias)


class StandardisedSamePadded(Standardised, SamePadded):
    """timm's StdConv2dSame and ScaledStdConv2dSame."""


class OwnForward(Conv2d):
    """A layer whose class has a forward of its own, in which ``self._conv_forward`` is ours."""

    def _traced(self, input: Any, weight: object, bias: object) -> torch.fx.Proxy:
        """A call of haloconv.conv2d: torch.fx has the nodes of the forward around it."""
        arguments = (input, weight, bias, self.stride, self.padding_for(self, ()), self.dilation, self.groups)
        settings = {"precision": self.precision, "family": self.family, "strict": self.strict}
        if self.padding_mode != "zeros":
            settings["padding_mode"] = self.padding_mode
        proxy: torch.fx.Proxy = input.tracer.create_proxy("call_function", conv2d, arguments, settings)
        return proxy


_KNOWN: dict[str, type[Conv2d]] = {
    "Conv2dSame": SamePadded,
    "StdConv2d": Standardised,
    "StdConv2dSame": StandardisedSamePadded,
    "ScaledStdConv2d": Standardised,
    "ScaledStdConv2dSame": StandardisedSamePadded,
}


def check_also(also: Collection[type[torch.nn.Conv2d]]) -> None:
    """Raise TypeError if something in ``also`` is no subclass of torch.nn.Conv2d."""
    named = isinstance(also, Collection) and all(
        isinstance(each, type) and issubclass(each, torch.nn.Conv2d) for each in also
    )
    if not named:
        raise TypeError(f"also= takes a collection of subclasses of torch.nn.Conv2d, not {also!r}")


def replacement(
    module: torch.nn.Module, also: Collection[type[torch.nn.Conv2d]] = ()
) -> type[Conv2d] | type[Front] | str:
    """The class of ours to stand where the ``own_class`` of the module stands, or a sentence that says why none may."""
    cls, torch_class = own_class(module), torch_class_of(module)
    front = next((ours for ours in FRONTS if ours.torch_class is torch_class), None)
    if front is not None:
        return why_not_plain(module, OWN_NAMES, torch_class) or _why_left(module) or front
    known = cls.__module__.startswith(_TIMM) and cls.__name__ in _KNOWN
    if cls is torch.nn.Conv2d or not (known or issubclass(cls, tuple(also))):
        return why_not_plain(module, OWN_NAMES) or Conv2d
    ours = why_no_subclass(module) or _counterpart(cls)
    return (not isinstance(ours, str) and why_not_as_it_is(module, OWN_NAMES)) or ours


def _why_left(module: torch.nn.Module) -> str | None:
    """None, or a sentence: why PyTorch runs a 3-D convolution of this kind whatever its input."""
    if not isinstance(module, torch.nn.Conv3d):
        return None
    reason = Conv3d.from_torch(module).why_left()
    return None if reason is None else f"{name_of(own_class(module))}: {reason}"


def padding_of(layer: torch.nn.Conv2d, image: Sequence[int]) -> int | tuple[int, ...] | str:
    """conv2d's ``padding`` in a layer's convolution of an image (H, W), be the layer ours or one that may become so."""
    ours = type(layer) if isinstance(layer, Conv2d) else replacement(layer)
    if isinstance(ours, type) and issubclass(ours, Conv2d):
        return ours.padding_for(layer, image)
    return Conv2d.padding_for(layer, image)


@cache
def _counterpart(cls: Any) -> type[Conv2d] | str:
    """The class of ours above a subclass of torch.nn.Conv2d, or a sentence that says why there is none."""
    if cls.__module__.startswith(_TIMM) and cls.__name__ in _KNOWN:
        ours = _above(cls, _KNOWN[cls.__name__])
        return _why_changed(cls, ours) or ours
    reason = _why_not_proven(cls)
    if reason is not None:
        return f"its class {name_of(cls)} {reason}"
    return _above(cls, Conv2d if cls.forward is torch.nn.Conv2d.forward else OwnForward)


def _above(cls: type[torch.nn.Conv2d], ours: type[Conv2d]) -> type[Conv2d]:
    """The class of ours made for layers of ``cls``, to which they still belong."""
    body: dict[str, object] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {"original": cls, "__reduce_ex__": _reduced}
    if ours is OwnForward:
        body["forward"] = cls.forward
    metaclass: Any = type(cls)
    made: type[Conv2d] = metaclass(cls.__name__, (ours, cls), body)
    return made


def _reduced(layer: Conv2d, protocol: int) -> str | tuple[Any, ...]:
    """What copies and files get: the class that the layer had, and its state."""
    reduced = object.__reduce_ex__(layer, max(2, protocol))
    if isinstance(reduced, str) or "original" not in vars(type(layer)):
        return reduced  # of a class that PyTorch made above ours
    return (_made, (layer.original,), *reduced[2:])


def _made(cls: Any) -> Conv2d:
    """A layer without state of the class of ours for ``cls``, for copies and files."""
    ours = _counterpart(cls)
    if isinstance(ours, str):
        raise TypeError(f"the file holds a layer that haloconv.accelerate swapped, and cannot any more: {ours}")
    return ours.__new__(ours)


def _why_not_proven(cls: type[torch.nn.Conv2d]) -> str | None:
    """None if ``_conv_forward`` of the class may be ours, and is what its forward runs."""
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Conv2d)]
    if cls._conv_forward is not torch.nn.Conv2d._conv_forward:
        return "has a _conv_forward of its own; haloconv.functional_mode() serves the conv2d in it"
    taken = sorted({name for each in own for name in vars(each)} & _NOT_OVERRIDDEN)
    if taken:
        return f"defines {taken[0]!r}, on which haloconv.Conv2d relies"
    forwards = [vars(each)["forward"] for each in own if "forward" in vars(each)]
    if forwards and not any(_runs_conv_forward(forward) for forward in forwards):
        return "has a forward of its own without _conv_forward; haloconv.functional_mode() serves the conv2d in it"
    return None


def _runs_conv_forward(forward: Callable[..., Any]) -> bool:
    names = getattr(inspect.unwrap(forward), "__code__", None)
    return names is not None and ("_conv_forward" in names.co_names or {"super", "forward"} <= {*names.co_names})


def _why_changed(cls: Any, ours: type[Conv2d]) -> str | None:
    """None if a layer of timm's class computes what the class of ours does, on images that need uneven padding."""
    name = name_of(cls)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            layer = cls(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), groups=2, bias=True).double()
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter))
            images = [torch.randn(2, 4, *extents, dtype=torch.float64) for extents in ((7, 9), (8, 6))]
            want = [layer(x) for x in images]
            change_class(layer, cls, ours)
            layer.set_up("ieee", "aten", False)
            same = all(torch.allclose(layer(x), y, rtol=1e-9, atol=1e-9) for x, y in zip(images, want, strict=True))
    except Exception as error:  # whatever a version of timm that is unknown here may raise
        return f"its class {name} could not be compared with the class of ours: {type(error).__name__}: {error}"
    return None if same else f"its class {name} computes something else than the class of that name that haloconv knows"
