"""The tensor-core family on the emulator with unusual numbers and with weights that change behind PyTorch's back."""

from __future__ import annotations

import pytest
import torch

from haloconv import emulator
from tests import oracle
from tests.cases import DENORMAL_PARTNER, Case, Tensors, case, case_id, make, pick
from tests.emulated import SM_COUNT
from tests.families import HALO_SM90
from tests.specials import cut_to_tf32, special_activations

MISSING = emulator.available()
DTYPES = (torch.float32, torch.float16)

pytestmark = [
    pytest.mark.usefixtures("emulator_cache"),
    pytest.mark.skipif(MISSING is not None, reason=f"no emulator: {MISSING}"),
    pytest.mark.parametrize("result", HALO_SM90.results),
]


def emulate(result: str, t: Tensors, one: Case) -> torch.Tensor:
    with emulator.emulated_device(seed=0, sm_count=SM_COUNT):
        return oracle.run(result, t, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("one", pick("border_3x3", "groups_odd", "pointwise_stride", "channels_last"), ids=case_id)
def test_nan_and_infinity_stay_in_their_places(one: Case, dtype: torch.dtype, result: str) -> None:
    forced = HALO_SM90.on(one, dtype)
    t, want = special_activations(result, forced, dtype, "cpu")
    oracle.check(result, emulate(result, t, forced), t, forced.spec, want=want)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_denormal_numbers_are_not_flushed(dtype: torch.dtype, result: str) -> None:
    (one,) = pick("border_3x3")
    forced, t = HALO_SM90.on(one, dtype), make(one, dtype, "cpu", "denormal")
    t = t._replace(b=None, w=t.w * DENORMAL_PARTNER[dtype])
    if dtype == torch.float32:
        t = t._replace(x=cut_to_tf32(t.x), dy=cut_to_tf32(t.dy))
    oracle.check(result, emulate(result, t, forced), t, forced.spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_packed_weights_are_never_stale(dtype: torch.dtype, result: str) -> None:
    one = HALO_SM90.on(case("stale", "3x3", (1, 8, 9, 10), (16, 3, 3), padding=1), dtype)
    t = make(one, dtype)
    for _ in range(2):
        oracle.check(result, emulate(result, t, one), t, one.spec)
        t.w.data.mul_(-2)
