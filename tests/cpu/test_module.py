"""haloconv.Conv2d beside torch.nn.Conv2d: the same weights, states, results and manners."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import haloconv
from haloconv import module as module_file
from haloconv import plan
from haloconv.emulator import emulated_device

LAYERS: tuple[tuple[tuple, dict[str, Any]], ...] = (
    ((4, 6, 3), {}),
    ((4, 6, (3, 5)), {"stride": (2, 1), "padding": (1, 2)}),
    ((4, 6, 3), {"padding": "same", "dilation": (2, 3)}),
    ((4, 6, (2, 4)), {"padding": "same"}),
    ((4, 6, 3), {"padding": "valid", "stride": 2}),
    ((4, 8, 3), {"groups": 4, "padding": 1, "bias": False}),
    ((4, 6, 3), {"groups": 2, "dilation": 2, "padding": (0, 2)}),
    ((4, 6, (1, 7)), {"padding": (0, 3), "dtype": torch.float64}),
    *(((4, 6, 3), {"padding": (1, 2), "padding_mode": mode}) for mode in ("zeros", "reflect", "replicate", "circular")),
    ((4, 6, (3, 2)), {"padding": "same", "padding_mode": "circular"}),
    ((4, 6, (3, 4)), {"padding": "same", "padding_mode": "reflect", "dilation": 2}),
    ((4, 6, 3), {"padding_mode": "replicate", "padding": 0, "stride": 2}),
)


def layer_id(layer: object) -> str:
    return str(layer).replace("torch.", "").replace(" ", "")


def pair(layer: tuple[tuple, dict[str, Any]]) -> tuple[haloconv.Conv2d, torch.nn.Conv2d]:
    args, options = layer
    modules = []
    for cls in (haloconv.Conv2d, torch.nn.Conv2d):
        torch.manual_seed(7)
        modules.append(cls(*args, **options))
    return modules[0], modules[1]


def image(module: torch.nn.Module, *shape: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(3)
    return torch.randn(shape or (2, 4, 9, 11), generator=gen, dtype=torch.float64).to(module.weight.dtype)


def assert_same_results(ours: torch.nn.Module, theirs: torch.nn.Module, x: torch.Tensor) -> None:
    """Outputs and all gradients."""
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
        results.append((y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy)))
    for a, b in zip(*results, strict=True):
        assert a.stride() == b.stride() or not a.numel()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_same_seed_gives_the_same_parameters(layer: tuple) -> None:
    ours, theirs = pair(layer)
    state, other = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(other)
    assert all(torch.equal(state[name], other[name]) for name in state)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


def test_construction_uses_up_the_same_random_numbers() -> None:
    """A model built of ours continues with the numbers that a model of torch's would draw."""
    after = []
    for cls in (haloconv.Conv2d, torch.nn.Conv2d):
        torch.manual_seed(11)
        cls(3, 5, 3)
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
@pytest.mark.parametrize("shape", [(2, 4, 9, 11), (4, 9, 11), (1, 4, 12, 9)], ids=str)
def test_same_results_and_gradients(layer: tuple, shape: tuple[int, ...]) -> None:
    ours, theirs = pair(layer)
    assert_same_results(ours, theirs, image(ours, *shape))


@pytest.mark.parametrize("layer", LAYERS[:8], ids=layer_id)
def test_empty_batch(layer: tuple) -> None:
    ours, theirs = pair(layer)
    assert_same_results(ours, theirs, image(ours, 0, 4, 9, 11))


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_state_dict_goes_both_ways(layer: tuple) -> None:
    ours, theirs = pair(layer)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    theirs.load_state_dict(ours.state_dict())
    x = image(ours)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-5, atol=1e-5)
    _, fresh = pair(layer)
    ours.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(ours(x), fresh(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_copies_and_pickles(layer: tuple) -> None:
    args, options = layer
    torch.manual_seed(1)
    ours = haloconv.Conv2d(*args, **options, precision="ieee", family="aten")
    x = image(ours)
    want = ours(x)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours)),
              torch.load(buffer, weights_only=False)]  # fmt: skip
    for other in copies:
        assert type(other) is haloconv.Conv2d
        assert repr(other) == repr(ours)
        assert torch.equal(other(x), want)
    with torch.no_grad():
        copies[0].weight.zero_()
    assert torch.equal(ours(x), want)


def test_parameters_assigned_later_are_used() -> None:
    """Nothing about the layer is remembered that could go stale."""
    ours, theirs = pair(((4, 6, 3), {"padding": 1}))
    x = image(ours)
    ours(x)
    for module in (ours, theirs):
        gen = torch.Generator().manual_seed(9)
        module.weight = torch.nn.Parameter(torch.randn(6, 4, 3, 3, generator=gen))
        module.bias = None
        module.stride, module.padding, module.dilation = (2, 1), (0, 2), (1, 2)
    torch.testing.assert_close(ours(x), theirs(x))
    ours.double(), theirs.double()
    torch.testing.assert_close(ours(x.double()), theirs(x.double()))


def test_repr_is_torchs_with_precision_and_family() -> None:
    for layer in LAYERS:
        ours, theirs = pair(layer)
        assert repr(ours).startswith(repr(theirs)[:-1])
    text = repr(haloconv.Conv2d(4, 6, 3, precision="ieee", family="direct"))
    assert "ieee" in text and "direct" in text
    text = repr(haloconv.Conv2d(4, 6, 3, precision="tf32", family="aten"))
    assert "tf32" in text and "aten" in text


def test_is_a_conv2d_for_everyone_who_asks() -> None:
    ours = haloconv.Conv2d(4, 6, 3)
    assert isinstance(ours, torch.nn.Conv2d)
    assert ours.kernel_size == (3, 3) and ours.stride == (1, 1) and ours.padding == (0, 0)
    assert ours.transposed is False and ours.output_padding == (0, 0)
    torch.nn.init.kaiming_normal_(ours.weight)
    fused = torch.nn.utils.fuse_conv_bn_eval(ours.eval(), torch.nn.BatchNorm2d(6).eval())
    assert isinstance(fused, haloconv.Conv2d)


def test_weight_norm_hooks_and_parametrisations_work() -> None:
    ours, theirs = pair(((4, 6, 3), {"padding": 1}))
    x = image(ours)
    for module in (ours, theirs):
        torch.nn.utils.parametrizations.weight_norm(module)
    torch.testing.assert_close(ours(x), theirs(x))


def test_meta_device_construction() -> None:
    ours = haloconv.Conv2d(4, 6, 3, padding=1, device="meta")
    y = ours(torch.empty(2, 4, 9, 11, device="meta"))
    assert y.shape == (2, 6, 9, 11) and y.device.type == "meta"
    ours.to_empty(device="cpu").reset_parameters()
    assert ours(torch.zeros(1, 4, 9, 11)).device.type == "cpu"


# from_torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS, ids=layer_id)
def test_from_torch_shares_the_parameters(layer: tuple) -> None:
    args, options = layer
    theirs = torch.nn.Conv2d(*args, **options)
    ours = haloconv.Conv2d.from_torch(theirs, precision="ieee")
    assert type(ours) is haloconv.Conv2d
    assert ours.weight is theirs.weight and ours.bias is theirs.bias
    assert_same_results(ours, theirs, image(theirs))
    assert repr(ours).startswith(repr(theirs)[:-1])


@pytest.mark.parametrize("training", [True, False])
def test_from_torch_keeps_mode_and_frozen_parameters(training: bool) -> None:
    theirs = torch.nn.Conv2d(4, 6, 3).train(training)
    theirs.weight.requires_grad_(False)
    ours = haloconv.Conv2d.from_torch(theirs)
    assert ours.training is training
    assert not ours.weight.requires_grad and ours.bias.requires_grad


def test_from_torch_keeps_hooks() -> None:
    theirs = torch.nn.Conv2d(4, 6, 3)
    seen: list[str] = []
    theirs.register_forward_pre_hook(lambda *_: seen.append("before"))
    theirs.register_forward_hook(lambda *_: seen.append("after"))
    theirs.register_full_backward_hook(lambda *_: seen.append("backward"))
    ours = haloconv.Conv2d.from_torch(theirs)
    ours(image(ours).requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_from_torch_draws_no_random_numbers() -> None:
    theirs = torch.nn.Conv2d(4, 6, 3)
    torch.manual_seed(2)
    want = torch.rand(3)
    torch.manual_seed(2)
    haloconv.Conv2d.from_torch(theirs)
    assert torch.equal(torch.rand(3), want)


def test_from_torch_refuses_what_is_no_conv2d() -> None:
    for other in (torch.nn.Linear(3, 4), torch.nn.Conv1d(3, 4, 3), torch.nn.ConvTranspose2d(3, 4, 3)):
        with pytest.raises(TypeError, match=type(other).__name__):
            haloconv.Conv2d.from_torch(other)


# --- layers whose directions all go to PyTorch


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each call of a layer in which a family is chosen."""
    calls: list[int] = []
    real = module_file.convolve
    monkeypatch.setattr(module_file, "convolve", lambda *args: calls.append(1) or real(*args))
    return calls


def test_a_layer_left_to_pytorch_costs_no_choice_after_the_first_call(chosen: list[int]) -> None:
    layer, x = haloconv.Conv2d(4, 6, 3, padding=(1, 2), stride=2, dilation=2, groups=2), torch.randn(2, 4, 12, 15)
    want = torch.nn.Conv2d.forward(layer, x)
    assert all(torch.equal(layer(x), want) for _ in range(3)) and len(chosen) == 1
    with torch.autocast("cpu", torch.bfloat16):
        first, second = layer(x), layer(x)
    assert first.dtype == second.dtype == torch.bfloat16 and torch.equal(first, second) and len(chosen) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "precision", "tf32"),
        lambda layer: setattr(layer, "family", "direct"),
        lambda layer: setattr(layer, "stride", (2, 2)),
        lambda layer: layer.to(memory_format=torch.channels_last),
        lambda layer: plan.clear_plans(),
    ],
)
@pytest.mark.filterwarnings("ignore:haloconv")
def test_a_family_is_chosen_anew_after_a_change(chosen: list[int], change: Callable) -> None:
    layer, x = haloconv.Conv2d(4, 6, 3), torch.randn(2, 4, 12, 15)
    layer(x), layer(x)
    change(layer)
    y = layer(x)
    assert len(chosen) == 2 and torch.allclose(y, torch.nn.functional.conv2d(x, layer.weight, layer.bias, layer.stride))


def test_other_inputs_are_chosen_for_and_kernels_are_found_where_there_are_any(chosen: list[int]) -> None:
    layer, x = haloconv.Conv2d(4, 6, 3, dtype=torch.float64), torch.randn(2, 4, 12, 15, dtype=torch.float64)
    want = layer(x)
    assert torch.equal(layer(x[:1]), want[:1]) and torch.equal(layer(x[0]), want[0]) and len(chosen) == 3
    with emulated_device(), torch.no_grad():
        y = layer(x)
        assert layer.choice().family == "halo_sm80_f64"
    assert len(chosen) == 4 and torch.allclose(y, want)
