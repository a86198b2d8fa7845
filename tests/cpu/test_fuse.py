"""haloconv.fuse: what it makes one call, what it leaves and why, and what it tells."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import haloconv
from haloconv import env
from haloconv.accelerate import accelerate, restore
from haloconv.emulator import available, emulated_device
from haloconv.fusion.fuse import Fusion, fuse
from tests.fusable import (
    BasicBlock,
    BatchNormAct,
    Bottleneck,
    ConvNormAct,
    ConvNormActivation,
    Written,
    chain,
    chosen,
    hooked,
    image,
    once,
    replaced,
    settled,
)
from tests.launches import launched

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
EMULATED = pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
same = torch.testing.assert_close


@pytest.fixture(autouse=True)
def ran(at_once: list[str]) -> list[str]:
    """What ran as one call."""
    return at_once


def twice(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.act(self.norm(self.conv(self.act(self.norm(self.conv(x))))))


def by_its_tensors(self: Written, x: torch.Tensor) -> torch.Tensor:
    norm = self.norm
    return functional.silu(functional.batch_norm(self.conv(x), norm.running_mean, norm.running_var, None, norm.bias))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a chain": (chain, ["0 with batch norm and relu"]),
    "without an activation": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), ["0 with batch norm"]),
    "without a norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Hardswish()), ["0 with hardswish"]),
    "gelu": (lambda: chain(nn.GELU("tanh")), ["0 with batch norm and gelu_tanh"]),
    "leaky relu": (lambda: chain(nn.LeakyReLU()), ["0 with batch norm and leaky_relu"]),
    "another activation": (lambda: chain(nn.ReLU6()), ["0 with batch norm"]),
    "identities": (lambda: chain(nn.Identity(), nn.Sigmoid()), ["0 with batch norm and sigmoid"]),
    "torchvision's layer": (lambda: ConvNormActivation(4, 6, nn.SiLU), ["0 with batch norm and silu"]),
    "timm's layer": (lambda: ConvNormAct(4, 6, nn.ReLU()), ["conv with batch norm and relu"]),
    "timm's layer without": (lambda: ConvNormAct(4, 6, nn.Identity()), ["conv with batch norm"]),
    "a block": (
        lambda: BasicBlock(4, 4), ["conv1 with batch norm and relu", "conv2 with batch norm and addition and relu"]
    ),
    "a block that projects": (
        lambda: BasicBlock(4, 6, 2, projects=True),
        ["conv1 with batch norm and relu", "0 with batch norm", "conv2 with batch norm and addition and relu"],
    ),
    "a bottleneck": (
        lambda: Bottleneck(4, 6),
        ["convs.0 with batch norm and relu", "convs.1 with batch norm and relu",
         "convs.2 with batch norm and addition and relu"],
    ),
    "an addition the other way": (
        lambda: Written(lambda self, x: functional.relu(x + self.conv(x))), ["conv with addition and relu"]
    ),
    "an addition alone": (lambda: Written(lambda self, x: torch.add(self.conv(x), x)), ["conv with addition"]),
    "a sum of two": (
        lambda: Written(lambda self, x: self.norm(self.conv(x)) + self.other(x), other=nn.Conv2d(4, 4, 1)),
        ["conv with batch norm", "other with addition"],
    ),
    "functions": (lambda: Written(by_its_tensors), ["conv with batch norm and silu"]),
    "layers used twice": (lambda: Written(twice), ["conv with batch norm and relu"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_follows_becomes_part_of_it(name: str, ran: list[str]) -> None:
    torch.manual_seed(0)
    make, names = MODELS[name]
    model = settled(make())
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()(image(torch.float64))
    report = fuse(model)
    for _ in range(2):  # the plan is kept in between
        ran.clear()
        y = model(image())
        assert ran == names
        same(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert y.stride() == theirs(image()).stride() and len(report) == len(names)
    restore(model)
    assert torch.equal(model(image()), theirs(image())) and [type(each) for each in model.modules()] == [
        type(each) for each in theirs.modules()
    ]
    assert all(
        vars(one).keys() == vars(other).keys() for one, other in zip(model.modules(), theirs.modules(), strict=True)
    )


def prepared(layer: nn.Module) -> nn.Module:
    layer.qconfig = torch.ao.quantization.default_qconfig
    return layer


class Clipped(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-1, 1)


class AnsweringEval(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(True)


def read_by_others(self: Written, x: torch.Tensor) -> torch.Tensor:
    y = self.conv(x)
    return self.norm(y) + y.mean()


def in_two_ways(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.conv(x)) if x.shape[0] > 1 else x


def noise(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.conv(x)) + torch.rand(1) * 0


def island(self: Written, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.norm(self.conv(x.float()))


def kept(self: Written, x: torch.Tensor) -> torch.Tensor:
    self.seen = y = self.norm(self.conv(x))
    return y


def appended(self: Written, x: torch.Tensor) -> torch.Tensor:
    self.seen.append(x)
    return self.norm(self.conv(x))


def by_gradients(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.conv(x)) if torch.is_grad_enabled() else self.conv(x)


def by_type(self: Written, x: torch.Tensor) -> torch.Tensor:
    y = self.conv(x)
    return self.norm(y) if isinstance(y, torch.Tensor) else y


def other_functions(self: Written, x: torch.Tensor) -> torch.Tensor:
    return self.norm(functional.conv2d(x, self.conv.weight))


def listening() -> Written:
    model = Written(appended)
    model.seen = []
    return model


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks on the convolution": (lambda: Written(once, conv=hooked(nn.Conv2d(4, 4, 1))), "conv has hooks"),
    "hooks on the norm": (lambda: Written(once, norm=hooked(nn.BatchNorm2d(4))), "norm has hooks"),
    "hooks inside the norm": (lambda: Written(once, norm=BatchNormAct(4, hooked(nn.ReLU()))), "act has hooks|more"),
    "a forward of its own": (lambda: Written(once, norm=replaced(nn.BatchNorm2d(4))), "nothing that a kernel applies"),
    "the model's forward": (lambda: replaced(Written(once)), "forward of .the model.* is replaced on the instance"),
    "no running statistics": (
        lambda: Written(once, norm=nn.BatchNorm2d(4, track_running_stats=False)), "has no running statistics"
    ),
    "a norm that trains": (lambda: Written(once, norm=AnsweringEval(4)), "norm .AnsweringEval., is in training mode"),
    "dropout": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Dropout(), nn.ReLU()), "Dropout., is nothing that"),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)), "GroupNorm., is nothing that"),
    "weights made anew": (
        lambda: Written(once, conv=parametrizations.weight_norm(nn.Conv2d(4, 4, 1))), "parametrisations"
    ),
    "old weights made anew": (lambda: Written(once, conv=nn.utils.spectral_norm(nn.Conv2d(4, 4, 1))), "conv has hooks"),
    "about to be quantised": (lambda: Written(once, norm=prepared(nn.BatchNorm2d(4))), "prepared for quantisation"),
    "a subclass": (lambda: Written(once, conv=Clipped(4, 4, 1)), "Clipped has a forward of its own"),
    "another padding": (
        lambda: Written(once, conv=nn.Conv2d(4, 4, 3, 1, 1, padding_mode="reflect")), "its padding_mode is 'reflect'"
    ),
    "torch.jit's norm": (lambda: Written(once, norm=torch.jit.script(settled(nn.BatchNorm2d(4)))), "is nothing that"),
    "others read it": (lambda: Written(read_by_others), "its result is read 2 times"),
    "the last": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3)), "the last of what its module does"),
    "control flow": (lambda: Written(in_two_ways), "forward of .* cannot be traced: TraceError: "),
    "a tensor made": (lambda: Written(noise), "makes a tensor"),
    "autocast inside": (lambda: Written(island), "switches gradients or autocast on or off"),
    "an attribute": (lambda: Written(kept), "or keeps it in an attribute"),
    "a list": (listening, "keeps something in an attribute"),
    "gradients": (lambda: Written(by_gradients), "depends on whether gradients are recorded"),
    "types": (lambda: Written(by_type), "asks of what type something is"),
    "a function": (lambda: Written(other_functions), "no module of the model calls it"),
    "the model is one": (lambda: nn.Conv2d(4, 6, 3), "no module of the model calls it"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_proven_equal_is_left_and_named(name: str, ran: list[str]) -> None:
    torch.manual_seed(0)
    make, reason = LEFT[name]
    model = settled(make())
    want = model(image())
    before = [type(each) for each in model.modules()]
    report = fuse(model)
    told = [each.reason for each in report.left]
    assert len(report) == 0 and len(told) == 1 and re.search(reason, told[0]), told
    assert [type(each) for each in model.modules()] == before and "fused" not in repr(model)
    assert torch.equal(model(image()), want) and not ran


def writes_meanwhile(self: Written, x: torch.Tensor) -> torch.Tensor:
    y = self.norm(self.conv(x))
    return y + x.mul_(2)


def written_in_a_module(self: Written, x: torch.Tensor) -> torch.Tensor:
    y = self.act(self.norm(self.conv(x)))
    z = self.norm(self.conv(y))
    return z + self.other(y)


def added_to(self: Written, x: torch.Tensor) -> torch.Tensor:
    z = x * 1
    z += self.norm(self.conv(x))
    return z


@pytest.mark.parametrize("body", [writes_meanwhile, written_in_a_module, added_to])
def test_a_convolution_does_not_wait_for_what_may_write_its_image(body: Callable, ran: list[str]) -> None:
    model = settled(Written(body, other=nn.Sequential(nn.ReLU(inplace=True), nn.ReLU())))
    want = copy.deepcopy(model)(image())
    fuse(model)
    same(model(image()), want, rtol=1e-5, atol=1e-5)
    assert ran and not any("addition" in each for each in ran)


def test_random_numbers_and_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace runs the Python code of a forward: it draws no numbers of the user's, and no wrapper's forward runs."""
    wrapper = nn.parallel.DataParallel
    monkeypatch.setattr(wrapper, "forward", lambda self, x: pytest.fail("the forward of a wrapper ran"))
    model = nn.Sequential(wrapper(chain()), Written(noise)).eval()
    state = torch.get_rng_state()
    assert [each.name for each in fuse(model)] == ["0.module.0"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_family_without_epilogues_is_left_the_calls_of_the_forward(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    chosen(monkeypatch, "direct")
    model = settled(BasicBlock(4, 4))
    theirs = copy.deepcopy(model)
    report = fuse(model)
    assert "chosen at its first input" in str(report)
    assert torch.equal(model(image()), theirs(image())) and not ran
    assert "not as one call; direct: chosen by the test" in str(report)


def test_an_addition_of_another_form_leaves_the_norm_fused(ran: list[str]) -> None:
    model = settled(Written(lambda self, x: self.act(self.norm(self.conv(x)) + x.mean())))
    want = copy.deepcopy(model)(image())
    fuse(model)
    same(model(image()), want, rtol=1e-5, atol=1e-5)
    assert ran == ["conv with batch norm"]


def test_before_and_after_accelerate(ran: list[str]) -> None:
    for first, second in ((fuse, accelerate), (accelerate, fuse)):
        model, x = nn.Sequential(settled(BasicBlock(4, 4)), nn.Conv2d(4, 2, 1)).eval(), image()
        theirs = copy.deepcopy(model)
        first(model), second(model)
        ran.clear()
        same(model(x), theirs(x), rtol=1e-5, atol=1e-5)
        assert len(ran) == 2 and model[0].conv1._last_input[0] == x.shape
        assert isinstance(model[0].conv1, haloconv.Conv2d)
        assert sorted(restore(model)) == ["0", "0.conv1", "0.conv2", "1"] and torch.equal(model(x), theirs(x))


def test_the_report() -> None:
    model = nn.Sequential(settled(BasicBlock(4, 4)), nn.Conv2d(4, 2, 1)).eval()
    report = fuse(model)
    assert isinstance(report, Fusion) and repr(report) == f"<Fusion: {report.summary}>"
    assert report.summary == "2 of 3 convolutions fused with what follows them"
    assert report[1].names == ("0.conv2", "0.bn2", "0.relu") and report[1].module is model[0]
    assert report[1].epilogue == ("batch norm", "addition", "relu") and report[0].name == "0.conv1"
    assert [(each.name, each.module) for each in report.left] == [("1", model[1])]
    text = str(report)
    assert "0.conv2, bn2, relu" in text and "batch norm, addition" in text and "the last of what" in text
    assert len(fuse(model)) == 2, "again"
    assert len(fuse(nn.Sequential())) == 0 and str(fuse(nn.Sequential())).startswith("0 of 0")


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "disabled", lambda: True)
    model = chain()
    with pytest.warns(RuntimeWarning, match="haloconv.fuse changes nothing: HALOCONV_DISABLE is set"):
        report = fuse(model)
    assert type(model) is nn.Sequential and len(report.left) == 1


def test_calls_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(chain())
    with caplog.at_level("INFO", "haloconv.choice"):
        fuse(model)
    assert caplog.messages == ["haloconv.fuse, 0.0, 1, 2: batch norm, relu: chosen at its first input"]
    with torch.profiler.profile() as profile:
        model(image())
    assert any("haloconv.fprop layer=0.0 family=" in event.name for event in profile.events())


def exact(model: nn.Module) -> nn.Module:
    """Small integers and powers of two everywhere: all sums are exact, however they are rounded."""
    new = torch.Generator().manual_seed(3)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            values = torch.randint(-2, 3, tensor.shape, generator=new)
            tensor.data.copy_(values.abs().clamp(min=1) if "running_var" in name else values)
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        norm.eps = 0.0
        norm.running_var.fill_(4)
    return model.eval()


@EMULATED
def test_on_our_kernels_to_the_bit(monkeypatch: pytest.MonkeyPatch, emulator_cache: None, ran: list[str]) -> None:
    monkeypatch.undo()
    model = exact(BasicBlock(8, 8))
    x = torch.randint(-2, 3, (1, 8, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    theirs = copy.deepcopy(model).double()
    theirs.relu.register_forward_hook(lambda module, args, y: y.bfloat16().double())  # one rounding for each call
    model.bfloat16()
    with emulated_device():
        report = fuse(model)
        y = model(x)
        with launched() as kernels, torch.profiler.profile() as profile:
            assert torch.equal(model(x), y)
    computed = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert len(report) == 2 and all(each.expected.startswith("halo_sm90: ") for each in report)
    assert {name.partition("/")[0] for name in kernels} == {"halo_sm90"}
    assert not {name for name in computed if re.search("norm|relu|clamp|add|mul|conv", name)}, "no other kernel runs"
    assert torch.equal(y.double(), theirs(x.double()))


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_networks_of_others(package: str, ran: list[str]) -> None:
    pytest.importorskip(package)
    model = settled(import_module(f"{package}.models").resnet18())
    x = torch.randn(1, 3, 32, 32)
    theirs = copy.deepcopy(model)
    report = fuse(model)
    assert len(report) == 20 and not report.left
    assert sum(each.epilogue == ("batch norm", "addition", "relu") for each in report) == 8
    same(model(x), theirs(x), rtol=1e-3, atol=1e-3)
    assert len(ran) == 20
