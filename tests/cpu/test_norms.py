"""Statistics of batch norms in training mode and of group norms that come with the convolution: which, and values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import haloconv
from haloconv import backend as backends
from haloconv import moments
from haloconv.choose.choice import Choice
from haloconv.families.halo_sm90.pointwise import implicit_gemm, moments_sum
from haloconv.families.halo_sm90.pointwise import moments as kernel
from haloconv.families.halo_sm90.pointwise import tile as pointwise_tile
from haloconv.fusion.lowered import norms
from haloconv.fusion.lowered.norms import replace_statistics
from haloconv.fusion.lowered.passes import OwnPasses
from haloconv.jit.compile import compile_source
from haloconv.problem import Problem, dense_request
from tests.compiled import emulated, image
from tests.measured import MOMENTS, check_measured, with_moments

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
OPS = torch.ops.haloconv
VALUES = ([1, 1], [1, 1, 1, 1], [1, 1], 1, "tf32", "halo_sm90", False)  # of a 3x3 convolution


@pytest.fixture
def device() -> Iterator[None]:
    with emulated():
        yield


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of few bits, so that TF32 has them all."""
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(2)) / 8
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def statistics(y: torch.Tensor, correction: int = 0, keepdim: bool = True, dims: tuple[int, ...] = (0, 2, 3)) -> tuple:
    """What Inductor makes of a batch norm."""
    wide = torch.ops.prims.convert_element_type(y, torch.float32) if y.dtype != torch.float32 else y
    return torch.var_mean(wide, dims, correction=correction, keepdim=keepdim)


def normed(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, values: tuple = VALUES, **how: int
) -> tuple:
    y = OPS.fprop(x, w, b, *values)
    variance, mean = statistics(y, **how)  # type: ignore[arg-type]
    return y, variance, mean, (y - mean) * torch.rsqrt(variance + 1e-5)


def added(x: torch.Tensor, w: torch.Tensor, *, scale: bool = False, activation: str | None = None, **how: int) -> tuple:
    """With a bias and a residual."""
    b, residual = torch.linspace(-1, 1, len(w)).to(x.dtype), x[:, :1].expand(-1, len(w), -1, -1)
    b = torch.stack([b.float(), b.float() + 2], 1) if scale else b
    y = OPS.fprop_epilogue(x, w, b, residual, scale, activation, *VALUES)
    return y, *statistics(y, **how)  # type: ignore[arg-type]


def plain(x: torch.Tensor, w: torch.Tensor) -> tuple:
    return normed(x, w)


def twice(x: torch.Tensor, w: torch.Tensor) -> tuple:
    """Two convolutions in a row, and one of whose statistics the mean alone is read."""
    first = normed(x, w)[-1].to(x.dtype)
    y = OPS.fprop(first[:, :8].contiguous(memory_format=torch.channels_last), w, None, *VALUES)
    return first, statistics(y)[1]


BF16 = torch.bfloat16
X, W = channels_last(2, 8, 5, 7), channels_last(128, 8, 3, 3)
WHOLE = channels_last(3, 8, 8, 16)  # boxes of 64 pixels are of one image
REPLACED: dict[str, tuple[Callable, torch.Tensor, torch.Tensor]] = {
    "fp32": (plain, X, W),
    "bf16": (plain, X.to(BF16), W.to(BF16)),
    "filters as PyTorch makes them": (plain, X, W.contiguous()),
    "two": (twice, X, W),
    "a bias": (lambda x, w: normed(x, w, torch.linspace(-1, 1, 128)), X, W),
    "bias and residual": (lambda x, w: added(x, w), X, W),
    "the same in bf16": (lambda x, w: added(x, w), X.to(BF16), W.to(BF16)),
    "of images": (lambda x, w: normed(x, w, dims=(2, 3)), WHOLE, W),
    "of images, with bias and residual": (lambda x, w: added(x, w, dims=(2, 3)), WHOLE.to(BF16), W.to(BF16)),
    "of one image": (lambda x, w: normed(x, w, dims=(2, 3)), WHOLE[:1, :, :5], W),
}
LEFT: dict[str, tuple[Callable, torch.Tensor, torch.Tensor]] = {
    "unbiased": (lambda x, w: normed(x, w, correction=1), X, W),
    "of images that share a box": (lambda x, w: normed(x, w, dims=(2, 3)), X, W),
    "of rows": (lambda x, w: normed(x, w, dims=(3,)), WHOLE, W),
    "a scale": (lambda x, w: added(x, w, scale=True), X, W),
    "an activation": (lambda x, w: added(x, w, activation="relu"), X, W),
    "nchw": (plain, X.contiguous(), W.contiguous()),
    "fp64": (plain, X.double(), W.double()),
    "three products": (lambda x, w: normed(x, w, values=(*VALUES[:4], "tf32x3", *VALUES[5:])), X, W),
    "another family": (lambda x, w: normed(x, w, values=(*VALUES[:5], "direct", False)), X, W),
    "of something else": (lambda x, w: statistics(OPS.fprop(x, w, None, *VALUES).relu()), X, W),
    "no image": (plain, X[:0], W),
    "few bytes of a pixel": (plain, X.to(BF16), W[:120].to(BF16)),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", [*REPLACED, *LEFT])
def test_which_statistics_come_with_the_result(name: str) -> None:
    function, x, w = {**REPLACED, **LEFT}[name]
    graph = make_fx(function, tracing_mode="fake")(x, w)
    want = graph(x, w)
    found = replace_statistics(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert found == (0 if name in LEFT else 2 if name == "two" else 1)
    assert graph.code.count("fprop_moments.default(") == found and ("var_mean" in graph.code) is (found == 0)
    for one, other in zip(want, graph(x, w), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-5, atol=2e-5, equal_nan=True)
        assert one.stride() == other.stride() or one.shape[2:] == (1, 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("adds", "per_image"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_operator_is_the_convolution_and_its_statistics(adds: bool, per_image: bool) -> None:
    x, w = X.to(BF16), W.to(BF16)
    x = x if not per_image else WHOLE.to(BF16)
    b, residual = (torch.ones(128, dtype=BF16), x[:, :1].expand(-1, 128, -1, -1)) if adds else (None, None)
    arguments = (x, w, b, residual, per_image)
    y, variance, mean = OPS.fprop_moments(*arguments, *VALUES)
    assert torch.equal(y, OPS.fprop_epilogue(x, w, b, residual, False, None, *VALUES))
    want = torch.var_mean(y.double(), (2, 3) if per_image else (0, 2, 3), correction=0, keepdim=True)
    for got, each in zip((variance, mean), want, strict=True):
        assert got.dtype == torch.float32 and got.shape == (len(x) if per_image else 1, 128, 1, 1)
        torch.testing.assert_close(got.double(), each, rtol=1e-6, atol=1e-7)
    torch.library.opcheck(OPS.fprop_moments.default, (*arguments, *VALUES))
    by_pytorch = (*VALUES[:5], "aten", False)
    assert not moments.has_moments(x, w, haloconv.library._spec(*by_pytorch))
    for one, other in zip(OPS.fprop_moments(*arguments, *by_pytorch), (y, variance, mean), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    table = haloconv.decompositions()[OPS.fprop_moments.default]
    for one, other in zip(table(*arguments, *VALUES), (y, variance, mean), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("scale", "right"), [(1e-30, True), (1e-22, True), (1e15, True), (1e18, False), (1e36, False)])
def test_statistics_at_the_ends_of_fp32(scale: float, right: bool) -> None:
    """Small results have the variance that fp32 holds; where sums of squares overflow it is not finite, never wrong."""
    x, w = X * scale, W
    spec = haloconv.library._spec(*VALUES)
    assert moments.has_moments(x, w, spec)
    y, variance, mean = moments.fprop(x, w, None, None, spec)
    check_measured(MOMENTS, with_moments(y, mean, variance))
    assert variance.isfinite().all() == right
    finite = variance.nan_to_num(1.0, 1.0) * 2 + 1e-36
    for wrong in (finite, torch.full_like(variance, torch.nan)) if right else (finite,):
        with pytest.raises(AssertionError, match=" is off by "):
            check_measured(MOMENTS, with_moments(y, mean.nan_to_num(0.0, 0.0, 0.0), wrong))


@pytest.mark.usefixtures("device")
def test_a_bound_call_is_kept_until_plans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    choose = moments.choose_now
    monkeypatch.setattr(moments, "choose_now", lambda *given: asked.append(given) or choose(*given))
    for _ in range(3):
        OPS.fprop_moments(X, W, None, None, False, *VALUES)
    assert len(asked) == 1
    haloconv.plan.clear_plans()
    OPS.fprop_moments(X, W, None, None, False, *VALUES)
    assert len(asked) == 2


class Block(nn.Module):
    """Two convolutions with norms that are trained, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(64, 72, 1, bias=False), nn.Conv2d(72, 64, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(72), nn.BatchNorm2d(64, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + x)


class Counting(CustomGraphPass):
    """A pass that was set before ours."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(str(graph))

    def uuid(self) -> str:
        return "counting"


def trained(model: nn.Module, forward: Callable, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a step, running statistics, and gradients."""
    y = forward(x)
    y.square().sum().backward()
    return [y.detach(), *model.buffers(), *(each.grad for each in model.parameters())]


def test_inductor_trains_a_block_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that the user has set runs behind ours. Gradients are as close as where statistics are Inductor's."""
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    before, model, x = Counting(), Block(), image(2, 64, 8, 10)
    theirs, plain = copy.deepcopy(model), copy.deepcopy(model)
    with emulated(), inductor.patch(post_grad_custom_pre_pass=before, fx_graph_cache=False):
        got = trained(model, torch.compile(model, backend="haloconv"), x)
        torch._dynamo.reset()
        monkeypatch.setattr(norms, "replace_statistics", lambda graph: 0)
        by_reduction = trained(plain, torch.compile(plain, backend="haloconv"), x)
    assert [before.graphs[i].count("haloconv.fprop_moments.default](") for i in (0, 2)] == [2, 0]
    for one, other in zip(by_reduction, got, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-3 * one.double().norm()  # what is rounded is amplified
    for want, each in zip(trained(theirs, theirs, x)[: 1 + len([*model.buffers()])], got, strict=False):
        assert (want.double() - each.double()).norm() <= 2e-3 * want.double().norm()  # TF32's


class Residual(nn.Module):
    """Two blocks of a decoder: group norms before convolutions, an addition behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, 72) for _ in range(4))
        self.convolutions = nn.ModuleList(nn.Conv2d(72, 72, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 2):
            y = self.convolutions[i](nn.functional.silu(self.norms[i](x)))
            x = x + self.convolutions[i + 1](nn.functional.silu(self.norms[i + 1](y)))
        return x


@pytest.mark.parametrize(("extent", "trains", "measured"), [(16, False, 3), (16, True, 3), (12, False, 0)])
def test_inductor_norms_groups_by_what_convolutions_measure(
    extent: int, trains: bool, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first, whose image no convolution made; of images that share a box none."""
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    before, model = Counting(), Residual()
    x = image(3, 72, extent, extent).contiguous(memory_format=torch.channels_last)
    theirs = copy.deepcopy(model).double()
    with emulated(), inductor.patch(post_grad_custom_pre_pass=before, fx_graph_cache=False):
        compiled = torch.compile(model, backend="haloconv")
        with torch.set_grad_enabled(trains):
            y = compiled(x)
        if trains:
            y.square().sum().backward()
    assert before.graphs[0].count("haloconv.fprop_moments.default](") == measured
    want = theirs(x.double().contiguous())  # PyTorch 2.13 crashes on a CPU in the gradient in channels_last
    assert (want - y).norm() <= 2e-3 * want.norm()  # TF32's
    if trains:
        want.square().sum().backward()
        for one, other in zip(theirs.parameters(), model.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 1e-2 * one.grad.norm()


def test_what_compiled_code_on_disk_is_found_by() -> None:
    found = [OwnPasses().uuid(), OwnPasses(Counting()).uuid()]
    assert None not in found and len({*map(str, found)}) == 2
    assert OwnPasses(print).uuid() is None  # nobody knows what it does


@pytest.mark.of_kernel("halo_sm90/moments")
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_the_widest_tiles_have_no_stack(dtype: torch.dtype, taps: int) -> None:
    """An array that lies in local memory is no spill, and made a convolution take five times as long."""
    sides = (taps // 2,) * 4
    one = Problem("fprop", 32, 64, 56, 56, 256, taps, taps, padding=sides, dtype=dtype, layout="nhwc", precision="tf32")
    product = (pointwise_tile if taps == 1 else implicit_gemm).product_of(dense_request(one, torch.device("cpu")))
    widest = {
        (tile.m_blocks, tile.split_n): tile
        for tile in pointwise_tile.shipped_tiles(product)
        if tile.n * tile.m_blocks == 256 and tile.parts == 1
    }
    assert len(widest) >= 2
    for source in (*(kernel.source(product, tile) for tile in widest.values()), moments_sum.source()):
        cubin = compile_source(source, "sm_90a")
        assert cubin.spill_bytes == cubin.stack_bytes == 0, source.constants
