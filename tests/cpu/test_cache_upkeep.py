"""The kernel cache for operators: a limit to its size, folders that are only read, notes of failures, log lines."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from haloconv import env, jit
from haloconv.jit import cache
from haloconv.jit.upkeep import failures
from tests.toy_kernel import ARCH, fake_compile, toy_source


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Iterator[None]:
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setattr(cache, "compile_source", fake_compile)
    monkeypatch.delenv(env.CACHE_LIMIT, raising=False)
    cache._versions_in.cache_clear()
    yield
    cache._versions_in.cache_clear()


def restart() -> None:
    """As if another process began."""
    cache._in_memory.clear()


def entries(root: Path) -> set[str]:
    return {path.name for path in (root / "kernels").iterdir() if path.is_dir() and len(path.name) == 64}


def key(factor: int) -> str:
    return cache.cache_key(toy_source(factor), ARCH)


def made(root: Path, *factors: int) -> int:
    """Entries that were last used in this order; how many bytes one takes."""
    for second, factor in enumerate(factors):
        jit.get_kernel(toy_source(factor), ARCH)
        os.utime(root / "kernels" / key(factor) / "meta.json", (1000 + second, 1000 + second))
    restart()
    return jit.cache_size()[1] // len(factors)


# --- the limit


@pytest.mark.parametrize(
    "value, limit",
    [("", None), ("1000", 1000), ("500MB", 5 * 10**8), (" 2 gb", 2 * 10**9), ("1.5GiB", 3 << 29), ("64k", 64000)],
)
def test_sizes_are_read(monkeypatch: pytest.MonkeyPatch, value: str, limit: int | None) -> None:
    monkeypatch.setenv(env.CACHE_LIMIT, value)
    assert env.cache_limit_bytes() == limit


@pytest.mark.parametrize("value", ["much", "-1", "2 GB or so", "1e9"])
def test_what_is_no_size_is_warned_of(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.CACHE_LIMIT, value)
    with pytest.warns(RuntimeWarning, match="is no size, so that there is no limit"):
        assert env.cache_limit_bytes() is None


def test_the_least_recently_used_goes_first(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = made(cache_dir, 1, 2, 3)
    jit.get_kernel(toy_source(1), ARCH)  # used again
    restart()
    monkeypatch.setenv(env.CACHE_LIMIT, str(3 * size_bytes + 50))
    jit.get_kernel(toy_source(4), ARCH)
    assert entries(cache_dir) == {key(1), key(3), key(4)}
    assert jit.cache_size()[1] <= 3 * size_bytes + 50
    assert not list((cache_dir / "kernels").glob("*.partial"))


def test_without_a_limit_everything_stays(cache_dir: Path) -> None:
    made(cache_dir, 1, 2, 3, 4)
    assert len(entries(cache_dir)) == 4


def test_what_this_process_uses_stays(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(cache_dir, 1, 2)
    monkeypatch.setenv(env.CACHE_LIMIT, "1")
    jit.get_kernel(toy_source(1), ARCH)
    jit.get_kernel(toy_source(3), ARCH)
    assert entries(cache_dir) == {key(1), key(3)}


def test_what_another_process_works_on_stays(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(cache_dir, 1, 2)
    monkeypatch.setenv(env.CACHE_LIMIT, "1")
    with FileLock(cache_dir / "kernels" / f"{key(1)}.lock"):
        jit.get_kernel(toy_source(3), ARCH)
    assert entries(cache_dir) == {key(1), key(3)}


def test_an_entry_that_is_removed_meanwhile_is_compiled_again(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(cache_dir, 1)
    monkeypatch.setenv(env.CACHE_LIMIT, "1")
    jit.get_kernel(toy_source(2), ARCH)
    assert entries(cache_dir) == {key(2)}
    assert jit.get_kernel(toy_source(1), ARCH) == fake_compile(toy_source(1), ARCH)


# --- folders that are only read


def saved(folder: Path, *factors: int) -> Path:
    """A folder with kernels, as ``haloconv tune --save-kernels`` writes it."""
    with cache.collecting() as found:
        for factor in factors:
            jit.get_kernel(toy_source(factor), ARCH)
    cache.save_kernels(folder, found)
    jit.clear_cache()
    return folder


def no_compiler(*_: object) -> None:
    raise AssertionError("a kernel is compiled")


def closed(folder: Path) -> list[Path]:
    """Take every right to write away; what was closed, the folder last."""
    found = [*folder.rglob("*"), folder]
    for path in found:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return found


def test_kernels_are_read_from_a_folder_that_cannot_be_written(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "image", 1, 2)
    assert len(entries(folder)) == 2
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), f"others cannot read {path}"
    shut = closed(folder)
    before = {path: path.stat().st_mtime_ns for path in shut}
    monkeypatch.setenv(env.CACHE_DIR, os.pathsep.join([str(cache_dir), str(folder)]))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "compile_source", no_compiler)
        for factor in (1, 2):
            assert jit.get_kernel(toy_source(factor), ARCH) == fake_compile(toy_source(factor), ARCH)
    assert not entries(cache_dir) if (cache_dir / "kernels").exists() else True
    jit.get_kernel(toy_source(3), ARCH)
    assert entries(cache_dir) == {key(3)} and {path: path.stat().st_mtime_ns for path in shut} == before
    for path in reversed(shut):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_kernels_that_another_nvrtc_compiled_serve_and_none_is_needed(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "image", 1)
    monkeypatch.setenv(env.CACHE_DIR, f"{cache_dir}{os.pathsep}{folder}")
    monkeypatch.setattr(cache, "compile_source", no_compiler)
    monkeypatch.setattr(cache, "nvrtc_info", lambda: ("99.9", "elsewhere"))
    assert jit.get_kernel(toy_source(1), ARCH).nvrtc == "13.0"

    def missing() -> None:
        raise jit.ToolchainError("there is none")

    monkeypatch.setattr(cache, "nvrtc_info", missing)
    restart()
    assert jit.get_kernel(toy_source(1), ARCH) == fake_compile(toy_source(1), ARCH)
    with pytest.raises(jit.ToolchainError, match="there is none"):
        jit.get_kernel(toy_source(2), ARCH)


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX knows them")
@pytest.mark.parametrize("owner, mode, trusted", [(0, 0o755, True), (123456, 0o755, False), (0, 0o777, False)])
def test_a_folder_is_trusted_if_it_is_the_systems(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, trusted: bool
) -> None:
    folder = saved(tmp_path / "image", 1)
    (folder / "kernels").chmod(mode)
    facts, own = os.stat, folder / "kernels"

    def owned(self: Path, **options: object) -> os.stat_result:
        found = facts(self, **options)
        return os.stat_result((*found[:4], owner, *found[5:])) if self == own else found

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setenv(env.CACHE_DIR, f"{cache_dir}{os.pathsep}{folder}")
    compiles = jit.statistics().compiles
    jit.get_kernel(toy_source(1), ARCH)
    assert jit.statistics().compiles - compiles == (0 if trusted else 1)


def test_a_damaged_saved_kernel_is_compiled(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "image", 1)
    (folder / "kernels" / key(1) / "kernel.cubin").write_bytes(b"\x7fELF")
    monkeypatch.setenv(env.CACHE_DIR, f"{cache_dir}{os.pathsep}{folder}")
    assert jit.get_kernel(toy_source(1), ARCH) == fake_compile(toy_source(1), ARCH)
    assert entries(cache_dir) == {key(1)}


def test_an_empty_first_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.CACHE_DIR, f"{os.pathsep}{tmp_path}")
    assert env.cache_dir_override() is None and env.cache_dirs_to_read() == [tmp_path]
    assert jit.cache_root().parent.name == "haloconv"


# --- failures, logs


def failing(source: jit.KernelSource, arch: str) -> jit.Cubin:
    raise jit.CompileError(f"kernel 'toy' does not compile, at toy.cu:{source.constants[0][1]}\nthe log")


def test_what_did_not_compile_is_kept_and_only_the_newest(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compile_source", failing)
    for factor in range(23):
        with pytest.raises(jit.CompileError):
            jit.get_kernel(toy_source(factor), ARCH)
    kept = failures(cache_dir / "kernels")
    assert len(kept) == 20 and {stat.S_IMODE(path.parent.stat().st_mode) for path in kept} == {0o700}
    assert "at toy.cu:22\nthe log" in kept[0].read_text()
    jit.clear_cache()
    assert failures(cache_dir / "kernels") == []


def test_compiling_reading_writing_and_removing_are_logged(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="haloconv")
    made(cache_dir, 1)
    jit.get_kernel(toy_source(1), ARCH)
    restart()
    monkeypatch.setenv(env.CACHE_LIMIT, "1")
    jit.get_kernel(toy_source(2), ARCH)
    monkeypatch.setattr(cache, "compile_source", failing)
    with pytest.raises(jit.CompileError):
        jit.get_kernel(toy_source(3), ARCH)
    lines = [(each.name.removeprefix("haloconv."), each.getMessage()) for each in caplog.records]
    told = [(topic, line.split(str(cache_dir))[0]) for topic, line in lines]
    compiled = ("compile", f"toy for {ARCH} in 0.00 s by NVRTC 13.0")
    assert told[:-1] == [
        compiled, ("cache", "wrote "), ("compile", f"toy for {ARCH} was compiled before"), ("cache", "read "),
        compiled, ("cache", "wrote "), ("cache", "removed "), ("cache", told[-2][1]),
    ]  # fmt: skip
    assert told[-2][1].startswith("kernels in use take ") and told[-1][1].startswith(
        f"toy for {ARCH} does not compile: "
    )
