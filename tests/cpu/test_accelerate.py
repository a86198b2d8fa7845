"""Which modules accelerate swaps, which it leaves and why, what it says of them, and the way back."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import fuse_modules, get_default_qat_qconfig
from torch.fx.experimental.optimization import fuse
from torch.nn.utils import parametrizations

import haloconv
from haloconv import accelerate, restore
from haloconv.plan import choose


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.first
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()])
        self.named = nn.ModuleDict({"x": nn.Conv2d(4, 4, 1, bias=False)})

    def forward(self, x):
        x = self.again(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.named["x"](x)


class Plain(nn.Conv2d):
    pass


class Plain1d(nn.Conv1d):
    pass


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class DeformConv2d(nn.Module):
    """Named and built as torchvision's: a layer with weights that is no torch.nn.Conv2d."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3, 3, 3))


class Conv2dNormActivation(nn.Sequential):
    """Named as torchvision's: a container."""


def replaced(name):
    conv = nn.Conv2d(3, 3, 3)
    setattr(conv, name, getattr(conv, name))
    return conv


def with_own_attribute():
    conv = nn.Conv2d(3, 3, 3)
    conv.family = "resnet"
    return conv


def scripted():
    """torch.jit knows operators by the ids of objects that may be gone: if a tuple of the layer has one, the next."""
    layers = [nn.Conv2d(3, 3, 3) for _ in range(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for layer in layers[:-1]:
            try:
                return torch.jit.script(layer)
            except RuntimeError as error:
                if "builtin cannot be used as a value" not in str(error):
                    raise
        return torch.jit.script(layers[-1])


def fake_quantised():
    return qat.Conv2d(3, 3, 3, qconfig=get_default_qat_qconfig("x86"))


def test_every_convolution_is_swapped_and_keeps_its_weights():
    model = Block()
    before, modules = dict(model.named_parameters()), list(model.modules())
    x = torch.randn(2, 3, 12, 12)
    expected = model(x)
    swaps = accelerate(model, precision="ieee")
    assert [swap.names for swap in swaps] == [("first", "again"), ("layers.0",), ("named.x",)]
    assert [swap.name for swap in swaps] == ["first", "layers.0", "named.x"] and not swaps.left
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert all(now is then for now, then in zip(model.modules(), modules, strict=True))
    for swap in swaps:
        assert type(swap.module) is haloconv.Conv2d and swap.module.precision == "ieee" and swap.module.swapped
        assert all(model.get_submodule(name) is swap.module for name in swap.names)
    torch.testing.assert_close(model(x), expected)


def test_restored_model_computes_the_bits_of_the_original():
    model, original, x = Block(), Block(), torch.randn(2, 3, 12, 12)
    original.load_state_dict(model.state_dict())
    accelerate(model)
    model(x)
    assert restore(model) == ["first", "again", "layers.0", "named.x"]
    assert restore(model) == []
    for ours, theirs in zip(model.modules(), original.modules(), strict=True):
        assert type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys() and repr(ours) == repr(theirs)
    assert torch.equal(model(x), original(x))


def test_options_reach_the_modules():
    (swap,) = accelerate(nn.Sequential(nn.Conv2d(3, 3, 3)), family="aten", strict=True)
    assert (swap.module.family, swap.module.strict, swap.module.precision) == ("aten", True, None)


def test_a_second_call_changes_nothing_but_options():
    model = Block()
    first = accelerate(model, precision="ieee")
    states = [dict(vars(swap.module)) for swap in first]
    second = accelerate(model, precision="ieee")
    assert len(second) == 0 and [swap.module for swap in second.already] == [swap.module for swap in first]
    assert [dict(vars(swap.module)) for swap in first] == states and all(each.before is None for each in second.already)
    third = accelerate(model, family="aten")
    assert all(each.module.family == "aten" and each.module.precision is None for each in third.already)
    assert all("precision=ieee" in each.before for each in third.already)


def test_layers_that_were_built_as_ours_are_left_alone():
    layer = haloconv.Conv2d(3, 3, 3, padding=(1, 0, 2, 1), family="aten")
    model = nn.Sequential(layer, haloconv.Conv2d.from_torch(nn.Conv2d(3, 3, 3)))
    assert [each.names for each in accelerate(model, precision="ieee").already] == [("0",), ("1",)]
    assert layer.family == "aten" and layer.precision is None
    assert restore(model) == [] and type(model[0]) is type(model[1]) is haloconv.Conv2d


LEFT = {
    "subclass": (lambda: Plain(3, 3, 3), "Plain may compute something else", True),
    "subclass with a forward": (lambda: Standardised(3, 3, 3), "Standardised has a forward of its own", True),
    "lazy": (lambda: nn.LazyConv2d(3, 3), "torch.nn.LazyConv2d has no weights before its first input", True),
    "fake-quantised": (fake_quantised, "fakes the quantisation", True),
    "quantised": (lambda: torch.ao.nn.quantized.Conv2d(3, 3, 3), "is no torch.nn.Conv2d", True),
    "deformable": (DeformConv2d, "DeformConv2d is no torch.nn.Conv2d", True),
    "scripted": (scripted, "compiled by torch.jit", True),
    "forward of the instance": (lambda: replaced("forward"), "forward is replaced on the instance", True),
    "body of the instance": (lambda: replaced("_conv_forward"), "_conv_forward is replaced on the instance", True),
    "own attribute": (with_own_attribute, "'family' of its own", True),
    "a subclass of 1-D": (lambda: Plain1d(3, 3, 3), "Plain1d may compute something else", True),
    "lazy 1-D": (lambda: nn.LazyConv1d(3, 3), "torch.nn.LazyConv1d has no weights before its first input", True),
    "3-D": (lambda: nn.Conv3d(3, 3, 3), "torch.nn.Conv3d: a filter spans more than frames or time", False),
    "3-D transposed": (lambda: nn.ConvTranspose3d(3, 3, 3), "of a kind that haloconv has no layer of", False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_is_named_with_the_reason(kind):
    make, reason, convolution = LEFT[kind]
    module = make()
    model = nn.Sequential(nn.Conv2d(3, 3, 3), module)
    kept, attributes = type(module), set(vars(module))
    report = accelerate(model)
    ((names, left, said, counts),) = report.left
    assert names == ("1",) and left is module and reason in said and counts is convolution
    assert type(module) is kept and set(vars(module)) == attributes and len(report) == 1
    assert reason.split()[0] in str(report)
    restore(model)
    assert type(module) is kept and type(model[0]) is nn.Conv2d


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", LEFT)
def test_strict_refuses_what_is_a_2d_convolution_and_changes_nothing(kind):
    make, reason, convolution = LEFT[kind]
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(make()))
    if convolution:
        with pytest.raises(RuntimeError, match="1.0: .*" + reason.split()[-1]):
            accelerate(model, strict=True)
        assert type(model[0]) is nn.Conv2d
    else:
        assert len(accelerate(model, strict=True)) == 1


FRONTS = (
    nn.Conv1d(4, 4, 3),
    nn.ConvTranspose1d(4, 4, 4, 2),
    nn.ConvTranspose2d(4, 4, 2, 2),
    nn.Conv3d(4, 4, 2, 2),
    nn.Conv3d(4, 4, (3, 1, 1), padding="same"),
)


@pytest.mark.parametrize("layer", FRONTS, ids=str)
def test_layers_beside_conv2d_are_swapped_and_restored(layer):
    model = nn.Sequential(copy.deepcopy(layer))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    x = torch.randn(2, 4, *[6] * (layer.weight.dim() - 2))
    want, text, kind = model(x), repr(model), type(model[0])
    (swap,) = accelerate(model, family="aten", strict=True)
    ours = getattr(haloconv, type(layer).__name__)
    assert isinstance(model[0], ours) and isinstance(model[0], type(layer)) and swap.module.family == "aten"
    assert torch.equal(model(x), want) and type(layer).__name__ in str(accelerate(model))
    assert restore(model) == ["0"] and repr(model) == text and torch.equal(model(x), want)
    assert type(model[0]).__mro__[1:] == kind.__mro__[1:] and not vars(model[0]).keys() & {"family", "_calls", "_spec"}


def test_containers_and_other_layers_are_not_mentioned():
    model = Conv2dNormActivation(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 3), nn.Upsample(2))
    report = accelerate(model, strict=True)
    assert [swap.names for swap in report] == [("0",)] and not report.left and not report.already


def test_a_materialised_lazy_layer_is_swapped():
    model = nn.Sequential(nn.LazyConv2d(4, 3))
    assert len(accelerate(model)) == 0
    model(torch.randn(1, 3, 8, 8))
    assert len(accelerate(model, strict=True)) == 1


def test_a_bare_convolution():
    """The layer stays the same object, so that it needs no parent; whoever holds it has it swapped."""
    conv = nn.Conv2d(3, 3, 3)
    held = [conv]
    report = accelerate(conv)
    assert type(held[0]) is haloconv.Conv2d and report[0].names == ("",) and "(the model itself)" in str(report)
    assert restore(conv) == [""] and type(held[0]) is nn.Conv2d


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_are_swapped(mode):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode))
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    accelerate(model)
    torch.testing.assert_close(model(x), expected)


def test_complex_layers_run_pytorchs_convolution_and_say_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, dtype=torch.complex64))
    x = torch.randn(2, 3, 8, 8, dtype=torch.complex64, requires_grad=True)
    want = torch.autograd.grad(model(x).abs().sum(), [x, *model.parameters()])
    (swap,) = accelerate(model)
    got = torch.autograd.grad(model(x).abs().sum(), [x, *model.parameters()])
    torch.testing.assert_close(got, want)
    assert swap.expected.startswith("aten: ")


def test_mode_and_trainability_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 3, 3)).eval()
    model[0].weight.requires_grad_(False)
    accelerate(model)
    assert not model[0].training and not model[0].weight.requires_grad and model[0].bias.requires_grad


def test_hooks_see_the_layer_they_were_put_on():
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    seen = []

    def note(name):
        return lambda module, *_: seen.append((name, module))

    conv = model[0]
    conv.register_forward_pre_hook(note("before"))
    conv.register_forward_hook(note("after"))
    conv.register_full_backward_pre_hook(note("backward, before"))
    conv.register_full_backward_hook(note("backward"))
    conv.register_state_dict_pre_hook(note("state"))
    conv.register_load_state_dict_pre_hook(note("load"))
    conv.register_load_state_dict_post_hook(note("loaded"))
    names = ["before", "after", "backward, before", "backward", "state", "load", "loaded"]
    for change in (accelerate, restore):
        change(model)
        seen.clear()
        model(torch.randn(1, 3, 8, 8, requires_grad=True)).sum().backward()
        model.load_state_dict(model.state_dict())
        assert [name for name, _ in seen] == names and all(module is conv for _, module in seen)


def test_fusion_by_exact_type_needs_the_original_types():
    """torch.ao and torch.fx look types up: they refuse or pass over ours, and work before and after."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()

    model, x = net(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    accelerate(model)
    with pytest.raises((AssertionError, NotImplementedError), match="fuse"):
        fuse_modules(model, ["0", "1"])
    assert any(isinstance(module, nn.BatchNorm2d) for module in fuse(copy.deepcopy(model)).modules())
    restore(model)
    for fused in (fuse_modules(model, ["0", "1"]), fuse(net())):
        assert len(accelerate(fused)) == 1
        assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
        torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


def test_copies_of_parametrised_layers_keep_their_class():
    """A deep copy shares the class that PyTorch made for the original; accelerating one leaves the other."""
    original = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 3)))
    other = copy.deepcopy(original)
    accelerate(other)
    assert isinstance(other[0], haloconv.Conv2d) and not isinstance(original[0], haloconv.Conv2d)
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(other(x), original(x))


def test_the_report_says_what_is_known():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Plain(4, 4, 3), nn.ConvTranspose3d(4, 4, 3))
    report = accelerate(model)
    assert repr(report) == "<Acceleration: 1 of 2 convolutions swapped, 1 of other kinds left>"
    text = str(report)
    for words in ("3, 4, kernel_size=(3, 3)", "the tensors are on cpu", "Plain may compute", "ConvTranspose3d is of"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 160 and "\x1b" not in text
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    assert console.export_text().startswith("1 of 2 convolutions swapped")
    model.to("meta")
    assert report[0].expected == "chosen at its first input"
    assert str(accelerate(nn.Linear(2, 2))) == "0 of 0 convolutions swapped"


def test_the_report_knows_the_family_after_the_first_input():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    report = accelerate(model, family="aten")
    assert report[0].expected == "aten: asked for"
    restore(model)
    report = accelerate(model)
    model(torch.randn(3, 8, 8))
    assert report[0].expected == "aten: the tensors are on cpu; our kernels run on CUDA devices"
    assert "-> aten" in repr(model)


def test_the_family_is_that_of_the_layout_and_the_dtype_that_ran(monkeypatch):
    """As the planner saw them: channels_last by the weights, too, and in autocast's dtype."""
    asked = []
    monkeypatch.setattr(haloconv.layer, "choose", lambda problem, *_: asked.append(problem) or choose(problem, *_))
    layer = haloconv.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 8, 8)
    for image in (x, x.contiguous(memory_format=torch.channels_last), x[0], x.double()):
        layer.to(image.dtype)(image), repr(layer)
    layer.float().to(memory_format=torch.channels_last)(x), repr(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    repr(layer)
    nchw, nhwc = "nchw", "nhwc"
    assert [each.layout for each in asked] == [nchw, nhwc, nchw, nchw, nhwc, nhwc]
    assert [each.precision_label for each in asked] == ["tf32", "tf32", "tf32", "fp64", "tf32", "bf16"]


def test_wrong_options_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    for options in ({"family": "none"}, {"precision": "fp8"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            accelerate(model, **options)
    assert type(model[0]) is nn.Conv2d
