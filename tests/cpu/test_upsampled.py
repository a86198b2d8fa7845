"""Convolutions of images enlarged twofold, in a graph, as convolutions of the images: which, and the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional

from haloconv import backend as backends
from haloconv.choose.choice import Choice
from haloconv.fusion import upsampled
from haloconv.fusion.upsampled import filters_before_upsampling, shuffled_and_cut
from tests.compiled import image

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
W, BIAS, FIVE, EACH, BACK = image(6, 4, 3, 3), image(6), image(6, 4, 5, 5), image(4, 1, 3, 3), image(4, 6, 3, 3)


def convolved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return shuffled_and_cut(functional.conv2d(x, filters_before_upsampling(w), b if b is None else b.repeat(4), 1, 1))


@pytest.mark.parametrize("extents", [(1, 1), (1, 5), (4, 1), (3, 6)])
def test_values_and_gradients_are_exact_on_integers(extents: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randint(-8, 9, shape, generator=generator).double().requires_grad_()
        for shape in ((2, 3, *extents), (5, 3, 3, 3), (5,))
    )
    want = functional.conv2d(functional.interpolate(x, scale_factor=2), w, b, padding=1)
    got = convolved(x, w, b)
    assert torch.equal(got, want)
    gradient = torch.randint(-8, 9, want.shape, generator=generator).double()
    for one, other in zip(*(torch.autograd.grad(y, (x, w, b), gradient) for y in (got, want)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1.1), (torch.bfloat16, 1.6), (torch.float16, 1.6)], ids=str)
def test_filters_of_16_bits_are_rounded_once_more(dtype: torch.dtype, factor: float) -> None:
    """Their sums are: errors are sqrt(2) of PyTorch's there, whose results alone are rounded."""
    x, w = image(2, 32, 9, 9).to(dtype), (image(32, 32, 3, 3, dtype=torch.float64) / 17).to(dtype)
    truth = functional.conv2d(functional.interpolate(x.double(), scale_factor=2), w.double(), padding=1)
    theirs, ours = functional.conv2d(functional.interpolate(x, scale_factor=2), w, padding=1), convolved(x, w)
    errors = [(each.double() - truth).norm() for each in (theirs, ours)]
    assert errors[1] <= factor * errors[0] + 1e-6 * truth.norm()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(4, 6, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.conv(self.up(x)))


def enlarged(x: torch.Tensor, **how: object) -> torch.Tensor:
    return functional.interpolate(x, **how)  # type: ignore[arg-type]


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.conv2d(enlarged(x, scale_factor=2.0), W, BIAS, padding=1).float()


REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by a factor": lambda x: functional.conv2d(enlarged(x, scale_factor=2), W, BIAS, padding=1),
    "by factors": lambda x: functional.conv2d(enlarged(x, scale_factor=(2.0, 2.0), mode="nearest"), W, padding=(1, 1)),
    "to a size": lambda x: functional.conv2d(enlarged(x, size=(16, 20)), W, None, 1, 1, 1, 1),
    "exact": lambda x: functional.conv2d(enlarged(x, scale_factor=2, mode="nearest-exact"), weight=W, padding="same"),
    "modules": Module(),
    "autocast": under_autocast,
    "twice": lambda x: functional.conv2d(
        enlarged(functional.conv2d(enlarged(x, scale_factor=2), W, padding=1)[:, :4], scale_factor=2), W, padding=1
    ),
}
LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda x: functional.conv2d(enlarged(x, scale_factor=2, mode="bilinear"), W, padding=1),
    "threefold": lambda x: functional.conv2d(enlarged(x, scale_factor=3), W, padding=1),
    "one dimension": lambda x: functional.conv2d(enlarged(x, scale_factor=(2, 1)), W, padding=1),
    "made smaller": lambda x: functional.conv2d(enlarged(x, scale_factor=0.5), W, padding=1),
    "read by others": lambda x: functional.conv2d(y := enlarged(x, scale_factor=2), W, padding=1).sum() + y.mean(),
    "no padding": lambda x: functional.conv2d(enlarged(x, scale_factor=2), W),
    "a stride": lambda x: functional.conv2d(enlarged(x, scale_factor=2), W, stride=2, padding=1),
    "dilation": lambda x: functional.conv2d(enlarged(x, scale_factor=2), W, padding=1, dilation=2),
    "groups": lambda x: functional.conv2d(enlarged(x, scale_factor=2), EACH, padding=1, groups=4),
    "5x5": lambda x: functional.conv2d(enlarged(x, scale_factor=2), FIVE, padding=1),
    "transposed": lambda x: functional.conv_transpose2d(enlarged(x, scale_factor=2), BACK, padding=1),
    "without a batch": lambda x: functional.conv2d(x[0].repeat_interleave(2, 1), W, padding=1),
}


class Seen:
    def __init__(self) -> None:
        self.code = ""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        backends.replace_convolutions(graph)
        self.code = graph.code
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(params=[1, 64])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All convolutions are ours and gain by channels_last, and as many channels are enough."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    monkeypatch.setattr(upsampled, "LEAST_CHANNELS", request.param)
    found: int = request.param
    return found


@pytest.mark.parametrize("name", [*REPLACED, *LEFT])
def test_which_are_convolved_before_they_are_enlarged(name: str, least: int) -> None:
    function, seen = {**REPLACED, **LEFT}[name], Seen()
    x = image().requires_grad_()
    want, got = function(x), torch.compile(function, backend=seen, fullgraph=True)(x)
    assert got.dtype == want.dtype
    assert ("filters_before_upsampling" in seen.code) is (name in REPLACED and least == 1)
    theirs, ours = ([each, *torch.autograd.grad(each.square().sum(), x)] for each in (want, got))
    for one, other in zip(theirs, ours, strict=True):
        assert one.stride() == other.stride()
        assert (one - other).norm() <= (1e-2 if name == "autocast" else 1e-5) * one.norm()
