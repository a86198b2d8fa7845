"""A call of a function beside conv2d as the 2-D problem that it poses, against PyTorch's own function of that name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from haloconv.arguments import settings_of
from haloconv.bench.layer import Layer, Step
from haloconv.choose.choice import Choice
from haloconv.families.base import Config
from haloconv.fronts import FUNCTIONS
from haloconv.layout import Layout
from haloconv.problem import Direction
from haloconv.three_dimensions import posed_volume, route_of

Tensor = torch.Tensor

OURS: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in FUNCTIONS}
"""The functions of haloconv by their names in torch.nn.functional."""


@dataclass(frozen=True)
class FrontLayer(Layer):
    """A layer whose user calls ``front``: conv1d, conv_transpose1d or conv_transpose2d. It has no bias.

    Its tensors are those of the 2-D problem. A signal is an image of one row; its left side may be padded more than its
    right. A transposed convolution is the one that it mirrors: its input is ``dy``, and the gradient of its output
    stands where ``x`` does, so that its forward pass is dgrad, and its input gradient fprop.
    """

    front: str = ""

    @property
    def directions(self) -> tuple[Direction, Direction, Direction]:
        """Directions of the 2-D problems that are output, input gradient and weight gradient, as those of any Layer."""
        return ("dgrad", "fprop", "wgrad") if self._is_transposed else super().directions

    @property
    def trained(self) -> tuple[Tensor, Tensor]:
        """The input, and the gradient of the output."""
        return (self.dy, self.x) if self._is_transposed else (self.x, self.dy)

    @property
    def _is_transposed(self) -> bool:
        return "transpose" in self.front

    @property
    def _dims(self) -> int:
        return 1 if "1d" in self.front else 2

    def baseline(self, step: Step) -> Callable[[], Tensor]:
        """PyTorch's own function, or what its autograd runs for a gradient; dw in the order of w."""
        forward, to_input, _ = self.directions
        given, dy = self.trained
        if step == forward:
            return lambda: self.convolve_by_torch(given, self.w)
        mask = [step == to_input, step == "wgrad", False]
        return lambda: self._torchs_gradient(given, dy, mask)

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """haloconv's function of its name."""
        spec, options = self.spec, self._options()
        options |= {"precision": spec.precision, "family": spec.family, "strict": spec.strict}
        return self._shown(OURS[self.front](self._given(x), self._given(w), None, **options))

    def convolve_by_torch(self, x: Tensor, w: Tensor) -> Tensor:
        """PyTorch's function of its name. It pads both sides alike; what that adds to the output is cut off."""
        options, more = self._options(), self._more()
        if more:
            options["padding"] = options["padding"][0]
        y = getattr(torch, self.front)(self._given(x), self._given(w), None, **options)
        return self._shown(y[..., : y.shape[-1] - more] if more else y)

    def with_layout(self, layout: Layout) -> FrontLayer:
        """The layer with its tensors in ``layout``; filters of signals stay as they are, as with torch.nn.Module.to."""
        found = super().with_layout(layout)
        return replace(found, w=self.w.contiguous()) if self._dims == 1 else found

    def _given(self, tensor: Tensor) -> Tensor:
        """The tensor as the function takes it, a view."""
        return tensor.squeeze(2) if self._dims == 1 else tensor

    def _shown(self, tensor: Tensor) -> Tensor:
        """The inverse of ``_given``."""
        return tensor.unsqueeze(2) if self._dims == 1 else tensor

    def _options(self) -> dict[str, Any]:
        """What the function gets behind the tensors. The padding of a signal is (left, right) where they differ."""
        spec, axes = self.spec, (0, 1)[-self._dims :]
        top, _, left, right = spec.padding
        padding = (top, left)[-self._dims :] if left == right else (left, right)
        found = {"stride": spec.stride[-self._dims :], "padding": padding, "dilation": spec.dilation[-self._dims :]}
        if self._is_transposed:
            steps = [(self.dy.shape[2 + axis] - 1) * spec.stride[axis] for axis in axes]
            spans = [spec.dilation[axis] * (self.w.shape[2 + axis] - 1) + 1 for axis in axes]
            least = [step + span - 2 * pad for step, span, pad in zip(steps, spans, padding, strict=True)]
            found["output_padding"] = tuple(
                self.x.shape[2 + axis] - each for axis, each in zip(axes, least, strict=True)
            )
        return found | {"groups": spec.groups}

    def _more(self) -> int:
        """By how many samples the output is longer if the right side is padded as the left one."""
        _, _, left, right = self.spec.padding
        longer = self.x.shape[3] + 2 * left - self.spec.dilation[1] * (self.w.shape[3] - 1) - 1
        return longer // self.spec.stride[1] + 1 - self.dy.shape[3] if left != right else 0

    def _torchs_gradient(self, x: Tensor, dy: Tensor, mask: list[bool]) -> Tensor:
        options, more = self._options(), self._more()
        padding, added = options["padding"], options.get("output_padding", (0,) * self._dims)
        given = torch.nn.functional.pad(self._given(dy), (0, more)) if more else self._given(dy)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            given, self._given(x), self._given(self.w), None, options["stride"], padding[:1] if more else padding,
            options["dilation"], self._is_transposed, added, options["groups"], mask,
        )  # fmt: skip
        return self._shown(dx) if dw is None else self.in_order_of_w(self._shown(dw))


@dataclass(frozen=True)
class PatchLayer(Layer):
    """A conv3d whose stride is its filter, of volumes that are one ``patch`` (T, R, S) each: a matrix product.

    Its tensors are those of the 2-D problem: images (N, C * T * R * S, 1, 1) and filters (K, C * T * R * S, 1, 1). In
    both layouts they lie in memory alike. It has no bias.
    """

    patch: tuple[int, ...] = ()

    def choice(self, step: Step) -> Choice:
        """Whether haloconv.conv3d takes the product, and why."""
        x, w = self._volumes(self.x), self._volumes(self.w)
        asked: Any = posed_volume((self.patch, 0, 1, 1), None, settings_of(*self.spec[4:]))
        route = route_of(tuple(x.shape), x.stride(), x.dtype, x.device, w, asked)
        return Choice("product", "patches do not overlap") if route == "product" else Choice("aten", route)

    def ran(self, step: Step) -> Config:
        """None of our kernels."""
        return Config("aten")

    def ours(self, step: Step) -> Callable[[], Tensor]:
        """haloconv.conv3d; the gradients of a product are the products that PyTorch's autograd takes."""
        if self.choice(step).family == "aten":
            return self.baseline(step)
        x, w, dy = (each.flatten(1) for each in (self.x, self.w, self.dy))
        return {
            "fprop": lambda: self.convolve(self.x, self.w),
            "dgrad": lambda: (dy @ w)[..., None, None],
            "wgrad": lambda: (dy.t() @ x)[..., None, None],
        }[step]

    def baseline(self, step: Step) -> Callable[[], Tensor]:
        """torch.conv3d, or what its autograd runs for a gradient."""
        if step == "fprop":
            return lambda: self.convolve_by_torch(self.x, self.w)
        x, w, dy = self._volumes(self.x), self._volumes(self.w), self.dy.unsqueeze(-1)
        mask = [step == "dgrad", step == "wgrad", False]
        others: Any = (None, self.patch, [0] * 3, [1] * 3, False, [0] * 3, 1, mask)
        found = lambda: torch.ops.aten.convolution_backward(dy, x, w, *others)[mask.index(True)]  # noqa: E731
        return lambda: found().flatten(1)[..., None, None]

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """haloconv.conv3d."""
        spec = self.spec
        settings: Any = {"precision": spec.precision, "family": spec.family, "strict": spec.strict}
        return OURS["conv3d"](self._volumes(x), self._volumes(w), stride=self.patch, **settings).squeeze(-1)

    def convolve_by_torch(self, x: Tensor, w: Tensor) -> Tensor:
        """torch.conv3d."""
        return torch.conv3d(self._volumes(x), self._volumes(w), stride=self.patch).squeeze(-1)

    def _volumes(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], -1, *self.patch)
