"""Every shipped kernel compiles for every architecture of its family without a single spill; no GPU takes part."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from haloconv import jit
from haloconv.families import (
    FAMILIES,
    depthwise,
    depthwise_window,
    direct,
    halo_sm80_shipped,
    halo_sm80_wgrad,
    halo_sm90_shipped,
)
from haloconv.jit.source import KERNEL_FOLDER
from tests.nvrtc_ctypes import Nvrtc, library_folder

EVERY_ARCH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
WITHOUT_BEING_ASKED = ("sm_75", "sm_90a", "sm_120")  # the oldest, the newest, and where kernels were measured
SHIPPED = {
    "direct": direct.shipped_sources,
    "halo_sm80": halo_sm80_shipped.shipped_sources,
    "halo_sm80_wgrad": halo_sm80_wgrad.shipped_sources,
    "halo_sm90": halo_sm90_shipped.shipped_sources,
    "depthwise_window": depthwise_window.shipped_sources,
    "depthwise": depthwise.shipped_sources,
}
TENSOR_CORE_ARCHS = EVERY_ARCH[1:]
ARCHS = {
    "direct": EVERY_ARCH,
    "halo_sm80": TENSOR_CORE_ARCHS,
    "halo_sm80_wgrad": TENSOR_CORE_ARCHS,
    "halo_sm90": ("sm_90a",),
    "depthwise_window": EVERY_ARCH,
    "depthwise": EVERY_ARCH,
}
NEWER = (
    "depthwise_band",
    "depthwise_band_wgrad",
    "depthwise_tile",
)  # kernels of a family for every architecture that need sm_80
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


def test_every_kernel_file_is_in_the_matrix() -> None:
    assert set(SHIPPED) == set(ARCHS) == set(FAMILIES) - {"aten"}
    sources = [source for shipped in SHIPPED.values() for source in shipped()]
    assert {source.kernel for source in sources} == {path.stem for path in KERNEL_FOLDER.glob("*.cu")}
    assert len({source.digest for source in sources}) == len(sources)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Some architectures, or with ``--every-arch`` all: a kernel takes a second for each."""
    if "arch" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-arch")
        wanted = [
            (family, arch) for family, archs in ARCHS.items() for arch in archs if every or arch in WITHOUT_BEING_ASKED
        ]
        metafunc.parametrize(("family", "arch"), wanted)


def test_no_kernel_spills(family: str, arch: str) -> None:
    sources = [source for source in SHIPPED[family]() if arch != "sm_75" or source.kernel not in NEWER]
    assert _spills(sources, lambda source: jit.compile_source(source, arch).spill_bytes) == []


@pytest.mark.parametrize("major", OLD_NVRTCS)
def test_no_kernel_spills_on_volta(major: int) -> None:
    folder = library_folder(major)
    if folder is None:
        message = (
            f"NVRTC {major} is not installed: `make test` does it, or set HALOCONV_TEST_NVRTC{major} to its folder"
        )
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    nvrtc = Nvrtc(folder)
    assert nvrtc.version.split(".")[0] == str(major)
    assert _spills(direct.shipped_sources(), lambda source: nvrtc.compile(source, "sm_70")[1].spill_bytes) == []
