"""The host's encoder of tensor maps refuses what the driver refuses."""

from __future__ import annotations

import pytest

from haloconv.emulator.tensor_map import TensorMapError, encode_im2col, encode_tiled
from haloconv.jit import Pixels

TILED = {"data_type": 7, "address": 4096, "extents": (64, 40), "strides": (256,), "box": (32, 8), "swizzle": 3}
IM2COL = {"data_type": 7, "address": 4096, "extents": (32, 9, 7, 2), "strides": (128, 1152, 8064),
          "lower_corner": (-1, -1), "upper_corner": (-1, -1), "channels_per_pixel": 32, "pixels_per_column": 64,
          "swizzle": 3}  # fmt: skip


def test_maps_are_128_bytes() -> None:
    assert len(encode_tiled(**TILED)) == len(encode_im2col(**IM2COL)) == 128


@pytest.mark.parametrize(
    "change",
    [{"address": 4104}, {"extents": (64, 0)}, {"extents": (64, (1 << 32) + 1)}, {"strides": (248,)},
     {"strides": (1 << 40,)}, {"strides": ()}, {"box": (33, 8)}, {"box": (64, 8)}, {"box": (32, 257)}, {"box": (32,)},
     {"box": (32, 0)}, {"box": (16, 8)}, {"element_strides": (1, 9)}, {"element_strides": (1, 0)}, {"interleave": 1},
     {"data_type": 99}, {"data_type": 2, "out_of_bounds": 1}, {"swizzle": 4}, {"l2_promotion": 4},
     {"extents": (8,) * 6, "strides": (32,) * 5, "box": (8,) * 6}],
    ids=repr,
)  # fmt: skip
def test_tiled_maps_are_refused_as_by_the_driver(change: dict) -> None:
    with pytest.raises(TensorMapError):
        encode_tiled(**(TILED | change))


@pytest.mark.parametrize(
    "change",
    [{"lower_corner": (-129, 0)}, {"upper_corner": (128, 0)}, {"upper_corner": (-10, 0)}, {"channels_per_pixel": 257},
     {"pixels_per_column": 1025}, {"pixels_per_column": 0}, {"extents": (32, 9, 7), "strides": (128, 1152)},
     {"channels_per_pixel": 33}, {"channels_per_pixel": 64}],
    ids=repr,
)  # fmt: skip
def test_im2col_maps_are_refused_as_by_the_driver(change: dict) -> None:
    with pytest.raises(TensorMapError):
        encode_im2col(**(IM2COL | change))


def test_a_box_of_pixels_is_an_im2col_map() -> None:
    """What a launch asks for through ``encode_tiled``: corners, and steps of columns and rows."""
    changes = {"lower_corner": (-1, 0), "upper_corner": (-2, -1), "element_strides": (1, 2, 3, 1)}
    tensor = {name: IM2COL[name] for name in ("data_type", "address", "extents", "strides", "swizzle")}
    pixels = Pixels((-1, 0), (-2, -1), (2, 3))
    assert encode_tiled(**tensor, box=(32, 64), pixels=pixels) == encode_im2col(**(IM2COL | changes))
    with pytest.raises(TensorMapError, match="corners"):
        encode_tiled(**tensor, box=(32, 64), pixels=Pixels((-129, 0), (0, 0), (1, 1)))
    with pytest.raises(TensorMapError, match="element strides"):
        encode_tiled(**tensor, box=(32, 64), pixels=Pixels((0, 0), (0, 0), (9, 1)))
