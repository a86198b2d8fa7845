"""``haloconv.ConvTranspose2d`` and the other layers beside Conv2d: PyTorch's of the same name on our kernels."""

from __future__ import annotations

from typing import Any

import torch

from haloconv.arguments import settings_of
from haloconv.autograd import Call
from haloconv.choose.choice import Choice
from haloconv.functional import check_names
from haloconv.layer import Layer
from haloconv.layout import is_channels_last
from haloconv.plan import problem_of
from haloconv.precision import Precision
from haloconv.problem import Pair, Problem
from haloconv.transposed import Transposed, conv_transpose1d, conv_transpose2d, posed, transpose

Tensor = torch.Tensor

_is_compiling = torch.compiler.is_compiling
_OUTPUT_PADDING_REACHES = Choice("aten", "output_padding is not below the stride", refused=True)


class TransposedLayer(Layer):
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
        if asked is not None:
            return transpose(self._padded(input), weight, bias, asked, notes)
        return self._called(input, weight, bias, self.output_padding)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Any) -> Tensor:
        """The function of haloconv with what the attributes ask for."""
        run = conv_transpose1d if self.dims == 1 else conv_transpose2d
        arguments: Any = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        choice: Any = {"precision": self.precision, "family": self.family, "strict": self.strict}
        return run(input, weight, bias, *arguments, **choice)

    def _asked(self) -> Transposed | None:
        """What the attributes ask for, kept until one of them is assigned."""
        asked = self.__dict__.get("_spec")
        if asked is None:
            arguments = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            asked = posed(self.dims, arguments, settings_of(self.precision, self.family, self.strict))
            if not _is_compiling():
                self.__dict__["_spec"] = asked
        return asked

    def _problem_of(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Problem | Choice:
        asked, w = self._asked(), self.weight.unsqueeze(2) if self.dims == 1 else self.weight
        if asked is None:
            return _OUTPUT_PADDING_REACHES
        if self.dims == 1:
            shape, strides = (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])
        nhwc = is_channels_last(shape, strides) or is_channels_last(w.shape, w.stride())
        y_shape = asked.y_shape(shape, tuple(w.shape))
        return problem_of("dgrad", y_shape, tuple(w.shape), asked.spec, dtype, "nhwc" if nhwc else "nchw")


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
