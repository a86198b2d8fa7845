"""haloconv.tune in several processes that talk through gloo: one choice for all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tuning_ranks import FOLDER

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo to talk through"
)
LIMIT_S = 240
RANKS = 3


def test_rank_0_chooses_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    run_ranks("tuning_ranks.rank_0_chooses", "cpu", "auto", tmp_path / "meet", LIMIT_S, RANKS)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert [(rank, set(families)) for rank, families, _, _ in found] == [(rank, {"special"}) for rank in range(RANKS)]
    assert [rows for _, _, rows, _ in found] == [5, 5, 2]
    assert found[0][3] > 0 and found[1][3] == found[2][3] == 0, "rank 0 alone measures"
    assert (tmp_path / "records0").exists() and not (tmp_path / "records1").exists()
