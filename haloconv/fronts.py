"""The layers beside Conv2d: haloconv.Conv1d, Conv3d, ConvTranspose1d and ConvTranspose2d, PyTorch's on our kernels."""

from __future__ import annotations

from typing import Any

import torch

from haloconv.autograd import Call
from haloconv.choose.choice import Choice
from haloconv.front import Front, Images
from haloconv.functional import SERVED, check_names
from haloconv.layout import strides_of
from haloconv.one_dimension import conv1d, convolve_row, posed_row
from haloconv.padding import Posed, as_modes, modes_in_use
from haloconv.precision import Precision
from haloconv.problem import ConvSpec, Problem
from haloconv.three_dimensions import (
    Triple,
    Volume,
    conv3d,
    convolve_volume,
    of_images,
    posed_volume,
    route_of,
    why_left,
)
from haloconv.transposed import Transposed, conv_transpose1d, conv_transpose2d, posed_transposed, transpose

Tensor = torch.Tensor

_NOT_POSED = "no convolution of ours has these arguments"
_REFUSED = Choice("aten", _NOT_POSED, refused=True)


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
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``; without a padded copy of the input
            where our kernels run.
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
        asked, x, mode = self._asked(), self._noted(input), self.padding_mode
        if asked is None:
            arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
            return conv1d(self._padded(x), weight, bias, *arguments, **self._settings()._asdict())
        return convolve_row((x, weight, bias), asked, notes, mode)

    def _ends(self) -> Any:
        """The padding, as PyTorch takes it: of another mode than zeros what the constructor made of it."""
        return self.padding if self.padding_mode == "zeros" else tuple(self._reversed_padding_repeated_twice)

    def _posed(self) -> ConvSpec | None:
        arguments = (self.stride, self._ends(), self.dilation, self.groups)
        return posed_row(arguments, self.kernel_size[0], self._settings())

    def images_of(self, x: Tensor, device: torch.device) -> Images | Choice:
        """Images and filters of one row."""
        asked = self._asked()
        if asked is None:
            return _REFUSED
        if self.padding_mode != "zeros":
            asked = asked._replace(padding=(0, 0, 0, 0))
        return Images(x.unsqueeze(2), self.weight.detach().unsqueeze(2), asked)

    def _problem_of(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Problem | Choice:
        problem, asked = super()._problem_of(shape, strides, dtype, device), self._asked()
        if self.padding_mode == "zeros" or isinstance(problem, Choice):
            return problem
        modes = modes_in_use(as_modes(("zeros", self.padding_mode)), asked.padding)
        posed = Posed(problem.x_shape, problem.w_shape, dtype, problem.layout, asked, modes)
        return posed.forward(
            strides_of(problem.x_shape, problem.layout), self.weight.unsqueeze(2), device, problem.bias
        )


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

    def why_left(self) -> str | None:
        """None if a layer of this kind may be ours, else a sentence: why it stays PyTorch's whatever its input."""
        asked: Any = self._asked()
        taps: Any = tuple(self.kernel_size)
        return _NOT_POSED if asked is None else why_left(taps, asked)

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        asked, x = self._asked(), self._noted(self._padded(input))
        if asked is None:
            arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
            return conv3d(x, weight, bias, *arguments, **self._settings()._asdict())
        return convolve_volume(x, weight, bias, asked, notes if x is input else None)

    def _posed(self) -> Volume | None:
        arguments: Any = (self.stride, self._zeros(), self.dilation, self.groups)
        taps: Any = tuple(self.kernel_size)
        return posed_volume(arguments, taps, self._settings())

    def images_of(self, x: Tensor, device: torch.device) -> Images | Choice:
        """Frames, or volumes with rows and columns as one."""
        asked, w = self._asked(), self.weight.detach()
        route = _NOT_POSED
        if asked is not None:
            route = route_of(tuple(x.shape), x.stride(), self.weight.dtype, device, w, asked)
        if route == "product":
            return Choice("product", "patches do not overlap, so that it is one matrix product")
        if route not in ("time", "frames"):
            return Choice("aten", route, refused=True)
        return Images(*of_images(route, x, w, asked))


class TransposedLayer(Front):
    """What transposed layers of any number of dimensions share."""

    dims: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
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

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``, of ``output_size`` if it is given: (P, Q) or all of y's extents."""
        if output_size is None:
            return super().forward(input)
        image: Any = (self.stride, self.padding, self.kernel_size, self.dims, self.dilation)
        own: Any = torch.nn.ConvTranspose2d._output_padding
        added = own(self, input, output_size, *image)
        return self._called(self._noted(input), self.weight, self.bias, tuple(added))

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for {self.torch_class.__name__}")
        asked = self._asked()
        if asked is None:
            return self._called(input, weight, bias, self.output_padding)
        return transpose(self._noted(input), weight, bias, asked, notes)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Any) -> Tensor:
        """The function of haloconv with what the attributes ask for."""
        run = conv_transpose1d if self.dims == 1 else conv_transpose2d
        arguments: Any = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return run(input, weight, bias, *arguments, **self._settings()._asdict())

    def _posed(self) -> Transposed | None:
        arguments = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return posed_transposed(arguments, self.dims, self._settings())

    def images_of(self, x: Tensor, device: torch.device) -> Images | Choice:
        """The mirrored convolution; in one dimension, of images and filters of one row."""
        asked, w = self._asked(), self.weight.detach()
        if asked is None:
            return _REFUSED
        if self.dims == 1:
            x, w = x.unsqueeze(2), w.unsqueeze(2)
        return Images(x, w, asked.spec, asked.y_shape(tuple(x.shape), tuple(w.shape)))


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


FUNCTIONS = (conv1d, conv3d, conv_transpose1d, conv_transpose2d)
"""The functions beside conv2d."""
SERVED.update({getattr(torch, function.__name__): function for function in FUNCTIONS})
