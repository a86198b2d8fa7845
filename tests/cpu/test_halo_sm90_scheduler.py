"""Work tiles of halo_sm90 among blocks of threads; sums that enter their buffers without bank conflicts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from haloconv import conv2d
from haloconv.emulator import emulated_device
from haloconv.families.halo_sm90.conv.configs import storage_of
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.conv.scheduler import best_schedule, cuts, divisor
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.problem import Problem, dense_request
from tests.emulated_halo_sm90 import forced
from tests.tilings import all_tilings

H200 = 132


def _tilings(n: int, height: int, width: int, groups: int = 1) -> list[Tiling]:
    """Every tiling of a 3x3 layer without padding, in TF32 and nchw."""
    extents = {"n": n, "c": 64 * groups, "h": height, "w": width, "k": 128 * groups, "r": 3, "s": 3, "groups": groups}
    problem = Problem("fprop", **extents, dtype=torch.float32, layout="nchw", precision="tf32")
    return all_tilings(form_of(problem), storage_of(dense_request(problem, torch.device("cpu"))))


@pytest.mark.parametrize(
    "shape", [(8, 512, 1024), (1, 66, 1024), (3, 34, 164), (2, 10, 500), (1, 4, 150), (4, 66, 660)]
)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sm_count", [H200, 114, 7, 4, 1])
def test_every_work_tile_is_in_one_range_and_none_is_longer_than_the_busiest(
    shape: tuple[int, int, int], groups: int, sm_count: int
) -> None:
    for tiling in _tilings(*shape, groups):
        schedule, strips = tiling.schedule(sm_count), tiling.all_strips
        ranges = list(schedule.ranges(tiling.total, strips))
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == tiling.total
        assert all(0 < end - begin <= schedule.most for begin, end in ranges) and 0 < schedule.grid <= sm_count
        if schedule.strip_blocks:
            whole, owners = tiling.total // strips, strips * schedule.strip_blocks
            cuts = Counter(begin % whole for begin, _ in ranges)
            assert set(cuts.values()) == {strips}, "every strip is cut at the same work tiles"
            assert len(ranges) - owners in (0, strips) and schedule.grid >= owners
        else:
            assert len(ranges) == schedule.grid


def test_unaligned_rows_leave_no_multiprocessor_idle() -> None:
    """Eight strips on 132 multiprocessors: 16 blocks each, and four that share the ends of two."""
    tiling = next(
        each for each in _tilings(8, 512, 1024) if each.lead and each.columns.strips == 8 and each.shape.shared_tile
    )
    schedule = tiling.schedule(H200)
    assert (schedule.grid, schedule.strip_blocks) == (H200, 16)
    assert schedule.most == -(-tiling.total // H200)
    whole = tiling.total // 8
    lengths = Counter(end - begin for begin, end in schedule.ranges(tiling.total, 8))
    spare = whole - 16 * schedule.most
    assert lengths == {schedule.most: 8 * 16, spare: 8}, "the spare blocks have the fewest work tiles"


@pytest.mark.parametrize(
    ("total", "blocks", "sm_count", "team"),
    [(16320, 2, 132, 2), (12, 3, 132, 3), (600, 5, 132, 1), (16320, 8, 132, 1)],
)
def test_blocks_of_filters_go_side_by_side_where_it_costs_no_work_tile(
    total: int, blocks: int, sm_count: int, team: int
) -> None:
    schedule = best_schedule(total, blocks, 4, sm_count, False)
    ranges = list(schedule.ranges(total, 4))
    assert (schedule.team, schedule.most) == (team, -(-total // min(total, sm_count)))
    assert len(ranges) == schedule.grid and sum(end - begin for begin, end in ranges) == total
    each = total // team
    assert {(begin % each, (end - 1) % each) for begin, end in ranges} == {
        (begin, end - 1) for begin, end in ranges[: schedule.grid // team]
    }, "every member of a team is cut at the same work tiles"


def _quotient(n: int, value: int, magic: int, shift: int) -> int:
    """What ``Divisor::quotient`` of families/halo_sm90/divisor.cuh computes."""
    assert 0 <= n < 1 << 31 and magic < 1 << 32
    return n if value == 1 else (n * magic >> 32) >> shift


@given(st.integers(0, (1 << 31) - 1), st.integers(1, (1 << 31) - 1))
def test_divisors_are_exact(n: int, value: int) -> None:
    for each in {n, n // value * value, max(0, n // value * value - 1), (1 << 31) - 1}:
        assert _quotient(each, **divisor(value)) == each // value


@given(st.integers(0, (1 << 31) - 1), st.integers(1, 200))
def test_cuts_are_equal_parts(length: int, parts: int) -> None:
    cut = cuts(length, parts)
    assert [i * cut["each"] + _quotient(i * cut["left"], **cut["parts"]) for i in range(parts + 1)] == [
        i * length // parts for i in range(parts + 1)
    ]
    assert cuts(length, 0) == {"parts": {"value": 0, "magic": 0, "shift": 0}, "each": 0, "left": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("storage", [torch.contiguous_format, torch.channels_last])
def test_sums_enter_their_buffers_without_bank_conflicts(dtype: torch.dtype, storage: torch.memory_format) -> None:
    x = torch.randn(1, 16, 6, 72).to(dtype).contiguous(memory_format=storage)
    w = torch.randn(64, 16, 3, 3).to(dtype).contiguous(memory_format=storage)
    with emulated_device(statistics=True) as device, forced("boxes in rows"):
        precision = "tf32" if dtype == torch.float32 else None
        conv2d(x, w, padding=1, family="halo_sm90", precision=precision, strict=True)
    sites = [
        site
        for each in device.statistics
        for site in each.sites
        if site.place.startswith("families/halo_sm90/conv/write.cuh")
    ]
    filled = [site for site in sites if site.write]
    assert filled and all(site.worst_degree == 1 for site in filled), filled
