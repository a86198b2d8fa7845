"""Interior and rims: the windows are the output, strips hold what they should, and results are the padded copy's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haloconv import plan, strips
from haloconv.problem import PADDING_MODES, ConvSpec
from haloconv.rims import NOBODY, Axis, Piece, axis_of, cut_of, even_bounds, output_bounds, sides_of
from haloconv.strips import Job, convolve_cut

Tensor = torch.Tensor
INTEGERS = st.integers
EXAMPLES = settings(max_examples=120, deadline=None, derandomize=True)


@st.composite
def an_axis(draw: st.DrawFn, most: int = 9) -> Axis:
    extent, mode = draw(INTEGERS(1, most)), draw(st.sampled_from(PADDING_MODES))
    side = INTEGERS(0, min(4, {"circular": extent, "reflect": extent - 1}.get(mode, 4)))
    taps, stride, dilation, sides = draw(INTEGERS(1, 4)), draw(INTEGERS(1, 3)), draw(INTEGERS(1, 2)), (side, side)
    axis = axis_of(extent, taps, stride, dilation, (draw(sides[0]), draw(sides[1])), mode)
    assume(extent + axis.before + axis.after > dilation * (taps - 1))
    return axis


@st.composite
def bounds_of(draw: st.DrawFn, extent: int) -> tuple[int, ...]:
    """Of up to four shards, some of them empty."""
    return (0, *sorted(draw(st.lists(INTEGERS(0, extent), max_size=3))), extent)


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).double()


def padded(x: Tensor, axes: tuple[Axis, Axis]) -> Tensor:
    """The copy that PyTorch would make, one dimension after the other."""
    rows, columns = axes
    for axis, sides in ((rows, (0, 0, rows.before, rows.after)), (columns, (columns.before, columns.after, 0, 0))):
        x = torch.nn.functional.pad(x, sides, mode="constant" if axis.mode == "zeros" else axis.mode)
    return x


@EXAMPLES
@given(st.data())
def test_windows_of_all_shards_are_the_outputs_and_read_what_padding_would_bring(data: st.DataObject) -> None:
    axis = data.draw(an_axis())
    inputs, outputs = data.draw(bounds_of(axis.extent)), data.draw(bounds_of(axis.outputs))
    assume(len(inputs) == len(outputs))
    copy = padded(torch.arange(1.0, axis.extent + 1).view(1, 1, -1, 1), (axis, Axis(1, 1))).flatten().tolist()
    seen = []
    for index, begin in enumerate(outputs[:-1]):
        sides = sides_of(axis, inputs, outputs, index)
        windows = [sides.before, sides.interior, sides.after] if sides.interior else [sides.all]
        for window in filter(None, windows):
            seen += range(begin + window.begin, begin + window.end)
            pixels = [0.0] * window.padding[0]
            for run in window.runs:
                assert run.owner == index or window is not sides.interior
                assert run.owner == NOBODY or inputs[run.owner] + run.start < inputs[run.owner + 1]
                first = 0 if run.owner == NOBODY else inputs[run.owner] + run.start + 1
                pixels += [first and float(first + i * run.step) for i in range(run.length)]
            pixels += [0.0] * window.padding[1]
            first, last = axis.span(begin + window.begin, begin + window.end)
            assert window.begin == window.end or pixels == copy[first + axis.before : last + axis.before]
    assert seen == list(range(axis.outputs))


@EXAMPLES
@given(st.data())
def test_outputs_follow_the_shards_of_their_inputs(data: st.DataObject) -> None:
    axis = data.draw(an_axis())
    inputs = data.draw(bounds_of(axis.extent))
    outputs = output_bounds(axis, inputs)
    assert (outputs[0], outputs[-1]) == (0, axis.outputs) and all(low <= high for low, high in pairwise(outputs))
    same = Axis(axis.extent, 3, before=1, after=1, mode="zeros")
    assert output_bounds(same, inputs) == inputs
    assert output_bounds(Axis(8, 3, 2, before=1, after=1), (0, 4, 8)) == (0, 2, 4)


def test_even_bounds_are_those_of_chunk() -> None:
    for extent in range(1, 10):
        for shards in range(1, 6):
            lengths = [len(each) for each in torch.arange(extent).chunk(shards)]
            found = [high - low for low, high in pairwise(even_bounds(extent, shards))]
            assert found == lengths + [0] * (shards - len(lengths))


def test_rims_are_thin() -> None:
    """Of a layer with same padding the interior is all but its border, and reads the image as it is."""
    axes = (axis_of(64, 3, 1, 1, (1, 1), "circular"), axis_of(48, 5, 1, 2, (4, 4), "reflect"))
    cut = cut_of(axes, ((0, 64), (0, 48)), ((0, 64), (0, 48)), (0, 0))
    assert isinstance(cut.interior, Piece) and cut.interior.padding == (0, 0, 0, 0)
    assert [(each.rows.begin, each.rows.end, each.columns.begin, each.columns.end) for each in cut.rims] == [
        (0, 1, 0, 48), (63, 64, 0, 48), (1, 63, 0, 4), (1, 63, 44, 48),
    ]  # fmt: skip
    assert [(each.rows.length, each.columns.length) for each in cut.rims] == [(3, 56), (3, 56), (64, 12), (64, 12)]
    assert list(map(len, cut.batches)) == [2, 2]


def test_padding_that_pytorch_refuses_is_refused() -> None:
    for mode, least in (("circular", 4), ("reflect", 3)):
        with pytest.raises(RuntimeError, match=f"{mode} padding of {least}"):
            axis_of(3, 3, 1, 1, (0, least), mode)
        assert axis_of(3, 3, 1, 1, (0, least - 1), mode).after == least - 1
    with pytest.raises(ValueError, match="padding_mode must be one of"):
        axis_of(3, 3, 1, 1, (0, 0), "wrap")


@EXAMPLES
@given(st.data())
def test_results_and_gradients_are_those_of_a_padded_copy(data: st.DataObject) -> None:
    axes = (data.draw(an_axis()), data.draw(an_axis()))
    groups, whole = data.draw(st.sampled_from((1, 2))), tuple(((0, a.extent), (0, a.outputs)) for a in axes)
    torch.manual_seed(data.draw(INTEGERS(0, 99)))
    x = integers(2, 2 * groups, axes[0].extent, axes[1].extent).requires_grad_()
    if data.draw(st.booleans()):
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    w = integers(2 * groups, 2, axes[0].taps, axes[1].taps).requires_grad_()
    b = integers(2 * groups).requires_grad_()
    spec = ConvSpec((axes[0].stride, axes[1].stride), (0, 0, 0, 0), (axes[0].dilation, axes[1].dilation), groups)
    job = Job(cut_of(axes, *zip(*whole, strict=True), (0, 0)), (0, 0), spec)
    expected = torch.nn.functional.conv2d(padded(x, axes), w, b, spec.stride, 0, spec.dilation, groups)
    y = convolve_cut(x, w, b, job)
    with torch.no_grad():
        assert torch.equal(convolve_cut(x, w, b, job), expected)
    assert torch.equal(y, expected)
    dy = integers(*y.shape).requires_grad_()
    first = [torch.autograd.grad(each, (x, w, b), dy, create_graph=True) for each in (y, expected)]
    again = torch.autograd.grad(convolve_cut(x, w, b, job), (x, w, b), dy)
    assert all(torch.equal(*each) for each in zip(*first, strict=True))
    assert all(torch.equal(*each) for each in zip(first[1], again, strict=True))
    on_gradients = [integers(*each.shape) for each in first[0][:2]]
    second = [torch.autograd.grad(each[:2], (x, w, dy), on_gradients) for each in first]
    assert all(torch.equal(*each) for each in zip(*second, strict=True))


def test_no_copy_of_the_image_is_kept_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    axes = (axis_of(64, 3, 1, 1, (1, 1), "circular"), axis_of(64, 3, 1, 1, (1, 1), "circular"))
    job = Job(cut_of(axes, ((0, 64),) * 2, ((0, 64),) * 2, (0, 0)), (0, 0), ConvSpec())
    x, w = torch.randn(1, 4, 64, 64, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        convolve_cut(x, w, None, job)
    others = sum(each.numel() for each in kept if each.data_ptr() not in (x.data_ptr(), w.data_ptr()))
    assert 0 < others < 0.2 * x.numel()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_strips_by_indices_are_those_by_blocks(order: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and memory order; and pixels of other shards are never taken from this one."""
    x = integers(2, 3, 10, 9).contiguous(memory_format=order)
    for mode in PADDING_MODES[1:]:
        axes = (axis_of(10, 3, 1, 2, (3, 1), mode), axis_of(9, 4, 2, 1, (2, 2), mode))
        whole = [((0, axis.extent), (0, axis.outputs)) for axis in axes]
        job = Job(cut_of(axes, *zip(*whole, strict=True), (0, 0)), (0, 0), ConvSpec(stride=(1, 2), dilation=(2, 1)))
        found = strips._strips(x, {}, job)
        monkeypatch.setattr(strips, "gathered", lambda *_: None)
        expected = strips._strips(x, {}, job)
        monkeypatch.undo()
        assert sum(map(len, found)) == 4 * len(x) and all(each.is_contiguous(memory_format=order) for each in found)
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert strips.gathered(x, job.cut.batches[0], (1, 0), "nchw", False) is None


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_rims_of_one_form_are_one_batch(order: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each direction one convolution of the image, one of both rims of rows, and one of both rims of columns."""
    x = integers(2, 3, 10, 9).contiguous(memory_format=order).requires_grad_()
    w = integers(4, 3, 3, 3).requires_grad_()
    axes = (axis_of(10, 3, 1, 1, (1, 1), "circular"), axis_of(9, 3, 1, 1, (1, 1), "reflect"))
    job = Job(cut_of(axes, ((0, 10), (0, 9)), ((0, 10), (0, 9)), (0, 0)), (0, 0), ConvSpec())
    images = {name: [] for name in ("fprop", "dgrad", "wgrad")}
    for name, seen in images.items():
        run = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *args, run=run, seen=seen: (seen.append(len(args[0])), run(*args))[1])
    y = strips.convolve_cut(x, w, None, job)
    y.sum().backward()
    assert {name: sorted(each) for name, each in images.items()} == dict.fromkeys(images, [2, 4, 4])
    padded = torch.nn.functional.pad(torch.nn.functional.pad(x, (0, 0, 1, 1), "circular"), (1, 1, 0, 0), "reflect")
    want = torch.nn.functional.conv2d(padded, w)
    assert torch.equal(y, want)
    assert all(map(torch.equal, (x.grad, w.grad), torch.autograd.grad(want.sum(), (x, w))))
