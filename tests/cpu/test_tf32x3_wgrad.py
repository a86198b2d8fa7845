"""Weight gradients in precision="tf32x3": exact on integers, within fp32's limits, planted faults, registers."""

from __future__ import annotations

import pytest
import torch

from haloconv.bench.suite import SUITES, load_suite
from haloconv.emulator import EmulatorError, emulated_device
from haloconv.families.halo_sm90.wgrad import wgrad
from haloconv.jit import compile as compiler
from haloconv.problem import Layout, Problem, dense_request
from tests import oracle
from tests.cases import Case, Tensors, case, case_id, generator, make, store
from tests.cpu.test_halo_sm90_sources import SERIALIZED, log_of
from tests.cpu.test_tf32x3 import error_of, forced, on_emulator
from tests.emulated import with_every_not_finite
from tests.emulated_halo_sm90_wgrad import CASES
from tests.emulated_halo_sm90_wgrad import forced as forced_shape
from tests.exact import integers
from tests.mutations.mutation import Mutation, planted

pytestmark = pytest.mark.of_kernel("halo_sm90/wgrad")

CPU = torch.device("cpu")
BY_NAME = {one.name: one for one in CASES}
SUMS = (  # lines of whole partial sums and of less; steps that consumers share; short lines in boxes
    case("products_19200", "1x1, steps are shared", (1, 8, 300, 64), (8, 1, 1)),
    case("products_1040", "lines of five steps", (2, 16, 13, 40), (24, 3, 3), padding=1),
    case("products_962_nhwc", "lines that end in the middle of a step", (2, 16, 13, 37), (24, 3, 3), padding=1,
         storage="channels_last"),
    case("products_196", "several lines of a step in a box", (4, 16, 7, 7), (40, 3, 3), padding=1),
    case("products_1", "a single pixel", (1, 8, 1, 1), (8, 1, 1)),
)  # fmt: skip
EXACT = (
    "sm90_wgrad_rows", "sm90_wgrad_rows_nhwc", "sm90_wgrad_strips", "sm90_wgrad_classes_nhwc", "sm90_wgrad_narrow",
    "sm90_wgrad_pairs", "sm90_wgrad_fours_nhwc", "sm90_wgrad_stride_classes", "sm90_wgrad_nine", "sm90_wgrad_sliced",
    "sm90_wgrad_pointwise", "sm90_wgrad_beyond", "sm90_wgrad_row_filter",
)  # fmt: skip


SHAPED = {  # tiles that the model does not take for small layers, as tests.emulated_halo_sm90_wgrad names them
    "wgrad columns shared": "sm90_wgrad_wide",
    "wgrad channels shared": "sm90_wgrad_strips_nhwc",
    "wgrad filters shared": "sm90_wgrad_wide_nhwc",
    "wgrad steps shared": "sm90_wgrad_narrow",
    "wgrad columns in turn": "sm90_wgrad_row_filter",
    "wgrad short lines": "sm90_wgrad_short_nhwc",
    "wgrad one part": "sm90_wgrad_classes",
    "wgrad many parts": "sm90_wgrad_classes_nhwc",
}


def _exact(one: Case, splits_x: bool) -> Tensors:
    """Integers: 13 bits of one operand, whose second terms count, and 1 or -1 of the other."""
    t, gen = make(one, torch.float32), generator(f"{one.name} {splits_x}", CPU)
    most = ((1 << 13) - 1, 1) if splits_x else (1, (1 << 13) - 1)
    x, dy = (
        store(integers(each.shape, each.dtype, gen, largest), one.storage)
        for each, largest in zip((t.x, t.dy), most, strict=True)
    )
    return t._replace(x=x, dy=dy)


def _check_exact(one: Case, seed: int = 0) -> None:
    for splits_x in (True, False):
        t = _exact(one, splits_x)
        with emulated_device(seed=seed, sm_count=2):
            got = oracle.run("wgrad", t, forced(one))
        oracle.check_exact("wgrad", got, t, one.spec)


@pytest.mark.parametrize("name", EXACT)
@on_emulator
def test_integers_of_13_bits_are_summed_exactly(name: str) -> None:
    _check_exact(BY_NAME[name])


@pytest.mark.parametrize("shape", SHAPED)
@on_emulator
def test_they_are_in_tiles_of_every_kind(shape: str) -> None:
    with forced_shape(shape):
        _check_exact(BY_NAME[SHAPED[shape]], seed=1)


@pytest.mark.parametrize("one", SUMS, ids=case_id)
@on_emulator
def test_errors_stay_below_the_limits_of_fp32(one: Case) -> None:
    for kind in ("normal", "positive", "wide", "cancellation"):
        error, limits, by_scale = error_of("wgrad", make(one, torch.float32, kind=kind), forced(one))
        norm = by_scale if kind == "cancellation" else error.norm
        assert norm < limits.norm, f"{kind}: {norm:.2e}, {limits}"
        assert error.worst < limits.element + limits.rounding, f"{kind}: {error}, {limits}"


def _check_not_finite(name: str) -> None:
    one = BY_NAME[name]
    t = make(one, torch.float32)
    for changed in (t._replace(x=with_every_not_finite(t.x)), t._replace(dy=with_every_not_finite(t.dy))):
        with emulated_device(seed=1, sm_count=2):
            got = oracle.run("wgrad", changed, forced(one))
        oracle.check("wgrad", got, changed, one.spec)


@pytest.mark.parametrize("name", ["sm90_wgrad_loose", "sm90_wgrad_loose_nhwc", "sm90_wgrad_loose_rows"])
@on_emulator
def test_infinities_and_nan_stand_where_fp32_has_them(name: str) -> None:
    _check_not_finite(name)


_SMALL = "multiply(x.second[i], i, 0, i > 0), multiply(x.first[i], i, 1, true);"
_NEXT = "accumulate);\n    };\n    const auto settle"
FAULTS = {  # name: case, edit
    "no second term of x": ("sm90_wgrad_rows", (_SMALL, "multiply(x.first[i], i, 1, i > 0);")),
    "no second term of dy": ("sm90_wgrad_rows", (_SMALL, "multiply(x.second[i], i, 0, i > 0);")),
    "no large product": ("sm90_wgrad_rows", ("multiply(x.first[i], i, 0, true);", "")),
    "the first term twice": ("sm90_wgrad_rows", ("second = second_term(piece);", "second = first;")),
    "the second term of x is the value": ("sm90_wgrad_rows", ("= second_term(a[j]);", "= a[j];")),
    "x is rounded when it is loaded": ("sm90_wgrad_sliced", ("__float_as_uint(loaded[0])", "to_tf32(loaded[0])")),
    "steps of the line before": (
        "sm90_wgrad_nine",
        ("for (; step + (PART_STEPS - 1) * SPLIT_P < steps;", "for (; step < steps;"),
    ),
    "no single steps": (
        "sm90_wgrad_nine",
        ("for (; PART_STEPS > 1 && step < steps;", "for (; false;"),
    ),
    "a partial sum of the tap before": ("sm90_wgrad_rows", ("i, 0, i > 0)", "i, 0, true)")),
    "pixels of the first part": ("sm90_wgrad_nine", ("units), " + _NEXT, "units - step_units(step)), " + _NEXT)),
    "no line behind the ring": ("sm90_wgrad_rows", ("        if (!twice) return;\n", "        return;\n")),
    "a line too few behind the ring": ("sm90_wgrad_rows", ("twice(line < Y_COPIES)", "twice(line < Y_COPIES - 1)")),
    "one term behind the ring": (
        "sm90_wgrad_rows_nhwc",
        ("at += Y_LINES * Y_LINE;\n        *reinterpret_cast<Piece*>(at) = first,", "at += Y_LINES * Y_LINE;\n       "),
    ),
    "rows of taps in the order of lines": (
        "sm90_wgrad_rows",
        ("[R + COUNT - 1 - i / (FILTERS / 2)]", "[R + i / (FILTERS / 2)]"),
    ),
    "the youngest line first": ("sm90_wgrad_rows", ("lines.dy[ROWS - 1], step);", "lines.dy[0], step);")),
}


@pytest.mark.parametrize("name", FAULTS)
@on_emulator
def test_planted_faults_are_noticed(name: str) -> None:
    where, edit = FAULTS[name]
    fault = Mutation(name, "halo_sm90/wgrad", name, (edit,), where, "wgrad")
    with planted(fault), pytest.raises((AssertionError, EmulatorError)):
        for seed in (0, 1):
            _check_exact(BY_NAME[where], seed)


@on_emulator
def test_second_terms_of_infinities_would_make_nan() -> None:
    edit = ("fabsf(part[i]) <= 3.402823466e38f ? part[i] : 0.f;", "part[i];")
    name = "sm90_wgrad_loose"
    fault = Mutation("small products of infinities", "halo_sm90/wgrad", "they are NaN", (edit,), name, "wgrad")
    with planted(fault), pytest.raises(AssertionError):
        _check_not_finite(name)


@on_emulator
def test_sums_that_are_never_promoted_are_above_the_limits_of_fp32() -> None:
    """What the partial sums are worth: wgmma cuts off more of 19,200 products than the limits allow."""
    copy = "#pragma unroll\n    for (int i = 0; i < N / 2; ++i) "  # of one row of taps
    edits = (
        ("    float part[N / 2];\n", f"    float part[N / 2];\n{copy}part[i] = sums[R][i];\n"),
        ("multiply(x.second[i], i, 0, i > 0)", "multiply(x.second[i], i, 0, true)"),
        ("[i % (FILTERS / 2)] += part[i];", "[i % (FILTERS / 2)] = part[i];"),
    )
    one = SUMS[0]
    with planted(Mutation("never promoted", "halo_sm90/wgrad", "", edits, one.name, "wgrad")):
        error, limits, _ = error_of("wgrad", make(one, torch.float32, kind="positive"), forced(one))
    assert error.norm > 2 * limits.norm


@pytest.mark.parametrize(("name", "rows"), [("A", 5), ("B", 5), ("C", 3), ("aspp_dil12", 3), ("resnet_56", 3)])
def test_a_product_takes_all_rows_of_taps(name: str, rows: int) -> None:
    """One wgmma has the filters of as many lines as the filter has rows, so blocks have few filters."""
    layer = next(each for each in load_suite(SUITES / "suite.toml") if each.name == name)
    found = wgrad._every_tiling(dense_request(layer.problem("wgrad", "tf32x3", "nchw"), CPU), 227 << 10, 132)
    assert all(each.tile.rows * each.tile.filters <= 256 for each in found)
    assert all(1 in (each.tile.rows, each.tile.split[2]) for each in found)
    assert (found[0].tile.rows, found[0].tile.filters) == (rows, 32)


@pytest.mark.parametrize(
    ("layout", "channels", "filters", "width", "r", "s", "split"),
    [("nchw", 32, 64, 512, 5, 9, (1, 1, 1, 2)), ("nhwc", 32, 64, 512, 5, 9, (1, 1, 1, 2)),
     ("nhwc", 128, 128, 512, 3, 3, (1, 1, 2, 1)), ("nchw", 64, 64, 65, 3, 3, (3, 1, 1, 1))],
)  # fmt: skip
def test_tiles_of_most_registers_do_not_spill(
    layout: Layout, channels: int, filters: int, width: int, r: int, s: int, split: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sums, partial sums and terms of fragments; and ptxas leaves wgmma asynchronous."""
    one = Problem(
        "wgrad", 8, channels, 64, width, filters, r, s, padding=(r // 2,) * 2 + (s // 2,) * 2, layout=layout,
        precision="tf32x3",
    )  # fmt: skip
    request = dense_request(one, CPU)
    found = [each for each in wgrad._tilings(request, 227 << 10, 132) if each.tile.split == split]
    most = max(found, key=lambda each: (each.tile.column_groups + 1) * each.tile.rows * each.tile.filters)
    source = wgrad.source(one, most.tile, most.stage)
    assert dict(source.constants)["OPERAND_TERMS"] == 2
    assert compiler.compile_source(source, "sm_90a").spill_bytes == 0
    assert SERIALIZED not in log_of(source, monkeypatch)
