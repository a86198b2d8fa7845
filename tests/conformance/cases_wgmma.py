"""wgmma: every type, n and swizzle, shifted starts, strides between groups, MN-major, a in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.conformance import formats
from tests.conformance.case import Case, Random, Setup

NS = (8, 16, 32, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MN_NS = (8, 64, 256)
_MODE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}
_CHUNK = 16
_SPECIALS = np.array([0x7F801000, 0xFF801FFF, 0x7FFFFFFF, 0x7F800001, 0xFF800000, 0xFFBFFFFF], np.uint32)
"""Infinities with noise in the bits that tf32 ignores, NaNs, and one whose payload lies in those bits alone."""


@dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory: bytes from the image's begin to its first row, and the descriptor's fields.

    ``start_row`` counts rows of the swizzle's width that the operand starts below ``begin``.
    """

    begin: int
    swizzle: int
    stride: int
    leading: int = 0
    mn_major: bool = False
    start_row: int = 0

    def start(self, step: int, kind: str, lines: int) -> int:
        """Where instruction ``step`` of a chain along k starts."""
        first = self.begin + self.start_row * self.swizzle
        if not self.mn_major:
            return first + (2 * step * self.leading if self.swizzle == 0 else 32 * step)
        groups_of_k = formats.DEPTH[kind] // 8
        return first + step * groups_of_k * (self.leading if self.swizzle == 0 else self.stride)

    def descriptor(self, start: int) -> int:
        """The 64 bits."""
        return _MODE_CODE[self.swizzle] << 62 | self.stride >> 4 << 32 | self.leading >> 4 << 16 | start >> 4

    def chunks(self, start: int, lines: int, kind: str) -> Iterator[tuple[int, slice, slice]]:
        """(place, lines, k) of every 16-byte chunk of one instruction."""
        per = _CHUNK // formats.ELEMENT_BYTES[kind]
        depth = formats.DEPTH[kind]
        for outer in range(depth if self.mn_major else lines):
            for inner in range(-(-lines // per) if self.mn_major else depth // per):
                place = self._place(start, outer, inner)
                along, across = slice(outer, outer + 1), slice(inner * per, (inner + 1) * per)
                yield (place, across, along) if self.mn_major else (place, along, across)

    def _place(self, start: int, outer: int, inner: int) -> int:
        if self.swizzle == 0:
            groups, across = (self.leading, self.stride) if self.mn_major else (self.stride, self.leading)
            return start + outer // 8 * groups + outer % 8 * _CHUNK + inner * across
        spans, within = divmod(inner, self.swizzle // _CHUNK) if self.mn_major else (0, inner)
        plain = start + outer // 8 * self.stride + outer % 8 * self.swizzle + spans * self.leading + within * _CHUNK
        return formats.swizzled(plain, self.swizzle)


def _elements(random: Random, kind: str, exact: bool, *shape: int) -> np.ndarray:
    """Bits of operands: small integers if ``exact`` (tf32 with noise in the bits that are ignored), else any."""
    if not exact:
        return formats.random_bits(random, kind, *shape)
    bits = formats.encode(random.integers(-2, 2, *shape), kind)
    return bits | random.words(*shape) >> 19 if kind == "tf32" else bits


def _fragment(bits: np.ndarray, kind: str) -> np.ndarray:
    """64 rows of a as registers, [register][thread]."""
    rows, ks = formats.mma_a(formats.DEPTH[kind])
    warps = [formats.packed_registers(bits[warp * 16 + rows, ks], kind) for warp in range(4)]
    return np.concatenate(warps, axis=1)


def _place(image: np.ndarray, layout: Layout, start: int, bits: np.ndarray, kind: str) -> None:
    for place, lines, ks in layout.chunks(start, bits.shape[0], kind):
        chunk = bits[lines, ks].reshape(-1)
        image[place : place + _CHUNK] = np.ascontiguousarray(chunk).view(np.uint8)


def _setup(
    name: str, kind: str, n: int, rounds: Sequence[tuple[Layout | None, Layout]], steps: int, image_bytes: int,
    exact: bool = True, accumulate: bool = True, specials_every: int = 0,
) -> Setup:  # fmt: skip
    """One launch: ``rounds`` pairs of layouts (None: a in registers) share an image, as far as their places differ.

    Rounds whose b overlap (shifted starts) read the elements that lie there: b's bits are taken from the image.
    ``specials_every`` (tf32) puts an infinity or a NaN into every so many words of it.
    """
    random, depth = Random(name), formats.DEPTH[kind]
    filler = _elements(random, kind, exact, image_bytes // formats.ELEMENT_BYTES[kind])
    if specials_every:
        places = filler[::specials_every]
        places[...] = np.resize(_SPECIALS, places.size)
    image = np.ascontiguousarray(filler).view(np.uint8)
    rows_d, cols_d = formats.wgmma_d(n)
    descriptors, registers, before, sums, bounds = [], [], [], [], []
    for layout_a, layout_b in rounds:
        d = random.integers(-20, 20, 64, n).astype(np.float64) if exact else random.floats(64, n).astype(np.float64)
        before.append(d[rows_d, cols_d].astype(np.float32))
        d = d if accumulate else np.zeros_like(d)
        whole_a, whole_b = [], []
        for step in range(steps):
            b = _taken(image, layout_b, step, n, kind)
            if layout_a is None:
                a = _elements(random, kind, exact, 64, depth)
                registers.append(_fragment(a, kind))
                word_a = 0
            else:
                a = _taken(image, layout_a, step, 64, kind)
                word_a = layout_a.descriptor(layout_a.start(step, kind, 64))
            word_b = layout_b.descriptor(layout_b.start(step, kind, n))
            descriptors += [word_a & 0xFFFFFFFF, word_a >> 32, word_b & 0xFFFFFFFF, word_b >> 32]
            whole_a.append(formats.decode(a, kind))
            whole_b.append(formats.decode(b, kind).T)
        a, b = np.concatenate(whole_a, 1), np.concatenate(whole_b, 0)
        with np.errstate(invalid="ignore"):
            sums.append((a @ b + d)[rows_d, cols_d].astype(np.float32))
        if not exact:
            bounds.append(formats.sum_bound(a, b, d, steps)[rows_d, cols_d])
    first, last = rounds[0][0] or rounds[0][1], rounds[0][1]
    scalars = (image.size // 4, n, len(rounds), steps, int(first.mn_major), int(last.mn_major), int(accumulate))
    fragments = np.stack(registers).astype(np.uint32) if registers else np.zeros(4, np.uint32)
    inputs = (image.view(np.uint32), np.array(descriptors, np.uint64).astype(np.uint32), np.stack(before), fragments)
    return Setup(inputs, (np.stack(sums),), scalars, tolerance=None if exact else np.stack(bounds))


def _taken(image: np.ndarray, layout: Layout, step: int, lines: int, kind: str) -> np.ndarray:
    """The bits that a descriptor means, [line][k], read from the image."""
    dtype = np.uint32 if kind == "tf32" else np.uint16
    bits = np.empty((lines, formats.DEPTH[kind]), dtype)
    for place, at_lines, ks in layout.chunks(layout.start(step, kind, lines), lines, kind):
        chunk = image[place : place + _CHUNK].view(dtype)
        target = bits[at_lines, ks]
        target[...] = chunk.reshape(target.shape)
    return bits


# The image: a from 0, b from 16 KiB on; both starts are multiples of 1024 bytes.
_A, _B = 0, 16 * 1024


def _k_major(begin: int, swizzle: int, start_row: int = 0, stride: int | None = None) -> Layout:
    """Contiguous rows of the swizzle's width; without one, 8 x 16 bytes contiguous, k next, groups of 8 rows last."""
    if swizzle == 0:
        return Layout(begin, 0, stride or 256, 128)
    return Layout(begin, swizzle, stride or 8 * swizzle, 0, False, start_row)


def _every_n(kind: str, n: int, exact: bool = True) -> Setup:
    rounds = [(_k_major(_A, swizzle), _k_major(_B, swizzle)) for swizzle in (128, 64, 32, 0)]
    return _setup(f"ss {kind} {n} {exact}", kind, n, rounds, 1, _B + n * 128, exact)


def _chain(kind: str, swizzle: int, exact: bool, accumulate: bool = True) -> Setup:
    """Along k within the row of the swizzle's width: several instructions, results at the end only."""
    rounds = [(_k_major(_A, swizzle), _k_major(_B, swizzle))]
    name = f"chain {kind} {swizzle} {exact} {accumulate}"
    return _setup(name, kind, 64, rounds, swizzle // 32, _B + 64 * swizzle, exact, accumulate)


def _specials() -> Setup:
    rounds = [(_k_major(_A, 128), _k_major(_B, 128))]
    return _setup("ss tf32 specials", "tf32", 8, rounds, 1, _B + 8 * 128, specials_every=37)


def _shifted(kind: str, swizzle: int) -> Setup:
    rounds = [(_k_major(_A, swizzle), _k_major(_B, swizzle, start_row=row)) for row in range(12)]
    return _setup(f"shifted {kind} {swizzle}", kind, 16, rounds, 1, _B + 64 * swizzle)


def _shifted_chain(kind: str, swizzle: int) -> Setup:
    rounds = [(_k_major(_A, swizzle, start_row=row), _k_major(_B, swizzle, start_row=3 * row)) for row in (1, 2)]
    return _setup(f"shifted chain {kind} {swizzle}", kind, 16, rounds, swizzle // 32, _B + 64 * swizzle)


def _strided(kind: str, swizzle: int, strides: Sequence[int]) -> Setup:
    rounds = [
        (_k_major(_A, swizzle), _k_major(_B, swizzle, start_row=row, stride=s)) for s in strides for row in (0, 3)
    ]
    return _setup(f"strided {kind} {swizzle} {strides}", kind, 16, rounds, 1, _B + 16 * 1024)


def _mn_major(kind: str, n: int, a_mn: bool, b_mn: bool) -> Setup:
    """Rows of k, each of the swizzle's width along m or n; 8 of them, then the next 8, then the next span."""
    rounds = []
    for swizzle in (128, 64, 32, 0):
        if swizzle:
            a = Layout(_A, swizzle, 8 * swizzle, 16 * swizzle, True)
            b = Layout(_B, swizzle, 8 * swizzle, 16 * swizzle, True)
        else:
            a, b = Layout(_A, 0, 256, 128, True), Layout(_B, 0, 256, 128, True)
        rounds.append((a if a_mn else _k_major(_A, swizzle), b if b_mn else _k_major(_B, swizzle)))
    return _setup(f"mn {kind} {n} {a_mn} {b_mn}", kind, n, rounds, 1, _B + max(n, 64) * 128)


def _registers(kind: str, n: int, exact: bool) -> Setup:
    rounds = [(None, _k_major(_B, 128))]
    return _setup(f"rs {kind} {n} {exact}", kind, n, rounds, 4 if n <= 64 else 1, _B + n * 128, exact)


def cases() -> Iterator[Case]:
    """The cases of this file."""
    for kind in formats.TYPES:
        both = partial(_case, kind, 0)
        for n in NS:
            yield both(f"ss_{kind}_n{n}", partial(_every_n, kind, n), n > 32)
        yield both(f"ss_{kind}_floats", partial(_every_n, kind, 32, False))
        yield both(f"ss_{kind}_overwrite", partial(_chain, kind, 128, True, False))
        for swizzle in (128, 64, 32):
            yield both(f"ss_{kind}_chain_{swizzle}", partial(_chain, kind, swizzle, False))
            yield both(f"ss_{kind}_shifted_{swizzle}", partial(_shifted, kind, swizzle))
            yield both(f"ss_{kind}_shifted_chain_{swizzle}", partial(_shifted_chain, kind, swizzle))
        yield both(f"ss_{kind}_stride_multiple", partial(_strided, kind, 128, (2048, 3072)))
        yield both(f"ss_{kind}_stride_other", partial(_strided, kind, 128, (1152, 1280, 1536)))
        yield both(f"ss_{kind}_stride_64", partial(_strided, kind, 64, (1024, 576, 640)))
        for n in NS:
            yield _case(kind, 2, f"rs_{kind}_n{n}", partial(_registers, kind, n, True), n > 32)
        yield _case(kind, 2, f"rs_{kind}_floats", partial(_registers, kind, 64, False))
    yield _case("tf32", 0, "ss_tf32_specials", _specials)
    for kind in ("fp16", "bf16"):
        for n in MN_NS:
            for a_mn, b_mn in ((True, True), (True, False), (False, True)):
                name = f"mn_{kind}_n{n}_{'a' * a_mn}{'b' * b_mn}"
                yield _case(kind, 1, name, partial(_mn_major, kind, n, a_mn, b_mn), n > 8)


def _case(kind: str, mode: int, name: str, build: Callable[[], Setup], digest_only: bool = False) -> Case:
    constants: dict[str, int | str] = {"TYPE": f"hc::{kind}", "MODE": mode}
    return Case(f"wgmma_{name}", "wgmma", 128, build, constants, digest_only=digest_only)
