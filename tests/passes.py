"""How many bytes the operators of a function read and write, but for those of convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VIEWS = "view _unsafe_view reshape expand slice narrow as_strided t transpose unsqueeze squeeze permute alias detach"
_MEMORY = "unbind split split_with_sizes select empty new_empty empty_like new_empty_strided empty_strided"
VIEWS_AND_MEMORY = frozenset(f"{_VIEWS} {_MEMORY}".split())
"""Operators that read and write no elements."""


class CountingBytes(TorchDispatchMode):
    """Inside, ``bytes`` grows by the size of each tensor that an operator is given or gives, repeated elements once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = {id(each): each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        name = func._schema.name.split("::")[1]
        is_local = not any(isinstance(each, DTensor) for each in tensors.values())
        if is_local and name not in VIEWS_AND_MEMORY and "conv" not in name:
            self.bytes += sum(map(_bytes, tensors.values()))
        return result


def _bytes(tensor: torch.Tensor) -> int:
    lengths = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(lengths).numel() * tensor.element_size()
