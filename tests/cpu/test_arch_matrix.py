"""Every shipped kernel compiles for every architecture of its family without a single spill; no GPU takes part.

Without ``--every-arch`` a part is: for one architecture, of kernels without a stamp, sources in which the values of
every two constants occur together, else sources in which every value occurs, and so for Volta and for two others: both
of families that have a kernel without a stamp, else the one that the commit's seed says. Of kernels with a stamp it is
a quarter of these sources, which one the seed says, too. A stamp asks for all on the first one (tools/make_stamps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib import import_module

import pytest
import torch

from haloconv import jit
from haloconv.choose.trust import stamped
from haloconv.device import DeviceFacts, max_smem_bytes_of
from haloconv.families import FAMILIES, OWN
from haloconv.families.direct.family import DirectFamily
from haloconv.families.files import kernels_of
from haloconv.jit.source import SOURCE_ROOT, kernel_path
from haloconv.problem import ZEROS, Request, dense_request
from tests.covering import NO_REGISTER, constants_together, covering
from tests.emulated import FAMILY_RUNS
from tests.fuzz.campaign import commit_seed
from tests.nvrtc_ctypes import Nvrtc, library_folder
from tests.parts import PARTS, sources_of_commit
from tools.measured import stood_in

CPU = torch.device("cpu")

EVERY_ARCH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
MAIN_ARCH = "sm_90a"  # where kernels were measured
ALSO_WITHOUT_BEING_ASKED = ("sm_75", "sm_120")  # the oldest and the newest
MOST_CONSTANTS = 16
MODES = (ZEROS, ("circular", "circular"))
WITH_MORE_CONSTANTS = {  # of the layer + of the tile + of how tensors lie in memory and move
    "depthwise/march": 20,  # 9 + 4 + 7
    "depthwise/march_wgrad": 17,  # 7 + 5 + 5
    "depthwise_toeplitz/toeplitz": 18,  # 6 + 7 + 5
    "direct/direct": 24,  # 11 + 8 + 5
    "halo_sm80/conv": 18,  # 4 + 8 + 6
    "halo_sm80_wgrad/wgrad": 30,  # 9 + 9 + 12
    "halo_sm90/conv": 28,
    "halo_sm90/conv_edges": 30,  # its edges
    "halo_sm90/wgrad": 22,  # 1 + 14 + 7
    "halo_sm90/wgrad_edges": 24,  # its edges
}
"""How many each has: the extents of a layer alone are eight, and each tensor may lie in memory in a way of its own."""
TOGETHER_ON_MAIN, TOGETHER_ELSEWHERE = 2, 1  # how many constants' values meet in a part of the sources
# On the main one 2 are for kernels whose sources were not all compiled there, as those of a stamp that holds were.


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))


def _archs_of(name: str) -> tuple[str, ...]:
    """The architectures that a family has kernels for."""
    family, found = FAMILIES[name], []
    for arch in EVERY_ARCH:
        capability = divmod(_number(arch), 10)
        if capability == family.capability or (family.newer and capability > family.capability):
            found.append(arch)
    return tuple(found)


ARCHS = {name: _archs_of(name) for name in OWN}
BOXES_ARCH = 90  # where TMA takes boxes
OLD_NVRTCS = (12, 11)
THREADS = 2


def _spills(sources: list[jit.KernelSource], spill_bytes: Callable[[jit.KernelSource], int]) -> list[str]:
    """The sources that spill, with what they spill; compiled on two threads, as NVRTC lets other threads run."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(spill_bytes, sources))
    return [
        f"{source.entry} spills {spilled} bytes with {dict(source.constants)}"
        for source, spilled in zip(sources, found, strict=True)
        if spilled
    ]


@cache
def _requests(family: str) -> list[Request]:
    """What the family's kernels are asked for on the emulator, and the same of many large images."""
    runs = (run for run in FAMILY_RUNS[family]() if run.result in FAMILIES[family].directions)
    small = dict.fromkeys(run.case.problem(run.result, run.dtype) for run in runs)
    fp32 = "tf32" if FAMILIES[family].tensor_cores else "ieee"
    return [
        dense_request(replace(problem, precision=fp32) if problem.dtype == torch.float32 else problem, CPU)
        for each in small
        for problem in (each, replace(each, n=32, h=112, w=112))
    ]


@cache
def _takes(kernel: str, family: str, arch: str) -> bool:
    """Whether the kernel's host half takes one of the family's requests on a GPU of that architecture.

    Kernels without a host half of their own, or one that offers no configs, run wherever the others of the family do.
    """
    path = kernel_path(kernel)
    if not (SOURCE_ROOT / path).with_suffix(".py").is_file():
        return True
    host = import_module(f"haloconv.{path.replace('/', '.')}")
    if not hasattr(host, "configs"):
        return True
    capability = divmod(_number(arch), 10)
    facts = DeviceFacts(arch, arch, 132, capability, 1 << 36, max_smem_bytes_of(capability), "none")
    with stood_in(facts):
        asked = (replace(request, modes=modes) for request in _requests(family) for modes in MODES)
        return any(host.configs(request) for request in asked)


def _runs(source: jit.KernelSource, family: str, arch: str) -> bool:
    """Whether the source is for this architecture."""
    if dict(source.constants).get("BOXES") and _number(arch) < BOXES_ARCH:
        return False
    return _takes(source.kernel, family, arch)


def test_every_kernel_file_is_in_the_matrix() -> None:
    assert set(ARCHS) == set(OWN)
    sources = [source for name in OWN for source in FAMILIES[name].sources()]
    files = [path.relative_to(SOURCE_ROOT / "families") for path in SOURCE_ROOT.rglob("*.cu")]
    names = {f"{path.parts[0]}/{path.stem}": path for path in files}
    assert {source.kernel for source in sources} == set(names) and len(names) == len(files)
    assert {kernel_path(name) for name in names} == {f"families/{path.with_suffix('')}" for path in files}
    assert len({source.digest for source in sources}) == len(sources)


def test_kernels_that_need_more_than_their_family() -> None:
    """Every kernel is for some architecture of its family; those of the depthwise family are for fewer, or for all."""
    for name, archs in ARCHS.items():
        for kernel in {source.kernel for source in FAMILIES[name].sources()}:
            assert any(_takes(kernel, name, arch) for arch in archs), kernel
    found = {
        kernel: [arch for arch in EVERY_ARCH if _takes(f"depthwise/{kernel}", "depthwise", arch)]
        for kernel in ("march", "band", "pairs")
    }
    assert found == {"march": [*EVERY_ARCH], "band": [*EVERY_ARCH[1:]], "pairs": [MAIN_ARCH]}


def test_kernels_have_few_constants() -> None:
    """Those that have more may only shrink; a new kernel has at most 16."""
    found: dict[str, int] = {}
    for source in (source for name in OWN for source in FAMILIES[name].sources()):
        found[source.kernel] = max(found.get(source.kernel, 0), len(source.constants))
    assert {kernel: count for kernel, count in found.items() if count > MOST_CONSTANTS} == WITH_MORE_CONSTANTS


def _part(sources: list[jit.KernelSource], together: int) -> list[jit.KernelSource]:
    """Sources in which the values of every so many constants occur together as in all of ``sources``."""
    return covering(sources, partial(constants_together, number=together))


def test_four_seeds_in_a_row_compile_every_source_of_the_part() -> None:
    sources = [source for name in OWN for source in FAMILIES[name].sources()]
    quarters = [sources_of_commit(sources, seed) for seed in range(7, 7 + PARTS)]
    assert sorted(set().union(*({each.digest for each in quarter} for quarter in quarters))) == sorted(
        {source.digest for source in sources}
    )
    new = [source for source in sources if source.kernel not in stamped()]
    assert all(set(new) <= set(quarter) and len(quarter) <= len(sources) for quarter in quarters)


@pytest.mark.parametrize("together", [TOGETHER_ON_MAIN, TOGETHER_ELSEWHERE])
@pytest.mark.parametrize("family", OWN)
def test_the_part_has_all_that_so_many_constants_do_together(family: str, together: int) -> None:
    sources, of = FAMILIES[family].sources(), partial(constants_together, number=together)
    part = _part(sources, together)
    assert set().union(*map(of, part)) == set().union(*map(of, sources))
    assert part == _part(sources, together) and part == [source for source in sources if source in part]
    if family in ("direct", "halo_sm90"):
        assert len(part) < len(sources) / 2


def test_the_part_leaves_out_only_what_adds_no_pair() -> None:
    def source(**constants: int) -> jit.KernelSource:
        return jit.KernelSource("toy", "toy", tuple(constants.items()), "")

    product = [source(A=a, B=b, C=c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    assert 4 <= len(_part(product, 2)) < len(product) and len(_part(product, 1)) == 2
    assert _part(product[:2], 2) == product[:2] and _part([], 2) == []
    sizes = [source(A=a, B=a, SMEM_BYTES=size) for a in (0, 1) for size in (0, 16)]
    assert len(_part(sizes, 2)) == 2, "each size once is enough"
    rings = [source(A=0, SMEM_BYTES=16 * ring, RING=ring) for ring in (2, 3)]
    assert _part(rings, 1) == rings, "the length of a ring unrolls loops and fixes addresses"
    assert len(_part(sizes[:2], 1)) == 1, "the size of shared memory changes no register"


def test_what_other_architectures_leave_out_is_read_by_assertions_alone() -> None:
    files = [file for file in SOURCE_ROOT.rglob("*.cu*") if NO_REGISTER in file.read_text(encoding="utf-8")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if NO_REGISTER in line]
    assert files and all(line.startswith(("//   ", "static_assert(")) for line in lines), lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Some architectures, or with ``--every-arch`` all: a kernel takes a second for each."""
    if "arch" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-arch")
        drawn = ALSO_WITHOUT_BEING_ASKED[commit_seed() % len(ALSO_WITHOUT_BEING_ASKED)]

        def is_named(family: str, arch: str) -> bool:
            new = not set(kernels_of(family)) <= set(stamped())
            return every or arch in (MAIN_ARCH, drawn) or (new and arch in ALSO_WITHOUT_BEING_ASKED)

        pairs = [(family, arch) for family, archs in ARCHS.items() for arch in archs if is_named(family, arch)]
        metafunc.parametrize(("family", "arch"), pairs)


@pytest.fixture
def every(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--every-arch")


def test_no_kernel_spills(family: str, arch: str, every: bool) -> None:
    sources = [source for source in FAMILIES[family].sources() if _runs(source, family, arch)]
    if not every:
        whole_once = stamped() if arch == MAIN_ARCH else {source.kernel: None for source in sources}
        old = [source for source in sources if source.kernel in whole_once]
        new = [source for source in sources if source.kernel not in whole_once]
        sources = sources_of_commit(_part(old, TOGETHER_ELSEWHERE) + _part(new, TOGETHER_ON_MAIN), commit_seed())
    assert _spills(sources, lambda source: jit.compile_source(source, arch).spill_bytes) == []


@pytest.mark.parametrize("major", OLD_NVRTCS)
def test_no_kernel_spills_on_volta(major: int, every: bool) -> None:
    folder = library_folder(major)
    if folder is None:
        message = (
            f"NVRTC {major} is not installed: `make test` does it, or set HALOCONV_TEST_NVRTC{major} to its folder"
        )
        pytest.skip(message)
    nvrtc = Nvrtc(folder)
    sources = DirectFamily().sources()
    sources = sources if every else _part(sources, TOGETHER_ELSEWHERE)
    assert nvrtc.version.split(".")[0] == str(major)
    assert _spills(sources, lambda source: nvrtc.compile(source, "sm_70")[1].spill_bytes) == []
