"""A convolution with mean and variance of each filter's results, for a norm that follows.

A batch norm in training mode needs those of all images, a group norm those of each. Compiled graphs alone ask for it
(fusion/lowered/norms.py). The kernel is the one that is chosen for the convolution with its bias and residual, if it
measures what it stores; else PyTorch's reduction reads the result again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from haloconv import plan as plans
from haloconv.choose.choice import Choice, choose_now, config_of
from haloconv.device import watched
from haloconv.families import FAMILIES
from haloconv.families.base import Config, Family
from haloconv.layout import Layout
from haloconv.precision import torch_precision
from haloconv.problem import ConvSpec, Epilogue, Request, TensorForm, check_residual, check_tensors

Tensor = torch.Tensor
Measured = tuple[Tensor, Tensor, Tensor]
MomentsCall = Callable[..., Measured]
"""``fprop(x, w, b, *residual) -> (y, mean, variance)``: by N P Q of each filter's results, (K,) in fp32; or by P Q of
each image's, (N K,)."""


@runtime_checkable
class FamilyWithMoments(Family, Protocol):
    """A family some of whose kernels give mean and variance of what they store."""

    def has_moments(self, request: Request, config: Config, per_image: bool = False) -> bool:
        """Whether the config can do so for the request, which is forward."""

    def bind_moments(self, request: Request, config: Config, per_image: bool = False) -> MomentsCall:
        """The launches for a request and a config of which ``has_moments`` is true."""


_calls: dict[tuple[object, ...], MomentsCall | None] = {}
_generation = plans.generation


def fprop(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, spec: ConvSpec, per_image: bool = False
) -> Measured:
    """y (N, K, P, Q) with bias and residual, and variance by N P Q and mean of each filter in fp32, (1, K, 1, 1) each.

    With ``per_image`` those of each image, by P Q, (N, K, 1, 1) each. Raises as ``plan.plan_fprop``.
    """
    call = _call_of(x, w, b, residual, spec, per_image)
    more = () if residual is None else (residual,)
    if call is None:
        plan = plans.plan_fprop(x, w, b, spec, epilogue_of(residual is not None), residual)
        return with_var_mean(plan.run(x, w, b, *more), per_image)
    y, mean, variance = call(x, w, b, *more)
    images = x.shape[0] if per_image else 1
    return y, variance.view(images, -1, 1, 1), mean.view(images, -1, 1, 1)


def epilogue_of(has_residual: bool) -> Epilogue:
    """What is chosen for: compilers alone ask for a residual here."""
    return Epilogue(residual=has_residual, compiled=has_residual)


def with_var_mean(y: Tensor, per_image: bool = False) -> Measured:
    """y with the statistics that PyTorch finds."""
    wide, dims = y.to(torch.promote_types(y.dtype, torch.float32)), (2, 3) if per_image else (0, 2, 3)
    return y, *torch.var_mean(wide, dims, correction=0, keepdim=True)


def has_moments(
    x: Tensor, w: Tensor, spec: ConvSpec, *, has_bias: bool = False, has_residual: bool = False, per_image: bool = False
) -> bool:
    """Whether a kernel of ours measures the result of these, of which only forms are read; they count as aligned."""
    forms = (TensorForm(x.stride(), True), TensorForm(w.stride(), True))
    request = _request(x, w, spec, forms, (has_bias, has_residual), plans.result_layout(x, w))
    found = not request.problem.is_empty and _measuring(request, choose_now(request, spec.family), per_image)
    return bool(found)


def _request(
    x: Tensor, w: Tensor, spec: ConvSpec, forms: tuple[TensorForm, TensorForm], adds: tuple[bool, bool], layout: Layout
) -> Request:
    """The request of the convolution with what it ``adds``, a bias and a residual."""
    problem = plans.problem_of("fprop", tuple(x.shape), tuple(w.shape), spec, x.dtype, layout)
    problem = replace(problem, bias=adds[0], epilogue=epilogue_of(adds[1]))
    return Request(problem, *forms, layout, x.device)


def _call_of(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, spec: ConvSpec, per_image: bool
) -> MomentsCall | None:
    """What runs tensors of these forms, looked up once; None where nothing of ours measures."""
    global _generation
    if _generation != plans.generation:
        _calls.clear()
        _generation = plans.generation
    key = (
        (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, spec, torch_precision()),
        None if b is None else (b.shape, b.dtype, b.device),
        None if residual is None else (residual.shape, residual.dtype, residual.device),
        ((x.data_ptr() | w.data_ptr()) & 15, per_image),
    )
    if key not in _calls:
        check_tensors(x, w, b, spec)
        forms, layout = (plans.form_of(x), plans.form_of(w)), plans.result_layout(x, w)
        request = _request(x, w, spec, forms, (b is not None, residual is not None), layout)
        if residual is not None:
            check_residual(residual, request.problem.y_shape, x.dtype, x.device)
        empty = request.problem.is_empty
        found = None if empty else _measuring(request, choose_now(request, spec.family), per_image)
        call = None if found is None else found[0].bind_moments(request, found[1], per_image)
        _calls[key] = None if call is None else watched(call, x.device)
    return _calls[key]


def _measuring(request: Request, choice: Choice, per_image: bool) -> tuple[FamilyWithMoments, Config] | None:
    """The family of the choice and its config, if they measure what they store."""
    family = FAMILIES[choice.family]
    if not isinstance(family, FamilyWithMoments):
        return None
    config = config_of(choice, request)
    return (family, config) if family.has_moments(request, config, per_image) else None
