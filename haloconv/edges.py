"""Padding that wraps, mirrors or repeats inside a kernel: a whole image in one launch, without a copy and without rims.

A kernel of ours that runs the image with zeros around it may find pixels of the image there instead, and above and
below it rows of another tensor, which a shard has of others. Which convolution runs is chosen for the image with zeros
around it, as it is with rims.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from haloconv import plan as plans
from haloconv.choose.choice import Choice, choose
from haloconv.choose.padded import instead_of_copy
from haloconv.choose.trust import stamped
from haloconv.device import stand_in
from haloconv.families import FAMILIES
from haloconv.layout import Layout
from haloconv.precision import torch_precision
from haloconv.problem import ConvSpec, EdgeModes, Request
from haloconv.profiling import profiler

Tensor = torch.Tensor


def dgrad(
    dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec, modes: EdgeModes
) -> Tensor | None:
    """dx of ``x_shape`` (N, C, H, W), stored as ``layout``, of dy (N, K, P, Q) and w (K, C/G, R, S), or None."""
    plan = plan_dgrad(dy, w, x_shape, layout, spec, modes)
    return None if plan is None else run(plan, dy, w)


def plan_fprop(
    x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec, modes: EdgeModes, saves_copy: bool = False
) -> plans.Plan | None:
    """The plan of y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None; None if no kernel has one.

    It is run on these, and with rows of a halo on that, as Request says. ``saves_copy``: else a padded copy of x
    would be convolved, which counts in the choice.
    """
    layout = plans.result_layout(x, w)
    problem = replace(plans.problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout), bias=b is not None)
    request = Request(problem, plans.form_of(x), plans.form_of(w), layout, x.device, modes)
    return _planned(request, spec, saves_copy, *_generation())


def plan_dgrad(
    dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec, modes: EdgeModes
) -> plans.Plan | None:
    """The plan of ``dgrad`` for these arguments, or None."""
    problem = plans.problem_of("dgrad", x_shape, w.shape, spec, dy.dtype, layout)
    request = Request(problem, plans.form_of(dy), plans.form_of(w), layout, dy.device, modes)
    return _planned(request, spec, False, *_generation())


def plan_wgrad(
    dy: Tensor, x: Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec, modes: EdgeModes
) -> plans.Plan | None:
    """The plan of dw of ``w_shape`` (K, C/G, R, S), stored as ``layout``; None if no kernel has one.

    It is run on dy (N, K, P, Q) and x (N, C, H, W).
    """
    problem = plans.problem_of("wgrad", x.shape, w_shape, spec, dy.dtype, plans.layout_of(x))
    request = Request(problem, plans.form_of(dy), plans.form_of(x), layout, dy.device, modes)
    return _planned(request, spec, False, *_generation())


def run(plan: plans.Plan, *tensors: Tensor | None) -> Tensor:
    """What a plan of this module gives: of x, w, b or None, and a halo if there is one; of dy and w; or of dy and x."""
    return plan.traced(*tensors) if profiler._is_profiler_enabled else plan.run(*tensors)


def _generation() -> tuple[str, int]:
    """What a choice depends on besides."""
    return torch_precision(), plans.generation


@lru_cache(maxsize=1024)
def _planned(request: Request, spec: ConvSpec, saves_copy: bool, precision: str, generation: int) -> plans.Plan | None:
    choice = choice_of(request, spec, saves_copy)
    return None if choice is None else plans.bound(request, spec, choice)


def choice_of(request: Request, spec: ConvSpec, saves_copy: bool) -> Choice | None:
    """What runs a request at once; None where the family chosen for zeros has no config that reads the image instead.

    "auto" takes no kernel without a stamp in the place of one that has it.
    """
    choice = choose(request.problem, request.device, spec.family)
    if saves_copy and spec.family == "auto":
        choice = instead_of_copy(request.problem, request.device, choice)
    family = FAMILIES[choice.family]
    offered = family.configs(request) if family.has_padding_modes else []
    if spec.family == "auto" and stand_in() is None:
        offered = [each for each in offered if each.kernel in stamped()]
    return choice if offered else None
