"""What grouped_sm90 runs on the emulator: strips, slabs and rings of both kernels, and tensors out of TMA's reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from tests.cases import Case, case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EVERY, HALVES = (FP32, FP16, BF16), (FP16, BF16)
DENSE, WGRAD = ("fprop", "dgrad"), ("wgrad",)

_DENSE_CASES = (
    case("grouped_strips", "two strips, a last slab that is not full, an even filter, four different paddings",
         (2, 80, 7, 45), (80, 2, 3), padding=(1, 0, 2, 1), groups=10, storage="channels_last"),
    case("grouped_wide", "groups of 16 channels, a filter of one column, padding beyond it", (3, 48, 8, 13),
         (48, 3, 1), padding=(3, 3, 1, 0), groups=3, storage="channels_last"),
    case("grouped_wrap", "blocks that go on in the next image, more rows than the ring has", (5, 16, 23, 9),
         (16, 5, 3), padding=(2, 1), groups=2, storage="channels_last"),
    case("grouped_unaligned", "channels that begin beside multiples of 16 bytes, which TMA does not copy",
         (2, 16, 7, 12), (16, 3, 3), padding=1, groups=2, storage="channels_last_unaligned"),
    case("grouped_spaced", "pixels that are no multiple of 16 bytes apart", (2, 16, 7, 12), (16, 3, 3), padding=1,
         groups=2, storage="channels_last_sliced"),
)  # fmt: skip
_WGRAD_CASES = (
    case("grouped_wgrad_strips", "two strips, a last slab that is not full, an even filter, four different paddings",
         (2, 80, 7, 45), (80, 2, 3), padding=(1, 0, 2, 1), groups=10, storage="channels_last", dtypes=HALVES),
    case("grouped_wgrad_wide", "groups of 16 channels, a filter of one column, padding beyond it", (3, 48, 8, 13),
         (48, 3, 1), padding=(3, 3, 1, 0), groups=3, storage="channels_last", dtypes=HALVES),
    case("grouped_wgrad_wrap", "blocks that go on in the next image, more rows than the ring has", (5, 16, 23, 9),
         (16, 5, 3), padding=(2, 1), groups=2, storage="channels_last", dtypes=HALVES),
    case("grouped_wgrad_loose", "pixels that meet rows and columns behind the last output", (3, 16, 5, 9), (16, 2, 6),
         groups=2, storage="channels_last", dtypes=HALVES),
    case("grouped_wgrad_large", "at least 10,000 filter elements", (2, 80, 6, 10), (80, 3, 3), padding=1, groups=5,
         storage="channels_last", dtypes=HALVES),
    case("grouped_wgrad_unaligned", "channels that begin beside multiples of 16 bytes, which TMA does not copy",
         (2, 16, 7, 12), (16, 3, 3), padding=1, groups=2, storage="channels_last_unaligned", dtypes=HALVES),
)  # fmt: skip
CASES = (*_DENSE_CASES, *_WGRAD_CASES)

# case, dtypes, results
_RUNS: tuple[tuple[str, tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("eight_by_eight_nhwc", (FP32, FP16), DENSE),
    ("grouped_strips", EVERY, DENSE),
    ("grouped_wide", (FP32, BF16), DENSE),
    ("grouped_wrap", (FP32, FP16), DENSE),
    ("grouped_unaligned", (FP16,), DENSE),
    ("grouped_spaced", (FP32,), DENSE),
    ("grouped_wgrad_strips", HALVES, WGRAD),
    ("grouped_wgrad_wide", HALVES, WGRAD),
    ("grouped_wgrad_wrap", HALVES, WGRAD),
    ("grouped_wgrad_large", HALVES, WGRAD),
    ("grouped_wgrad_unaligned", (FP16,), WGRAD),
    ("wgrad_groups_nhwc", (FP16,), WGRAD),
)
_NOT_FINITE: tuple[tuple[str, tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    ("eight_by_eight_nhwc", (FP32,), DENSE),
    ("grouped_strips", (FP32, FP16), DENSE),
    ("grouped_wgrad_loose", (FP16,), WGRAD),
)


def results_of(one: Case) -> tuple[str, ...]:
    """The results that a case is there for."""
    return WGRAD if one in _WGRAD_CASES else DENSE


def runs() -> Iterator[tuple[str, torch.dtype, str, str, bool]]:
    """Case, dtype, result, shape, and whether all inputs are finite."""
    for finite, listed in ((True, _RUNS), (False, _NOT_FINITE)):
        for name, dtypes, results in listed:
            yield from ((name, dtype, result, "", finite) for dtype in dtypes for result in results)


def forced(shape: str) -> AbstractContextManager[None]:
    """Nothing to force: the family has one config for a request."""
    return nullcontext()
