"""Random problems over the whole legal space: few random layers, since each compiles kernels, with many sizes each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from haloconv import plan
from tests import oracle
from tests.cases import STORAGES, Case, Tensors, make
from tests.families import Subject, each_subject
from tests.launches import launched
from tests.layers import random_layer, sized

SEED = 20261120
LAYERS = 72
MANY_PRODUCTS = 256  # from here on the norm over a result's roundings to TF32 is a statistic


@pytest.fixture(scope="module")
def layers() -> list[Case]:
    """Random layers; each has a dtype by its number."""
    rng = random.Random(SEED)
    drawn = []
    for i in range(LAYERS):
        storage, w_storage = (rng.choice(("contiguous", "channels_last", *STORAGES)) for _ in range(2))
        drawn.append(replace(random_layer(rng, f"layer {i}"), storage=storage, w_storage=w_storage))
    return drawn


@pytest.fixture
def _warm(subject: Subject, layers: list[Case], warm_up: Callable) -> None:
    warm_up("layers", subject, ((layer, dtype_of(subject, i)) for i, layer in enumerate(layers)))


def dtype_of(subject: Subject, index: int) -> torch.dtype:
    return subject.dtypes[index % len(subject.dtypes)]


def norm_counts(subject: Subject, result: str, t: Tensors, one: Case) -> bool:
    """Whether the norm's limit holds: two operands rounded to TF32 may make one product wrong by twice 5e-4.

    Nor does it for expanded tensors: if all filters are one, all outputs are one sum, and its terms may cancel. The
    limit of every element holds always.
    """
    if subject.label(t.x.dtype) != "tf32":
        return True
    if "expanded" in (one.storage, one.w_storage):
        return False
    return oracle.problem_of(result, t, one.spec).flops // 2 >= MANY_PRODUCTS


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_random_problems(
    subject: Subject, layers: list[Case], _warm: None, pytestconfig: pytest.Config, record: Callable
) -> None:
    print(f"layers from seed {SEED}; the same examples in every run")
    extra = st.one_of(st.integers(0, 8), st.integers(0, 39))
    counts = {"run": 0, "refused": 0}

    @settings(
        max_examples=pytestconfig.getoption("--fuzz-examples"), derandomize=True, deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, LAYERS - 1), st.integers(0, 5), extra, extra)
    def one_problem(index: int, n: int, rows: int, cols: int) -> None:
        dtype = dtype_of(subject, index)
        one = subject.on(sized(layers[index], n, rows, cols), dtype)
        t = make(one, dtype, "cuda")
        for result in subject.results:
            problem = oracle.problem_of(result, t, one.spec)
            refused = plan.choose(problem, t.x.device, subject.name).refused and not problem.is_empty
            counts["refused" if refused else "run"] += 1
            if refused:
                continue
            with oracle.Unchanged(t), oracle.RedZones("cuda") as zones, launched() as names:
                got = oracle.run(result, t, one)
                again = oracle.run(result, t, one)
            counted = norm_counts(subject, result, t, one)
            error = oracle.check(result, got, t, one.spec, norm_counts=counted)
            if counted:
                record(names, result, subject.label(dtype), error.norm)
            assert oracle.same_bits(got, again), f"{result}: two runs differ"
            zones.check()

    one_problem()
    print(f"{subject}: {counts['run']} results, {counts['refused']} refused")
    assert counts["refused"] <= counts["run"] // 20
