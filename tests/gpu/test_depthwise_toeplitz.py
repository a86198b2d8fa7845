"""Large depthwise filters on tensor cores of a GPU: what the emulator runs too, and layers of real size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from haloconv import plan
from haloconv.device import device_facts
from haloconv.families.depthwise_toeplitz import toeplitz, wgrad
from haloconv.problem import Direction
from tests import oracle
from tests.cases import Case, case, case_id, make
from tests.emulated import Run, module_runs
from tests.families import DEPTHWISE_TOEPLITZ, Subject, each_dtype, name_of, over
from tests.gpu.runs import check_integers, check_run
from tests.launches import launched
from tests.specials import special_activations

RESULTS = ("fprop", "dgrad", "wgrad")
RUNS = tuple(module_runs("depthwise_toeplitz"))
LAYERS = tuple(
    case(f"{name}_{storage}", reason, *shape, storage=storage, **layer)
    for storage in ("contiguous", "channels_last")
    for name, reason, shape, layer in (
        ("replk_31", "RepLKNet, first stage", ((6, 32, 56, 56), (32, 31, 31)), {"padding": 15, "groups": 32}),
        ("replk_29", "RepLKNet, second stage", ((12, 32, 28, 28), (32, 29, 29)), {"padding": 14, "groups": 32}),
        ("replk_27", "RepLKNet, third stage", ((20, 32, 14, 14), (32, 27, 27)), {"padding": 13, "groups": 32}),
        ("replk_13", "RepLKNet, last stage", ((33, 32, 7, 7), (32, 13, 13)), {"padding": 6, "groups": 32}),
        ("slak_51x5", "SLaK's tall filter", ((4, 32, 56, 56), (32, 51, 5)), {"padding": (25, 2), "groups": 32}),
        ("slak_5x51", "SLaK's wide filter", ((4, 32, 56, 56), (32, 5, 51)), {"padding": (2, 25), "groups": 32}),
        ("wide", "several half tiles and strips of a row", ((2, 8, 112, 128), (8, 31, 31)),
         {"padding": 15, "groups": 8}),
        ("one_image", "half tiles of one image", ((1, 64, 56, 56), (64, 21, 21)), {"padding": 10, "groups": 64}),
    )
)  # fmt: skip


@pytest.mark.parametrize(("subject", "run"), over(*((DEPTHWISE_TOEPLITZ, run) for run in RUNS)), ids=str)
def test_run(subject: Subject, run: Run, record: Callable) -> None:
    """What the emulator runs, with the same configs."""
    check_run(subject, run, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE_TOEPLITZ,)), ids=name_of)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_layer(subject: Subject, dtype: torch.dtype, one: Case, result: str, record: Callable) -> None:
    """Right, and the same bits twice."""
    special = subject.on(one, dtype)
    t = make(special, dtype, "cuda")
    with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
        got, again = (oracle.run(result, t, special) for _ in range(2))
    error = oracle.check(result, got, t, special.spec)
    assert oracle.same_bits(got, again)
    zones.check()
    record(names, result, subject.label(dtype), error.norm)
    check_integers(subject, result, special, dtype, record)


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE_TOEPLITZ,)), ids=name_of)
@pytest.mark.parametrize("one", LAYERS[2:4], ids=case_id)
def test_special_activations(one: Case, subject: Subject, dtype: torch.dtype) -> None:
    """NaN and infinities in x (fprop, wgrad) or dy (dgrad) reach exactly the elements that sum over them."""
    forced_on = subject.on(one, dtype)
    for result in RESULTS:
        t, want = special_activations(result, forced_on, dtype, "cuda")
        oracle.check(result, oracle.run(result, t, forced_on), t, forced_on.spec, want=want)


@pytest.mark.parametrize("kind", ("normal", "positive", "wide", "cancellation"))
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_three_products_of_every_kind(one: Case, result: str, kind: str) -> None:
    """In tf32x3 sums of up to 38,000 products of every kind of values are within the limits of fp32."""
    forced = DEPTHWISE_TOEPLITZ.on(one, torch.float32)
    forced = replace(forced, spec=forced.spec._replace(precision="tf32x3"))
    t = make(one, torch.float32, "cuda", kind)
    error = oracle.check(result, oracle.run(result, t, forced), t, forced.spec, norm_counts=kind != "cancellation")
    print(f"{one.name} {result} tf32x3 {kind}: norm {error.norm:.2e}, worst element {error.worst:.2e}")


@pytest.mark.parametrize(("subject", "dtype"), each_dtype((DEPTHWISE_TOEPLITZ,)), ids=name_of)
@pytest.mark.parametrize("direction", ("fprop", "wgrad"))
def test_every_tiling(
    subject: Subject, dtype: torch.dtype, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``tilings`` offers is right, also behind the first one."""
    one = subject.on(LAYERS[0], dtype)
    twin = wgrad if direction == "wgrad" else toeplitz
    problem = one.problem(direction, dtype)
    tilings = twin.tilings(problem, device_facts(torch.cuda.current_device()).max_smem_bytes)
    t = make(one, dtype, "cuda")
    for tiling in tilings:
        monkeypatch.setattr(twin, "tilings", lambda *_, tiling=tiling: [tiling])
        plan.clear_plans()
        oracle.check(direction, oracle.run(direction, t, one), t, one.spec)
    plan.clear_plans()
