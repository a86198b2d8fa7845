"""Every primitive through PTX on the GPU: what NumPy says, and what the emulator gives for the same input.

What the GPU gave is written to the vectors that tests/cpu/test_emulator_conformance.py replays, failing cases or not.
The same results give the same file, byte for byte.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from haloconv import emulator
from tests.conformance import on_emulator, on_gpu, vectors
from tests.conformance.case import Case
from tests.conformance.suite import CASES

Results = dict[str, tuple[np.ndarray, ...] | str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, run once and recorded."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the primitives are those of compute capability 9.0")
    found = on_gpu.run_all([case.name for case in CASES], tmp_path_factory.mktemp("conformance"))
    vectors.record({case: found[case.name] for case in CASES}, on_gpu.about())
    return found


def _outputs(case: Case, results: Results) -> tuple[np.ndarray, ...]:
    found = results[case.name]
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gpu_gives_what_numpy_says(case: Case, results: Results) -> None:
    assert not vectors.wrong(case, case.setup(), _outputs(case, results))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gpu_gives_what_the_emulator_gives(case: Case, results: Results) -> None:
    if missing := emulator.available():
        pytest.skip(missing)
    setup = case.setup()
    assert not vectors.disagreement(setup, on_emulator.run(case, setup, seed=0), _outputs(case, results))
