"""Every usage of an accelerated model on the GPU, with our kernels inside: the family is forced, refusals raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import haloconv
from tests.usages import USAGES, Place, assert_close, assert_restored, results

ON = Place("cuda", "direct", strict=True)


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both sides form fp32 products in fp32, and cuDNN computes the same bits each time."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("usage", USAGES)
def test_usage(usage: str) -> None:
    USAGES[usage](ON)


def test_cuda_graph() -> None:
    """A captured training step: replays read the weights and the input as they are then."""
    ours, theirs = ON.pair()
    x, shown = ON.image(), ON.image()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(ours, shown)
    torch.cuda.current_stream().wait_stream(side)
    ours.load_state_dict(theirs.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(ours, shown)
    for factor in (0.5, -2.0):
        shown.copy_(factor * x)
        with torch.no_grad():
            for net in (ours, theirs):
                net.stem.weight.mul_(factor)
        graph.replay()
        for got, want in zip(captured, results(theirs, factor * x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    theirs.load_state_dict(ours.state_dict())
    assert_restored(ours, theirs, x)


def test_graphed_callables() -> None:
    ours, theirs = (net.eval() for net in ON.pair())
    graphed = torch.cuda.make_graphed_callables(ours, (ON.image().requires_grad_(),))
    assert isinstance(graphed, torch.nn.Module)
    assert_close(graphed, theirs, ON.image())


def test_moved_to_the_gpu_later() -> None:
    """Accelerated on the CPU; the report follows the model to where it runs."""
    model = Place("cpu").net()
    report = haloconv.accelerate(model, family="direct")
    assert report[0].expected.startswith("aten: the tensors are on cpu")
    model.cuda()
    assert report[0].expected == "chosen at its first input"
    assert_close(model, ON.net(), ON.image())
    assert [swap.expected for swap in report] == ["direct: asked for"] * 2 and "direct: asked for" in str(report)


def test_auto_names_the_family_that_ran() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(32, 32, 7, padding=3, groups=32)).cuda()
    report = haloconv.accelerate(model)
    model(torch.randn(8, 32, 64, 64, device="cuda"))
    assert report[0].expected == "depthwise: " + repr(model).split("depthwise (")[1].split(")\n")[0].removesuffix(")")
