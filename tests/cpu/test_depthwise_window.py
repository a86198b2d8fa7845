"""depthwise_window: rows that are left out, and the shared memory that a launch asks for."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from haloconv import emulator, problem
from haloconv.device import DeviceFacts
from haloconv.families.base import config_key
from haloconv.families.common import ceil_div
from haloconv.families.depthwise_window import wgrad, window
from haloconv.families.depthwise_window.family import DepthwiseWindowFamily
from haloconv.jit import KernelSource
from haloconv.jit.launch import LaunchShape
from haloconv.problem import DIRECTIONS, Problem, dense_request
from tests import oracle
from tests.emulated import BY_NAME, Run, execute

MISSING = emulator.available()
FILTERS = ((1, 1), (1, 2), (2, 2), (3, 1), (3, 3), (5, 5), (4, 7), (1, 15), (18, 18), (31, 31))
TILE_J, WORD_BYTES = 8, 4


@pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")
@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_filters_that_are_not_finite(value: float) -> None:
    """The first row of taps meets nothing but padding in the upper half of the output."""
    run = Run("depthwise_window", BY_NAME["window_tall"], torch.float32, "fprop", "the same rows of planes")
    w = run.tensors.w.clone()
    w[0, 0, 0, 1] = value
    t = run.tensors._replace(w=w)
    got = execute(run, t, seed=0)
    assert got[:, :, :10].isnan().all()
    oracle.check("fprop", got, t, run.forced.spec)


class Axis(NamedTuple):
    """``AxisParams`` in line.cuh."""

    taps: int
    stride: int
    dil: int
    pad: int
    results: int
    extent: int
    classes: int
    tile: int
    tiles: int
    chunk: int
    lines: int
    steps: int


class Window(NamedTuple):
    """``WindowParams`` in windows.cuh."""

    half_words: int
    row_words: int
    skew_words: int
    class_words: int
    plane_words: int
    tap_words: int
    filter_row_words: int
    filter_words: int
    channel_shift: int
    col_shift: int
    tap_shift: int
    planes: int
    filters: int
    classes_w: int


class Noted(NamedTuple):
    """What a launch asks for and tells its kernel; ``fields`` are all of the kernel's fields by name."""

    inner: bool
    tile_i: int
    threads: int
    smem_bytes: int
    fields: dict
    rows: Axis
    cols: Axis
    window: Window


def gpu_with(smem_bytes: int) -> DeviceFacts:
    """A GPU of four multiprocessors with so much shared memory."""
    return DeviceFacts("some GPU", "sm_90a", 4, (9, 0), 80 << 30, smem_bytes, "none")


def launches_of(layer: Problem, smem_bytes: int) -> list[Noted]:
    """The launch of each config, on a GPU with so much shared memory. Nothing is compiled."""
    family, request, found = DepthwiseWindowFamily(), dense_request(layer, torch.device("cuda")), []

    def note(source: KernelSource, device: torch.device, shape: LaunchShape, fields: dict) -> None:
        constants = dict(source.constants)
        rows, cols = (Axis(**each) for each in fields["axes"])
        inner = bool(constants.get("CHANNELS_INNER", 0))
        words = Window(**fields["window"])
        found.append(Noted(inner, constants["TILE_I"], shape.threads, shape.smem_bytes, fields, rows, cols, words))

    with pytest.MonkeyPatch.context() as patch:
        for module in (window, wgrad):
            patch.setattr(module, "Launch", note)
        patch.setattr(problem, "device_facts", lambda _: gpu_with(smem_bytes))
        patch.setattr(wgrad, "wgrad_call", lambda *_: None)
        for config in family.configs(request):
            family.bind(request, config)
    return found


def staged_words(one: Noted) -> int:
    """Words up to the end of the filters (of dy) behind the windows; both are held against their places."""
    rows, cols, words = one.rows, one.cols, one.window
    last = rows.lines - 1  # stored row
    ends = [(col // 4 % 2) * words.half_words + col // 8 * 4 + col % 4 + 1 for col in range(cols.lines)]
    assert max(ends) <= words.row_words, "columns of a row"
    assert cols.tile + words.tap_words <= words.row_words, "columns that the last quad of taps meets"
    assert rows.steps == 1 or rows.tile - 1 + ceil_div(rows.chunk, rows.steps) <= rows.lines, "rows of a tile"
    end_of_class = last * words.row_words + last // one.tile_i * words.skew_words + words.row_words
    assert end_of_class <= words.class_words, "rows of a class"
    assert rows.steps * cols.steps * words.classes_w * words.class_words <= words.plane_words, "classes of a plane"
    assert rows.chunk * words.filter_row_words <= words.filter_words, "rows of a filter"
    return words.planes * words.plane_words + words.filters * words.filter_words


def met_filters(one: Noted) -> int:
    """The most filters that a block's planes have, which follow one another image by image (``plane_at``)."""
    images, planes = one.fields["n"], one.window.planes
    if one.inner:
        return 1 << one.window.channel_shift
    return max((first * planes % images + planes - 1) // images + 1 for first in range(images))


def phases(layer: Problem, one: Noted) -> dict[str, int]:
    """Words of shared memory that each phase of the kernel touches, by the kernel's expressions and fields."""
    rows, cols, words = one.rows, one.cols, one.window
    found = {"staged": staged_words(one)}
    if layer.direction == "wgrad":
        found["write_partials"] = words.planes * one.fields["slices"] * rows.tile * cols.tile
        return found
    assert met_filters(one) <= words.filters
    totals_words = one.fields["totals_words"]
    if totals_words:
        assert found["staged"] <= totals_words
        found["promote"] = totals_words + one.tile_i * TILE_J * one.threads
    if one.inner or words.classes_w > 1:
        tile_pixels = rows.tile * cols.tile * words.classes_w
        plane_words = tile_pixels + 1
        found["write_together"] = (words.planes - 1) * plane_words + tile_pixels
    return found


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    (r, s), channels = draw(st.sampled_from(FILTERS)), draw(st.integers(1, 20))
    stride, dilation = (draw(st.tuples(*(st.sampled_from(each),) * 2)) for each in ((1, 1, 2, 3), (1, 1, 2, 5)))
    padding = draw(st.tuples(*(st.sampled_from((0, 0, 1, 4)),) * 4))
    needed = ((r - 1) * dilation[0] + 1 - sum(padding[:2]), (s - 1) * dilation[1] + 1 - sum(padding[2:]))
    h, w = (max(1, each) + draw(st.integers(0, most)) for each, most in zip(needed, (20, 100), strict=True))
    return Problem(
        draw(st.sampled_from(DIRECTIONS)), n=draw(st.integers(1, 9)), c=channels, h=h, w=w,
        k=channels * draw(st.integers(1, 3)), r=r, s=s, stride=stride, padding=padding, dilation=dilation,
        groups=channels, layout=draw(st.sampled_from(("nchw", "nhwc"))),
    )  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(), st.sampled_from((48, 99, 227)))
@example(Problem("dgrad", 8, 13, 7, 115, 39, 2, 2, groups=13, layout="nhwc"), 227)
@example(Problem("dgrad", 1, 5, 2, 96, 10, 1, 1, stride=(2, 1), dilation=(4, 7), groups=5), 227)
@example(Problem("dgrad", 8, 13, 17, 100, 13, 18, 18, (2, 1), (0, 3, 1, 0), (1, 2), 13, layout="nhwc"), 227)
@example(Problem("fprop", 2, 8, 17, 83, 8, 1, 1, (1, 1), (1, 3, 3, 0), (1, 2), 8), 227)
def test_shared_memory_has_room_for_every_phase(layer: Problem, kibibytes: int) -> None:
    launches = launches_of(layer, kibibytes << 10)
    assert launches
    for one in launches:
        words = phases(layer, one)
        assert max(words.values()) * WORD_BYTES <= one.smem_bytes <= kibibytes << 10, (words, one)


@pytest.mark.parametrize(("columns", "kibibytes", "taken"), ((100, 99, False), (20, 99, True), (100, 227, True)))
def test_gradients_that_no_tiling_fits_are_refused(
    columns: int, kibibytes: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residues of a far dilation, each with whole rows of dy."""
    layer = Problem("wgrad", 2, 8, 232, columns + 2, 8, 3, 3, dilation=(96, 1), groups=8)
    monkeypatch.setattr(problem, "device_facts", lambda _: gpu_with(kibibytes << 10))
    assert (DepthwiseWindowFamily().why_not(layer, torch.device("cuda")) is None) == taken
    assert bool(launches_of(layer, kibibytes << 10)) == taken


def test_a_config_has_the_name_that_records_have() -> None:
    """Its fields have other names by now; a record with an unknown name would be measured anew."""
    assert config_key(wgrad.Split(slices=3, slice_rows=5, part_terms=7)) == "shares3 share_rows5 part_terms7"
