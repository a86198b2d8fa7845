"""Updates of batch norms by foreach operators: which, and the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor
from torch.fx.experimental.proxy_tensor import make_fx

from haloconv import backend as backends
from haloconv import moments
from haloconv.choose.choice import Choice
from haloconv.fusion.lowered.foreach_updates import asked_by_option, update_together
from tests.compiled import emulated, image
from tests.cpu.test_batch_norms import VALUES, Block, Counting, channels_last, trained

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
        y, variance, mean = OPS.fprop_moments(x + i, w, *VALUES)
        deviation = torch.rsqrt(variance + 1e-5)
        kept += [((y - mean) * deviation).relu(), deviation.squeeze((0, 2, 3))]
        new += [moved(averages[2 * i], mean), moved(averages[2 * i + 1], variance * 1.1, 0.3)]
    for buffer, value in zip([*averages, *counts], [*new, *(count + 1 for count in counts)], strict=True):
        buffer.copy_(value)
    return tuple(kept)


def read_before(x: torch.Tensor, w: torch.Tensor, averages: list[torch.Tensor], _: list[torch.Tensor]) -> tuple:
    """New values that others read, or that come after a buffer was written."""
    _, variance, mean = OPS.fprop_moments(x, w, *VALUES)
    first, second = moved(averages[0], mean), moved(averages[1], variance)
    averages[0].copy_(first)
    averages[1].copy_(second)
    averages[2].copy_(moved(averages[2], mean))
    return (first + second,)


def of_others(x: torch.Tensor, w: torch.Tensor, averages: list[torch.Tensor], counts: list[torch.Tensor]) -> tuple:
    """Statistics of a reduction, other factors, no plain sum, one counter alone, and a deviation that more read."""
    y, variance, mean = OPS.fprop_moments(x, w, *VALUES)
    of_pytorch, _ = torch.var_mean(y.relu(), (0, 2, 3), correction=0, keepdim=True)
    new = [moved(averages[0], of_pytorch), moved(averages[1], mean * averages[3].view(1, -1, 1, 1))]
    new += [torch.add(mean.squeeze((0, 2, 3)), averages[2], alpha=2), mean.squeeze((0, 2, 3)) - 1.0]
    count = counts[0] + 1
    for buffer, value in zip((*averages, counts[0]), (*new, count), strict=True):
        buffer.copy_(value)
    deviation = torch.rsqrt(variance + 1e-5).squeeze((0, 2, 3))
    return deviation * 2, deviation


@pytest.mark.parametrize(("step", "found"), [(two_norms, 8), (read_before, 0), (of_others, 0)])
def test_which_updates_are_computed_together(step: Step, found: int) -> None:
    def given() -> tuple:
        return X, W, [each.clone() for each in AVERAGES], [each.clone() for each in COUNTS]

    graph = make_fx(step, tracing_mode="fake")(*given())
    assert update_together(graph.graph) == found
    graph.graph.lint()
    graph.recompile()
    assert graph.code.count("aten._foreach_") == (2 if found else 0)
    before, after = given(), given()
    want, got = step(*before), graph(*after)
    for one, other in zip((*want, *before[2], *before[3]), (*got, *after[2], *after[3]), strict=True):
        torch.testing.assert_close(other, one)


def test_inductor_trains_the_same_block_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, moments):
        monkeypatch.setattr(module, "choose_now", lambda request, family: Choice("halo_sm90", "chosen by the test"))
    monkeypatch.setattr(backends, "_gains_by_channels_last", lambda forward: True)
    model, x, graphs, found = Block(), image(2, 64, 8, 10), [], []
    for asked in (False, True):
        seen, own = Counting(), copy.deepcopy(model)
        with inductor.patch(post_grad_custom_pre_pass=seen, fx_graph_cache=False):
            torch._dynamo.reset()
            found.append(trained(own, torch.compile(own, backend="haloconv", options={"foreach_updates": asked}), x))
        graphs.append(seen.graphs[0])
    assert [[each.count(f"aten._foreach_{name}](") for name in ("copy.default", "rsqrt.default")]
            for each in graphs] == [[0, 0], [1, 1]]  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_the_option_is_a_bool() -> None:
    assert asked_by_option(None) is False and asked_by_option(True) is True
    with pytest.raises(ValueError, match="foreach_updates.*not 'yes'"):
        asked_by_option("yes")
