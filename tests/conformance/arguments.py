"""The argument struct of the conformance kernels (Params in prelude.cuh), for any place the arrays live."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from tests.conformance.case import MAX_INPUTS, MAX_MAPS, MAX_OUTPUTS, MAX_SCALARS, MapSpec, Setup

MAP_BYTES = 128
PARAMS_BYTES = MAX_MAPS * MAP_BYTES + 8 * (MAX_INPUTS + MAX_OUTPUTS + 1) + 4 * MAX_SCALARS
PARAMS_BYTES += -PARAMS_BYTES % 64


def packed(
    setup: Setup,
    inputs: Sequence[int],
    outputs: Sequence[int],
    gave_up: int,
    encode: Callable[[MapSpec, int], bytes],
) -> bytes:
    """Params with these addresses; ``encode`` makes 128 bytes of a map and the address of its tensor."""
    places = {f"in{i}": address for i, address in enumerate(inputs)}
    places |= {f"out{i}": address for i, address in enumerate(outputs)}
    maps = [encode(spec, places[spec.array] + spec.offset_bytes) for spec in setup.maps]
    blob = b"".join(maps).ljust(MAX_MAPS * MAP_BYTES, b"\0")
    pointers = [*_padded(inputs, MAX_INPUTS), *_padded(outputs, MAX_OUTPUTS), gave_up]
    blob += struct.pack(f"<{len(pointers)}Q", *pointers)
    blob += struct.pack(f"<{MAX_SCALARS}i", *_padded(setup.scalars, MAX_SCALARS))
    return blob.ljust(PARAMS_BYTES, b"\0")


def _padded(values: Sequence[int], count: int) -> list[int]:
    assert len(values) <= count
    return [*values, *[0] * (count - len(values))]
