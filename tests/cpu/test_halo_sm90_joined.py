"""Outputs of halo_sm90 in nchw whose planes are no multiple of 16 bytes: where TMA writes them, and where lanes do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv.families.halo_sm90.conv.configs import best_tilings, cost, storage_of, tilings
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.families.halo_sm90.conv.operands import operands_of, tensor_maps
from haloconv.families.halo_sm90.conv.tile import Tiling
from haloconv.problem import Problem, Request, dense_request

CPU = torch.device("cpu")
H200 = 132  # multiprocessors


def _request(dtype: torch.dtype, filters: int, rows: int, cols: int, groups: int = 1) -> Request:
    """A 3x3 layer without padding that has so many rows and columns of outputs."""
    precision = "tf32" if dtype == torch.float32 else "ieee"
    extents = {"n": 8, "c": 64 * groups, "h": rows + 2, "w": cols + 2, "k": filters, "r": 3, "s": 3, "groups": groups}
    return dense_request(Problem("fprop", **extents, dtype=dtype, precision=precision), CPU)


def _best(request: Request) -> Tiling:
    return best_tilings(form_of(request.problem), storage_of(request), H200)[0]


@pytest.mark.parametrize(
    ("dtype", "filters", "rows", "cols", "planes"),
    [
        (torch.float32, 128, 255, 1022, 2),  # C in two shards
        (torch.float32, 128, 128, 1022, 1),
        (torch.float32, 128, 127, 1022, 2),  # C in four
        (torch.float16, 128, 510, 1022, 2),  # C
        (torch.bfloat16, 512, 255, 1021, 8),
        (torch.float32, 256, 249, 253, 4),
    ],
)
def test_blocks_have_every_few_filters(dtype: torch.dtype, filters: int, rows: int, cols: int, planes: int) -> None:
    """TMA writes large layers, in no more blocks than neighbours make, from 16 aligned bytes in each plane."""
    request = _request(dtype, filters, rows, cols)
    tiling, aligned = _best(request), 16 // dtype.itemsize
    assert tiling.y_boxes and tiling.y_planes == storage_of(request).y_joined == planes
    assert tiling.blocks * tiling.shape.streams == filters // 64
    shifts = {(plane * rows * cols + row * cols) % aligned for plane in range(planes) for row in range(rows)}
    assert tiling.lead == max(shifts)
    y_map = tensor_maps(dtype, tiling, operands_of(request))["y_map"]
    assert all(stride % 16 == 0 for stride in y_map.strides)
    left = tiling.rest.form.horizontal.out_extent if tiling.rest else 0
    assert y_map.extents == (planes * rows * cols - left, 1, filters // planes, 1, 8)


@pytest.mark.parametrize(
    ("filters", "cols", "groups", "planes"),
    [(64, 1022, 1, 0), (128, 1021, 1, 0), (130, 1021, 1, 0), (256, 1021, 1, 4), (256, 1022, 2, 0), (129, 1022, 1, 0)],
)
def test_lanes_store_where_that_took_more_blocks(filters: int, cols: int, groups: int, planes: int) -> None:
    """Two or four classes of planes (TF32, an odd number of rows) of 64 filters, filters they do not divide, groups."""
    tiling = _best(_request(torch.float32, filters, 255, cols, groups))
    assert (tiling.y_planes if tiling.y_boxes else 0) == planes


def test_a_strip_more_for_boxes_is_weighed_against_what_is_without_it() -> None:
    """Or lanes store, or the last columns have a launch of their own. The best has the name of their shape."""
    request = _request(torch.float16, 128, 510, 1022)
    form, storage = form_of(request.problem), storage_of(request)
    found = tilings(form, storage)
    wide = [each for each in found if each.shape.run == 256 and each.shape.keeps and each.shape.shared_tile]
    assert [(each.columns.strips, each.y_boxes, each.rest is None) for each in wide] == [
        (5, True, True), (4, False, True), (4, True, False)
    ]  # fmt: skip
    best = best_tilings(form, storage, H200)
    assert len({each.shape for each in best}) == len(best) == 8
    costs = {each.shape: cost(each, each.storage, H200) for each in best}
    for each in found:
        assert each.shape not in costs or cost(each, each.storage, H200) >= costs[each.shape]


@pytest.mark.parametrize("stride", [1, 2])
def test_the_launches_of_a_cut_row_compute_each_column_once(stride: int) -> None:
    form = form_of(_request(torch.float16, 128, 510, 1022).problem)
    form = replace(form, horizontal=replace(form.horizontal, stride=stride, pad=3))
    for cols in (1, 1018, 1021):
        gathered = []
        for axis in (part.horizontal for part in form.cut(cols)):
            places = range(axis.out_extent)
            gathered += [(axis.out_first + i, i * axis.stride - axis.pad) for i in places]
        assert gathered == [(i, i * stride - 3) for i in range(1022)]


def test_a_launch_of_its_own_is_for_few_columns() -> None:
    """At most twice as many as the pixels by which a tile begins early."""
    for cols, rest in ((1018, 0), (1019, 2), (1022, 4), (1030, 12), (1031, 14), (1034, 0)):
        request = _request(torch.float16, 512, 510, cols)
        found = tilings(form_of(request.problem), storage_of(request))
        left = {each.rest.form.horizontal.out_extent for each in found if each.rest and each.shape.run == 256}
        assert left == ({rest} if rest else set()), cols
