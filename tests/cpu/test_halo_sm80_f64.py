"""halo_sm80_f64: what its blocks ask of shared memory."""

from __future__ import annotations

import torch

from haloconv.families.halo_sm80_f64 import conv
from haloconv.families.halo_sm80_f64.tile import WORK_BYTES, Tiling, fitting_shapes, tilings
from haloconv.problem import Problem
from tests.fuzz.check import check
from tests.fuzz.front_draw import parsed_line
from tests.fuzz.outcome import Failure

H200_SMEM_BYTES = 232_448
FOUND = (
    "family=halo_sm80_f64 result=fprop precision=fp64 x=3,143,83,4 filters=48,2,5 stride=2,2 padding=0,0,2,2 "
    "first=channels_last_sliced second=channels_last_spaced layout=nhwc values=positive seed=10147 sm_count=1"
)
"""What the fuzzer found on an H200: a block that took all dynamic shared memory and had its Work besides."""


def test_a_block_leaves_shared_memory_for_its_work() -> None:
    problem = Problem("fprop", 3, 143, 83, 4, 48, 2, 5, (2, 2), (0, 0, 2, 2), dtype=torch.float64, layout="nhwc")
    layer = conv.layer_of(problem)
    found = tilings(layer, 132, H200_SMEM_BYTES)
    assert found and all(each.smem_bytes + WORK_BYTES <= H200_SMEM_BYTES for each in found)
    every = [Tiling(layer, shape, 1) for shape in fitting_shapes(layer)]
    assert any(H200_SMEM_BYTES - WORK_BYTES < each.smem_bytes <= H200_SMEM_BYTES for each in every)


def test_the_problem_that_was_found_is_right() -> None:
    assert not isinstance(check(parsed_line(FOUND), "cpu"), Failure)
