"""The cases that any family may run on the emulator, from the shared list and beyond it."""

from __future__ import annotations

from tests.cases import CASES, case

LARGE_OUTPUTS = 10_000

# Cases left out, with the reason.
LEFT_OUT = {
    "many_more_groups": "65601 groups, a block for each: 75 s for three seeds; the GPU tests run it",
    "empty_batch": "nothing to launch",
    "empty_batch_groups": "nothing to launch",
}
# Cases of 65601 images or filters, 540000 rows or columns: on direct only, and without what takes ten seconds a seed.
HUGE = ("many_more_images", "many_more_filters", "much_taller", "much_wider")
HUGE_LEFT_OUT = (("many_more_filters", "bgrad"), ("much_taller", "wgrad"), ("much_wider", "wgrad"))

LARGE = (
    case("wide_bottom_right", "padding at the bottom and the right, rows longer than a warp", (1, 8, 6, 70), (8, 3, 3),
         padding=(0, 2, 0, 2)),
    case("large_3x3", "at least 10,000 outputs and 10,000 inputs", (2, 8, 24, 40), (16, 3, 3), padding=1),
    case("large_nhwc", "the same in NHWC, with stride", (2, 16, 33, 41), (24, 3, 3), padding=1, stride=(1, 2),
         storage="channels_last"),
    case("large_filter_gradient", "at least 10,000 filter elements", (1, 32, 9, 12), (36, 3, 3), padding=1),
    case("large_depthwise", "at least 10,000 outputs, one channel per group", (1, 24, 20, 24), (24, 7, 7), padding=3,
         groups=24),
)  # fmt: skip

ON_EMULATOR = (*(one for one in CASES if one.name not in LEFT_OUT), *LARGE)

# Problems whose paths differ by dtype: vector widths, thread tiles of fp64, conversions. The others run in fp32 only.
EVERY_DTYPE = (
    "border_3x3", "four_sides", "odd_widths", "one_by_one_everything", "many_images", "many_channels",
    "dilated_strided_coprime", "groups_odd", "depthwise_multiplier", "channels_last", "channels_last_odd", "unaligned",
    "large_3x3", "large_nhwc",
)  # fmt: skip
