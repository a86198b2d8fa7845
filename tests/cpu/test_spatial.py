"""haloconv.distributed in four processes that talk through gloo, all in one start: what one process would give."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import haloconv.distributed
from haloconv.distributed import exchange_cost
from tests.ranks import fork_ranks
from tests.spatial_models import REFUSED
from tests.spatial_ranks import EXAMPLES, OK, all_of_them, in_two_processes

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
LIMIT_S = 240
RANKS = 4
TOLD_WITHIN_S = 30


@pytest.fixture(scope="module")
def ranks(shared_folder: Path) -> dict[str, list]:
    """What each rank said of each scenario, and the seconds that it took; None of one that ended before.

    Half a minute of four processes: done once, by the first process of the test run that asks.
    """
    folder = shared_folder / "spatial"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            assert fork_ranks(all_of_them, (str(folder),), folder / "meet", LIMIT_S, RANKS) == [0] * RANKS
            (folder / "done").touch()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [each.get(name) for each in found] for name in found[0]}


@pytest.mark.parametrize(
    "scenario",
    [
        "fuzzed",
        "other_placements",
        "pixels_mixed",
        "operations_fuzzed",
        "in_place",
        "norms_twice",
        "norms_of_every_dtype",
        "norms_under_autocast",
        "pixels_are_not_shared",
        "parameters_twice",
        "third_order",
        "models",
        "beside_data_parallel",
    ],
)
def test_results_are_those_of_one_process(ranks: dict[str, list], scenario: str) -> None:
    assert [said for said, _ in ranks[scenario]] == [OK] * RANKS


def test_what_mixes_pixels_is_refused_by_name(ranks: dict[str, list]) -> None:
    for said, _ in ranks["refused"]:
        refusals = json.loads(said)
        assert refusals.keys() == REFUSED.keys()
        assert {name: sentence for name, sentence in refusals.items() if name not in sentence} == {}
        assert "conv_transpose2d in 1 may mix pixels" in refusals["conv_transpose2d"]


def test_an_older_pytorch_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(ImportError, match=r"^haloconv.distributed needs PyTorch 2.6 or newer, .* this is 2.5.1"):
        importlib.reload(haloconv.distributed)


def test_the_model_of_the_exchange_counts_halos() -> None:
    layer = torch.nn.Conv2d(4, 8, (3, 5), padding=(1, 2)).half()
    cost = exchange_cost(layer, (2, 4, 20, 12), (2, 1))
    assert (cost.ranks, cost.messages, cost.halo_bytes) == (2, 1, 2 * 4 * 12 * 2)
    assert cost.weight_bytes == 4 * (8 * 4 * 15 + 8) and cost.interior == 0.9
    assert cost.forward_us(5, 1) == pytest.approx(5 + 0.192)
    assert cost.backward_us(5, 1) == pytest.approx(5 + 0.192 + 2 * (5 + cost.weight_bytes / 2e3))
    assert "1 messages, 192 bytes" in str(cost) and "90.0 %" in str(cost)
    around = exchange_cost(layer, (2, 4, 20, 12), (2, 2), ("zeros", "circular"))
    below, beside, beside_below = 6 + 4, 10 * 4, 2 * 4  # the rim below reads two rows of the shards beside, too
    assert (around.messages, around.halo_bytes) == (3, 2 * 4 * 2 * (below + beside + beside_below))
    alone = exchange_cost(layer, (2, 4, 20, 12), (1, 1))
    assert (alone.messages, alone.interior, alone.forward_us(5, 1), alone.backward_us(5, 1)) == (0, 1.0, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="does not fit"):
        exchange_cost(layer, (2, 4, 20, 0), (1, 1))


FAILED = "RankError: haloconv.distributed failed on rank"


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (
            "strides_differ",
            r"RankError: .*ask for different things: rank 0 for .*stride \(1, 1\).*, rank 1 for .*\(2, 2\)",
        ),
        ("a_filter_is_wrong", f"{FAILED} 2: RuntimeError: Given groups=1, weight of size .4, 5, 3, 3"),
        ("all_filters_are_wrong", "RuntimeError: Given groups=1, weight of size .4, 5, 3, 3"),
        ("a_layer_fails", f"{FAILED} 2: OutOfMemoryError: no memory is left"),
        ("a_gradient_fails", f"{FAILED} 2: OutOfMemoryError: no memory is left"),
        ("other_orders", r"RankError: .*different things: rank 0 for .*, call \d+\.\d, rank 1 for .*, call \d+\.\d"),
        ("shapes_differ", "RankError: .*different things: rank 0 for .*2, 3, 12, 8.*, rank 3 for .*2, 3, 4, 8"),
    ],
)
def test_all_ranks_end_with_one_sentence(ranks: dict[str, list], scenario: str, says: str) -> None:
    sentences = [said for said, _ in ranks[scenario]]
    assert len(set(sentences)) == 1 and pytest.approx(0, abs=TOLD_WITHIN_S) == max(s for _, s in ranks[scenario])
    assert re.match(says, sentences[0]), sentences[0]


def test_a_rank_whose_model_fails_is_heard_of(ranks: dict[str, list]) -> None:
    *others, (own, seconds) = ranks["a_model_fails"]
    assert own.startswith("KeyError: ") and seconds < TOLD_WITHIN_S
    assert {said for said, _ in others} == {f'{FAILED} 3: KeyError: "the data loader\'s last batch"'}


def test_a_rank_that_ends_is_missed(ranks: dict[str, list]) -> None:
    told = ranks["a_rank_ends"]
    assert told[1] is None
    for said, seconds in (told[0], *told[2:]):
        assert said.startswith("RankError: haloconv.distributed: another rank ended") and seconds < TOLD_WITHIN_S


def test_examples_and_compiled_layers_in_two_processes(tmp_path: Path) -> None:
    assert fork_ranks(in_two_processes, (str(tmp_path),), tmp_path / "meet", LIMIT_S, 2) == [0, 0]
    shown = {name: (tmp_path / f"{name}.txt").read_text() for name in EXAMPLES}
    assert re.search(r"^rank 0 of 2 has \[2, 5, 6, 8\] of", shown["sharded_unet"])
    assert len(re.findall(r"^step \d: loss (\d\.\d+), \1 in one process$", shown["sharded_unet"], re.MULTILINE)) == 2
    assert re.search(
        r"\[1, 3, 12, 16\] of .*\n.*one process by at most (0\.0e\+00|.*e-0[5-9])", shown["sharded_decoder"]
    )
