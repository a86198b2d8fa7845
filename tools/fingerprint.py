"""What the kernels of this checkout are: the text of every CI source, and every launch of the emulator's test runs.

``python -m tools.fingerprint OUT.json`` writes them down. Nothing is compiled and nothing runs. Two checkouts whose
fingerprints are equal compute the same: ``tools.carry`` compares them.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from haloconv import env, plan
from haloconv.emulator.device import EmulatedDevice
from haloconv.exporting.params import params_of, size_of, unpacked
from haloconv.families.shipped import SHIPPED
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource
from tests import oracle
from tests.emulated import FAMILY_RUNS, MODULES, SM_COUNT, Run, tiles_of

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SPACE = re.compile(r"\s+")


def canonical(text: str) -> str:
    """The text without comments and blank space that means nothing; a directive keeps its line."""
    lines = (_SPACE.sub(" ", line).strip() for line in _COMMENT.sub("", text.replace("\\\n", " ")).split("\n"))
    return "\n".join(line for line in lines if line)


def digest_of(source: KernelSource) -> str:
    """SHA-256, in hexadecimal, of what the compiler sees of a source but for its entry's name."""
    return hashlib.sha256(canonical(source.text).replace(source.entry, "ENTRY_NAME").encode()).hexdigest()


class _Kernel:
    """A kernel whose launches are written down."""

    def __init__(self, device: TapeDevice, source: KernelSource) -> None:
        self.device, self.source = device, source

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        self.device.note(self.source, (grid_x, block_threads, smem_bytes), params_address)

    def overlapping(self, grid_x: int, block_threads: int, smem_bytes: int) -> object:
        return lambda stream, params: self.device.note(self.source, (grid_x, block_threads, smem_bytes), params)


class TapeDevice(EmulatedDevice):
    """An emulated device on which nothing runs: ``tape`` has a line for each launch.

    An address is told as the number of its tensor, in the order in which launches first meet them, and the byte in it.
    """

    def __init__(self, facts: env.DeviceFacts) -> None:
        super().__init__(0, facts, 0.0, False)
        self.tape: list[list] = []
        self._met: dict[int, int] = {}
        self._maps: list[tuple] = []

    def load(self, source: KernelSource, smem_bytes: int) -> _Kernel:
        return _Kernel(self, source)

    def encode_tiled(self, data_type, address, extents, strides, box, *, swizzle) -> bytes:
        self._maps.append((int(data_type), address, list(extents), list(strides), list(box), int(swizzle)))
        return len(self._maps).to_bytes(TENSOR_MAP_BYTES, "little")

    def note(self, source: KernelSource, shape: tuple[int, int, int], params_address: int) -> None:
        fields = params_of(source)
        block = ctypes.string_at(ctypes.c_void_p.from_address(params_address).value, size_of(fields))
        values = []
        for field, value in zip(fields, unpacked(fields, block), strict=True):
            if field.is_pointer:
                value = self._named(value)
            elif field.is_map:
                value = self._named_map(int.from_bytes(value, "little"))
            values.append(value)
        constants = [value for _, value in source.constants]
        self.tape.append([source.kernel, constants, list(shape), values])

    def _named_map(self, number: int) -> list | None:
        if not number:
            return None
        data_type, address, *rest = self._maps[number - 1]
        return [data_type, self._named(address), *rest]

    def _named(self, address: int) -> list[int] | None:
        if not address:
            return None
        spans = [(each.begin, each.end) for each in self.regions()]
        begin = max((b for b, e in spans if b <= address < e or b == address), default=None)
        if begin is None:
            raise RuntimeError(f"a launch got an address of no known tensor: {address:#x}")
        return [self._met.setdefault(begin, len(self._met)), address - begin]


@contextmanager
def _recording() -> Iterator[TapeDevice]:
    """Inside, launches are written down instead of run, on a stand-in for a Hopper GPU of few multiprocessors."""
    facts = env.DeviceFacts(
        "emulated sm_90a", "sm_90a", SM_COUNT, (9, 0), 141 << 30, env.max_smem_bytes_of((9, 0)), "none"
    )
    device = TapeDevice(facts)
    plan.clear_plans()
    env.set_stand_in(env.StandIn(facts, device.load, device.watch, device.encode_tiled))
    try:
        with device:
            yield device
    finally:
        env.set_stand_in(None)
        plan.clear_plans()


def tape_of(run: Run) -> list[list]:
    """Every launch of a run of the emulator's tests: kernel, constants, grid, threads, shared memory, arguments."""
    tensors = run.tensors
    forced = MODULES[run.family].forced if run.family in MODULES else tiles_of
    with _recording() as device, forced(run.shape):
        oracle.run(run.result, tensors, run.forced)
    return device.tape


def fingerprint(families: list[str]) -> dict:
    """``sources``: [kernel, entry, digest] of every CI source of a family; ``tapes``: run -> digest of its tape."""
    torch.set_num_threads(1)
    sources = {family: [[one.kernel, one.entry, digest_of(one)] for one in SHIPPED[family]()] for family in families}
    tapes = {}
    for family in families:
        for run in FAMILY_RUNS[family]():
            tapes[str(run)] = tape_of(run)
    return {"sources": sources, "tapes": tapes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", action="append", choices=sorted(SHIPPED), help="only these (default: all)")
    options = parser.parse_args()
    found = fingerprint(options.family or sorted(SHIPPED))
    options.out.write_text(json.dumps(found), encoding="utf-8")
    counts = f"{sum(map(len, found['sources'].values()))} sources, {len(found['tapes'])} runs"
    print(f"{options.out}: {counts}, {sum(map(len, found['tapes'].values()))} launches")


if __name__ == "__main__":
    main()
