"""``haloconv.Conv2d``: torch.nn.Conv2d on our kernels."""

from __future__ import annotations

import torch

from haloconv.functional import convolve, make_spec
from haloconv.plan import choose, problem_of
from haloconv.precision import torch_precision
from haloconv.problem import FAMILIES, PRECISIONS, ConvSpec, Pair

_is_compiling = torch.compiler.is_compiling
_SPEC_NAMES = frozenset(
    ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "precision", "family", "strict")
)


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

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in _SPEC_NAMES:
            self.__dict__.pop("_spec", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, K, P, Q) of ``input`` (N, C, H, W), or (K, P, Q) of (C, H, W). Raises as haloconv.conv2d."""
        parameters = self.__dict__["_parameters"]  # past nn.Module.__getattr__; a parametrized one is not in here
        weight = parameters.get("weight")
        bias = parameters.get("bias") if "bias" in parameters else self.bias
        return self._conv_forward(input, self.weight if weight is None else weight, bias)

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"conv2d(): input must be a Tensor, not {type(input).__name__}")
        spec = self.__dict__.get("_spec") or self._new_spec()
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if not _is_compiling():
            self.__dict__["_last_input"] = (input.shape, input.dtype, input.device)
        return convolve(input, weight, bias, spec)

    def _new_spec(self) -> ConvSpec:
        """What the attributes ask for; kept until one of them is assigned."""
        padding = self.padding if self.padding_mode == "zeros" else 0
        extent, choice = self.kernel_size, (self.precision, self.family, self.strict)
        spec = make_spec(self.stride, padding, self.dilation, self.groups, extent, *choice)
        if not _is_compiling():
            self.__dict__["_spec"] = spec
        return spec

    def extra_repr(self) -> str:
        precision = self.precision or f"{torch_precision()} (PyTorch's setting)"
        return f"{super().extra_repr()}, precision={precision}, family={self.family}{self._family_in_use()}"

    def _family_in_use(self) -> str:
        """The family that ran the last input, in words; empty before the first."""
        seen = self.__dict__.get("_last_input")
        if seen is None or self.family == "aten":
            return ""
        shape, dtype, device = seen
        batched = tuple(shape) if len(shape) == 4 else (1, *shape)
        bias = self.bias is not None
        problem = problem_of("fprop", batched, tuple(self.weight.shape), self._new_spec(), dtype, "nchw", bias)
        choice = choose(problem, device, self.family)
        return "" if choice.family == self.family else f" -> {choice.family} ({choice.reason})"


def _check_names(precision: str | None, family: str) -> None:
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be None or one of {PRECISIONS}, not {precision!r}")
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, not {family!r}")
