"""What carries stamps over a change: the same code and the same launches in every run that launches a kernel."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tools import carry

A, B, SUM = "one/a", "one/b", "sums/add"


def fingerprint(sources: dict[str, str], tapes: dict[str, list[list]]) -> carry.Fingerprint:
    """``sources``: the digest of the only CI source of each .cu file."""
    listed = {"one": [[kernel, kernel, digest] for kernel, digest in sources.items()]}
    return carry.Fingerprint(Path("nowhere"), listed, tapes, {}, {})


def launch(kernel: str, grid: int = 1, constants: tuple[int, ...] = (3,)) -> list:
    return [kernel, list(constants), [grid, 32, 0], [[0, 0], 7]]


THEN = fingerprint(
    {A: "a", B: "b", SUM: "s"},
    {"run a": [launch(A)], "run b": [launch(B), launch(SUM)], "both": [launch(A), launch(B)]},
)


def changes(kernel: str, now: carry.Fingerprint) -> list[str]:
    return carry.changes(kernel, THEN, now, carry.names_now(THEN, now))


@pytest.fixture(autouse=True)
def cubins(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The cubin of each digest, where it is not the digest's own."""
    found: dict[str, str] = {}

    def cubins_of(at: carry.Fingerprint, kernel: str) -> Counter:
        return Counter(found.get(digest, digest) for digest in at.digests(kernel).elements())

    monkeypatch.setattr(carry, "cubins_of", cubins_of)
    return found


def test_nothing_changed() -> None:
    assert [changes(kernel, THEN) for kernel in (A, B, SUM)] == [[], [], []]


def test_other_text_of_the_same_code_is_carried_and_other_code_is_not(cubins: dict[str, str]) -> None:
    now = fingerprint({A: "a", B: "b", SUM: "other"}, THEN.tapes)
    assert changes(B, now) == changes(SUM, now) == [f"{SUM} compiles to other code"]
    assert changes(A, now) == []
    cubins["other"] = "s"
    assert changes(B, now) == changes(SUM, now) == []


def test_a_new_source_is_not_verified_but_of_a_kernel_that_is_launched_beside_another() -> None:
    """It says nothing against the other, whose runs launch what they launched."""
    now = fingerprint({A: "a", B: "b", SUM: "s"}, THEN.tapes)
    now.sources["two"] = [[SUM, SUM, "more"]]
    assert changes(B, now) == [] and changes(SUM, now) == [f"{SUM} compiles to other code"]
    now.sources["one"][2][2] = "other"
    assert changes(B, now) == changes(SUM, now) == [f"{SUM} compiles to other code"]


def test_records_stay_true_of_a_kernel_that_got_new_sources() -> None:
    now = fingerprint({A: "a", B: "b", SUM: "other"}, THEN.tapes)
    now.sources["two"] = [[A, A, "more"]]
    assert carry.with_records(THEN, now, carry.names_now(THEN, now)) == {A, B}
    assert carry.with_records(now, THEN, carry.names_now(now, THEN)) == {B}


def test_a_file_that_no_run_launches_beside_a_kernel_does_not_matter_to_it() -> None:
    tapes = {**THEN.tapes, "run b": [launch(B), launch("sums/new")], "both": [launch(A), launch(B)]}
    now = fingerprint({A: "a", B: "b", "sums/new": "n"}, tapes)
    assert changes(A, now) == []
    assert changes(B, now) == ["sums/new is new", "run b is launched differently"]
    assert changes("sums/new", now) == ["sums/new is new"]


def test_new_runs_of_a_new_kernel_say_nothing_of_what_it_launches_beside_it() -> None:
    """A run that was there before does, and so does a new one of known kernels."""
    tapes = {**THEN.tapes, "run of new": [launch("sums/new"), launch(A)]}
    now = fingerprint({A: "a", B: "b", SUM: "s", "sums/new": "n"}, tapes)
    assert changes(A, now) == [] and changes("sums/new", now) == ["sums/new is new"]
    tapes["run a"] = [launch(A), launch("sums/new")]
    assert changes(A, now) == ["sums/new is new", "run a is launched differently"]


@pytest.mark.parametrize(("cubins", "code"), [(["c", "d", "d"], 0), (["c", "d"], 1)])
def test_records_of_one_kernel_are_carried_where_all_its_code_is_there(
    cubins: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a run, and without a stamp: a source that is there twice then is so now."""
    monkeypatch.setattr(carry, "checkout", lambda revision: nullcontext(tmp_path))
    monkeypatch.setattr(carry, "device_hash_at", lambda root, kernel: "then" if root == tmp_path else "now")
    found = {tmp_path: ["d", "d"], carry.ROOT: cubins}
    monkeypatch.setattr(carry, "taken", lambda root, *options: {"cubins": found[root]} if options[1] == A else {})
    told: list[tuple] = []
    monkeypatch.setattr(carry, "carry_records", lambda then, now, *rest: told.append((then.device, now.device, *rest)))
    assert carry.carry_records_of(A, "abc", write=False) == code and not told
    assert carry.carry_records_of(A, "abc", write=True) == code
    assert told == ([] if code else [({A: "then"}, {A: "now"}, {A: A}, {A})])


def test_a_kernel_may_have_another_name() -> None:
    def renamed(tape: list[list]) -> list[list]:
        return [[{SUM: "sums/named", A: "two/a"}.get(each[0], each[0]), *each[1:]] for each in tape]

    tapes = {run: renamed(tape) for run, tape in THEN.tapes.items()}
    now = fingerprint({"two/a": "a", B: "b", "sums/named": "s"}, tapes)
    assert changes("two/a", now) == changes(B, now) == changes("sums/named", now) == []


@pytest.mark.parametrize(
    ("tapes", "says"),
    [
        ({"run a": [launch(A, 2)]}, "run a is launched differently"),
        ({"run a": [launch(A), launch(A)]}, "run a is launched differently"),
        ({"run a": [launch(B)]}, "run a is launched differently"),
        ({"run c": [launch(A)]}, "run c is new"),
    ],
)
def test_a_launch_that_differs_is_no_proof(tapes: dict[str, list[list]], says: str) -> None:
    assert changes(A, fingerprint({A: "a", B: "b", SUM: "s"}, THEN.tapes | tapes)) == [says]


def test_other_constants_are_carried_where_what_is_launched_is_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that the kernel works out itself is no longer given: then the code of each launch decides."""
    fewer = {"run a": [launch(A, constants=())], "both": [launch(A, constants=()), launch(B)]}
    now = replace(fingerprint({A: "a", B: "b", SUM: "s"}, THEN.tapes | fewer), root=Path("here"))
    code = {"nowhere": {"run a": ["x"], "both": ["y"]}, "here": {"run a": ["x"], "both": ["y"]}}
    asked = []

    def launched_by(root: Path, kernel: str) -> dict[str, list[str]]:
        asked.append((str(root), kernel))
        return code[str(root)]

    monkeypatch.setattr(carry, "launched_by", launched_by)
    assert changes(A, now) == [] and {kernel for _, kernel in asked} == {A}
    code["here"] = {"run a": ["x"], "both": ["x"]}
    assert changes(A, now) == changes(B, now) == ["both is launched differently"]
    assert changes(SUM, now) == []
    wider = replace(now, tapes=now.tapes | {"run a": [launch(A, 2, ())]})
    assert changes(A, wider) == ["both is launched differently", "run a is launched differently"]


def test_runs_that_are_gone_prove_nothing() -> None:
    now = fingerprint({A: "a", B: "b", SUM: "s"}, {"both": THEN.tapes["both"]})
    assert changes(A, now) == ["run a is gone"]
    none = fingerprint({A: "a", B: "b", SUM: "s"}, {})
    assert carry.changes(A, none, none, carry.names_now(none, none)) == ["no run launches it"]


def test_a_carried_stamp_remembers_the_run_that_made_it() -> None:
    first = carry.carried({"hash": "old", "commit": "abc", "checks": 7}, "new", "def")
    assert first == {
        "hash": "new", "commit": "abc", "checks": 7,
        "carried_from": {"hash": "old", "commit": "abc", "between": [], "through": "def"},
    }  # fmt: skip
    again = carry.carried(first, "newer", "ghi")
    assert again["hash"] == "newer"
    assert again["carried_from"] == {"hash": "old", "commit": "abc", "between": ["new"], "through": "ghi"}
    assert carry.carried(again, "new", "jkl")["carried_from"]["between"] == ["newer"]


def test_records_follow_the_code_of_their_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also from a revision whose hashes were those of families; records of other code, or stale ones, stay."""
    monkeypatch.setattr(carry, "SHIPPED", tmp_path)
    monkeypatch.setattr(carry, "CARRIED", tmp_path / "carried" / "carried.json")
    (tmp_path / "carried").mkdir()
    records = [
        {"own": own, "kernel": own, "source": source}
        for own, source in ((A, "family then"), (A, "earlier"), (B, "b then"), (None, ""))
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"format": 3, "records": records}))
    carry.CARRIED.write_text(json.dumps({"earlier": {A: "family then", B: "b then"}}))
    then = replace(THEN, device={"one": "family then", B: "b then"})
    now = replace(THEN, device={"one/new": "a now", B: "b now"})
    assert carry.carry_records(then, now, {A: "one/new", B: B}, {"one/new"}) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["records"]
    assert [each["source"] for each in found] == ["a now", "earlier", "b then", ""]
    assert [each["own"] for each in found] == ["one/new", "one/new", B, None]
    assert json.loads(carry.CARRIED.read_text()) == {"earlier": {"one/new": "a now", B: "b then"}}
