"""The layers beside Conv2d: PyTorch's parameters, states, results, repr and manners."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import haloconv
from haloconv import layer as layer_file
from haloconv import plan
from haloconv.emulator import emulated_device
from haloconv.tune.problems import problems_of
from tests import samples
from tests.fronts import FRONTS, Front, front

LAYERS: tuple[tuple[str, tuple, dict[str, Any]], ...] = (
    ("conv1d", (4, 6, 3), {}),
    ("conv1d", (4, 8, 4), {"padding": "same", "groups": 4, "bias": False}),
    ("conv1d", (4, 6, 3), {"padding": 2, "padding_mode": "reflect", "dilation": 2}),
    ("conv1d", (4, 6, 4), {"padding": "same", "padding_mode": "circular"}),
    ("conv3d", (4, 6, 2), {"stride": 2}),
    ("conv3d", (4, 6, (3, 1, 1)), {"padding": "same", "bias": False}),
    ("conv3d", (4, 6, (1, 3, 3)), {"padding": (0, 1, 1)}),
    ("conv3d", (4, 6, 2), {"stride": 2, "padding": 1, "padding_mode": "circular"}),
    ("conv_transpose1d", (4, 6, 4), {"stride": 2, "padding": 1}),
    ("conv_transpose2d", (4, 6, 3), {}),
    ("conv_transpose2d", (4, 6, (4, 2)), {"stride": 2, "padding": (1, 0), "output_padding": 1}),
    ("conv_transpose2d", (4, 6, 3), {"groups": 2, "dilation": (1, 2), "bias": False}),
)


def layer_id(value: object) -> str:
    return str(value).replace(" ", "")


def pair(layer: tuple, **more: object) -> tuple[Any, torch.nn.Module]:
    name, args, options = layer
    made = []
    for cls in (front(name).layer, front(name).torchs):
        torch.manual_seed(7)
        made.append(cls(*args, **options))
    return made[0], made[1]


def image(one: Front, *, batch: int = 2) -> torch.Tensor:
    x = torch.randn(batch, 4, *one.image, generator=torch.Generator().manual_seed(3))
    return x.contiguous(memory_format=torch.channels_last_3d) if x.dim() == 5 else x


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_parameters_results_and_gradients_are_pytorchs(layer: tuple) -> None:
    ours, theirs = pair(layer)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    for x in (image(front(layer[0])), image(front(layer[0]))[1], image(front(layer[0]), batch=0)):
        found = []
        for module in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            found.append((y, *torch.autograd.grad(y.pow(2).sum(), [leaf, *module.parameters()])))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_repr_begins_as_pytorchs_and_tells_what_runs(layer: tuple) -> None:
    ours, theirs = pair(layer)
    assert str(ours).startswith(str(theirs)[:-1])
    ours(image(front(layer[0])))
    assert "aten" in str(ours)
    with emulated_device(), torch.no_grad():
        ours(image(front(layer[0])))
        assert ours.choice().family not in ("aten", "auto")


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_copies_and_files(layer: tuple) -> None:
    ours, _ = pair(layer)
    x = image(front(layer[0]))
    want = ours(x)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    others = (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False))
    assert "_spec" in vars(ours)
    for other in others:
        assert type(other) is type(ours) and not vars(other).keys() & {"_spec", "_calls", "_last_input"}
        assert torch.equal(other(x), want)


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_from_torch_shares_parameters(layer: tuple) -> None:
    one, (_, theirs) = front(layer[0]), pair(layer)
    ours = one.layer.from_torch(theirs, family="direct")
    assert ours.weight is theirs.weight and ours.family == "direct" and type(theirs) is one.torchs
    with pytest.raises(TypeError, match="Linear"):
        one.layer.from_torch(torch.nn.Linear(3, 4))


@pytest.mark.parametrize("layer", [each for each in LAYERS if "padding_mode" not in each[2]], ids=layer_id)
def test_calls_are_kept(layer: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of a form goes straight to what ran; one that was changed does not."""
    ours, theirs = pair(layer)
    x, calls = image(front(layer[0])), []
    real = type(ours)._first_call
    monkeypatch.setattr(layer_file.Layer, "_first_call", lambda self, *args: calls.append(1) or real(self, *args))
    assert torch.equal(ours(x), theirs(x)) and torch.equal(ours(x), theirs(x)) and len(calls) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), theirs(x)) and torch.equal(ours(x), theirs(x)) and len(calls) == 2
    ours.stride = theirs.stride = tuple(3 for _ in theirs.stride)
    ours.padding = theirs.padding = tuple(1 for _ in theirs.stride)
    assert torch.equal(ours(x), theirs(x)) and len(calls) == 3
    ours.double(), theirs.double()
    with emulated_device():
        for count in (4, 4):
            leaf = x.double().requires_grad_()
            torch.testing.assert_close(ours(leaf), theirs(leaf), rtol=1e-12, atol=1e-12)
            assert len(calls) == count
    plan.clear_plans()


@pytest.mark.parametrize("one", FRONTS, ids=lambda one: one.name)
def test_module_samples(one: Front) -> None:
    count = 0
    for args, kwargs, x in samples.layers_of(one.torchs, "cpu", torch.float32):
        torch.manual_seed(1)
        ours = one.layer(*args, **kwargs)
        torch.manual_seed(1)
        torch.testing.assert_close(ours(x), one.torchs(*args, **kwargs)(x))
        count += 1
    assert count >= 2


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_compiled_and_exported(layer: tuple, fresh_dynamo: None) -> None:
    """In one graph, whose operator is ours, with gradients; an exported program gives the same."""
    ours, theirs = pair(layer)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    x = image(front(layer[0])).requires_grad_()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x))
    got, want = torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(got, want)
    assert any("haloconv" in str(node.target) for node in graphs[0].graph.nodes) == (layer[0] != "conv3d")
    assert len(graphs) == 1
    program = torch.export.export(ours, (x.detach(),))
    torch.testing.assert_close(program.module()(x), theirs(x))
    in_aten = program.run_decompositions(haloconv.decompositions())
    torch.testing.assert_close(in_aten.module()(x), theirs(x))
    assert not any("haloconv" in str(node.target) for node in in_aten.graph.nodes)


@pytest.mark.parametrize("layer", [each for each in LAYERS if each[0] == "conv3d"][:3], ids=layer_id)
def test_volumes_are_compiled_their_way(layer: tuple, fresh_dynamo: None, as_on_a_gpu: None) -> None:
    """One graph, without a 3-D convolution."""
    ours, theirs = pair(layer)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = image(front(layer[0])).requires_grad_()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x))
    (got,), (want,) = (torch.autograd.grad(each(x).pow(2).sum(), x) for each in (compiled, theirs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not any("conv3d" in each for each in targets)
    assert any("haloconv" in each or "linear" in each for each in targets)


@pytest.mark.parametrize("layer", [each for each in LAYERS if "transpose" in each[0]], ids=layer_id)
def test_output_size(layer: tuple) -> None:
    ours, theirs = pair(layer)
    x = image(front(layer[0]))
    least = [extent - more for extent, more in zip(theirs(x).shape[2:], theirs.output_padding, strict=True)]
    for size in (least, [2, 6, *(extent + step - 1 for extent, step in zip(least, theirs.stride, strict=True))]):
        assert torch.equal(ours(x, output_size=size), theirs(x, output_size=size))
    for wrong in ([1] * len(least), [1], [10**6] * len(least)):
        with pytest.raises(ValueError) as want:
            theirs(x, output_size=wrong)
        with pytest.raises(ValueError) as got:
            ours(x, output_size=wrong)
        assert str(got.value) == str(want.value)


@pytest.mark.parametrize("one", [each for each in FRONTS if each.transposed], ids=lambda one: one.name)
def test_transposed_layers_refuse_what_pytorchs_refuse(one: Front) -> None:
    for options in ({"padding_mode": "reflect"}, {"groups": 3}):
        with pytest.raises(ValueError) as want:
            one.torchs(4, 6, 3, **options)
        with pytest.raises(ValueError) as got:
            one.layer(4, 6, 3, **options)
        assert str(got.value) == str(want.value)
    with pytest.raises(TypeError, match="must be a Tensor"):
        one.layer(4, 6, 3)("no tensor")
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script"):
        torch.jit.script(one.layer(4, 6, 3))


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_weight_norm(layer: tuple) -> None:
    """As vocoders have it, by parametrisations."""
    ours, theirs = pair(layer)
    x = image(front(layer[0]))
    for module in (ours, theirs):
        torch.nn.utils.parametrizations.weight_norm(module)
    torch.testing.assert_close(ours(x), theirs(x))
    found = [torch.autograd.grad(each(x).pow(2).sum(), [*each.parameters()]) for each in (ours, theirs)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["auto", "direct"])
def test_causal_padding_is_pytorchs_of_a_padded_signal(family: str, emulator_cache: None) -> None:
    """On the left only, by PyTorch's convolution and by a kernel of ours; other modes pad a copy as PyTorch's do."""
    torch.manual_seed(3)
    layer = haloconv.Conv1d(4, 6, 3, padding=(4, 0), dilation=2, dtype=torch.float64, family=family)
    x = torch.randn(2, 4, 9, dtype=torch.float64)

    def want(mode: str) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (4, 0), mode)
        return torch.nn.functional.conv1d(padded, layer.weight, layer.bias, dilation=2)

    with emulated_device() if family == "direct" else nullcontext():
        torch.testing.assert_close(layer(x), want("constant"), rtol=1e-12, atol=1e-12)
        assert layer.choice().family == ("direct" if family == "direct" else "aten")
        layer.padding_mode = "replicate"
        torch.testing.assert_close(layer(x), want("replicate"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
@pytest.mark.parametrize("ours_runs", [True, False])
def test_signals_with_neighbouring_channels_stay_so(name: str, ours_runs: bool, emulator_cache: None) -> None:
    """Transposed (N, L, C) is read and written as it is; gradients, too."""
    one = front(name)
    torch.manual_seed(4)
    layer = one.layer(4, 6, 3, stride=2, dtype=torch.float64)
    leaf = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    with emulated_device() if ours_runs else nullcontext():
        y = layer(leaf.transpose(1, 2))
        (dx,) = torch.autograd.grad(y.pow(2).sum(), leaf)
        assert torch.equal(layer(leaf.transpose(1, 2)), y)
    want = one.torchs.forward(layer, leaf.transpose(1, 2))
    (want_dx,) = torch.autograd.grad(want.pow(2).sum(), leaf)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, want_dx, rtol=1e-12, atol=1e-12)
    assert y.transpose(1, 2).is_contiguous() and dx.is_contiguous()


def test_problems_of_a_model_are_those_that_its_layers_pose() -> None:
    """A transposed layer's forward pass is the problem dgrad; products and what is PyTorch's pose none."""
    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 6, 3, padding=1),
        torch.nn.ConvTranspose1d(6, 5, 4, stride=2, padding=1, bias=False),
        torch.nn.Unflatten(2, (4, 5)),
        torch.nn.ConvTranspose2d(5, 4, 2, stride=2),
        torch.nn.Unflatten(2, (8, 1)),
        torch.nn.Conv3d(4, 4, (3, 1, 1)),
        torch.nn.Conv3d(4, 4, (2, 1, 2), stride=(2, 1, 2)),
    )
    x = torch.randn(2, 4, 10, requires_grad=True)
    with emulated_device():
        posed = [(each.layer, str(each.problem), each.problem.bias) for each in problems_of(model, x)]
        fprops = [each.problem.direction for each in problems_of(model, x, ("fprop",))]
    assert posed == [
        ("0", "fprop 2,4,1,10 -> 6, 1x3 p0,0,1,1 tf32 nchw", True),
        ("0", "dgrad 2,4,1,10 -> 6, 1x3 p0,0,1,1 tf32 nchw", False),
        ("0", "wgrad 2,4,1,10 -> 6, 1x3 p0,0,1,1 tf32 nchw", False),
        ("1", "dgrad 2,5,1,20 -> 6, 1x4 s1x2 p0,0,1,1 tf32 nchw", False),
        ("1", "fprop 2,5,1,20 -> 6, 1x4 s1x2 p0,0,1,1 tf32 nchw", False),
        ("1", "wgrad 2,5,1,20 -> 6, 1x4 s1x2 p0,0,1,1 tf32 nchw", False),
        ("3", "dgrad 2,4,8,10 -> 5, 2x2 s2x2 tf32 nchw", False),
        ("3", "fprop 2,4,8,10 -> 5, 2x2 s2x2 tf32 nchw", False),
        ("3", "wgrad 2,4,8,10 -> 5, 2x2 s2x2 tf32 nchw", False),
        ("5", "fprop 2,4,8,10 -> 4, 3x1 tf32 nchw", True),
        ("5", "dgrad 2,4,8,10 -> 4, 3x1 tf32 nchw", False),
        ("5", "wgrad 2,4,8,10 -> 4, 3x1 tf32 nchw", False),
    ]
    assert fprops == ["fprop", "dgrad", "dgrad", "fprop"]
