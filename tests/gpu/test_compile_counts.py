"""N, H and W are run-time values: new image sizes compile nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from haloconv import plan
from tests import oracle
from tests.cases import Case, case, case_id, make

LAYERS = (
    case("plain", "3x3", (1, 8, 9, 9), (16, 3, 3), padding=1),
    case("uneven", "stride, dilation, four sides", (1, 6, 11, 13), (10, 3, 2), stride=(2, 3), dilation=(2, 1),
         padding=(1, 2, 0, 3)),
    case("depthwise", "depthwise channels_last", (1, 16, 9, 9), (16, 5, 5), padding=2, groups=16,
         storage="channels_last"),
    case("pointwise", "1x1", (1, 12, 5, 5), (20, 1, 1)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=case_id)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_200_image_sizes_compile_nothing_new(one: Case, dtype: torch.dtype, compiles: Callable[[], int]) -> None:
    forced, rng = one.on("direct"), random.Random(one.name)
    _, c, _, _, k, r, s = one.extents

    def visit(n: int, h: int, w: int) -> None:
        sized = Case(f"{one.name} {n},{h},{w}", one.reason, (n, c, h, w, k, r, s), forced.spec, storage=one.storage)
        t = make(sized, dtype, "cuda")
        for result in oracle.RESULTS:
            got = oracle.run(result, t, sized)
            if rng.random() < 0.03:
                oracle.check(result, got, t, sized.spec)

    for n, extent in ((2, 16), (2, 30), (2, 64), (2, 160), (9, 160)):  # a bias gradient is cut by the number of pixels
        visit(n, extent, extent)
    before = compiles()
    for _ in range(200):
        visit(rng.randint(1, 9), rng.randint(5, 160), rng.randint(5, 160))
    assert compiles() == before


def test_a_new_filter_compiles_once_and_is_loaded_from_disk_later(compiles: Callable[[], int]) -> None:
    one = case("unheard_of", "a filter that no other test uses", (1, 5, 9, 17), (9, 4, 9)).on("direct")
    t = make(one, torch.float32, "cuda")
    before = compiles()
    first = oracle.run("fprop", t, one)
    once = compiles()
    assert once == before + 1
    plan.clear_plans()
    assert oracle.same_bits(oracle.run("fprop", t, one), first)
    assert compiles() == once
