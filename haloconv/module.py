"""``haloconv.Conv2d``: torch.nn.Conv2d on our kernels."""

from __future__ import annotations

import torch

from haloconv.functional import conv2d
from haloconv.plan import choose, problem_of
from haloconv.precision import torch_precision
from haloconv.problem import FAMILIES, PRECISIONS, ConvSpec, Pair, as_four_sides

_is_compiling = torch.compiler.is_compiling


class Conv2d(torch.nn.Conv2d):
    """A drop-in for torch.nn.Conv2d: same constructor, parameters in the same order, same state_dict, same results.

    ``padding`` may also be four sides, ``(top, bottom, left, right)`` in pixels. The keyword-only arguments are those
    of haloconv.conv2d, which see for shapes and errors raised.
    """

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
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: str | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        _check_names(precision, family)
        sides = tuple(padding) if isinstance(padding, (tuple, list)) and len(padding) == 4 else None
        inherited = padding if sides is None else 0
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            inherited,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        if sides is not None:
            top, bottom, left, right = self.padding = sides
            self._reversed_padding_repeated_twice = [left, right, top, bottom]
        self.precision, self.family, self.strict = precision, family, strict

    @classmethod
    def from_torch(
        cls, conv: torch.nn.Conv2d, *, precision: str | None = None, family: str = "auto", strict: bool = False
    ) -> Conv2d:
        """``conv`` as a haloconv layer that shares its parameters and keeps its hooks, mode, device and dtype.

        Raises TypeError if ``conv`` is not a torch.nn.Conv2d, ValueError for an unknown precision or family.
        """
        if not isinstance(conv, torch.nn.Conv2d):
            raise TypeError(f"from_torch() takes a torch.nn.Conv2d, not {type(conv).__name__}")
        _check_names(precision, family)
        layer = cls.__new__(cls)
        layer.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(conv).items()}
        )
        layer.precision, layer.family, layer.strict = precision, family, strict
        return layer

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        if not _is_compiling():
            self.__dict__["_last_input"] = (input.shape, input.dtype, input.device)
        return conv2d(
            input,
            weight,
            bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            precision=self.precision,
            family=self.family,
            strict=self.strict,
        )

    def extra_repr(self) -> str:
        precision = self.precision or f"{torch_precision()} (PyTorch's setting)"
        return f"{super().extra_repr()}, precision={precision}, family={self.family}{self._family_in_use()}"

    def _family_in_use(self) -> str:
        """The family that ran the last input, in words; empty before the first."""
        seen = self.__dict__.get("_last_input")
        if seen is None or self.family == "aten":
            return ""
        shape, dtype, device = seen
        padding = self.padding if self.padding_mode == "zeros" else 0
        sides = as_four_sides(padding, filter_extent=self.kernel_size, stride=self.stride, dilation=self.dilation)
        spec = ConvSpec(self.stride, sides, self.dilation, self.groups, self.precision, self.family)
        batched = tuple(shape) if len(shape) == 4 else (1, *shape)
        problem = problem_of("fprop", batched, tuple(self.weight.shape), spec, dtype, "nchw", self.bias is not None)
        choice = choose(problem, device, self.family)
        return "" if choice.family == self.family else f" -> {choice.family} ({choice.reason})"


def _check_names(precision: str | None, family: str) -> None:
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be None or one of {PRECISIONS}, not {precision!r}")
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, not {family!r}")
