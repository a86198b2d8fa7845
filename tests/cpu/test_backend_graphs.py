"""Which calls torch.compile(backend="haloconv") replaces by our operator, and which it must not; what it tells."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from haloconv import backend as backends
from haloconv import env
from haloconv.choose.choice import Choice
from haloconv.problem import Request
from tests.compiled import Residual, Separable, Upsampler, emulated, image, through_aot

OURS = (torch.ops.haloconv.fprop.default, torch.ops.haloconv.dgrad.default)
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def all_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler chooses our kernels; the operator then runs PyTorch's, for there is no device that has ours."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))


def replaced(function: Callable, *args: object) -> tuple[int, object]:
    """How many calls of the compiled function are ours, in graphs inside it, too, and its value."""
    count = 0

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        nonlocal count
        told = backends.replace_convolutions(graph)
        graphs = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
        count = sum(node.target in OURS for each in graphs for node in each.graph.nodes)
        assert count == sum(each.replaced for each in told)
        return lookup_backend("aot_eager")(graph, inputs)

    value = torch.compile(function, backend=counting, fullgraph=True)(*args)
    return count, value


W, EVEN, EACH, BIAS = image(6, 4, 3, 3), image(6, 4, 2, 4), image(4, 1, 3, 3), image(6)
BACK, ROW, CUBE = image(4, 6, 3, 3), image(6, 8, 3), image(6, 2, 3, 3, 3)
BACK_ROW, BACK_CUBE = image(8, 5, 4), image(1, 2, 3, 3, 3)


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.conv2d(x, W) * 2


def transposed_under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.conv_transpose2d(x, BACK, None, 2) * 2


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return functional.conv2d(x, W) * 2


REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a function": lambda x: functional.conv2d(x, W),
    "by keyword": lambda x: functional.conv2d(weight=W, stride=(2, 1), padding=1, input=x),
    "same": lambda x: functional.conv2d(x, EVEN, padding="same", dilation=(1, 2)),
    "a bias": lambda x: torch.conv2d(x, W, BIAS, groups=1),
    "without a batch": lambda x: functional.conv2d(x[0], W, padding=2),
    "groups": lambda x: functional.conv2d(x, EACH, None, 1, 1, 1, 4),
    "aten.conv2d": lambda x: torch.ops.aten.conv2d(x, W, padding=[1, 0]),
    "aten.convolution": lambda x: torch.ops.aten.convolution(x, W, None, [1], [1], [1], False, [0], 1),
    "autocast": under_autocast,
    "no_grad": without_gradients,
    "checkpoint": lambda x: checkpoint(lambda y: torch.relu(functional.conv2d(y, W)), x, use_reentrant=False),
    "channels_last": lambda x: functional.conv2d(x.to(memory_format=torch.channels_last), W),
    "a transposed operand": lambda x: functional.conv2d(x.transpose(2, 3), W),
    "transposed": lambda x: functional.conv_transpose2d(x, BACK, BIAS, 2, (1, 0), 1),
    "transposed, without a batch": lambda x: functional.conv_transpose2d(x[0], BACK),
    "transposed, autocast": lambda x: transposed_under_autocast(x),
    "transposed, channels_last": lambda x: functional.conv_transpose2d(x.to(memory_format=torch.channels_last), BACK),
    "aten, transposed": lambda x: torch.ops.aten.convolution(x, BACK, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1),
    "1-D": lambda x: functional.conv1d(x[0], ROW, BIAS, padding="same"),
    "1-D, without a batch": lambda x: functional.conv1d(x[0, 0], ROW, stride=2, padding=3),
    "aten, 1-D": lambda x: torch.ops.aten.convolution(x[0], ROW, None, [1], [0], [1], False, [0], 1),
    "1-D, transposed": lambda x: functional.conv_transpose1d(x[0], BACK_ROW, stride=2, padding=1),
    "1-D, transposed, without a batch": lambda x: functional.conv_transpose1d(x[0, 0], BACK_ROW, BIAS[:5]),
    "written in place": lambda x: functional.conv2d(x, W).add_(1).mul_(2),
}


@pytest.mark.usefixtures("all_ours")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", REPLACED)
def test_these_calls_become_ours(name: str, gradients: bool) -> None:
    function, x = REPLACED[name], image().requires_grad_(gradients)
    count, y = replaced(function, x)
    want = function(x)
    assert count == 1 and y.dtype == want.dtype and y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert y.requires_grad == want.requires_grad
    if want.requires_grad:
        got, expected = (torch.autograd.grad(each.float().square().sum(), x)[0] for each in (y, want))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("all_ours")
def test_autocast_around_the_compiled_function_is_followed() -> None:
    model, x = nn.Conv2d(4, 6, 3), image()
    with torch.autocast("cpu", torch.bfloat16):
        count, y = replaced(model, x)
        want = model(x)
    assert count == 1 and y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)


@pytest.mark.usefixtures("all_ours")
def test_exported_programs_are_compiled_alike() -> None:
    program = torch.export.export(Separable().eval(), (image(),))
    count, y = replaced(program.module(), image())
    assert count == 3
    torch.testing.assert_close(y, program.module()(image()))


@pytest.mark.usefixtures("all_ours")
def test_hooks_of_parameters_and_modules_run_as_before() -> None:
    def trained(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        seen: list[torch.Tensor] = []
        layer = model[0]
        layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        layer.register_forward_hook(lambda module, args, y: y + 1)
        compiled = torch.compile(model, backend=through_aot, fullgraph=True) if model is ours else model
        compiled(image()).square().sum().backward()
        return seen, [each.grad for each in model.parameters()]

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
    for got, want in zip(*map(trained, (ours, copy.deepcopy(ours))), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


NOT_REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a transposed one that mirrors none": lambda x: functional.conv_transpose2d(x, BACK, None, 1, 2, 1, 1, 2),
    "1-D, channels as neighbours": lambda x: functional.conv1d(x[0].mT.contiguous().mT, ROW),
    "3-D, transposed": lambda x: functional.conv_transpose3d(x[:1, None, 0], BACK_CUBE),
    "3-D": lambda x: functional.conv3d(x[None], CUBE),
    "integers": lambda x: functional.conv2d((8 * x).long(), (8 * W).long()),
    "complex": lambda x: functional.conv2d(x.cfloat(), W.cfloat()),
    "vmap": lambda x: torch.vmap(lambda one: functional.conv2d(one, W))(x[None]),
    "vmap of filters": lambda x: torch.vmap(lambda w: functional.conv2d(x, w))(W[None]),
    "grad": lambda x: torch.func.grad(lambda one: functional.conv2d(one, W).sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda one: functional.conv2d(one, W), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_these_calls_stay_pytorchs_on_a_device_that_has_our_kernels(name: str) -> None:
    with emulated():
        count, y = replaced(NOT_REPLACED[name], image())
    assert count == 0
    torch.testing.assert_close(y, NOT_REPLACED[name](image()), rtol=1e-5, atol=1e-5)


def test_with_haloconv_disabled_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "disabled", lambda: True)
    with emulated():
        told = backends.explain(Residual(), image())
    assert len(told) == 3 and not any(each.replaced for each in told) and "HALOCONV_DISABLE" in told[0].reason


def test_a_layer_of_which_a_gradient_alone_is_ours_becomes_ours_where_it_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose(request: Request, family: str) -> Choice:
        return Choice("direct" if request.problem.direction == "wgrad" else "aten", "chosen by the test")

    monkeypatch.setattr(backends, "choose_now", choose)
    model = nn.Conv2d(4, 6, 3)
    (trained,) = backends.explain(model, image())
    assert trained.replaced and trained.reason == "fprop: aten, chosen by the test; wgrad: direct, chosen by the test"
    torch._dynamo.reset()
    with torch.no_grad():
        (inferred,) = backends.explain(model, image())
    assert not inferred.replaced and inferred.reason == "fprop: aten, chosen by the test"


@pytest.mark.usefixtures("all_ours")
def test_a_result_in_another_memory_order_than_pytorchs_is_left() -> None:
    """PyTorch's float64 on a GPU is contiguous though its operands are channels_last. Compiled code relies on it."""
    graph = torch.fx.symbolic_trace(Called())
    with FakeTensorMode():
        x = torch.empty(2, 4, 8, 9, dtype=torch.float64, device="cuda").to(memory_format=torch.channels_last)
        w = torch.empty(6, 4, 3, 3, dtype=torch.float64, device="cuda")
        of_nodes = x, w, torch.conv2d(x, w)
    for node, value in zip(graph.graph.nodes, of_nodes, strict=False):
        node.meta["example_value"] = value
    (found,) = backends.replace_convolutions(graph)
    assert not found.replaced and "another order" in found.reason


class Called(nn.Module):
    """A call of the function, to be traced."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w)


# dynamic shapes, and what is told


@pytest.mark.usefixtures("all_ours")
@pytest.mark.parametrize("model", [Residual().eval(), Upsampler()], ids=["2-D", "1-D"])
def test_extents_may_change_without_a_compilation_that_pytorch_would_not_need(model: nn.Module) -> None:
    two = isinstance(model, Residual)

    def compilations(replace: Callable[[torch.fx.GraphModule], object]) -> list:
        told = []

        def compiling(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
            told.append(replace(graph))
            return lookup_backend("aot_eager")(graph, inputs)

        torch._dynamo.reset()
        compiled = torch.compile(model, backend=compiling, fullgraph=True, dynamic=True)
        with torch.no_grad():
            for shape in ((2, 4, 8, 10), (3, 4, 15, 12), (5, 4, 9, 33), (4, 4, 14, 20)):
                shape = shape if two else shape[:3]
                torch.testing.assert_close(compiled(image(*shape)), model(image(*shape)), rtol=1e-4, atol=1e-4)
        return told

    ours, theirs = compilations(backends.replace_convolutions), compilations(lambda graph: None)
    assert len(ours) == len(theirs) < 4 and all(each.replaced for told in ours for each in told)
    first = "fprop 2,4,8,10 -> 8, 3x3 s2x2 p1,1,1,1" if two else "dgrad 2,6,1,16 -> 4, 1x4 s1x2 p0,0,1,1"
    assert str(ours[0][0].problem) == f"{first} tf32 nchw"


def test_explain_and_the_logs_name_every_convolution(caplog: pytest.LogCaptureFixture) -> None:
    model = Separable()
    with caplog.at_level(logging.INFO, "haloconv.choice"):
        told = backends.explain(model, image())
    assert [each.layer for each in told] == ["depthwise", "pointwise", "conv2d_2"]
    assert not any(each.replaced for each in told) and "our kernels run on CUDA devices" in told[0].reason
    lines = [record.message for record in caplog.records if record.message.startswith("torch.compile")]
    assert len(lines) == 3 and lines[0].startswith("torch.compile, depthwise: left to PyTorch: fprop: aten, ")
