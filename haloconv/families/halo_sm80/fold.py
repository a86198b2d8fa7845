"""Stems in channels_last as layers of a single channel, whose rows are all channels of their pixels end to end.

A tap of a row is then one channel of one pixel, so that a filter of 7 columns and three channels has 21, and nothing is
padded to four channels. Filters are such rows too, if they are channels_last.
"""

from __future__ import annotations

from dataclasses import replace

from haloconv.problem import Problem, TensorForm

_MOST_CHANNELS = 3  # four are a piece of their own


def has_folds(problem: Problem, *forms: TensorForm) -> bool:
    """Whether the problem is a stem, and tensors of these forms have all channels of a row's pixels end to end."""
    stem = problem.groups == 1 and 1 < problem.c <= _MOST_CHANNELS and problem.dilation[1] == 1
    return stem and all(form.strides[1] == 1 and form.strides[3] == problem.c for form in forms)


def fold(problem: Problem) -> Problem:
    """The problem with one channel."""
    channels = problem.c
    top, bottom, left, right = problem.padding
    return replace(
        problem, c=1, w=problem.w * channels, s=problem.s * channels,
        stride=(problem.stride[0], problem.stride[1] * channels),
        padding=(top, bottom, left * channels, right * channels),
    )  # fmt: skip


def folded(form: TensorForm) -> TensorForm:
    """How a tensor is stored, seen as rows of one channel."""
    n, _, h, _ = form.strides
    return TensorForm((n, n, h, 1), form.aligned)
