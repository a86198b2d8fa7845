"""What the layers of a model are called with, and what they give: the one walker over forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def noting_calls(
    layers: Mapping[str, torch.nn.Module], note: Callable[[str, Any, Any, torch.Tensor], None]
) -> Iterator[None]:
    """While active, ``note(name, module, x, y)`` is called after each call of one of these layers, which made ``y`` of
    ``x``; not after one that raised. ``x`` is the first argument, or that by the name of ``input``, or else None.
    """

    def hook_of(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any], torch.Tensor], None]:
        return lambda module, args, kwargs, y: note(name, module, args[0] if args else kwargs.get("input"), y)

    hooks = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
