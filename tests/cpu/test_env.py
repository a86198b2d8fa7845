"""Environment variables, device facts and the stamp, without a GPU."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from haloconv import env, jit
from haloconv.version import __version__

PACKAGE = Path(env.__file__).resolve().parent

PROPRIETARY_DRIVER = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN_DRIVER = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0
"""


@pytest.fixture
def no_driver_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "version"
    monkeypatch.setattr(env, "_DRIVER_VERSION_FILE", path)
    env.device_facts.cache_clear()
    yield path
    env.device_facts.cache_clear()


def test_environment_variables_are_few_and_read_in_one_file() -> None:
    assert len(env.VARIABLES) <= 8
    readers = [path for path in PACKAGE.rglob("*.py") if re.search(r"os\.(environ(\.get|\[)|getenv)", path.read_text())]
    assert readers == [PACKAGE / "env.py"]


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    assert jit.cache_root() == tmp_path / "kernels"
    monkeypatch.setenv(env.CACHE_DIR, "~/somewhere")
    assert jit.cache_root() == Path.home() / "somewhere" / "kernels"
    monkeypatch.delenv(env.CACHE_DIR)
    unset = jit.cache_root()
    monkeypatch.setenv(env.CACHE_DIR, "")
    assert jit.cache_root() == unset and unset.name == "kernels" and unset.parent.name == "haloconv"


@pytest.mark.parametrize(
    "value, enabled", [(None, True), ("", True), ("1", True), ("0", False), ("off", False), (" No ", False)]
)
def test_the_disk_cache_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, value: str | None, enabled: bool) -> None:
    monkeypatch.delenv(env.CACHE, raising=False)
    if value is not None:
        monkeypatch.setenv(env.CACHE, value)
    assert env.disk_cache_enabled() is enabled


def test_variables_in_force_show_ours_always_and_others_when_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE, "0")
    monkeypatch.delenv(env.CACHE_DIR, raising=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    shown = env.variables_in_force()
    assert set(env.VARIABLES) <= set(shown)
    assert shown[env.CACHE] == "0" and shown[env.CACHE_DIR].startswith("not set")
    assert shown["NVIDIA_TF32_OVERRIDE"] == "0" and "CUDA_PATH" not in shown


@pytest.mark.parametrize("value, hidden", [(None, False), ("0,1", False), ("", True), ("-1", True)])
def test_hidden_gpus_are_noticed(monkeypatch: pytest.MonkeyPatch, value: str | None, hidden: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert env.gpus_hidden() is hidden


@pytest.mark.parametrize(
    "capability, arch",
    [((7, 0), "sm_70"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 1), "sm_121")],
)
def test_architecture_names(capability: tuple[int, int], arch: str) -> None:
    assert env.arch_of(capability) == arch


@pytest.mark.parametrize(
    "capability, kib",
    [((7, 0), 96), ((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((12, 0), 99), ((99, 0), 48)],
)
def test_shared_memory_limits(capability: tuple[int, int], kib: int) -> None:
    assert env.max_smem_bytes_of(capability) == kib * 1024


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
    facts = env.device_facts(0)
    assert facts == env.DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 150 << 30, expected, "580.95.05")
    assert env.device_facts(0) is facts and asked == [0]


@pytest.mark.parametrize("content, version", [(PROPRIETARY_DRIVER, "535.104.05"), (OPEN_DRIVER, "580.95.05")])
def test_the_driver_tells_its_version(no_driver_file: Path, content: str, version: str) -> None:
    no_driver_file.write_text(content)
    assert env.driver_version() == version


class StubDriver:
    """A driver library that supports CUDA 13.1 and has no other function."""

    def cuDriverGetVersion(self, number: object) -> int:
        number._obj.value = 13010
        return 0


def test_the_driver_version_without_its_file(monkeypatch: pytest.MonkeyPatch, no_driver_file: Path) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(env.ctypes, "CDLL", refuse)
    assert env.driver_version() == "none" and env.driver_cuda_version() == 0
    monkeypatch.setattr(env.ctypes, "CDLL", lambda name: StubDriver())
    assert env.driver_version() == "CUDA 13.1" and env.driver_cuda_version() == 13010


def test_a_copy_without_history_may_name_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "__file__", str(tmp_path / "haloconv" / "env.py"))
    assert env.environment_stamp()["commit"] == "none"
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "commit").write_text("0123456789ab\n")
    assert env.environment_stamp()["commit"] == "0123456789ab"


def test_the_stamp_names_where_and_with_what() -> None:
    stamp = env.environment_stamp()
    assert list(stamp) == [
        "gpu", "torch", "cudnn", "cuda_driver", "cuda_runtime", "driver", "python", "haloconv", "commit", "date",
    ]  # fmt: skip
    assert all(isinstance(value, str) and value for value in stamp.values())
    assert stamp["torch"] == torch.__version__ and stamp["haloconv"] == __version__
    assert stamp["python"] == platform.python_version()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|none", stamp["commit"])


def test_the_stamp_survives_a_machine_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(env, "__file__", str(tmp_path / "haloconv" / "env.py"))
    monkeypatch.setitem(os.environ, "PATH", "")
    assert env.environment_stamp()["commit"] == "none"
