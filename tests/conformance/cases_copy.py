"""cp.async, mbarriers and bulk copies, named barriers, tensor maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from haloconv.emulator.tensor_map import DataType, OutOfBounds, Swizzle
from tests.conformance import formats
from tests.conformance.case import SENTINEL, Case, MapSpec, Random, Setup

_SPANS = {Swizzle.NONE: 0, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}
_NUMPY = {DataType.FLOAT32: np.float32, DataType.TFLOAT32: np.float32, DataType.FLOAT16: np.uint16,
          DataType.BFLOAT16: np.uint16, DataType.UINT8: np.uint8, DataType.INT32: np.uint32}  # fmt: skip

_TFLOAT32_SPECIALS = (
    # NaNs: quiet, all ones, of low or of lowest payload, quiet and noisy; infinity; the largest numbers.
    0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7F801000, 0x7F800FFF, 0x7F802000, 0x7FC01FFF, 0x7FFFEFFF,
    0x7F800000, 0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x7F7FE000, 0x7F7FD000, 0x00000000, 0x3F800000,
    # Denormals, and the smallest numbers that are not.
    0x00000001, 0x00000FFF, 0x00001000, 0x00001001, 0x00001FFF, 0x00002FFF, 0x00003000, 0x00400000,
    0x007FEFFF, 0x007FF000, 0x007FFFFF, 0x00800000, 0x00800FFF, 0x00801000, 0x00801001, 0x00803000,
    # Halves and their neighbours, above even and odd, and where the fraction overflows.
    0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F802FFF, 0x3F803000, 0x3F803001, 0x3FFFEFFF, 0x3FFFF000,
    0x3FFFF001, 0x3FFFFFFF, 0x42F6E979, 0x42F6F000, 0x42F6EFFF, 0x42F6F001, 0x42F71000, 0x42F70FFF,
    0x7EFFEFFF, 0x7EFFF000, 0x7EFFF001, 0x7EFFFFFF, 0x00FFEFFF, 0x00FFF000, 0x00FFF001, 0x00FFFFFF,
    0x7F000FFF, 0x7F001000, 0x7F001001, 0x7F003000, 0x01000FFF, 0x01001000, 0x01001001, 0x01003000,
)  # fmt: skip


def _cp_async(by_barrier: bool) -> Setup:
    random = Random("cp.async")
    data = random.words(64, 4)
    sizes = np.concatenate(
        [random.integers(0, 4, 64, 4), random.integers(0, 8, 64, 2), random.integers(0, 16, 64, 1)], 1
    )
    bytes_in = data.view(np.uint8).reshape(64, 16)
    out = np.zeros((3, 64, 16), np.uint8)
    for region, (first, size) in enumerate(((0, 4), (4, 8), (6, 16))):
        for part in range(16 // size):
            for thread in range(64):
                begin, wanted = part * size, sizes[thread, first + part]
                out[region, thread, begin : begin + wanted] = bytes_in[thread, begin : begin + wanted]
    words = out.view(np.uint32).reshape(-1)
    return Setup((data, sizes.astype(np.uint32)), (words, words[: 64 * 4 : 4].copy()), (int(by_barrier),))


def _bulk(size: int) -> Setup:
    data = Random(f"bulk {size}").words(3, size // 4)
    return Setup((data,), (data + np.uint32(1),), (size,))


def _barriers() -> Setup:
    data = Random("barriers").words(4, 128)
    return Setup((data,), (data + data[:, ::-1],))


def _alternating() -> Setup:
    data = Random("alternating").words(8, 64)
    return Setup((data,), (data,))


# Tensor maps ---------------------------------------------------------------------------------------------------------


def _tensor(random: Random, kind: DataType, shape: Sequence[int]) -> np.ndarray:
    """A tensor of finite numbers; ``shape`` is outermost first."""
    if kind in (DataType.FLOAT32, DataType.TFLOAT32):
        return random.floats(*shape)
    if kind == DataType.INT32:
        return random.words(*shape)
    bits = random.words(*shape) % np.uint32(0x7000)
    return bits.astype(_NUMPY[kind])


def _arguments(
    kind: DataType, tensor: np.ndarray, box: Sequence[int], swizzle: Swizzle, steps: Sequence[int] | None = None,
    fill: OutOfBounds = OutOfBounds.ZERO,
) -> dict:  # fmt: skip
    """The encoder's arguments for a whole contiguous tensor, innermost dimension first."""
    return {
        "data_type": int(kind), "extents": tensor.shape[::-1], "strides": tensor.strides[::-1][1:], "box": tuple(box),
        "element_strides": tuple(steps or (1,) * tensor.ndim), "swizzle": int(swizzle), "out_of_bounds": int(fill),
    }  # fmt: skip


def _scattered(dense: np.ndarray, offset: int, span: int) -> np.ndarray:
    """A dense box's bytes as they lie at shared address `offset` (modulo the swizzle's pattern)."""
    raw = dense.reshape(-1).view(np.uint8)
    places = formats.swizzled(np.arange(raw.size) + offset, span) - offset
    out = np.empty_like(raw)
    out[places] = raw
    return out


def _box_of(tensor: np.ndarray, at: Sequence[int], box: Sequence[int], steps: Sequence[int], fill: float) -> np.ndarray:
    """Elements of the box, outermost first; ``fill`` outside the tensor."""
    indices, mask = [], np.ones((), bool)
    for axis in range(tensor.ndim):
        dimension = tensor.ndim - 1 - axis
        step = steps[dimension] if dimension else 1
        places = at[dimension] + np.arange(-(-box[dimension] // step)) * step
        mask = mask[..., None] & ((places >= 0) & (places < tensor.shape[axis]))
        indices.append(np.clip(places, 0, tensor.shape[axis] - 1))
    values = tensor[np.ix_(*indices)]
    return np.where(mask, values, np.array(fill, tensor.dtype)).astype(tensor.dtype)


def _load(
    kind: DataType, shape: Sequence[int], box: Sequence[int], at: Sequence[int], swizzle: Swizzle,
    steps: Sequence[int] | None = None, fill: OutOfBounds = OutOfBounds.ZERO, offset: int = 0,
) -> Setup:  # fmt: skip
    tensor = _tensor(Random(f"tensor {kind} {tuple(shape)}"), kind, shape)
    steps = tuple(steps or (1,) * len(shape))
    outside = 0 if fill == OutOfBounds.ZERO else np.nan
    read = tensor
    if kind == DataType.TFLOAT32:
        read = formats.loaded_tf32_bits(tensor).view(np.float32)
    dense = _box_of(read, at, box, steps, outside)
    expected = _scattered(dense, offset, _SPANS[swizzle]).view(dense.dtype)
    spec = MapSpec("in0", _arguments(kind, tensor, box, swizzle, steps, fill))
    scalars = (0, len(shape), expected.nbytes, offset, *at, *[0] * (5 - len(at)))
    return Setup((tensor,), (expected,), scalars, (spec,))


def _tfloat32_specials() -> Setup:
    """What a TFLOAT32 load makes of each special word, bit for bit."""
    words = np.array(_TFLOAT32_SPECIALS, np.uint32)
    tensor = np.stack([words, words | np.uint32(1 << 31)]).reshape(-1, 32)
    expected = formats.loaded_tf32_bits(tensor.view(np.float32))
    box = tensor.shape[::-1]
    spec = MapSpec("in0", _arguments(DataType.TFLOAT32, tensor, box, Swizzle.NONE))
    return Setup((tensor,), (expected,), (0, 2, expected.nbytes, 0, 0, 0), (spec,))


def _store(
    kind: DataType, shape: Sequence[int], box: Sequence[int], at: Sequence[int], swizzle: Swizzle, offset: int = 0,
    beyond: int = 0,
) -> Setup:  # fmt: skip
    """A store; the last elements of a row are ``beyond`` the map's extent, and the last chunk may write to them."""
    random = Random(f"store {kind} {tuple(shape)}")
    before = np.full(int(np.prod(shape)) * np.dtype(_NUMPY[kind]).itemsize, SENTINEL, np.uint8)
    tensor = before.view(_NUMPY[kind]).reshape(shape).copy()
    values = _tensor(random, kind, tuple(box)[::-1])
    per = 16 // values.itemsize
    written = (*shape[:-1], -(-(shape[-1] - beyond) // per) * per)  # whole chunks of 16 bytes
    for index in np.ndindex(*values.shape):
        place = tuple(at[len(at) - 1 - axis] + i for axis, i in enumerate(index))
        if all(0 <= p < extent for p, extent in zip(place, written, strict=True)):
            tensor[place] = values[index]
    image = _scattered(values, offset, _SPANS[swizzle]).view(np.uint32)
    arguments = _arguments(kind, tensor, box, swizzle)
    arguments["extents"] = (shape[-1] - beyond, *arguments["extents"][1:])
    spec = MapSpec("out0", arguments)
    scalars = (1, len(shape), image.nbytes, offset, *at, *[0] * (5 - len(at)))
    return Setup((np.zeros(4, np.uint32), image), (tensor,), scalars, (spec,))


def _im2col(
    extents: Sequence[int], lower: Sequence[int], upper: Sequence[int], steps: Sequence[int], base: Sequence[int],
    offsets: Sequence[int], channels: int, pixels: int, swizzle: Swizzle,
) -> Setup:  # fmt: skip
    """``extents`` (n, h, w, c); ``lower``, ``upper``, ``steps``, ``offsets`` are (w, h); ``base`` (c, w, h, n)."""
    tensor = Random(f"im2col {tuple(extents)}").floats(*extents)
    n_extent, h_extent, w_extent, _ = extents
    (c, w, h, n), rows = base, []
    for _ in range(pixels):
        at_h, at_w = h + offsets[1], w + offsets[0]
        inside = 0 <= at_h < h_extent and 0 <= at_w < w_extent and 0 <= n < n_extent
        rows.append(tensor[n, at_h, at_w, c : c + channels] if inside else np.zeros(channels, np.float32))
        w += steps[0]
        if w >= w_extent + upper[0]:
            w, h = lower[0], h + steps[1]
            if h >= h_extent + upper[1]:
                h, n = lower[1], n + 1
    dense = np.stack(rows)
    expected = _scattered(dense, 0, _SPANS[swizzle]).view(np.float32)
    arguments = {
        "data_type": int(DataType.FLOAT32), "extents": tensor.shape[::-1], "strides": tensor.strides[::-1][1:],
        "lower_corner": tuple(lower), "upper_corner": tuple(upper), "channels_per_pixel": channels,
        "pixels_per_column": pixels, "element_strides": (1, *steps, 1), "swizzle": int(swizzle),
    }  # fmt: skip
    scalars = (2, 4, expected.nbytes, 0, *base, 0, *offsets)
    return Setup((tensor,), (expected,), scalars, (MapSpec("in0", arguments, im2col=True),))


def _five_dimensions() -> Iterator[tuple[str, Callable[[], Setup]]]:
    """Boxes of 1 element in middle dimensions, outside on several sides at once, at byte 128 of the pattern."""
    b128, shape = Swizzle.B128, (3, 4, 5, 6)
    # The box's dimensions 1 to 4 and its corner there; dimension 0 begins `first` chunks of 16 bytes after the row.
    places = (
        ("low", (5, 1, 3, 2), -1, (-2, 2, -1, -1)),
        ("high", (5, 1, 3, 2), 3, (4, 4, 2, 2)),
        ("low_high", (5, 1, 3, 2), -1, (-2, 0, 2, 2)),
        ("high_low", (5, 1, 3, 2), 3, (3, 3, -2, -1)),
        ("ones", (8, 1, 1, 5), -2, (-1, 3, 2, -1)),
        ("both_sides", (8, 7, 1, 1), -3, (-1, -1, 3, 2)),
        ("below_in_a_one", (5, 1, 3, 2), 1, (-1, -1, 2, 0)),
        ("beyond_in_a_one", (5, 3, 1, 2), -1, (3, 3, 4, 2)),
        ("beyond_in_all", (5, 1, 3, 2), 9, (6, 5, 4, 3)),
    )
    ends = (
        ("high", (5, 1, 3, 2), 3, (4, 4, 2, 2)),
        ("ones", (8, 1, 1, 5), 2, (3, 3, 2, 1)),
        ("inner", (5, 1, 3, 1), 5, (1, 2, 1, 2)),
        ("beyond_in_a_one", (5, 1, 3, 2), 0, (2, 5, 1, 1)),
    )
    for kind, name, per in ((DataType.FLOAT32, "fp32", 4), (DataType.FLOAT16, "fp16", 8)):
        whole = (*shape, 9 * per)
        for place, box, first, corner in places:
            load = partial(_load, kind, whole, (8 * per, *box), (first * per, *corner), b128, offset=128)
            yield f"128_5d_{name}_{place}", load
        for place, box, first, corner in ends:
            store = partial(_store, kind, whole, (8 * per, *box), (first * per, *corner), b128, offset=128)
            yield f"128_store_5d_{name}_{place}", store


def _tensor_cases() -> Iterator[tuple[str, Callable[[], Setup]]]:
    f32, f16, bf16, u8 = DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16, DataType.UINT8
    none, b32, b64, b128 = Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128
    yield "none_2d", partial(_load, f32, (40, 64), (24, 16), (8, 5), none)
    yield "none_2d_uint8", partial(_load, u8, (40, 64), (48, 9), (16, 5), none)
    for swizzle, span in ((b128, 128), (b64, 64), (b32, 32)):
        yield f"{span}_2d", partial(_load, f32, (40, 64), (span // 4, 24), (4, 5), swizzle)
        yield f"{span}_2d_corner_low", partial(_load, f32, (40, 64), (span // 4, 24), (-4, -7), swizzle)
        yield f"{span}_2d_corner_high", partial(_load, f32, (40, 64), (span // 4, 24), (60, 30), swizzle)
        yield f"{span}_2d_fp16", partial(_load, f16, (40, 64), (span // 2, 24), (8, 5), swizzle)
        yield f"{span}_3d", partial(_load, f32, (5, 12, 64), (span // 4, 9, 3), (0, -2, 3), swizzle)
        yield f"{span}_store", partial(_store, f32, (40, 64), (span // 4, 24), (52, 30), swizzle)
    # The pattern follows the address, not the first row of the box.
    yield "128_2d_at_row_3", partial(_load, f32, (40, 64), (32, 24), (4, 5), b128, offset=384)
    yield "64_2d_at_row_6", partial(_load, f32, (40, 64), (16, 24), (4, 5), b64, offset=384)
    yield "32_2d_at_row_12", partial(_load, f32, (40, 64), (8, 24), (4, 5), b32, offset=384)
    for swizzle, span in ((b128, 128), (b64, 64), (b32, 32)):
        for offset in (128, 896):
            name = f"{span}_2d_fp16_at_byte_{offset}"
            yield name, partial(_load, f16, (40, 64), (span // 2, 24), (8, 5), swizzle, offset=offset)
    yield "128_4d_halo", partial(_load, f32, (2, 10, 12, 32), (32, 12, 5, 1), (0, -1, -2, 1), b128)
    yield "128_4d_bf16", partial(_load, bf16, (2, 10, 12, 64), (64, 7, 3, 2), (0, 8, 8, 0), b128)
    yield "none_5d", partial(_load, f32, (2, 3, 4, 6, 8), (8, 5, 3, 2, 2), (0, 3, -1, 2, 1), none)
    yield "64_4d_steps", partial(_load, f32, (2, 10, 12, 16), (16, 8, 6, 1), (0, -1, 1, 1), b64, (1, 2, 3, 1))
    yield "64_2d_nan", partial(_load, f32, (40, 64), (16, 24), (56, 30), b64, fill=OutOfBounds.NAN)
    yield "128_2d_tfloat32", partial(_load, DataType.TFLOAT32, (40, 64), (32, 24), (4, 5), b128)
    yield "tfloat32_specials", _tfloat32_specials
    yield from _five_dimensions()
    yield "none_store_4d", partial(_store, f32, (2, 5, 6, 16), (12, 4, 3, 2), (8, 3, 3, 1), none)
    yield "none_store_3d", partial(_store, f16, (4, 5, 16), (16, 4, 2), (0, 2, 3), none)
    yield "none_store_5d", partial(_store, f32, (2, 2, 3, 4, 8), (4, 3, 2, 2, 1), (4, 2, 2, 1, 1), none)
    for beyond in (1, 3, 6):
        yield f"128_store_{beyond}_beyond", partial(_store, f32, (40, 64), (32, 24), (32, 5), b128, beyond=beyond)
        yield f"none_store_fp16_{beyond}_beyond", partial(_store, f16, (12, 64), (64, 9), (0, 2), none, beyond=beyond)
    # A 3x5 filter, padding (1, 2), at taps inside and at the edge; ends of rows, images and the batch.
    yield (
        "im2col_first",
        partial(_im2col, (2, 7, 9, 32), (-2, -1), (-2, -1), (1, 1), (0, -2, -1, 0), (0, 0), 32, 48, b128),
    )
    yield "im2col_tap", partial(_im2col, (2, 7, 9, 32), (-2, -1), (-2, -1), (1, 1), (0, 3, 2, 1), (4, 2), 32, 48, b128)
    yield "im2col_uneven", partial(_im2col, (2, 7, 9, 32), (-3, 0), (1, -2), (1, 1), (0, 3, 2, 0), (1, 2), 16, 80, b64)
    yield (
        "im2col_stride",
        partial(_im2col, (2, 7, 9, 32), (-2, -1), (-2, -1), (2, 2), (0, 2, 1, 0), (1, 1), 32, 24, b128),
    )
    yield (
        "im2col_channels",
        partial(_im2col, (2, 5, 6, 32), (0, 0), (0, 0), (1, 1), (16, 1, 1, 0), (0, 0), 16, 20, none),
    )


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield Case("cp_async_groups", "cp_async", 64, partial(_cp_async, False))
    yield Case("cp_async_mbarrier", "cp_async", 64, partial(_cp_async, True))
    yield Case("bulk_1024", "bulk", 64, partial(_bulk, 1024))
    yield Case("bulk_96", "bulk", 64, partial(_bulk, 96))
    yield Case("named_barriers", "barriers", 256, _barriers)
    yield Case("alternating", "alternating", 96, _alternating)
    for name, build in _tensor_cases():
        yield Case(f"tensor_{name}", "tensor", 64, build)
