"""The layers beside Conv2d: haloconv.Conv1d, Conv3d, ConvTranspose1d and ConvTranspose2d, PyTorch's on our kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from haloconv.arguments import Settings, settings_of
from haloconv.autograd import Call
from haloconv.choose.choice import Choice
from haloconv.functional import check_names
from haloconv.layer import Layer
from haloconv.layout import Layout, is_channels_last
from haloconv.one_dimension import conv1d, convolve_row, posed_row
from haloconv.plan import problem_of
from haloconv.precision import Precision
from haloconv.problem import ConvSpec, Pair, Problem
from haloconv.three_dimensions import Triple, Volume, conv3d, convolve_volume, of_images, posed_volume, way_of
from haloconv.transposed import Transposed, conv_transpose1d, conv_transpose2d, posed_transposed, transpose

Tensor = torch.Tensor

_is_compiling = torch.compiler.is_compiling
_NOT_POSED = "no convolution of ours has these arguments"
_REFUSED = Choice("aten", _NOT_POSED, refused=True)


class Front(Layer):
    """What the layers beside Conv2d share: what their attributes ask for is posed once."""

    def _settings(self) -> Settings:
        return settings_of(self.precision, self.family, self.strict)

    def _asked(self) -> Any:
        """What the attributes ask for, kept until one of them is assigned; None if it is nothing of ours."""
        asked = self.__dict__.get("_spec")
        if asked is None:
            asked = self._posed()
            if not _is_compiling():
                self.__dict__["_spec"] = asked
        return asked

    def _posed(self) -> Any:
        raise NotImplementedError

    def _zeros(self) -> Any:
        """The padding that is left when another mode's was made."""
        return self.padding if self.padding_mode == "zeros" else 0


def _layout(shape: tuple[int, ...], strides: tuple[int, ...], w: Tensor) -> Layout:
    """The memory order of the result for images and filters of these forms."""
    return "nhwc" if is_channels_last(shape, strides) or is_channels_last(w.shape, w.stride()) else "nchw"


class Conv1d(Front, torch.nn.Conv1d):
    """A drop-in for torch.nn.Conv1d: same constructor, parameters in the same order, same state_dict, same results.

    It takes (N, C, L), or (C, L) for one signal, and gives (N, K, Q) or (K, Q), where
    Q = (L + left + right - dilation * (S - 1) - 1) // stride + 1; in memory with neighbouring channels, where those of
    the input are. On our kernels it is a convolution of images of one row.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: taps S of a filter, an int or a sequence of one.
        stride: samples between neighbours of the output.
        padding: samples at both ends: an int, (left, right), ``"same"`` or ``"valid"``; (left, 0) is causal.
        dilation: samples between neighbours of the filter.
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``; but for zeros PyTorch pads a copy.
        device: where the parameters are.
        dtype: their dtype: our kernels take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed, as in haloconv.Conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    ``weight`` is (K, C / groups, S), ``bias`` (K,) or None.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what PyTorch's layer raises ValueError for.
        RuntimeError, TypeError: what PyTorch's layer raises for arguments or inputs that it refuses.
    """

    torch_class = original = torch.nn.Conv1d
    function_name = "conv1d"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        sides: Any = tuple(padding) if isinstance(padding, (tuple, list)) and len(padding) == 2 else None
        extents: Any = (kernel_size, stride, padding if sides is None else 0, dilation)
        others: Any = (groups, bias, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, *extents, *others)
        if sides is not None:
            self.padding = sides
            self._reversed_padding_repeated_twice = [*sides]
        self.set_up(precision, family, strict)

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        asked, x = self._asked(), self._padded(input)
        if asked is None:
            arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
            return conv1d(x, weight, bias, *arguments, **self._settings()._asdict())
        return convolve_row(x, weight, bias, asked, notes)

    def _posed(self) -> ConvSpec | None:
        arguments = (self.stride, self._zeros(), self.dilation, self.groups)
        return posed_row(arguments, self.kernel_size[0], self._settings())

    def _problem_of(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Problem | Choice:
        asked, w, (n, c, length) = self._asked(), self.weight.unsqueeze(2), shape
        if asked is None:
            return _REFUSED
        image, strides = (n, c, 1, length), (*strides[:2], length * strides[2], strides[2])
        problem = problem_of("fprop", image, tuple(w.shape), asked, dtype, _layout(image, strides, w))
        return replace(problem, bias=self.bias is not None)


class Conv3d(Front, torch.nn.Conv3d):
    """A drop-in for torch.nn.Conv3d: same constructor, parameters in the same order, same state_dict, same results.

    It takes (N, C, D, H, W), or (C, D, H, W) for one volume, and gives (N, K, E, P, Q) or (K, E, P, Q), as
    haloconv.conv3d does: patches that do not overlap are one matrix product, filters of one frame or along time alone
    2-D convolutions where that needs no copy; all else is PyTorch's.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: taps of a filter along D, H and W, an int or three.
        stride: an int or three.
        padding: an int or three, ``"same"`` or ``"valid"``.
        dilation: an int or three.
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``; but for zeros PyTorch pads a copy.
        device: where the parameters are.
        dtype: their dtype: our kernels and products take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed, as in haloconv.Conv2d.
        family: ``"auto"``, or the family that runs the 2-D convolutions that it takes.
        strict: raise RuntimeError instead of running PyTorch's own where it is no product and no 2-D convolution.

    ``weight`` is (K, C / groups, T, R, S), ``bias`` (K,) or None.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what PyTorch's layer raises ValueError for.
        RuntimeError, TypeError: what PyTorch's layer raises for arguments or inputs that it refuses.
    """

    torch_class = original = torch.nn.Conv3d
    function_name = "conv3d"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Triple,
        stride: int | Triple = 1,
        padding: int | Triple | str = 0,
        dilation: int | Triple = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        extents: Any = (kernel_size, stride, padding, dilation)
        others: Any = (groups, bias, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, *extents, *others)
        self.set_up(precision, family, strict)

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        asked, x = self._asked(), self._padded(input)
        if asked is None:
            arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
            return conv3d(x, weight, bias, *arguments, **self._settings()._asdict())
        return convolve_volume(x, weight, bias, asked, notes)

    def _posed(self) -> Volume | None:
        arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
        taps: Any = tuple(self.kernel_size)
        return posed_volume(arguments, taps, self._settings())

    def _problem_of(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Problem | Choice:
        asked, device = self._asked(), vars(self)["_last_input"][3]
        way = _NOT_POSED if asked is None else way_of(shape, strides, dtype, device, self.weight, asked)
        if way == "product":
            return Choice("product", "patches do not overlap, so that it is one matrix product")
        if way not in ("time", "frames"):
            return Choice("aten", way, refused=True)
        x = torch.empty(1, device="meta").as_strided(shape, strides)
        images, w, spec = of_images(way, x, self.weight, asked)
        layout = _layout(tuple(images.shape), images.stride(), w)
        problem = problem_of("fprop", tuple(images.shape), tuple(w.shape), spec, dtype, layout)
        return replace(problem, bias=self.bias is not None)


class TransposedLayer(Front):
    """What transposed layers of any number of dimensions share."""

    dims: int

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``, of ``output_size`` if it is given: (P, Q) or all of y's extents."""
        if output_size is None:
            return super().forward(input)
        image: Any = (self.stride, self.padding, self.kernel_size, self.dims, self.dilation)
        own: Any = torch.nn.ConvTranspose2d._output_padding
        added = own(self, input, output_size, *image)
        return self._called(self._padded(input), self.weight, self.bias, tuple(added))

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for {self.torch_class.__name__}")
        asked = self._asked()
        if asked is None:
            return self._called(input, weight, bias, self.output_padding)
        return transpose(self._padded(input), weight, bias, asked, notes)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Any) -> Tensor:
        """The function of haloconv with what the attributes ask for."""
        run = conv_transpose1d if self.dims == 1 else conv_transpose2d
        arguments: Any = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return run(input, weight, bias, *arguments, **self._settings()._asdict())

    def _posed(self) -> Transposed | None:
        arguments = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return posed_transposed(self.dims, arguments, self._settings())

    def _problem_of(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Problem | Choice:
        asked, w = self._asked(), self.weight.unsqueeze(2) if self.dims == 1 else self.weight
        if asked is None:
            return _REFUSED
        if self.dims == 1:
            shape, strides = (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])
        y_shape, w_shape = asked.y_shape(shape, tuple(w.shape)), tuple(w.shape)
        return problem_of("dgrad", y_shape, w_shape, asked.spec, dtype, _layout(shape, strides, w))


class ConvTranspose1d(TransposedLayer, torch.nn.ConvTranspose1d):
    """A drop-in for torch.nn.ConvTranspose1d: same constructor, parameters, state_dict and results.

    It takes (N, C, L), or (C, L) for one signal, and gives (N, K, Q) or (K, Q), where
    Q = (L - 1) * stride - 2 * padding + dilation * (S - 1) + output_padding + 1; in memory with neighbouring channels,
    where those of the input are. On our kernels it is the gradient of a convolution with respect to its input, so
    that its own gradients are a convolution and a weight gradient.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: taps S of a filter, an int or a sequence of one.
        stride: samples between what neighbours of the input add to.
        padding: samples that are cut off at both ends.
        output_padding: samples added at the end.
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        dilation: samples between neighbours of the filter.
        padding_mode: ``"zeros"``.
        device: where the parameters are.
        dtype: their dtype: our kernels take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed, as in haloconv.Conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    ``weight`` is (C, K / groups, S), ``bias`` (K,) or None. ``forward`` takes ``output_size``, too.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what PyTorch's layer raises ValueError for.
        RuntimeError, TypeError: what PyTorch's layer raises for arguments or inputs that it refuses.
    """

    torch_class = original = torch.nn.ConvTranspose1d
    function_name, dims = "conv_transpose1d", 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] = 0,
        output_padding: int | tuple[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int] = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        extents: Any = (kernel_size, stride, padding, output_padding)
        others: Any = (groups, bias, dilation, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, *extents, *others)
        self.set_up(precision, family, strict)


class ConvTranspose2d(TransposedLayer, torch.nn.ConvTranspose2d):
    """A drop-in for torch.nn.ConvTranspose2d: same constructor, parameters, state_dict and results.

    It takes (N, C, H, W), or (C, H, W) for one image, and gives (N, K, P, Q) or (K, P, Q), where
    P = (H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1 and Q likewise; channels_last if input
    or weight is. On our kernels it is the gradient of a convolution with respect to its input, so
    that its own gradients are a convolution and a weight gradient.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: rows R and columns S of a filter, an int or (R, S).
        stride: pixels between what neighbours of the input add to, an int or (vertical, horizontal).
        padding: pixels that are cut off at opposite sides, an int or (vertical, horizontal).
        output_padding: rows and columns added at the end, an int or (rows, columns).
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        dilation: pixels between neighbours of the filter, an int or (vertical, horizontal).
        padding_mode: ``"zeros"``.
        device: where the parameters are.
        dtype: their dtype: our kernels take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed, as in haloconv.Conv2d.
        family: ``"auto"``, or the family that runs what it takes.
        strict: raise RuntimeError instead of running PyTorch's own where our kernels do not take the problem.

    ``weight`` is (C, K / groups, R, S), ``bias`` (K,) or None. ``forward`` takes ``output_size``, too.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what PyTorch's layer raises ValueError for.
        RuntimeError, TypeError: what PyTorch's layer raises for arguments or inputs that it refuses.
    """

    torch_class = original = torch.nn.ConvTranspose2d
    function_name, dims = "conv_transpose2d", 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        extents: Any = (kernel_size, stride, padding, output_padding)
        others: Any = (groups, bias, dilation, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, *extents, *others)
        self.set_up(precision, family, strict)
