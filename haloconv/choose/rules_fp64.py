"""Layers in fp64 on which ``halo_sm80_f64`` was measured ahead: a part of haloconv/choose/rules.py."""

from __future__ import annotations

import torch

from haloconv.problem import Problem

_LEAST_PIXELS = 3136  # of all images: the least that was measured
_LEAST_CHANNELS = 64


def is_dense_in_fp64(problem: Problem) -> bool:
    """3x3 layers of stride 1 of as many channels and pixels as in rows of an NVIDIA H100 (2026-11-26).

    There all 26, of both layouts, were ahead, ``fprop`` and ``dgrad`` by more than two; all gave the numbers, and none
    was kept to judge them. A dilation of 12 was measured in ``wgrad`` alone: no block of the others holds its halo.
    """
    if problem.dtype != torch.float64 or problem.groups > 1 or problem.stride != (1, 1):
        return False
    enough = min(problem.c, problem.k) >= _LEAST_CHANNELS and problem.n * problem.p * problem.q >= _LEAST_PIXELS
    return enough and (problem.r, problem.s) == (3, 3)
