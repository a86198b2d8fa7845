"""Ranges in PyTorch's profiler that name layer, direction, family and kernel. Without a profiler nothing is made.

``torch.profiler.profile`` shows them, and ``torch.autograd.profiler.emit_nvtx`` makes NVTX ranges of them. Both set
``profiler._is_profiler_enabled``, which warm calls look at: one look at an attribute is all that a range costs then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.autograd import profiler

__all__ = ["calls_of", "current_layer", "named_range", "profiler"]

_layer: ContextVar[str] = ContextVar("haloconv_layer", default="")


def current_layer() -> str:
    """The name of the layer whose call this is part of; empty if it is unknown."""
    return _layer.get()


@contextmanager
def calls_of(layer: str) -> Iterator[None]:
    """Inside, what runs is part of a call of ``layer`` or of its gradients."""
    token = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(token)


def named_range(direction: str, family: str, kernel: str = "", config: str = "") -> profiler.record_function:
    """A range such as ``haloconv.dgrad layer=features.0 family=halo_sm90 kernel=halo_sm90/conv config=m128``.

    What is not known is left out.
    """
    known = (("layer", current_layer()), ("family", family), ("kernel", kernel), ("config", config))
    words = [f"{name}={value}" for name, value in known if value]
    return profiler.record_function(" ".join([f"haloconv.{direction}", *words]))
