"""Operands whose every product and sum is exact, so that a result is right only bit for bit."""

from __future__ import annotations

import torch

from tests.cases import Case, Tensors, generator, store

LARGEST = 3


def integers(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator, largest: int = LARGEST) -> torch.Tensor:
    """Integers from -largest to largest, none of them zero, on the generator's device."""
    sizes = torch.randint(1, largest + 1, shape, generator=gen, device=gen.device)
    return (sizes * (torch.randint(0, 2, shape, generator=gen, device=gen.device) * 2 - 1)).to(dtype)


def make_exact(one: Case, dtype: torch.dtype, device: torch.device | str = "cpu", result: str = "") -> Tensors:
    """The tensors of a case with small integers, stored as it asks.

    Where fp32 is split into TF32 values, x and dy have 13 bits and w is 1 or -1: their low terms count. For
    a ``result`` of "wgrad" dy is 1 or -1, too, and x at most so large that a sum over all pixels is exact in fp32.
    """
    problem, gen = one.problem(dtype=dtype), generator(f"{one.name} exact", device)
    split = (one.spec.precision or "").endswith(("x3", "x6"))
    large, small = ((1 << 13) - 1, 1) if split else (LARGEST, LARGEST)
    sizes = [(problem.x_shape, large), (problem.y_shape, large)]
    if split and result == "wgrad":
        pixels = problem.n * problem.p * problem.q
        sizes = [(problem.x_shape, min(large, ((1 << 24) - 1) // max(1, pixels))), (problem.y_shape, small)]
    x, dy = (store(integers(shape, dtype, gen, largest), one.storage) for shape, largest in sizes)
    w = store(integers(problem.w_shape, dtype, gen, small), one.w_storage)
    return Tensors(x, w, integers((problem.k,), dtype, gen) if one.bias else None, dy)
