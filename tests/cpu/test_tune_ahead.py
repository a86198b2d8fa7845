"""haloconv.tune: which problems a model poses, what is measured, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import haloconv
from haloconv import emulator, env
from haloconv.bench.targets import TargetError, load_target
from haloconv.choose import records
from haloconv.choose.choice import choose
from haloconv.choose.records import read_records, records_path, shelf_of
from haloconv.cli import app
from haloconv.cli import tune as tune_verb
from haloconv.device import set_stand_in
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.report import Report
from haloconv.tune import measure
from haloconv.tune.ahead import Options, tune_problems
from haloconv.tune.problems import Posed, problems_of
from tests.tuned import FACTS, LAYER, Clock, FakeConfig, FakeFamily, fake_device, favouring, forget, only, record

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(env.RECORDS_DIR, str(tmp_path / "records"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    forget()
    yield tmp_path
    set_stand_in(None)
    forget()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A fake GPU with the families aten, direct and special, and a clock that favours special."""
    made = Clock(favouring("special"))
    monkeypatch.setattr(measure, "compare", made)
    set_stand_in(fake_device())
    with only(FakeFamily("direct"), FakeFamily("special")):
        yield made


class Net(torch.nn.Module):
    """Two layers of one kind, one of another, one that asks for a family by name, a subclass, batch statistics."""

    class Own(torch.nn.Conv2d):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.first = torch.nn.Conv2d(8, 8, 3, padding="same")
        self.second = haloconv.Conv2d(8, 8, 3, padding=(1, 1, 1, 1))
        self.named = haloconv.Conv2d(8, 8, 1, family="direct")
        self.sub = self.Own(8, 8, 1)
        self.wrapped = torch.nn.Conv2d(8, 4, 3, padding=2, padding_mode="circular")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(self.sub(self.named(self.second(self.first(self.norm(self.stem(x)))))))


def described(posed: list[Posed]) -> set[str]:
    return {f"{each.layer}: {each.problem}" for each in posed}


# --- which problems


def test_the_problems_of_a_model() -> None:
    model, x = Net(), torch.randn(2, 3, 12, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.norm.eval()
    found = problems_of(model, x)
    same = "2,8,12,10 -> 8, 3x3 p1,1,1,1 tf32 nchw"
    assert described(found) == {
        "stem: fprop 2,3,12,10 -> 8, 3x3 p1,1,1,1 tf32 nchw", "stem: wgrad 2,3,12,10 -> 8, 3x3 p1,1,1,1 tf32 nchw",
        *(f"{name}: {direction} {same}" for name in ("first", "second") for direction in ("fprop", "dgrad", "wgrad")),
        *(f"wrapped: {direction} 2,8,16,14 -> 4, 3x3 tf32 nchw" for direction in ("fprop", "dgrad", "wgrad")),
    }  # fmt: skip
    assert {each.problem.bias for each in found if each.problem.direction == "fprop"} == {True, False}
    assert model.training and not model.norm.training and model.stem.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.stem._forward_pre_hooks


def test_problems_follow_layout_autocast_directions_and_wanted_gradients() -> None:
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 12, 10)
    assert {each.problem.direction for each in problems_of(model, x.requires_grad_())} == {"fprop", "dgrad", "wgrad"}
    with torch.autocast("cpu", torch.bfloat16):
        assert {each.problem.dtype for each in problems_of(model, [x])} == {torch.bfloat16}
    last = x.detach().contiguous(memory_format=torch.channels_last)
    assert {each.problem.layout for each in problems_of(model, {"input": last}, ("fprop", "wgrad"))} == {"nhwc"}
    assert problems_of(model, x[0])[0].problem.n == 1
    with pytest.raises(ValueError, match="directions are some of"):
        problems_of(model, x, ("forward",))


# --- measuring them


def test_a_model_is_measured_once(clock: Clock) -> None:
    model, x = Net(), torch.randn(2, 3, 12, 10)
    report = haloconv.tune(model, x, progress=False)
    assert isinstance(report, Report) and report.passed
    assert len(report.rows) == 8, "first and second pose the same problems"
    row = next(row for row in report.rows if row.case == "first, second" and row.direction == "dgrad")
    assert (row.family, row.config, row.aten_ms, row.haloconv_ms, row.ratio) == ("special", "rows4", 1.0, 0.5, 2.0)
    assert row.reason.startswith("tuned: 2.00x PyTorch on ") and row.error <= row.error_limit
    assert "8 problems were measured" in report.notes[0] and "8 go to kernels of ours" in report.notes[0]
    with torch.no_grad():
        model(x)
    assert "special (tuned: 2.00x" in repr(model.second)
    rounds = len(clock.rounds)
    forget()
    again = haloconv.tune(model, x, progress=False)
    assert len(clock.rounds) == rounds and "8 had records" in again.notes[0] and len(again.rows) == 8
    haloconv.tune(model, x, directions=("fprop",), again=True, progress=False)
    assert len(clock.rounds) > rounds


def test_another_size_of_a_bucket_is_measured_when_asked_for_by_name(clock: Clock) -> None:
    near = replace(LAYER, h=26)
    tune_problems("one", [Posed("a", LAYER, CPU)], Options(progress=False))
    assert "measured at 2 x 24 x 28" in choose(near, CPU).reason
    tune_problems("other", [Posed("a", near, CPU)], Options(progress=False))
    assert "measured at" not in choose(near, CPU).reason
    assert len(read_records(records_path(FACTS.name))) == 2


def test_the_time_limit_leaves_the_rest(clock: Clock) -> None:
    posed = [Posed("a", replace(LAYER, n=n), CPU) for n in range(1, 4)]
    report = tune_problems("none", posed, Options(limit_s=0.0, progress=False))
    assert not report.rows and not clock.rounds and "3 were left to the rules" in report.notes[0]


def test_an_interrupted_run_keeps_what_it_measured(clock: Clock) -> None:
    def stop(name: str) -> float:
        if len(clock.rounds) > 3:
            raise KeyboardInterrupt
        return favouring("special")(name)

    clock.ms_of = stop
    posed = [Posed("a", replace(LAYER, n=n), CPU) for n in range(1, 6)]
    with pytest.raises(KeyboardInterrupt):
        tune_problems("stopped", posed, Options(progress=False))
    kept = read_records(records_path(FACTS.name))
    assert 1 <= len(kept) < 5
    clock.ms_of = favouring("special")
    report = tune_problems("goes on", posed, Options(progress=False))
    assert f"{len(kept)} had records" in report.notes[0] and len(report.rows) == 5


def test_rejected_candidates_are_named(clock: Clock) -> None:
    FAMILIES["special"].offers = (FakeConfig(2, "wrong"), FakeConfig(4))
    report = tune_problems("one", [Posed("a", LAYER, CPU)], Options(progress=False))
    assert any("special (rows2) is not right" in note for note in report.notes) and report.rows[0].config == "rows4"


def test_without_memory_a_problem_is_left_out(clock: Clock) -> None:
    """No record says that PyTorch is faster only because there was no room to see."""
    FAMILIES["special"].offers = (FakeConfig(8, "no memory"),)
    report = tune_problems(
        "one", [Posed("a", LAYER, CPU), Posed("b", replace(LAYER, h=20), CPU)], Options(progress=False)
    )
    assert any("a: there was no memory" in note for note in report.notes)
    assert [each.size.h for each in read_records(records_path(FACTS.name))] == [20]
    assert "measured at 2 x 20 x 28" in choose(LAYER, CPU).reason


def test_on_a_cpu_nothing_is_measured() -> None:
    report = haloconv.tune(Net(), torch.randn(2, 3, 12, 10))
    assert not report.rows and any("our kernels run on CUDA devices" in note for note in report.notes)


def test_layers_that_have_numbers_for_names_are_called_layers() -> None:
    """torch.nn.Sequential numbers them: "runs 0 fprop" would read as a count."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3))
    (note,) = (note for note in haloconv.tune(net, torch.randn(1, 3, 9, 9)).notes if "own convolution" in note)
    assert note.startswith("PyTorch's own convolution runs layer 0 (fprop, wgrad), layer 1 (fprop, dgrad, wgrad): the ")


@pytest.mark.usefixtures("emulator_cache")
@pytest.mark.skipif(emulator.available() is not None, reason=f"no emulator: {emulator.available()}")
def test_real_kernels_are_verified_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate of a depthwise layer runs on the emulator; only the clock is made up."""
    made = Clock(favouring("depthwise_window"))
    monkeypatch.setattr(measure, "compare", made)
    model, x = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4)), torch.randn(2, 4, 12, 10)
    with emulated_device(sm_count=2) as device:
        report = haloconv.tune(model, x, directions=("fprop",), progress=False)
        (row,) = report.rows
        assert row.family == "depthwise_window" and row.config and len(report.notes) == 1
        families = {name.split(" ")[0] for names in made.rounds for name in names}
        assert families == {"aten", "direct", "depthwise", "depthwise_window"}
        haloconv.accelerate(model)
        launches = device.launches
        with torch.no_grad():
            torch.testing.assert_close(
                model(x), torch.nn.functional.conv2d(x, model[0].weight, model[0].bias, groups=4)
            )
        assert device.launches > launches and "depthwise_window (tuned:" in repr(model)


# --- the command line


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_the_verb_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("resnet50")
    assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.output


@pytest.fixture
def verb(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb on the fake GPU."""
    monkeypatch.setattr(tune_verb, "current_device", lambda: CPU)


def test_the_verb_tunes_a_problem_file(verb: None, tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text(
        "import torch\n\ndef get_inputs():\n    return [torch.randn(2, 3, 16, 12)]\n\n"
        "def get_init_inputs():\n    return [3, 8, 3]\n\nModel = torch.nn.Conv2d\n"
    )
    result = run(str(path), "--json", str(tmp_path / "out.json"), "--layout", "nchw,nhwc", "--precision", "tf32,bf16")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out.json").read_text())
    kinds = {(row["direction"], row["precision"], row["layout"]) for row in content["rows"]}
    assert len(kinds) == len(content["rows"]) == 8 and {"fprop", "wgrad"} == {kind[0] for kind in kinds}
    assert {row["family"] for row in content["rows"]} == {"special"} and content["rows"][0]["config"] == "rows4"
    assert "special (rows4): tuned: 2.00x PyTorch" in result.output and "records are in" in result.output


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_verb_tunes_what_follows_too(verb: None, tmp_path: Path) -> None:
    """The file's layers alone, as an eager call with what follows it, and as a part of a graph with that.

    The graph runs in channels_last, where the layer that nothing follows has no record yet.
    """
    file = tmp_path / "followed.py"
    file.write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.conv, self.relu = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()\n"
        "        self.last = torch.nn.Conv2d(8, 4, 1)\n\n"
        "    def forward(self, x):\n        return self.last(self.relu(self.conv(x))).sum((2, 3))\n\n\n"
        "def get_inputs():\n    return [torch.randn(2, 3, 8, 8)]\n\n\ndef get_init_inputs():\n    return []\n",
        encoding="utf-8",
    )
    result = run(str(file), "--fused", "--direction", "fprop")
    assert result.exit_code == 0 and "5 problems were measured" in result.output
    assert "conv with relu" in result.output and "conv with relu compiled" in " ".join(result.output.split())
    assert {each.layer.partition(" tf32 ")[2] for each in read_records(records_path(FACTS.name))} == {
        "nchw bias", "nchw bias relu", "nhwc bias relu compiled", "nhwc",
    }  # fmt: skip


def test_the_interrupted_verb_tells_what_it_measured(verb: None, clock: Clock, tmp_path: Path) -> None:
    """Ctrl-C lost the file of rows, and nothing said that the records are kept."""
    suite, found = tmp_path / "suite.toml", tmp_path / "out.json"
    case = '[[case]]\nname = "case{0}"\ninput = [{0}, 4, 12, 12]\nfilters = 8\nfilter = [3, 3]\n'
    suite.write_text("".join(case.format(n) for n in range(1, 6)))

    def stop(name: str) -> float:
        if len(clock.rounds) > 3:
            raise KeyboardInterrupt
        return favouring("special")(name)

    clock.ms_of = stop
    result = run("--suite", str(suite), "--direction", "fprop", "--ship", "--json", str(found))
    assert result.exit_code == 130, result.output
    content, kept = json.loads(found.read_text()), read_records(records_path(FACTS.name))
    assert content["complete"] is False and "Interrupted: what was measured is kept" in content["notes"][0]
    assert len(kept) >= 1 and "records are in" in result.output and "Interrupted" in result.output
    assert not records.shipped_path(FACTS.name).exists(), "a part is not shipped"
    clock.ms_of = favouring("special")
    again = run("--suite", str(suite), "--direction", "fprop")
    assert again.exit_code == 0 and f"{len(kept)} had records" in again.output, again.output


def test_the_verb_tunes_the_suite_and_ships(verb: None, tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text('[[case]]\nname = "small"\ninput = [2, 4, 12, 12]\nfilters = 8\nfilter = [3, 3]\ntags = ["t"]\n')
    result = run("--suite", str(suite), "--tag", "t", "--precision", "bf16", "--direction", "fprop,dgrad", "--ship")
    assert result.exit_code == 0, result.output
    shipped = read_records(records.shipped_path(FACTS.name))
    assert [each.layer.split(" ")[0] for each in shipped] == ["dgrad", "fprop"] and {
        each.family for each in shipped
    } == {"special"}
    forget()
    records_path(FACTS.name).unlink()
    problem = replace(LAYER, c=4, h=12, w=12, k=8, padding=(0, 0, 0, 0), dtype=torch.bfloat16)
    assert "as shipped" in choose(problem, CPU).reason and shelf_of(FACTS).exact(problem) is None


def test_the_verb_measures_again_what_kernels_left_behind(verb: None, clock: Clock) -> None:
    """Once; a shipped record of the same layer and size goes, one of another GPU model stays."""
    old = replace(record(LAYER, "special"), source="0" * 64)
    elsewhere = replace(old, gpu="another GPU")
    records.write_records(records.shipped_path(FACTS.name), [old], FACTS)
    records.write_records(records.shipped_path(FACTS.name), [elsewhere], FACTS)
    forget()
    result = run("--stale", "--ship")
    assert result.exit_code == 0 and "1 problems were measured" in result.output, result.output
    shipped = {each.gpu: each for each in read_records(records.shipped_path(FACTS.name))}
    assert shipped.keys() == {FACTS.name, "another GPU"} and shipped[FACTS.name].holds_on(FACTS)
    rounds = len(clock.rounds)
    assert "0 problems were measured" in run("--stale").output and len(clock.rounds) == rounds


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a problem file"), (("no_such_model",), "no such file"), (("elsewhere:x",), "models come from"),
        (("--suite", "absent.toml"), "absent.toml"), ((__file__, "--layout", "chwn"), "--layout takes some of"),
    ],
)  # fmt: skip
def test_the_verb_says_what_it_cannot_use(verb: None, arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and says in result.output


def test_models_by_name() -> None:
    torchvision = pytest.importorskip("torchvision")
    name = torchvision.models.list_models()[0]
    target = load_target(f"torchvision:{name}", 1, 64)
    assert target.name == name and target.inputs[0].shape == (1, 3, 64, 64) and not target.from_file
    with pytest.raises(TargetError):
        load_target("torchvision:no_such_model", 1, 64)


# --- importing


def test_importing_reads_and_writes_no_records(tmp_path: Path) -> None:
    code = (
        "import haloconv; from haloconv.choose import records; assert not records._shelves; "
        "assert callable(haloconv.tune); import torch; assert not torch.cuda.is_initialized()"
    )
    surroundings = env.child_environment(**{env.RECORDS_DIR: str(tmp_path / "own"), "HOME": str(tmp_path)})
    subprocess.run([sys.executable, "-c", code], check=True, env=surroundings, timeout=120)
    assert not list(tmp_path.iterdir())
