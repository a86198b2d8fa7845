"""Every primitive on the emulator: what NumPy says, under several schedules, and what a GPU gave for the same input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from haloconv import emulator
from tests.conformance import on_emulator, on_gpu, vectors
from tests.conformance.case import Case
from tests.conformance.suite import BY_NAME, CASES
from tests.cpu.conftest import PENDING_ON_A_GPU

pytestmark = [
    pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available())),
    pytest.mark.usefixtures("emulator_cache"),
]


@pytest.fixture(scope="module")
def committed() -> vectors.Vectors:
    """The vectors of a GPU; without them nothing is compared, and that is said."""
    try:
        return vectors.Vectors()
    except OSError:
        pytest.skip(f"NOT COMPARED WITH A GPU: {vectors.MISSING}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emulator_gives_what_numpy_says(case: Case, emulator_seeds: tuple[int, ...], replay: Callable) -> None:
    setup = case.setup()
    for seed in emulator_seeds:
        with replay(seed):
            assert not vectors.wrong(case, setup, on_emulator.run(case, setup, seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emulator_gives_what_the_gpu_gave(case: Case, committed: vectors.Vectors) -> None:
    if reason := committed.missing().get(case.name):
        pytest.skip(f"NOT COMPARED WITH A GPU: {case.name}: {reason}; make vectors: python -m tools.make_vectors")
    if case.name not in committed.names() and (reason := vectors.pending().get(case.name)):
        pytest.skip(f"{PENDING_ON_A_GPU}: {case.name} since {reason}")
    assert case.name in committed.names(), f"never run on a GPU: {case.name}; run `python -m tools.make_vectors` on one"
    setup = case.setup()
    if case.kernel == "wgmma":  # whose sums are modelled to the bit
        setup = replace(setup, tolerance=None)
    assert not committed.complaint(case, setup, on_emulator.run(case, setup, seed=1))


def test_pending_cases_exist_and_leave_the_list_when_they_have_vectors(tmp_path: Path) -> None:
    lines = [line for line in vectors.PENDING.read_text(encoding="utf-8").splitlines() if line.startswith(("-", "*"))]
    assert len(lines) == len(vectors.pending()) and set(vectors.pending()) <= set(BY_NAME)
    path = tmp_path / "PENDING.md"
    path.write_text("# Cases\n\n- `a_case` (2026-01-02): new\n- `other` (2026-01-03): of a new width\n")
    vectors.no_longer_pending({"a_case"}, path)
    assert path.read_text() == "# Cases\n\n- `other` (2026-01-03): of a new width\n"
    assert vectors.pending(path) == {"other": "2026-01-03: of a new width"} and vectors.pending(tmp_path / "no") == {}


def test_vectors_are_of_cases_that_exist(committed: vectors.Vectors) -> None:
    assert committed.names() | set(committed.missing()) <= set(BY_NAME)
    assert not committed.names() & set(committed.missing())


def test_a_case_without_a_result_costs_the_others_nothing(tmp_path: Path) -> None:
    good, odd, none = (BY_NAME[name] for name in ("bulk_96", "bulk_1024", "named_barriers"))
    outputs = odd.setup().expected[0] + np.uint32(1)
    file = tmp_path / "vectors.npz"
    results = {none: "it broke\nand said more", good: good.setup().expected, odd: (outputs,)}
    complaints = vectors.record(results, {"device": "none"}, file)
    stored = vectors.Vectors(file)
    assert stored.names() == {good.name, odd.name} and stored.missing() == {none.name: "it broke"}
    assert not stored.complaint(odd, odd.setup(), (outputs,))
    assert sorted(line.split(":")[0] for line in complaints) == sorted([none.name, odd.name])


@pytest.mark.parametrize("name", ["wgmma_ss_tf32_n64", "tensor_128_2d", "mma_fp16_floats", "cvt_rn_f16_f32"])
def test_a_wrong_result_would_be_found(name: str, tmp_path: Path) -> None:
    """One wrong element of one output is a difference from NumPy and from the vectors."""
    case = BY_NAME[name]
    setup = case.setup()
    right = tuple(each.copy() for each in setup.expected)
    file = tmp_path / "vectors.npz"
    vectors.save(file, {case: (setup, right)}, {"device": "none"})
    stored = vectors.Vectors(file)
    assert not vectors.wrong(case, setup, right) and not stored.complaint(case, setup, right)
    bad = tuple(each.copy() for each in setup.expected)
    bad[0].reshape(-1)[-1] += np.array(1, bad[0].dtype)
    assert vectors.wrong(case, setup, bad) and stored.complaint(case, setup, bad)


def test_a_broken_case_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that kills its process, and one that only loses the context, leave the others their results."""
    kills, loses = "b", "d"

    def attempt(names: list[str], folder: Path, limit_s: float) -> tuple[str, bool]:
        for name in names:
            if name == kills:
                return "killed", False
            if name == loses:
                (folder / f"{name}.error").write_text("lost")
                return "", True
            np.savez(folder / f"{name}.npz", **{"0": np.zeros(1)})
        return "", False

    monkeypatch.setattr(on_gpu, "_attempt", attempt)
    results = on_gpu.run_all(list("abcdef"), tmp_path)
    assert {name for name, found in results.items() if isinstance(found, str)} == {kills, loses}
    assert "killed" in results[kills] and results[loses] == "lost"
