"""Large depthwise filters in precision="tf32x3": exact on integers, within fp32's limits, registers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from haloconv import reference
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.families.depthwise_toeplitz import toeplitz, wgrad
from haloconv.jit import compile as compiler
from haloconv.problem import Direction, Problem, dense_request
from tests import oracle
from tests.cases import DENORMAL_PARTNER, Case, Tensors, case, case_id, generator, make, store
from tests.cpu.test_tf32x3 import error_of, on_emulator
from tests.emulated_depthwise_toeplitz import CASES
from tests.exact import integers
from tests.specials import special_activations
from tools.fingerprint import recording

CPU = torch.device("cpu")
BY_NAME = {one.name: one for one in CASES}
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
SUMS = (  # a filter's rows of several steps and of one; lines of dy of several parts and of a part of one
    BY_NAME["toeplitz_31x31"],
    BY_NAME["toeplitz_wide"],
    BY_NAME["toeplitz_column"],
    BY_NAME["toeplitz_nhwc"],
    case("products_12", "few taps on few pixels", (1, 3, 4, 5), (3, 3, 4), padding=(1, 2), groups=3),
)
EXACT = ("toeplitz_13x13", "toeplitz_multiplier", "toeplitz_odd", "toeplitz_cut", "toeplitz_row", "toeplitz_sliced")
LAYER = Problem("fprop", 32, 128, 56, 56, 128, 31, 31, padding=(15,) * 4, groups=128, precision="tf32x3")


def forced(one: Case) -> Case:
    return replace(one, spec=one.spec._replace(precision="tf32x3", family="depthwise_toeplitz", strict=True))


def results_of(one: Case) -> tuple[str, ...]:
    """dgrad takes one filter a channel."""
    return tuple(each for each in OPERANDS if each != "dgrad" or one.problem().k_per_group == 1)


@pytest.mark.parametrize("name", EXACT)
@on_emulator
def test_integers_of_13_bits_are_summed_exactly(name: str) -> None:
    """TF32 keeps 11 bits: here small terms count, of one operand after the other."""
    one = replace(BY_NAME[name], bias=False)
    for result in results_of(one):
        for wide in OPERANDS[result]:
            t, gen = make(one, torch.float32), generator(f"{one.name} {result} {wide}", CPU)
            for operand in OPERANDS[result]:
                value, most = getattr(t, operand), (1 << 13) - 1 if operand == wide else 1
                stored = store(integers(value.shape, value.dtype, gen, most), one.storage)
                t = t._replace(**{operand: stored})
            with emulated_device(seed=1, sm_count=2):
                got = oracle.run(result, t, forced(one))
            oracle.check_exact(result, got, t, one.spec)


@pytest.mark.parametrize("result", OPERANDS)
@pytest.mark.parametrize("one", SUMS, ids=case_id)
@on_emulator
def test_errors_stay_below_the_limits_of_fp32(one: Case, result: str) -> None:
    """Of every kind of values. The emulator rounds sums of mma.sync where a GPU cuts them: tests/gpu has them, too."""
    for kind in ("normal", "positive", "wide", "cancellation"):
        error, limits, by_scale = error_of(result, make(one, torch.float32, kind=kind), forced(one))
        norm = by_scale if kind == "cancellation" else error.norm
        assert norm < limits.norm, f"{kind}: {norm:.2e}, {limits}"
        assert error.worst < limits.element + limits.rounding, f"{kind}: {error}, {limits}"


@pytest.mark.parametrize("result", OPERANDS)
@on_emulator
def test_infinities_and_nan_stand_where_fp32_has_them(result: str) -> None:
    one = BY_NAME["toeplitz_channels"]
    t, want = special_activations(result, one, torch.float32, "cpu")
    with emulated_device(seed=1, sm_count=2):
        got = oracle.run(result, t, forced(one))
    oracle.check(result, got, t, one.spec, want=want)
    assert not got.isfinite().all()


def _errs(result: str, t: Tensors, one: Case) -> tuple[torch.Tensor, reference.Error, reference.Limits]:
    with emulated_device(seed=1):
        got = oracle.run(result, t, one)
    want, limits = oracle.expected(result, t, one.spec), oracle.limits_of(result, t, one.spec)
    return got, reference.measure_error(got, want, limits), limits


@on_emulator
def test_the_largest_numbers_are_multiplied_as_fp32_does() -> None:
    """Their two terms round to an infinity: such sums are summed once more in fp32."""
    one = forced(BY_NAME["toeplitz_cut"])
    t = make(one, torch.float32)
    largest = torch.full_like(t.x, torch.finfo(torch.float32).max).copysign(t.x)
    got, error, limits = _errs("fprop", t._replace(x=largest, w=t.w * 2.0**-8), one)
    assert got.isfinite().all() and error.norm < limits.norm
    with emulated_device(seed=1):
        t = t._replace(x=largest.abs(), w=t.w.abs() * 2.0**8)
        beyond, want = oracle.run("fprop", t, one), oracle.expected("fprop", t, one.spec).value.float()
    assert (want == math.inf).any() and torch.equal(beyond.isfinite(), want.isfinite())


@on_emulator
def test_tiny_values_lose_bits_of_their_second_term() -> None:
    """Below 2^-113 a value is kept to a multiple of 2^-136 alone: the sentence of docs/precision.md, to the bit."""
    one = forced(replace(BY_NAME["toeplitz_cut"], bias=False))
    t = make(one, torch.float32, kind="denormal")
    t = t._replace(w=t.w * DENORMAL_PARTNER[torch.float32])
    want = oracle.expected("fprop", t, one.spec)
    lost = oracle.expected("fprop", t._replace(x=torch.ones_like(t.x)), one.spec).scale * 2.0**-137
    got, error, limits = _errs("fprop", t, one)
    assert ((got.double() - want.value).abs() <= (limits.element + limits.rounding) * want.scale + lost).all()
    assert error.norm > limits.norm
    kept = make(one, torch.float32)
    kept = kept._replace(x=(1 + kept.x.abs() % 1) * 2.0**-112, w=kept.w * 2.0**60)
    _, error, limits = _errs("fprop", kept, one)
    assert error.norm < limits.norm


@pytest.mark.parametrize(("width", "r", "s"), [(7, 13, 13), (14, 27, 27), (56, 31, 31), (128, 31, 31), (128, 9, 63)])
@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_terms_fit_registers(width: int, r: int, s: int, direction: Direction) -> None:
    """Whatever a multiprocessor of an H200 runs at a time, nothing spills."""
    padding = (r // 2, r // 2, s // 2, s // 2)
    problem = replace(LAYER, direction=direction, h=min(width, 64), w=width, r=r, s=s, padding=padding)
    twin = wgrad if direction == "wgrad" else toeplitz
    for tiling in twin.tilings(problem, 232_448):
        source = twin.source(dense_request(problem, CPU), tiling)
        assert dict(source.constants)["ELEM"] == "hc::tf32x3"
        assert compiler.compile_source(source, "sm_90a").spill_bytes == 0


def test_who_takes_it() -> None:
    """Of weight gradients those of half as many taps as in TF32, whose sums fit registers."""
    with recording():
        for precision, taken in (("tf32x3", False), ("tf32", True)):
            problem = replace(LAYER, direction="wgrad", s=47, padding=(15, 15, 23, 23), precision=precision)
            assert (FAMILIES["depthwise_toeplitz"].why_not(problem, CPU) is None) == taken
        for precision, taken in (("tf32x3", True), ("tf32", True), ("ieee", False)):
            for direction in OPERANDS:
                problem = replace(LAYER, direction=direction, precision=precision)
                assert (FAMILIES["depthwise_toeplitz"].why_not(problem, CPU) is None) == taken
