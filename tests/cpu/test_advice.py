"""haloconv.advise: each piece of advice from made-up records, with its figure; none without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import haloconv
from haloconv import env, roofline
from haloconv.choose.choice import Choice
from haloconv.choose.records import shelf_of
from haloconv.cli import app
from haloconv.precision import convolution_precision
from haloconv.problem import Problem
from haloconv.roofline import Ceilings
from haloconv.tune import advice
from haloconv.tune.advice import NEEDS_A_GPU, Time, advice_on, advise
from haloconv.tune.problems import Posed
from tests.tuned import FACTS, LAYER, fake_gpu, record

CPU = torch.device("cpu")
WGRAD = replace(LAYER, direction="wgrad")
FP32 = replace(LAYER, dtype=torch.float32, precision="tf32x3")  # as layers that say no precision where TF32 is off


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[None]:
    with fake_gpu(tmp_path):
        yield


@pytest.fixture
def ceiling(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GB/s and 1 GFLOP/s in fp32, four times that in other precisions: all times are those of the arithmetic."""
    rates = {"fp32": 1e9, "tf32": 4e9, "fp16": 4e9, "bf16": 4e9}
    monkeypatch.setitem(roofline.CEILINGS, "Test GPU", Ceilings(1e9, rates))


def known(problem: Problem, ms: float, family: str = "direct") -> None:
    shelf_of(FACTS).add([record(problem, family, ms=ms)])


def asked(*problems: Problem) -> advice.Advice:
    return advice_on([Posed(f"layer{index}", problem, CPU) for index, problem in enumerate(problems)])


def test_without_records_or_ceilings_there_is_no_advice(gpu: None) -> None:
    found = asked(LAYER, WGRAD)
    assert found.pieces == () and "No record of Test GPU 9000 serves this model" in str(found)


@pytest.mark.parametrize("here, name", [("nchw", "channels_last"), ("nhwc", "contiguous_format")])
def test_the_other_layout_is_advised_by_its_records(gpu: None, here: str, name: str) -> None:
    there = "nhwc" if here == "nchw" else "nchw"
    for problem in (LAYER, WGRAD):
        known(replace(problem, layout=here), 0.6)
        known(replace(problem, layout=there), 0.5)
    (piece,) = asked(replace(LAYER, layout=here), replace(WGRAD, layout=here)).pieces
    assert piece.sentence.startswith(
        f"This model gains 1.20x in {name}: its convolutions take 1 ms there and 1.2 ms now"
    )
    assert "measured for 2 of 2 problems" in piece.sentence and f"memory_format=torch.{name}" in piece.sentence
    assert piece.figure == pytest.approx(1.2)


def test_a_layout_is_not_advised_without_a_gain_or_without_measurements(ceiling: None) -> None:
    known(LAYER, 0.5)
    known(replace(LAYER, layout="nhwc"), 0.49)
    assert not [each for each in asked(LAYER).pieces if "gains" in each.sentence], "2 % is nothing"
    known(replace(LAYER, layout="nhwc"), 0.1)
    many = [replace(LAYER, n=64 + index, h=200) for index in range(4)]
    assert not [each for each in asked(LAYER, *many).pieces if "gains" in each.sentence], "most is not measured"


def test_a_record_of_another_size_is_carried_by_pixels(gpu: None) -> None:
    known(LAYER, 0.5)
    larger = replace(LAYER, h=LAYER.h + 1)
    found = advice.time_of(larger, CPU)
    assert found is not None and found.measured and found.ms == pytest.approx(0.5 * (LAYER.h + 1) / LAYER.h)


def test_tf32_is_advised_by_the_roofline(ceiling: None) -> None:
    with convolution_precision("ieee"):
        found, exact = asked(FP32), asked(replace(FP32, precision="ieee"))
    (piece,) = [each for each in found.pieces if "TF32" in each.sentence]
    assert piece.figure == pytest.approx(4) and "4.00x, modelled by the roofline" in piece.sentence
    assert "torch.backends.cudnn.allow_tf32 = True" in piece.sentence
    assert not [each for each in exact.pieces if "TF32" in each.sentence], "it says itself that it wants none"
    with convolution_precision("tf32"):
        assert not [each for each in asked(FP32).pieces if "TF32" in each.sentence]


def test_what_runs_in_full_takes_the_time_of_full_fp32(ceiling: None) -> None:
    """A layer may be computed in tf32x3 where TF32 is off, and it takes no less because it might."""
    assert advice.time_of(FP32, CPU) == advice.time_of(replace(FP32, precision="ieee"), CPU)
    known(replace(FP32, precision="ieee"), 3.0)
    assert advice.time_of(FP32, CPU) == Time(3.0, True)
    known(FP32, 2.0)
    assert advice.time_of(FP32, CPU) == Time(2.0, True)


def test_tf32_is_advised_by_records_where_there_are_any(ceiling: None) -> None:
    known(FP32, 3.0)
    known(replace(FP32, precision="tf32"), 2.0)
    with convolution_precision("ieee"):
        (piece,) = asked(FP32).pieces
        assert "2 ms instead of 3 ms (1.50x, measured)" in piece.sentence
        known(replace(FP32, precision="tf32"), 2.99)
        assert asked(FP32).pieces == ()


def test_the_part_that_cudnn_runs_is_named_with_its_directions(gpu: None) -> None:
    known(LAYER, 6.1)
    known(WGRAD, 3.9, "aten")
    known(replace(LAYER, direction="dgrad"), 0.1, "aten")
    (piece,) = asked(LAYER, WGRAD, replace(LAYER, direction="dgrad")).pieces
    assert piece.sentence == (
        "39% of the convolutions' time is weight gradients at cuDNN (3.9 of 10.1 ms, measured; measured to be the "
        "fastest there)."
    )


def test_what_was_never_measured_is_to_be_tuned(ceiling: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "choose", lambda problem, device: Choice("aten", "by rule: PyTorch is faster"))
    known(LAYER, 1.0)
    found = asked(LAYER, WGRAD)
    (piece,) = [each for each in found.pieces if "haloconv.tune" in each.sentence]
    assert piece.sentence.startswith("1 of 2 problems were never measured on this GPU model; they are ")
    assert "measured in part, the rest modelled by the roofline" in piece.sentence
    (left,) = [each for each in found.pieces if "at cuDNN" in each.sentence]
    assert "1 of 1 by rule alone" in left.sentence


def test_problems_without_a_figure_are_left_out_and_counted(gpu: None) -> None:
    known(WGRAD, 1.0, "aten")
    found = asked(WGRAD, LAYER)
    assert found.notes == ("1 of 2 problems are left out: no record or ceiling is known.",)


def test_a_model_is_asked_for_its_problems(gpu: None) -> None:
    model, x = torch.nn.Conv2d(8, 16, 3, padding=1).half(), torch.randn(2, 8, 24, 28).half()
    known(replace(LAYER, bias=True), 1.0, "aten")
    (piece,) = advise(model, x, directions=("fprop",)).pieces
    assert "100% of the convolutions' time is forward passes at cuDNN" in piece.sentence
    assert haloconv.advise is advise


def test_on_a_cpu_it_says_what_a_gpu_adds() -> None:
    def fails(*_: object) -> None:
        raise AssertionError("the model runs")

    model = torch.nn.Conv2d(3, 4, 3)
    model.register_forward_pre_hook(fails)
    found = advise(model, torch.randn(1, 3, 8, 8))
    assert found.pieces == () and found.sentences == [NEEDS_A_GPU] and str(found) == NEEDS_A_GPU
    for word in ("channels_last", "TF32", "cuDNN", "measure"):
        assert word in NEEDS_A_GPU


def test_a_direction_that_is_none_is_refused_on_a_cpu_too() -> None:
    with pytest.raises(ValueError, match="directions are some of fprop, dgrad, wgrad, not nope"):
        advise(torch.nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2), directions=("nope",))


def test_a_disabled_package_says_so(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "disabled", lambda: True)
    known(LAYER, 1.0)
    assert "HALOCONV_DISABLE is set" in str(asked(LAYER))


def test_the_report_of_a_model_ends_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    file.write_text(
        "import torch\nModel = lambda: torch.nn.Conv2d(3, 4, 3)\n"
        "get_inputs = lambda: [torch.ones(1, 3, 9, 9)]\nget_init_inputs = lambda: []\n"
    )
    run = CliRunner().invoke(app, ["report", str(file), "--html", str(tmp_path / "page.html"), "--device", "cpu"])
    assert run.exit_code == 0, run.output
    assert NEEDS_A_GPU in " ".join(run.output.split())
    assert "Nothing here is measured or modelled on a CPU" in (tmp_path / "page.html").read_text()
