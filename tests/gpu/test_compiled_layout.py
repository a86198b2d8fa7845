"""Graphs that torch.compile(backend="haloconv") brings to channels_last, by Inductor: values, gradients, strides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from haloconv import backend as backends
from haloconv.choose.choice import Choice

CHANNELS = 64
PYTORCHS_TF32 = 1e-3
"""What PyTorch's TF32 may err by. Its weight gradients do by 8e-4 to 9e-4 (suite rims, NVIDIA H200), but by 2e-4 where
it computes in full fp32, as of few channels it may in one layout and not in the other: which is not ours to choose."""


class Decoder(nn.Module):
    """Group norms, an addition, an image enlarged in front of a convolution, and one behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(16, CHANNELS) for _ in range(2))
        self.enlarged, self.head = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 5, 1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.stem(z)
        x = x + self.wide(functional.silu(self.norms[0](x)))
        x = self.enlarged(functional.interpolate(x, scale_factor=2, mode="nearest"))
        y = self.head(functional.silu(self.norms[1](x)))
        return functional.interpolate(y, scale_factor=2, mode="bilinear")


def outcome(model: nn.Module, call: Callable, x: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """The output and, in training, gradients of the image and the parameters."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = call(x)
    if not training:
        return [y]
    gradient = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).reshape(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], gradient)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=["bf16", "fp16", "tf32"])
def test_a_decoder_is_as_accurate_as_pytorchs(
    dtype: torch.dtype | None, training: bool, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every convolution is our operator, whose kernels are then those of the rules."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder().cuda().train(training)
    x = torch.randn(2, 3, 24, 20, device="cuda").to(memory_format=memory_format)
    truth = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend=backends.backend, fullgraph=True)  # a checkout has no entry point
    # Not the model itself: under autocast it interpolates in fp32, but a graph that PyTorch decomposes does not.
    plain = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        exact = outcome(truth, truth, x.double(), training)
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            theirs, ours = (outcome(model, call, x, training) for call in (plain, compiled))
    for one, other in zip(theirs[:2], ours[:2], strict=True):  # gradients of filters lie as these do, in ours
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    for want, their, our in zip(exact, theirs, ours, strict=True):
        errors = [(each.double() - want).norm() / want.norm() for each in (their, our)]
        assert errors[1] <= max(1.5 * errors[0], 0.0 if dtype else PYTORCHS_TF32) + 1e-4, errors
