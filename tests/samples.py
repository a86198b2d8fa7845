"""PyTorch's own sample and error inputs for conv2d and nn.Conv2d: its definition of drop-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from haloconv.problem import ConvSpec, as_four_sides, as_pair
from tests import oracle
from tests.cases import Tensors, generator, values

_frozen_before = torch.backends.flags_frozen()
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402

# These imports forbid plain assignment to torch.backends flags for the rest of the process; other tests need it.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = not _frozen_before


class Sample(NamedTuple):
    """The arguments of one call of conv2d; ``options`` holds stride, padding, dilation and groups."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None
    options: dict[str, Any]


class ErrorSample(NamedTuple):
    args: tuple
    kwargs: dict[str, Any]
    error: type[Exception]
    regex: str


OP = next(op for op in op_db if op.name == "nn.functional.conv2d")
MODULE = next(info for info in module_db if info.module_cls is torch.nn.Conv2d)


def calls_of(name: str, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """PyTorch's samples of a function of torch.nn.functional, of tensors that require no gradient."""
    op = next(op for op in op_db if op.name == f"nn.functional.{name}")
    for sample in op.sample_inputs(device, dtype):
        w, b = sample.args
        yield Sample(sample.input, w, b, sample.kwargs)


def op_samples(device: str, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Sample]:
    for sample in OP.sample_inputs(device, dtype, requires_grad=requires_grad):
        w, b = sample.args
        yield Sample(sample.input, w, b, sample.kwargs)


def op_errors(device: str) -> Iterator[ErrorSample]:
    return errors_of("conv2d", device)


def errors_of(name: str, device: str) -> Iterator[ErrorSample]:
    """PyTorch's error inputs of a function of torch.nn.functional; none where it has none."""
    op = next(op for op in op_db if op.name == f"nn.functional.{name}")
    for error in op.error_inputs(device) if op.error_inputs_func is not None else ():
        sample = error.sample_input
        yield ErrorSample((sample.input, *sample.args), sample.kwargs, error.error_type, error.error_regex)


def layers_of(cls: type, device: str, dtype: torch.dtype) -> Iterator[tuple[tuple, dict, torch.Tensor]]:
    """PyTorch's samples of a layer: constructor arguments, constructor keywords, and the input of forward."""
    info = next(each for each in module_db if each.module_cls is cls)
    for one in info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=False, training=True):
        yield one.constructor_input.args, one.constructor_input.kwargs, one.forward_input.args[0]


def module_samples(device: str, dtype: torch.dtype) -> Iterator[tuple[tuple, dict, torch.Tensor]]:
    """Constructor arguments, constructor keywords, and the input of forward."""
    inputs = MODULE.module_inputs_func(MODULE, device=device, dtype=dtype, requires_grad=True, training=True)
    for one in inputs:
        yield one.constructor_input.args, one.constructor_input.kwargs, one.forward_input.args[0]


def spec_of(sample: Sample) -> ConvSpec:
    stride = as_pair(sample.options.get("stride", 1), "stride")
    dilation = as_pair(sample.options.get("dilation", 1), "dilation")
    padding = as_four_sides(
        sample.options.get("padding", 0), filter_extent=tuple(sample.w.shape[2:]), stride=stride, dilation=dilation
    )
    return ConvSpec(stride, padding, dilation, sample.options.get("groups", 1))


def check_call(sample: Sample, y: torch.Tensor) -> dict[str, float]:
    """Check y and the gradients of a call whose tensors all require grad; returns the norm error per direction."""
    dy = values(tuple(y.shape), y.dtype, generator("samples", y.device))
    wanted = [v for v in (sample.x, sample.w, sample.b) if v is not None]
    dx, dw, *db = torch.autograd.grad(y, wanted, dy)
    assert y.dim() == dx.dim() == sample.x.dim()
    x4, y4, dx4, dy4 = (v.detach().unsqueeze(0) if v.dim() == 3 else v.detach() for v in (sample.x, y, dx, dy))
    b = None if sample.b is None else sample.b.detach()
    t, spec = Tensors(x4, sample.w.detach(), b, dy4), spec_of(sample)
    found = {"fprop": y4, "dgrad": dx4, "wgrad": dw} | ({"bgrad": db[0]} if db else {})
    spec = spec if y.is_cuda else spec._replace(family="aten")  # which is all that runs here
    return {name: oracle.check(name, got, t, spec).norm for name, got in found.items()}
