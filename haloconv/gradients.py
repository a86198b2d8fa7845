"""The gradients of a layer that one backward pass asks for: what runs them is looked up once for tensors of a form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from haloconv import plan as plans
from haloconv.families.aten import aten_gradients, is_symmetric
from haloconv.families.base import BoundCall
from haloconv.layout import Layout
from haloconv.precision import torch_precision
from haloconv.problem import Problem
from haloconv.profiling import named_range, profiler

Tensor = torch.Tensor
Gradients = Callable[..., tuple[Tensor | None, ...]]
"""``run(dy, x, w) -> (dx, dw, db)``, with None for what is not wanted and for a factor that is not needed."""


def gradients(
    fprop: plans.Plan, dy: Tensor, x: Tensor | None, w: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """dx, dw and db of the layer that ``fprop`` is the plan of, None for what is not ``wanted``.

    dy is (N, K, P, Q); x (N, C, H, W) is needed for dw, w (K, C/G, R, S) for dx. Autograd does not see what runs.
    """
    if profiler._is_profiler_enabled:
        return _gradients_of_forms(fprop, dy, x, w, wanted)(dy, x, w)
    form = (
        (dy.shape, dy.stride(), dy.data_ptr() & 15, plans.generation, torch_precision()),
        None if x is None else (x.shape, x.stride(), x.data_ptr() & 15),
        None if w is None else (w.shape, w.stride(), w.data_ptr() & 15),
    )
    known = fprop.gradients.get(wanted)
    if known is None or known[0] != form:
        known = fprop.gradients[wanted] = (form, _gradients_of_forms(fprop, dy, x, w, wanted))
    results: tuple[Tensor | None, ...] = known[1](dy, x, w)
    return results


def _gradients_of_forms(
    fprop: plans.Plan, dy: Tensor, x: Tensor | None, w: Tensor | None, wanted: tuple[bool, ...]
) -> Gradients:
    """What runs for tensors of these forms, in ranges of the profiler if it is on.

    Where dx and dw are both PyTorch's they are one call of it, as in its own layer: two cost the host more.
    """
    problem, spec, layouts = fprop.problem, fprop.spec, (fprop.layout, fprop.w_layout)
    to_dx = plans.plan_dgrad(dy, w, problem.x_shape, layouts[0], spec) if wanted[0] and w is not None else None
    to_dw = plans.plan_wgrad(dy, x, problem.w_shape, layouts[1], spec) if wanted[1] and x is not None else None
    tracing = profiler._is_profiler_enabled
    to_db = None if not wanted[2] else partial(plans.bgrad, spec=spec) if tracing else plans.plan_bgrad(dy, spec)
    if to_dx and to_dw and to_dx.choice.family == to_dw.choice.family == "aten" and is_symmetric(problem):
        return _aten_gradients(to_dx.problem, layouts, to_db)
    run_dx = None if to_dx is None else to_dx.traced if tracing else to_dx.run
    run_dw = None if to_dw is None else to_dw.traced if tracing else to_dw.run
    return _separate_gradients(run_dx, run_dw, to_db)


def _separate_gradients(to_dx: BoundCall | None, to_dw: BoundCall | None, to_db: BoundCall | None) -> Gradients:
    def run(dy: Tensor, x: Tensor | None, w: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            None if to_dx is None else to_dx(dy, w),
            None if to_dw is None else to_dw(dy, x),
            None if to_db is None else to_db(dy),
        )

    return run


def _aten_gradients(dgrad: Problem, layouts: tuple[Layout, Layout], to_db: BoundCall | None) -> Gradients:
    def run(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, ...]:
        with named_range("dgrad+wgrad", "aten") if profiler._is_profiler_enabled else nullcontext():
            dx, dw = aten_gradients(dgrad, layouts, dy, x, w)
        return dx, dw, None if to_db is None else to_db(dy)

    return run
