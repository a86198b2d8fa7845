"""Convolutions of images enlarged twofold, in a graph, as convolutions of the images: which, and the same values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional

from haloconv import backend as backends
from haloconv.choose.choice import Choice
from haloconv.fusion import upsampled
from haloconv.fusion.upsampled import OPTION, asked_by_option, filters_of_four, shuffled_and_cut
from haloconv.tune.problems import wholes_of
from tests.compiled import image

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
W, BIAS, FIVE, EACH, BACK = image(6, 4, 3, 3), image(6), image(6, 4, 5, 5), image(4, 1, 3, 3), image(4, 6, 3, 3)


def convolved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """In the image's type, by filters that are made in their own."""
    four = None if b is None else b.repeat(4)
    return shuffled_and_cut(functional.conv2d(x, filters_of_four(w).to(x.dtype), four, 1, 1))


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
    """Their sums are: errors are sqrt(2) of those of results that alone are rounded, with exact sums in between."""
    x, w = image(2, 32, 9, 9).to(dtype), (image(32, 32, 3, 3, dtype=torch.float64) / 17).to(dtype)
    truth = functional.conv2d(functional.interpolate(x.double(), scale_factor=2), w.double(), padding=1)
    errors = [(each.to(dtype).double() - truth).norm() for each in (truth, convolved(x.double(), w))]
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


def written_between(x: torch.Tensor) -> torch.Tensor:
    """The image that is enlarged is another one when the result is convolved."""
    y = x + 1
    larger = enlarged(y, scale_factor=2)
    return functional.conv2d(larger, W, BIAS, padding=1).sum() + y.mul_(2).sum() + functional.conv2d(y, W).sum()


def written_before_it_is_convolved(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    larger = enlarged(y, scale_factor=2)
    y.mul_(2)
    return functional.conv2d(larger, W, BIAS, padding=1) + y.mean()


def not_recorded(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        larger = enlarged(x, scale_factor=2)
    return functional.conv2d(larger, W, padding=1).mean() + x.mean()


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
    "written between": written_between,
    "written before it is convolved": written_before_it_is_convolved,
    "not recorded": not_recorded,
    "without a batch": lambda x: functional.conv2d(x[0].repeat_interleave(2, 1), W, padding=1),
}


class Seen:
    def __init__(self, before: bool | None = True) -> None:
        self.before, self.code = before, ""
        self.told: list[backends.Convolution] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.told = backends.replace_convolutions(graph, before_upsampling=self.before)
        self.code = graph.code
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """All convolutions are ours and gain by channels_last, of few channels, too."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    monkeypatch.setattr(upsampled, "LEAST_CHANNELS", 1)


def compared(function: Callable, seen: Callable, tolerance: float = 1e-5) -> None:
    x = image().requires_grad_()
    want, got = function(x), torch.compile(function, backend=seen, fullgraph=True)(x)
    assert got.dtype == want.dtype
    theirs, ours = ([each, *torch.autograd.grad(each.square().sum(), x)] for each in (want, got))
    for one, other in zip(theirs, ours, strict=True):
        assert one.stride() == other.stride()
        assert (one - other).norm() <= tolerance * one.norm()


@pytest.mark.parametrize("name", [*REPLACED, *LEFT])
def test_which_are_convolved_before_they_are_enlarged(name: str) -> None:
    seen = Seen()
    compared({**REPLACED, **LEFT}[name], seen, 1e-2 if name == "autocast" else 1e-5)
    assert ("filters_of" in seen.code) is (name in REPLACED)
    if name in REPLACED:
        assert "interpolate" not in seen.code and all(each.replaced for each in seen.told)


@pytest.mark.parametrize("reason", ["not asked for", "few channels", "images stay as they lie", "gradients by default"])
def test_where_none_is(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "few channels":
        monkeypatch.setattr(upsampled, "LEAST_CHANNELS", 64)
    if reason == "images stay as they lie":
        monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: False)
    seen = Seen({"not asked for": False, "gradients by default": None}.get(reason, True))
    compared(Module(), seen)
    assert "filters_of" not in seen.code and "fusion_enlarged_enlarged" in seen.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("before", [None, True, False], ids=["default", "asked for", "refused"])
def test_inference_does_so_by_default_where_filters_are_not_rounded_once_more(
    before: bool | None, dtype: torch.dtype
) -> None:
    model, seen = Module().to(dtype), Seen(before)
    with torch.no_grad():
        torch.compile(model, backend=seen, fullgraph=True)(image().to(dtype))
    assert ("filters_of" in seen.code) is (dtype == torch.float32 if before is None else before)


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(functional.conv2d(enlarged(x, scale_factor=2), W, BIAS, padding=1).mul_(2))


def test_results_that_are_written_in_place_and_normed_by_channel() -> None:
    seen = Seen()
    compared(written_in_place, seen)
    assert "filters_of" in seen.code
    compared(lambda x: functional.silu(functional.group_norm(written_in_place(x), 3)), seen)
    assert "filters_of" in seen.code and "group_norm_by_channel" in seen.code


def test_results_lie_in_channels_last_without_a_further_copy() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.conv2d(enlarged(x, scale_factor=2), W, padding=1), BACK).mean((2, 3))

    seen = Seen()
    compared(function, seen)
    assert seen.code.count(".contiguous(") == 1  # of the image
    assert [each.problem is not None and each.problem.layout for each in seen.told] == ["nhwc", "nhwc"]


def test_the_option_asks_for_it_and_inductor_compiles_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what another process made may be for another CPU
    asked = []
    replace = backends.replace_convolutions

    def noting(*arguments: object) -> list[backends.Convolution]:
        asked.append(arguments[1:])
        return replace(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backends, "replace_convolutions", noting)
    model = nn.Sequential(Module(), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 2, 3))
    x = image()
    with torch.no_grad():
        compiled = torch.compile(model, backend="haloconv", options={OPTION: True, "layout_optimization": True})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert asked == [(True, True)]


def test_an_option_that_is_neither_true_nor_false_is_refused() -> None:
    assert [asked_by_option(each) for each in (None, False, True)] == [None, False, True]
    for wrong in ("shuffled", 2):
        with pytest.raises(ValueError, match="is True or False, not"):
            asked_by_option(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tuning_measures_it_whether_it_is_asked_for_or_not(dtype: torch.dtype) -> None:
    model = nn.Sequential(Module(), nn.Conv2d(6, 2, 3)).eval().to(dtype)
    compiled = torch.compile(model, backend="haloconv")
    posed = [each.problem for each in wholes_of(compiled, image(2, 4, 8, 10).to(dtype))]  # type: ignore[arg-type]
    found = {(each.direction, each.c, each.k, each.r, each.s, each.stride, each.layout) for each in posed}
    assert ("fprop", 4, 24, 2, 2, (1, 1), "nhwc") in found
    assert (("fprop", 4, 6, 3, 3, (1, 1), "nhwc") in found) is (dtype == torch.bfloat16)
