"""The tensors of a draw: exact small integers, or random values of a kind, in the storages that it names."""

from __future__ import annotations

import torch

from haloconv.reference import Oracle, reduction_length
from tests import oracle
from tests.cases import DENORMAL_PARTNER, VALUES, Tensors, generator, store, with_special
from tests.exact import LARGEST, integers
from tests.fuzz.draw import Draw
from tests.specials import cut_to_tf32

_EXACT_IN_TERMS = 2000  # products of 13 bits whose sums fp32 holds


def exact_operands(draw: Draw, device: str) -> Tensors:
    """Small integers, none of them zero: a missing or doubled product changes a sum.

    Where values have two terms and sums stay exact, one operand has 13 bits: its low terms count.
    """
    gen = generator(f"{draw} exact", device)
    splits = draw.precision == "tf32x3" and reduction_length(draw.problem(draw.layout)) < _EXACT_IN_TERMS
    largest = ((1 << 13) - 1, 1) if splits else (LARGEST, LARGEST)
    first, second = (integers(shape, draw.dtype, gen, most) for shape, most in zip(draw.shapes, largest, strict=True))
    bias = integers((draw.filters[0],), draw.dtype, gen) if draw.bias else None
    return _stored(draw, first, second, (bias, integers(draw.y_shape, draw.dtype, gen) if draw.has_residual else None))


def random_operands(draw: Draw, device: str) -> tuple[Tensors, Oracle]:
    """Random values of the draw's kind, and the float64 answer to them."""
    gen = generator(str(draw), device)
    bias = _values(draw, (draw.filters[0],), gen, "normal") if draw.bias else None
    kind = "normal" if draw.values in ("special", "constant") else draw.values
    first = _values(draw, draw.shapes[0], gen, kind)
    second = _values(draw, draw.shapes[1], gen, "normal" if kind == "denormal" else kind)
    if draw.result != "wgrad":
        _, cg, r, s = draw.w_shape
        second = (second.double() * max(1, cg * r * s) ** -0.5).to(draw.dtype)
    if draw.values == "denormal":  # lifted into the range of normal numbers, unless an input is taken as zero
        first = cut_to_tf32(first) if draw.precision in ("tf32", "tf32x3") else first  # of which no bit is kept
        second, bias = second * DENORMAL_PARTNER[draw.dtype] / 32, None if bias is None else torch.zeros_like(bias)
    elif draw.values == "constant":
        first, second = (each.fill_(each.flatten()[0]) if each.numel() else each for each in (first, second))
    if draw.seed % 2 and draw.precision == "tf32":  # half of the draws lose nothing to the rounding of operands
        first, second = cut_to_tf32(first), cut_to_tf32(second)
    residual = _values(draw, draw.y_shape, gen, "normal") if draw.has_residual else None
    if draw.values != "special":
        t = _stored(draw, first, second, (bias, residual))
        return t, oracle.expected(draw.answer, t, draw.spec)
    first, second = _with_special(draw, first, second, gen)
    t = _stored(draw, first, second, (bias, residual))
    clean = t.each(lambda each: each.nan_to_num(0.0, 0.0, 0.0))
    return t, Oracle(oracle.tap_sums(draw.answer, t, draw.spec), oracle.expected(draw.answer, clean, draw.spec).scale)


def _values(draw: Draw, shape: tuple[int, ...], gen: torch.Generator, kind: str) -> torch.Tensor:
    return VALUES[kind](shape, draw.dtype, gen).to(draw.dtype)


def _with_special(
    draw: Draw, first: torch.Tensor, second: torch.Tensor, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN and infinities in the activations: a filter's meet the zeros of padding, or not, as a kernel pleases."""
    if draw.result == "wgrad":
        return first, with_special(second, gen)
    return with_special(first, gen), second


def _stored(
    draw: Draw, first: torch.Tensor, second: torch.Tensor, added: tuple[torch.Tensor | None, torch.Tensor | None]
) -> Tensors:
    """``added`` are bias and residual; the residual is stored as x."""
    bias, residual = added
    first, second = store(first, draw.first), store(second, draw.second)
    unread = first.new_zeros(1)  # of what the result does not depend on, only the shape counts
    x, w, dy = (unread.expand(shape) for shape in (draw.x, draw.w_shape, draw.y_shape))
    if draw.result == "fprop":
        return Tensors(first, second, bias, dy if residual is None else store(residual, draw.first))
    if draw.result == "wgrad":
        return Tensors(second, w, None, first)
    return Tensors(x, second if draw.result == "dgrad" else w, None, first)
