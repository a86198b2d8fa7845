"""Host half of families/depthwise/finish.cuh: epilogues of fprop, and the calls that bound kernels become."""

from __future__ import annotations

from collections.abc import Callable

import torch

from haloconv.families.base import BoundCall
from haloconv.families.common import as_the_result, epilogue_constants
from haloconv.problem import Problem, Request

_VECTOR_BYTES = 16  # a residual is read as y is written, in vectors of so many at most


def constants(problem: Problem) -> dict[str, str]:
    """The constants of finish.cuh: none without an epilogue."""
    return epilogue_constants(problem.bias, problem.epilogue) if any(problem.epilogue) else {}


def call(launch: Callable[..., None], request: Request) -> BoundCall:
    """fprop(x, w, b) -> y and with a residual fprop(x, w, b, residual) -> y, or dgrad(dy, w) -> dx and dgrad(dy, w, b).

    ``launch`` takes the pointers of (input, w, bias, result) and of a residual, which lies as the result does.
    """
    shape, strides = request.result_shape, request.result_strides

    def run(
        first: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *residual: torch.Tensor
    ) -> torch.Tensor:
        result = first.new_empty_strided(shape, strides)
        if b is not None and not b.is_contiguous():
            b = b.contiguous()
        others: tuple[int, ...] = ()
        if residual:
            ordered = as_the_result(residual[0], strides, _VECTOR_BYTES)
            others = (ordered.data_ptr(),)
        launch(first.data_ptr(), w.data_ptr(), 0 if b is None else b.data_ptr(), result.data_ptr(), *others)
        return result

    return run
