"""The depthwise family on a GPU: its cases in every dtype and direction, values that are not finite, every config."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from haloconv import plan
from haloconv.families.depthwise import (
    band,
    band_wgrad,
    box,
    box_wgrad,
    lanes,
    lanes_wgrad,
    march_form,
    pairs,
    pairs_wgrad,
    patch,
    patch_wgrad,
    plane,
    plane_wgrad,
    tile,
    tile_sm90,
)
from haloconv.families.depthwise.march_form import Form, Tiling
from haloconv.problem import ACTIVATIONS
from tests import oracle
from tests.activations import check_activation
from tests.cases import Case, case, case_id, make
from tests.emulated import BY_NAME, Run
from tests.emulated_depthwise import (
    BOXES,
    EPILOGUES,
    LANES,
    PAIRS,
    PATCHES,
    SHARED,
    STAGED,
    forced,
    results_of,
    shape_of,
)
from tests.emulated_depthwise import CASES as OWN_CASES
from tests.emulated_depthwise_planes import CASES as SMALL_PLANES
from tests.families import DEPTHWISE, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_integers, check_run
from tests.launches import launched
from tests.specials import special_activations

LARGE = (
    case("3x3", "MobileNet's commonest layer", (8, 64, 56, 56), (64, 3, 3), padding=1, groups=64),
    case("3x3_stride", "the same with stride", (8, 64, 112, 112), (64, 3, 3), padding=1, stride=2, groups=64),
    case("5x5", "14 columns: rows that are no multiple of 16 bytes", (8, 96, 14, 14), (96, 5, 5), padding=2, groups=96),
    case("7x7", "ConvNeXt", (4, 96, 56, 56), (96, 7, 7), padding=3, groups=96),
    case("7x7_tall", "strips of a plane, two steps of columns", (2, 32, 128, 112), (32, 7, 7), padding=3, groups=32),
    case("7x7_small", "seven columns", (8, 96, 7, 7), (96, 7, 7), padding=3, groups=96),
    case("5x5_large", "enough pixels for lanes of channels in NHWC", (24, 112, 60, 60), (112, 5, 5), padding=2,
         groups=112),
    case("tall", "many strips of rows, several sums of a filter's element", (1, 3, 2000, 130), (3, 3, 3), padding=1,
         groups=3),
)  # fmt: skip
LARGE_NHWC = tuple(
    Case(f"{one.name}_nhwc", f"{one.reason}, NHWC", one.extents, one.spec, storage="channels_last") for one in LARGE
)
CASES = (*SHARED, *OWN_CASES, *LARGE, *LARGE_NHWC)
RUNS = over(
    *((DEPTHWISE, one, dtype, result) for one in CASES for dtype in DEPTHWISE.dtypes for result in results_of(one))
)
NO_MARCHES = (
    pairs, pairs_wgrad, patch, patch_wgrad, tile_sm90, band, band_wgrad, tile, lanes, lanes_wgrad, box, box_wgrad,
    plane, plane_wgrad,
)  # fmt: skip
FOLLOWED = tuple(
    (DEPTHWISE, Run("depthwise", BY_NAME[name], dtype, result, shape)) for name, dtype, result, shape in EPILOGUES
)
ACTIVATED = ("3x3", "3x3_nhwc", "3x3_stride_nhwc", "7x7_nhwc", "5x5_large_nhwc")  # each activation follows these
TILINGS = ("3x3", "3x3_stride", "7x7", "3x3_nhwc", "5x5_nhwc")


@pytest.mark.parametrize(("subject", "one", "dtype", "result"), RUNS, ids=name_of)
def test_case(subject: Subject, one: Case, dtype: torch.dtype, result: str, record: Callable) -> None:
    """Right, inside its fences, the same bits twice, inputs untouched."""
    forced = subject.on(one, dtype)
    t = make(forced, dtype, "cuda")
    with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
        got = oracle.run(result, t, forced)
        again = oracle.run(result, t, forced)
    error = oracle.check(result, got, t, forced.spec)
    assert oracle.same_bits(got, again), f"{result}: two runs differ"
    assert zones.check() >= 2
    record(names, result, subject.label(dtype), error.norm)
    check_integers(subject, result, forced, dtype, record)


@pytest.mark.parametrize(("subject", "run"), over(*FOLLOWED), ids=str)
def test_epilogue(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, on the kernels that it runs."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE,)), ids=name_of)
@pytest.mark.parametrize("one", [one for one in (*LARGE, *LARGE_NHWC) if one.name in ACTIVATED], ids=case_id)
def test_every_activation(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    """With a scale or without, with a residual or without, one after the other."""
    asked = subject.on(one, dtype)
    for at, activation in enumerate((None, *ACTIVATIONS)):
        check_activation(asked, dtype, "cuda", activation, at + (not activation))


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE,)), ids=name_of)
@pytest.mark.parametrize("one", [one for one in OWN_CASES if one.problem().k_per_group == 1], ids=case_id)
def test_special_activations(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    """NaN and infinities in x (fprop, wgrad) or dy (dgrad) reach exactly the elements that sum over them."""
    forced = subject.on(one, dtype)
    for result in results_of(one):
        t, want = special_activations(result, forced, dtype, "cuda")
        oracle.check(result, oracle.run(result, t, forced), t, forced.spec, want=want)


@pytest.mark.parametrize("one", [one for one in OWN_CASES if one.name in LANES + BOXES], ids=case_id)
def test_special_activations_of_small_images(one: Case) -> None:
    """The same where lanes are channels and where planes come as boxes, which small images are forced to."""
    asked = DEPTHWISE.on(one, torch.float32)
    plan.clear_plans()
    with forced(shape_of(one)):
        for result in results_of(one):
            t, want = special_activations(result, asked, torch.float32, "cuda")
            oracle.check(result, oracle.run(result, t, asked), t, asked.spec, want=want)
    plan.clear_plans()


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE,)), ids=name_of)
@pytest.mark.parametrize("one", [one for one in (*LARGE, *LARGE_NHWC) if one.name in TILINGS], ids=case_id)
def test_every_tiling(one: Case, subject: Subject, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the marches that fit, not only the one that is put first, also where planes would be staged."""
    for other in NO_MARCHES:
        monkeypatch.setattr(other, "configs", lambda request: [])
    forced, t, tilings = subject.on(one, dtype), make(one, dtype, "cuda"), march_form.tilings
    for result in results_of(one):
        want, index, most = oracle.expected(result, t, forced.spec), 0, 1
        while index < most:
            seen: list[int] = []

            def nth(form: Form, index: int = index, seen: list[int] = seen) -> tuple[Tiling, ...]:
                found = tilings(form)
                seen.append(len(found))
                return found[min(index, len(found) - 1) :][:1]

            monkeypatch.setattr(march_form, "tilings", nth)
            plan.clear_plans()
            oracle.check(result, oracle.run(result, t, forced), t, forced.spec, want=want)
            most, index = max(seen), index + 1
    plan.clear_plans()


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE,)), ids=name_of)
@pytest.mark.parametrize(
    "one",
    [one for one in OWN_CASES if one.name in STAGED + PATCHES + LANES + BOXES + PAIRS or one in SMALL_PLANES],
    ids=case_id,
)
def test_not_chosen(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    """Kernels for older devices on Hopper, and Hopper's own on images that are small for them."""
    asked, t = subject.on(one, dtype), make(one, dtype, "cuda")
    plan.clear_plans()
    with forced(shape_of(one)):
        for result in results_of(one):
            oracle.check(result, oracle.run(result, t, asked), t, asked.spec)
    plan.clear_plans()


@pytest.mark.parametrize("storage", ["contiguous", "channels_last"])
def test_new_image_sizes_compile_nothing(storage: str, compiles: Callable[[], int]) -> None:
    """But for the size classes of rows: widths that are the same modulo 16 share their kernels."""
    rng = random.Random(storage)

    def visit(n: int, h: int, w: int) -> None:
        one = case(f"{n},{h},{w}", "sizes", (n, 16, h, w), (16, 5, 5), padding=2, groups=16, storage=storage)
        one = DEPTHWISE.on(one, torch.float16)
        t = make(one, torch.float16, "cuda")
        for result in DEPTHWISE.results:
            oracle.check(result, oracle.run(result, t, one), t, one.spec)

    for width in range(64, 80):
        for height in (16, 56, 64):  # patches have seven or eight rows, whichever leave fewer idle, or take nothing
            visit(2, height, width)
    before = compiles()
    for _ in range(60):
        visit(rng.randint(1, 9), rng.randint(5, 90), rng.randint(48, 160))
    assert compiles() == before
