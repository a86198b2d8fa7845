"""One convolution with its tensors: the same call on our side, on PyTorch's side and on the oracle's, per direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from haloconv import plan, reference
from haloconv.choose.choice import Choice, choose, config_of
from haloconv.choose.measured import bgrad_by_measured_rule
from haloconv.device import stand_in
from haloconv.families import UNIVERSAL
from haloconv.families.base import Config
from haloconv.functional import conv2d
from haloconv.layout import Layout
from haloconv.precision import Precision, convolution_precision
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Problem, Request
from haloconv.tune.baseline import all_apart

Step = Literal["fprop", "dgrad", "wgrad", "bgrad"]
SomeLayer = TypeVar("SomeLayer", bound="Layer")

LAYOUTS: dict[Layout, torch.memory_format] = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@dataclass(frozen=True)
class Layer:
    """A convolution as data. ``x`` (N, C, H, W), ``w`` (K, C/G, R, S), ``b`` (K,) or None, ``dy`` (N, K, P, Q).

    The tensors carry no graph. ``layout`` is the memory order of y and dx, and mostly that of x and w, too. ``count``
    says how many layers of a model it stands for. ``fed`` layers take the model's own input, for which training wants
    no gradient; ``activation`` says that ``x`` is what other layers of a model made of it.
    """

    name: str
    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None
    dy: torch.Tensor
    spec: ConvSpec
    layout: Layout = "nchw"
    count: int = 1
    fed: bool = False
    activation: bool = False

    @property
    def directions(self) -> tuple[Direction, Direction, Direction]:
        """Directions of the problems that are output, input gradient and weight gradient."""
        return "fprop", "dgrad", "wgrad"

    @property
    def trained(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a training step begins with: the input, and the gradient of the output."""
        return self.x, self.dy

    @property
    def steps(self) -> tuple[Step, ...]:
        """The directions, and the bias gradient if there is a bias."""
        return DIRECTIONS if self.b is None else (*DIRECTIONS, "bgrad")

    def problem(self, step: Step) -> Problem:
        """The problem of a direction as a plan poses it; for the bias gradient that of the forward direction."""
        direction = "fprop" if step == "bgrad" else step
        bias = self.b is not None and direction == "fprop"
        layout = plan.layout_of(self.x) if step == "wgrad" else self.layout
        problem = plan.problem_of(direction, self.x.shape, self.w.shape, self.spec, self.x.dtype, layout)
        return replace(problem, bias=bias)

    def choice(self, step: Step) -> Choice:
        """The family that runs the step, and why. The bias gradient is a sum, by reduce/bgrad whatever is asked for."""
        device, family = self.x.device, self.spec.family
        if step != "bgrad" or family == "aten":
            return choose(self.problem(step), device, family)
        choice = choose(self.problem(step), device, UNIVERSAL)
        if choice.refused:
            return choice
        if family != "auto":
            return Choice("reduce", "asked for")
        if stand_in() is not None:  # no rule was measured there, and our kernel runs
            return Choice("reduce", "a sum over images and pixels")
        return Choice(*bgrad_by_measured_rule(self.dy.shape, self.dy.stride(), self.dy.device))

    def ran(self, step: Step) -> Config:
        """The config that runs the step, which names its kernel; that of PyTorch is called ``aten``."""
        choice = self.choice(step)
        if choice.family == "aten":
            return Config("aten")
        if step == "bgrad":
            return Config("reduce/bgrad")
        first, second = {"fprop": (self.x, self.w), "dgrad": (self.dy, self.w), "wgrad": (self.dy, self.x)}[step]
        layout = plan.layout_of(self.w) if step == "wgrad" else self.layout
        forms = (plan.form_of(first), plan.form_of(second))
        return config_of(choice, Request(self.problem(step), *forms, layout, self.x.device))

    def timed(self, step: Step) -> Callable[[], object]:
        """What of haloconv's operation is timed."""
        return self.ours(step)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says of the layer besides."""
        return ()

    def ours(self, step: Step) -> Callable[[], torch.Tensor]:
        """haloconv's operation."""
        x, w, b, dy, spec = self.x, self.w, self.b, self.dy, self.spec
        return {
            "fprop": lambda: plan.fprop(x, w, b, spec),
            "dgrad": lambda: plan.dgrad(dy, w, tuple(x.shape), self.layout, spec),
            "wgrad": lambda: plan.wgrad(dy, x, tuple(w.shape), plan.layout_of(w), spec),
            "bgrad": lambda: plan.bgrad(dy, spec),
        }[step]

    def convolve(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """haloconv's function, as a user calls it."""
        spec = self.spec
        form = (spec.stride, spec.padding, spec.dilation, spec.groups)
        return conv2d(x, w, self.b, *form, precision=spec.precision, family=spec.family, strict=spec.strict)

    def convolve_by_torch(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """PyTorch's function, as a user calls it."""
        return torch_convolution(x, w, self.b, self.spec)

    def baseline(self, step: Step) -> Callable[[], torch.Tensor]:
        """PyTorch's operation. Four-sided padding, which it lacks, costs it a padded copy, as it does in torch.nn.

        dw is in the order of w, as autograd stores a parameter's gradient: it copies one that is not.
        """
        if step == "fprop":
            return lambda: self.convolve_by_torch(self.x, self.w)
        if step == "bgrad":
            return lambda: self.dy.sum((0, 2, 3))
        mask = [step == "dgrad", step == "wgrad", False]
        return lambda: self._baseline_backward(mask)

    def searches(self, step: Step) -> bool:
        """Whether our side calls PyTorch's convolution, at least for a part: it runs on what cuDNN's search found."""
        return step != "bgrad" and self.choice(step).family == "aten"

    def elsewhere(self: SomeLayer) -> SomeLayer:
        """The layer with copies of its tensors, for which cuDNN searches anew: what it finds differs."""
        x, w, b, dy = all_apart((self.x, self.w, self.b, self.dy))
        return replace(self, x=x, w=w, b=b, dy=dy)

    def oracle(self, step: Step) -> reference.Oracle:
        """The float64 answer."""
        x, w, dy, spec = self.x, self.w, self.dy, self.spec
        if step == "fprop":
            return reference.oracle_fprop(x, w, self.b, spec)
        if step == "dgrad":
            return reference.oracle_dgrad(dy, w, tuple(x.shape), spec)
        if step == "wgrad":
            return reference.oracle_wgrad(dy, x, tuple(w.shape), spec)
        return reference.oracle_bgrad(dy)

    def limits(self, step: Step, baseline: reference.Error | None) -> reference.Limits:
        """What passes, given PyTorch's own error."""
        if step == "bgrad":
            return reference.bgrad_limits(self.problem(step), baseline)
        return reference.error_limits(self.problem(step), baseline)

    def border(self, step: Step) -> torch.Tensor | None:
        return None if step == "bgrad" else reference.border_mask(self.problem(step), self.x.device)

    def in_order_of_w(self, dw: torch.Tensor) -> torch.Tensor:
        """dw as autograd stores it beside w: it copies what is in another order."""
        return dw.contiguous(memory_format=LAYOUTS[plan.layout_of(self.w)])

    def with_layout(self: SomeLayer, layout: Layout) -> SomeLayer:
        """The layer with its tensors in ``layout``: x, w and dy; dw follows w."""
        order = LAYOUTS[layout]
        x, w, dy = (tensor.contiguous(memory_format=order) for tensor in (self.x, self.w, self.dy))
        return replace(self, x=x, w=w, dy=dy, layout=layout)

    def _baseline_backward(self, mask: list[bool]) -> torch.Tensor:
        spec = self.spec
        image, padding = _padded(self.x, spec)
        dx: torch.Tensor | None
        dx, dw, _ = torch.ops.aten.convolution_backward(
            self.dy, image, self.w, None, spec.stride, padding, spec.dilation, False, [0, 0], spec.groups, mask
        )
        if dx is None:
            return self.in_order_of_w(dw)
        if image is self.x:
            return dx
        top, bottom, left, right = spec.padding
        return dx[:, :, top : dx.shape[2] - bottom, left : dx.shape[3] - right]


def torch_convolution(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec) -> torch.Tensor:
    """PyTorch's own convolution with our parameters."""
    image, padding = _padded(x, spec)
    return torch.conv2d(image, w, b, spec.stride, padding, spec.dilation, spec.groups)


def _padded(x: torch.Tensor, spec: ConvSpec) -> tuple[torch.Tensor, list[int]]:
    """The image that PyTorch convolves, and the symmetric padding left to it."""
    top, bottom, left, right = spec.padding
    if top == bottom and left == right:
        return x, [top, left]
    return torch.nn.functional.pad(x, (left, right, top, bottom)), [0, 0]


@contextmanager
def baseline_flags(precision: Precision) -> Iterator[None]:
    """PyTorch at its best for the same precision: cuDNN's search on, TF32 exactly if ``precision`` is ``"tf32"``."""
    with reference.cudnn_search(True), convolution_precision(precision):
        yield
