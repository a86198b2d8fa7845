"""depthwise_window: rows that are left out, and the shared memory that a launch asks for."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from haloconv import emulator
from haloconv.env import DeviceFacts
from haloconv.families import depthwise_window, depthwise_window_wgrad
from haloconv.families.base import TensorForm, ceil_div, strides_of
from haloconv.problem import DIRECTIONS, Conv2dProblem
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
    """``WindowParams`` in windows.cuh, in words."""

    half: int
    row: int
    skew: int
    of_class: int
    plane: int
    taps: int
    filter_row: int
    filter: int
    channel_shift: int
    col_shift: int
    tap_shift: int
    planes: int
    filters: int
    classes_w: int


class Launch(NamedTuple):
    """What a launch asks for and tells its kernel; ``own`` are the kernel's fields before the axes."""

    inner: bool
    tile_i: int
    threads: int
    smem_bytes: int
    own: tuple[int, ...]
    rows: Axis
    cols: Axis
    window: Window


def launches_of(problem: Conv2dProblem, smem_bytes: int) -> list[Launch]:
    """The launch of each candidate, on a GPU with so much shared memory. Nothing is compiled."""
    facts = DeviceFacts("some GPU", "sm_90a", 4, (9, 0), 80 << 30, smem_bytes, "none")
    device, family, found = torch.device("cuda"), depthwise_window.DepthwiseWindowFamily(), []
    x, w, y = (
        TensorForm(strides_of(shape, problem.layout), True)
        for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    )
    forms = {"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}[problem.direction]

    def note(source, device, grid, threads, smem_bytes, params_format, fields) -> None:
        constants = dict(source.constants)
        axes = (Axis(*fields[-38:-26]), Axis(*fields[-26:-14]))
        inner = bool(constants.get("CHANNELS_INNER", 0))
        window = Window(*fields[-14:])
        found.append(Launch(inner, constants["TILE_I"], threads, smem_bytes, fields[:-38], *axes, window))

    with pytest.MonkeyPatch.context() as patch:
        for module in (depthwise_window, depthwise_window_wgrad):
            patch.setattr(module, "Launch", note)
            patch.setattr(module, "device_facts", lambda _: facts)
        patch.setattr(depthwise_window_wgrad, "bind_sum", lambda *_: None)
        for config in family.candidates(problem, *forms, problem.layout, device):
            family.bind(problem, *forms, problem.layout, device, config)
    return found


def staged_words(one: Launch) -> int:
    """Words up to the end of the filters (of dy) behind the windows; both are held against their places."""
    rows, cols, window = one.rows, one.cols, one.window
    last = rows.lines - 1  # stored row
    ends = [(col // 4 % 2) * window.half + col // 8 * 4 + col % 4 + 1 for col in range(cols.lines)]
    assert max(ends) <= window.row, "columns of a row"
    assert cols.tile + window.taps <= window.row, "columns that the last quad of taps meets"
    assert rows.steps == 1 or rows.tile - 1 + ceil_div(rows.chunk, rows.steps) <= rows.lines, "rows of a tile"
    assert last * window.row + last // one.tile_i * window.skew + window.row <= window.of_class, "rows of a class"
    assert rows.steps * cols.steps * window.classes_w * window.of_class <= window.plane, "classes of a plane"
    assert rows.chunk * window.filter_row <= window.filter, "rows of a filter"
    return window.planes * window.plane + window.filters * window.filter


def met_filters(one: Launch) -> int:
    """The most filters that a block's planes have, which follow one another image by image (``plane_at``)."""
    images, planes = one.own[11], one.window.planes
    if one.inner:
        return 1 << one.window.channel_shift
    return max((first * planes % images + planes - 1) // images + 1 for first in range(images))


def phases(problem: Conv2dProblem, one: Launch) -> dict[str, int]:
    """Words of shared memory that each phase of the kernel touches, by the kernel's expressions and fields."""
    rows, cols, window = one.rows, one.cols, one.window
    found = {"staged": staged_words(one)}
    if problem.direction == "wgrad":
        found["write_partials"] = window.planes * one.own[-2] * rows.tile * cols.tile  # shares
        return found
    assert met_filters(one) <= window.filters
    totals_words = one.own[-1]
    if totals_words:
        assert found["staged"] <= totals_words
        found["promote"] = totals_words + one.tile_i * TILE_J * one.threads
    if one.inner or window.classes_w > 1:
        tile_pixels = rows.tile * cols.tile * window.classes_w
        plane_words = tile_pixels + 1
        found["write_together"] = (window.planes - 1) * plane_words + tile_pixels
    return found


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    (r, s), channels = draw(st.sampled_from(FILTERS)), draw(st.integers(1, 20))
    stride, dilation = (draw(st.tuples(*(st.sampled_from(each),) * 2)) for each in ((1, 1, 2, 3), (1, 1, 2, 5)))
    padding = draw(st.tuples(*(st.sampled_from((0, 0, 1, 4)),) * 4))
    needed = ((r - 1) * dilation[0] + 1 - sum(padding[:2]), (s - 1) * dilation[1] + 1 - sum(padding[2:]))
    h, w = (max(1, each) + draw(st.integers(0, most)) for each, most in zip(needed, (20, 100), strict=True))
    return Conv2dProblem(
        draw(st.sampled_from(DIRECTIONS)), n=draw(st.integers(1, 9)), c=channels, h=h, w=w,
        k=channels * draw(st.integers(1, 3)), r=r, s=s, stride=stride, padding=padding, dilation=dilation,
        groups=channels, layout=draw(st.sampled_from(("nchw", "nhwc"))),
    )  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(), st.sampled_from((48, 99, 227)))
@example(Conv2dProblem("dgrad", 8, 13, 7, 115, 39, 2, 2, groups=13, layout="nhwc"), 227)
@example(Conv2dProblem("dgrad", 1, 5, 2, 96, 10, 1, 1, stride=(2, 1), dilation=(4, 7), groups=5), 227)
@example(Conv2dProblem("dgrad", 8, 13, 17, 100, 13, 18, 18, (2, 1), (0, 3, 1, 0), (1, 2), 13, layout="nhwc"), 227)
@example(Conv2dProblem("fprop", 2, 8, 17, 83, 8, 1, 1, (1, 1), (1, 3, 3, 0), (1, 2), 8), 227)
def test_shared_memory_has_room_for_every_phase(problem: Conv2dProblem, kibibytes: int) -> None:
    launches = launches_of(problem, kibibytes << 10)
    assert launches
    for one in launches:
        words = phases(problem, one)
        assert max(words.values()) * WORD_BYTES <= one.smem_bytes <= kibibytes << 10, (words, one)
