"""What torch.compile(backend="haloconv") makes part of a convolution, and what it must leave to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional

from haloconv import backend as backends
from haloconv.choose.choice import Choice
from haloconv.emulator import available
from tests.compiled import emulated, image, through_aot

OPERATOR = torch.ops.haloconv.fprop_epilogue.default
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
W, BIAS, ROW = image(6, 4, 3, 3), image(6), image(6, 8, 3)
SAME, ADDED = image(4, 4, 3, 3), image(2, 6, 6, 8)
BACK, OTHER = image(4, 6, 3, 3), image(2, 6, 3, 3)
MEAN, VARIANCE, FACTOR, SUMMAND = image(6), image(6).abs() + 0.5, image(6), image(6)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler chooses kernels that have epilogues; the operator then runs PyTorch's, for there is no device."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))


def conv(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, W, BIAS)


def norm(x: torch.Tensor, training: bool = False, **changes: object) -> torch.Tensor:
    given = {"weight": FACTOR, "bias": SUMMAND, "training": training, "eps": 1e-3} | changes
    return functional.batch_norm(x, MEAN, VARIANCE, **given)


def compiled(function: Callable, *args: object) -> tuple[list[backends.Convolution], int, torch.Tensor]:
    """What is told of the convolutions, calls of the operator with an epilogue, and the value."""
    told: list[backends.Convolution] = []
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        nonlocal count
        told.extend(backends.replace_convolutions(graph))
        count += sum(node.target is OPERATOR for node in graph.graph.nodes)
        graph.graph.lint()
        return lookup_backend("aot_eager")(graph, inputs)

    value = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return told, count, value


def same(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, SAME, padding=1)


def shortcut(x: torch.Tensor) -> torch.Tensor:
    y = norm(conv(torch.add(x, 1)))
    return torch.relu(y + x[:, :1, 2:, 2:].expand(-1, 6, -1, -1).contiguous())


FUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "relu": (lambda x: torch.relu(conv(x)), ("relu",)),
    "relu of functional": (lambda x: functional.relu(conv(x)), ("relu",)),
    "relu in place": (lambda x: functional.relu(conv(x), inplace=True), ("relu",)),
    "a method": (lambda x: conv(x).relu(), ("relu",)),
    "a method in place": (lambda x: conv(x).relu_(), ("relu",)),
    "silu": (lambda x: functional.silu(conv(x)), ("silu",)),
    "gelu": (lambda x: functional.gelu(conv(x)), ("gelu",)),
    "gelu, tanh": (lambda x: functional.gelu(conv(x), approximate="tanh"), ("gelu_tanh",)),
    "hardswish": (lambda x: functional.hardswish(conv(x), True), ("hardswish",)),
    "leaky relu": (lambda x: functional.leaky_relu(conv(x)), ("leaky_relu",)),
    "sigmoid": (lambda x: conv(x).sigmoid(), ("sigmoid",)),
    "tanh": (lambda x: torch.tanh(conv(x)), ("tanh",)),
    "norm": (lambda x: norm(conv(x)) * 2, ("batch norm",)),
    "norm and silu": (lambda x: functional.silu(norm(conv(x))), ("batch norm", "silu")),
    "norm without factor": (lambda x: norm(conv(x), weight=None, bias=None).relu(), ("batch norm", "relu")),
    "norm, no bias before": (lambda x: norm(functional.conv2d(x, W)).relu(), ("batch norm", "relu")),
    "twice": (lambda x: functional.silu(torch.relu(conv(x))), ("relu",)),
    "one image": (lambda x: conv(x[0]).relu(), ("relu",)),
    "one row": (lambda x: functional.conv1d(x[0], ROW, BIAS).relu(), ("relu",)),
    "an addition": (lambda x: conv(x) + ADDED, ("addition",)),
    "an addition and relu": (lambda x: torch.relu(ADDED + conv(x)), ("addition", "relu")),
    "norm, an addition and silu": (
        lambda x: functional.silu(norm(conv(x)).add_(ADDED)),
        ("batch norm", "addition", "silu"),
    ),
    "an addition of what is computed meanwhile": (shortcut, ("batch norm", "addition", "relu")),
    "norm of rows": (lambda x: norm(functional.conv1d(x[0], ROW)).tanh(), ("batch norm", "tanh")),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_follows_becomes_part_of_it(name: str) -> None:
    function, names = FUSED[name]
    with torch.no_grad():
        told, count, y = compiled(function, image())
        want = function(image())
    assert [each.fused for each in told] == [names] and count == 1 and y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


def shared(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    return torch.relu(y) + y


def written_first(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    y.mul_(2)
    return y.relu()


def statistics_written_between(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    return functional.batch_norm(y, MEAN * 2, VARIANCE)


def of_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(conv(x).double())


def doubled(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    return y + y


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a value that others read": shared,
    "a value that is written before": written_first,
    "statistics that are computed": statistics_written_between,
    "another dtype": of_another_dtype,
    "training": lambda x: functional.batch_norm(conv(x), None, None, training=True),
    "another slope": lambda x: functional.leaky_relu(conv(x), 0.2),
    "another activation": lambda x: functional.relu6(conv(x)),
    "an addition between": lambda x: torch.relu(conv(x) + 1),
    "another tensor's activation": lambda x: conv(x) * torch.relu(x[:, :1, 2:, 2:]),
    "a transposed one": lambda x: torch.relu(functional.conv_transpose2d(x, BACK)),
    "a broadcast addition": (lambda x: torch.relu(conv(x) + ADDED[:1])),
    "an addition of another dtype": lambda x: torch.relu(conv(x) + ADDED.double()),
    "an addition with a factor": lambda x: torch.relu(torch.add(conv(x), ADDED, alpha=2)),
    "an addition to another in place": lambda x: ADDED.clone().add_(conv(x)),
    "an addition of what writes the image": lambda x: same(x) + x.mul_(2),
    "an addition of what may write the image": lambda x: same(x) + torch.relu_(x.flip(2)),
    "an addition to itself": doubled,
    "a norm of another": lambda x: conv(x) + norm(OTHER).sum(),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_the_same_is_left(name: str) -> None:
    with torch.no_grad():
        told, count, y = compiled(LEFT[name], image())
        want = LEFT[name](image())
    assert count == 0 and all(each.replaced and not each.fused for each in told) and told
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


def test_only_families_that_have_epilogues_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))
    told, count, _ = compiled(FUSED["relu"][0], image())
    assert count == 0 and [each.replaced for each in told] == [True]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
        for each in (self.norm.running_mean, self.norm.weight, self.norm.bias):
            nn.init.normal_(each)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.last(functional.silu(self.norm(self.conv(x)))))


@pytest.mark.parametrize("training", [False, True])
def test_where_gradients_are_recorded_relu_alone_is_part(training: bool) -> None:
    model = Chain().double().train(training)
    x = image().double()
    told, count, y = compiled(model, x)
    want = model(x)
    assert [each.fused for each in told] == [(), ("relu",)] and count == 1
    found = [torch.autograd.grad(each.square().sum(), [*model.parameters()]) for each in (y, want)]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_explain_and_statistics_that_change_later() -> None:
    """The norm's buffers stay the model's own: what is trained on after compiling is seen."""
    model = Chain().eval()
    step = torch.compile(model, backend=through_aot, fullgraph=True)
    with torch.no_grad():
        assert [each.fused for each in backends.explain(model, image())] == [("batch norm", "silu"), ("relu",)]
        torch.testing.assert_close(step(image()), model(image()), rtol=1e-4, atol=1e-5)
        model.norm.running_mean.add_(1)
        model.norm.weight.mul_(-2)
        torch.testing.assert_close(step(image()), model(image()), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
def test_a_chain_on_our_kernels(monkeypatch: pytest.MonkeyPatch, emulator_cache: None) -> None:
    monkeypatch.undo()
    model = Chain().eval()
    with torch.no_grad(), emulated():
        want = model.double()(image().double())
        y = torch.compile(model.float(), backend=through_aot, fullgraph=True)(image())
    torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=2e-3)
