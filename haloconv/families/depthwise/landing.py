"""What the kernels share whose planes land whole (landing.cuh): which tensors do, and the rows of their strips."""

from __future__ import annotations

from typing import NamedTuple

from haloconv.families.common import ceil_div
from haloconv.families.depthwise.layer import activations
from haloconv.problem import Request

LEAST_COLS = 48  # of a plane; on narrower ones other kernels are used
NO_PLANES = "rows have gaps, or planes do not begin at multiples of 16 bytes"
_PIECE_BYTES, _BUFFER_BYTES = 16, 128  # what buffers are multiples of


class Planes(NamedTuple):
    """The rows that strips of a tensor have; the fields of the struct in landing.cuh."""

    image: int
    channel: int
    extent: int
    width: int
    rows: int
    pad_top: int

    @property
    def landing_bytes(self) -> int:
        """Bytes of a buffer for the rows that are in the image."""
        return whole(min(self.rows, self.extent) * self.width * _PIECE_BYTES)


def land_whole(request: Request, elems: int) -> bool:
    """Whether planes of the activations are runs of memory that begin at multiples of ``elems``, 16 bytes."""
    return all(
        side.strides[2:] == (cols, 1) and side.aligned and not any(each % elems for each in side.strides[:2])
        for side, (_, _, _, cols) in activations(request)
    )


def whole(extent_bytes: int) -> int:
    """``extent_bytes`` rounded up to what buffers are multiples of."""
    return ceil_div(extent_bytes, _BUFFER_BYTES) * _BUFFER_BYTES
