"""The emulator notices every fault of the list in ``tests/mutations``: its findings are not decoration.

Without ``--every-run`` a part (tests/parts.py), which one the commit's seed says (``FUZZ_SEED`` overrides it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from haloconv import emulator
from haloconv.choose.trust import stamped
from haloconv.jit import source
from tests.emulated import FAMILY_RUNS
from tests.fuzz.campaign import commit_seed
from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation, StaleMutation, planted
from tests.mutations.runner import judge, run_of
from tests.parts import PARTS, faults

MISSING = emulator.available()
FEWEST = 25

pytestmark = pytest.mark.usefixtures("emulator_cache")
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mutation" in metafunc.fixturenames:
        planned = MUTATIONS if metafunc.config.getoption("--every-run") else faults(commit_seed())
        metafunc.parametrize("mutation", planned, ids=lambda mutation: mutation.name)


@needs_emulator
def test_planted_fault_is_caught(mutation: Mutation, record_property: Callable) -> None:
    verdict = judge(mutation)
    record_property("mutation", (verdict.caught, str(verdict)))
    assert verdict.caught, verdict


def test_four_seeds_in_a_row_plant_every_fault() -> None:
    parts = [faults(seed) for seed in range(7, 7 + PARTS)]
    assert set().union(*parts) == set(MUTATIONS)
    new = {one for one in MUTATIONS if one.kernel not in stamped()}
    assert set.intersection(*map(set, parts)) == new and all(len(each) < len(MUTATIONS) for each in parts)


def test_the_list_is_long_and_names_are_unique() -> None:
    assert len(MUTATIONS) >= FEWEST
    assert not [name for name, times in Counter(one.name for one in MUTATIONS).items() if times > 1]


def test_every_fault_has_its_faultless_run() -> None:
    """What a fault is judged by is right without it: the same run is one of test_emulator_families."""
    runs = {run for make in FAMILY_RUNS.values() for run in make()}
    assert not [mutation.name for mutation in MUTATIONS if run_of(mutation) not in runs]


def test_an_edit_that_does_not_fit_is_refused() -> None:
    for edits in ((("no such code", "x"),), (("acc_t", "float"),), ((MUTATIONS[0].edits[0][0],) * 2,)):
        with pytest.raises(StaleMutation, match="not once"), planted(replace(MUTATIONS[0], edits=edits)):
            pass


def test_faults_are_planted_and_removed() -> None:
    mutation = MUTATIONS[0]
    constants = {"A": 1}
    before = source.kernel_source(mutation.kernel, "entry", constants).code
    with planted(mutation):
        assert source.kernel_source(mutation.kernel, "entry", constants).code == mutation.applied_to(before) != before
    assert source.kernel_source(mutation.kernel, "entry", constants).code == before
