"""What a layer keeps of a call serves only calls that are the same in all that the choice of a kernel depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import haloconv
from haloconv import plan
from haloconv.autograd import Call
from haloconv.functional import behind_casts
from haloconv.library import cast_for_autocast
from tests.cpu.test_paths import h200

Layer = haloconv.Conv2d


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """On a stand-in for a GPU: which plans were looked up, in order."""
    found: list[str] = []

    def noting(name: str) -> Callable:
        inner = getattr(plan, name)

        def look_up(*arguments: object) -> object:
            found.append(name)
            return inner(*arguments)

        return look_up

    for name in ("plan_fprop", "plan_dgrad", "plan_wgrad", "plan_bgrad"):
        monkeypatch.setattr(plan, name, noting(name))
    with h200():
        yield found


def layer_and_image() -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    return Layer(8, 8, 3, padding=1, family="direct", strict=True), torch.randn(2, 8, 12, 12)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, four bytes behind a multiple of 16."""
    storage = torch.empty(tensor.numel() + 4)
    offset = 1 + -storage.data_ptr() // 4 % 4
    return storage[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)


def swap_weight(layer: Layer, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer.weight.data = make(layer.weight.data)


def change_stride(layer: Layer) -> None:
    layer.stride = (2, 2)


class Subclass(torch.Tensor):
    """A tensor whose class may have something to say about what is done with it."""


def change_class(layer: Layer) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Subclass))


def freeze_weight(layer: Layer) -> None:
    layer.weight.requires_grad_(False)


def drop_bias(layer: Layer) -> None:
    layer.bias = None


CHANGES: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor | None]] = {
    "image": lambda layer, x: torch.randn(2, 8, 12, 13),
    "order of the image": lambda layer, x: x.to(memory_format=torch.channels_last),
    "place of the image": lambda layer, x: misaligned(x),
    "image that wants a gradient": lambda layer, x: x.requires_grad_(),
    "dtype": lambda layer, x: layer.half() and x.half(),
    "order of the weight": lambda layer, x: swap_weight(layer, lambda w: w.to(memory_format=torch.channels_last)),
    "place of the weight": lambda layer, x: swap_weight(layer, misaligned),
    "extents of the weight": lambda layer, x: swap_weight(layer, lambda w: w[:, :, :2]),
    "class of the weight": lambda layer, x: change_class(layer),
    "frozen weight": lambda layer, x: freeze_weight(layer),
    "bias": lambda layer, x: drop_bias(layer),
    "attribute": lambda layer, x: change_stride(layer),
    "precision": lambda layer, x: setattr(torch.backends.cudnn, "allow_tf32", False),
    "plans": lambda layer, x: plan.clear_plans(),
}


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("change", CHANGES)
def test_a_warm_call_looks_up_a_plan_only_if_something_changed(
    change: str, asked: list[str], tf32_allowed: None
) -> None:
    layer, x = layer_and_image()
    layer(x)
    asked.clear()
    layer(x)
    assert not asked
    changed = CHANGES[change](layer, x)
    y = layer(x if changed is None else changed)
    assert asked == ["plan_fprop"]
    assert y.requires_grad == (layer.weight.requires_grad or layer.bias.requires_grad or x.requires_grad)


@pytest.mark.parametrize("make", [lambda b: b[:4], lambda b: b.half(), lambda b: b.view(8, 1)])
def test_a_warm_layer_refuses_a_bias_that_does_not_fit(make: Callable, asked: list[str]) -> None:
    layer, x = layer_and_image()
    layer(x)
    layer.bias.data = make(layer.bias.data)
    with pytest.raises(RuntimeError, match="bias"):
        layer(x)


def test_forms_that_alternate_are_all_kept(asked: list[str]) -> None:
    """Images of several extents, and a layer that is run without a graph and again with one, as checkpointing does."""
    layer, x = layer_and_image()
    images = (x, torch.randn(1, 8, 6, 6), torch.randn(2, 8, 12, 12, requires_grad=True))
    for _ in range(3):
        for image in images:
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    assert layer(image).requires_grad == grad
    assert len(asked) == 5  # without a graph it does not matter what an image wants


def test_no_more_than_some_forms_are_kept(asked: list[str]) -> None:
    layer, _ = layer_and_image()
    with torch.no_grad():
        for width in range(3, 200):
            layer(torch.empty(1, 8, 3, width))
    assert 0 < len(vars(layer)["_calls"]) <= 64


def test_autocast_gives_its_dtype_to_warm_calls(asked: list[str]) -> None:
    layer, x = layer_and_image()
    for image in (x, x.half(), x):
        for dtype in (torch.bfloat16, torch.float16):
            for lookups in (1, 0):
                asked.clear()
                with torch.autocast("cpu", dtype):
                    assert layer(image).dtype == dtype
                assert len(asked) == lookups
    assert layer(x).dtype == torch.float32


def test_a_kept_call_casts_what_autocast_casts() -> None:
    seen = Call(lambda *tensors: [each if each is None else each.dtype for each in tensors], (None,), False)
    single, half, double = (torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.half, torch.float64))
    with torch.autocast("cpu", torch.half):
        for tensors in ((single, single, single), (half, single, None), (double, double, double)):
            call = behind_casts(seen, *tensors)
            want = [each if each is None else each.dtype for each in cast_for_autocast("cpu", torch.half, *tensors)]
            assert call.function(*tensors, *call.arguments) == [*want, None]
    assert behind_casts(seen, single, single, single) is seen


def test_warm_layers_train_under_autocast_as_pytorchs(own_autograd: None) -> None:
    """With a float32 image, with one that has autocast's dtype already, without a bias, and in float64."""
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype, bias in itertools.product((torch.float32, torch.bfloat16, torch.float64), (True, False)):
            parameters = torch.float64 if dtype == torch.float64 else torch.float32
            theirs = torch.nn.Conv2d(4, 6, 3, bias=bias, dtype=parameters)
            ours, x = Layer.from_torch(theirs), torch.randn(2, 4, 9, 9, dtype=dtype, requires_grad=True)
            leaves = (x, *theirs.parameters())
            for _ in range(3):
                y, want = ours(x), theirs(x)
                assert y.dtype == want.dtype and torch.equal(y, want)
                dy = torch.randn_like(y)
                for ours_of, theirs_of in zip(
                    torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True
                ):
                    torch.testing.assert_close(ours_of, theirs_of, rtol=0.02, atol=0.02)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_traces_transforms_or_intercepts_sees_warm_layers(asked: list[str]) -> None:
    layer, x = layer_and_image()
    layer.requires_grad_(False)
    layer(x)
    asked.clear()
    with Operators() as operators:
        layer(x)
    assert "haloconv::fprop" in operators.names
    assert "haloconv::fprop" in str(torch.jit.trace(layer, x, check_trace=False).graph)
    assert torch.func.vmap(layer)(torch.randn(3, *x.shape)).shape == (3, *x.shape)
    assert torch.func.jvp(layer, (x,), (x,))[1].shape == x.shape
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(y).tangent is not None
    assert len(asked) >= 5


def test_nothing_is_kept_of_a_call_whose_plan_is_not(asked: list[str]) -> None:
    """Inside plan.noting() calls run on PyTorch for now."""
    layer, x = layer_and_image()
    for _ in range(2):
        noted: list[plan.Noted] = []
        with plan.noting(noted.append):
            layer(x)
        assert len(noted) == 1
    layer(x)
    assert plan.plan_fprop(x, layer.weight, layer.bias, vars(layer)["_spec"]).choice.family == "direct"
    asked.clear()
    layer(x)
    assert not asked


LOOKED_UP = ["plan_dgrad", "plan_wgrad", "plan_bgrad"]
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "order": lambda dy: dy.to(memory_format=torch.channels_last),
    "expanded": lambda dy: torch.ones(1).expand(dy.shape),
    "place": misaligned,
    "precision": lambda dy: setattr(torch.backends.cudnn, "allow_tf32", False),
    "plans": lambda dy: plan.clear_plans(),
}


@pytest.mark.parametrize("change", GRADIENTS)
def test_a_warm_backward_pass_looks_up_plans_only_if_something_changed(
    change: str, asked: list[str], tf32_allowed: None
) -> None:
    layer, x = layer_and_image()
    y, dy = layer(x.requires_grad_()), torch.randn(2, 8, 12, 12)

    def looked_up(dy: torch.Tensor) -> list[str]:
        asked.clear()
        torch.autograd.grad(y, (x, layer.weight, layer.bias), dy, retain_graph=True)
        return asked

    assert looked_up(dy) == LOOKED_UP and not looked_up(dy)
    changed = GRADIENTS[change](dy)
    assert looked_up(dy if changed is None else changed) == LOOKED_UP


@pytest.mark.parametrize("change", [misaligned, lambda each: each.to(memory_format=torch.channels_last)])
def test_saved_tensors_may_come_back_in_another_form(change: Callable, asked: list[str]) -> None:
    layer, x = layer_and_image()
    dy, leaves = torch.randn(2, 8, 12, 12), (x.requires_grad_(), layer.weight, layer.bias)
    torch.autograd.grad(layer(x), leaves, dy)
    for factor in (x, layer.weight):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: each, lambda each, shape=factor.shape: change(each) if each.shape == shape else each
        ):
            y = layer(x)
        torch.autograd.grad(layer(x), leaves, dy)
        asked.clear()
        torch.autograd.grad(y, leaves, dy)
        assert asked == LOOKED_UP


def test_layers_that_share_a_plan_have_the_gradients_that_each_wants(asked: list[str]) -> None:
    (one, x), (other, _) = layer_and_image(), layer_and_image()
    other.weight.requires_grad_(False)
    x.requires_grad_()
    for _ in range(2):
        for layer in (one, other):
            x.grad = None
            layer(x).sum().backward()
            assert x.grad is not None and layer.bias.grad is not None
        assert one.weight.grad is not None and other.weight.grad is None
    assert asked.count("plan_dgrad") == 2 and asked.count("plan_wgrad") == 1
