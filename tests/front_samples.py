"""PyTorch's own samples of the functions and layers beside conv2d, on our kernels: on the emulator and on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from haloconv.reference import IEEE_NORM, NORM_LIMITS
from tests import samples
from tests.cases import DTYPE_NAMES, generator, values
from tests.fronts import Front, front
from tests.launches import launched

LONGEST = 4096  # products of a sum, more than any sample has
OF_PYTORCH = 2  # times our limit: how far PyTorch's convolution on a CPU, which rounds sums to 16 bits, may be off
ON_OUR_KERNELS = {"conv1d": 10, "conv3d": 6, "conv_transpose1d": 10, "conv_transpose2d": 10}
"""How many samples of a function; the others are PyTorch's by docs/fronts.md, or its products."""
Tensor = torch.Tensor


def check_calls(name: str, device: str, dtype: torch.dtype) -> None:
    """Output and gradients of every sample against PyTorch's function in float64."""
    one, own = front(name), 0
    for x, w, b, options in samples.calls_of(name, device, dtype):
        tensors = [each for each in (x, w, b) if each is not None]
        with launched() as names:
            y = ours(one, tensors, options, dtype)
        own += bool(names)
        check_against_float64(y, tensors, lambda *given, o=options: one.theirs(*given, **o))
    assert own == ON_OUR_KERNELS[name]


def ours(one: Front, tensors: list[Tensor], options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The call of leaves that ``tensors`` become, with our family by name; what it does not take PyTorch runs."""
    for each in tensors:
        each.requires_grad_()
    precision = "ieee" if dtype == torch.float32 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return one.ours(*tensors, **options, family="direct", precision=precision)


def check_against_float64(y: Tensor, leaves: list[Tensor], function: Any) -> None:
    """``function`` of float64 tensors on the CPU gives what ``y`` was to be."""
    wide = [each.detach().cpu().double().requires_grad_() for each in leaves]
    want = function(*wide)
    dy = values(tuple(y.shape), y.dtype, generator("samples", y.device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = [y, *torch.autograd.grad(y, leaves, dy)]
    for ours, theirs in zip(got, [want, *torch.autograd.grad(want, wide, dy.cpu().double())], strict=True):
        assert ours.shape == theirs.shape and ours.dtype == y.dtype and ours.device == y.device
        difference = (ours.cpu().double() - theirs).norm()
        assert difference <= OF_PYTORCH * norm_limit(y.dtype) * theirs.norm(), (
            f"off by {difference / theirs.norm():.1e}"
        )


def norm_limit(dtype: torch.dtype) -> float:
    """What the norm of an error may be of that of a result."""
    return IEEE_NORM * LONGEST.bit_length() ** 0.5 if dtype == torch.float32 else NORM_LIMITS[DTYPE_NAMES[dtype]]


def check_errors(name: str, device: str) -> int:
    """Every error input of PyTorch's is refused with its class and words; how many there are."""
    one, count = front(name), 0
    for error in samples.errors_of(name, device):
        with pytest.raises(error.error, match=error.regex) as theirs:
            one.theirs(*error.args, **error.kwargs)
        for family in ("auto", "direct"):
            with pytest.raises(error.error, match=error.regex) as own:
                one.ours(*error.args, **error.kwargs, family=family)
            assert own.type is theirs.type
        count += 1
    return count


def check_layers(name: str, device: str, dtype: torch.dtype) -> None:
    """Every sample of PyTorch's layer: ours gives what PyTorch's of the same parameters gives in float64."""
    one, count = front(name), 0
    for args, kwargs, x in samples.layers_of(one.torchs, device, dtype):
        precision = "ieee" if dtype == torch.float32 else None
        layer = one.layer(*args, **kwargs, device=device, dtype=dtype, family="direct", precision=precision)
        wide = one.torchs(*args, **kwargs, dtype=torch.float64)
        wide.load_state_dict(layer.state_dict())
        x.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            y = layer(x)

        def theirs(x: Tensor, w: Tensor, b: Tensor, module: torch.nn.Module = wide) -> Tensor:
            return torch.func.functional_call(module, {"weight": w, "bias": b}, (x,))

        check_against_float64(y, [x, *(layer.get_parameter(each) for each in ("weight", "bias"))], theirs)
        count += 1
    assert count >= 2
