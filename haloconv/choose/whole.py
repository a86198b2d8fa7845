"""A convolution with what follows it, chosen for the whole where the convolution alone was measured.

A kernel that applies bias, scale, residual and activation to its sums makes passes over y unnecessary. PyTorch's side
of the choice is its convolution and these passes: one for each part in eager code, and one for all parts in a compiled
graph, where Inductor fuses them. A pass counts what it has to move, one read and one write of y, at the GPU's measured
copy rate (haloconv/roofline.py); what a residual is read for counts on neither side, as both read it.
"""

from __future__ import annotations

from dataclasses import replace

from haloconv.families import FAMILIES
from haloconv.problem import NO_EPILOGUE, Problem
from haloconv.roofline import ceilings_of

MARGIN = 1.03  # by which one of our families must be faster than PyTorch
HOST_MS = 0.004  # by which a gradient must be faster, too: ours cost the host more, an output of ours less


def is_ahead(own_ms: float, aten_ms: float, direction: str) -> bool:
    """Whether a kernel of ours is chosen over PyTorch.

    By ``haloconv bench --host-cost`` inference costs the host less in every family than PyTorch's (halo_sm90: 24 and 37
    us), and a training step more in most.
    """
    return aten_ms >= max(MARGIN * own_ms, own_ms + (0 if direction == "fprop" else HOST_MS))


def bare(problem: Problem) -> Problem:
    """The convolution alone."""
    return replace(problem, bias=False, epilogue=NO_EPILOGUE)


def known_instead(problem: Problem) -> list[Problem]:
    """``problem`` without an epilogue, with and without a bias: what records may know in its place."""
    alone = bare(problem)
    if problem.direction != "fprop":
        return []
    both = [replace(alone, bias=problem.bias), replace(alone, bias=not problem.bias)]
    return [each for each in both if each != problem]


def saved_ms(problem: Problem, other: Problem, family: str, gpu_name: str) -> float | None:
    """What a kernel of the family saves more for ``problem`` than for the other, or less, in ms.

    On a GPU whose rates nobody measured nothing for more, and None for less: that is not known.
    """
    ceilings, passes = ceilings_of(gpu_name), _passes_saved(problem, family) - _passes_saved(other, family)
    if ceilings is None:
        return 0.0 if passes >= 0 else None
    y_bytes = problem.n * problem.k * problem.p * problem.q * problem.dtype.itemsize
    return passes * 2 * y_bytes / ceilings.bytes_per_s * 1e3


def _passes_saved(problem: Problem, family: str) -> int:
    """Passes over y that PyTorch makes and a kernel of the family does not; each of ours adds a bias to its sums."""
    scale, activation, residual, compiled = problem.epilogue
    others = scale + residual + (activation is not None)
    theirs, ours = problem.bias + others, 0 if FAMILIES[family].has_epilogue else others
    return min(theirs, 1) - min(ours, 1) if compiled else theirs - ours
