"""Image sizes choose among few kernels of halo_sm90: over many sizes a layer compiles a bounded number."""

from __future__ import annotations

import random

import pytest
import torch

from haloconv.families.base import TensorForm, strides_of
from haloconv.problem import Conv2dProblem
from tests.tilings import chosen_texts

MOST = 24  # three ways to stage (aligned rows, joined rows, loads), by eight tile shapes


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_many_image_sizes_need_few_kernels(direction: str, layout: str) -> None:
    rng, digests = random.Random(layout), set()
    for _ in range(200):
        n, h, w = rng.randint(1, 9), rng.randint(5, 160), rng.randint(5, 160)
        problem = Conv2dProblem(
            direction, n, 32, h, w, 64, 3, 3, padding=(1, 1, 1, 1), dtype=torch.float16, layout=layout
        )
        shapes = (problem.x_shape if direction == "fprop" else problem.y_shape, problem.w_shape)
        forms = [TensorForm(strides_of(shape, layout), True) for shape in shapes]
        digests |= {text.digest for text in chosen_texts(problem, *forms, layout)}
    assert 1 < len(digests) <= MOST
