"""Number formats, swizzles and fragment layouts, written for NumPy and from the PTX manual: the oracle's side."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tests.conformance.case import Random

Addresses = TypeVar("Addresses", np.ndarray, int)
TYPES = ("tf32", "fp16", "bf16")
DEPTH = {"tf32": 8, "fp16": 16, "bf16": 16}
ELEMENT_BYTES = {"tf32": 4, "fp16": 2, "bf16": 2}


def tf32_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, halves away from zero, to 10 bits of fraction; as uint32.

    Infinities and NaNs are cut instead, as by sm_90: a NaN whose payload lies in the low 13 bits becomes infinite.
    """
    bits = values.astype(np.float32).view(np.uint32)
    return (bits + np.where(np.isfinite(values), np.uint32(0x1000), np.uint32(0))) & np.uint32(0xFFFFE000)


def loaded_tf32_bits(values: np.ndarray) -> np.ndarray:
    """What a TFLOAT32 tensor map makes of float32, as uint32: rounded to nearest even, every NaN 0x7fffe000."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), np.uint32(0x7FFFE000), np.where(np.isinf(values), bits, rounded))


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Values that the format holds exactly, as uint32 (tf32) or uint16."""
    single = np.ascontiguousarray(values, np.float32)
    if kind == "tf32":
        return single.view(np.uint32)
    if kind == "fp16":
        return single.astype(np.float16).view(np.uint16)
    return (single.view(np.uint32) >> 16).astype(np.uint16)


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """What the tensor core takes the bits for, float64; tf32 ignores the low 13 bits."""
    if kind == "tf32":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_bits(random: Random, kind: str, *shape: int) -> np.ndarray:
    """Random finite elements around 1, with all bits of the format (and for tf32 those below it) in use."""
    values = random.floats(*shape)
    if kind == "fp16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32) if kind == "tf32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def swizzled(addresses: Addresses, span: int) -> Addresses:
    """Where the byte at a shared address really lies: address bits 4.. are XORed with bits 7..."""
    return addresses ^ ((addresses >> 3) & {128: 0x70, 64: 0x30, 32: 0x10, 0: 0}[span])


def sum_bound(a: np.ndarray, b: np.ndarray, d: np.ndarray, chain: int = 1) -> np.ndarray:
    """How far a tensor core's fp32 sum may be from the exact one: for each of ``chain`` instructions of depth k, k + 2
    roundings (or cuts) of at most one unit of the last place, each of at most the sum of all magnitudes.
    """
    depth = a.shape[1] // chain + 2
    return chain * depth * 2.0**-23 * (np.abs(a) @ np.abs(b) + np.abs(d))


# Fragments: index arrays [register][lane] of the element that a register holds, as the PTX manual draws them.

_LANES = np.arange(32)


def mma_a(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and k of a's elements, [register * elements of a register][lane]."""
    per = depth // 8
    rows = [_LANES // 4 + i % 2 * 8 for i in range(4) for _ in range(per)]
    ks = [_LANES % 4 * per + i // 2 * (depth // 2) + e for i in range(4) for e in range(per)]
    return np.array(rows), np.array(ks)


def mma_b(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """k and columns of b's elements, likewise."""
    per = depth // 8
    ks = [_LANES % 4 * per + i * (depth // 2) + e for i in range(2) for e in range(per)]
    return np.array(ks), np.array([_LANES // 4] * (2 * per))


def mma_d() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of d's elements."""
    return (
        np.array([_LANES // 4 + i // 2 * 8 for i in range(4)]),
        np.array([_LANES % 4 * 2 + i % 2 for i in range(4)]),
    )


def mma_f64(depth: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """(rows, k) of a's elements, (k, columns) of b's and (rows, columns) of d's in fp64; k = 4 has 8 rows."""
    halves, steps = (1 if depth == 4 else 2), depth // 4
    a = [(_LANES // 4 + 8 * half, _LANES % 4 + 4 * step) for step in range(steps) for half in range(halves)]
    b = [(_LANES % 4 + 4 * step, _LANES // 4) for step in range(steps)]
    d = [(_LANES // 4 + 8 * half, _LANES % 4 * 2 + e) for half in range(halves) for e in range(2)]
    return tuple((np.array([first for first, _ in each]), np.array([last for _, last in each])) for each in (a, b, d))


def wgmma_d(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of d's elements, [thread of the warpgroup][register]."""
    thread, register = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    rows = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    cols = register // 4 * 8 + thread % 4 * 2 + register % 2
    return rows, cols


def packed_registers(elements: np.ndarray, kind: str) -> np.ndarray:
    """[register * elements of a register][...] of element bits to [register][...] of uint32."""
    if kind == "tf32":
        return elements.astype(np.uint32)
    pairs = elements.astype(np.uint32)
    return pairs[0::2] | pairs[1::2] << 16
