"""``haloconv.Conv2d``: torch.nn.Conv2d on our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from haloconv.autograd import Call
from haloconv.choose.choice import Choice
from haloconv.functional import cached_spec, check_names, convolve, convolve_padded, make_spec
from haloconv.layer import Layer
from haloconv.layout import Layout, is_channels_last
from haloconv.padding import Posed, as_modes, mode_of_layer, modes_in_use
from haloconv.precision import Precision
from haloconv.problem import ConvSpec, Modes, PaddingMode, Pair, Problem

_is_compiling = torch.compiler.is_compiling


class Conv2d(Layer, torch.nn.Conv2d):
    """A drop-in for torch.nn.Conv2d: same constructor, parameters in the same order, same state_dict, same results.

    It takes (N, C, H, W), or (C, H, W) for one image, and gives (N, K, P, Q) or (K, P, Q), where
    P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1 and Q likewise; channels_last if input or weight is.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: rows R and columns S of a filter, an int or (R, S).
        stride: pixels between neighbours of the output, an int or (vertical, horizontal).
        padding: pixels around the image: an int, (vertical, horizontal), (top, bottom, left, right), ``"same"`` or
            ``"valid"``.
        dilation: pixels between neighbours of the filter, an int or (vertical, horizontal).
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, or a pair (vertical, horizontal)
            of them, as ``("zeros", "circular")``; without a padded copy of the input where our kernels run.
        device: where the parameters are.
        dtype: their dtype: our kernels take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed: ``"ieee"``, ``"tf32"``, ``"tf32x3"`` (of two TF32 values each, as
            accurate as fp32), or None to follow PyTorch's setting.
        family: ``"auto"``, or the family that runs what it takes; haloconv.conv2d names them.
        strict: raise RuntimeError instead of running PyTorch's convolution where our kernels do not take the problem.

    ``weight`` is (K, C / groups, R, S), ``bias`` (K,) or None. ``swapped`` is true for what haloconv.accelerate made of
    a torch.nn.Conv2d, and haloconv.restore makes one again.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what torch.nn.Conv2d raises ValueError for.
        RuntimeError, TypeError: what torch.nn.Conv2d raises for arguments or inputs that it refuses.
    """

    torch_class = original = torch.nn.Conv2d
    function_name = "conv2d"
    one_spec = True  # for images of all extents

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode | Modes = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        sides = tuple(padding) if isinstance(padding, (tuple, list)) and len(padding) == 4 else None
        inherited: Any = padding if sides is None else 0
        mode: Any = mode_of_layer(padding_mode)
        own_mode: Any = mode if isinstance(mode, str) else "zeros"
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            inherited,
            dilation,
            groups,
            bias,
            own_mode,
            device,
            dtype,
        )
        self.padding_mode = mode
        if sides is not None:
            top, bottom, left, right = self.padding = sides
            self._reversed_padding_repeated_twice = [left, right, top, bottom]
        self.set_up(precision, family, strict)

    def _run(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, notes: list[Call]
    ) -> torch.Tensor:
        spec = self.__dict__.get("_spec") or self._new_spec(input.shape[-2:])
        if self.padding_mode == "zeros":
            return convolve(self._noted(input), weight, bias, spec, notes)
        return convolve_padded((self._noted(input), weight, bias), spec, as_modes(self.padding_mode), notes)

    @staticmethod
    def padding_for(layer: torch.nn.Conv2d, image: Sequence[int]) -> int | tuple[int, ...] | str:
        """conv2d's ``padding`` for an image of these extents (H, W); ``layer`` may still be of PyTorch's class."""
        if layer.padding_mode == "zeros":
            return layer.padding
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        return top, bottom, left, right

    def _new_spec(self, image: Sequence[int]) -> ConvSpec:
        """What the attributes ask for of an image (H, W); if of all, it is kept until one of them is assigned."""
        padding = self.padding_for(self, image)
        extent, choice = self.kernel_size, (self.precision, self.family, self.strict)
        arguments = (self.stride, padding, self.dilation, self.groups, extent, *choice)
        if _is_compiling():
            return make_spec(*arguments)
        if not self.one_spec:
            pairs = tuple(self.stride), padding, tuple(self.dilation), self.groups, tuple(extent)
            return cached_spec(*pairs, *choice)
        spec = self.__dict__["_spec"] = make_spec(*arguments)
        return spec

    def _problem_of(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Problem | Choice:
        weight = self.weight
        nhwc = is_channels_last(shape, strides) or is_channels_last(weight.shape, weight.stride())
        layout: Layout = "nhwc" if nhwc else "nchw"
        spec = self._new_spec(shape[-2:])
        modes = modes_in_use(as_modes(self.padding_mode), spec.padding)
        posed = Posed(shape, tuple(weight.shape), dtype, layout, spec, modes)
        return posed.forward(strides, weight, device, self.bias is not None)
