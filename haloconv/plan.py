"""From tensors to a bound call: choose a family once per form of the tensors, keep the plan, and run it.

The functions ``fprop dgrad wgrad bgrad`` know nothing of autograd. On the warm path they build a key from shapes,
strides, dtype and device, find the plan in a dict and launch: nothing is formatted, compiled or read from disk.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from haloconv import support
from haloconv.choose.choice import Forms, config_named, recorded, tune_now
from haloconv.choose.rules import bgrad_by_rule, by_rule
from haloconv.env import runs_kernels, stand_in, tunes_at_first_use, watched
from haloconv.families import FAMILIES
from haloconv.families.aten import aten_gradients, is_symmetric
from haloconv.families.base import Activates, BoundCall, Family, bind_config
from haloconv.families.reduce.bgrad import bind_bgrad
from haloconv.layout import is_channels_last
from haloconv.precision import torch_precision
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Problem, TensorForm, check_tensors


class Choice(NamedTuple):
    """The family that runs a problem and why; ``refused`` if our kernels do not take the problem at all.

    ``config`` is the key of the config that a record names (families.base.config_key), empty for the family's own
    choice; None if the choice was not measured.
    """

    family: str
    reason: str
    refused: bool = False
    config: str | None = None


class Plan:
    """A problem bound to a family: ``run`` takes tensors of the form that the plan was made for.

    ``layout`` is the memory order of the output, ``w_layout`` that of the filter. ``native`` is set if every direction
    of the layer goes to PyTorch, so that its own autograd can take the whole layer.
    """

    __slots__ = ("choice", "layout", "native", "problem", "run", "spec", "w_layout")

    def __init__(
        self,
        problem: Problem,
        spec: ConvSpec,
        choice: Choice,
        run: BoundCall,
        layout: str,
        w_layout: str,
        native: bool,
    ) -> None:
        self.problem, self.spec, self.choice, self.run = problem, spec, choice, run
        self.layout, self.w_layout, self.native = layout, w_layout, native


Bound = TypeVar("Bound")

_PLAN_LIMIT = 8192  # of each kind

_plans: dict[tuple, Plan] = {}
_bgrads: dict[tuple, BoundCall] = {}
_warned: set[tuple] = set()


def choose(problem: Problem, device: torch.device, family: str = "auto") -> Choice:
    """Which family runs ``problem`` on ``device``, and why. ``family`` is ``"auto"`` or the one asked for.

    ``"auto"`` follows records of measurements where there are any, else rules; nothing is measured here.
    """
    if family == "aten":
        return Choice("aten", "asked for")
    reason = FAMILIES["direct" if family == "auto" else family].why_not(problem, device)
    if reason is not None:
        return Choice("aten", reason, refused=True)
    if family != "auto":
        return Choice(family, "asked for")
    found = recorded(problem, device)
    if found is not None:
        return Choice(found.family, found.reason, config=found.config)
    return _choose_own(problem, device) if stand_in() is not None else Choice(*by_rule(problem, device))


def _choose_own(problem: Problem, device: torch.device) -> Choice:
    """On a stand-in for a GPU, where nothing is fast: the most special of our families that takes the problem."""
    takes = (name for name, family in reversed(FAMILIES.items()) if family.why_not(problem, device) is None)
    return Choice(next(takes), "the most special of our families that takes the problem")


def problem_of(
    direction: Direction,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    spec: ConvSpec,
    dtype: torch.dtype,
    layout: str,
    bias: bool = False,
    activation: str | None = None,
) -> Problem:
    """The problem of a call. ``x_shape`` is (N, C, H, W), ``w_shape`` is (K, C/G, R, S)."""
    precision = "ieee" if dtype != torch.float32 else spec.precision or torch_precision()
    parameters = (spec.stride, spec.padding, spec.dilation, spec.groups)
    extents = (*x_shape, w_shape[0], *w_shape[2:])
    return Problem(direction, *extents, *parameters, bias, dtype, layout, precision, activation)


generation = 0
"""How often all plans were forgotten: what was derived from a plan holds within a generation."""


def clear_plans() -> None:
    """Forget every plan; the next call of each layer chooses and binds again."""
    global generation
    generation += 1
    _plans.clear()
    _bgrads.clear()


def plan_fprop(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec, activation: str | None = None
) -> Plan:
    """The plan for ``x`` (N, C, H, W), ``w`` (K, C/G, R, S) and ``b`` (K,) or None, whose result is activated.

    Raises what torch.nn.functional.conv2d raises for tensors that it refuses, and RuntimeError with ``spec.strict`` if
    our kernels do not take the problem.
    """
    key = (
        *(x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, spec, torch_precision()),
        None if b is None else (b.shape, b.dtype, b.device),
        *(activation, (x.data_ptr() | w.data_ptr()) & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        check_tensors(x, w, b, spec)
        layout = result_layout(x, w)
        problem = problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout, b is not None, activation)
        plan = _remember(_plans, key, _bind(problem, x, w, layout, spec))
    return plan


def fprop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> torch.Tensor:
    """y (N, K, P, Q) of x (N, C, H, W), w (K, C/G, R, S) and b (K,) or None. Raises as plan_fprop."""
    return plan_fprop(x, w, b, spec).run(x, w, b)


def plan_dgrad(dy: torch.Tensor, w: torch.Tensor, x_shape: tuple[int, ...], layout: str, spec: ConvSpec) -> Plan:
    """The plan for ``dgrad`` of these arguments."""
    key = (
        *("dgrad", dy.shape, dy.stride(), dy.dtype, dy.device, w.shape, w.stride(), x_shape, layout, spec),
        *(torch_precision(), (dy.data_ptr() | w.data_ptr()) & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        problem = problem_of("dgrad", x_shape, w.shape, spec, dy.dtype, layout)
        plan = _remember(_plans, key, _bind(problem, dy, w, layout, spec))
    return plan


def dgrad(dy: torch.Tensor, w: torch.Tensor, x_shape: tuple[int, ...], layout: str, spec: ConvSpec) -> torch.Tensor:
    """dx of shape ``x_shape`` (N, C, H, W), stored as ``layout``, from dy (N, K, P, Q) and w (K, C/G, R, S)."""
    return plan_dgrad(dy, w, x_shape, layout, spec).run(dy, w)


def plan_wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], layout: str, spec: ConvSpec) -> Plan:
    """The plan for ``wgrad`` of these arguments."""
    key = (
        *("wgrad", dy.shape, dy.stride(), dy.dtype, dy.device, x.shape, x.stride(), w_shape, layout, spec),
        *(torch_precision(), (dy.data_ptr() | x.data_ptr()) & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        problem = problem_of("wgrad", x.shape, w_shape, spec, dy.dtype, layout_of(x))
        plan = _remember(_plans, key, _bind(problem, dy, x, layout, spec))
    return plan


def wgrad(dy: torch.Tensor, x: torch.Tensor, w_shape: tuple[int, ...], layout: str, spec: ConvSpec) -> torch.Tensor:
    """dw of shape ``w_shape`` (K, C/G, R, S), stored as ``layout``, from dy (N, K, P, Q) and x (N, C, H, W)."""
    return plan_wgrad(dy, x, w_shape, layout, spec).run(dy, x)


def gradients(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, fprop: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw of the layer that ``fprop`` is the plan of.

    Where both are PyTorch's they are one call of it, as in its own layer: two cost the host more.
    """
    problem, layout, w_layout, spec = fprop.problem, fprop.layout, fprop.w_layout, fprop.spec
    to_dx = plan_dgrad(dy, w, problem.x_shape, layout, spec)
    to_dw = plan_wgrad(dy, x, problem.w_shape, w_layout, spec)
    if to_dx.choice.family == to_dw.choice.family == "aten" and is_symmetric(problem):
        return aten_gradients(to_dx.problem, (layout, w_layout), dy, x, w)
    return to_dx.run(dy, w), to_dw.run(dy, x)


def bgrad(dy: torch.Tensor, spec: ConvSpec) -> torch.Tensor:
    """db (K,): the sum of dy (N, K, P, Q) over images and pixels."""
    key = (dy.shape, dy.stride(), dy.dtype, dy.device, spec.family)
    run = _bgrads.get(key)
    return (run or _remember(_bgrads, key, _bind_bgrad(dy, spec.family)))(dy)


def _bind_bgrad(dy: torch.Tensor, family: str) -> BoundCall:
    refused = not runs_kernels(dy.device) or dy.dtype not in support.KERNEL_DTYPES or dy.numel() == 0
    by_rule = family == "auto" and stand_in() is None and bgrad_by_rule(dy.shape, dy.stride())[0] == "aten"
    if family == "aten" or refused or by_rule:
        return lambda dy: dy.sum((0, 2, 3))
    return watched(bind_bgrad(dy.dtype, tuple(dy.shape), form_of(dy), dy.device), dy.device)


def _remember(store: dict[tuple, Bound], key: tuple, bound: Bound) -> Bound:
    """Keep what was bound. At the limit all is forgotten: binding again costs less than tracking what was used last."""
    if len(store) >= _PLAN_LIMIT:
        store.clear()
    store[key] = bound
    return bound


def _bind(problem: Problem, first: torch.Tensor, second: torch.Tensor, layout: str, spec: ConvSpec) -> Plan:
    device, forms = first.device, (form_of(first), form_of(second))
    plain = replace(problem, activation=None)  # what is measured and recorded
    choice = _choose_or_tune(plain, forms, device, spec.family)
    if choice.refused and device.type != "meta":  # there nothing is computed
        _report_refusal(problem, choice, spec)
    config = config_named(choice.config or "", choice.family, plain, forms, layout, device)
    family = FAMILIES[choice.family]
    run = watched(bind_config(family, problem, *forms, layout, device, config), device)
    if problem.activation is not None and not _activates(family, problem.activation):
        run = _activated(run)
    native = problem.direction == "fprop" and _all_native(problem, device, spec)
    return Plan(problem, spec, choice, run, layout, layout_of(second), native)


def _activates(family: Family, activation: str) -> bool:
    return isinstance(family, Activates) and activation in family.activations


def _activated(fprop: BoundCall) -> BoundCall:
    """``fprop`` and then, in place, ReLU."""
    return lambda x, w, b: fprop(x, w, b).relu_()


def _choose_or_tune(problem: Problem, forms: Forms, device: torch.device, family: str) -> Choice:
    """The choice for tensors of these forms: measured now if the user asked for it and there is no record."""
    choice = choose(problem, device, family)
    if not _could_be_tuned(choice, family):
        return choice
    obstacle = tune_now(problem, forms, device)
    return (
        choose(problem, device, family) if obstacle is None else choice._replace(reason=f"{choice.reason}; {obstacle}")
    )


def _could_be_tuned(choice: Choice, family: str) -> bool:
    """Whether measuring at first use has a say in the choice, and no record had."""
    return family == "auto" and not choice.refused and choice.config is None and tunes_at_first_use()


def _all_native(problem: Problem, device: torch.device, spec: ConvSpec) -> bool:
    """True if PyTorch runs every direction exactly as its own layer would."""
    top, bottom, left, right = problem.padding
    if top != bottom or left != right or (spec.precision is not None and problem.dtype == torch.float32):
        return False
    choices = [choose(problem.toward(each), device, spec.family) for each in DIRECTIONS]
    return all(each.family == "aten" and not _could_be_tuned(each, spec.family) for each in choices)


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


def layout_of(tensor: torch.Tensor) -> str:
    """The memory order of a 4-D tensor: ``"nhwc"`` if PyTorch would call it channels_last, else ``"nchw"``."""
    return "nhwc" if is_channels_last(tensor.shape, tensor.stride()) else "nchw"


def result_layout(x: torch.Tensor, w: torch.Tensor) -> str:
    """The memory order of y and dx, as of PyTorch's layer: ``"nhwc"`` if it would call either tensor channels_last."""
    return "nhwc" if "nhwc" in (layout_of(x), layout_of(w)) else "nchw"
