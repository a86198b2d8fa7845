"""How x and dy come to families/halo_sm90/wgrad_ss/wgrad_ss.cu: as they are, or copied to have channels in a row."""

from __future__ import annotations

from typing import Literal, NamedTuple

from haloconv.families.halo_sm90.wgrad import arrange
from haloconv.families.halo_sm90.wgrad.arrange import Arrangement, Copies
from haloconv.families.halo_sm90.wgrad.wgrad import joined
from haloconv.families.halo_sm90.wgrad_ss import nchw_to_nhwc
from haloconv.problem import Problem, Request, TensorForm

_PIECE = 8  # elements of 16 bytes
_MOST_BYTES = 64 << 20  # of both copies


class Seen(NamedTuple):
    """The request of what is multiplied, channels as neighbours and strides 1; how it was copied, None if it was not.

    ``planes``: from dense planes, by nchw_to_nhwc.cu. Rows of a 1x1 layer are joined where they follow one another.
    """

    request: Request
    copied: Arrangement | Literal["planes"] | None


def seen(request: Request) -> Seen | None:
    """What is multiplied; None where TMA reaches neither the tensors nor copies of them."""
    as_they_are = joined(request)
    if as_they_are.problem.stride == (1, 1) and _are_reached(as_they_are):
        return Seen(as_they_are, None)
    problem = request.problem
    if problem.stride != (1, 1):
        return None
    if 2 * sum(nchw_to_nhwc.elems(problem)) <= _MOST_BYTES and nchw_to_nhwc.takes(request):
        return Seen(joined(nchw_to_nhwc.copied(request)), "planes")
    if problem.q > problem.w:  # arrange.cu has room for the columns of x
        return None
    how = Arrangement(1, problem.w, 0)
    copied = arrange.arranged(request, how)
    elems = problem.n * (copied.first.strides[0] + copied.second.strides[0])
    return Seen(joined(copied), how) if 2 * elems <= _MOST_BYTES else None


def _are_reached(request: Request) -> bool:
    problem = request.problem
    return _is_reached(request.first, problem.y_shape) and _is_reached(request.second, problem.x_shape)


def _is_reached(form: TensorForm, shape: tuple[int, ...]) -> bool:
    """Whether TMA takes boxes of channels: everything but them is whole groups of 16 bytes apart."""
    steps = list(zip(shape, form.strides, strict=True))
    _, of_channels = steps.pop(1)
    return form.aligned and of_channels == 1 and all(n == 1 or (step > 0 and step % _PIECE == 0) for n, step in steps)


def cycles(problem: Problem, one: Seen) -> float:
    """Cycles that the copies take, by their cost model."""
    if one.copied is None:
        return 0
    return nchw_to_nhwc.cycles(problem) if one.copied == "planes" else arrange.cycles(problem, one.copied)


def bind_copies(request: Request, one: Seen) -> Copies | None:
    """What copies the tensors of the request; None if they are multiplied as they are."""
    if one.copied is None:
        return None
    return nchw_to_nhwc.bind(request) if one.copied == "planes" else arrange.bind(request, one.copied)
