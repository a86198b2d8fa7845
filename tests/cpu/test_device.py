"""Facts about devices and the driver, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from haloconv import device
from haloconv.device import DeviceFacts

PROPRIETARY_DRIVER = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN_DRIVER = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0
"""


@pytest.fixture
def no_driver_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "version"
    monkeypatch.setattr(device, "_DRIVER_VERSION_FILE", path)
    device.device_facts.cache_clear()
    yield path
    device.device_facts.cache_clear()


@pytest.mark.parametrize(
    "capability, arch",
    [((7, 0), "sm_70"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 1), "sm_121")],
)
def test_architecture_names(capability: tuple[int, int], arch: str) -> None:
    assert device.arch_of(capability) == arch


@pytest.mark.parametrize(
    "capability, kib",
    [((7, 0), 96), ((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((12, 0), 99), ((99, 0), 48)],
)
def test_shared_memory_limits(capability: tuple[int, int], kib: int) -> None:
    assert device.max_smem_bytes_of(capability) == kib * 1024


@pytest.mark.parametrize("reported, expected", [(232448, 232448), (None, 227 * 1024)])
def test_device_facts(
    monkeypatch: pytest.MonkeyPatch, no_driver_file: Path, reported: int | None, expected: int
) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 << 30
    )
    if reported is not None:
        properties.shared_memory_per_block_optin = reported
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    no_driver_file.write_text(OPEN_DRIVER)
    facts = device.device_facts(0)
    assert facts == DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 150 << 30, expected, "580.95.05")
    assert device.device_facts(0) is facts and asked == [0]


@pytest.mark.parametrize("content, version", [(PROPRIETARY_DRIVER, "535.104.05"), (OPEN_DRIVER, "580.95.05")])
def test_the_driver_tells_its_version(no_driver_file: Path, content: str, version: str) -> None:
    no_driver_file.write_text(content)
    assert device.driver_version() == version


class StubDriver:
    """A driver library that supports CUDA 13.1 and has no other function."""

    def cuDriverGetVersion(self, number: object) -> int:
        number._obj.value = 13010
        return 0


def test_the_driver_version_without_its_file(monkeypatch: pytest.MonkeyPatch, no_driver_file: Path) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", refuse)
    assert device.driver_version() == "none" and device.driver_cuda_version() == 0
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: StubDriver())
    assert device.driver_version() == "CUDA 13.1" and device.driver_cuda_version() == 13010
