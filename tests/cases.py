"""The one list of named problems for the CPU tests, the GPU tests and the sanitizer driver, each with its reason.

Extents are small: a case exists for the path it takes through a kernel, not for its size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from haloconv.layout import Layout
from haloconv.problem import ConvSpec, Direction, FourSides, Pair, Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
EMULATOR_SEEDS = (0, 1)  # every planted fault shows under one of them


class Tensors(NamedTuple):
    """The operands of one case. ``x`` is (N, C, H, W), ``w`` (K, C/G, R, S), ``b`` (K,), ``dy`` (N, K, P, Q)."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None
    dy: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        """Each operand changed; a bias that is not there stays away."""
        return Tensors(change(self.x), change(self.w), None if self.b is None else change(self.b), change(self.dy))


@dataclass(frozen=True)
class Case:
    """One named problem.

    ``extents`` is (N, C, H, W, K, R, S). ``storage`` says how x and dy lie in memory, ``w_storage`` how the filter
    does; both name an entry of ``STORAGES``.
    """

    name: str
    reason: str
    extents: tuple[int, int, int, int, int, int, int]
    spec: ConvSpec = ConvSpec()
    bias: bool = True
    dtypes: tuple[torch.dtype, ...] = DTYPES
    storage: str = "contiguous"
    w_storage: str = "contiguous"

    def problem(self, direction: Direction = "fprop", dtype: torch.dtype = torch.float32) -> Problem:
        """The case as a problem of haloconv, in the layout that its storage suggests."""
        s = self.spec
        layout: Layout = "nhwc" if self.storage.startswith("channels_last") else "nchw"
        return Problem(
            direction, *self.extents, stride=s.stride, padding=s.padding, dilation=s.dilation, groups=s.groups,
            bias=self.bias and direction == "fprop", dtype=dtype, layout=layout,
        )  # fmt: skip

    def on(self, family: str) -> Case:
        """The same case with one family forced."""
        return replace(self, spec=self.spec._replace(family=family))


def case(
    name: str, reason: str, x: tuple[int, int, int, int], filters: tuple[int, int, int], *, stride: int | Pair = 1,
    padding: int | Pair | FourSides = 0, dilation: int | Pair = 1, groups: int = 1, **fields: Any,
) -> Case:  # fmt: skip
    """A case from the input shape (N, C, H, W), the filters (K, R, S) and layer parameters in their short forms."""
    sides = (padding,) * 4 if isinstance(padding, int) else padding
    if len(sides) == 2:
        sides = (sides[0], sides[0], sides[1], sides[1])
    spec = ConvSpec(stride=_pair(stride), padding=sides, dilation=_pair(dilation), groups=groups)
    return Case(name, reason, (*x, *filters), spec, **fields)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


CASES: tuple[Case, ...] = (
    # borders and padding
    case("plain_3x3", "the commonest layer, no border", (2, 8, 12, 14), (16, 3, 3)),
    case("border_3x3", "padding on every side, interior and border tiles", (2, 8, 19, 37), (16, 3, 3), padding=1),
    case("small_a", "case A in small: 5x9, padding and dilation that differ by axis", (2, 32, 24, 40), (64, 5, 9),
         padding=(2, 4), dilation=(2, 3)),
    case("small_b", "case B in small: 5x9 without padding", (1, 32, 20, 36), (64, 5, 9)),
    case("four_sides", "four different paddings", (2, 5, 9, 11), (7, 3, 4), padding=(0, 2, 3, 1)),
    case("padding_one_side", "padding at the bottom and the right only, as 'same' with an even filter",
         (1, 6, 10, 10), (6, 2, 4), padding=(0, 1, 1, 2)),
    case("padding_beyond_filter", "padding wider than the filter: outputs made of padding alone, equal to the bias",
         (1, 3, 4, 5), (4, 2, 2), padding=(3, 4, 5, 3)),
    case("padding_with_stride", "stride does not divide the padded extent: unused bottom rows get zero gradient",
         (2, 4, 10, 13), (6, 3, 3), stride=(3, 4), padding=(1, 0, 2, 1)),
    # extents
    case("odd_widths", "nothing is a multiple of two", (3, 7, 13, 17), (11, 3, 5), padding=(1, 2)),
    case("primes", "every extent prime and larger than one tile", (1, 17, 23, 67), (67, 3, 3), padding=1),
    case("one_pixel_image", "1x1 image under a padded 3x3 filter: one live tap", (4, 16, 1, 1), (8, 3, 3), padding=1),
    case("few_tiles", "few pixels and many channels: parts of a sum in different blocks of threads", (1, 128, 5, 7),
         (128, 3, 3), padding=1),
    case("one_pixel_output", "filter as large as the image", (3, 6, 7, 9), (10, 7, 9)),
    case("one_row", "H = 1", (2, 8, 1, 70), (8, 1, 3), padding=(0, 1)),
    case("one_column", "W = 1", (2, 8, 70, 1), (8, 3, 1), padding=(1, 0)),
    case("wide", "W beyond several tiles", (1, 4, 3, 517), (8, 3, 3), padding=1),
    case("tall", "H beyond several tiles", (1, 4, 517, 3), (8, 3, 3), padding=1),
    case("many_images", "large batch of tiny images: the reduction of the filter gradient runs over N",
         (131, 3, 5, 5), (5, 3, 3), padding=1),
    case("one_channel_in", "C = 1", (2, 1, 15, 16), (12, 3, 3), padding=1),
    case("one_filter", "K = 1", (2, 12, 15, 16), (1, 3, 3), padding=1),
    case("one_by_one_everything", "every extent is 1", (1, 1, 1, 1), (1, 1, 1)),
    case("many_channels", "C and K beyond several channel tiles, not multiples of them", (1, 150, 6, 7), (141, 3, 3),
         padding=1),
    case("rgb_stem", "C = 3, 7x7, stride 2", (2, 3, 33, 35), (64, 7, 7), stride=2, padding=3),
    case("no_bias", "bias absent", (2, 8, 9, 10), (8, 3, 3), padding=1, bias=False),
    # filters
    case("pointwise", "1x1: a plain matrix product", (2, 33, 9, 11), (35, 1, 1)),
    case("pointwise_stride", "1x1 with stride: most of dx is exactly zero", (2, 10, 9, 12), (6, 1, 1), stride=(2, 3)),
    case("row_filter", "1xS", (2, 8, 9, 40), (8, 1, 15), padding=(0, 7)),
    case("column_filter", "Rx1", (2, 8, 40, 9), (8, 15, 1), padding=(7, 0)),
    case("even_filter", "even R and S", (2, 5, 12, 11), (6, 4, 2), padding=(2, 1)),
    case("large_filter", "13x11 filter, halo larger than the tile", (1, 4, 20, 22), (4, 13, 11), padding=(6, 5)),
    case("huge_filter", "31x31 filter larger than the image", (1, 2, 14, 15), (3, 31, 31), padding=15),
    # stride and dilation
    case("stride_2", "stride 2", (2, 8, 15, 18), (8, 3, 3), stride=2, padding=1),
    case("stride_mixed", "strides that differ by axis", (2, 6, 17, 16), (9, 3, 3), stride=(1, 3), padding=1),
    case("stride_beyond_filter", "stride larger than the filter: pixels that no tap reads", (2, 4, 21, 23), (5, 2, 3),
         stride=(5, 4)),
    case("dilated", "dilation 2", (2, 8, 15, 17), (8, 3, 3), padding=2, dilation=2),
    case("dilated_far", "dilation 12 reaches over the whole image", (1, 6, 26, 27), (5, 3, 3), padding=12, dilation=12),
    case("dilated_strided", "stride and dilation with a common divisor: only some dx pixels are reached",
         (2, 5, 19, 22), (6, 3, 3), stride=(2, 4), padding=(2, 3), dilation=(4, 2)),
    case("dilated_strided_coprime", "stride and dilation without a common divisor", (2, 5, 19, 22), (6, 3, 4),
         stride=(3, 2), padding=(1, 3, 4, 2), dilation=(2, 3)),
    # groups
    case("groups_2", "two groups", (2, 8, 11, 12), (10, 3, 3), padding=1, groups=2),
    case("groups_odd", "three groups of odd width", (2, 15, 9, 10), (21, 3, 3), padding=1, groups=3),
    case("groups_32", "ResNeXt-like, four channels per group", (1, 128, 7, 8), (128, 3, 3), padding=1, groups=32),
    case("depthwise", "one channel per group", (2, 19, 14, 15), (19, 3, 3), padding=1, groups=19),
    case("depthwise_7x7", "ConvNeXt-like", (1, 24, 20, 21), (24, 7, 7), padding=3, groups=24),
    case("depthwise_multiplier", "three filters per channel", (2, 6, 11, 13), (18, 3, 3), padding=1, groups=6),
    case("depthwise_stride", "depthwise with stride and uneven padding", (2, 9, 16, 15), (9, 5, 5), stride=2,
         padding=(2, 1, 1, 2), groups=9),
    case("groups_many_to_one", "one filter per group of several channels", (2, 12, 9, 8), (4, 3, 3), groups=4),
    # more blocks than the second and third extent of a CUDA grid allow (65535)
    case("many_more_images", "N beyond 65535", (65601, 1, 2, 3), (2, 2, 2)),
    case("many_more_filters", "K beyond 65535", (1, 2, 3, 2), (65601, 1, 2)),
    case("many_more_groups", "G beyond 65535", (1, 65601, 2, 3), (65601, 2, 2), groups=65601),
    case("much_taller", "H beyond 65535 tiles of eight rows", (1, 1, 540000, 2), (1, 3, 2), padding=(1, 0)),
    case("much_wider", "W beyond 65535 tiles of eight columns", (1, 1, 2, 540000), (1, 2, 3), padding=(0, 1)),
    # storage
    case("channels_last", "NHWC activations", (2, 16, 13, 18), (24, 3, 3), padding=1, storage="channels_last"),
    case("channels_last_odd", "NHWC with channels that fill no vector", (2, 5, 9, 11), (7, 3, 3), padding=1,
         stride=2, storage="channels_last"),
    case("channels_last_filter", "NHWC activations and filter", (2, 8, 12, 9), (12, 3, 3), padding=1,
         storage="channels_last", w_storage="channels_last"),
    case("channels_last_groups", "NHWC with groups", (2, 12, 9, 10), (18, 3, 3), groups=3, padding=1,
         storage="channels_last"),
    case("channels_last_depthwise", "NHWC depthwise", (1, 20, 12, 13), (20, 3, 3), groups=20, padding=1,
         storage="channels_last"),
    case("channels_last_many_pixels", "a slice of NHWC with so many pixels that their sum comes in parts",
         (1, 4, 50, 61), (9, 1, 1), storage="channels_last_sliced"),
    case("channels_last_sliced", "a channel slice of an NHWC tensor: rows not dense, not aligned",
         (2, 6, 9, 10), (8, 3, 3), padding=1, storage="channels_last_sliced"),
    case("mixed_layouts", "NCHW activations with a channels_last filter", (2, 8, 10, 12), (8, 3, 3), padding=1,
         w_storage="channels_last"),
    case("sliced", "a window of a larger image, as a crop makes it", (2, 8, 12, 16), (8, 3, 3), padding=1,
         storage="sliced", w_storage="sliced"),
    case("sliced_many_pixels", "the same with rows that many lanes of a sum have to leave", (1, 6, 62, 61), (2, 1, 1),
         storage="sliced"),
    case("every_other_pixel", "stride 2 between the columns in memory", (2, 4, 9, 12), (8, 3, 3), padding=1,
         storage="every_other_pixel"),
    case("channel_slice", "a slice of the channels, as a split makes it", (2, 8, 8, 8), (8, 3, 3), padding=1,
         storage="channel_slice"),
    case("transposed", "H and W swapped in memory", (2, 8, 12, 16), (8, 3, 3), padding=1, storage="transposed",
         w_storage="transposed"),
    case("aligned_rows", "rows and channels that begin at 16-byte boundaries", (1, 16, 6, 48), (24, 3, 3), padding=1),
    case("joined_rows", "rows that do not, and channels that do", (2, 16, 4, 10), (24, 3, 3), padding=1),
    case("unaligned", "first element not at a vector boundary, extents that would allow vectors", (2, 8, 16, 32),
         (16, 3, 3), padding=1, storage="unaligned", w_storage="unaligned"),
    case("unaligned_channels_last", "unaligned NHWC", (2, 16, 8, 8), (16, 3, 3), padding=1,
         storage="channels_last_unaligned", w_storage="unaligned"),
    case("unaligned_pointwise", "unaligned 1x1", (1, 16, 8, 16), (16, 1, 1), storage="unaligned",
         w_storage="unaligned"),
    case("expanded", "one image seen as a batch: stride 0", (4, 6, 9, 10), (8, 3, 3), padding=1, storage="expanded"),
    # nothing to multiply
    case("empty_batch", "N = 0: empty y and dx, dw and db are zero", (0, 4, 8, 9), (6, 3, 3), padding=1),
    case("empty_batch_groups", "N = 0 with groups, channels_last", (0, 4, 8, 9), (6, 3, 3), groups=2,
         storage="channels_last"),
)  # fmt: skip

BY_NAME = {one.name: one for one in CASES}
FULL_CASES = tuple(one for one in CASES if one.extents[0] > 0)


def pick(*names: str) -> tuple[Case, ...]:
    """Cases by name; KeyError for a name that is not in the list."""
    return tuple(BY_NAME[name] for name in names)


def case_id(value: object) -> str | None:
    """Readable pytest ids for cases and dtypes."""
    if isinstance(value, Case):
        return value.name
    return DTYPE_NAMES.get(value) if isinstance(value, torch.dtype) else None


def case_dtypes(cases: Iterable[Case] = CASES) -> list[tuple[Case, torch.dtype]]:
    """Every case with every dtype that it is meant for."""
    return [(one, dtype) for one in cases for dtype in one.dtypes]


# Storage ------------------------------------------------------------------------------------------------------------


def _window(t: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    """The values of ``t`` inside a larger tensor of NaN, with ``before`` and ``after`` extra elements per axis."""
    shape = [extent + lo + hi for extent, lo, hi in zip(t.shape, before, after, strict=True)]
    outer = torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)
    view = outer[tuple(slice(lo, lo + extent) for extent, lo in zip(t.shape, before, strict=True))]
    return view.copy_(t)


def _unaligned(t: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


def _nhwc(t: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return store(t.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


def _every_other_pixel(t: torch.Tensor) -> torch.Tensor:
    outer = torch.full((*t.shape[:3], 2 * t.shape[3]), float("nan"), dtype=t.dtype, device=t.device)
    return outer[..., ::2].copy_(t)


STORAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "channels_last_sliced": lambda t: _nhwc(t, lambda u: _window(u, (0, 0, 0, 1), (0, 0, 0, 2))),
    "channels_last_spaced": lambda t: _nhwc(t, lambda u: _window(u, (0, 0, 0, 0), (0, 0, 0, 4))),
    "channels_last_unaligned": lambda t: _nhwc(t, _unaligned),
    "sliced": lambda t: _window(t, (0, 0, 1, 3), (0, 1, 2, 2)),
    "every_other_pixel": _every_other_pixel,
    "channel_slice": lambda t: _window(t, (0, 1, 0, 0), (0, 2, 0, 0)),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "unaligned": _unaligned,
    "batch_last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda t: t[:1].contiguous().expand_as(t),
    "expanded_channels": lambda t: t[:, :1].contiguous().expand_as(t),
    "expanded_columns": lambda t: t[..., :1].contiguous().expand_as(t),
}


def store(t: torch.Tensor, storage: str) -> torch.Tensor:
    """The 4-d tensor ``t`` in another storage. Expanded ones repeat the first image, channel or column of ``t``."""
    return STORAGES[storage](t)


# Values -------------------------------------------------------------------------------------------------------------


def generator(name: str, device: torch.device | str) -> torch.Generator:
    """A generator seeded by a name, so that a case's numbers do not depend on the order of the tests."""
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def _wide(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    reach = 3.0 if dtype == torch.float16 else 12.0
    sign_and_mantissa = torch.randn(shape, generator=gen, device=gen.device, dtype=torch.float64)
    exponent = (torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64) * 2 - 1) * reach
    return sign_and_mantissa * torch.exp2(exponent.round())


def _cancellation(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Neighbours along W of nearly equal size and opposite sign: smooth filters sum them to a small rest."""
    values = 1 + torch.randn(shape, generator=gen, device=gen.device, dtype=torch.float64) / 64
    values[..., 1::2] *= -1
    return values


def _denormal(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Every value below the smallest normal number of ``dtype``."""
    values = torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64) * 0.9 + 0.05
    values *= torch.finfo(dtype).smallest_normal
    return values


VALUES: dict[str, Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]] = {
    "normal": lambda shape, dtype, gen: torch.randn(shape, generator=gen, device=gen.device, dtype=torch.float64),
    "positive": lambda shape, dtype, gen: torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64),
    "wide": _wide,
    "cancellation": _cancellation,
    "denormal": _denormal,
}
# A power of two that lifts the product with a denormal operand back into the normal range of the dtype.
DENORMAL_PARTNER = {torch.float32: 2.0**40, torch.bfloat16: 2.0**40, torch.float16: 2.0**9, torch.float64: 2.0**900}


def values(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator, kind: str = "normal") -> torch.Tensor:
    """Random numbers of one kind (a key of ``VALUES``), rounded to ``dtype``, on the generator's device."""
    return VALUES[kind](shape, dtype, gen).to(dtype)


def make(one: Case, dtype: torch.dtype, device: torch.device | str = "cpu", kind: str = "normal") -> Tensors:
    """The tensors of a case, stored as it asks; the filter is scaled to keep y near 1 for normal values."""
    problem, gen = one.problem(dtype=dtype), generator(f"{one.name} {kind}", device)
    fan_in = max(1, problem.c_per_group * problem.r * problem.s)
    w = (values(problem.w_shape, torch.float64, gen, kind if kind != "denormal" else "normal") * fan_in**-0.5).to(dtype)
    b = values((problem.k,), dtype, gen, "normal") if one.bias else None
    x = store(values(problem.x_shape, dtype, gen, kind), one.storage)
    dy = store(values(problem.y_shape, dtype, gen, kind), one.storage)
    return Tensors(x, store(w, one.w_storage), b, dy)


def with_special(t: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """A copy of ``t`` with a NaN, a +Inf and a -Inf at three different random places (fewer if ``t`` is smaller)."""
    flat = t.contiguous().clone().flatten()
    places = torch.randperm(flat.numel(), generator=gen, device=gen.device)[:3]
    special = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=t.dtype, device=t.device)
    flat[places] = special[: places.numel()]
    return flat.view(t.shape)
