"""Giving a layer another class while it stays the same object, and which layers this may be done to.

PyTorch itself puts classes that it makes at run time above a layer's own: parametrisations hang their properties on
one, FSDP2 its methods. They are made again above the new class, with all that they had above the old one.
"""

from __future__ import annotations

import re
import sys

import torch

_MAKERS = ("torch.nn.utils.parametrize", "torch.distributed.")  # modules whose functions make classes of layers
_NOT_COPIED = ("__dict__", "__weakref__")
BODIES = ("forward", "_conv_forward")
SERVED = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)
"""PyTorch's layers of which we have one of the same name."""
_NAMED_AS_2D = re.compile(r"conv(?!transpose)\w*2d", re.IGNORECASE)
_FAKE_QUANTISED = ("torch.ao.nn.qat", "torch.ao.nn.intrinsic.qat", "torch.nn.qat", "torch.nn.intrinsic.qat")


def own_class(module: torch.nn.Module) -> type:
    """The class of the module below those that PyTorch made for it at run time."""
    cls = type(module)
    while _is_made(cls):
        cls = cls.__bases__[-1]
    return cls


def change_class(module: torch.nn.Module, old: type, new: type) -> None:
    """Make ``module`` an instance of ``new`` where it is one of ``old``, its ``own_class``."""
    module.__class__ = _rebuilt(type(module), old, new)


def _rebuilt(cls: type, old: type, new: type) -> type:
    """``cls`` with ``new`` in the place of ``old``. A class made at run time may be that of copies, so it stays."""
    if cls is old:
        return new
    *others, last = cls.__bases__
    body = {name: value for name, value in vars(cls).items() if name not in _NOT_COPIED}
    return type(cls)(cls.__name__, (*others, _rebuilt(last, old, new)), body)


def _is_made(cls: type) -> bool:
    """True for a class that a function of PyTorch made, so that its module does not have it under its name."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__.startswith(_MAKERS) and getattr(module, cls.__name__, None) is not cls


def torch_class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """PyTorch's class that the module's may be swapped as: the one of ``SERVED`` that it is of, else its Conv2d."""
    return next((cls for cls in SERVED if isinstance(module, cls)), torch.nn.Conv2d)


def is_convolution(module: torch.nn.Module) -> bool:
    """Whether the module is a convolution of a kind that is ours whole, be it 2-D in name only. 3-D ones are not."""
    if isinstance(module, SERVED):
        return not isinstance(module, torch.nn.Conv3d)
    if isinstance(module, torch.nn.modules.conv._ConvNd) or next(module.children(), None) is not None:
        return False
    return _NAMED_AS_2D.search(_plain_name(module)) is not None


def why_not_plain(
    module: torch.nn.Module, taken: frozenset[str], torch_class: type[torch.nn.Module] = torch.nn.Conv2d
) -> str | None:
    """None if the module computes exactly what one of ``torch_class`` does, else a sentence: why this is not known.

    ``taken`` are names of attributes that the module must not have for purposes of its own.
    """
    cls = own_class(module)
    if cls is torch_class:
        return why_not_as_it_is(module, taken)
    reason = why_no_subclass(module, torch_class)
    if reason is not None:
        return reason
    own = [body for body in BODIES if getattr(cls, body, None) is not getattr(torch_class, body, None)]
    tells = f"has a {own[0]} of its own" if own else "may compute something else"
    return f"its class {name_of(cls)} {tells}; accelerate takes what it can prove of classes that also= names"


def why_not_as_it_is(module: torch.nn.Module, taken: frozenset[str]) -> str | None:
    """None if nothing was done to this one module that keeps its class from telling what it computes."""
    for name in BODIES:
        if name in vars(module):
            return f"its {name} is replaced on the instance, so that no class decides what it computes"
    if getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantisation, and convert knows layers by their exact type; accelerate after convert"
    own = sorted(taken & vars(module).keys())
    return f"it has an attribute {own[0]!r} of its own, which means something else in a haloconv layer" if own else None


def why_no_subclass(module: torch.nn.Module, torch_class: type[torch.nn.Module] = torch.nn.Conv2d) -> str | None:
    """None if the module is of a subclass of ``torch_class`` as people write them, else a sentence: what it is."""
    cls = own_class(module)
    name = name_of(cls)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit, so that its Python class no longer runs"
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return f"{name} has no weights before its first input; accelerate again then"
    if isinstance(module, torch_class):
        fakes = name.startswith(_FAKE_QUANTISED)
        return f"its class {name} fakes the quantisation of weights and outputs" if fakes else None
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return f"{name} is of a kind that haloconv has no layer of"
    return f"{name} is no torch.nn.{torch_class.__name__}"


def _plain_name(module: torch.nn.Module) -> str:
    return getattr(module, "original_name", type(module).__name__)  # torch.jit keeps the name of what it compiled


def name_of(cls: type) -> str:
    """Where users find the class: without the private modules in which PyTorch defines its layers."""
    if cls.__module__ == "torch.nn.modules.conv":
        return f"torch.nn.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"
