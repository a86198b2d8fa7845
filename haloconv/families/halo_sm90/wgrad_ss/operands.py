"""How x and dy come to families/halo_sm90/wgrad_ss/wgrad_ss.cu: as they are, or copied to have channels in a row."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.halo_sm90.wgrad.wgrad import joined
from haloconv.families.halo_sm90.wgrad_ss import nchw_to_nhwc
from haloconv.problem import Request, TensorForm

_PIECE = 8  # elements of 16 bytes
_MOST_BYTES = 64 << 20  # of both copies


class Seen(NamedTuple):
    """The request of what is multiplied, channels as neighbours and strides 1; whether its tensors are copies.

    Rows of a 1x1 layer are joined where they follow one another.
    """

    request: Request
    copied: bool


def seen(request: Request) -> Seen | None:
    """What is multiplied; None where TMA does not reach the tensors and they are no dense planes, or too large."""
    as_they_are = joined(request)
    if as_they_are.problem.stride == (1, 1) and _are_reached(as_they_are):
        return Seen(as_they_are, False)
    problem = request.problem
    if not nchw_to_nhwc.takes(request) or 2 * sum(nchw_to_nhwc.elems(problem)) > _MOST_BYTES:
        return None
    return Seen(joined(nchw_to_nhwc.copied(request)), True)


def _are_reached(request: Request) -> bool:
    problem = request.problem
    return _is_reached(request.first, problem.y_shape) and _is_reached(request.second, problem.x_shape)


def _is_reached(form: TensorForm, shape: tuple[int, ...]) -> bool:
    """Whether TMA takes boxes of channels: everything but them is whole groups of 16 bytes apart."""
    steps = list(zip(shape, form.strides, strict=True))
    _, of_channels = steps.pop(1)
    return form.aligned and of_channels == 1 and all(n == 1 or (step > 0 and step % _PIECE == 0) for n, step in steps)
