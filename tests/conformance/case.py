"""One conformance case: a small kernel, its inputs from a seed, and what NumPy says that it gives.

Words are little-endian. All randomness comes from PCG64's raw stream, which NumPy promises never to change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from haloconv.jit import KernelSource
from haloconv.jit.source import _inlined

FOLDER = Path(__file__).resolve().parent
ENTRY = "conformance"
MAX_INPUTS, MAX_OUTPUTS, MAX_MAPS, MAX_SCALARS = 4, 2, 2, 16
SENTINEL = 0xA5
"""Every byte of an output before the kernel runs."""

Constants = tuple[tuple[str, int | str], ...]
_INCLUDE = re.compile(r'#include "(.+)"')


class Random:
    """Random numbers that are the same in every version of NumPy."""

    def __init__(self, name: str) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        self._stream = np.random.PCG64(seed)

    def words(self, *shape: int) -> np.ndarray:
        """Uniform uint32."""
        count = int(np.prod(shape))
        return self._stream.random_raw((count + 1) // 2).view(np.uint32)[:count].reshape(shape)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Uniform in [low, high], int64 (up to a bias of the modulus)."""
        return (self.words(*shape) % np.uint32(high - low + 1)).astype(np.int64) + low

    def floats(self, *shape: int) -> np.ndarray:
        """Uniform in [-1, 1), float32 with all bits of the fraction in use."""
        return (self.words(*shape).astype(np.float64) * 2.0**-31 - 1.0).astype(np.float32)


@dataclass(frozen=True)
class MapSpec:
    """A tensor map over input or output number ``index``: the arguments of the driver's encoders by name.

    ``arguments`` are those of emulator.tensor_map.encode_tiled, or encode_im2col if ``im2col``, without the address;
    the tensor starts ``offset_bytes`` into the array.
    """

    array: str
    arguments: dict
    im2col: bool = False
    offset_bytes: int = 0


@dataclass(frozen=True)
class Setup:
    """A case made ready: inputs, and each output as it should be.

    ``tolerance`` bounds |got - expected| of the first output (float32); None means the same bits, where NaN equals NaN.
    ``initial`` is what the first output holds before, if that matters.
    """

    inputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]
    scalars: tuple[int, ...] = ()
    maps: tuple[MapSpec, ...] = ()
    tolerance: np.ndarray | None = None
    initial: np.ndarray | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over the inputs and the scalars."""
        parts = [each.tobytes() for each in self.inputs] + [repr(self.scalars).encode()]
        return hashlib.sha256(b"|".join(parts)).hexdigest()


@dataclass(frozen=True, eq=False)
class Case:
    """``kernel``.cu of this folder with ``constants``, one block of ``threads``; ``build`` makes the Setup."""

    name: str
    kernel: str
    threads: int
    build: Callable[[], Setup]
    constants: dict[str, int | str] = field(default_factory=dict)
    smem_bytes: int = 64 * 1024
    digest_only: bool = False

    def setup(self) -> Setup:
        """The inputs and the expected outputs."""
        return self.build()

    def source(self) -> KernelSource:
        """The source that NVRTC and the emulator compile."""
        return _source(self.kernel, tuple(self.constants.items()))


@lru_cache(maxsize=64)
def _source(kernel: str, constants: Constants) -> KernelSource:
    """The constants, the headers that the prelude includes, the prelude, the kernel."""
    return joined(kernel, ENTRY, constants, (FOLDER / "prelude.cuh", FOLDER / f"{kernel}.cu"))


def joined(kernel: str, entry: str, constants: Constants, files: tuple[Path, ...]) -> KernelSource:
    """The constants and the files, which lie outside the package, with the package's headers that they include."""
    seen: set[str] = set()
    lines = [f"#define {name} {value}" for name, value in constants]
    for file in files:
        lines.append(f"//@ begin {file.name}")
        for line in file.read_text(encoding="utf-8").splitlines():
            include = _INCLUDE.match(line)
            if include is None:
                lines.append(line)
            elif include[1] not in seen:
                lines.extend(_inlined(include[1], seen))
        lines.append(f"//@ end {file.name}")
    return KernelSource(kernel, entry, constants, "\n".join(lines) + "\n")


def mismatch(setup: Setup, outputs: tuple[np.ndarray, ...]) -> str:
    """What is wrong with ``outputs``; empty if they are as expected."""
    for index, (got, expected) in enumerate(zip(outputs, setup.expected, strict=True)):
        if index == 0 and setup.tolerance is not None:
            error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
            wrong = ~(error <= setup.tolerance)
        else:
            wrong = ~same(got, expected)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            which = f"{int(wrong.sum())} of {wrong.size} elements"
            return f"output {index}: {which} differ, first at {at}: got {got[at]!r}, expected {expected[at]!r}"
    return ""


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Element by element: the same bits, or both NaN."""
    bits = f"u{a.dtype.itemsize}"
    equal = a.view(bits) == b.view(bits)
    return equal | (np.isnan(a) & np.isnan(b)) if a.dtype.kind == "f" else equal
