"""Nothing is written outside an output or a workspace, at sizes that end within a tile and within a vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import haloconv
from haloconv import plan
from tests import oracle
from tests.cases import DTYPES, Case, case, case_id, make

LAYERS = (
    case("exact_tiles", "extents that fill tiles and vectors", (2, 32, 32, 64), (64, 3, 3), padding=1),
    case("one_over", "one pixel and one channel more than a tile", (2, 33, 33, 65), (65, 3, 3), padding=1),
    case("one_under", "one pixel and one channel less than a tile", (2, 31, 31, 63), (63, 3, 3), padding=1),
    case("nhwc_one_over", "the same, channels_last", (2, 33, 33, 65), (65, 3, 3), padding=1, storage="channels_last"),
    case("long_reduction", "many images: the filter gradient may use workspace", (64, 8, 40, 41), (8, 3, 3), padding=1),
    case("depthwise", "depthwise, odd", (3, 37, 29, 31), (37, 5, 5), padding=2, groups=37),
    case("strided", "strided with an unread rest", (2, 16, 50, 51), (24, 3, 3), stride=(3, 2), padding=(0, 1, 2, 0)),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_up: Callable) -> None:
    warm_up((one, dtype) for one in LAYERS for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_fences_stay_intact(one: Case, dtype: torch.dtype) -> None:
    forced = one.on("direct")
    t = make(forced, dtype, "cuda")
    for result in oracle.RESULTS:
        with oracle.Unchanged(t), oracle.RedZones("cuda") as zones:
            got = oracle.run(result, t, forced)
        oracle.check(result, got, t, forced.spec)
        assert zones.check() >= 1


@pytest.mark.parametrize("one", [layer for layer in LAYERS if layer.storage == "contiguous"], ids=case_id)
def test_inputs_inside_a_field_of_nan(one: Case) -> None:
    """Operands that lie in a larger tensor of NaN: an element read from outside would show in the sums."""
    forced = one.on("direct")
    plain = make(forced, torch.float32, "cuda")
    sliced = Case(one.name, one.reason, one.extents, forced.spec, storage="sliced", w_storage="sliced")
    t = make(sliced, torch.float32, "cuda")
    for result in oracle.RESULTS:
        got = oracle.run(result, t, sliced)
        oracle.check(result, got, t, sliced.spec)
        if result != "bgrad":  # rows that follow one another in memory are summed as one long row
            assert torch.equal(got, oracle.run(result, plain, forced)), "storage changed the sums"


def test_stale_memory_is_never_read() -> None:
    """The public call with PyTorch's allocator full of NaN, twice with different stale blocks: the same bits."""
    one = case("stale", "several blocks", (4, 24, 45, 47), (40, 3, 3), padding=1).on("direct")
    t = make(one, torch.float32, "cuda")
    answers = []
    for stale in (float("nan"), 1e30):
        plan.clear_plans()
        torch.cuda.empty_cache()
        blocks = [torch.full((size,), stale, device="cuda") for size in (1 << 10, 1 << 16, 1 << 20) for _ in range(16)]
        del blocks
        x, w, b = (v.detach().requires_grad_() for v in (t.x, t.w, t.b))
        y = haloconv.conv2d(x, w, b, padding=1, family="direct")
        answers.append((y, *torch.autograd.grad(y, (x, w, b), t.dy)))
    for first, second in zip(*answers, strict=True):
        assert oracle.same_bits(first, second) and not first.isnan().any()
