"""haloconv.distributed in four processes that talk through gloo, all in one start: what one process would give."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spatial_ranks import FOLDER, OK

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
LIMIT_S = 240
RANKS = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What each rank said of each scenario, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        run_ranks("spatial_ranks.all_of_them", "cpu", "auto", folder / "meet", LIMIT_S, RANKS)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [each[name] for each in found] for name in found[0]}


@pytest.mark.parametrize("scenario", ["fuzzed"])
def test_results_are_those_of_one_process(ranks: dict[str, list], scenario: str) -> None:
    assert [said for said, _ in ranks[scenario]] == [OK] * RANKS
