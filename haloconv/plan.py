"""From tensors to a bound call: choose a family once per form of the tensors, keep the plan, and run it.

The functions ``fprop dgrad wgrad bgrad`` know nothing of autograd. On the warm path they build a key from shapes,
strides, dtype and device, find the plan in a dict and launch: nothing is formatted, compiled or read from disk.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from haloconv import env, logs, support
from haloconv.choose.choice import Choice, choose, choose_now, config_of, may_be_measured
from haloconv.choose.measured import bgrad_by_measured_rule
from haloconv.choose.measuring import undisturbed
from haloconv.device import runs_kernels, stand_in, watched
from haloconv.epilogue import biased, followed
from haloconv.families import FAMILIES
from haloconv.families.aten import is_symmetric
from haloconv.families.base import BoundCall, Config
from haloconv.families.reduce.bgrad import bind_bgrad
from haloconv.layout import Layout, is_channels_last
from haloconv.precision import Precision, torch_precision
from haloconv.problem import (
    NO_EPILOGUE,
    ConvSpec,
    Direction,
    Epilogue,
    Problem,
    Request,
    TensorForm,
    check_residual,
    check_tensors,
)
from haloconv.profiling import current_layer, named_range, profiler
from haloconv.reference import unsearched


class Plan:
    """A problem bound to a family: ``run`` takes tensors of the form that the plan was made for.

    ``choice`` names the kernel and the config that run. ``layout`` is the memory order of the output, ``w_layout`` that
    of the filter. ``plain`` is set if PyTorch runs it exactly as its own layer would. A plan that is not ``kept``
    serves one call. ``gradients`` is where haloconv.gradients keeps what it looked up.
    """

    __slots__ = ("_native", "choice", "gradients", "kept", "layout", "plain", "problem", "run", "spec", "w_layout")

    def __init__(self, request: Request, spec: ConvSpec, choice: Choice, run: BoundCall, plain: bool = False) -> None:
        self.problem, self.layout, self.w_layout = request.problem, request.result_layout, second_layout(request)
        self.spec, self.choice, self.run, self.plain = spec, choice, run, plain
        self.kept = choice is not _LATER
        self._native: dict[Direction, bool] = {}
        self.gradients: dict[tuple[bool, ...], tuple[Any, ...]] = {}

    def traced(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """``run`` inside a range of PyTorch's profiler."""
        choice = self.choice
        with named_range(self.problem.direction, choice.family, choice.kernel, choice.config):
            return self.run(*tensors)

    def is_native(self, gradients: tuple[Direction, ...], device: torch.device) -> bool:
        """Whether PyTorch runs this and these gradients as its own layer would, so that its autograd can take all."""
        return self.plain and all([self._is_native(each, device) for each in gradients])

    def _is_native(self, direction: Direction, device: torch.device) -> bool:
        known = self._native.get(direction)
        if known is None:
            choice = choose(self.problem.toward(direction), device, self.spec.family)
            known = self._native[direction] = _is_settled(choice, self.spec)
        return known


class Noted(NamedTuple):
    """A call that asked for a plan inside ``noting``: its request, and the gradients that autograd would ask for.

    ``key`` is what its plan is found by, ``layer`` the name of the layer where it is known. ``gradients`` may have
    dgrad and wgrad; ``bias_gradient`` if that of the bias is wanted.
    """

    key: tuple[object, ...]
    request: Request
    spec: ConvSpec
    layer: str
    gradients: tuple[Direction, ...]
    bias_gradient: bool


Bound = TypeVar("Bound")

_PLAN_LIMIT = 8192  # of each kind

_plans: dict[tuple[object, ...], Plan] = {}
_bgrads: dict[tuple[object, ...], BoundCall] = {}
_warned: set[tuple[object, ...]] = set()
_noted: ContextVar[Callable[[Noted], object] | None] = ContextVar("haloconv_noted", default=None)


def problem_of(
    direction: Direction,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    spec: ConvSpec,
    dtype: torch.dtype,
    layout: Layout,
) -> Problem:
    """The problem of a call without bias and epilogue. ``x_shape`` is (N, C, H, W), ``w_shape`` is (K, C/G, R, S)."""
    precision: Precision = "ieee" if dtype != torch.float32 else spec.precision or default_precision()
    (n, c, h, w), (k, _, r, s) = x_shape, w_shape
    return Problem(
        direction, n, c, h, w, k, r, s, spec.stride, spec.padding, spec.dilation, spec.groups,
        dtype=dtype, layout=layout, precision=precision,
    )  # fmt: skip


def default_precision() -> Precision:
    """Precision where none is named: tf32 if PyTorch allows it, else tf32x3, which keeps fp32's error limits."""
    return "tf32" if torch_precision() == "tf32" else "tf32x3"


generation = 0
"""How often all plans were forgotten: what was derived from a plan holds within a generation."""


def clear_plans() -> None:
    """Forget every plan; the next call of each layer chooses and binds again."""
    global generation
    generation += 1
    _plans.clear()
    _bgrads.clear()


@contextmanager
def noting(hear: Callable[[Noted], object]) -> Iterator[None]:
    """Inside, ``hear`` is told of convolutions of this thread that have no plan yet; then they run on PyTorch.

    Nothing is chosen, bound or compiled for them here, and no plan is kept.
    """
    token = _noted.set(hear)
    try:
        yield
    finally:
        _noted.reset(token)


def is_noting() -> bool:
    """Whether this runs inside ``noting``."""
    return _noted.get() is not None


def plan_fprop(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    spec: ConvSpec,
    epilogue: Epilogue = NO_EPILOGUE,
    residual: torch.Tensor | None = None,
) -> Plan:
    """The plan for ``x`` (N, C, H, W), ``w`` (K, C/G, R, S) and ``b`` (K,) or None; (K, 2) where there is a scale.

    ``residual`` is that of an epilogue that has one: as y, of any strides, which the plan does not depend on.

    Raises what torch.nn.functional.conv2d raises for tensors that it refuses, ValueError for an unknown family, and
    RuntimeError for a residual that is not as y, or with ``spec.strict`` if our kernels do not take the problem.
    """
    key = (
        (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, spec, torch_precision()),
        None if b is None else (b.shape, b.dtype, b.device),
        (epilogue, (x.data_ptr() | w.data_ptr()) & 15),
        None if residual is None else (residual.shape, residual.dtype, residual.device),
    )
    plan = _plans.get(key)
    if plan is None:
        check_tensors(x, w, b, spec, has_scale=epilogue.scale)
        layout = result_layout(x, w)
        plain = problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout)
        if residual is not None:
            check_residual(residual, plain.y_shape, x.dtype, x.device)
        problem = replace(plain, bias=b is not None and not epilogue.scale, epilogue=epilogue)
        request = Request(problem, form_of(x), form_of(w), layout, x.device)
        hear = _noted.get()
        if hear is not None:
            hear(Noted(key, request, spec, current_layer(), *_gradients_of(x, w, b)))
            return Plan(request, spec, _LATER, _run_for_now(request, spec))
        plan = keep(key, bind(request, spec))
    return plan


_LATER = Choice("aten", "chosen after this call")


def _run_for_now(request: Request, spec: ConvSpec) -> BoundCall:
    """PyTorch's convolution: with the plan that its later calls will have, if it is likely to be chosen."""
    run, _ = _run_of(_LATER, request)
    searches = choose(request.problem, request.device, spec.family, examines=False).family == "aten"

    def run_for_now(*tensors: torch.Tensor | None) -> torch.Tensor:
        with undisturbed() if searches else unsearched():
            return run(*tensors)

    return run_for_now


def _gradients_of(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> tuple[tuple[Direction, ...], bool]:
    """What a backward pass would ask for: dgrad and wgrad, and whether the gradient of the bias."""
    if not torch.is_grad_enabled():
        return (), False
    dx: tuple[Direction, ...] = ("dgrad",) if x.requires_grad else ()
    dw: tuple[Direction, ...] = ("wgrad",) if w.requires_grad else ()
    return dx + dw, b is not None and b.requires_grad


def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> torch.Tensor:
    """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None. Raises as plan_fprop."""
    plan = plan_fprop(x, w, b, spec)
    return plan.traced(x, w, b) if profiler._is_profiler_enabled else plan.run(x, w, b)


def plan_dgrad(
    dy: torch.Tensor,
    w: torch.Tensor,
    x_shape: tuple[int, ...],
    layout: Layout,
    spec: ConvSpec,
    b: torch.Tensor | None = None,
) -> Plan:
    """The plan for ``dgrad`` of these arguments; ``b`` (C,) is the bias of a transposed layer, whose y is dx."""
    key = (
        ("dgrad", dy.shape, dy.stride(), dy.dtype, dy.device, w.shape, w.stride(), x_shape, layout, spec),
        (torch_precision(), (dy.data_ptr() | w.data_ptr()) & 15, b is not None),
    )
    plan = _plans.get(key)
    if plan is None:
        problem = problem_of("dgrad", x_shape, w.shape, spec, dy.dtype, layout)
        problem = problem if b is None else replace(problem, bias=True)
        plan = keep(key, bind(Request(problem, form_of(dy), form_of(w), layout, dy.device), spec))
    return plan


def dgrad(dy: torch.Tensor, w: torch.Tensor, x_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> torch.Tensor:
    """dx of shape ``x_shape`` (N, C, H, W), stored as ``layout``, from dy (N, K, P, Q) and w (K, C/G, R, S)."""
    plan = plan_dgrad(dy, w, x_shape, layout, spec)
    return plan.traced(dy, w) if profiler._is_profiler_enabled else plan.run(dy, w)


def plan_wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> Plan:
    """The plan for ``wgrad`` of these arguments."""
    key = (
        ("wgrad", dy.shape, dy.stride(), dy.dtype, dy.device, x.shape, x.stride(), w_shape, layout, spec),
        (torch_precision(), (dy.data_ptr() | x.data_ptr()) & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        problem = problem_of("wgrad", x.shape, w_shape, spec, dy.dtype, layout_of(x))
        plan = keep(key, bind(Request(problem, form_of(dy), form_of(x), layout, dy.device), spec))
    return plan


def wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], layout: Layout, spec: ConvSpec) -> torch.Tensor:
    """dw of shape ``w_shape`` (K, C/G, R, S), stored as ``layout``, from dy (N, K, P, Q) and x (N, C, H, W)."""
    plan = plan_wgrad(dy, x, w_shape, layout, spec)
    return plan.traced(dy, x) if profiler._is_profiler_enabled else plan.run(dy, x)


def plan_bgrad(dy: torch.Tensor, spec: ConvSpec) -> BoundCall:
    """What sums dy (N, K, P, Q) over images and pixels."""
    key = (dy.shape, dy.stride(), dy.dtype, dy.device, spec.family)
    run = _bgrads.get(key)
    if run is None:
        bound = bind_bgrad_of(dy.dtype, tuple(dy.shape), form_of(dy), dy.device, spec.family)
        run = _remember(_bgrads, key, bound)
    return run


def bgrad(dy: torch.Tensor, spec: ConvSpec) -> torch.Tensor:
    """db (K,): the sum of dy (N, K, P, Q) over images and pixels."""
    run = plan_bgrad(dy, spec)
    if not profiler._is_profiler_enabled:
        return run(dy)
    with named_range("bgrad", *(("aten",) if run is _aten_bgrad else ("reduce", "reduce/bgrad"))):
        return run(dy)


def bind_bgrad_of(
    dtype: torch.dtype, shape: tuple[int, ...], form: TensorForm, device: torch.device, family: str
) -> BoundCall:
    """What sums dy (N, K, P, Q) of this form over images and pixels. Raises what compiling and loading raise."""
    refused = not runs_kernels(device) or dtype not in support.KERNEL_DTYPES or 0 in shape
    if family == "aten" or refused or env.disabled():
        return _aten_bgrad
    if family == "auto" and stand_in() is None and bgrad_by_measured_rule(shape, form.strides, device)[0] == "aten":
        return _aten_bgrad
    n, k, p, q = shape
    return watched(bind_bgrad(dtype, (n, k, p, q), form, device), device)


def _aten_bgrad(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum((0, 2, 3))


def _remember(store: dict[tuple[object, ...], Bound], key: tuple[object, ...], bound: Bound) -> Bound:
    """Keep what was bound. At the limit all is forgotten: binding again costs less than tracking what was used last."""
    if len(store) >= _PLAN_LIMIT:
        store.clear()
    store[key] = bound
    return bound


def keep(key: tuple[object, ...], plan: Plan) -> Plan:
    """Let calls find the plan by ``key``, as in Noted."""
    return _remember(_plans, key, plan)


def bind(request: Request, spec: ConvSpec) -> Plan:
    """Choose and bind. Raises what ``bound`` raises, and as plan_fprop for a family that is refused."""
    choice = choose_now(_without_dgrad_bias(request), spec.family)
    if choice.refused and request.device.type != "meta":  # there nothing is computed
        _report_refusal(request.problem, choice, spec)
    return bound(request, spec, choice)


def bound(request: Request, spec: ConvSpec, choice: Choice) -> Plan:
    """The plan of a choice. Raises what compiling and loading raise."""
    run, config = _run_of(choice, request)
    choice = choice._replace(kernel=config.kernel, config=config.key)
    if logs.choice.isEnabledFor(logging.INFO):
        which = f"{choice.kernel} {choice.config}".strip()
        said = (current_layer() or "a layer", request.problem, choice.family, which, choice.reason)
        logs.choice.info("%s: %s -> %s (%s): %s", *said)
    return Plan(request, spec, choice, run, _is_settled(choice, spec) and _is_plain(request.problem, spec))


def _run_of(choice: Choice, request: Request) -> tuple[BoundCall, Config]:
    """The bound call of a choice, and its config."""
    problem, family, bare = request.problem, FAMILIES[choice.family], _without_dgrad_bias(request)
    config, adds = config_of(choice, bare), family.has_epilogue
    if adds and bare is not request:  # not every kernel that was chosen without the bias adds it
        adds = any(each.kernel == config.kernel for each in family.configs(request))
    run = watched(family.bind(request if adds else bare, config), request.device)
    if not adds and bare is not request:
        run = biased(run)
    return followed(run, problem.epilogue) if any(problem.epilogue) and not adds else run, config


def _without_dgrad_bias(request: Request) -> Request:
    """What is chosen for, and measured: no record knows the bias of a transposed layer."""
    problem = request.problem
    if problem.direction != "dgrad" or not problem.bias:
        return request
    return replace(request, problem=replace(problem, bias=False))


def _is_plain(problem: Problem, spec: ConvSpec) -> bool:
    """Whether PyTorch's own layer can be asked for exactly this."""
    return is_symmetric(problem) and (spec.precision is None or problem.dtype != torch.float32)


def _is_settled(choice: Choice, spec: ConvSpec) -> bool:
    """Whether the choice is PyTorch, and stays so."""
    return choice.family == "aten" and not may_be_measured(choice, spec.family)


def _report_refusal(problem: Problem, choice: Choice, spec: ConvSpec) -> None:
    """Once per layer and reason: warn if our kernels were asked for by name; raise if ``strict``."""
    sentence = f"haloconv: PyTorch's own convolution runs {problem}: {choice.reason}"
    if spec.strict and not problem.is_empty:
        raise RuntimeError(f"{sentence} (strict=True)")
    key = (problem.w_shape, spec, choice.reason)
    if spec.family != "auto" and not problem.is_empty and key not in _warned:
        _warned.add(key)
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def form_of(tensor: torch.Tensor) -> TensorForm:
    """What a plan relies on about a tensor."""
    return TensorForm(tensor.stride(), tensor.data_ptr() % 16 == 0)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The memory order of a 4-D tensor: ``"nhwc"`` if PyTorch would call it channels_last, else ``"nchw"``."""
    return "nhwc" if is_channels_last(tensor.shape, tensor.stride()) else "nchw"


def result_layout(x: torch.Tensor, w: torch.Tensor) -> Layout:
    """The memory order of y and dx, as of PyTorch's layer: ``"nhwc"`` if it would call either tensor channels_last."""
    return "nhwc" if "nhwc" in (layout_of(x), layout_of(w)) else "nchw"


def second_layout(request: Request) -> Layout:
    """The memory order of the second tensor: w in fprop and dgrad, x in wgrad."""
    problem = request.problem
    shape = problem.x_shape if problem.direction == "wgrad" else problem.w_shape
    return "nhwc" if is_channels_last(shape, request.second.strides) else "nchw"
