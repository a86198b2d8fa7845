"""Whether a result is right, for trials and for tuning: against float64, against PyTorch's own, on poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from haloconv import reference
from haloconv.epilogue import applied
from haloconv.problem import ConvSpec, Epilogue, Problem
from haloconv.reference import Error, Limits, Oracle

UNLIMITED = Limits(float("inf"), float("inf"))
_SAMPLE_ELEMS = 1 << 26  # of x and y together, that are upcast at a time
_PASSES = 4  # over a result, at most: bias, scale, residual, activation
_DIFFERENCE_FACTOR = 2.0  # times what both sides may err together


def on_poisoned_memory(call: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The call's result, after a NaN-filled tensor of the same extent was handed back to the allocator."""
    poison = torch.full_like(like, float("nan"))
    del poison
    return call()


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in norms; upcast a piece at a time, as whole activations in float64 may not fit memory."""
    a, b = (each if each.dim() else each[None] for each in (a, b))
    rows = max(1, _SAMPLE_ELEMS // max(1, a[:1].numel()))

    def norm(piece: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(piece.to(torch.float64))
        return norm

    norms = [(norm(x - y), norm(y)) for x, y in zip(a.split(rows), b.split(rows), strict=True)]
    top, bottom = (torch.linalg.vector_norm(torch.stack(each)).item() for each in zip(*norms, strict=True))
    return top / bottom if top else 0.0


def complaint_about(error: Error, limits: Limits) -> str | None:
    """What is wrong with a result, in one sentence; None if it is within its limits."""
    if error.passed:
        return None
    norm = f"error {error.norm:.2e} of {limits.norm:.2e} allowed"
    where = f"border {error.border_worst:.2e}, interior {error.interior_worst:.2e}"
    allowed = f"{limits.element:.2e}" + (f" and {limits.rounding:.0e} of its value" if limits.rounding else "")
    worst = f"worst element {error.worst:.2e} of {allowed} ({where})"
    return f"{norm}, {worst}; first bad element {error.first_bad}"


@dataclass(frozen=True)
class Verdict:
    """How far a result is from float64 (``error``, a norm) and from PyTorch's; ``complaint`` None if it is right."""

    error: float
    difference: float
    complaint: str | None


class Judge:
    """Judges results of one problem on one set of operands.

    fprop and dgrad are held against float64 on the first, the last and as many images between as are upcast quickly,
    wgrad on the sum over all; every element is held against PyTorch's result at the same precision.

    ``operands`` are (x, w, b or None), (dy, w) or (dy, x), and those of an epilogue (problem.Epilogue); ``theirs`` is
    PyTorch's result for them.
    """

    def __init__(self, problem: Problem, operands: tuple[torch.Tensor | None, ...], theirs: torch.Tensor) -> None:
        self.problem, self.theirs = problem, theirs
        self._images = _sampled(problem).to(theirs.device) if problem.direction != "wgrad" else None
        self._oracle = _oracle(problem, operands, self._images)
        self._border = reference.border_mask(problem, theirs.device)
        self.aten_error = self._measured(theirs, UNLIMITED)
        self.limits = reference.error_limits(problem, self.aten_error)

    def verdict(self, result: torch.Tensor, rounded_once: bool = True) -> Verdict:
        """Raises ValueError if the result has another shape than PyTorch's.

        Without ``rounded_once`` passes over y round in between, each relative to what it was given.
        """
        limits = self.limits
        if not rounded_once:
            limits = limits._replace(element=limits.element + _PASSES * limits.rounding)
        error = self._measured(result, limits)
        difference = relative_difference(result, self.theirs)
        allowed = _DIFFERENCE_FACTOR * (limits.norm + self.aten_error.norm)
        complaint = complaint_about(error, limits)
        if complaint is None and not difference <= allowed:
            complaint = f"differs from PyTorch's result by {difference:.2e} of {allowed:.2e} allowed"
        return Verdict(error.norm, difference, complaint)

    def _measured(self, result: torch.Tensor, limits: Limits) -> Error:
        if result.shape != self.theirs.shape:
            raise ValueError(f"the result has shape {tuple(result.shape)}, PyTorch's {tuple(self.theirs.shape)}")
        sample = result if self._images is None else result.index_select(0, self._images)
        return reference.measure_error(sample, self._oracle, limits, self._border)


def agrees_with_aten(problem: Problem, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether a result is as near to PyTorch's as both may be to the truth, twice over: a quick look, no proof."""
    allowed = 2 * _DIFFERENCE_FACTOR * reference.error_limits(problem).norm
    return ours.shape == theirs.shape and relative_difference(ours, theirs) <= allowed


def _images_at_a_time(problem: Problem) -> int:
    elems = sum(c * h * w for _, c, h, w in (problem.x_shape, problem.y_shape))
    return max(1, min(problem.n, _SAMPLE_ELEMS // elems))


def _sampled(problem: Problem) -> torch.Tensor:
    """The images that are held against float64: evenly spaced, the first and the last among them."""
    count = max(min(2, problem.n), min(_images_at_a_time(problem), 4))
    return torch.linspace(0, problem.n - 1, count).round().to(torch.int64)


def _oracle(problem: Problem, operands: tuple[torch.Tensor | None, ...], images: torch.Tensor | None) -> Oracle:
    spec = ConvSpec(problem.stride, problem.padding, problem.dilation, problem.groups)
    first, second = operands[:2]
    assert first is not None and second is not None  # a bias alone may be missing
    if images is None:
        parts = zip(*(each.split(_images_at_a_time(problem)) for each in (first, second)), strict=True)
        sums = [reference.oracle_wgrad(dy, x, problem.w_shape, spec) for dy, x in parts]
        return Oracle(*(torch.stack(each).sum(0) for each in zip(*sums, strict=True)))
    sample = first.index_select(0, images)
    if problem.direction == "fprop":
        return _epilogued(problem.epilogue, sample, second, operands[2:], images, spec)
    return reference.oracle_dgrad(sample, second, (len(images), *problem.x_shape[1:]), spec)


def _epilogued(
    epilogue: Epilogue, x: torch.Tensor, w: torch.Tensor, more: tuple[Any, ...], images: torch.Tensor, spec: ConvSpec
) -> Oracle:
    """The answer of fprop behind the epilogue; ``more`` are the third tensor and, if something is added, that."""
    b, *residual = more
    value, scale = reference.oracle_fprop(x, w, None if epilogue.scale else b, spec)
    third = None if b is None else b.to(torch.float64)
    added = [each.index_select(0, images).to(torch.float64) for each in residual]
    steps, sums = None if third is None else third.abs(), epilogue._replace(activation=None)
    return Oracle(applied(value, third, epilogue, *added), applied(scale, steps, sums, *map(torch.abs, added)))
