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
BACK, OTHER, OF_ROW = image(4, 6, 3, 3), image(2, 6, 6, 8), image(4, 6, 8)
MEAN, VARIANCE, FACTOR, SUMMAND = image(6), image(6).abs() + 0.5, image(6), image(6)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler chooses kernels that have epilogues; the operator then runs PyTorch's, for there is no device."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))


def conv(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, W, BIAS)


def other(x: torch.Tensor) -> torch.Tensor:
    """What is added to ``conv(x)``: an input of the graph."""
    return OTHER


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
    "norm of rows": (lambda x: norm(functional.conv1d(x[0], ROW)).tanh(), ("batch norm", "tanh")),
}


def added_in_place(x: torch.Tensor) -> torch.Tensor:
    y = norm(conv(x))
    y += other(x)
    return torch.relu(y)


def added_to_the_earlier(x: torch.Tensor) -> torch.Tensor:
    """As torchvision's blocks have it: the second convolution is of the shortcut, and the sum is the first one's."""
    y, shortcut = norm(conv(x)), norm(functional.conv2d(x, W))
    y += shortcut
    return torch.relu(y)


FUSED |= {
    "addition": (lambda x: conv(x) + other(x), ("addition",)),
    "addition, the other order": (lambda x: torch.add(other(x), conv(x)), ("addition",)),
    "addition and relu": (lambda x: torch.relu(other(x) + conv(x)), ("addition", "relu")),
    "addition and silu": (lambda x: functional.silu(conv(x).add(other(x), alpha=1)), ("addition", "silu")),
    "norm, addition and relu": (lambda x: (norm(conv(x)) + other(x)).relu(), ("batch norm", "addition", "relu")),
    "addition in place": (added_in_place, ("batch norm", "addition", "relu")),
    "addition in place, a method": (lambda x: conv(x).add_(other(x)).relu_(), ("addition", "relu")),
    "addition, one image": (lambda x: torch.relu(other(x)[0] + conv(x[0])), ("addition", "relu")),
    "addition, one row": (lambda x: functional.conv1d(x[0], ROW, BIAS) + OF_ROW, ("addition",)),
    "aten.add": (lambda x: torch.ops.aten.add.Tensor(conv(x), OTHER), ("addition",)),
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


def of_itself(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    return y + y.cos()


def added_to_what_is_read_later(x: torch.Tensor) -> torch.Tensor:
    shortcut = other(x).clone()
    shortcut += conv(x)
    return torch.relu(shortcut)


def added_to_a_view(x: torch.Tensor) -> torch.Tensor:
    both = torch.cat((other(x), other(x)))
    both[:2].add_(conv(x))
    return both


def computed_in_between(x: torch.Tensor) -> torch.Tensor:
    y = conv(x)
    return y + torch.tanh(other(x))


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
    "a norm of another": lambda x: conv(x) + norm(OTHER).sum(),
    "added to itself": lambda x: (lambda y: y + y)(conv(x)),
    "a residual of its own result": of_itself,
    "a residual of each filter": lambda x: conv(x) + BIAS[:, None, None],
    "a residual of one image": lambda x: conv(x) + other(x)[:1],
    "a residual that is expanded": lambda x: conv(x) + other(x)[:1].expand(2, -1, -1, -1),
    "a residual in another order": lambda x: conv(x) + OTHER.to(memory_format=torch.channels_last),
    "a residual of another dtype": lambda x: conv(x) + other(x).double(),
    "a number": lambda x: conv(x) + 1,
    "a factor of the residual": lambda x: torch.add(conv(x), other(x), alpha=2),
    "a difference": lambda x: conv(x) - other(x),
    "a residual that is written": added_to_what_is_read_later,
    "a residual that is a view that is written": added_to_a_view,
    "a residual that is computed behind it": computed_in_between,
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


def test_of_two_that_are_added_the_later_one_gets_the_other() -> None:
    for function, names in (
        (lambda x: torch.relu(conv(x) + functional.conv2d(x, W)), ("addition", "relu")),
        (lambda x: torch.relu(functional.conv2d(x, W) + norm(conv(x))), ("batch norm", "addition", "relu")),
        (added_to_the_earlier, ("batch norm", "addition", "relu")),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            told, count, y = compiled(function, image())
            want = function(image())
        first = ("batch norm",) if function is added_to_the_earlier else ()
        assert [each.fused for each in told] == [first, names] and count == 1 + len(first)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", ["w", "residual"])
def test_gradients_of_an_addition_and_relu(wanted: str) -> None:
    """An addition and ReLU are part of it; behind a norm nothing is where autograd sees the residual alone."""
    leaves = {"w": W.double(), "residual": OTHER.double()}
    leaf = leaves[wanted].requires_grad_()

    def function(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = torch.relu(functional.conv2d(x, w) + residual)
        return y * functional.silu(functional.conv2d(x, w).add(residual))

    told, count, y = compiled(function, image().double(), *leaves.values())
    want = function(image().double(), *leaves.values())
    assert [each.fused for each in told] == [("addition", "relu"), ("addition",)] and count == 2
    got, expected = (torch.autograd.grad(each.square().sum(), leaf)[0] for each in (y, want))
    torch.testing.assert_close(got, expected)


def test_a_residual_with_a_gradient_is_not_added_behind_a_norm() -> None:
    residual = OTHER.clone().requires_grad_()
    told, count, y = compiled(lambda x: torch.relu(norm(conv(x)) + residual), image())
    assert [each.fused for each in told] == [("batch norm",)] and count == 1 and y.requires_grad


def test_extents_that_change_keep_the_addition() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.conv2d(x, W, padding=1) + residual)

    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable:
        backends.replace_convolutions(graph)
        counts.append(sum(node.target is OPERATOR for node in graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n, h, w in ((2, 8, 10), (3, 9, 7), (5, 4, 12)):
            x, residual = image(n, 4, h, w), image(n, 6, h, w)
            torch.testing.assert_close(run(x, residual), function(x, residual), rtol=1e-4, atol=1e-5)
    assert counts and set(counts) == {1} and len(counts) < 3


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
