"""Records: what they are found by, when they hold, what a damaged file or a race does to them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv import env
from haloconv.choose import records
from haloconv.choose.buckets import bucket_of, layer_key
from haloconv.choose.records import FORMAT, SHIPPED, read_records, records_path, shelf_of, write_records
from haloconv.device import gpu_stem
from haloconv.families.files import device_hash
from haloconv.problem import Problem
from tests.tuned import FACTS, LAYER, record
from tools.stamps import pending

PROCESSES, EACH = 16, 5


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "records"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    records.forget_shelves()
    yield tmp_path / "records"
    records.forget_shelves()


def sized(n: int, h: int, w: int) -> Problem:
    return replace(LAYER, n=n, h=h, w=w)


# --- keys and buckets


def test_the_key_has_everything_but_size() -> None:
    others = {
        "direction": "dgrad", "c": 16, "k": 8, "r": 5, "s": 5, "stride": (2, 1), "padding": (1, 1, 2, 1),
        "dilation": (1, 2), "groups": 2, "dtype": torch.bfloat16, "layout": "nhwc", "bias": True,
    }  # fmt: skip
    keys = [layer_key(replace(LAYER, **{name: value})) for name, value in others.items()]
    assert len({*keys, layer_key(LAYER)}) == len(others) + 1
    assert layer_key(LAYER) == layer_key(sized(7, 99, 3))
    gradient = replace(LAYER, direction="dgrad")
    assert layer_key(gradient) == layer_key(replace(gradient, bias=True)), "a bias has no part in gradients of others"
    fp32 = replace(LAYER, dtype=torch.float32)
    assert layer_key(fp32) != layer_key(replace(fp32, precision="tf32"))
    assert layer_key(LAYER) == "fprop 8->16 3x3 s1x1 p1,1,1,1 d1x1 g1 fp16 nchw"


def test_200_image_sizes_are_few_buckets() -> None:
    """Multi-scale training between 320 and 640 pixels, the usual range of detectors."""
    rng = random.Random(0)
    sizes = [sized(8, rng.randint(320, 640), rng.randint(320, 640)) for _ in range(200)]
    assert len({(each.n, each.h, each.w) for each in sizes}) > 190
    assert len({bucket_of(each) for each in sizes}) <= 6
    assert len({bucket_of(sized(8, rng.randint(182, 255), rng.randint(182, 255))) for _ in range(200)}) <= 2


# --- finding


def test_the_exact_size_is_best_then_the_nearest_in_the_bucket() -> None:
    shelf = shelf_of(FACTS)
    shelf.add([record(sized(2, 24, 28)), record(sized(2, 20, 28), "aten"), record(sized(2, 200, 200), "halo_sm90")])
    assert shelf.find(sized(2, 24, 28))[0].family == "direct"
    assert shelf.find(sized(2, 20, 28))[0].family == "aten"
    assert shelf.find(sized(2, 21, 28))[0].family == "aten" and shelf.find(sized(2, 25, 30))[0].family == "direct"
    assert shelf.find(sized(64, 24, 28)) is None and shelf.find(sized(2, 24, 100)) is None
    assert shelf.find(replace(LAYER, k=32)) is None


def test_own_records_come_before_shipped_ones() -> None:
    path = records.shipped_path(FACTS.name)
    write_records(path, [record(family="halo_sm90"), record(sized(9, 9, 9), "halo_sm90")], FACTS)
    write_records(records_path(FACTS.name), [record()], FACTS)
    found, shipped = shelf_of(FACTS).find(LAYER)
    assert found.family == "direct" and not shipped
    assert shelf_of(FACTS).counts() == (1, 2)
    found, shipped = shelf_of(FACTS).find(sized(9, 9, 9))
    assert found.family == "halo_sm90" and shipped and "as shipped" in found.why(found.size, shipped)
    assert shelf_of(FACTS).exact(sized(9, 9, 9)) is None


def test_reasons_are_sentences_for_people() -> None:
    won, even, alone = record(), record(family="aten", own_ms=1.0), record(family="aten", own=None, own_ms=None)
    assert won.why(won.size) == "tuned: 2.00x PyTorch on 2026-01-02, Test GPU 9000"
    assert "PyTorch, as the fastest of ours, direct/direct, reaches 1.00x" in even.why(even.size)
    assert "none of ours" in alone.why(alone.size)
    assert won.why(won.size._replace(n=3)).endswith("measured at 2 x 24 x 28")


# --- when they hold


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "Other GPU"},
        {"sm_count": 5},
        {"source": "0" * 64},
        {"family": "no_family"},
        {"family": "aten", "source": "0" * 64},  # ours lost with other kernels than there are now
    ],
    ids=str,
)
def test_hard_mismatches_are_left_alone_and_not_used(change: dict) -> None:
    foreign = record(**change)
    path = records_path(FACTS.name)
    write_records(path, [foreign], FACTS)
    assert shelf_of(FACTS).find(LAYER) is None
    shelf_of(FACTS).keep([record(family="aten")])
    families = sorted((each.family, each.gpu, each.source) for each in read_records(path))
    assert len(families) == 2 and (foreign.family, foreign.gpu, foreign.source) in families
    assert shelf_of(FACTS).find(LAYER)[0].family == "aten"


def test_a_record_with_a_bias_says_nothing_about_the_layer_without() -> None:
    """PyTorch adds a bias by a kernel of its own: what is faster without one may be slower with it."""
    biased = replace(LAYER, bias=True)
    shelf_of(FACTS).add([record(biased)])
    assert shelf_of(FACTS).find(LAYER) is None and shelf_of(FACTS).exact(LAYER) is None
    shelf_of(FACTS).add([record(family="aten")])
    assert [shelf_of(FACTS).find(each)[0].family for each in (biased, LAYER)] == ["direct", "aten"]


def test_soft_mismatches_are_used_and_replaced() -> None:
    old = record(software={**env.software_stamp(), "torch": "1.0"})
    write_records(records_path(FACTS.name), [old], FACTS)
    assert shelf_of(FACTS).find(LAYER)[0].family == "direct"
    assert shelf_of(FACTS).exact(LAYER) is None, "it is measured again when asked to"
    shelf_of(FACTS).keep([record(family="aten")])
    assert [each.family for each in read_records(records_path(FACTS.name))] == ["aten"]
    assert shelf_of(FACTS).exact(LAYER).family == "aten"


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    assert records_path("NVIDIA H200") == own_folder / "nvidia-h200.v3.json"
    monkeypatch.delenv(env.RECORDS_DIR)
    assert "haloconv" in records_path("NVIDIA H200").parts and records_path("NVIDIA H200").parent.name == "records"


# --- files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 3}',
        '{"format": 1, "records": []}',
        '{"format": 3, "records": [{"layer": 3}]}',
        '{"format": 2, "records": [{"layer": 3}]}',
        '{"format": 2, "records": [3]}',
        "\0" * 9,
    ],
)
def test_a_damaged_file_is_a_miss_with_one_warning(text: str) -> None:
    path = records_path(FACTS.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="are not used"):
        assert read_records(path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_records(path) == [] and shelf_of(FACTS).find(LAYER) is None
    shelf_of(FACTS).keep([record()])
    assert [each.family for each in read_records(path)] == ["direct"]
    assert path.with_name(f"{path.name}.bak").read_text() == text


def _spoilt(entries: list[str], fault: str) -> str:
    """A file's entries, one a line, of which the second is not what it should be."""
    second = json.loads(entries[1])
    changed = {
        "no time": {**second, "ms": 0}, "a text": {**second, "runs": "10"}, "infinite": {**second, "error": 1e999},
        "no field": {name: value for name, value in second.items() if name != "gpu"}, "infinite size":
        {**second, "size": [1e999, 1, 1]}, "null": None,
    }  # fmt: skip
    torn = {"torn": entries[1][:40], "no UTF-8": entries[1].replace("direct", "dir\udcffect", 1)}
    return torn.get(fault) or json.dumps(changed[fault])


@pytest.mark.parametrize(
    "fault", ["no time", "a text", "infinite", "no field", "infinite size", "null", "torn", "no UTF-8"]
)
def test_a_bad_entry_is_dropped_alone_and_kept_in_a_copy(fault: str) -> None:
    """Nor does the next write lose the others, or the bad one: today's software may be what is wrong with it."""
    path = records_path(FACTS.name)
    write_records(path, [record(sized(n, 24, 28)) for n in (1, 2, 3)], FACTS)
    head, *entries, foot = path.read_text().splitlines()
    entries[1] = _spoilt([each.removesuffix(",") for each in entries], fault) + ","
    damaged = "\n".join([head, *entries, foot]).encode("utf-8", "surrogateescape")
    path.write_bytes(damaged)
    with pytest.warns(RuntimeWarning, match="all but 2 of them") as caught:
        assert [each.size.n for each in read_records(path)] == [1, 3]
        shelf_of(FACTS).keep([record(sized(4, 24, 28))])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [each.size.n for each in read_records(path)] == [1, 3, 4]
    copies = sorted(path.parent.glob("*.bak"))
    assert [each.read_bytes() for each in copies] == [damaged]
    path.write_text("damaged again")
    records.forget_shelves()
    with pytest.warns(RuntimeWarning, match="are not used"):
        write_records(path, [record()], FACTS)
    assert len(sorted(path.parent.glob("*.bak"))) == 2 and copies[0].read_bytes() == damaged


@pytest.mark.parametrize("form", ["whole", "torn"])
def test_a_byte_order_mark_costs_no_record(form: str) -> None:
    """Some editors write one; without a torn entry nothing is wrong with such a file."""
    path = records_path(FACTS.name)
    write_records(path, [record(sized(n, 24, 28)) for n in (1, 2)], FACTS)
    text = path.read_text()
    path.write_text(text if form == "whole" else text.replace("\n]}", ",\n{\n]}"), encoding="utf-8-sig")
    torn = pytest.warns(RuntimeWarning, match="all but 2 of them") if form == "torn" else nullcontext()
    with torn:
        shelf_of(FACTS).keep([record(sized(3, 24, 28))])
    assert [each.size.n for each in read_records(path)] == [1, 2, 3]
    assert len(list(path.parent.glob("*.bak"))) == (form == "torn")


def test_a_file_that_cannot_be_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    path = records_path(FACTS.name)
    path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        shelf_of(FACTS).keep([record()])
    assert path.is_dir() and "are not used" in str(caught[0].message)
    assert shelf_of(FACTS).find(LAYER)[0].family == "direct"


def test_a_full_disk_is_warned_of_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path = records_path(FACTS.name)
    shelf_of(FACTS).keep([record()])
    before = path.read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(RuntimeWarning, match="cannot be written.*No space left"):
        shelf_of(FACTS).keep([record(sized(9, 9, 9))])
    assert path.read_text() == before and shelf_of(FACTS).find(sized(9, 9, 9)) is not None
    assert not list(path.parent.glob("*.partial"))


def test_a_record_survives_the_file() -> None:
    path = records_path(FACTS.name)
    write_records(path, [record(config="run128 boxes", own_ms=None, own=None, family="aten")], FACTS)
    (found,) = read_records(path)
    expected = record(config="run128 boxes", own_ms=None, own=None, family="aten")
    assert vars(found) == vars(expected)
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and json.loads(path.read_text())["format"] == FORMAT


def test_a_file_that_cannot_be_written_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "file"))
    records.forget_shelves()
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        shelf_of(FACTS).keep([record()])
    assert shelf_of(FACTS).find(LAYER)[0].family == "direct"


def test_frozen_records_are_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "frozen", lambda: True)
    with pytest.raises(RuntimeError, match=env.FROZEN):
        write_records(records_path(FACTS.name), [record()], FACTS)
    assert not records_path(FACTS.name).parent.exists()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_records_hold_or_their_family_is_pending(path: Path) -> None:
    """Each names a family and its kernels as they are now; one that kernels left behind is of no use, and noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_records(path)
    assert found and {gpu_stem(each.gpu) for each in found} == {path.stem}
    assert len({(each.layer, each.size, each.sm_count) for each in found}) == len(found)
    stale = {each.own or "" for each in found if each.source != device_hash(each.own or "aten")}
    assert stale <= set(pending()), "measure again with `haloconv tune --ship`, or name the family in PENDING.md"


def write_some(path: Path, number: int) -> None:
    for round_ in range(EACH):
        write_records(path, [record(sized(number + 1, 10 + round_, 10))], FACTS)


def test_16_processes_lose_no_record(own_folder: Path) -> None:
    """Writers race for one file while this process reads it: every read is whole, and at the end all is there."""
    path = records_path(FACTS.name)
    context = multiprocessing.get_context("forkserver")  # which has no threads; this process does
    context.set_forkserver_preload([__name__])
    workers = [context.Process(target=write_some, args=(path, number)) for number in range(PROCESSES)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a torn file would be warned of
        for worker in workers:
            worker.start()
        seen = []
        while any(worker.is_alive() for worker in workers):
            seen.append(len(read_records(path)))
        for worker in workers:
            worker.join(60)
        found = read_records(path)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert {each.size for each in found} == {
        (n + 1, 10 + round_, 10) for n in range(PROCESSES) for round_ in range(EACH)
    }
    assert len(found) == PROCESSES * EACH and seen == sorted(seen)
    assert {each.name for each in own_folder.iterdir()} == {path.name, f"{path.name}.lock"}
