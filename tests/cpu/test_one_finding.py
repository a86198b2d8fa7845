"""A launch that ends at its first fault finds that fault as one that runs to its end does, and no other."""

from __future__ import annotations

import pytest

from haloconv import emulator
from haloconv.emulator.runtime import one_finding
from tests.toy_kernels import OUT, Result, run

MISSING = emulator.available()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("emulator_cache", "optimised"),
]
TWO_FAULTS = "p.out[t] = smem[t];\nsmem[0] = t;"  # memory that nothing wrote, then a race
TEXT = f"if (blockIdx.x == 1) {{ {TWO_FAULTS} }} else smem[t] = t;"
APART = "if (t < 32) p.out[t] = 1, __syncthreads();\nelse p.out[t] = 2, __syncthreads();\n"


def ended(body: str, **options: int) -> Result:
    with one_finding():
        return run(body, **options)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_fault_ends_a_launch(seed: int) -> None:
    whole, first = run(TEXT, grid=3, seed=seed), ended(TEXT, grid=3, seed=seed)
    assert whole.kinds == {"unwritten", "race"}
    assert first.findings == (whole.findings[0]._replace(times=1),)
    assert run(TEXT, grid=3, seed=seed).kinds == whole.kinds, "the next launch runs to its end"


def test_a_launch_without_a_fault_runs_to_its_end() -> None:
    result = ended("p.out[t] = t;")
    assert result.error is None and result.out.tolist() == list(range(OUT))


def test_what_may_be_no_fault_ends_nothing() -> None:
    """Threads meet at two places that may be one line of the text: only Python knows."""
    assert ended(APART).kinds == {"divergent barrier"}
    assert ended(f"{APART}p.out[t] = smem[t];").kinds == {"divergent barrier", "unwritten"}
    copied = "#pragma GCC unroll 4\nfor (int i = 0; i < 4; ++i) { smem[t] = i; __syncthreads(); }\np.out[t] = smem[t];"
    result = ended(copied)
    assert result.error is None and result.out.tolist() == [3] * OUT
