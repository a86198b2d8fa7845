"""Subclasses of torch.nn.Conv2d: which accelerate swaps, on what grounds, and what holds for them then."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import parametrizations

import haloconv
from haloconv import module as module_file
from haloconv import subclasses
from haloconv.bench.networks.swapped import _problem_key, layer_of
from haloconv.problem import ConvSpec
from haloconv.tune.problems import problems_of
from tests import timm_layers
from tests.timm_layers import CLASSES, HOME, Conv2dSame


@pytest.fixture(autouse=True)
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins can be found where timm's classes are, as pickle wants."""
    for name in ("timm", "timm.layers", *HOME.values()):
        monkeypatch.setitem(sys.modules, name, timm_layers)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[ConvSpec]:
    """What is asked of each convolution of a layer of ours."""
    asked: list[ConvSpec] = []
    real = module_file.convolve

    def noted(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, spec: ConvSpec, *more: Any) -> torch.Tensor:
        asked.append(spec)
        return real(x, w, b, spec, *more)

    monkeypatch.setattr(module_file, "convolve", noted)
    return asked


def net(cls: type[nn.Conv2d], **options: Any) -> nn.Sequential:
    """A layer of the class that needs uneven padding, where the class pads, behind one of PyTorch's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), cls(4, 6, (3, 2), stride=(2, 1), groups=2, **options)).double()


def pair(cls: type[nn.Conv2d], **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    ours = net(cls)
    report = haloconv.accelerate(ours, **options)
    assert [swap.name for swap in report] == ["0", "1"] and not report.left
    return ours, net(cls)


def image(h: int = 8, w: int = 9) -> torch.Tensor:
    return torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_same(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    results = []
    for model in (ours, theirs):
        y = model(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(*results)


# --- timm's


@pytest.mark.parametrize("name", CLASSES)
def test_timms_layers_are_swapped_and_stay_of_their_class(name: str, specs: list[ConvSpec]) -> None:
    cls = CLASSES[name]
    ours, theirs = pair(cls)
    layer = ours[1]
    assert isinstance(layer, cls) and isinstance(layer, haloconv.Conv2d) and type(layer).__name__ == name
    specs.clear()
    for x in (image(), image(7, 10), image()[0]):
        assert_same(ours, theirs, x)
    uneven = [(0, 1, 0, 1), (1, 1, 0, 1), (0, 1, 0, 1)] if name.endswith("Same") else [(1, 1, 1, 1)] * 3
    assert [spec.padding for spec in specs if spec.groups == 2] == uneven
    assert ours.state_dict().keys() == theirs.state_dict().keys() and "aten" in repr(layer)
    assert haloconv.restore(ours) == ["0", "1"] and type(layer) is cls and vars(layer).keys() == vars(theirs[1]).keys()
    assert torch.equal(ours(image()), theirs(image()))


@pytest.mark.parametrize("name", CLASSES)
def test_copies_and_files_of_timms_layers(name: str) -> None:
    ours, theirs = pair(CLASSES[name], family="aten")
    files = [pickle.loads(pickle.dumps(ours, protocol)) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
    for other in (copy.deepcopy(ours), copy.copy(ours), *files):
        assert type(other[1]) is type(ours[1]) and other[1].family == "aten"
        assert_same(other, theirs, image())
    assert haloconv.restore(other) == ["0", "1"] and type(other[1]) is CLASSES[name]


def test_timms_layers_under_parametrisations() -> None:
    ours, theirs = net(Conv2dSame), net(Conv2dSame)
    for model in (ours, theirs):
        parametrizations.weight_norm(model[1])
    assert len(haloconv.accelerate(ours)) == 2
    assert_same(ours, theirs, image())
    assert_same(copy.deepcopy(ours), theirs, image())
    haloconv.restore(ours)
    assert type(ours[1]).__mro__[1] is Conv2dSame and torch.equal(ours(image()), theirs(image()))


@pytest.mark.parametrize("name", ["Conv2dSame", "ScaledStdConv2dSame"])
def test_timms_layers_compiled_exported_and_traced(name: str) -> None:
    ours, theirs = pair(CLASSES[name])
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager", dynamic=True)
    for x in (image(), image(11, 14)):
        torch.testing.assert_close(compiled(x), theirs(x))
    torch._dynamo.reset()
    program = torch.export.export(ours, (image(),))
    assert sum("haloconv.fprop" in str(node.target) for node in program.graph.nodes) == 2
    torch.testing.assert_close(program.module()(image()), theirs(image()))
    graph = torch.fx.symbolic_trace(ours)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    torch.testing.assert_close(graph(image(9, 9)), theirs(image(9, 9)))


def test_attributes_assigned_later_are_used() -> None:
    """Also as lists, which no key of a cache can hold."""
    ours, theirs = pair(Conv2dSame)
    for model in (ours, theirs):
        model[1].stride, model[1].dilation = [1, 3], [2, 2]
    torch.testing.assert_close(ours(image()), theirs(image()))


def test_a_class_of_that_name_that_computes_something_else_is_left() -> None:
    class Changed(Conv2dSame):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flip(-1))

    class Unmakeable(Conv2dSame):
        def __init__(self, *args: Any, **options: Any) -> None:
            raise ValueError("needs something new")

    for cls, reason in ((Changed, "computes something else than"), (Unmakeable, "ValueError: needs something new")):
        cls.__name__, cls.__module__ = "Conv2dSame", "timm.layers.conv2d_same"
        model = net(Conv2dSame)
        model[1].__class__ = cls
        state = torch.random.get_rng_state()
        (left,) = haloconv.accelerate(model).left
        assert reason in left.reason and left.convolution and type(model[1]) is cls
        assert torch.equal(torch.random.get_rng_state(), state)
        with pytest.raises(RuntimeError, match=reason):
            haloconv.accelerate(model, strict=True)


def test_a_class_of_that_name_elsewhere_is_left() -> None:
    class Conv2dSame(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(F.pad(x, (1, 1)), self.weight, self.bias)

    (left,) = haloconv.accelerate(nn.Sequential(Conv2dSame(3, 3, 3))).left
    assert "has a forward of its own" in left.reason


def test_timm_itself_has_these_classes() -> None:
    """The stand-ins step aside for the installed package."""
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]
    pytest.importorskip("timm")
    for name, home in HOME.items():
        cls = getattr(importlib.import_module(home), name)
        assert isinstance(subclasses.replacement(cls(4, 6, 3)), type), name


def test_problems_and_rows_have_the_padding_of_the_image() -> None:
    ours, theirs = pair(Conv2dSame)
    for model in (ours, theirs):
        found = [posed.problem for posed in problems_of(model, image(), ["fprop"])]
        assert [problem.padding for problem in found] == [(0, 0, 0, 0), (0, 1, 0, 1)]
    x = ours[0](image()).detach()
    options = type("Options", (), {"autocast": None, "precision": "ieee", "family": "auto", "seed": 0})()
    layer = layer_of("same", ours[1], x, options)
    assert layer.spec.padding == (0, 1, 0, 1) and layer.dy.shape == ours(image()).shape
    assert _problem_key(ours[1], x) != _problem_key(ours[1], x[:, :, :7])


# --- classes that the caller names


class Plain(nn.Conv2d):
    """With a constructor and methods of its own, and nothing else."""

    def __init__(self, *args: Any, rate: float = 0.5, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rate = rate

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rate={self.rate}"


class Doubled(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self._conv_forward(x + 1, 3 * self.weight, self.bias)


class Above(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 1).relu()


def traced(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapped(*args: Any) -> torch.Tensor:
        return forward(*args)

    return wrapped


class Wrapped(Doubled):
    @traced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, -self.weight, self.bias)


PROVEN = (Plain, Doubled, Above, Wrapped)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize("cls", PROVEN)
def test_classes_that_are_named_are_swapped(cls: type[nn.Conv2d], padding_mode: str, specs: list[ConvSpec]) -> None:
    ours, theirs = (net(cls, padding=1, padding_mode=padding_mode) for _ in range(2))
    report = haloconv.accelerate(ours, also=(cls,), strict=True, family="aten")
    assert [swap.name for swap in report] == ["0", "1"] and isinstance(ours[1], (cls, haloconv.Conv2d))
    assert_same(ours, theirs, image())
    assert specs and all(spec.family == "aten" for spec in specs)
    assert [swap.name for swap in haloconv.accelerate(ours, also=(cls,)).already] == ["0", "1"]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.fx.symbolic_trace(ours)):
        assert_same(other, theirs, image())
    assert haloconv.restore(ours) == ["0", "1"] and type(ours[1]) is cls
    assert torch.equal(ours(image()), theirs(image()))
    assert repr(ours) == repr(theirs)


def test_a_class_stands_for_those_derived_from_it() -> None:
    model = nn.Sequential(*[cls(3, 3, 3) for cls in PROVEN])
    assert len(haloconv.accelerate(model, also=(Doubled,))) == 2
    assert len(haloconv.accelerate(model, also=[nn.Conv2d], strict=True)) == 2


def test_what_a_forward_convolves_is_not_known_ahead() -> None:
    model = nn.Sequential(Plain(3, 4, 3), Doubled(4, 5, 3))
    haloconv.accelerate(model, also=PROVEN)
    assert [posed.problem.k for posed in problems_of(model, image().float(), ["fprop"])] == [4]


class OwnBody(nn.Conv2d):
    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(x.flip(-1), weight, bias)


class Direct(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight.abs())


class Weighted(nn.Conv2d):
    weight = property(lambda self: self._parameters["weight"].abs(), lambda self, value: None)


class Settled(nn.Conv2d):
    def settings(self) -> str:
        return "its own"


class Called(nn.Conv2d):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


REFUSED = {
    "body": (lambda: OwnBody(3, 3, 3), "OwnBody has a _conv_forward of its own; haloconv.functional_mode"),
    "no body": (lambda: Direct(3, 3, 3), "Direct has a forward of its own without _conv_forward; haloconv"),
    "property": (lambda: Weighted.__new__(Weighted), "Weighted defines 'weight'"),
    "our name": (lambda: Settled(3, 3, 3), "Settled defines 'settings'"),
    "call": (lambda: Called(3, 3, 3), "Called defines '__call__'"),
    "fake-quantised": (lambda: qat.Conv2d(3, 3, 3, qconfig=get_default_qat_qconfig("x86")), "fakes the quantisation"),
    "lazy": (lambda: nn.LazyConv2d(3, 3), "has no weights before its first input"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_proven_is_left_with_the_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    module = make()
    if not hasattr(module, "_modules"):
        nn.Module.__init__(module)
    (left,) = haloconv.accelerate(module, also=(nn.Conv2d,)).left
    assert reason in left.reason and left.convolution
    with pytest.raises(RuntimeError, match="cannot swap every convolution"):
        haloconv.accelerate(module, also=(nn.Conv2d,), strict=True)


def test_what_was_done_to_one_layer_is_seen() -> None:
    layer = Plain(3, 3, 3)
    layer.forward = layer.forward
    (left,) = haloconv.accelerate(layer, also=(Plain,)).left
    assert "replaced on the instance" in left.reason


@pytest.mark.parametrize("also", [Plain, None, (nn.Linear,), (Plain(3, 3, 3),), ("Plain",)], ids=repr)
def test_also_takes_classes_of_convolutions(also: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    with pytest.raises(TypeError, match="also= takes a collection of subclasses of torch.nn.Conv2d"):
        haloconv.accelerate(model, also=also)
    assert type(model[0]) is nn.Conv2d
