"""``haloconv bench --models``: networks as data, what is measured of them, the bars, and what is recorded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from haloconv import accelerate, gradients, plan
from haloconv.bench import trial
from haloconv.bench.layer import Layer
from haloconv.bench.networks import network, whole
from haloconv.bench.networks.network import Effort, NetworkCase, Setting, bench_network, load_networks
from haloconv.bench.networks.swapped import Options, layers_of
from haloconv.bench.networks.whole import Contest, try_model
from haloconv.bench.suite import SUITES, SuiteError
from haloconv.bench.trial import Budget
from haloconv.cli import app
from haloconv.cli.bench import command as bench
from haloconv.cli.bench import models as bench_models
from haloconv.problem_file import load_problem_file
from haloconv.reference import Error, Limits
from haloconv.report import Row, networks_of

ROOT = Path(__file__).resolve().parents[2]
MODELS = SUITES / "models.toml"
OWN = ROOT / "examples" / "models"
CPU = torch.device("cpu")
QUICK = Effort(Budget(seconds=0.0, min_runs=1), tune=False)
ROW = Row("net (model)", "forward", "tf32", "nchw", "direct", "", 1e-6, 1e-6, 1e-5, 0.0, 2.0, 1.0, 0.0, 9)

pytestmark = [
    pytest.mark.usefixtures("without_gpu"),
    pytest.mark.filterwarnings("ignore:haloconv. PyTorch's own convolution runs:RuntimeWarning"),
]


def reduced(folder: Path, name: str, *lines: str) -> NetworkCase:
    """One of our own models with other numbers at its top."""
    text = (OWN / f"{name}.py").read_text("utf-8")
    for line in lines:
        variable = line.split(" =")[0]
        (old,) = [each for each in text.splitlines() if each.startswith(f"{variable} =")]
        text = text.replace(old, line)
    path = folder / f"{name}.py"
    path.write_text(text)
    return NetworkCase(name, str(path))


@pytest.fixture
def unet(tmp_path: Path) -> NetworkCase:
    return reduced(tmp_path, "unet", "batch_size = 2", "channels, classes = 4, 2", "height = width = 16")


@pytest.fixture
def decoder(tmp_path: Path) -> NetworkCase:
    return reduced(tmp_path, "vae_decoder", "batch_size = 1", "latent_channels, channels = 4, 4", "height = width = 4")


# --- the networks


def test_shipped_networks() -> None:
    cases = {case.name: case for case in load_networks(MODELS)}
    assert list(cases) == [
        "resnet50", "convnext_tiny", "efficientnet_b0", "regnety_016", "deeplabv3_resnet50",
        "mobilenetv3_large", "unet", "vae_decoder", "flux_decoder", "diffusion_unet", "fpn",
    ]  # fmt: skip
    assert cases["deeplabv3_resnet50"].pixels == 512
    assert all(Path(cases[name].target).is_file() for name in ("unet", "vae_decoder", "flux_decoder", "fpn"))


@pytest.mark.parametrize(
    "name, shape, convolutions",
    [
        ("unet", (4, 2, 512, 512), 15),
        ("vae_decoder", (2, 3, 384, 384), 23),
        ("flux_decoder", (1, 3, 1024, 1024), 37),
        ("diffusion_unet", (8, 4, 64, 64), 25),
        ("fpn", (8, 19, 128, 128), 29),
    ],
)
def test_own_networks_at_full_size(name: str, shape: tuple[int, ...], convolutions: int) -> None:
    with torch.device("meta"):
        file = load_problem_file(OWN / f"{name}.py")
        model = file.model()
        assert model(*file.inputs()).shape == shape
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == convolutions


@pytest.mark.parametrize(
    "text", ["", "[[model]]\nname = 3 =", '[[model]]\nname = "x"\n', '[[model]]\nname = "x"\ntarget = "y"\n' * 2]
)
def test_wrong_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(SuiteError, match="models.toml: "):
        load_networks(tmp_path / "models.toml")


# --- what is measured


@pytest.mark.parametrize(
    "name, lines",
    [
        ("diffusion_unet", ("batch_size = 1", "latent_channels, channels = 4, 4", "height = width = 8")),
        ("flux_decoder", ("latent_channels, channels = 4, 4", "height = width = 4")),
        ("fpn", ("batch_size = 2", "channels, classes = 4, 2", "height = width = 64")),
    ],
)
def test_other_networks(tmp_path: Path, name: str, lines: tuple[str, ...]) -> None:
    outcome = bench_network(Setting(reduced(tmp_path, name, *lines), "fp32", "nchw"), QUICK, CPU)
    assert {"forward", "step"} <= {row.direction for row in outcome.rows}
    assert all(row.passed for row in outcome.rows), [row.complaint for row in outcome.rows]


@pytest.mark.parametrize("precision, layout", [("fp32", "nchw"), ("bf16", "nhwc")])
def test_a_unet(unet: NetworkCase, precision: str, layout: str) -> None:
    outcome = bench_network(Setting(unet, precision, layout), QUICK, CPU)
    assert all(row.passed for row in outcome.rows), [row.complaint for row in outcome.rows]
    assert {(row.precision, row.layout) for row in outcome.rows} == {(precision, layout)}
    (net,) = networks_of(outcome.rows)
    assert net.name == "unet" and net.forward.ratio and net.step.ratio
    directions = {}
    for row in net.layers:
        directions.setdefault(row.case, set()).add(row.direction)
    assert directions.pop("unet.down.0.0") == {"fprop", "wgrad"}  # nobody wants the gradient of the image
    assert directions.pop("unet.head") == {"fprop", "dgrad", "wgrad", "bgrad"}
    assert set(map(frozenset, directions.values())) == {frozenset({"fprop", "dgrad", "wgrad"})}
    assert sum(row.count for row in net.layers if row.direction == "fprop") == 15


def test_a_decoder(decoder: NetworkCase) -> None:
    outcome = bench_network(Setting(decoder, "fp32", "nchw"), replace(QUICK, layers=False), CPU)
    assert [row.direction for row in outcome.rows] == ["forward", "step"] and all(row.passed for row in outcome.rows)


def test_layers_of_one_pixel_belong_to_their_network(tmp_path: Path) -> None:
    """Squeeze-and-excitation: to strides alone, an image of one pixel is stored either way."""
    text = (
        "import torch\nfrom torch import nn\n"
        "class Mean(nn.Module):\n    def forward(self, x):\n        return x.mean((2, 3), keepdim=True)\n"
        "def Model():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), Mean(), nn.Conv2d(4, 6, 1))\n"
        "def get_inputs():\n    return [torch.randn(2, 3, 9, 9)]\ndef get_init_inputs():\n    return []\n"
    )
    (tmp_path / "squeeze.py").write_text(text)
    case = NetworkCase("squeeze", str(tmp_path / "squeeze.py"))
    for layout in ("nchw", "nhwc"):
        (net,) = networks_of(bench_network(Setting(case, "fp32", layout), QUICK, CPU).rows)
        assert net.layout == layout and {row.case for row in net.layers} == {"squeeze.0", "squeeze.2"}


def test_a_layer_of_a_model_keeps_the_orders_of_its_tensors() -> None:
    """An nchw image with an nhwc filter: y and dx are nhwc, as PyTorch's, and what is looked up is what a plan asks."""
    model = torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    swaps, x = accelerate(torch.nn.Sequential(model)).swaps, torch.randn(2, 8, 9, 9)
    (layer,) = layers_of("net", swaps[0].module, (x,), swaps, Options(CPU, None, "auto", 0, QUICK.budget))
    assert layer.x.stride() == x.stride() and layer.w.stride() == model.weight.stride()
    assert layer.layout == "nhwc" and layer.dy.is_contiguous(memory_format=torch.channels_last)
    assert [layer.problem(step).layout for step in ("fprop", "dgrad", "wgrad")] == ["nhwc", "nhwc", "nchw"]
    for step in ("fprop", "dgrad", "wgrad"):
        ours, theirs = layer.ours(step)(), layer.baseline(step)()
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_on_activations_our_kernels_may_err_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
    swaps, x = accelerate(model).swaps, torch.randn(1, 3, 9, 9)
    options = Options(CPU, None, "auto", 0, QUICK.budget)
    image, activation = layers_of("net", model, (x,), swaps, options)
    assert not image.activation and activation.activation
    baseline = Error(norm=2e-3, worst=1e-3, border_worst=0.0, interior_worst=1e-3, first_bad=None)
    for family, factors in (("aten", (2, 2)), ("direct", (0, 1.05))):
        monkeypatch.setattr(Layer, "choice", lambda layer, step, family=family: plan.Choice(family, "by the test"))
        monkeypatch.setattr(Layer, "limits", lambda layer, step, baseline: Limits(1e-6, 4e-6))
        for layer, factor in zip((image, activation), factors, strict=True):
            assert trial._limits(layer, "wgrad", baseline).norm == max(1e-6, factor * baseline.norm)


def test_inference_is_in_evaluation_mode(unet: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {}

    def note(contest, name, budget, directions):
        modes[directions[0]] = (contest.ours.training, contest.theirs.training)
        return try_model(contest, name, budget, directions)

    monkeypatch.setattr(network, "try_model", note)
    bench_network(Setting(unet, "fp32", "nchw"), replace(QUICK, layers=False), CPU)
    assert modes == {"forward": (False, False), "step": (True, True)}


def test_wrong_kernels_fail_layers_and_network(unet: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    right, both = plan.wgrad, gradients.aten_gradients
    monkeypatch.setattr(plan, "wgrad", lambda *arguments: right(*arguments) * 1.01)
    wrong = lambda *arguments: (both(*arguments)[0], both(*arguments)[1] * 1.01)  # noqa: E731
    monkeypatch.setattr(gradients, "aten_gradients", wrong)
    outcome = bench_network(Setting(unet, "fp32", "nchw"), QUICK, CPU)
    assert {row.direction for row in outcome.rows if not row.passed} == {"wgrad", "step"}
    assert [note for note in outcome.notes if "step: judged on 4 draws together, because on one gradient of" in note]


def test_chance_on_one_draw_is_told_from_error_by_four() -> None:
    model, inputs = torch.nn.Conv2d(2, 2, 1), (torch.zeros(1, 2, 4, 4),)
    contest = Contest(model, model, inputs, "ieee", "fp32", norm_limit=1e-6)

    def draws(ours: tuple[float, ...], theirs: tuple[float, ...]) -> list[whole._Draw]:
        truth = {"gradient of w": torch.ones(10, dtype=torch.float64)}
        off = [{"gradient of w": torch.full((10,), 1 + error)} for error in (*ours, *theirs)]
        return [whole._Draw(*pair, truth) for pair in zip(off[: len(ours)], off[len(ours) :], strict=True)]

    unlucky = draws((0.03, 0.01, 0.02, 0.02), (0.01, 0.03, 0.02, 0.02))
    assert whole._judge(*unlucky[0].judged(), contest).complaint is not None
    assert whole._judge(*whole._joined(unlucky).judged(), contest).complaint is None
    wrong = draws((0.03,) * 4, (0.01, 0.01, 0.02, 0.01))
    assert whole._judge(*whole._joined(wrong).judged(), contest).complaint is not None


def test_an_element_may_err_twice_as_much_as_pytorchs_worst_one() -> None:
    contest = whole.Contest(torch.nn.Identity(), torch.nn.Identity(), (torch.zeros(1),), "tf32", "tf32", 1e-3)
    truth = torch.ones(10_000, dtype=torch.float64)

    def off_by(error: float) -> dict[str, torch.Tensor]:
        value = truth.clone()
        value[7] += error
        return {"output": value}

    def complaint(ours: float) -> str | None:
        return whole._judge(off_by(ours), off_by(0.02), {"output": truth}, contest).complaint

    assert complaint(0.039) is None and "worst element" in complaint(0.041)


def test_draws_have_other_images_and_gradients_of_the_same_kind() -> None:
    image = torch.arange(8.0).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last)
    model = torch.nn.Conv2d(2, 2, 1)
    contest = Contest(model, model, (image,), "ieee", "fp32", norm_limit=1e-6)
    seen = [whole._draw(contest, index, gradients=True) for index in range(whole.DRAWS)]
    for name in ("output", "gradient of weight"):
        assert len({tuple(draw.ours[name].flatten().tolist()) for draw in seen}) == whole.DRAWS
        assert all(torch.equal(draw.ours[name], draw.theirs[name]) for draw in seen)
        assert all(torch.allclose(draw.ours[name].double(), draw.truth[name]) for draw in seen)


def test_a_gradient_of_zero_is_judged_but_not_the_worst(unet: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    contests: list[Contest] = []

    def note(contest, name, budget, directions):
        contests.append(contest)
        return try_model(contest, name, budget, directions)

    monkeypatch.setattr(network, "try_model", note)
    bench_network(Setting(unet, "fp32", "nchw"), replace(QUICK, layers=False), CPU)
    contest, truth = contests[0], {"gradient of w": torch.ones(50), "gradient of zero": torch.full((50,), 1e-15)}

    def off_by(error: float, zero: float = 1e-7) -> dict[str, torch.Tensor]:
        return {"gradient of w": torch.full((50,), 1 + error), "gradient of zero": torch.full((50,), zero)}

    judged = whole._judge(off_by(0.3), off_by(0.1), truth, contest)
    assert (judged.complaint or "").startswith("gradient of w")
    assert (judged.norm, judged.aten_norm) == (pytest.approx(0.3), pytest.approx(0.1))
    of_zero = whole._judge(off_by(0.1, 1e-6), off_by(0.1), truth, contest)
    assert (of_zero.complaint or "").startswith("gradient of zero") and of_zero.norm == pytest.approx(0.1)


def test_tuning_comes_first_in_the_precision_of_the_setting(unet: NetworkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = network.tune

    def note(model, inputs, **options):
        seen.append((torch.is_autocast_enabled("cpu"), inputs[0].is_contiguous(memory_format=torch.channels_last)))
        return real(model, inputs, **options)

    monkeypatch.setattr(network, "tune", note)
    outcome = bench_network(Setting(unet, "bf16", "nhwc"), replace(QUICK, tune=True, layers=False), CPU)
    assert seen == [(True, True)] and any(note.startswith("unet bf16 nhwc: ") for note in outcome.notes)


def test_what_seems_slow_is_timed_again_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def measured(layer, step, budget):
        budgets.append(budget.seconds)
        return replace(ROW, case="net.a", haloconv_ms=2.2 if len(budgets) == 1 else 2.0)

    monkeypatch.setattr(network, "try_step", measured)
    for then in ([1.0, 4.0], [1.0, 4.0, 1.0]):
        ((row,), _) = network._settled_layer(None, "fprop", Budget(seconds=1.0))
        assert row.ratio == 1.0 and budgets == then


# --- the bars


def test_bars() -> None:
    def whole(direction: str, ours: float, memory: float) -> Row:
        peaks = {"aten_peak_bytes": 100, "haloconv_peak_bytes": round(100 * memory)}
        return replace(ROW, direction=direction, haloconv_ms=ours, **peaks)

    layers = [
        replace(ROW, case=f"net.{name}", direction="dgrad", haloconv_ms=ms) for name, ms in (("a", 1.0), ("b", 2.07))
    ]
    (net,) = networks_of([*layers, whole("forward", 2.005, 1.05), whole("step", 2.02, 1.06)])
    assert net.slowest.case == "net.b" and [row.direction for row in net.whole] == ["forward", "step"]
    assert net.missed() == [
        "net tf32 nchw: step of the network at 0.99x",
        "net tf32 nchw: step takes 1.06x PyTorch's memory",
    ]
    slow = replace(layers[1], haloconv_ms=2.1)
    assert networks_of([slow])[0].missed() == ["net tf32 nchw: net.b dgrad at 0.95x"]


def test_rows_of_several_settings_stay_apart() -> None:
    rows = [replace(ROW, precision=p, layout=layout) for p in ("tf32", "bf16") for layout in ("nchw", "nhwc")]
    assert [(net.precision, net.layout) for net in networks_of(rows)] == [
        ("tf32", "nchw"), ("tf32", "nhwc"), ("bf16", "nchw"), ("bf16", "nhwc")
    ]  # fmt: skip


# --- the verb


def order(*cases: NetworkCase, **changes) -> bench_models.NetworkOrder:
    return replace(bench_models.NetworkOrder(list(cases), ["fp32"], ["nchw"], replace(QUICK, layers=False)), **changes)


def test_rows_are_printed_and_recorded(unet: NetworkCase, tmp_path: Path) -> None:
    console = Console(width=160, file=io.StringIO())
    bench_models.bench_models(order(unet), [CPU], tmp_path, console)
    (daily,) = tmp_path.glob("20*-models.jsonl")
    latest = tmp_path / "latest-models.jsonl"
    assert daily.read_text() == latest.read_text()
    rows = [json.loads(line) for line in latest.read_text().splitlines()]
    assert {(row["case"], row["direction"]) for row in rows} == {("unet (model)", "forward"), ("unet (model)", "step")}
    assert "1 networks, 0 rows of layers; 0 checks failed" in console.file.getvalue()


def test_settings_are_shared_among_devices_by_a_process_each(unet: NetworkCase, tmp_path: Path) -> None:
    """Here two processes on the CPU: rows and refusals come back, and each setting once."""
    console = Console(width=160, file=io.StringIO())
    several = order(unet, NetworkCase("absent", str(tmp_path / "absent.py")), layouts=["nchw", "nhwc"])
    assert not bench_models.bench_models(several, [CPU, CPU], tmp_path, console)
    rows = [json.loads(line) for line in (tmp_path / "latest-models.jsonl").read_text().splitlines()]
    assert {(row["layout"], row["direction"]) for row in rows} == {
        (layout, direction) for layout in ("nchw", "nhwc") for direction in ("forward", "step")
    }
    text = " ".join(console.file.getvalue().split())
    assert text.count("LEFT absent fp32") == 2 and "2 networks, 0 rows of layers; 0 checks failed" in text


def test_what_is_cut_or_cannot_be_had_is_named(
    unet: NetworkCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    console = Console(width=160, file=io.StringIO())
    absent = NetworkCase("resnet50", "timm:resnet50")
    assert not bench_models.bench_models(order(absent, unet, limit_s=-1.0), [CPU], tmp_path, console)
    assert not bench_models.bench_models(order(absent), [CPU], tmp_path, console)
    text = " ".join(console.file.getvalue().split())
    assert "LEFT unet fp32 nchw: cut, --limit was used up" in text and "pip install timm" in text
    assert list(tmp_path.glob("*.jsonl")) == []


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    orders = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(bench, "bench_models", lambda order, *others: orders.append((order, *others)) or True)
    runner = CliRunner()
    assert runner.invoke(app, ["bench", "--models"]).exit_code == 0
    options = ["--case", "unet,resnet50", "--precision", "fp32", "--layout", "nhwc", "--no-tune", "--no-layers"]
    assert runner.invoke(app, ["bench", "--models", *options, "--limit", "60"]).exit_code == 0
    (full, _, folder, _), (some, *_) = orders
    assert [case.name for case in full.cases] == [case.name for case in load_networks(MODELS)]
    assert (full.precisions, full.layouts, full.limit_s) == (["tf32", "bf16"], ["nchw", "nhwc"], None)
    assert not full.effort.budget.other_layout and full.effort.tune and full.effort.layers
    assert folder == ROOT / "benchmarks" / "results" / "nvidia-h200"
    assert [str(setting) for setting in some.settings] == ["resnet50 fp32 nhwc", "unet fp32 nhwc"]
    assert not some.effort.tune and not some.effort.layers and some.limit_s == 60
    assert runner.invoke(app, ["bench", "--models", "--gpus", "3,1,3"]).exit_code == 0
    assert [each[1] for each in orders] == [[torch.device("cuda", 0)]] * 2 + [[torch.device("cuda", i) for i in (3, 1)]]
    result = runner.invoke(app, ["bench", "--models", "--gpus", "0,4"])
    assert result.exit_code == 2 and "--gpus takes some of 0,1,2,3, not '0,4'" in " ".join(result.output.split())
    result = runner.invoke(app, ["bench", "--models", "--case", "vgg"])
    assert result.exit_code == 2 and "there is no network vgg" in result.output
