"""Nothing is written outside an output or a workspace, at sizes that end within a tile and within a vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import haloconv
from haloconv import plan
from tests import oracle
from tests.cases import Case, case, case_id, make
from tests.families import FACTS, Subject, each_dtype, each_subject, name_of

LAYERS = (
    case("exact_tiles", "extents that fill tiles and vectors", (2, 32, 32, 64), (64, 3, 3), padding=1),
    case("one_over", "one pixel and one channel more than a tile", (2, 33, 33, 65), (65, 3, 3), padding=1),
    case("one_under", "one pixel and one channel less than a tile", (2, 31, 31, 63), (63, 3, 3), padding=1),
    case("nhwc_one_over", "the same, channels_last", (2, 33, 33, 65), (65, 3, 3), padding=1, storage="channels_last"),
    case("long_reduction", "many images: the filter gradient may use workspace", (64, 8, 40, 41), (8, 3, 3), padding=1),
    case("depthwise", "depthwise, odd", (3, 37, 29, 31), (37, 5, 5), padding=2, groups=37),
    case("strided", "strided with an unread rest", (2, 16, 50, 51), (24, 3, 3), stride=(3, 2), padding=(0, 1, 2, 0)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _warm(subject: Subject, request: pytest.FixtureRequest, warm_up: Callable) -> None:
    wanted = request.node.callspec.params.get("dtype", torch.float32)
    warm_up(f"fences {wanted}", subject, ((one, wanted) for one in LAYERS))


@pytest.mark.parametrize(("subject", "dtype"), each_dtype(), ids=name_of)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_fences_stay_intact(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda")
    for result in subject.results:
        with oracle.Unchanged(t), oracle.RedZones("cuda") as zones:
            got = oracle.run(result, t, forced)
        oracle.check(result, got, t, forced.spec)
        assert zones.check() >= 1


@pytest.mark.parametrize("subject", each_subject(), ids=str)
@pytest.mark.parametrize("one", [layer for layer in LAYERS if layer.storage == "contiguous"], ids=case_id)
def test_inputs_inside_a_field_of_nan(one: Case, subject: Subject) -> None:
    """Operands that lie in a larger tensor of NaN: an element read from outside would show in the sums."""
    forced = subject.on(one, torch.float32)
    plain = make(forced, torch.float32, "cuda")
    sliced = Case(one.name, one.reason, one.extents, forced.spec, storage="sliced", w_storage="sliced")
    t = make(sliced, torch.float32, "cuda")
    for result in subject.results:
        got = oracle.run(result, t, sliced)
        oracle.check(result, got, t, sliced.spec)
        # bgrad sums rows that follow one another in memory as one long row, and others cut tiles by the storage
        if result in FACTS[subject.name].same_sums:
            assert torch.equal(got, oracle.run(result, plain, forced)), "storage changed the sums"


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_stale_memory_is_never_read(subject: Subject) -> None:
    """The public call with PyTorch's allocator full of NaN, twice with different stale blocks: the same bits."""
    one = case("stale", "several blocks", (4, 24, 45, 47), (40, 3, 3), padding=1)
    one = subject.on(one, torch.float32, strict=False)
    t = make(one, torch.float32, "cuda")
    wanted = "xwb" if "wgrad" in subject.results else "x"
    answers = []
    for stale in (float("nan"), 1e30):
        plan.clear_plans()
        torch.cuda.empty_cache()
        blocks = [torch.full((size,), stale, device="cuda") for size in (1 << 10, 1 << 16, 1 << 20) for _ in range(16)]
        del blocks
        leaves = {name: getattr(t, name).detach().requires_grad_(name in wanted) for name in "xwb"}
        y = haloconv.conv2d(
            leaves["x"], leaves["w"], leaves["b"], padding=1, family=subject.name, precision=one.spec.precision
        )
        answers.append((y, *torch.autograd.grad(y, [leaves[name] for name in wanted], t.dy)))
    for first, second in zip(*answers, strict=True):
        assert oracle.same_bits(first, second) and not first.isnan().any()
