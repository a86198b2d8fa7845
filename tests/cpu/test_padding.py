"""Padding modes: PyTorch's results, gradients, errors and manners, without a padded copy where kernels of ours run."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import haloconv
from haloconv import padding
from haloconv.choose.choice import Choice
from haloconv.layout import Layout
from haloconv.plan import result_layout
from haloconv.problem import PADDING_MODES, ConvSpec
from haloconv.strips import convolve_cut
from tests.padded import convolved, cut_on_a_cpu, integers, with_integers

Tensor = torch.Tensor
INTEGERS = st.integers
MODES = PADDING_MODES[1:]
PAIR = ("reflect", "circular")


@pytest.fixture
def rims_on_a_cpu() -> Iterator[None]:
    with cut_on_a_cpu():
        yield


# --- results


@st.composite
def a_layer(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """A layer of random arguments with integer parameters, and an input of it that has an interior."""
    image = (draw(INTEGERS(3, 11)), draw(INTEGERS(3, 11)))
    taps, stride, dilation = ((draw(INTEGERS(1, most)), draw(INTEGERS(1, most))) for most in (5, 3, 3))
    modes = (draw(st.sampled_from(PADDING_MODES)), draw(st.sampled_from(PADDING_MODES)))
    sides = []
    for extent, mode in zip(image, modes, strict=True):
        most = min(5, {"circular": extent, "reflect": extent - 1}.get(mode, 5))
        sides += [draw(INTEGERS(0, most)), draw(INTEGERS(0, most))]
    assume(all(spread * (count - 1) < extent for extent, count, spread in zip(image, taps, dilation, strict=True)))
    dtype, groups = draw(st.sampled_from((torch.float64, torch.float32))), draw(st.sampled_from((1, 2)))
    torch.manual_seed(draw(INTEGERS(0, 999)))
    args: Any = (2 * groups, 2 * groups, taps, stride, tuple(sides), dilation, groups)
    layer = with_integers(haloconv.Conv2d(*args, padding_mode=modes, dtype=dtype))
    order = draw(st.sampled_from((torch.contiguous_format, torch.channels_last)))
    x = integers(draw(INTEGERS(1, 2)), 2 * groups, *image, dtype=dtype).contiguous(memory_format=order)
    return layer, x.requires_grad_()


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzzed_layers_have_the_results_and_gradients_of_a_padded_copy(data: st.DataObject) -> None:
    layer, x = data.draw(a_layer())
    with cut_on_a_cpu():
        compare(layer, x)


def compare(layer: haloconv.Conv2d, x: Tensor) -> None:
    """Bit for bit, of the first call and of the one that was kept, with gradients and without."""
    order = torch.channels_last if result_layout(x, layer.weight) == "nhwc" else torch.contiguous_format
    want = convolved(x, layer)
    dy, inputs = integers(*want.shape, dtype=x.dtype), (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(want, inputs, dy)
    for _ in range(2):
        y = layer(x)
        assert torch.equal(y, want) and y.is_contiguous(memory_format=order)
        for got, gradient in zip(torch.autograd.grad(y, inputs, dy), expected, strict=True):
            assert torch.equal(got, gradient)
    with torch.no_grad():
        assert torch.equal(layer(x), want) and torch.equal(layer(x[0]), want[0])


@pytest.mark.parametrize(
    ("modes", "sides"), [("circular", (1, 2, 0, 2)), (PAIR, (2, 1, 3, 0)), (("zeros", "replicate"), 2)]
)
def test_gradients_of_gradients(modes: Any, sides: Any, rims_on_a_cpu: None) -> None:
    torch.manual_seed(5)
    layer = haloconv.Conv2d(2, 2, (3, 2), (1, 2), sides, padding_mode=modes, dtype=torch.float64)
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer._conv_forward(x, w, b)

    inputs = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


# --- memory


class Allocations(TorchDispatchMode):
    """Elements of each tensor that an operation makes, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.elems: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
                self.elems.append(each.untyped_storage().size() // each.itemsize)
        return result


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_the_size_of_the_image_is_made_beside_results(mode: str, rims_on_a_cpu: None) -> None:
    """y and dx are; all else together is a small part of x, forward and backward."""
    layer = haloconv.Conv2d(8, 8, 3, padding=1, padding_mode=mode, bias=False)
    x = torch.randn(1, 8, 96, 96, requires_grad=True)
    y = layer(x)
    ((_, call, _),) = vars(layer)["_calls"].values()
    assert call.function is convolve_cut
    with Allocations() as forward:
        call.function(x, layer.weight, None, *call.arguments)
    with Allocations() as backward:
        torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))
    for found, whole in ((forward.elems, 1), (backward.elems, 2)):  # y; ones and dx
        large = [each for each in found if each >= x.numel()]
        assert large == [x.numel()] * whole and sum(found) - sum(large) < 0.35 * x.numel()
        assert max(each for each in found if each < x.numel()) < 0.07 * x.numel()  # two strips
    with Allocations() as copying:
        convolved(x, layer)
    assert sum(each >= x.numel() for each in copying.elems) == 3  # a copy for each dimension, and y


def test_images_without_an_interior_are_padded(rims_on_a_cpu: None, no_copy: list[str]) -> None:
    """Where every output has a tap outside; and so is what PyTorch's own convolution is asked for."""
    for image, family, copies in (((2, 9), "auto", 1), ((3, 9), "auto", 0)):
        layer = haloconv.Conv2d(2, 2, 3, padding=1, padding_mode="circular", family=family)
        x = torch.randn(1, 2, *image)
        no_copy.clear()
        torch.testing.assert_close(layer(x), convolved(x, layer))
        assert len(no_copy) == copies + 2


# --- a pair of modes as an argument


def test_a_pair_is_kept_shown_copied_and_written() -> None:
    layer = haloconv.Conv2d(2, 4, 3, padding=(1, 2), padding_mode=["zeros", "circular"])
    assert layer.padding_mode == ("zeros", "circular") and "padding_mode=('zeros', 'circular')" in str(layer)
    x = torch.randn(2, 2, 6, 7)
    want = convolved(x, layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False))
    for other in (layer, *others, haloconv.Conv2d.from_torch(layer, family="aten")):
        torch.testing.assert_close(other(x), want)
    model = torch.nn.Sequential(layer)
    assert len(haloconv.accelerate(model).already) == 1 and haloconv.restore(model) == []
    layer.padding_mode = "circular"
    torch.testing.assert_close(layer(x), convolved(x, layer))
    layer.padding_mode = ("zeros", "zeros")
    torch.testing.assert_close(layer(x), convolved(x, layer))
    assert haloconv.Conv2d(2, 4, 3, padding_mode=("reflect", "reflect")).padding_mode == "reflect"


def test_a_pair_is_not_restored_to_a_layer_that_has_none() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3, padding=1))
    haloconv.accelerate(model)
    model[1].padding_mode = ("zeros", "circular")
    with pytest.raises(RuntimeError, match=r"1 has padding_mode=\('zeros', 'circular'\)"):
        haloconv.restore(model)
    assert all(isinstance(each, haloconv.Conv2d) for each in model)
    model[1].padding_mode = "circular"
    assert haloconv.restore(model) == ["0", "1"] and type(model[1]) is torch.nn.Conv2d


def test_what_is_refused() -> None:
    for wrong in ("mirror", ("zeros",), ("zeros", "mirror"), ("zeros",) * 3, None, 3):
        with pytest.raises(ValueError, match="padding_mode must be one of"):
            haloconv.Conv2d(2, 2, 3, padding_mode=wrong)
        with pytest.raises(ValueError, match="padding_mode must be one of"):
            haloconv.conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3), padding=1, padding_mode=wrong)
        with pytest.raises(ValueError, match="padding_mode must be one of"):
            haloconv.conv1d(torch.randn(1, 2, 5), torch.randn(2, 2, 3), padding=1, padding_mode=wrong)


@pytest.mark.parametrize(
    ("mode", "options", "shape"),
    [
        ("reflect", {"padding": (3, 0)}, (1, 2, 3, 9)),
        ("circular", {"padding": (0, 4)}, (2, 3, 3)),
        ("replicate", {"padding": 1}, (1, 3, 5, 5)),
        ("circular", {"padding": 1, "dilation": 4}, (1, 2, 5, 5)),
        ("circular", {"padding": 1}, (5, 5)),
        ("reflect", {"padding": 1}, (1, 2, 0, 5)),
    ],
)
def test_errors_are_pytorchs(mode: str, options: dict[str, Any], shape: tuple[int, ...], rims_on_a_cpu: None) -> None:
    """Word by word: of its pad where that refuses, else of its convolution."""
    ours, theirs = (cls(2, 2, 3, padding_mode=mode, **options) for cls in (haloconv.Conv2d, torch.nn.Conv2d))
    with pytest.raises(RuntimeError) as want:
        theirs(torch.randn(shape))
    with pytest.raises(RuntimeError) as got:
        ours(torch.randn(shape))
    assert str(got.value) == str(want.value)


# --- whatever traces or transforms

LAYERS = tuple(
    haloconv.Conv2d(2, 3, 3, padding=sides, padding_mode=mode)
    for mode, sides in (("circular", 1), ("reflect", (0, 2, 1, 1)), (("replicate", "zeros"), (1, 2)), (PAIR, 2))
)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_compiled_exported_and_transformed(layer: haloconv.Conv2d, fresh_dynamo: None, rims_on_a_cpu: None) -> None:
    x = torch.randn(2, 2, 6, 7, requires_grad=True)
    want = convolved(x, layer)
    (want_dx,) = torch.autograd.grad(want.square().sum(), x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], want_dx)
    program = torch.export.export(layer, (x.detach(),))
    torch.testing.assert_close(program.module()(x), want)
    torch.testing.assert_close(torch.func.grad(lambda x: layer(x).square().sum())(x.detach()), want_dx)
    rows = torch.func.vmap(layer)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(rows, torch.stack([want, convolved(2 * x, layer)]))
    tangent = torch.randn_like(x)
    y, dy = torch.func.jvp(layer, (x.detach(),), (tangent,))
    torch.testing.assert_close(dy, convolved(tangent, layer) - layer.bias.view(-1, 1, 1))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent, dy)


@pytest.mark.parametrize("layer", LAYERS[::3], ids=str)
def test_autocast_empty_batches_and_tensors_without_data(layer: haloconv.Conv2d, rims_on_a_cpu: None) -> None:
    x = torch.randn(2, 2, 6, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y, again, want = layer(x), layer(x), convolved(x, layer)
    assert y.dtype == torch.bfloat16 and torch.equal(y, again)
    torch.testing.assert_close(y, want)
    assert layer(x[:0]).shape == (0, *want.shape[1:])
    meta = copy.deepcopy(layer).to("meta")
    assert meta(x.to("meta")).shape == want.shape
    torch.testing.assert_close(torch.fx.symbolic_trace(torch.nn.Sequential(layer))(x), layer(x))
    frozen = copy.deepcopy(layer).requires_grad_(False)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(frozen(leaf).sum(), leaf)
    torch.testing.assert_close(dx, torch.autograd.grad(convolved(leaf, frozen).sum(), leaf)[0])


def test_zero_padding_is_what_it_was(rims_on_a_cpu: None) -> None:
    """Of modes that pad nothing, too."""
    layer, x = haloconv.Conv2d(2, 2, 3, padding_mode="replicate"), torch.randn(1, 2, 5, 6)
    layer(x)
    ((_, call, _),) = vars(layer)["_calls"].values()
    assert call.function is torch.conv2d and call.native


@pytest.mark.parametrize(
    ("rows", "layout", "family", "cuts"),
    [
        (256, "nchw", "auto", True),
        (255, "nchw", "auto", False),
        (128, "nhwc", "auto", True),
        (127, "nhwc", "auto", False),
        (64, "nchw", "direct", True),
    ],
)
def test_auto_leaves_small_images_to_a_copy(
    rows: int, layout: Layout, family: str, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 16 MiB on they are cut, 8 in nhwc; what is asked for by name always is."""
    monkeypatch.setattr(padding, "choose", lambda problem, device, family: Choice("direct", "a test"))
    spec = ConvSpec(padding=(1, 1, 1, 1), family=family)
    posed = padding.Posed((4, 8, rows, 512), (8, 8, 3, 3), torch.float32, layout, spec, ("circular", "circular"))
    assert (posed.cut_on(torch.device("cuda")) is not None) is cuts
