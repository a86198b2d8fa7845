"""Small kernels gathered by foreach operators: which, and the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from haloconv import backend as backends
from haloconv import moments
from haloconv.choose.choice import Choice
from haloconv.fusion.graph import bias_and_scale_of_norm
from haloconv.fusion.lowered import foreach
from tests.compiled import emulated, image
from tests.cpu.test_norms import VALUES, Block, Counting, channels_last, trained

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
OPS = torch.ops.haloconv
X, W = channels_last(2, 8, 5, 7), channels_last(128, 8, 3, 3)
AVERAGES = [torch.full((128,), float(i + 1)) for i in range(4)]
COUNTS = [torch.tensor(i) for i in range(2)]
Step = Callable[..., tuple]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated():
        yield


def moved(average: torch.Tensor, statistic: torch.Tensor, momentum: float = 0.1) -> torch.Tensor:
    """As PyTorch's decomposition has it."""
    return statistic.squeeze((0, 2, 3)) * momentum + average * (1 - momentum)


def two_norms(x: torch.Tensor, w: torch.Tensor, averages: list[torch.Tensor], counts: list[torch.Tensor]) -> tuple:
    kept, new = [], []
    for i in range(2):
        y, variance, mean = OPS.fprop_moments(x + i, w, None, None, False, *VALUES)
        deviation = torch.rsqrt(variance + 1e-5)
        kept += [((y - mean) * deviation).relu(), deviation.squeeze((0, 2, 3))]
        new += [moved(averages[2 * i], mean), moved(averages[2 * i + 1], variance * 1.1, 0.3)]
    for buffer, value in zip([*averages, *counts], [*new, *(count + 1 for count in counts)], strict=True):
        buffer.copy_(value)
    return tuple(kept)


def read_before(x: torch.Tensor, w: torch.Tensor, averages: list[torch.Tensor], _: list[torch.Tensor]) -> tuple:
    """New values that others read, or that come after a buffer was written."""
    _, variance, mean = OPS.fprop_moments(x, w, None, None, False, *VALUES)
    first, second = moved(averages[0], mean), moved(averages[1], variance)
    averages[0].copy_(first)
    averages[1].copy_(second)
    averages[2].copy_(moved(averages[2], mean))
    return (first + second,)


def of_others(x: torch.Tensor, w: torch.Tensor, averages: list[torch.Tensor], counts: list[torch.Tensor]) -> tuple:
    """Statistics of a reduction, other factors, no plain sum, one counter alone, and a deviation that more read."""
    y, variance, mean = OPS.fprop_moments(x, w, None, None, False, *VALUES)
    of_pytorch, _ = torch.var_mean(y.relu(), (0, 2, 3), correction=0, keepdim=True)
    new = [moved(averages[0], of_pytorch), moved(averages[1], mean * averages[3].view(1, -1, 1, 1))]
    new += [torch.add(mean.squeeze((0, 2, 3)), averages[2], alpha=2), mean.squeeze((0, 2, 3)) - 1.0]
    count = counts[0] + 1
    for buffer, value in zip((*averages, counts[0]), (*new, count), strict=True):
        buffer.copy_(value)
    deviation = torch.rsqrt(variance + 1e-5).squeeze((0, 2, 3))
    return deviation * 2, deviation


@pytest.mark.parametrize(("step", "found"), [(two_norms, 8), (read_before, 0), (of_others, 0)])
def test_which_updates_are_gathered(step: Step, found: int) -> None:
    def given() -> tuple:
        return X, W, [each.clone() for each in AVERAGES], [each.clone() for each in COUNTS]

    graph = make_fx(step, tracing_mode="fake")(*given())
    assert foreach.gather(graph.graph) == found
    graph.graph.lint()
    graph.recompile()
    assert graph.code.count("aten._foreach_") == (2 if found else 0)
    before, after = given(), given()
    want, got = step(*before), graph(*after)
    for one, other in zip((*want, *before[2], *before[3]), (*got, *after[2], *after[3]), strict=True):
        torch.testing.assert_close(other, one)


def test_inductor_trains_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    model, x, graphs, found = Block(), image(2, 64, 8, 10), [], []
    for gather in (lambda graph: 0, foreach.gather):
        monkeypatch.setattr(foreach, "gather", gather)
        seen, own = Counting(), copy.deepcopy(model)
        with inductor.patch(post_grad_custom_pre_pass=seen, fx_graph_cache=False):
            torch._dynamo.reset()
            found.append(trained(own, torch.compile(own, backend="haloconv"), x))
        graphs.append(seen.graphs[0])
    assert [[each.count(f"aten._foreach_{name}](") for name in ("copy.default", "rsqrt.default")]
            for each in graphs] == [[0, 0], [1, 1]]  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


BF16 = torch.bfloat16


def cast(value: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ops.prims.convert_element_type(value, dtype)


def of_weights(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple:
    """Ours and PyTorch's, which are given out; one has another reader, one is not given out, one is no parameter's."""
    mine, freed, theirs, read = (cast(each) for each in weights)
    y = OPS.fprop(cast(x), mine, None, *VALUES)
    z = torch.ops.aten.convolution(cast(x) * 2, theirs, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    u = OPS.fprop(cast(x), read, None, *VALUES) + read.sum()
    made = cast(weights[0] * 2)
    others = [OPS.fprop(cast(x), each, None, *VALUES) for each in (freed, made)]
    return y, z, u, *others, mine, theirs, read, made


def of_gradients(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple:
    """Ours and PyTorch's; two are read by others, of which one is computed by Inductor again."""
    dy, wide = cast(torch.ones_like(x[:, :1]).expand(2, 128, 5, 7).contiguous()), cast(x)
    mine, other, alone = (OPS.wgrad(dy, wide * i, [128, 8, 3, 3], "nhwc", *VALUES) for i in (1, 2, 3))
    _, theirs, _ = torch.ops.aten.convolution_backward(
        dy, wide, cast(weights[0]), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return (
        *(cast(each, torch.float32) for each in (mine, alone, theirs, other)),
        other,
        cast(mine * 1, X.dtype),
    )


def many_gradients(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple:
    dy, wide = cast(torch.ones_like(x[:, :1]).expand(2, 128, 5, 7).contiguous()), cast(x)
    return tuple(cast(OPS.wgrad(dy, wide * i, [128, 8, 3, 3], "nhwc", *VALUES), torch.float32) for i in range(5))


@pytest.mark.parametrize(("at_once", "lists"), [(5, 1), (4, 1), (3, 2), (2, 2), (1, 0)])
def test_gradients_do_not_wait_for_many_others(at_once: int, lists: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list stands behind the last gradient of it; one that is left alone stays as it is."""
    monkeypatch.setattr(foreach, "_MOST_ELEMENTS", at_once * 128 * 8 * 9)
    graph = make_fx(many_gradients, tracing_mode="fake")(X, [W])
    want = graph(X, [W])
    assert foreach.gather(graph.graph) == (0 if at_once == 1 else 4 if at_once in (2, 4) else 5)
    graph.graph.lint()
    graph.recompile()
    order = [node.target for node in graph.graph.nodes if "foreach" in str(node.target) or "wgrad" in str(node.target)]
    assert sum("foreach" in str(each) for each in order) == lists
    if at_once == 2:
        assert ["foreach" in str(each) for each in order] == [False, False, True, False, False, True, False]
    for one, other in zip(want, graph(X, [W]), strict=True):
        assert torch.equal(other, one)


@pytest.mark.parametrize(("step", "found"), [(of_weights, 2), (of_gradients, 2)])
def test_which_casts_are_gathered(step: Step, found: int) -> None:
    given = (X, [W * i for i in (1, 2, 3, 4)])
    graph = make_fx(step, tracing_mode="fake")(*given)
    want = graph(*given)
    assert foreach.gather(graph.graph) == found
    graph.graph.lint()
    graph.recompile()
    assert graph.code.count("aten._foreach_copy") == 1
    for one, other in zip(want, graph(*given), strict=True):
        assert torch.equal(other, one)


def test_inductor_trains_the_same_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    model, x, graphs, found = Block().to(memory_format=torch.channels_last), channels_last(2, 64, 8, 10), [], []
    for gather in (lambda graph: 0, foreach.gather):
        monkeypatch.setattr(foreach, "gather", gather)
        seen, own = Counting(), copy.deepcopy(model)
        with inductor.patch(post_grad_custom_pre_pass=seen, fx_graph_cache=False):
            torch._dynamo.reset()
            compiled = torch.compile(own, backend="haloconv")
            with torch.autocast("cpu", BF16):
                y = compiled(x.detach().requires_grad_()).float()  # or the first weight is not kept
            y.square().sum().backward()
        found.append([y.detach(), *own.buffers(), *(each.grad for each in own.parameters())])
        graphs.append(seen.graphs)
    assert [[each.count("aten._foreach_copy.default](") for each in of] for of in graphs] == [[0, 0], [2, 1]]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)
        assert other.stride() == one.stride()


def of_vectors(x: torch.Tensor, w: torch.Tensor, vectors: list[torch.Tensor]) -> tuple:
    """Biases that are cast, bias and scale of a norm; inputs, views, a stack, and one made of an image stay."""
    values = (*VALUES[:4], "tf32", "halo_sm90", False)
    y = OPS.fprop(cast(x), cast(w), cast(vectors[0]), *values)
    z, _, _ = OPS.fprop_moments(cast(x), cast(w), cast(vectors[1]), None, False, *values)
    both = bias_and_scale_of_norm(vectors[0], vectors[1].abs(), (vectors[0], None), 1e-5, vectors[1])
    s = OPS.fprop_epilogue(x, w, both, None, True, "relu", *values)
    u = OPS.fprop(x, w, vectors[0], *values)
    v = OPS.fprop(x, w, x.sum() * vectors[0], *values)
    of_view = OPS.fprop(x, w, vectors[1].view(2, 64).view(128), *values)
    stacked = OPS.fprop_epilogue(x, w, torch.stack((vectors[0], vectors[1] * 2), 1), None, True, "relu", *values)
    return y, z, s, u, v, of_view, stacked


@pytest.mark.parametrize(("most", "found"), [(500, 3), (128, 2), (1, 0)])
def test_what_convolutions_add_is_gathered(most: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "_MOST_OF_A_VECTOR", most)
    given = (X, W, [torch.linspace(-1, 1, 128), torch.linspace(2, 3, 128)])
    graph = make_fx(of_vectors, select_decomp_table(), tracing_mode="fake")(*given)
    want = graph(*given)
    assert foreach.gather(graph.graph) == found
    graph.graph.lint()
    graph.recompile()
    assert graph.code.count("aten._foreach_copy") == (1 if found else 0)
    if found:
        assert graph.code.index("_foreach_copy") < graph.code.index("haloconv.fprop")
    for one, other in zip(want, graph(*given), strict=True):
        assert torch.equal(other, one)


class Inferred(nn.Module):
    """Convolutions with norms in evaluation mode, and two with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, bias=i > 1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convolutions, self.norms, strict=False):
            x = torch.relu(norm(conv(x)))
        return self.convolutions[3](torch.relu(self.convolutions[2](x)))


@pytest.mark.parametrize("under_autocast", [False, True])
def test_inductor_infers_the_same(under_autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    model, x, graphs, found = Inferred().eval(), image(2, 64, 8, 10), [], []
    for norm in model.norms:
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    for gather in (lambda graph: 0, foreach.gather):
        monkeypatch.setattr(foreach, "gather", gather)
        seen, own = Counting(), copy.deepcopy(model)
        with inductor.patch(post_grad_custom_pre_pass=seen, fx_graph_cache=False), torch.no_grad():
            torch._dynamo.reset()
            compiled = torch.compile(own, backend="haloconv")
            with torch.autocast("cpu", BF16, enabled=under_autocast):
                found.append(compiled(x))
        graphs.append(seen.graphs[0])
    assert [each.count("aten._foreach_copy.default](") for each in graphs] == [0, 1]
    assert torch.equal(*found)
