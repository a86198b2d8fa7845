"""How a batch of rims is convolved: on whose family, and with rows and columns in which place."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from random import Random

import pytest
import torch

import haloconv.gathered
from haloconv import plan as plans
from haloconv import rim_batch, strips
from haloconv.bench.suite import SUITES, Case, load_suite
from haloconv.choose.choice import Choice
from haloconv.choose.rules import by_rule
from haloconv.families import FAMILIES
from haloconv.gathered import gathered
from haloconv.padding import Posed as PosedPadding
from haloconv.problem import DIRECTIONS, ConvSpec, Direction
from haloconv.rim_batch import Asked, packed_windows, posed, windows_of
from haloconv.rims import Cut, axis_of, cut_of
from haloconv.strips import Job, convolve_cut
from tests.spatial_problems import draw, integers
from tools.measured import facts_of, gpus, stood_in

CPU = torch.device("cpu")
CASES = {case.name: case for case in load_suite(SUITES / "rims.toml")}


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors count as those of an NVIDIA H200, and "auto" goes by the rules that were read off it."""
    monkeypatch.setattr(rim_batch, "choose", lambda problem, device: Choice(*by_rule(problem, device)[:2]))
    rim_batch._posed.cache_clear()
    with stood_in(next(facts_of(gpu) for gpu in gpus() if "H200" in gpu["name"])):
        yield
    rim_batch._posed.cache_clear()


def asked(case: Case, direction: Direction, **spec: object) -> Asked:
    """The rims of a case of one shard, in TF32."""
    problem = case.problem(direction, "tf32", "nchw")
    modes = case.padding_mode if isinstance(case.padding_mode, tuple) else (case.padding_mode,) * 2
    given = ConvSpec(problem.stride, problem.padding, problem.dilation, precision="tf32")._replace(**spec)
    cut = PosedPadding(problem.x_shape, problem.w_shape, torch.float32, "nchw", given, modes)._cut()
    assert cut is not None
    return Asked(direction, cut, given, problem.n, problem.c, problem.w_shape, torch.float32, "nchw", CPU)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["A_same_circular", "B_same_reflect", "C_same_replicate", "unet_256_circular"])
def test_rims_run_on_the_family_of_their_interior(name: str, direction: Direction, h200: None) -> None:
    """By themselves the rules would leave those of C and U-Net to PyTorch: they have fewer pixels than any layer."""
    rows, columns = posed(asked(CASES[name], direction))
    assert (rows.upright, columns.upright) == (False, True)
    assert rows.spec.family == columns.spec.family == "halo_sm90"
    assert min(columns.strip_shape[2:]) == columns.strip_shape[2], "rows of columns"


def test_rules_alone_would_leave_rims_to_pytorch(h200: None) -> None:
    question = asked(CASES["C_same_circular"], "fprop")
    for rims in posed(question):
        taps = (*question.w_shape[:2], 3, 3)
        problem = plans.problem_of("fprop", rims.strip_shape, taps, rims.spec, torch.float32, "nchw")
        assert by_rule(problem, CPU).family == "aten"


def test_auto_chooses_for_rims_that_the_family_does_not_take(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = lambda self, problem, device: "too thin" if problem.h < 100 else None  # noqa: E731
    monkeypatch.setattr(type(FAMILIES["halo_sm90"]), "why_not", refusal)
    assert [rims.spec.family for rims in posed(asked(CASES["C_same_circular"], "fprop"))] == ["auto", "auto"]


def test_a_family_that_was_named_is_kept(h200: None) -> None:
    found = posed(asked(CASES["C_same_circular"], "fprop", family="direct", strict=True))
    assert all(rims.spec.family == "direct" and rims.spec.strict for rims in found)


def test_where_pytorch_runs_the_interior_auto_chooses(h200: None) -> None:
    small = replace(CASES["unet_64_circular"], input=(1, 64, 20, 20), filters=64)
    assert {rims.spec.family for rims in posed(asked(small, "fprop"))} == {"auto"}


def cut_of_axes() -> Cut:
    axes = (axis_of(12, 3, 1, 2, (2, 2), "circular"), axis_of(9, 4, 2, 1, (3, 0), "reflect"))
    return cut_of(axes, ((0, 12), (0, 9)), tuple((0, axis.outputs) for axis in axes), (0, 0))


def test_upright_rims_are_a_transposed_convolution() -> None:
    """Stride, dilation, padding and taps change places; what is read and computed is the same."""
    spec, w = ConvSpec((1, 2), (2, 2, 3, 0), (2, 1)), torch.randint(-3, 4, (2, 3, 3, 4)).double()
    rows, columns = posed(Asked("fprop", cut_of_axes(), spec, 2, 3, (2, 3, 3, 4), torch.float64, "nchw", CPU))
    assert columns.upright and (columns.spec.stride, columns.spec.dilation) == ((2, 1), (1, 2))
    assert not rows.upright and (rows.spec.stride, rows.spec.dilation) == ((1, 2), (2, 1))
    strip = torch.randint(-3, 4, columns.strip_shape).double()
    piece = columns.batch[0]
    lying = torch.conv2d(strip, w.transpose(2, 3), None, columns.spec.stride, 0, columns.spec.dilation)
    upright = torch.conv2d(strip.transpose(2, 3), w, None, spec.stride, 0, spec.dilation)
    assert torch.equal(lying.transpose(2, 3), upright)
    assert upright.shape[2:] == (piece.rows.end - piece.rows.begin, piece.columns.end - piece.columns.begin)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_windows_are_those_of_each_rim(order: torch.memory_format) -> None:
    """Also of y that is a part of a larger tensor; upright ones are packed transposed."""
    y = torch.randn(2, 5, 14, 9).contiguous(memory_format=order)[:, :, 1:13]
    for upright, batch in zip((False, True), cut_of_axes().batches, strict=True):
        views = [y[:, :, each.rows.begin : each.rows.end, each.columns.begin : each.columns.end] for each in batch]
        wanted = torch.stack(views, 1)
        assert torch.equal(windows_of(y, batch), wanted) and windows_of(y, batch)._base is not None
        packed = packed_windows(y, batch, upright)
        assert torch.equal(packed, (wanted.transpose(3, 4) if upright else wanted).flatten(0, 1))
        assert packed.is_contiguous(memory_format=order)


def test_what_a_cuda_graph_reads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index of pixels: a replay reads that memory, whatever batches have come since."""
    monkeypatch.setattr("haloconv.gathered._indices", {})
    monkeypatch.setattr("haloconv.gathered._captured", {})
    rows, columns = cut_of_axes().batches
    x, kept = torch.randn(1, 1, 12, 9), []
    for captured in (False, True):
        monkeypatch.setattr("haloconv.gathered.is_capturing", lambda device, captured=captured: captured)
        assert gathered(x, rows, (0, 0), "nchw", False) is not None
        kept.append(len(haloconv.gathered._captured))
    (index,) = map(weakref.ref, haloconv.gathered._indices.values())
    monkeypatch.setattr("haloconv.gathered._MOST", 1)
    monkeypatch.setattr("haloconv.gathered.is_capturing", lambda device: False)
    assert gathered(x, columns, (0, 0), "nchw", False) is not None
    assert index() is not None and len(haloconv.gathered._indices) == 1 and kept == [0, 1]


def test_gradients_of_strips_are_of_what_is_outside_alone(h200: None) -> None:
    """Of A's rims 4 rows and 12 columns, where strips have 12 and 36; pieces of a batch differ in where zeros are."""
    rows, columns = posed(asked(CASES["A_same_circular"], "dgrad"))
    assert (rows.strip_shape, columns.strip_shape) == ((16, 32, 4, 536), (16, 32, 12, 512))
    assert [piece.padding for piece in rows.batch] == [(0, 8, 0, 0), (8, 0, 0, 0)]
    assert rows.spec.padding == (8, 8, 0, 0) and columns.spec.padding == (24, 24, 4, 4)
    (only,) = posed(asked(CASES["A_same_zeros_by_circular"], "dgrad"))
    assert only.strip_shape == columns.strip_shape


def test_fuzzed_gradients_are_those_of_a_padded_copy() -> None:
    """Of 300 random images that are one shard, with rims at one side, at two, and at two of unequal width."""
    random, kinds = Random(2), Counter()
    for number in range(300):
        case = draw(random)
        if number % 3:
            top, bottom, left, right = (max(each, 1) for each in case.sides)
            sides = (min(top, bottom),) * 2 + (min(left, right),) * 2
            x_shape = (*case.x[:2], case.x[2] + 9, case.x[3] + 8)
            case = replace(case, stride=(1, 1), sides=sides, x=x_shape)
        x, w, b = case.tensors()
        spec = ConvSpec(case.stride, case.sides, case.dilation, case.groups)
        given = PosedPadding(case.x, case.w, x.dtype, plans.result_layout(x, w), spec, case.modes)
        cut = given._cut()
        if cut is None:
            continue
        kinds.update(len(batch) for batch in cut.outside)
        y, expected = convolve_cut(x, w, b, Job(cut, (0, 0), spec)), case.in_one_process(x, w, b)
        dy = torch.randint_like(expected, -3, 4)
        found, wanted = (torch.autograd.grad(each, (x, w, b), dy) for each in (y, expected))
        assert torch.equal(y, expected) and all(map(torch.equal, found, wanted)), case
    assert kinds[1] > 20 and kinds[2] > 20, kinds


def test_strips_are_gathered_where_rows_lie_end_to_end() -> None:
    """And else, of a part of an image, put together of rectangles."""
    cut, x = cut_of_axes(), torch.randn(2, 3, 12, 11)
    batch, whole = cut.batches[1], x[..., :9].contiguous()
    expected = gathered(whole, batch, (0, 0), "nchw", True)
    assert expected is not None and gathered(x[..., :9], batch, (0, 0), "nchw", True) is None
    job = Job(cut, (0, 0), ConvSpec((1, 2), (2, 2, 3, 0), (2, 1)))
    assert torch.equal(strips._strips(x[..., :9], {}, job)[1], expected)
    part = whole[:, 1:]
    assert torch.equal(gathered(part, batch, (0, 0), "nchw", True), expected[:, 1:])


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_while_convolutions_are_noted(order: torch.memory_format) -> None:
    """Then PyTorch's convolutions run, and autograd records what strips are put together of."""
    x, w = integers(2, 3, 12, 9).detach().contiguous(memory_format=order).requires_grad_(), integers(2, 3, 3, 4)
    spec, found = ConvSpec((1, 2), (2, 2, 3, 0), (2, 1)), []
    for about in (plans.noting(lambda _: None), nullcontext()):
        with about:
            y = convolve_cut(x, w, None, Job(cut_of_axes(), (0, 0), spec))
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))))
    assert all(map(torch.equal, *found))
