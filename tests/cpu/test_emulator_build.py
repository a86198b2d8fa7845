"""What the emulator builds is kept on disk, or, where that fails, for the process alone, with one warning."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest

from haloconv import env
from haloconv.emulator import build

CONTENT = b"a module"


@pytest.fixture(autouse=True)
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder for the process alone, no warning given yet; the folder of the cache."""
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(build, "_private_folder", lambda: tmp_path / "private")
    monkeypatch.setattr(build, "_warned", False)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.delenv(env.CACHE, raising=False)
    return tmp_path / "cache" / "kernels" / "emulator"


def built(key: str, builds: list[str]) -> Path:
    def compile_to(path: Path) -> None:
        builds.append(key)
        path.write_bytes(CONTENT)

    path = build._built(key, compile_to)
    assert path.read_bytes() == CONTENT
    return path


def test_a_module_is_built_once_and_a_damaged_one_again(new_process: Path) -> None:
    builds: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = built("a", builds)
        assert path == built("a", builds) == new_process / "a.so" and builds == ["a"]
        path.write_bytes(b"half")
        built("a", builds)
    assert builds == ["a", "a"]
    assert {each.name for each in new_process.iterdir()} <= {"a.so", "a.sha256", "a.lock"}


def _full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Path, to: Path) -> None:
        if cache in Path(to).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
        replace(source, to)

    monkeypatch.setattr("os.replace", full)


def _no_room_for_a_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lock:
        def __init__(self, path: Path, **_: object) -> None:
            self.path = path

        def __enter__(self) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.path))

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(build, "FileLock", Lock)


def _no_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.parent.write_text("a file where the folder should be")


@pytest.mark.parametrize(
    ("broken", "says"),
    [(_full_disk, "No space left"), (_no_room_for_a_lock, "Read-only file system"), (_no_folder, "exists|Not a dir")],
)
def test_a_disk_that_keeps_nothing_is_warned_of_once(
    broken, says: str, new_process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules are built once each and run from a folder of the process; nothing is left in the cache."""
    broken(new_process, monkeypatch)
    builds: list[str] = []
    with pytest.warns(RuntimeWarning, match=says) as caught:
        paths = [built(key, builds) for key in ("a", "b", "a")]
    assert len(caught) == 1 and env.CACHE_DIR in str(caught[0].message)
    assert builds == ["a", "b"] and {path.parent for path in paths} == {tmp_path / "private"}
    left = new_process.iterdir() if new_process.is_dir() else ()
    assert [each.name for each in left if each.suffix not in (".lock", ".sha256")] == []
