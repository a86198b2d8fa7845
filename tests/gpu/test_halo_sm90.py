"""What only the tensor-core family can get wrong: every tiling, long sums, weights packed at each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.cases import Case, case, case_id, make, pick
from tests.families import HALO_SM90, Subject, each_result, name_of
from tests.gpu.runs import check_every_tiling
from tests.launches import launched
from tests.specials import special_activations
from tests.tilings import nth_tiling

TILED = (
    *pick("small_a", "four_sides", "odd_widths", "stride_2", "dilated_strided", "groups_odd", "row_filter", "wide",
          "channels_last", "channels_last_odd", "unaligned"),
    case("rows", "tiles below each other that keep the lines they share", (2, 16, 28, 300), (24, 5, 5), padding=2),
    case("aligned", "aligned rows of groups, dilated, padding that differs", (3, 48, 13, 152), (64, 3, 3),
         padding=(5, 4, 7, 6), dilation=(3, 2), groups=2),
    case("joined", "rows that are not aligned in planes that are", (2, 40, 12, 162), (48, 5, 3), padding=(2, 1)),
    case("aligned_nhwc", "rows longer than a box", (2, 40, 9, 300), (48, 3, 5), padding=(1, 2),
         storage="channels_last"),
    case("two_blocks", "two blocks of filters, several chunks of channels", (2, 72, 12, 152), (144, 3, 5),
         padding=(1, 2)),
    case("few_tiles", "split-K", (1, 256, 14, 14), (136, 3, 3), padding=1),
    case("few_tiles_nhwc", "the same in NHWC", (1, 256, 14, 14), (136, 3, 3), padding=1, storage="channels_last"),
    case("two_blocks_nhwc", "the same in NHWC", (2, 72, 12, 152), (144, 3, 5), padding=(1, 2),
         storage="channels_last"),
)  # fmt: skip
BFLOAT16 = ("wide", "channels_last", "aligned", "aligned_nhwc")
LONG = (
    case("pointwise_20000", "20,000 channels", (1, 20000, 12, 12), (64, 1, 1)),
    case("3x3_18432", "2048 channels", (2, 2048, 14, 14), (64, 3, 3), padding=1),
    case("7x7_19600", "400 channels", (2, 400, 16, 16), (64, 7, 7), padding=3),
    case("31x31_19220", "20 channels, 31x31", (1, 20, 40, 40), (64, 31, 31), padding=15),
    case("nhwc_18432", "2048 channels in NHWC", (2, 2048, 14, 14), (64, 3, 3), padding=1, storage="channels_last"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("one", "subject", "dtype", "result"),
    [
        pytest.param(one, *each.values, marks=each.marks)
        for one in TILED
        for each in each_result((HALO_SM90,))
        if each.values[1] != torch.bfloat16 or one.name in BFLOAT16  # bf16 differs from fp16 in two instructions
    ],
    ids=name_of,
)
def test_every_tiling(
    one: Case, subject: Subject, dtype: torch.dtype, result: str, in_threads: Callable, record: Callable
) -> None:
    """All that fit the problem, not only the one that the cost model puts first."""
    assert check_every_tiling(subject, one, dtype, result, in_threads, record) > 4


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result((HALO_SM90,)), ids=name_of)
@pytest.mark.parametrize("one", pick("border_3x3", "groups_odd", "channels_last"), ids=case_id)
def test_special_values_in_every_tiling(one: Case, subject: Subject, dtype: torch.dtype, result: str) -> None:
    """NaN and Inf stay where they belong, also where several outputs share the rows of M and skip some of the taps."""
    forced = subject.on(one, dtype)
    t, want = special_activations(result, forced, dtype, "cuda")
    index, most = 0, 1
    while index < most:
        with nth_tiling(index) as seen:
            got = oracle.run(result, t, forced)
        most, index = seen["most"], index + 1
        oracle.check(result, got, t, forced.spec, want=want)


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result((HALO_SM90,), ("fprop",)), ids=name_of)
@pytest.mark.parametrize("one", pick("channels_last", "wide"), ids=case_id)
def test_relu_in_every_tiling(one: Case, subject: Subject, dtype: torch.dtype, result: str) -> None:
    """The kernel's own ReLU, also of NaN and infinities, and the same as PyTorch's behind the kernel."""
    forced = subject.on(one, dtype)
    t, want = special_activations(oracle.RELU, forced, dtype, "cuda")
    index, most = 0, 1
    while index < most:
        with nth_tiling(index) as seen:
            got, plain = oracle.run(oracle.RELU, t, forced), oracle.run(result, t, forced)
        most, index = seen["most"], index + 1
        oracle.check(oracle.RELU, got, t, forced.spec, want=want)
        assert torch.equal(got.nan_to_num(), plain.relu().nan_to_num()) and (plain < 0).any()


@pytest.mark.parametrize(
    ("subject", "dtype", "result"),
    [each for each in each_result((HALO_SM90,)) if each.values[1] == torch.float32],
    ids=name_of,
)
@pytest.mark.parametrize("one", pick("border_3x3", "groups_odd", "channels_last"), ids=case_id)
def test_three_products_in_every_tiling(one: Case, subject: Subject, dtype: torch.dtype, result: str) -> None:
    """fp32 as two TF32 values each is within the limits of fp32, also beside NaN and infinities."""
    forced = subject.on(one, dtype)
    forced = replace(forced, spec=forced.spec._replace(precision="tf32x3"))
    t, want = special_activations(result, forced, dtype, "cuda")
    index, most, norms = 0, 1, []
    while index < most:
        with nth_tiling(index) as seen:
            got = oracle.run(result, t, forced)
        most, index = seen["most"], index + 1
        norms.append(oracle.check(result, got, t, forced.spec, want=want).norm)
    print(f"{one.name} {result} in three products: norm {max(norms):.2e}")


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancellation"])
@pytest.mark.parametrize("one", (*LONG, *pick("border_3x3", "groups_odd")), ids=case_id)
def test_three_products_of_every_kind(one: Case, kind: str) -> None:
    """Sums of up to 20,000 products of every kind of values, in tf32x3, within the limits of fp32."""
    forced = HALO_SM90.on(one, torch.float32)
    forced = replace(forced, spec=forced.spec._replace(precision="tf32x3"))
    t = make(one, torch.float32, "cuda", kind)
    error = oracle.check("fprop", oracle.run("fprop", t, forced), t, forced.spec, norm_counts=kind != "cancellation")
    print(f"{one.name} tf32x3 {kind}: norm {error.norm:.2e}, worst element {error.worst:.2e}")


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize(("subject", "dtype", "result"), each_result((HALO_SM90,), ("fprop",)), ids=name_of)
@pytest.mark.parametrize("one", LONG, ids=case_id)
def test_long_sums(one: Case, subject: Subject, dtype: torch.dtype, result: str, kind: str, record: Callable) -> None:
    """The error of up to 20,000 products stays at the level of the precision, also where all have one sign."""
    forced, t = subject.on(one, dtype), make(one, dtype, "cuda", kind)
    with launched() as names:
        got = oracle.run(result, t, forced)
    error = oracle.check(result, got, t, forced.spec)
    print(f"{one.name} {subject.label(dtype)} {kind}: norm {error.norm:.2e}, worst element {error.worst:.2e}")
    record(names, result, subject.label(dtype), error.norm)


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize(("subject", "dtype", "result"), each_result((HALO_SM90,), ("dgrad",)), ids=name_of)
def test_long_sums_of_gradients(subject: Subject, dtype: torch.dtype, result: str, kind: str, record: Callable) -> None:
    one = case("dgrad_18432", "2048 filters", (2, 64, 14, 14), (2048, 3, 3), padding=1)
    forced, t = subject.on(one, dtype), make(one, dtype, "cuda", kind)
    with launched() as names:
        got = oracle.run(result, t, forced)
    error = oracle.check(result, got, t, forced.spec)
    print(f"{one.name} {subject.label(dtype)} {kind}: norm {error.norm:.2e}, worst element {error.worst:.2e}")
    record(names, result, subject.label(dtype), error.norm)


@pytest.mark.parametrize(("subject", "dtype", "result"), each_result((HALO_SM90,)), ids=name_of)
def test_packed_weights_are_never_stale(subject: Subject, dtype: torch.dtype, result: str) -> None:
    """Weights written between two calls in ways that PyTorch does not count: through .data and through other views."""
    one = subject.on(case("stale", "3x3", (2, 24, 20, 21), (40, 3, 3), padding=1), dtype)
    t = make(one, dtype, "cuda")
    before = t.w._version
    alias = torch.empty(0, dtype=dtype, device="cuda").set_(t.w.untyped_storage())[: t.w.numel()]
    oracle.check(result, oracle.run(result, t, one), t, one.spec)
    t.w.data.mul_(-2)
    oracle.check(result, oracle.run(result, t, one), t, one.spec)
    alias.copy_(alias.flip(0))
    oracle.check(result, oracle.run(result, t, one), t, one.spec)
    assert t.w._version == before
