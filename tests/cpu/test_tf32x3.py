"""precision="tf32x3": within fp32's own error limits on every kind of values, who takes it, and what else is told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import emulator, reference
from haloconv.bench.suite import SUITES, load_suite
from haloconv.choose.buckets import layer_key, read_layer, size_of
from haloconv.choose.rules import by_rule
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.halo_sm90.conv import launches
from haloconv.families.halo_sm90.conv.configs import best_tilings, storage_of, tilings
from haloconv.families.halo_sm90.conv.form import form_of
from haloconv.precision import convolution_precision, torch_precision
from haloconv.problem import ConvSpec, Layout, Problem, dense_request
from tests import oracle
from tests.cases import Case, Tensors, case, case_id, make
from tests.mutations.mutation import Mutation, planted
from tools.fingerprint import recording

CPU = torch.device("cpu")
LONG = (  # what the sums are cut by: chunks of 128, 64 and 32 bytes, with promotion after two, three and four taps
    case("products_4608", "512 channels of 9 taps", (1, 512, 3, 12), (16, 3, 3), padding=1),
    case("products_1125", "5 channels of 225 taps", (1, 5, 15, 20), (8, 15, 15), padding=7),
    case("products_400", "16 channels of 25 taps", (1, 16, 5, 20), (24, 5, 5), padding=2),
    case("products_27", "an image of three channels", (2, 3, 9, 17), (16, 3, 3), padding=1),
    case("products_3", "three channels, one tap", (1, 3, 9, 17), (16, 1, 1)),
)  # fmt: skip


def on_emulator(test: Callable) -> Callable:
    """Skipped where there is none."""
    reason = emulator.available()
    return pytest.mark.usefixtures("emulator_cache")(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


def forced(one: Case) -> Case:
    return replace(one, spec=one.spec._replace(precision="tf32x3", family="halo_sm90", strict=True))


def error_of(result: str, t: Tensors, one: Case) -> tuple[reference.Error, reference.Limits, float]:
    """The error, the limits of fp32 that nothing has raised, and the norm of the error by that of the scale."""
    with emulated_device(seed=1, sm_count=2):
        got = oracle.run(result, t, one)
    want, limits = oracle.expected(result, t, one.spec), oracle.limits_of(result, t, one.spec)
    length = reference.reduction_length(oracle.problem_of(result, t, one.spec))
    assert limits.norm == reference.IEEE_NORM * math.sqrt(math.log2(max(2, length)))
    norm = ((got.double() - want.value).norm() / want.scale.norm()).item()
    return reference.measure_error(got, want, limits), limits, norm


@pytest.mark.parametrize("result", ["fprop", "dgrad"])
@pytest.mark.parametrize("one", LONG, ids=case_id)
@on_emulator
def test_errors_stay_below_the_limits_of_fp32(one: Case, result: str) -> None:
    """Of every kind of values; those that cancel are held against the convolution of absolute values.

    The emulator cuts sums as a GPU does, to the bit.
    """
    for kind in ("normal", "positive", "wide", "cancellation"):
        error, limits, by_scale = error_of(result, make(one, torch.float32, kind=kind), forced(one))
        norm = by_scale if kind == "cancellation" else error.norm
        assert norm < limits.norm, f"{kind}: {norm:.2e}, {limits}"
        assert error.worst < limits.element + limits.rounding, f"{kind}: {error}, {limits}"


@on_emulator
def test_sums_that_are_never_promoted_are_above_the_limits_of_fp32() -> None:
    """What the limits above are worth: of 1125 products wgmma cuts off more than they allow."""
    place = "[i / (RUN / 2)][i % (RUN / 2)]"
    begin = f"if (TERMS > 1) for (int i = 0; i < TILE_PX / 2; ++i) taps.part{place} = accumulate ? sums{place} : 0;"
    edits = (
        ("TERMS / 16, -1};", "TERMS / 16, -1};\n" + begin),
        ("pixels, run, tap > 0);", "pixels, run, true);"),
        ("sums[j][i] += part[j][i];", "sums[j][i] = part[j][i];"),
    )
    fault = Mutation("never promoted", "halo_sm90/conv", "wgmma cuts at each step", edits, LONG[1].name, "fprop")
    with planted(fault):
        error, limits, _ = error_of("fprop", make(LONG[1], torch.float32, kind="positive"), forced(LONG[1]))
    assert error.norm > 2 * limits.norm


@pytest.mark.parametrize(
    ("name", "layout", "fprop", "dgrad"),
    [
        ("A", "nchw", "128x1 64", "128x1 64 pack"),
        ("A", "nhwc", "128x1 64", "128x1 64 pack"),
        ("B", "nchw", "128x1 128", "128x1 64 pack"),
        ("B", "nhwc", "64x2 128 keeps", "128x1 64 pack"),
        ("C", "nchw", "128x1 128", "128x1 128"),
        ("C", "nhwc", "64x1 128 keeps", "64x1 128"),
        ("unet_3x3", "nchw", "128x1 128", "128x1 128"),
        ("aspp_dil12", "nchw", "64x2 128 shared_tile", "64x2 128 shared_tile"),
        ("row_1x15", "nchw", "128x1 128", "128x1 128"),
        ("resnet_56", "nchw", "64x2 128", "64x2 128"),
    ],
)
def test_the_cost_model_takes_the_tiles_that_a_gpu_found_fastest(
    name: str, layout: Layout, fprop: str, dgrad: str
) -> None:
    """Pixels of a run and runs, bytes of a chunk, and what else tells a tile: of 4 to 7 that an H200 timed for each."""
    layer = next(each for each in load_suite(SUITES / "suite.toml") if each.name == name)
    for direction, want in (("fprop", fprop), ("dgrad", dgrad)):
        request = dense_request(layer.problem(direction, "tf32x3", layout), CPU)
        best = best_tilings(form_of(request.problem), storage_of(request), 132)[0].shape
        marks = [mark for mark in ("keeps", "shared_tile") if getattr(best, mark)] + ["pack"] * (best.pack_h == 2)
        assert " ".join([f"{best.run}x{best.runs} {best.chunk_bytes}", *marks]) == want
        assert not best.flat


@on_emulator
def test_tiny_values_lose_bits_of_their_second_term() -> None:
    """Below 2^-113 a value is kept to a multiple of 2^-136 alone: the sentence of docs/precision.md, to the bit."""
    one = forced(replace(LONG[3], bias=False))
    t = make(one, torch.float32)
    for power, kept in ((-112, True), (-120, False)):
        x = (1 + t.x.abs() % 1) * 2.0**power
        scaled = t._replace(x=x, w=t.w * 2.0**60)
        error, limits, _ = error_of("fprop", scaled, one)
        assert (error.norm < limits.norm) == kept
        ones = scaled._replace(x=torch.ones_like(x))
        lost = oracle.expected("fprop", ones, one.spec).scale * (0 if kept else 2.0**-137)
        want = oracle.expected("fprop", scaled, one.spec)
        with emulated_device(seed=1):
            got = oracle.run("fprop", scaled, one)
        rounding = (limits.element + limits.rounding) * want.scale
        assert ((got.double() - want.value).abs() <= rounding + lost).all()


@on_emulator
def test_the_largest_values_stay_finite_and_sums_beyond_them_are_infinite() -> None:
    one = forced(replace(LONG[3], bias=False))
    t = make(one, torch.float32)
    largest = torch.full_like(t.x, torch.finfo(torch.float32).max).copysign(t.x)  # whose rounding to TF32 is infinite
    small = t._replace(x=largest, w=t.w * 2.0**-4)
    error, limits, _ = error_of("fprop", small, one)
    assert error.norm < limits.norm
    beyond = t._replace(x=largest.abs(), w=t.w.abs() * 2.0**8)
    with emulated_device(seed=1):
        assert (oracle.run("fprop", beyond, one) == math.inf).all()


@on_emulator
def test_a_layer_trains_in_it() -> None:
    """In all three directions, where the family was asked for by name."""
    x = torch.randn(1, 8, 6, 9, requires_grad=True)
    layer = haloconv.Conv2d(8, 16, 3, padding=1, precision="tf32x3", family="halo_sm90")
    with emulated_device(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).sum().backward()
        assert "precision=tf32x3, family=halo_sm90" in repr(layer)
    spec = ConvSpec(padding=(1, 1, 1, 1), precision="tf32x3", family="halo_sm90")
    t = Tensors(x.detach(), layer.weight.detach(), layer.bias.detach(), torch.ones(1, 16, 6, 9))
    oracle.check("dgrad", x.grad, t, spec)
    oracle.check("wgrad", layer.weight.grad, t, spec)


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.tensor_cores])
def test_families_on_tensor_cores_without_it_say_so(name: str) -> None:
    family, reasons = FAMILIES[name], {}
    for direction in family.directions:
        problem = Problem(direction, 2, 32, 16, 16, 32, 3, 3, padding=(1, 1, 1, 1), precision="tf32x3")
        problem = replace(problem, r=5, s=5, groups=32) if family.depthwise else problem
        with recording():
            reasons[direction] = family.why_not(problem, CPU)
    taken = {direction for direction, reason in reasons.items() if reason is None}
    assert taken == ({"fprop", "dgrad", "wgrad"} if name in ("halo_sm90", "depthwise_toeplitz") else set())
    sentence = "halo_sm90 and depthwise_toeplitz alone have precision='tf32x3'"
    assert all(reason is None or sentence in reason for reason in reasons.values())


def test_without_a_rule_it_gets_what_full_fp32_gets() -> None:
    for groups, family in ((1, "aten"), (32, "depthwise")):
        problem = Problem("fprop", 64, 32, 64, 64, 32, 3, 3, groups=groups, stride=(2, 2), precision="tf32x3")
        with recording():
            full = by_rule(replace(problem, precision="ieee"), CPU)
            assert by_rule(problem, CPU) == full and full.family == family


@pytest.mark.parametrize(
    ("changes", "family"),
    [({}, "halo_sm90"), ({"direction": "dgrad"}, "halo_sm90"), ({"n": 1, "h": 40}, "aten"), ({"r": 1, "s": 1}, "aten"),
     ({"k": 16}, "aten"), ({"stride": (2, 2), "n": 64}, "aten"), ({"direction": "wgrad"}, "halo_sm90"),
     ({"direction": "wgrad", "c": 256}, "aten")],
)  # fmt: skip
def test_the_rule_names_layers_of_many_taps_channels_and_pixels(changes: dict, family: str) -> None:
    problem = Problem("fprop", 16, 32, 64, 64, 32, 3, 3, padding=(1, 1, 1, 1), precision="tf32x3")
    with recording():
        assert by_rule(replace(problem, **changes), CPU).family == family


def test_pytorch_computes_it_in_full_fp32() -> None:
    for before in ("tf32", "ieee"):
        with convolution_precision(before):
            with convolution_precision("tf32x3"):
                assert torch_precision() == "ieee"
            assert torch_precision() == before


def test_records_and_limits_know_it() -> None:
    problem = Problem("dgrad", 8, 32, 64, 64, 64, 5, 9, precision="tf32x3")
    full = replace(problem, precision="ieee")
    assert problem.precision_label == "tf32x3" and " tf32x3 nchw" in layer_key(problem)
    assert read_layer(layer_key(problem), size_of(problem)) == problem
    assert reference.error_limits(problem) == reference.error_limits(full)
    assert layer_key(problem) != layer_key(full)


PART_TAPS = {128: 2, 64: 3, 32: 4}  # by bytes of a chunk


def test_sums_and_partial_sums_fit_registers() -> None:
    """No tile has more than 128 pixels; partial sums are those of two taps of 32 channels, of four taps of 8.

    Wide layers may take their channels by 16, so that lines of 128 pixels fit where filters are dilated.
    """
    for channels, taps in ((64, {2, 3}), (16, {3}), (8, {4})):
        problem = Problem("fprop", 2, channels, 40, 200, 128, 3, 3, precision="tf32x3")
        request = dense_request(problem, CPU)
        shapes = [tiling.shape for tiling in tilings(form_of(problem), storage_of(request))]
        assert (
            max(shape.tile_px for shape in shapes) == 128 and {PART_TAPS[shape.chunk_bytes] for shape in shapes} == taps
        )
        assert {shape.products for shape in shapes} == {3}
    shape_text = Path(launches.__file__).with_name("shape.cuh").read_text(encoding="utf-8")
    assert "PART_TAPS = CHUNK_BYTES == 128 ? 2 : CHUNK_BYTES == 64 ? 3 : 4;" in shape_text


def test_other_types_multiply_exactly_whatever_is_asked() -> None:
    x, w = torch.randn(1, 4, 6, 6, dtype=torch.float64), torch.randn(8, 4, 3, 3, dtype=torch.float64)
    assert torch.equal(haloconv.conv2d(x, w, precision="tf32x3"), torch.nn.functional.conv2d(x, w))
