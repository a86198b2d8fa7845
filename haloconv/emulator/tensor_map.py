"""Tensor maps for the emulator: the driver's two encoders with their arguments, checks and limits.

The result is 128 bytes that only the emulator reads (a kernel's TensorMap argument). What the driver refuses raises
TensorMapError, and so does what the emulator does not model: interleaved layouts, swizzles of other than 16-byte
chunks, rows narrower than the swizzle. Order of dimensions: innermost first; strides in bytes, of dimensions 1 and up;
addresses in bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from haloconv.jit import TENSOR_MAP_BYTES, DataType, OutOfBounds, Pixels, Swizzle

_MAGIC = 0x70616D2D6F6C6168
_LAYOUT = struct.Struct("<QQ4Q5I5H4h2H8B5B")
_MAX_RANK, _MAX_EXTENT, _MAX_STRIDE, _MAX_BOX, _MAX_STEP = 5, 1 << 32, 1 << 40, 256, 8
_MAX_CHANNELS, _MAX_PIXELS = 256, 1024
_IM2COL_CORNER = 128
_TILED, _IM2COL = 0, 1


class TensorMapError(ValueError):
    """The driver would refuse these arguments, or the emulator does not model them; the message says which and why."""


_ELEMENT_BYTES = dict(zip(DataType, (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4), strict=True))
_FLOATING = frozenset(kind for kind in DataType if kind >= DataType.FLOAT16)
_UNMODELLED = frozenset({DataType.FLOAT32_FTZ, DataType.TFLOAT32_FTZ})
_SPANS = {Swizzle.NONE: 0, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}


class _Tensor(NamedTuple):
    """A tensor in memory as the driver is told of it: what both encoders have. ``steps`` are the element strides."""

    data_type: int
    address: int
    extents: Sequence[int]
    strides: Sequence[int]
    steps: Sequence[int]
    interleave: int
    swizzle: int
    out_of_bounds: int


class _Kind(NamedTuple):
    """A tensor's element type, its swizzle in shared memory, and what is read out of bounds."""

    elements: DataType
    swizzle: Swizzle
    fill: OutOfBounds


class _Pixels(NamedTuple):
    """What im2col loads: the lower and the upper corner (w, h), channels of a pixel, pixels of a column."""

    corners: tuple[int, ...] = (0, 0, 0, 0)
    channels: int = 0
    pixels: int = 0


def encode_tiled(
    data_type: int,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    *,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    out_of_bounds: int = 0,
    pixels: Pixels | None = None,
) -> bytes:
    """What cuTensorMapEncodeTiled encodes: boxes of ``box`` elements of a tensor of ``extents`` at ``address``.

    With ``pixels`` what cuTensorMapEncodeIm2col does, of a ``box`` of channels and pixels. Raises TensorMapError.
    """
    if pixels is not None:
        (lower, upper, of_pixels), (channels, count) = pixels, box
        modes = {"interleave": interleave, "swizzle": swizzle, "l2_promotion": l2_promotion}
        every = (1, *of_pixels, 1)
        return encode_im2col(
            data_type, address, extents, strides, lower, upper, channels, count, every, **modes,
            out_of_bounds=out_of_bounds,
        )  # fmt: skip
    steps = tuple(element_strides or (1,) * len(extents))
    tensor = _Tensor(data_type, address, extents, strides, steps, interleave, swizzle, out_of_bounds)
    kind = _checked(tensor)
    _require(len(box) == len(extents), f"a box of {len(box)} dimensions for a tensor of {len(extents)}")
    _require(all(1 <= size <= _MAX_BOX for size in box), f"box {tuple(box)}: each size is 1 to {_MAX_BOX}")
    _check_inner("box", box[0], kind)
    _require(0 <= l2_promotion <= 3, f"L2 promotion {l2_promotion} does not exist")
    return _encoded(tensor, kind, _TILED, box, _Pixels())


def encode_im2col(
    data_type: int,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    lower_corner: Sequence[int],
    upper_corner: Sequence[int],
    channels_per_pixel: int,
    pixels_per_column: int,
    element_strides: Sequence[int] | None = None,
    *,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    out_of_bounds: int = 0,
) -> bytes:
    """What cuTensorMapEncodeIm2col encodes for a tensor (c, w, h, n); corners are (w, h) in pixels.

    Raises TensorMapError.
    """
    steps = tuple(element_strides or (1,) * len(extents))
    tensor = _Tensor(data_type, address, extents, strides, steps, interleave, swizzle, out_of_bounds)
    kind = _checked(tensor)
    _require(len(extents) == 4, "im2col is modelled for tensors of 4 dimensions")
    corners = (*lower_corner, *upper_corner)
    _require(len(lower_corner) == len(upper_corner) == 2, "corners are (w, h)")
    in_range = all(-_IM2COL_CORNER <= corner < _IM2COL_CORNER for corner in corners)
    _require(in_range, f"corners {corners}: each is -{_IM2COL_CORNER} to {_IM2COL_CORNER - 1}")
    spans = [extents[1 + i] - lower_corner[i] + upper_corner[i] for i in range(2)]
    _require(min(spans) > 0, f"the pixel box is empty: {spans[0]} x {spans[1]}")
    _require(1 <= channels_per_pixel <= _MAX_CHANNELS, f"{channels_per_pixel} channels: 1 to {_MAX_CHANNELS}")
    _require(1 <= pixels_per_column <= _MAX_PIXELS, f"{pixels_per_column} pixels: 1 to {_MAX_PIXELS}")
    _check_inner("channels", channels_per_pixel, kind)
    _require(0 <= l2_promotion <= 3, f"L2 promotion {l2_promotion} does not exist")
    return _encoded(tensor, kind, _IM2COL, (), _Pixels(corners, channels_per_pixel, pixels_per_column))


def _checked(tensor: _Tensor) -> _Kind:
    """The checks that both encoders share. Raises TensorMapError."""
    data_type, address, extents, strides, steps, interleave, swizzle, out_of_bounds = tensor
    try:
        kind, mode, fill = DataType(data_type), Swizzle(swizzle), OutOfBounds(out_of_bounds)
    except ValueError as error:
        raise TensorMapError(f"{error}: unknown to the driver or not modelled") from None
    rank = len(extents)
    _require(kind not in _UNMODELLED, f"{kind.name} is not modelled")
    _require(interleave == 0, "interleaved layouts are not modelled")
    _require(1 <= rank <= _MAX_RANK, f"a tensor of {rank} dimensions: 1 to {_MAX_RANK}")
    _require(address % 16 == 0, f"address {address:#x} is not a multiple of 16")
    _require(all(1 <= extent <= _MAX_EXTENT for extent in extents), f"extents {tuple(extents)}: each is 1 to 2^32")
    _require(len(strides) == rank - 1, f"{len(strides)} strides for {rank} dimensions")
    good = all(stride % 16 == 0 and 0 <= stride < _MAX_STRIDE for stride in strides)
    _require(good, f"strides {tuple(strides)}: each is a multiple of 16 bytes below 2^40")
    _require(len(steps) == rank, f"{len(steps)} element strides for {rank} dimensions")
    _require(all(1 <= step <= _MAX_STEP for step in steps), f"element strides {tuple(steps)}: each is 1 to {_MAX_STEP}")
    _require(fill == OutOfBounds.ZERO or kind in _FLOATING, f"a NaN fill needs a floating-point type, not {kind.name}")
    return _Kind(kind, mode, fill)


def _check_inner(name: str, elements: int, kind: _Kind) -> None:
    """The innermost row in shared memory: whole chunks, and exactly one span of the swizzle."""
    row_bytes, span = elements * _ELEMENT_BYTES[kind.elements], _SPANS[kind.swizzle]
    _require(row_bytes % 16 == 0, f"{name}: a row of {row_bytes} bytes is not a multiple of 16")
    _require(not span or row_bytes <= span, f"{name}: a row of {row_bytes} bytes is wider than the swizzle's {span}")
    _require(
        not span or row_bytes == span, f"{name}: rows of {row_bytes} bytes under a swizzle of {span} are not modelled"
    )


def _encoded(tensor: _Tensor, kind: _Kind, mode: int, box: Sequence[int], pixels: _Pixels) -> bytes:
    def padded(values: Sequence[int], count: int, by: int) -> tuple[int, ...]:
        return (*values, *(by for _ in range(count - len(values))))

    last = [extent - 1 for extent in tensor.extents]
    elements, swizzle, fill = kind
    rounds = elements == DataType.TFLOAT32
    flags = (elements in _FLOATING, _ELEMENT_BYTES[elements], _SPANS[swizzle], fill == OutOfBounds.NAN, rounds, 0)
    packed = _LAYOUT.pack(
        _MAGIC, tensor.address, *padded(tensor.strides, 4, 0), *padded(last, 5, 0), *padded(box, 5, 1),
        *pixels.corners, pixels.channels, pixels.pixels, len(tensor.extents), mode, *map(int, flags),
        *padded(tensor.steps, 5, 1),
    )  # fmt: skip
    return packed.ljust(TENSOR_MAP_BYTES, b"\0")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise TensorMapError(sentence)
