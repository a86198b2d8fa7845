"""Measurements that users contribute: ``haloconv tune --submit`` writes them, tools/merge_records takes them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from haloconv.choose import records
from haloconv.choose.buckets import layer_key, read_layer, size_of
from haloconv.choose.choice import choose
from haloconv.choose.records import read_records, records_path
from haloconv.cli import app
from haloconv.cli import tune as tune_verb
from haloconv.families import FAMILIES
from haloconv.tune import measure
from haloconv.tune.ahead import Options, tune_problems
from haloconv.tune.problems import Posed
from haloconv.tune.submission import SubmissionError, read_rows
from tests.tuned import FACTS, LAYER, Clock, FakeConfig, FakeFamily, fake_gpu, favouring, forget, only
from tools import merge_records

CPU = torch.device("cpu")
POSED = [Posed("a", LAYER, CPU), Posed("b", replace(LAYER, direction="wgrad", h=20), CPU)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    """A fake GPU on which special takes half of PyTorch's time."""
    made = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", made)
    with fake_gpu(tmp_path), only(FakeFamily("direct"), FakeFamily("special")):
        yield made


@pytest.fixture
def file(clock: Clock, tmp_path: Path) -> Path:
    """A file of two rows."""
    path = tmp_path / "new folder" / "mine.jsonl"
    tune_problems("submitted", POSED, Options(progress=False, submit=path))
    return path


def test_a_row_has_the_gpu_the_software_and_every_candidates_time(file: Path) -> None:
    first, second = read_rows(file)
    assert first.gpu == {
        "name": FACTS.name, "capability": [9, 0], "sm_count": 4, "driver": "none",
        "max_smem_bytes": FACTS.max_smem_bytes,
    }  # fmt: skip
    assert {"torch", "cudnn", "driver", "haloconv"} <= set(first.record.software)
    assert [str(place) for place in (first.record.layer, second.record.layer)] == [layer_key(p.problem) for p in POSED]
    timed = {(each.family, each.config): (each.ms, each.final) for each in first.candidates}
    assert timed == {
        ("aten", ""): (1.0, True), ("direct", "rows4"): (2.0, False), ("direct", "rows8"): (2.0, False),
        ("special", "rows4"): (0.5, True), ("special", "rows8"): (0.5, True),
    }  # fmt: skip


def test_a_run_that_was_cut_short_goes_on(file: Path, clock: Clock) -> None:
    """A problem is measured for its row even if it has a record; what has a row is not measured again."""
    rounds, lines = len(clock.rounds), file.read_text().splitlines()
    tune_problems("again", POSED, Options(progress=False, submit=file))
    assert len(clock.rounds) == rounds and file.read_text().splitlines() == lines
    file.write_text(lines[0] + "\n")
    tune_problems("goes on", POSED, Options(progress=False, submit=file))
    assert len(clock.rounds) > rounds and len(read_rows(file)) == 2


def test_a_round_trip(file: Path) -> None:
    """What one machine measured, another of the same GPU model finds shipped."""
    mine = {each.layer: vars(each) for each in read_records(records_path(FACTS.name))}
    shipped = records.shipped_path(FACTS.name)
    assert merge_records.main([str(file), "--check"]) == 0 and not shipped.exists()
    assert merge_records.main([str(file)]) == 0
    assert {each.layer: vars(each) for each in read_records(shipped)} == mine
    assert merge_records.main([str(file)]) == 0 and len(read_records(shipped)) == 2
    records_path(FACTS.name).unlink()
    forget()
    choice = choose(LAYER, CPU)
    assert (choice.family, choice.config) == ("special", "rows4") and "as shipped" in choice.reason


def _chosen(entry: dict) -> None:
    entry["record"].update(family="aten", kernel="aten", config="", ms=1.0)


def _faster(entry: dict) -> None:
    entry["record"].update(ms=0.1, own_ms=0.1)


def _lost(entry: dict) -> None:
    entry["candidates"] = [each for each in entry["candidates"] if each["family"] != "aten"]


def _other(key: str, **values: object) -> Callable[[dict], None]:
    return lambda entry: entry[key].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_chosen, "its times choose special (rows4), not aten ()"),
        (_faster, "special/fake is not the fastest candidate of ours"),
        (_lost, "PyTorch's time is not that of its candidate"),
        (_other("record", source="0" * 64), "other kernels of special/fake than today's"),
        (_other("record", bucket=[1, 1]), "its bucket is not that of"),
        (_other("record", layer="fprop 8->16"), "it names no GPU or no layer"),
        (_other("record", gpu="Other GPU"), "its record is of Other GPU"),
        (_other("record", error=1.0), "is above the limit"),
        (_other("gpu", capability="none"), "it names no GPU or no layer"),
        (_other("record", software={"haloconv": "0.0.1", "driver": "1"}), "measured with haloconv 0.0.1"),
    ],
)
def test_a_row_that_does_not_hold_together_is_refused(
    file: Path, change: Callable[[dict], None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of its file is taken."""
    good, bad = file.read_text().splitlines()
    entry = json.loads(bad)
    change(entry)
    file.write_text(f"{good}\n{json.dumps(entry)}\n")
    assert merge_records.main([str(file)]) == 1
    told = capsys.readouterr().err
    assert f"REFUSED {file}:2" in told and says in told
    assert not records.shipped_path(FACTS.name).exists()


def test_a_config_that_is_not_offered_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["special"].offers = (FakeConfig(8),)
    assert merge_records.main([str(file)]) == 1
    assert "special does not offer special/fake (rows4)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "no JSON\n", '{"format": 2}\n', "[]\n", '{"format": 1, "gpu": {}}\n'])
def test_another_file_is_no_submission(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    assert merge_records.main([str(path)]) == 1 and str(path) in capsys.readouterr().err
    if text:
        with pytest.raises(SubmissionError, match="other.jsonl:1 is no row"):
            read_rows(path)


def test_the_verb_writes_it_and_refuses_another_file(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_verb, "current_device", lambda: CPU)
    suite, path = tmp_path / "small.toml", tmp_path / "mine.jsonl"
    suite.write_text('[[case]]\nname = "small"\ninput = [2, 4, 12, 12]\nfilters = 8\nfilter = [3, 3]\n')
    arguments = ["tune", "--suite", str(suite), "--direction", "fprop", "--precision", "bf16", "--submit", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [row.record.family for row in read_rows(path)] == ["special"]
    path.write_text("# notes of mine\n")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "is no row of haloconv tune --submit" in " ".join(done.output.split())
    assert path.read_text() == "# notes of mine\n"


def test_a_layer_is_read_off_its_key() -> None:
    others = [
        LAYER, replace(LAYER, direction="dgrad", stride=(2, 1), padding=(0, 1, 2, 3), dilation=(1, 2), groups=2),
        replace(LAYER, dtype=torch.float32, precision="tf32", layout="nhwc", bias=True),
    ]  # fmt: skip
    for problem in others:
        assert read_layer(layer_key(problem), size_of(problem)) == problem
    with pytest.raises(ValueError, match="no layer of a record"):
        read_layer("fprop 8->16 3x3", size_of(LAYER))
