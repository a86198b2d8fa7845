"""Images that a training graph enlarges by nearest neighbours, as expanded views: which, and the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._inductor.decomposition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import conv2d, interpolate

from haloconv import backend as backends
from haloconv.choose.choice import Choice
from haloconv.fusion.enlarged import enlarge_by_views, enlarged
from haloconv.layout import strides_of
from tests.compiled import image

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
W = image(6, 4, 3, 3)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """All convolutions are ours."""
    monkeypatch.setattr(backends, "choose_now", lambda request, family: Choice("direct", "chosen by the test"))


def integers(*shape: int, layout: str = "nchw") -> torch.Tensor:
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float()
    return torch.empty_strided(shape, strides_of(shape, layout)).copy_(x)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("factors", [(2, 2), (1, 2), (4, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("extents", [(3, 5), (2, 7), (2, 1)], ids=str)
def test_values_gradients_and_strides_are_those_of_interpolate(
    extents: tuple[int, int], factors: tuple[int, int], layout: str
) -> None:
    if (factors, extents) == ((1, 2), (2, 1)):
        extents = (1, 2)  # one column that is repeated is a view of x itself: those are left
    x = integers(2, 3, *extents, layout=layout).requires_grad_()
    for mode in ("nearest", "nearest-exact"):
        want, got = interpolate(x, scale_factor=tuple(map(float, factors)), mode=mode), enlarged(x, *factors, x.dtype)
        assert torch.equal(got, want) and got.stride() == want.stride()
        gradient = integers(*want.shape, layout=layout)
        one, other = (torch.autograd.grad(each, x, gradient)[0] for each in (want, got))
        assert torch.equal(one, other)


def in_training(x: torch.Tensor) -> torch.Tensor:
    return conv2d(interpolate(torch.relu(x), scale_factor=2), W)


def to_a_size(x: torch.Tensor) -> torch.Tensor:
    return conv2d(interpolate(torch.relu(x), (32, 20), mode="nearest-exact"), W)


def read_twice(x: torch.Tensor) -> torch.Tensor:
    y = nn.Upsample(scale_factor=(1, 4))(x * 2)
    return conv2d(y, W) + y.mean()


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    larger = interpolate(y, scale_factor=2).mul_(3)
    return conv2d(larger, W).sum() + y.add_(1).sum()


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return conv2d(interpolate(conv2d(x, W[:4, :, :1, :1]), scale_factor=2), W).float()


def not_recorded(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        larger = interpolate(x, scale_factor=2)
    return conv2d(larger, W).sum() + x


REPLACED: tuple[Callable, ...] = (in_training, to_a_size, read_twice, written_in_place, under_autocast)
LEFT: dict[str, Callable] = {
    "inference": not_recorded,
    "bilinear": lambda x: conv2d(interpolate(x, scale_factor=2, mode="bilinear"), W),
    "threefold": lambda x: conv2d(interpolate(x, scale_factor=3), W),
    "one and a half times": lambda x: conv2d(interpolate(x, scale_factor=1.5), W),
    "made smaller": lambda x: conv2d(interpolate(x, scale_factor=0.5), W),
    "one pixel": lambda x: conv2d(interpolate(x[:, :, :1, :1].contiguous(), scale_factor=4), W),
    "one column": lambda x: conv2d(interpolate(x[..., :1].contiguous(), scale_factor=(1.0, 4.0)), W),
    "a row of images": lambda x: conv2d(interpolate(x.flatten(2), scale_factor=2).unsqueeze(2), W[:, :, :1]),
    "a part of an image": lambda x: conv2d(interpolate(x[:, :, ::2], scale_factor=2), W),
}


class Seen:
    """Compiles by PyTorch's operators, and keeps the code of our graph and the operators of the gradients."""

    def __init__(self, layout: str) -> None:
        self.code, self.backward, self.layout = "", "", layout

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        backends.replace_convolutions(graph, self.layout == "nhwc")
        self.code = graph.code
        inductors = torch._inductor.decomposition.select_decomp_table()  # what takes interpolate apart
        return aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=self.note, decompositions=inductors)(
            graph, inputs
        )

    def note(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        self.backward = graph.code
        return graph


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", [*(each.__name__ for each in REPLACED), *LEFT])
def test_which_are_enlarged_by_views(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    function, replaced = next((each for each in REPLACED if each.__name__ == name), LEFT.get(name)), name not in LEFT
    assert function is not None
    x, seen = image(2, 4, 8, 10).requires_grad_(), Seen(layout)
    want, got = function(x), torch.compile(function, backend=seen, fullgraph=True)(x)
    theirs, own = ([each, *torch.autograd.grad(each.square().sum(), x)] for each in (want, got))
    for one, other in zip(theirs, own, strict=True):
        assert one.stride() == other.stride() and one.dtype == other.dtype
        assert (one - other).norm() <= (2e-2 if function is under_autocast else 1e-5) * one.norm()
    assert ("enlarged_enlarged" in seen.code) is replaced
    if replaced:
        assert "interpolate" not in seen.code and "index_put" not in seen.backward


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_image_that_autocast_enlarges_in_fp32(order: torch.memory_format) -> None:
    """As on GPUs, where interpolate is of its list: the node's result has another dtype than what it reads."""
    graph = torch.fx.Graph()
    image = graph.placeholder("x")
    node = graph.call_function(interpolate, (image,), {"scale_factor": 2})
    graph.output(node)
    x = integers(2, 8, 3, 5).bfloat16().contiguous(memory_format=order).requires_grad_()
    want = interpolate(x.float(), scale_factor=2)
    image.meta["example_value"], node.meta["example_value"] = x, want
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert enlarge_by_views(module) == 1
    got = module(x)
    assert torch.equal(got, want) and (got.dtype, got.stride()) == (want.dtype, want.stride())
    gradient = integers(*want.shape)
    one, other = (torch.autograd.grad(each, x, gradient)[0] for each in (want, got))
    assert torch.equal(one, other) and one.dtype == other.dtype


def test_a_graph_without_a_convolution_of_ours_stays_as_it_is() -> None:
    seen = Seen("nhwc")
    torch.compile(in_training, backend=seen, fullgraph=True)(image(2, 4, 8, 10).requires_grad_()).sum().backward()
    assert "interpolate" in seen.code and "index_put" in seen.backward  # the scatter that views avoid
