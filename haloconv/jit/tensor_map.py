"""Tensor maps, which tell TMA (Hopper's tensor memory accelerator) about a tensor: their words and their encoder.

Order of dimensions: innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from haloconv.jit.driver import DriverError, encode_im2col_map, encode_tensor_map

_L2_256_BYTES = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class DataType(IntEnum):
    """CUtensorMapDataType, without the packed 4- and 6-bit types."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12


class Swizzle(IntEnum):
    """CUtensorMapSwizzle, for chunks of 16 bytes."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3


class OutOfBounds(IntEnum):
    """CUtensorMapFloatOOBfill."""

    ZERO = 0
    NAN = 1


class Pixels(NamedTuple):
    """What im2col walks over: from the lower corner (w, h) to the upper one, which counts from the image's last pixel.

    ``steps`` are pixels from one to the next, along a row and down.
    """

    lower: tuple[int, int]
    upper: tuple[int, int]
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BoxMap:
    """Boxes of a tensor that a launch copies: a tensor map without its address, which each call of the launch gives.

    ``extents`` and ``box`` count elements. ``strides`` are bytes, of dimensions 1 and up. The tensor starts ``offset``
    bytes behind the launch's pointer argument number ``pointer``. What lies outside the tensor reads as zero.

    With ``pixels`` the tensor is (c, w, h, n), read in im2col mode, and ``box`` counts channels and pixels.
    """

    data_type: DataType
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle
    pointer: int
    offset: int = 0
    pixels: Pixels | None = None


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
    l2_promotion: int = _L2_256_BYTES,
    out_of_bounds: int = 0,
    pixels: Pixels | None = None,
) -> bytes:
    """The driver's tensor map: boxes of ``box`` elements of a tensor of ``extents`` at ``address``, or ``pixels``.

    ``strides`` are bytes, of dimensions 1 and up. Raises DriverError if the driver refuses them.
    """
    steps = tuple(element_strides or (1,) * len(extents))
    modes = (interleave, swizzle, l2_promotion, out_of_bounds)
    try:
        if pixels is not None:
            return encode_im2col_map(data_type, address, (extents, strides, box), pixels, modes)
        return encode_tensor_map(data_type, address, (extents, strides, box, steps), modes)
    except DriverError as error:
        raise DriverError(
            f"no tensor map of boxes {tuple(box)} with steps {steps}, swizzle {int(swizzle)}, over extents "
            f"{tuple(extents)}, strides {tuple(strides)} bytes, data type {int(data_type)}, at {address:#x}: {error}"
        ) from error
