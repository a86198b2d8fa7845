"""``haloconv bench --suite fronts``: what the functions beside conv2d pose, against PyTorch's own of the same name."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from haloconv.bench import suite, trial
from haloconv.bench.front_layer import OURS, FrontLayer
from haloconv.cli.bench import suite as bench_suite
from haloconv.emulator import emulated_device

CPU = torch.device("cpu")
QUICK = trial.Budget(seconds=0.0, min_runs=1, other_layout=True)
SHIPPED = suite.load_suite(suite.SUITES / "fronts.toml")
SMALL = (
    suite.Case(
        "signal", (2, 4, 1, 21), 6, (1, 3), stride=(1, 2), padding=(0, 2), dilation=(1, 2), groups=2, front="conv1d"
    ),
    suite.Case("causal", (2, 4, 1, 21), 4, (1, 4), padding=(0, 0, 3, 0), groups=4, front="conv1d"),
    suite.Case("half causal", (2, 4, 1, 22), 6, (1, 4), stride=(1, 2), padding=(0, 0, 4, 1), front="conv1d"),
    suite.Case("up", (2, 6, 1, 40), 4, (1, 16), stride=(1, 8), padding=(0, 4), front="conv_transpose1d"),
    suite.Case("image up", (2, 6, 12, 10), 4, (3, 4), stride=(2, 2), padding=(1, 1), front="conv_transpose2d"),
    suite.Case("patches", (5, 3 * 2 * 2 * 2, 1, 1), 6, (1, 1), front="conv3d", patch=(2, 2, 2)),
)
STEPS: tuple[bench_suite.Timed, ...] = ("fprop", "dgrad", "wgrad", "step")
FORWARD = {"conv_transpose1d": "dgrad", "conv_transpose2d": "dgrad"}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rows_pass(case: suite.Case, layout: str, tmp_path: Path, as_on_a_gpu: None) -> None:
    """Every direction and the training step, on both sides, against float64."""
    out = Console(width=132, file=io.StringIO())
    pieces = [bench_suite.Piece(case, "fp32", layout, "auto", STEPS)]  # type: ignore[arg-type]
    assert bench_suite.bench_suite(bench_suite.Order(pieces, QUICK, "fronts"), CPU, tmp_path, out), out.file.getvalue()
    assert (tmp_path / "latest-fronts.jsonl").read_text().count('"passed": true') == len(STEPS)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_baseline_is_pytorchs_function_of_that_name(
    case: suite.Case, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    """Its forward pass is one call of it; its gradients are those of autograd, bit by bit."""
    calls: list[str] = []
    for name in OURS:
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, n=name, f=real, **given: calls.append(n) or f(*args, **given))
    layer = case.layer("fp32", "nchw", "auto", CPU)
    forward, to_input, to_w = layer.directions
    assert forward == FORWARD.get(case.front, "fprop")
    y = layer.baseline(forward)()
    assert calls == [case.front] and y.shape == layer.trained[1].shape
    want = trial._with_grad(layer.convolve_by_torch, layer)()
    got = (y, layer.baseline(to_input)(), layer.baseline(to_w)())
    for each, other in zip(got, want, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-6, atol=1e-6)
    calls.clear()
    ours = trial._with_grad(layer.convolve, layer)()
    for each, other in zip(ours, want, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-5)
    assert ("conv3d" in calls) is False, "a patch embedding is a product on our side"


def test_a_product_says_so(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SMALL[-1].layer("bf16", "nhwc", "auto", CPU)
    assert layer.choice("wgrad").family == "product" and layer.ran("wgrad").kernel == "aten"
    assert trial.try_step(layer, "dgrad", QUICK).passed
    monkeypatch.undo()
    left = SMALL[-1].layer("bf16", "nhwc", "auto", CPU)
    assert left.choice("fprop").family == "aten" and trial.try_step(left, "fprop", QUICK).passed


@pytest.mark.parametrize("case", SMALL[:5], ids=lambda case: case.name)
def test_our_side_is_what_the_layer_runs(case: suite.Case, emulator_cache: None) -> None:
    """The problem of a row's forward direction is that of the function: the same family, kernel and config."""
    with emulated_device():
        layer = case.layer("fp16", "nchw", "auto", CPU)
        forward, *_ = layer.directions
        assert layer.ran(forward).kernel != "aten"
        got = layer.ours(forward)()
        assert torch.equal(got, layer.convolve(layer.trained[0], layer.w))


@pytest.mark.parametrize("case", SHIPPED, ids=lambda case: case.name)
def test_shipped_cases_pose_what_their_function_takes(case: suite.Case) -> None:
    assert case.tags and case.about and case.front in OURS
    n, c, h, w = case.input
    short = {"conv3d": (2, c, 1, 1), "conv_transpose2d": (1, c, min(h, 64), min(w, 64))}
    layer = replace(case, input=short.get(case.front, (1, c, 1, min(w, 640)))).layer("bf16", "nchw", "aten", CPU)
    y = layer.convolve_by_torch(layer.trained[0], layer.w)
    assert y.shape == layer.trained[1].shape and min(y.shape) > 0
    if isinstance(layer, FrontLayer) and layer.front.endswith("1d"):
        assert (h, case.filter[0], case.stride[0], case.dilation[0]) == (1, 1, 1, 1)


def test_the_cases_of_the_bars_are_there() -> None:
    tags = {tag for case in SHIPPED for tag in case.tags}
    assert tags >= {"vocoder", "conformer", "mamba", "gan", "unet", "segmentation", "patches", "n1", "n16"}
    blocks = [case for case in SHIPPED if case.name.startswith("vocoder_") and case.filters == case.input[1]]
    assert {case.filters for case in blocks} == {512, 256, 128, 64, 32}
    assert {(case.filter[1], case.dilation[1]) for case in blocks} == {(3, 1), (7, 3), (11, 5)}
    assert {(case.filter[1], case.stride[1]) for case in SHIPPED if case.front == "conv_transpose1d"} == {
        (16, 8),
        (4, 2),
    }


@pytest.mark.parametrize(
    "more, message",
    [
        ('front = "conv2d"', "front is one of conv1d, conv3d, conv_transpose1d, conv_transpose2d, not 'conv2d'"),
        ('front = "conv3d"', "front = 'conv3d' and patch go together"),
        ("patch = [2, 2, 2]", "front = 'conv3d' and patch go together"),
        ('front = "conv_transpose1d"\npadding = [0, 0, 3, 0]', "only conv1d may be padded more on one side, its left"),
        ('front = "conv1d"\npadding = [0, 0, 0, 3]', "only conv1d may be padded more on one side, its left"),
        ("padding = [1, 1, 1]", "padding has two or four numbers, not 3"),
    ],
)
def test_wrong_fronts(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "fronts.toml"
    path.write_text(f'[[case]]\nname = "x"\ninput = [1, 8, 1, 9]\nfilters = 1\nfilter = [1, 1]\n{more}\n')
    with pytest.raises(suite.SuiteError, match=message):
        suite.load_suite(path)
