"""Environment variables and the stamp, without a GPU."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest
import torch

from haloconv import env, jit
from haloconv.version import __version__

PACKAGE = Path(env.__file__).resolve().parent


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


def test_processes_share_the_cores_unless_it_is_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for value, processes, threads in ((None, 12, "5"), (None, 100, "1"), ("7", 12, "7")):
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", value or "")
        if value is None:
            monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        env.share_cores(processes)
        assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == threads


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
