"""``haloconv bench``: the suite, the records, the costs; measured here on small layers and on the CPU."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv import plan
from haloconv.bench import results, suite, trial
from haloconv.bench.costs import first_use
from haloconv.bench.costs import kernels as costs
from haloconv.bench.layer import Layer
from haloconv.cli import app
from haloconv.cli.bench import command as bench
from haloconv.cli.bench import costs as bench_costs
from haloconv.cli.bench import suite as bench_suite
from haloconv.families.base import Config

CPU = torch.device("cpu")
SUITE = suite.SUITES / "suite.toml"
QUICK = trial.Budget(seconds=0.0, min_runs=2)
SMALL = suite.Case("small", (2, 4, 9, 11), 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
NAMES = [
    "A",
    "B",
    "C",
    "resnet_stem",
    "alexnet_stem",
    "resnet_56",
    "resnet_28",
    "resnet_14",
    "resnet_7",
    "resnet_14_one",
    "resnet_7_one",
    "resnext_g32",
    "regnet_g24",
    "mobilenet_dw3",
    "mobilenet_dw3_s2",
    "efficientnet_dw5",
    "convnext_dw7",
    "efficientnet_dw5_7",
    "efficientnet_dw5_14",
    "efficientnet_dw5_14_s2",
    "mobilenet_dw3_14",
    "convnext_dw7_14",
    "convnext_dw7_7",
    "replknet_dw31",
    "aspp_dil12",
    "vae_3x3",
    "unet_3x3",
    "row_1x15",
]


def console() -> Console:
    return Console(width=132, file=io.StringIO())


LISTS = {"cases": [SMALL], "directions": ["fprop", "step"], "precisions": ["fp32"], "layouts": ["nchw"]}


def order(suite: str = "suite", family: str = "auto", **lists) -> bench_suite.Order:
    return bench_suite.Order(bench_suite.pieces(**LISTS | lists, family=family), QUICK, suite)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the verb


@pytest.mark.parametrize("options", [[], ["--compile-time"]])
def test_without_a_gpu_it_says_what_is_needed(monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert "bench needs an NVIDIA GPU" in result.output and "haloconv doctor" in result.output


@pytest.fixture
def pretended_gpu(monkeypatch, tmp_path):
    """The verb with a GPU that is only a name; collects what it would have timed."""
    orders = []

    def note(order, device, folder, console):
        orders.append((order, folder))
        return True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(bench, "bench_suite", note)
    return orders


def test_options_select_what_is_timed(pretended_gpu, tmp_path):
    options = ["--case", "A,C", "--direction", "fprop,step", "--precision", "tf32,fp16", "--layout", "nhwc,nchw"]
    result = CliRunner().invoke(app, ["bench", *options, "--family", "direct", "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    ((order, folder),) = pretended_gpu
    assert [str(piece) for piece in order.pieces] == [
        f"{case} {precision} {layout}" for case in "AC" for precision in ("tf32", "fp16") for layout in ("nhwc", "nchw")
    ]
    assert {(piece.family, piece.directions) for piece in order.pieces} == {("direct", ("fprop", "step"))}
    assert folder == tmp_path / "nvidia-h200"
    assert CliRunner().invoke(app, ["bench", "--family", "depthwise/band", "--results", str(tmp_path)]).exit_code == 0
    assert {piece.family for piece in pretended_gpu[1][0].pieces} == {"depthwise/band"}


def test_by_default_every_case_is_timed_beside_the_suite(pretended_gpu):
    assert CliRunner().invoke(app, ["bench"]).exit_code == 0
    ((order, folder),) = pretended_gpu
    assert [str(piece) for piece in order.pieces] == [f"{name} fp32 nchw" for name in NAMES]
    assert {(piece.family, piece.directions) for piece in order.pieces} == {("auto", ("fprop", "dgrad", "wgrad"))}
    assert folder == results.BENCHMARKS / "results" / "nvidia-h200" and order.latest == "latest.jsonl"


def test_suites_of_the_package_have_names(tmp_path, monkeypatch):
    """A file of that name is taken first; anything else is no suite."""
    monkeypatch.chdir(tmp_path)
    assert suite.find_suite(Path("few_images")) == SUITE.parent / "few_images.toml"
    with pytest.raises(
        suite.SuiteError,
        match=r"suite.toml: there is no such file.* package: few_images, fronts, models, pointwise, rims, suite",
    ):
        suite.find_suite(Path("suite.toml"))
    (tmp_path / "suite.toml").write_text("")
    assert suite.find_suite(Path("suite.toml")) == Path("suite.toml")
    assert results.results_folder(Path("suite.toml")) == tmp_path / "results"
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path / "none")
    assert results.results_folder(SUITE) == Path("benchmarks/results"), "an installed package is not written to"


@pytest.mark.parametrize("name", ["few_images", "rims"])
def test_a_suite_names_its_rows(name, pretended_gpu):
    assert CliRunner().invoke(app, ["bench", "--suite", name]).exit_code == 0
    ((order, _),) = pretended_gpu
    assert order.suite == name and order.latest == f"latest-{name}.jsonl"
    assert len(order.pieces) == len(suite.load_suite(SUITE.parent / f"{name}.toml"))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--case", "A,Z"], "the suite has no Z"),
        (["--tag", "none"], "the suite has no none"),
        (["--case", "A", "--tag", "depthwise"], "none of the cases A has one of the tags depthwise"),
        (["--direction", "sideways"], "--direction takes some of fprop,dgrad,wgrad,step, not 'sideways'"),
        (["--models", "--direction", "sideways"], "--direction takes some of fprop,dgrad,wgrad,step, not 'sideways'"),
        (["--precision", "fp8"], "--precision takes some of"),
        (["--family", "nobody"], "family must be one of ('auto', "),
        (["--family", "depthwise/bnd"], "depthwise has no kernel depthwise/bnd; it has depthwise/band, "),
        (
            ["--family", "depthwise/band", "--compile-time"],
            "depthwise/band is one kernel, and whole families",
        ),
        (["--layout", ""], "--layout takes some of nchw,nhwc, not ''"),
        (["--suite", "nowhere.toml"], "nowhere.toml: "),
        (["--results", str(SUITE)], "suite.toml is no folder"),
    ],
)
def test_wrong_options(pretended_gpu, options, message):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())
    assert pretended_gpu == []


# --- timing the suite


def test_rows_are_printed_recorded_and_latest(tmp_path):
    out = console()
    assert bench_suite.bench_suite(order(layouts=["nchw", "nhwc"]), CPU, tmp_path, out)
    latest = lines_of(tmp_path / "latest.jsonl")
    assert {(row["direction"], row["layout"]) for row in latest} == {
        (direction, layout) for direction in ("fprop", "step") for layout in ("nchw", "nhwc")
    }
    (daily,) = tmp_path.glob("*-suite.jsonl")
    assert len(lines_of(daily)) == 4 and daily.name.startswith(latest[0]["date"][:10])
    for row in latest:
        assert row["case"] == "small" and row["precision"] == "fp32" and 0 < row["error"] < row["error_limit"]
        assert row["ratio"] == pytest.approx(row["aten_ms"] / row["haloconv_ms"], rel=1e-4)
    text = out.file.getvalue()
    assert "4 of 4 rows passed" in text and "step" in text


def test_rows_of_another_suite_have_files_of_their_own(tmp_path):
    assert bench_suite.bench_suite(order(directions=["fprop"], suite="few_images"), CPU, tmp_path, console())
    latest, daily = sorted((path.name for path in tmp_path.iterdir()), reverse=True)
    assert latest == "latest-few_images.jsonl" and daily[len("2026-11-23") :] == "-few_images.jsonl"


@pytest.mark.parametrize("precision, limit", [("tf32", 5e-4), ("fp16", 1e-3), ("bf16", 8e-3), ("fp64", 1e-13)])
def test_every_precision_has_its_limit(tmp_path, precision, limit):
    steps = ["fprop", "dgrad", "wgrad", "step"]
    assert bench_suite.bench_suite(order(precisions=[precision], directions=steps), CPU, tmp_path, console())
    latest = lines_of(tmp_path / "latest.jsonl")
    assert len(latest) == 4 and {row["precision"] for row in latest} == {precision}
    assert {row["error_limit"] for row in latest} == {limit}


@pytest.mark.parametrize("family, passes", [("aten", True), ("direct", False)])
def test_what_pytorch_ran_may_err_as_pytorch_does(monkeypatch, family, passes):
    """A baseline that is far off raises the limit of its own convolution on our side, and of no kernel of ours."""
    layer = replace(SMALL.layer("tf32", "nchw", "aten", CPU), dy=torch.ones(2, 6, 5, 10))
    off = {"wgrad": lambda: 1.001 * right()}
    right = layer.baseline("wgrad")
    monkeypatch.setattr(type(layer), "baseline", lambda self, step: off[step])
    monkeypatch.setattr(type(layer), "ours", lambda self, step: off[step])
    monkeypatch.setattr(type(layer), "choice", lambda self, step: plan.Choice(family, "a test"))
    monkeypatch.setattr(type(layer), "ran", lambda self, step: Config(family))
    row = trial.try_step(layer, "wgrad", QUICK)
    assert row.passed is passes and row.error == pytest.approx(1e-3, rel=1e-2)
    assert row.error_limit == pytest.approx(2e-3 if passes else 5e-4, rel=1e-2)


def test_failed_rows_are_recorded_and_latest(tmp_path, monkeypatch):
    right = plan.fprop
    monkeypatch.setattr(plan, "fprop", lambda *arguments: right(*arguments) * 1.01)
    out = console()
    assert not bench_suite.bench_suite(order(directions=["fprop"]), CPU, tmp_path, out)
    (daily,) = tmp_path.glob("*-suite.jsonl")
    assert [row["passed"] for row in lines_of(daily)] == [False]
    assert lines_of(tmp_path / "latest.jsonl") == lines_of(daily)
    assert "FAILED small fprop" in out.file.getvalue()


def test_wrong_gradient_fails_the_step(tmp_path, monkeypatch):
    def spoiled(layer: Layer, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return layer.convolve_by_torch(x, w + 0.5 * (w - w.detach()))

    monkeypatch.setattr(Layer, "convolve", spoiled)
    out = console()
    assert not bench_suite.bench_suite(order(directions=["step"]), CPU, tmp_path, out)
    assert "FAILED small step: wgrad: error" in " ".join(out.file.getvalue().split())


# --- the suite file


def test_shipped_suite():
    cases = {case.name: case for case in suite.load_suite(SUITE)}
    assert list(cases) == NAMES
    assert all(case.tags and case.about for case in cases.values())
    a = cases["A"]
    assert (a.input, a.filters, a.filter, a.padding, a.dilation) == ((8, 32, 512, 512), 64, (5, 9), (2, 4), (2, 3))
    assert cases["convnext_dw7"].groups == 96 and cases["resnet_stem"].stride == (2, 2)


@pytest.mark.parametrize("case", suite.load_suite(SUITE), ids=lambda case: case.name)
def test_shipped_cases_are_legal(case):
    small = replace(case, input=(1, *case.input[1:]))
    with torch.device("meta"):
        x = torch.empty(small.input)
        w = torch.empty(case.filters, case.input[1] // case.groups, *case.filter)
    y = torch.nn.functional.conv2d(x, w, None, case.stride, case.padding, case.dilation, case.groups)
    assert min(y.shape) > 0


def test_layer_of_a_case():
    layer = SMALL.layer("fp16", "nhwc", "direct", CPU, seed=3)
    assert layer.x.dtype == layer.w.dtype == layer.dy.dtype == torch.float16
    assert layer.x.is_contiguous(memory_format=torch.channels_last) and layer.problem("dgrad").layout == "nhwc"
    assert layer.dy.shape == layer.problem("fprop").y_shape and layer.spec.padding == (1, 1, 0, 0)
    assert torch.equal(layer.x, SMALL.layer("fp16", "nchw", "direct", CPU, seed=3).x)
    assert layer.steps == ("fprop", "dgrad", "wgrad")


def test_fp64_layers_have_values_that_fp32_has_not():
    layer = SMALL.layer("fp64", "nchw", "direct", CPU)
    for each in (layer.x, layer.w, layer.dy):
        assert each.dtype == torch.float64 and not torch.equal(each, each.float().double())


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "there is no case"),
        ("[[case]]\nname = 3 =", "suite.toml: "),
        ('[[case]]\nname = "x"\n', "case x: .*missing"),
        ('[[case]]\nname = "x"\ninput = [1, 1, 4, 4]\nfilters = 1\nfilter = [1, 1]\ncolour = 3\n', "case x: .*colour"),
        ('[[case]]\nname = "x"\ninput = [1, 1, 4, 4]\nfilters = 1\nfilter = [1, 1]\n' * 2, "x stand twice"),
    ],
)
def test_wrong_suites(tmp_path, text, message):
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(suite.SuiteError, match=message):
        suite.load_suite(path)


def test_selection_by_name_and_tag():
    cases = suite.load_suite(SUITE)
    assert [case.name for case in suite.select(cases, ["C", "A"])] == ["A", "C"]
    assert [case.name for case in suite.select(cases, tags=["stem"])] == ["resnet_stem", "alexnet_stem"]
    assert {case.name for case in suite.select(cases, tags=["grouped", "stem"])} == {
        "resnet_stem",
        "alexnet_stem",
        "resnext_g32",
        "regnet_g24",
    }
    assert [case.name for case in suite.select(cases, ["A", "B"], ["dilated"])] == ["A"]


# --- the costs


@pytest.mark.parametrize(
    "compile_ms, disk_ms, budgeted, within",
    [(900, 15, True, True), (1100, 15, True, False), (900, 21, True, False), (1100, 21, False, True)],
)
def test_compile_budgets(compile_ms, disk_ms, budgeted, within):
    assert costs.CompileTime("A fprop", 1, compile_ms, disk_ms, budgeted=budgeted).within_budget is within


def uses(ms: float, compiles: int) -> list[first_use.FirstUse]:
    names = ("first kernel of a process", "A fprop", "A wgrad")
    return [first_use.FirstUse(name, ms, kernels, compiles) for name, kernels in zip(names, (1, 1, 2), strict=True)]


def test_compile_times_are_per_kernel(monkeypatch, tmp_path):
    orders = []
    answers = iter([uses(400.0, 1), uses(10.0, 0)])
    monkeypatch.setattr(
        costs, "_in_new_process", lambda order, folder: (orders.append(json.loads(order)), next(answers))[1]
    )
    out = console()
    assert bench_costs.bench_compile_time([suite.load_suite(SUITE)[0]], tmp_path, out)
    (path,) = tmp_path.glob("*-compile-time.jsonl")
    found = {row["what"]: (row["compile_ms"], row["disk_ms"], row["budgeted"]) for row in lines_of(path)}
    assert found == {
        "first kernel of a process": (400.0, 10.0, False),
        "A fprop": (400.0, 10.0, True),
        "A wgrad": (200.0, 5.0, True),
    }
    assert orders[0] == orders[1] and orders[0]["cases"][0]["input"] == [1, 32, 64, 64]


def test_a_cache_that_does_not_serve_is_an_error(monkeypatch):
    answers = iter([uses(400.0, 1), uses(400.0, 1)])
    monkeypatch.setattr(costs, "_in_new_process", lambda order, folder: next(answers))
    with pytest.raises(RuntimeError, match="did not serve first kernel of a process, A fprop"):
        costs.compile_times([SMALL])


def test_a_failing_process_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="measuring compile times failed:\n(.|\n)*Error"):
        costs._in_new_process(json.dumps({"family": "direct"}), str(tmp_path))


def test_a_call_without_a_new_kernel_is_no_first_use():
    with pytest.raises(RuntimeError, match="small needed no new kernel"):
        first_use.first_use(SMALL.layer("fp32", "nchw", "aten", CPU), "fprop", "small")


def test_first_use_counts_kernels(monkeypatch):
    layer = SMALL.layer("fp32", "nchw", "aten", CPU)
    counts = iter([(3, 4), (4, 6)])

    def statistics():
        return first_use.jit.CacheStatistics(*next(counts))

    monkeypatch.setattr(first_use.jit, "statistics", statistics)
    use = first_use.first_use(layer, "wgrad", "small wgrad")
    assert (use.what, use.kernels, use.compiles) == ("small wgrad", 3, 1) and 0 < use.ms < math.inf
    assert first_use.FirstUse(**asdict(use)) == use
