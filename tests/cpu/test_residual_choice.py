"""Convolutions with a residual that only a record of the convolution alone is known of: which kernel runs them."""

from __future__ import annotations

import pytest
import torch

from haloconv.choose import records
from haloconv.choose.choice import choose, config_of
from haloconv.choose.records import shelf_of
from haloconv.device import DeviceFacts
from haloconv.families import FAMILIES
from haloconv.families.files import device_hash
from haloconv.layout import Layout
from haloconv.problem import Epilogue, Problem, dense_request
from tests.tuned import record
from tools.measured import stood_in

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
CPU = torch.device("cpu")
CONV, TAPS = "halo_sm90/conv", "halo_sm90/implicit_gemm"


def layer(layout: Layout, residual: bool = False) -> Problem:
    """Of extents that no shipped record is near."""
    epilogue = Epilogue(residual=residual)
    return Problem(
        "fprop", 3, 192, 301, 173, 64, 3, 3, padding=(1,) * 4, dtype=torch.float16, layout=layout, epilogue=epilogue
    )


@pytest.mark.parametrize(("layout", "with_one"), [("nhwc", TAPS), ("nchw", CONV)])
def test_the_family_decides_where_it_has_another_kernel_first(
    layout: Layout, with_one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nchw implicit_gemm takes no residual."""
    with stood_in(H200):
        try:
            request = dense_request(layer(layout), CPU)
            named = next(each for each in reversed(FAMILIES["halo_sm90"].configs(request)) if each.kernel == CONV)
            made = record(
                layer(layout), "halo_sm90", H200, kernel=CONV, config=named.key, own=CONV, own_ms=0.4, ms=0.4,
                source=device_hash(CONV),
            )  # fmt: skip
            shelf_of(H200).add([made])
            alone = choose(layer(layout), CPU, examines=False)
            assert (alone.family, alone.kernel, alone.config) == ("halo_sm90", CONV, named.key) and alone.measured
            whole = choose(layer(layout, residual=True), CPU, examines=False)
            first = FAMILIES["halo_sm90"].configs(dense_request(layer(layout, residual=True), CPU))[0]
            assert whole.family == "halo_sm90" and first.kernel == with_one
            assert (whole.kernel, whole.config) == (("", "") if with_one == TAPS else (CONV, named.key))
            assert config_of(whole, dense_request(layer(layout, residual=True), CPU)).kernel == with_one
        finally:
            records.forget_shelves()


def test_a_record_with_the_residual_is_followed() -> None:
    problem = layer("nhwc", residual=True)
    with stood_in(H200):
        try:
            of_conv = next(
                each for each in FAMILIES["halo_sm90"].configs(dense_request(problem, CPU)) if each.kernel == CONV
            )
            made = record(
                problem, "halo_sm90", H200, kernel=CONV, config=of_conv.key, own=CONV, own_ms=0.4, ms=0.4,
                source=device_hash(CONV),
            )  # fmt: skip
            shelf_of(H200).add([made])
            found = choose(problem, CPU, examines=False)
            assert (found.kernel, found.config) == (CONV, of_conv.key) and found.measured
        finally:
            records.forget_shelves()
