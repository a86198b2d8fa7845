"""What follows a convolution whose kernel has no epilogue: in place, and what the composition in fp32 gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from haloconv.epilogue import applied, followed
from haloconv.problem import Activation, Epilogue

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Operations(TorchDispatchMode):
    """Counts what writes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("unbind", "view", "reshape", "_reshape_alias"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual_dtype", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_scale_and_what_follows_is_rounded_once(
    dtype: torch.dtype, residual_dtype: Any, activation: Activation | None, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 5, 6, 7).to(dtype).contiguous(memory_format=memory_format)
    y[0, 0, 0, 0], y[1, 0, 0, 0] = float("nan"), float("-inf")
    pairs = torch.randn(5, 2, dtype=torch.promote_types(dtype, torch.float32))
    residual = []
    if residual_dtype is not None:
        residual = [torch.randn(2, 5, 6, 7).to(dtype if residual_dtype == "same" else residual_dtype)]
    epilogue = Epilogue(True, activation, bool(residual))
    expected = applied(y, pairs, epilogue, *residual)
    given = y.clone(memory_format=torch.preserve_format)
    result = followed(lambda *_: given, epilogue)(None, None, pairs, *residual)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7)) and result[0, 0, 0, 0].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_and_relu_are_two_passes_over_one_tensor(dtype: torch.dtype) -> None:
    """A copy in fp32 of a 16-bit result would be written and read again by each of them."""
    y, pairs = torch.randn(2, 5, 6, 7).to(dtype), torch.randn(5, 2, dtype=torch.promote_types(dtype, torch.float32))
    with _Operations() as operations:
        result = followed(lambda *_: y, Epilogue(True, "relu"))(None, None, pairs)
    assert operations.names == ["addcmul", "relu_"] and result is y


def test_a_residual_of_another_dtype_widens_the_result() -> None:
    y, pairs = torch.randn(1, 3, 4, 4).bfloat16(), torch.randn(3, 2)
    residual = torch.randn(1, 3, 4, 4)
    result = followed(lambda *_: y, Epilogue(True, "relu", True))(None, None, pairs, residual)
    assert result.dtype == torch.float32
