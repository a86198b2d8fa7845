"""What ``auto`` runs on GPU models that were measured, and on those that were not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloconv.bench import sample
from haloconv.bench.results import newest_rows
from haloconv.choose import choice, measured, rules
from haloconv.choose.measured import PATH, by_measured_rule, kind_of, measured_models
from haloconv.choose.records import forget_shelves, records_path, write_records
from haloconv.device import Device, DeviceFacts, gpu_stem, set_stand_in
from haloconv.doctor import facts
from haloconv.problem import Problem
from tests.tuned import record
from tools import measured as tool

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
GH200 = replace(H200, name="NVIDIA GH200 480GB")
A100 = DeviceFacts("NVIDIA A100", "sm_80", 108, (8, 0), 80 << 30, 166_912, "none")
CPU = torch.device("cpu")
FAR = Problem("fprop", 16, 96, 56, 56, 96, 31, 31, (1, 1), (15, 15, 15, 15), (1, 1), 96, False, torch.float16, "nchw")
NEAR = Problem("fprop", 64, 144, 56, 56, 144, 3, 3, (1, 1), (1, 1, 1, 1), (1, 1), 144, False, torch.float16, "nhwc")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """``on(facts)``: what would be chosen by rule on that GPU."""

    def of(facts: DeviceFacts) -> Callable[[Problem], tuple[str, str]]:
        set_stand_in(Device(facts, load=None, encode_tiled=None))
        monkeypatch.setattr(choice, "stand_in", lambda: None)
        return lambda problem: by_measured_rule(problem, CPU)

    yield of
    set_stand_in(None)


def test_the_file_is_that_of_the_committed_results() -> None:
    """Write it anew with ``python -m tools.measured``."""
    assert json.loads(PATH.read_text(encoding="utf-8")) == json.loads(json.dumps(tool.measured()))


def test_models_are_those_with_results_and_rules_hold_on_sampled_ones() -> None:
    folders = [path for path in (tool.ROOT / "benchmarks" / "results").iterdir()]
    assert {gpu_stem(each.name) for each in measured_models()} == {path.name for path in folders}
    drawn = {path.name: newest_rows(path, "sample") for path in folders}
    assert all(len(rows) >= tool.LEAST_DRAWS for rows in drawn.values())
    held_back = {name for name, rows in drawn.items() if any(tool.NOTHING_MEASURED in row["reason"] for row in rows)}
    assert held_back == {"nvidia-h100-80gb-hbm3"}
    assert {gpu_stem(each.name) for each in measured_models() if each.sampled} == drawn.keys() - held_back


def test_a_measured_model_follows_every_rule(on) -> None:
    assert {by: on(H200)(by)[0] for by in (FAR, NEAR)} == {FAR: "depthwise_toeplitz", NEAR: "depthwise"}
    assert "NVIDIA" not in on(H200)(NEAR)[1]


def test_another_model_of_the_architecture_follows_what_is_far_ahead(on) -> None:
    family, reason = on(GH200)(FAR)
    assert family == "depthwise_toeplitz" and "x PyTorch on NVIDIA H200" in reason
    family, reason = on(GH200)(NEAR)
    assert (
        family == "aten" and "nothing of the kind was measured on NVIDIA GH200" in reason and "haloconv.tune" in reason
    )
    least = measured_models()[0].least
    assert least[kind_of(rules.by_rule(FAR, CPU).rule, FAR)] >= measured.FAR_AHEAD
    assert least[kind_of(rules.by_rule(NEAR, CPU).rule, NEAR)] < measured.FAR_AHEAD


def test_a_kind_that_was_measured_on_the_model_itself_is_decided_there(on, monkeypatch: pytest.MonkeyPatch) -> None:
    _, h100 = measured_models()
    signal = replace(FAR, n=16, c=128, h=1, w=2048, k=128, r=1, s=7, padding=(0, 0, 9, 9), dilation=(1, 3), groups=1)
    family, reason = on(H100)(signal)
    assert family == "halo_sm90" and f"x PyTorch on {h100.name}" in reason
    kind = kind_of(rules.by_rule(signal, CPU).rule, signal)
    monkeypatch.setattr(measured, "measured_models", lambda: (h100._replace(least={**h100.least, kind: 0.97}),))
    family, reason = on(H100)(signal)
    assert family == "aten" and "halo_sm90 fell to 0.97x PyTorch" in reason


def test_another_architecture_stays_with_pytorch(on) -> None:
    assert rules.by_rule(FAR, CPU).family == "aten" and on(A100)(FAR)[0] == "aten"
    assert "nor on another GPU of its architecture" in on(A100)(FAR)[1]


def test_the_nearest_model_has_the_nearest_number_of_multiprocessors(on, monkeypatch: pytest.MonkeyPatch) -> None:
    h200, _ = measured_models()
    small = h200._replace(name="Small GPU", sm_count=60, least={kind: 9.0 for kind in h200.least})
    monkeypatch.setattr(measured, "measured_models", lambda: (h200, small))
    assert on(replace(H100, sm_count=70))(NEAR)[0] == "depthwise" and on(H100)(NEAR)[0] == "aten"


def test_a_record_of_the_user_decides_there(on, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCONV_RECORDS_DIR", str(tmp_path))
    forget_shelves()
    on(H100)
    assert choice.choose(NEAR, CPU).family == "aten"
    write_records(records_path(H100.name), [record(NEAR, "direct", H100)], H100)
    forget_shelves()
    assert choice.choose(NEAR, CPU).family == "direct"
    forget_shelves()


def test_pytorch_sums_the_bias_gradient_where_nothing_was_measured(on) -> None:
    dy = torch.empty(2, 8, 4, 5)
    on(H100)
    assert measured.bgrad_by_measured_rule(dy.shape, dy.stride(), dy.device)[0] == "aten"
    on(H200)
    assert measured.bgrad_by_measured_rule(dy.shape, dy.stride(), dy.device)[0] == "reduce"


@pytest.mark.parametrize(("gpu", "says"), [(H200, False), (H100, True)])
def test_doctor_says_where_nothing_was_measured(gpu: DeviceFacts, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "device_facts", lambda index: gpu)
    assert ("was not sampled" in facts._held(0)) is says


@pytest.mark.parametrize("seed", range(2))
def test_a_drawn_layer_is_read_off_its_name(seed: int) -> None:
    for each in sample.sample(60, seed):
        assert sample.read_case(each.case.name) == each.case
    with pytest.raises(ValueError, match="no name of a drawn layer"):
        sample.read_case("resnet50 stem")


@pytest.mark.parametrize(("draws", "held_back", "sampled"), [(150, 0, True), (149, 0, False), (900, 1, False)])
def test_a_model_is_sampled_by_draws_in_which_no_rule_was_held_back(
    draws: int, held_back: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["by rule: halo_sm90 is faster"] * (draws - held_back)
    reasons += [f"by rule: {tool.NOTHING_MEASURED} on a GPU"] * held_back
    monkeypatch.setattr(tool, "newest_rows", lambda folder, name: [{"reason": each} for each in reasons])
    monkeypatch.setattr(tool, "rows_of", lambda root, stem: iter(()))
    assert tool._entry(tool.gpus()[0], tmp_path)["sampled"] is sampled
