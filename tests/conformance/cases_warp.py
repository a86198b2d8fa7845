"""Conversions, shuffles, votes, ldmatrix, stmatrix, mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tests.conformance import formats
from tests.conformance.case import Case, Random, Setup

_F32_SPECIALS = np.array(
    [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC01234, 0x7F7FFFFF, 0xFF7FFFFF,
     0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x32FFFFFF,
     0x33800000, 0x387FE000, 0x387FF000, 0x3F801000, 0x3F800FFF, 0x3F803000, 0xBF801000, 0x7F7FF000, 0x7F7FEFFF],
    np.uint32,
)  # fmt: skip


def _f32_patterns(random: Random) -> np.ndarray:
    """Special values, any bits, and values near those that 16-bit formats hold, halfway cases among them."""
    near = random.words(2048) & np.uint32(0xFFFFE000) | random.words(2048) % np.uint32(3) * np.uint32(0x1000)
    range_of_halves = near & np.uint32(0x8FFFFFFF) | np.uint32(0x30000000)
    return np.concatenate([_F32_SPECIALS, random.words(2048), near, range_of_halves])


def _to_fp16() -> Setup:
    bits = _f32_patterns(Random("cvt fp16"))
    with np.errstate(over="ignore", invalid="ignore"):
        halves = bits.view(np.float32).astype(np.float16)
    words = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16)).astype(np.uint32)
    return Setup((bits,), (words,), (0, bits.size))


def _to_pairs(kind: str) -> Setup:
    """Every pattern in the low half, the list from its end in the high half."""
    bits = _f32_patterns(Random(f"cvt pairs {kind}"))
    if kind == "fp16":
        with np.errstate(over="ignore", invalid="ignore"):
            halves = bits.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        halves = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint32)
    halves = np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FFF), halves)
    return Setup((bits,), (halves[::-1] << np.uint32(16) | halves,), (3 if kind == "fp16" else 4, bits.size))


def _to_tf32() -> Setup:
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F801FFF, 0xFF801000, 0xFF802000, 0x7FBFFFFF], np.uint32)
    bits = np.concatenate([_f32_patterns(Random("cvt tf32")), nans])
    return Setup((bits,), (formats.tf32_bits(bits.view(np.float32)),), (1, bits.size))


def _from_fp16() -> Setup:
    bits = np.arange(1 << 16, dtype=np.uint32)
    return Setup((bits,), (bits.astype(np.uint16).view(np.float16).astype(np.float32),), (2, bits.size))


def _collectives() -> Setup:
    random = Random("collectives")
    values, lanes, distance = random.words(32), random.integers(0, 31, 32).astype(np.uint32), 5
    lane, rows = np.arange(32), []
    for width in (8, 16, 32):
        base = lane // width * width
        up, down, across = lane - distance, lane + distance, lane ^ distance
        rows += [values[base + lanes % width]]
        rows += [values[np.where(up >= base, up, lane)], values[np.where(down < base + width, down, lane)]]
        rows += [values[np.where(across < base + width, across, lane)]]
    odd = values & 1
    rows += [np.full(32, int((odd << lane.astype(np.uint32)).sum())), np.full(32, int(all(odd | (lane == 5))))]
    rows += [np.full(32, 1), values[lane ^ 1]]
    inputs = (values, np.append(lanes, distance).astype(np.uint32))
    return Setup(inputs, (np.array(rows, dtype=np.uint32),))


def _elect() -> Setup:
    """One lane, and the same one again."""
    return Setup((Random("elect").words(32),), (np.ones((2, 32), np.uint32),))


def _matrices() -> Setup:
    random = Random("matrices")
    image = random.words(512)
    rows = np.argsort(random.words(128), kind="stable")[:32].astype(np.uint32) * np.uint32(16)
    registers = random.words(4, 32)
    halves = image.view(np.uint16)
    matrices = halves[(rows // 2)[:, None] + np.arange(8)].reshape(4, 8, 8)
    line, first = np.arange(32) // 4, np.arange(32) % 4 * 2
    loads = []
    for picked in (matrices, matrices.transpose(0, 2, 1)):
        words = picked[:, line, first].astype(np.uint32) | picked[:, line, first + 1].astype(np.uint32) << 16
        loads += [words[:1], words[:2], words[:4]]
    stores = []
    for transpose in (False, True):
        for count in (1, 2, 4):
            matrix = np.empty((4, 8, 8), np.uint16)
            matrix[:, line, first], matrix[:, line, first + 1] = registers & 0xFFFF, registers >> 16
            dump = np.full(1024, 0, np.uint16)
            dump.view(np.uint32)[...] = 0xABCDEF01
            for i in range(8 * count):
                row = matrix[i // 8].T[i % 8] if transpose else matrix[i // 8][i % 8]
                dump[rows[i] // 2 + np.arange(8)] = row
            stores.append(dump.view(np.uint32))
    return Setup((image, rows, registers), (np.concatenate(loads), np.stack(stores)))


def _mma(kind: str, exact: bool, half: bool = False) -> Setup:
    """``exact``: small integers, whose sums no order of additions can change; tf32 with noise in the ignored bits.

    ``half``: the first half of k, that is, of the registers of a and b.
    """
    random = Random(f"mma {kind} {exact}{' half' if half else ''}")
    depth, products = formats.DEPTH[kind], 8
    rows_a, ks_a = formats.mma_a(depth)
    ks_b, cols_b = formats.mma_b(depth)
    rows_d, cols_d = formats.mma_d()
    if half:
        depth //= 2
        rows_a, ks_a, ks_b, cols_b = (each[: len(each) // 2] for each in (rows_a, ks_a, ks_b, cols_b))
    words_a, words_b, words_d, sums, bounds = [], [], [], [], []
    for _ in range(products):
        if exact:
            bits_a = formats.encode(random.integers(-9, 9, 16, depth), kind)
            bits_b = formats.encode(random.integers(-9, 9, depth, 8), kind)
            d = random.integers(-100, 100, 16, 8).astype(np.float64)
            if kind == "tf32":
                bits_a, bits_b = bits_a | random.words(16, depth) >> 19, bits_b | random.words(depth, 8) >> 19
        else:
            bits_a, bits_b = formats.random_bits(random, kind, 16, depth), formats.random_bits(random, kind, depth, 8)
            d = random.floats(16, 8).astype(np.float64)
        a, b = formats.decode(bits_a, kind), formats.decode(bits_b, kind)
        words_a.append(formats.packed_registers(bits_a[rows_a, ks_a], kind))
        words_b.append(formats.packed_registers(bits_b[ks_b, cols_b], kind))
        words_d.append(d[rows_d, cols_d].astype(np.float32))
        sums.append((a @ b + d)[rows_d, cols_d].astype(np.float32))
        bounds.append(formats.sum_bound(a, b, d)[rows_d, cols_d])
    inputs = tuple(np.concatenate(words).view(np.uint32) for words in (words_a, words_b, words_d))
    tolerance = None if exact else np.concatenate(bounds)
    return Setup(inputs, (np.concatenate(sums),), (formats.TYPES.index(kind), products), tolerance=tolerance)


def _mma_f64(depth: int, exact: bool) -> Setup:
    """Products in fp64; ``exact``: integers of 24 bits, whose sums no order of additions can change."""
    random, products = Random(f"mma fp64 {depth} {exact}"), 8
    places = formats.mma_f64(depth)
    rows = 8 if depth == 4 else 16
    words = [np.zeros((products, room, 32)) for room in (8, 4, 4)]
    expected, bounds = np.zeros((products, 4, 32)), np.zeros((products, 4, 32))
    for product in range(products):
        shapes = ((rows, depth), (depth, 8), (rows, 8))
        if exact:
            matrices = [random.integers(-(1 << 23), 1 << 23, *shape).astype(np.float64) for shape in shapes]
        else:  # all bits of the fraction in use
            matrices = [random.floats(*shape) + random.floats(*shape).astype(np.float64) * 2.0**-26 for shape in shapes]
        for register, matrix, place in zip(words, matrices, places, strict=True):
            register[product, : len(place[0])] = matrix[place]
        a, b, d = (matrix.astype(np.longdouble) for matrix in matrices)
        used = len(places[2][0])
        expected[product, :used] = (a @ b + d)[places[2]]
        bounds[product, :used] = ((depth + 2) * 2.0**-52 * (abs(a) @ abs(b) + abs(d)))[places[2]]
    return Setup(tuple(words), (expected,), (depth, products), tolerance=None if exact else bounds)


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield Case("cvt_rn_f16_f32", "cvt", 128, _to_fp16, digest_only=True)
    yield Case("cvt_rn_f16x2_f32", "cvt", 128, partial(_to_pairs, "fp16"), digest_only=True)
    yield Case("cvt_rn_bf16x2_f32", "cvt", 128, partial(_to_pairs, "bf16"), digest_only=True)
    yield Case("cvt_rna_tf32", "cvt", 128, _to_tf32, digest_only=True)
    yield Case("cvt_f32_f16", "cvt", 128, _from_fp16, digest_only=True)
    yield Case("collectives", "collectives", 32, _collectives)
    yield Case("elect_sync", "elect", 32, _elect)
    yield Case("ldmatrix_stmatrix", "matrices", 32, _matrices)
    for kind in formats.TYPES:
        yield Case(f"mma_{kind}_integers", "mma", 32, partial(_mma, kind, True))
        yield Case(f"mma_{kind}_floats", "mma", 32, partial(_mma, kind, False))
        yield Case(f"mma_half_k_{kind}_integers", "mma_half_k", 32, partial(_mma, kind, True, True))
        yield Case(f"mma_half_k_{kind}_floats", "mma_half_k", 32, partial(_mma, kind, False, True))
    for depth in (4, 8, 16):
        yield Case(f"mma_fp64_k{depth}_integers", "mma_f64", 32, partial(_mma_f64, depth, True))
        yield Case(f"mma_fp64_k{depth}_floats", "mma_f64", 32, partial(_mma_f64, depth, False))
