"""The kernel cache: hits, misses, damage, folders that cannot be used, threads and sixteen racing processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from haloconv import env, jit
from haloconv.emulator import EmulatorError, Module, available
from haloconv.jit import cache
from haloconv.jit.launch import LaunchShape
from tests.toy_kernel import ARCH, fake_compile, toy_source

ROOT = Path(__file__).resolve().parents[2]
FILES = ("source.cu", "kernel.cubin", "meta.json")
PROCESSES = 16


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in memory and no warning given yet, as at the start of a process."""
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setattr(cache, "compile_source", fake_compile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _restart() -> None:
    cache._in_memory.clear()


def _work(call: Callable[[], object]) -> tuple[int, int]:
    """How many compiles and disk hits ``call`` caused."""
    before = jit.statistics()
    call()
    after = jit.statistics()
    return after.compiles - before.compiles, after.disk_hits - before.disk_hits


def _get(factor: int = 3) -> tuple[int, int]:
    source = toy_source(factor)

    def check() -> None:
        assert jit.get_kernel(source, ARCH) == fake_compile(source, ARCH)

    return _work(check)


def _entry(root: Path, factor: int = 3) -> Path:
    return root / "kernels" / cache.cache_key(toy_source(factor), ARCH)


def test_compiled_once_then_found_in_memory_then_on_disk(cache_dir: Path) -> None:
    assert _get() == (1, 0)
    assert _get() == (0, 0)
    _restart()
    assert _get() == (0, 1)
    assert _get(factor=4) == (1, 0)


def test_the_real_compiler_gives_the_same_kernel_from_disk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compile_source", jit.compile_source)
    compiled = jit.get_kernel(toy_source(), ARCH)
    _restart()
    assert _work(lambda: jit.get_kernel(toy_source(), ARCH)) == (0, 1)
    assert jit.get_kernel(toy_source(), ARCH) == compiled


def test_an_entry_holds_the_source_the_cubin_and_the_report(cache_dir: Path) -> None:
    _get()
    entry = _entry(cache_dir)
    assert sorted(path.name for path in entry.iterdir()) == sorted(FILES)
    assert (entry / "source.cu").read_text() == toy_source().code
    assert (entry / "kernel.cubin").read_bytes() == fake_compile(toy_source(), ARCH).image
    report = json.loads((entry / "meta.json").read_text())["report"]
    assert report["registers"] == 24 and report["spill_bytes"] == 0 and report["static_smem_bytes"] == 128


def test_the_key_depends_on_all_that_the_cubin_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache.cache_key(toy_source(), ARCH), cache.cache_key(toy_source(), "sm_86")}
    keys.add(cache.cache_key(toy_source(factor=4), ARCH))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "nvrtc_info", lambda: ("12.9", "elsewhere"))
        keys.add(cache.cache_key(toy_source(), ARCH))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "COMPILE_FLAGS", (*cache.COMPILE_FLAGS, "--use_fast_math"))
        keys.add(cache.cache_key(toy_source(), ARCH))
    assert len(keys) == 5


# --- damage


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_lost_file_is_a_miss_and_is_repaired(cache_dir: Path, name: str) -> None:
    _get()
    path = _entry(cache_dir) / name
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        _restart()
        assert _get() == (1, 0), f"{name} cut to {length} bytes was taken"
        assert path.read_bytes() == whole
    path.unlink()
    _restart()
    assert _get() == (1, 0)
    _restart()
    assert _get() == (0, 1)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_a_miss(cache_dir: Path, name: str) -> None:
    _get()
    path = _entry(cache_dir) / name
    whole = path.read_bytes()
    step = 1 if name == "meta.json" else 7
    for position in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert cache._read_entry(path.parent.name, toy_source()) is None, f"bit of byte {position} of {name}"
    _restart()
    assert _get() == (1, 0)


@pytest.mark.parametrize("meta", [b"[]", b"{}", b'{"report": 3, "checksum": ""}', b"\xff\xfe", b"[" * 5000])
def test_foreign_content_of_meta_is_a_miss(cache_dir: Path, meta: bytes) -> None:
    _get()
    (_entry(cache_dir) / "meta.json").write_bytes(meta)
    _restart()
    assert _get() == (1, 0)


def test_an_entry_of_another_source_under_this_key_is_a_miss(cache_dir: Path) -> None:
    _get(factor=3)
    _entry(cache_dir, 3).rename(_entry(cache_dir, 4))
    assert _get(factor=4) == (1, 0)


# --- folders that cannot be used


def _blocked(cache_dir: Path) -> None:
    cache_dir.write_text("a file where the folder should be")


def test_an_unusable_folder_is_reported_once_and_kernels_are_compiled(cache_dir: Path) -> None:
    _blocked(cache_dir)
    with pytest.warns(RuntimeWarning, match="not kept on disk.*HALOCONV_CACHE_DIR") as caught:
        assert _get(factor=3) == (1, 0)
        assert _get(factor=4) == (1, 0)
    assert len(caught) == 1
    assert _get(factor=3) == (0, 0)
    assert jit.cache_size() == (0, 0) and jit.clear_cache() == 0


def test_a_full_disk_is_reported_and_leaves_nothing_behind(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write_file", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert _get() == (1, 0)
    assert [path.name for path in (cache_dir / "kernels").iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX knows them")
class TestPermissions:
    def test_nobody_else_can_read_or_write(self, cache_dir: Path) -> None:
        old = os.umask(0)
        try:
            _get()
        finally:
            os.umask(old)
        paths = [cache_dir / "kernels", *(cache_dir / "kernels").rglob("*")]
        assert len(paths) >= 5
        for path in paths:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    def test_a_folder_of_another_user_is_not_trusted(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _get()
        _restart()
        monkeypatch.setattr(os, "getuid", lambda: 123456)
        with pytest.warns(RuntimeWarning, match="another user"):
            assert _get() == (1, 0)

    def test_a_folder_that_others_can_write_is_not_trusted(self, cache_dir: Path) -> None:
        _get()
        _restart()
        (cache_dir / "kernels").chmod(0o777)
        with pytest.warns(RuntimeWarning, match="written by others"):
            assert _get() == (1, 0)

    def test_a_folder_that_others_can_read_is_closed(self, cache_dir: Path) -> None:
        (cache_dir / "kernels").mkdir(parents=True, mode=0o755)
        (cache_dir / "kernels").chmod(0o755)
        _get()
        assert stat.S_IMODE((cache_dir / "kernels").stat().st_mode) == 0o700


def test_the_disk_can_be_left_out(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE, "0")
    assert _get() == (1, 0)
    assert _get() == (0, 0)
    assert not cache_dir.exists()


# --- size and clearing


def test_clearing_removes_entries_and_leftovers_and_nothing_else(cache_dir: Path) -> None:
    _get(factor=3)
    _get(factor=4)
    bystander = cache_dir / "kernels" / "notes.txt"
    bystander.write_text("mine")
    (cache_dir / "kernels" / "0123.partial").mkdir()
    entries, size_bytes = jit.cache_size()
    assert entries == 2
    assert size_bytes == sum(path.stat().st_size for path in cache_dir.rglob("*/*/*"))
    assert jit.clear_cache() == 2
    assert list((cache_dir / "kernels").iterdir()) == [bystander]
    assert _get(factor=3) == (1, 0)


def test_clearing_empties_the_emulators_folder(cache_dir: Path) -> None:
    folder = cache_dir / "kernels" / "emulator"
    folder.mkdir(parents=True, mode=0o700)
    key = "ab" * 32
    for name in (f"{key}.so", f"{key}.sha256", f"{key}.lock", "0123.partial", "notes.txt"):
        (folder / name).write_bytes(b"12345")
    _get()
    entry_bytes = sum(path.stat().st_size for path in _entry(cache_dir).iterdir())
    assert jit.cache_size() == (2, entry_bytes + 10)
    assert jit.clear_cache() == 2
    assert list((cache_dir / "kernels").rglob("*")) == [folder, folder / "notes.txt"]
    assert jit.cache_size() == (0, 0) and jit.clear_cache() == 0


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_module_of_the_emulator_outlives_clearing(emulator_loaded: None, cache_dir: Path) -> None:
    body = "extern __shared__ char dynamic_smem[];\ndynamic_smem[0] = 1;"
    code = f'//@ begin toy.cu\nextern "C" __global__ void toy() {{\n{body}\n}}\n//@ end toy.cu\n'
    module = Module(jit.KernelSource("toy", "toy", (), code))
    built = len(list((cache_dir / "kernels" / "emulator").glob("*.so")))
    assert built >= 1 and jit.clear_cache() == built and jit.cache_size() == (0, 0)
    assert module.run(LaunchShape(1, 1, 64), 0, []) is None
    with pytest.raises(EmulatorError) as caught:
        module.run(LaunchShape(1, 1), 0, [])
    assert [finding.place for finding in caught.value.findings] == ["toy.cu:3"]


# --- races


def test_threads_compile_a_kernel_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compile_source", _slow_compile)
    with ThreadPoolExecutor(8) as pool:

        def together() -> None:
            cubins = list(pool.map(lambda _: jit.get_kernel(toy_source(), ARCH), range(8)))
            assert all(cubin == fake_compile(toy_source(), ARCH) for cubin in cubins)

        assert _work(together) == (1, 0)


@pytest.mark.parametrize(
    "scenario, fewest, most",
    [("empty", 1, 1), ("damaged", 1, 1), ("unlocked", 1, PROCESSES), ("nvrtc", 1, 1)],
)
def test_sixteen_processes_get_whole_kernels(cache_dir: Path, scenario: str, fewest: int, most: int) -> None:
    """The race runs in a child, so that its processes can be forked before any thread exists."""
    code = f"from tests.cpu.test_cache import race; race({scenario!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["right"] == PROCESSES
    assert fewest <= outcome["compiles"] <= most
    assert jit.cache_size()[0] == 1
    left = [path.name for path in (cache_dir / "kernels").iterdir() if path.name.endswith(".partial")]
    assert left == []


def test_an_entry_that_is_moved_away_is_put_there_again(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process's entry spoils the rename, and a third has moved it away before anybody looks."""
    key, rename, spoiled = cache.cache_key(toy_source(), ARCH), Path.rename, []

    def spoiled_once(self: Path, target: Path) -> Path:
        if Path(target).name == key and not spoiled:
            spoiled.append(target)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", spoiled_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        jit.get_kernel(toy_source(), ARCH)
    assert len(spoiled) == 1 and jit.cache_size()[0] == 1


def race(scenario: str) -> None:
    """Print how many of sixteen processes got a right kernel, and how often it was compiled."""
    if scenario == "damaged":
        cache.compile_source = fake_compile
        jit.get_kernel(toy_source(), ARCH)
        (cache.cache_root() / cache.cache_key(toy_source(), ARCH) / "kernel.cubin").write_bytes(b"\x7fELF")
        cache._in_memory.clear()
        cache._counts.update(compiles=0, disk_hits=0)
    if scenario == "unlocked":
        cache._only_process = lambda lock_path: nullcontext()
    if scenario != "nvrtc":
        cache.compile_source = _slow_compile
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)
    results = context.Queue()
    children = [context.Process(target=_racer, args=(barrier, results)) for _ in range(PROCESSES)]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=120)
    images = {image for image, _ in outcomes}
    expected = fake_compile(toy_source(), ARCH).image
    right = images == {expected} if scenario != "nvrtc" else len(images) == 1 and next(iter(images))[:4] == b"\x7fELF"
    print(json.dumps({"right": len(outcomes) * right, "compiles": sum(compiles for _, compiles in outcomes)}))


def _racer(barrier, results) -> None:  # noqa: ANN001
    barrier.wait(timeout=60)
    cubin = jit.get_kernel(toy_source(), ARCH)
    results.put((cubin.image, jit.statistics().compiles))


def _slow_compile(source: jit.KernelSource, arch: str) -> jit.Cubin:
    time.sleep(0.2)
    return fake_compile(source, arch)
