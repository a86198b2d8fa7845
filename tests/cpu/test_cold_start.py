"""``haloconv bench --cold-start``: what a process does until its first step, in which order, and what counts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from haloconv import jit
from haloconv.bench.costs import cold_start, first_step
from haloconv.bench.costs.cold_start import ColdStart, ColdStartError, Start
from haloconv.bench.networks.network import NetworkCase, Setting
from haloconv.bench.results import latest_name, read_rows
from haloconv.cli import app
from haloconv.cli.bench import cold_start as bench_cold_start

MODEL = """
import torch

class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))

def get_init_inputs():
    return []

def get_inputs():
    print("a line of the model's own")
    return [torch.randn(2, 3, 8, 8)]
"""
ENVIRONMENT = {"gpu": "NVIDIA H200", "commit": "abc", "date": "2026-11-24T00:00:00Z"}


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "tiny.py"
    file.write_text(MODEL)
    return str(file)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """What a process of its own may set."""
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def start_of(name: str = "resnet50", step: str = "inference", target: str = "timm:resnet50") -> Start:
    return Start(Setting(NetworkCase(name, target), "bf16", "nhwc"), step)


def found(compiles: int = 0, **phases_s: float) -> dict[str, object]:
    return {"phases_ms": {name: s * 1e3 for name, s in phases_s.items()}, "compiles": compiles, "disk_hits": 0}


def taking(empty_s: float, warm_s: float, aten_s: float, cores: int = 16, **which: str) -> ColdStart:
    runs = {"empty": found(step=empty_s, build=99), "warm": found(step=warm_s, build=9), "aten": found(step=aten_s)}
    return ColdStart(start_of(**which), runs, cores)


# The process


@pytest.mark.parametrize(
    ("ours", "training", "phases"),
    [
        (False, False, ["start", "torch", "build", "device", "first output"]),
        (True, True, ["start", "torch", "haloconv", "build", "device", "accelerate", "first output", "step"]),
    ],
)
def test_the_phases_of_a_process(
    target: str, ours: bool, training: bool, phases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is from mark to mark; on PyTorch's side nothing of haloconv is loaded in a phase that counts."""
    marks, loaded = itertools.count(1), []
    load = first_step.import_module

    def noting(name: str) -> object:
        loaded.append((name, len(taken)))
        return load(name)

    taken: list[float] = []

    def clock() -> float:
        taken.append(10.0 + 2.0 ** next(marks))
        return taken[-1]

    monkeypatch.setattr(first_step, "import_module", noting)
    order = start_of(step="training" if training else "inference", target=target).order(ours, "cpu")
    before = jit.statistics()  # of this process, in which other tests compiled
    told = first_step.first_step({**order, "began": 10.0}, clock)
    assert list(told["phases_ms"]) == phases
    assert list(told["phases_ms"].values()) == [2000.0, *(2e3 * 2**i for i in range(len(phases) - 1))]
    phase_of = {name: (phases + ["after"])[when] for name, when in reversed(loaded)}  # when each came first
    assert {phase for name, phase in phase_of.items() if name.startswith("haloconv.")} <= {"build", "step", "after"}
    assert phase_of.get("haloconv") == ("haloconv" if ours else None)
    assert torch.backends.cudnn.benchmark and (told["compiles"], told["disk_hits"]) == before


def test_a_process_of_its_own(target: str, tmp_path: Path) -> None:
    """What the model prints is no answer."""
    told = cold_start.in_new_process(start_of(step="training", target=target).order(True, "cpu"), tmp_path)
    assert list(told["phases_ms"])[-1] == "step" and all(ms >= 0 for ms in told["phases_ms"].values())


def test_a_process_has_the_folder_for_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.update(options)
        return SimpleNamespace(returncode=0, stdout='noise\n{"compiles": 3}\n', stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert cold_start.in_new_process({"target": "x"}, tmp_path) == {"compiles": 3}
    surroundings = asked["env"]
    assert surroundings["HALOCONV_CACHE_DIR"] == str(tmp_path) and surroundings["HALOCONV_TUNE"] == "off"
    assert Path(surroundings["HALOCONV_RECORDS_DIR"]).parent == tmp_path
    assert json.loads(asked["input"])["began"] > 0


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no memory\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ColdStartError, match="x: RuntimeError: no memory"):
        cold_start.in_new_process({"target": "x"}, tmp_path)

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 600)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ColdStartError, match="no first step within 600 s"):
        cold_start.in_new_process({"target": "x"}, tmp_path)


# What counts


def test_pytorch_first_then_one_empty_cache_then_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    folders, sides = set(), []
    times = iter([5.0, 6.0, 4.0, 9.0, 3.0, 1.0, 2.0])

    def run(order: dict, folder: Path) -> dict:
        folders.add(folder)
        sides.append(order["ours"])
        return found(compiles=7 if len(sides) == 4 else 0, torch=next(times), build=100.0)

    monkeypatch.setattr(cold_start, "in_new_process", run)
    told = cold_start.cold_start(start_of(), "cuda:0")
    assert sides == [False] * 3 + [True] * 4 and len(folders) == 1
    assert (told.empty_ms, told.warm_ms, told.aten_ms) == (9000.0, 2000.0, 5000.0)
    assert told.runs["empty"]["compiles"] == 7 and told.cores == os.cpu_count()


def test_a_full_cache_must_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "in_new_process", lambda *_: found(compiles=2, torch=1.0))
    with pytest.raises(ColdStartError, match="2 kernels were compiled although the cache was full"):
        cold_start.cold_start(start_of(), "cuda:0")


@pytest.mark.parametrize(
    ("told", "missed"),
    [
        (taking(5.0, 3.5, 3.0), []),
        (taking(5.1, 3.6, 3.0), ["0.60 s behind PyTorch with a full cache", "5.10 s of 5 with an empty cache"]),
        (taking(5.1, 3.0, 3.0, cores=8), []),
        (taking(12.1, 3.0, 3.0, step="training"), ["12.10 s of 12 with an empty cache"]),
        (taking(60.0, 3.0, 3.0, name="unet"), []),
    ],
)
def test_the_bars(told: ColdStart, missed: list[str]) -> None:
    assert [sentence.split(": ")[1] for sentence in told.missed()] == missed


def test_what_has_a_row_of_this_environment_is_not_run_again() -> None:
    starts = [start_of(), start_of(step="training")]
    row = taking(5, 3, 3).record(ENVIRONMENT)
    assert cold_start.left_to_do(starts, [row], {**ENVIRONMENT, "date": "later"}) == starts[1:]
    assert cold_start.left_to_do(starts, [row], {**ENVIRONMENT, "commit": "other"}) == starts


# The verb


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """Starts that were timed, on a GPU that there is not."""
    timed: list[Start] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(bench_cold_start, "environment_stamp", lambda: ENVIRONMENT)
    monkeypatch.setattr(bench_cold_start, "read_libraries", lambda start, device: None)

    def time_it(start: Start, device: str) -> ColdStart:
        timed.append(start)
        if start.setting.case.name == "unet":
            raise ColdStartError("unet: RuntimeError: no memory")
        return ColdStart(start, taking(4.0, 3.0, 2.9).runs, 16)

    monkeypatch.setattr(bench_cold_start, "cold_start", time_it)
    return timed


def bench(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--cold-start", "--results", str(folder), *words])


def test_the_verb_writes_rows_and_goes_on_where_it_stopped(gpu: list[Start], tmp_path: Path) -> None:
    first = bench(tmp_path, "--case", "resnet50")
    assert first.exit_code == 0 and [each.step for each in gpu] == ["inference", "training"] * 2
    rows = read_rows(tmp_path / "nvidia-h200" / latest_name("cold-start"))
    assert {(row["direction"], row["precision"], row["layout"]) for row in rows} == {
        (step, "bf16", layout) for step in ("inference", "training") for layout in ("nchw", "nhwc")
    }
    assert rows[0]["warm_ms"] == 3000.0 and rows[0]["runs"]["empty"]["phases_ms"]["build"] == 99_000.0
    assert "within" in first.output and "4.00" in first.output
    again = bench(tmp_path, "--case", "resnet50")
    assert again.exit_code == 0 and len(gpu) == 4 and "4 had a row" in again.output


def test_the_verb_times_three_networks_and_says_what_failed(gpu: list[Start], tmp_path: Path) -> None:
    result = bench(tmp_path)
    assert result.exit_code == 1 and "LEFT unet: RuntimeError: no memory" in result.output
    assert {each.setting.case.name for each in gpu} == {"resnet50", "unet", "convnext_tiny"} and len(gpu) == 12


def test_the_verb_stops_in_time(gpu: list[Start], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=10)
    monkeypatch.setattr(bench_cold_start, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = bench(tmp_path, "--case", "resnet50", "--limit", "15")
    assert result.exit_code == 1 and len(gpu) == 1 and result.output.count("cut, --limit 15") == 3


def test_networks_that_there_are_not_are_refused(gpu: list[Start], tmp_path: Path) -> None:
    result = bench(tmp_path, "--case", "resnet51")
    assert result.exit_code == 2 and "there is no network resnet51" in result.output
