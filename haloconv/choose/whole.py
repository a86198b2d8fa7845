"""A convolution with what follows it, chosen for the whole where the convolution alone was measured.

A kernel that applies bias, scale, residual and activation to its sums makes passes over y unnecessary. PyTorch's side
of the choice is its convolution and these passes: one for each part in eager code, and one for all parts in a compiled
graph, where Inductor fuses them. A pass counts what it has to move, one read and one write of y, at the GPU's measured
copy rate (haloconv/roofline.py); what a residual is read for counts on neither side, as both read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from haloconv.families import FAMILIES
from haloconv.problem import NO_EPILOGUE, Problem
from haloconv.roofline import ceilings_of

MARGIN = 1.03  # by which one of our families must be faster than PyTorch
HOST_MS = 0.004  # by which it must be faster, too: a direction of ours costs the host more, as tiny layers show


def is_ahead(own_ms: float, aten_ms: float) -> bool:
    """Whether a kernel of ours is chosen over PyTorch."""
    return aten_ms >= max(MARGIN * own_ms, own_ms + HOST_MS)


def bare(problem: Problem) -> Problem:
    """The convolution alone."""
    return replace(problem, bias=False, epilogue=NO_EPILOGUE)


def parts_of_it(problem: Problem) -> Iterator[Problem]:
    """The problem with less behind it, the most first, of which records may know what it takes."""
    if any(problem.epilogue) and problem.bias:
        yield replace(problem, epilogue=NO_EPILOGUE)
    if any(problem.epilogue) or (problem.bias and problem.direction == "fprop"):
        yield bare(problem)


def saved_ms(problem: Problem, part: Problem, family: str, gpu_name: str) -> float:
    """What a kernel of the family saves more for ``problem`` than for a part of it; less than nothing, if it is less.

    Nothing on a GPU whose rates nobody measured.
    """
    ceilings = ceilings_of(gpu_name)
    if ceilings is None:
        return 0.0
    y_bytes = problem.n * problem.k * problem.p * problem.q * problem.dtype.itemsize
    passes = _passes_saved(problem, family) - _passes_saved(part, family)
    return passes * 2 * y_bytes / ceilings.bytes_per_s * 1e3


def _passes_saved(problem: Problem, family: str) -> int:
    """Passes over y that PyTorch makes and a kernel of the family does not; each of ours adds a bias to its sums."""
    scale, activation, residual, compiled = problem.epilogue
    others = scale + residual + (activation is not None)
    theirs, ours = problem.bias + others, 0 if FAMILIES[family].has_epilogue else others
    return min(theirs, 1) - min(ours, 1) if compiled else theirs - ours
