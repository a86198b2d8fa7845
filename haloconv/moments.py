"""A convolution with mean and variance of each filter's results, for a batch norm in training mode that follows.

Compiled graphs alone ask for it (fusion/lowered/batch_norms.py). The kernel is the one that is chosen for the
convolution alone, if it measures what it stores; else PyTorch's reduction reads the result again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from haloconv import plan as plans
from haloconv.choose.choice import Choice, choose_now, config_of
from haloconv.device import watched
from haloconv.families import FAMILIES
from haloconv.families.base import Config, Family
from haloconv.precision import torch_precision
from haloconv.problem import ConvSpec, Request, TensorForm, check_tensors

Tensor = torch.Tensor
Measured = tuple[Tensor, Tensor, Tensor]
MomentsCall = Callable[[Tensor, Tensor], Measured]
"""``fprop(x, w) -> (y, mean, variance)``: of each filter's results, by N P Q, (K,) in fp32."""


@runtime_checkable
class FamilyWithMoments(Family, Protocol):
    """A family some of whose kernels give mean and variance of what they store."""

    def has_moments(self, request: Request, config: Config) -> bool:
        """Whether the config can do so for the request, forward without bias and epilogue."""

    def bind_moments(self, request: Request, config: Config) -> MomentsCall:
        """The launches for a request and a config of which ``has_moments`` is true."""


_calls: dict[tuple[object, ...], MomentsCall | None] = {}
_generation = plans.generation


def fprop(x: Tensor, w: Tensor, spec: ConvSpec) -> Measured:
    """y (N, K, P, Q), and variance by N P Q and mean of each filter in fp32, (1, K, 1, 1) each.

    Raises as ``plan.plan_fprop``.
    """
    call = _call_of(x, w, spec)
    if call is None:
        return with_var_mean(plans.fprop(x, w, None, spec))
    y, mean, variance = call(x, w)
    return y, variance.view(1, -1, 1, 1), mean.view(1, -1, 1, 1)


def with_var_mean(y: Tensor) -> Measured:
    """y with the statistics that PyTorch finds."""
    return y, *torch.var_mean(y.to(torch.promote_types(y.dtype, torch.float32)), (0, 2, 3), correction=0, keepdim=True)


def has_moments(x: Tensor, w: Tensor, spec: ConvSpec) -> bool:
    """Whether a kernel of ours measures the result of these, of which only forms are read; they count as aligned."""
    layout = plans.result_layout(x, w)
    problem = plans.problem_of("fprop", tuple(x.shape), tuple(w.shape), spec, x.dtype, layout)
    request = Request(problem, TensorForm(x.stride(), True), TensorForm(w.stride(), True), layout, x.device)
    return not problem.is_empty and _measuring(request, choose_now(request, spec.family)) is not None


def _call_of(x: Tensor, w: Tensor, spec: ConvSpec) -> MomentsCall | None:
    """What runs tensors of these forms, looked up once; None where nothing of ours measures."""
    global _generation
    if _generation != plans.generation:
        _calls.clear()
        _generation = plans.generation
    key = (
        (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, spec, torch_precision()),
        (x.data_ptr() | w.data_ptr()) & 15,
    )
    if key not in _calls:
        check_tensors(x, w, None, spec)
        layout = plans.result_layout(x, w)
        problem = plans.problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout)
        request = Request(problem, plans.form_of(x), plans.form_of(w), layout, x.device)
        found = None if problem.is_empty else _measuring(request, choose_now(request, spec.family))
        call = None if found is None else found[0].bind_moments(request, found[1])
        _calls[key] = None if call is None else watched(call, x.device)
    return _calls[key]


def _measuring(request: Request, choice: Choice) -> tuple[FamilyWithMoments, Config] | None:
    """The family of the choice and its config, if they measure what they store."""
    family = FAMILIES[choice.family]
    if not isinstance(family, FamilyWithMoments):
        return None
    config = config_of(choice, request)
    return (family, config) if family.has_moments(request, config) else None
