"""haloconv.tune in several processes that talk through gloo: one choice for all ranks, and one end."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tuning_ranks import FOLDER

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
LIMIT_S = 240
RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What the ranks found, by what they did: a list by rank. All of it in one start of three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        run_ranks("tuning_ranks.tunes", "cpu", "auto", folder / "meet", LIMIT_S, RANKS, ending=(1,))
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    kept = [(folder / f"records{rank}").exists() for rank in range(RANKS)]
    return {"kept": kept, **{what: [each.get(what) for each in found] for what in found[0]}}


def test_rank_0_chooses_for_all(ranks: dict[str, list]) -> None:
    found = ranks["chosen"]
    assert [(rank, set(families)) for rank, families, _, _ in found] == [(rank, {"special"}) for rank in range(RANKS)]
    assert [rows for _, _, rows, _ in found] == [5, 5, 2]
    assert found[0][3] > 0 and found[1][3] == found[2][3] == 0, "rank 0 alone measures"
    assert ranks["kept"] == [True, False, False]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("measuring", "haloconv.tune failed on rank 0: OSError: the clock stopped"),
        ("model", "haloconv.tune failed on rank 1: RuntimeError: Given groups=1, weight of size [8, 8, 3, 3]"),
        ("exit", "haloconv.tune failed on rank 1: SystemExit: 7"),
        ("device", "haloconv.tune failed on rank 0: RuntimeError: rank 0 measures for all ranks, and it has no GPU"),
    ],
)
def test_all_ranks_end_with_the_sentence_of_the_one_that_failed(ranks: dict[str, list], what: str, says: str) -> None:
    assert len(set(ranks[what])) == 1 and ranks[what][0].startswith(f"RuntimeError: {says}"), ranks[what]


def test_on_cpus_nothing_is_measured(ranks: dict[str, list]) -> None:
    assert all("our kernels run on CUDA devices" in "".join(notes) for notes in ranks["cpu"])


def test_ranks_on_other_gpu_models_are_told(ranks: dict[str, list]) -> None:
    says = "Ranks run on different GPU models (Other GPU, Test GPU 9000): choices hold on rank 0's."
    assert all(says in notes for notes in ranks["other GPU"])


def test_the_others_are_told_of_a_rank_that_ended(ranks: dict[str, list]) -> None:
    told = ranks["ended"]
    assert told[1] is None and all("haloconv.tune: another rank ended" in told[rank] for rank in (0, 2)), told
