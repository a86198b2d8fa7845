"""Random problems over the whole legal space: few random layers, since each compiles kernels, with many sizes each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.cases import DTYPES, STORAGES, Case, make
from tests.layers import random_layer, sized

SEED = 20261120
LAYERS = 72


@pytest.fixture(scope="module")
def layers(warm_up: Callable) -> list[tuple[Case, torch.dtype]]:
    """Random layers, each with a dtype, whose kernels have been compiled side by side."""
    rng = random.Random(SEED)
    drawn = []
    for i in range(LAYERS):
        storage, w_storage = (rng.choice(("contiguous", "channels_last", *STORAGES)) for _ in range(2))
        layer = replace(random_layer(rng, f"layer {i}"), storage=storage, w_storage=w_storage)
        drawn.append((layer.on("direct"), DTYPES[i % len(DTYPES)]))
    warm_up(drawn)
    return drawn


def test_random_problems(
    layers: list[tuple[Case, torch.dtype]], pytestconfig: pytest.Config, record_error: Callable
) -> None:
    print(f"layers from seed {SEED}; the same examples in every run")
    extra = st.one_of(st.integers(0, 8), st.integers(0, 39))

    @settings(
        max_examples=pytestconfig.getoption("--fuzz-examples"), derandomize=True, deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, LAYERS - 1), st.integers(0, 5), extra, extra)
    def one_problem(index: int, n: int, rows: int, cols: int) -> None:
        layer, dtype = layers[index]
        one = sized(layer, n, rows, cols)
        t = make(one, dtype, "cuda")
        for result in oracle.RESULTS:
            with oracle.Unchanged(t), oracle.RedZones("cuda") as zones:
                got = oracle.run(result, t, one)
                again = oracle.run(result, t, one)
            record_error("direct", result, dtype, oracle.check(result, got, t, one.spec).norm)
            assert oracle.same_bits(got, again), f"{result}: two runs differ"
            zones.check()

    one_problem()
