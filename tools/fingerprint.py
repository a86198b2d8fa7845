"""What the kernels of this checkout are: every CI source, and every launch of the emulator's test runs.

``python -m tools.fingerprint OUT.json`` writes them down, with the hashes that stamps and records are tied to. Nothing
is compiled and nothing runs. ``--cubins KERNEL`` compiles the CI sources of one .cu file instead and hashes their code,
``--launched KERNEL`` what the runs launch of it.
Two checkouts whose fingerprints are equal compute the same: ``tools.carry`` compares them.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from haloconv import plan
from haloconv.device import Device, DeviceFacts, max_smem_bytes_of, set_stand_in
from haloconv.emulator.device import EmulatedDevice
from haloconv.families import FAMILIES, OWN
from haloconv.families.files import canonical_device, device_hash, kernels_of
from haloconv.jit import TENSOR_MAP_BYTES, KernelSource, Pixels, get_kernel
from haloconv.jit.params import params_of, size_of, unpacked
from tests import oracle
from tests.emulated import FAMILY_RUNS, SM_COUNT, Run, forced
from tests.sources import compile_all
from tools.stamps import all_hashes

_ARCH = "sm_90a"
_NO_BITS = 8  # SHT_NOBITS: a section without content in the file
_LINKED = (".text.", ".nv.constant", ".nv.info", ".nv.shared.", ".nv.global", ".rodata")


def digest_of(source: KernelSource) -> str:
    """SHA-256, in hexadecimal, of what the compiler sees of a source but for its entry's name."""
    return hashlib.sha256(canonical_device(source.code).replace(source.entry, "ENTRY_NAME").encode()).hexdigest()


def code_hash(image: bytes, entry: str) -> str:
    """SHA-256, in hexadecimal, of a cubin's code, constants and launch attributes; names are left out.

    Reads the section table of an ELF file of 64 bits (System V ABI, chapter 4).
    """
    table, entry_bytes, count, names_at = (*struct.unpack_from("<Q", image, 40), *struct.unpack_from("<3H", image, 58))
    headers = [struct.unpack_from("<2I4Q", image, table + i * entry_bytes) for i in range(count)]
    names = headers[names_at][4]
    total = hashlib.sha256()
    for name_at, kind, _, _, offset, size in headers:
        name = image[names + name_at : image.index(b"\0", names + name_at)].decode().replace(entry, "ENTRY_NAME")
        if name.startswith(_LINKED):
            content = b"" if kind == _NO_BITS else image[offset : offset + size]
            total.update(f"{name} {size}\n".encode() + content)
    return total.hexdigest()


class _Kernel:
    """A kernel whose launches are written down."""

    def __init__(self, device: TapeDevice, source: KernelSource) -> None:
        self.device, self.source = device, source

    def launch(self, grid_x: int, block_threads: int, smem_bytes: int, stream: int, params_address: int) -> None:
        self.device.note(self.source, (grid_x, block_threads, smem_bytes), params_address)

    def cluster_launch(self, *shape: int) -> Callable[[int, int], None]:
        return lambda stream, params_address: self.device.note(self.source, shape, params_address)


class TapeDevice(EmulatedDevice):
    """An emulated device on which nothing runs: ``tape`` has a line for each launch, ``launched`` its source.

    An address is told as the number of its tensor, in the order in which launches first meet them, and the byte in it.
    """

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(0, facts, 0.0, False)
        self.tape: list[list] = []
        self.launched: list[KernelSource] = []
        self._met: dict[int, int] = {}
        self._maps: list[tuple] = []

    def load(self, source: KernelSource, smem_bytes: int) -> _Kernel:
        return _Kernel(self, source)

    def encode_tiled(
        self, data_type: int, address: int, *shape: Sequence[int], swizzle: int, pixels: Pixels | None = None
    ) -> bytes:
        extents, strides, box = shape
        im2col = () if pixels is None else (pixels,)
        self._maps.append((int(data_type), address, list(extents), list(strides), list(box), int(swizzle), *im2col))
        return len(self._maps).to_bytes(TENSOR_MAP_BYTES, "little")

    def note(self, source: KernelSource, shape: tuple[int, ...], params_address: int) -> None:
        fields = params_of(source)
        block = ctypes.string_at(ctypes.c_size_t.from_address(params_address).value, size_of(fields))
        values: list[object] = []
        for field, value in zip(fields, unpacked(fields, block), strict=True):
            if field.is_pointer and isinstance(value, int):
                values.append(self._named(value))
            elif field.is_map and isinstance(value, bytes):
                values.append(self._named_map(int.from_bytes(value, "little")))
            else:
                values.append(value)
        constants = [value for _, value in source.constants]
        self.tape.append([source.kernel, constants, list(shape), values])
        self.launched.append(source)

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
def recording() -> Iterator[TapeDevice]:
    """Inside, launches are written down instead of run, on a stand-in for a Hopper GPU of few multiprocessors."""
    facts = DeviceFacts("emulated sm_90a", "sm_90a", SM_COUNT, (9, 0), 141 << 30, max_smem_bytes_of((9, 0)), "none")
    device = TapeDevice(facts)
    plan.clear_plans()
    set_stand_in(Device(facts, device.load, device.encode_tiled, device.watch))
    try:
        with device:
            yield device
    finally:
        set_stand_in(None)
        plan.clear_plans()


def recorded(run: Run) -> TapeDevice:
    """Every launch of a run of the emulator's tests: kernel, constants, grid, threads, shared memory, arguments."""
    tensors = run.tensors
    with recording() as device, forced(run.family, run.shape):
        oracle.run(run.result, tensors, run.forced)
    return device


def fingerprint(families: list[str]) -> dict:
    """``sources``: [kernel, entry, digest] of every CI source of a family; ``tapes``: run -> digest of its tape."""
    torch.set_num_threads(1)
    sources = {
        family: [[one.kernel, one.entry, digest_of(one)] for one in FAMILIES[family].sources()] for family in families
    }
    tapes = {}
    for family in families:
        for run in FAMILY_RUNS[family]():
            tapes[str(run)] = recorded(run).tape
    device = {kernel: device_hash(kernel) for family in families for kernel in kernels_of(family)}
    return {"sources": sources, "tapes": tapes, "hashes": all_hashes(), "device": device}


def cubins(kernel: str) -> list[str]:
    """The code of every CI source of a .cu file, by hash."""
    found = {one.digest: one for name in OWN for one in FAMILIES[name].sources() if one.kernel == kernel}
    return list(code_of(found).values())


def launched(kernel: str) -> dict[str, list[str]]:
    """The code of each launch of a .cu file, by hash, in each run that launches it."""
    torch.set_num_threads(1)
    runs = (run for family in sorted(OWN) for run in FAMILY_RUNS[family]())
    sources = {str(run): [one for one in recorded(run).launched if one.kernel == kernel] for run in runs}
    code = code_of({one.digest: one for each in sources.values() for one in each})
    return {run: [code[one.digest] for one in each] for run, each in sources.items() if each}


def code_of(sources: dict[str, KernelSource]) -> dict[str, str]:
    """What each of these sources compiles to, by hash."""
    compile_all(sources.values(), _ARCH)
    return {key: code_hash(get_kernel(one, _ARCH).image, one.entry) for key, one in sources.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", action="append", choices=sorted(OWN), help="only these (default: all)")
    parser.add_argument("--cubins", metavar="KERNEL", help="compile this kernel's CI sources for sm_90a, and no more")
    parser.add_argument("--launched", metavar="KERNEL", help="compile what runs launch of this kernel, and no more")
    options = parser.parse_args()
    if options.launched:
        options.out.write_text(json.dumps({"launched": launched(options.launched)}), encoding="utf-8")
        return
    if options.cubins:
        options.out.write_text(json.dumps({"cubins": cubins(options.cubins)}), encoding="utf-8")
        return
    found = fingerprint(options.family or sorted(OWN))
    options.out.write_text(json.dumps(found), encoding="utf-8")
    counts = f"{sum(map(len, found['sources'].values()))} sources, {len(found['tapes'])} runs"
    print(f"{options.out}: {counts}, {sum(map(len, found['tapes'].values()))} launches")


if __name__ == "__main__":
    main()
