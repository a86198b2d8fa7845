"""halo_sm80 and halo_sm80_wgrad have a config for every problem that they take, however its tensors are stored.

A residual may begin anywhere.
"""

from __future__ import annotations

import pytest
import torch

from haloconv import plan
from haloconv.device import DeviceFacts
from haloconv.emulator import available, emulated_device
from haloconv.families import FAMILIES
from haloconv.families.base import MOST_CONFIGS
from haloconv.families.halo_sm80 import conv
from haloconv.problem import ConvSpec, Direction, Epilogue, Problem, Request, TensorForm
from tests.cases import generator, store
from tests.exact import integers
from tests.sources import noted_sources

CPU = torch.device("cpu")
ADA = DeviceFacts("RTX 4090", "sm_89", 128, (8, 9), 24 << 30, 99 << 10, "none")  # of little shared memory


def layer(
    direction: Direction, extents: tuple[int, ...], dtype: torch.dtype = torch.float32, **spec: object
) -> Problem:
    precision = "tf32" if dtype == torch.float32 else "ieee"
    return Problem(direction, *extents, dtype=dtype, precision=precision, **spec)  # type: ignore[arg-type]


# Wide copies leave no room for a tile here; in each case single elements do.
TIGHT = {
    "wide groups of channels that are neighbours": (
        "halo_sm80",
        layer(
            "fprop",
            (2, 200, 300, 5000, 128, 7, 7),
            stride=(4, 4),
            padding=(1, 1, 0, 3),
            dilation=(2, 1),
            groups=2,
            layout="nhwc",
        ),
        (TensorForm((300000000, 1, 1000000, 200), False), TensorForm((4900, 1, 700, 100), False)),
    ),
    "channels that are neighbours in a problem of planes": (
        "halo_sm80",
        layer("dgrad", (1, 24, 7, 5000, 24, 11, 11), padding=(1, 5, 14, 5), dilation=(1, 7)),
        (TensorForm((356328, 1, 118776, 24), False), TensorForm((3025, 1, 275, 25), False)),
    ),
    "a filter gradient of mixed layouts": (
        "halo_sm80_wgrad",
        layer("wgrad", (1, 16, 300, 1, 16, 31, 31), torch.float16, stride=(2, 1), padding=(1, 34, 15, 15)),
        (TensorForm((2448, 1, 16, 16), False), TensorForm((4800, 1, 16, 16), True)),
    ),
}


@pytest.mark.parametrize("result_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", TIGHT)
def test_what_is_taken_has_configs_for_tensors_of_any_form(name: str, result_layout: str) -> None:
    family, problem, forms = TIGHT[name]
    with noted_sources(ADA) as sources:
        assert FAMILIES[family].why_not(problem, CPU) is None
        request = Request(problem, *forms, result_layout, CPU)
        configs = FAMILIES[family].configs(request)
        assert 1 <= len(configs) <= MOST_CONFIGS
        assert len({config.key for config in configs}) == len(configs)
        for config in configs:
            FAMILIES[family].bind(request, config)
        assert len(sources) >= len(configs)


@pytest.mark.skipif(available() is not None, reason=f"no emulator: {available()}")
@pytest.mark.parametrize(
    ("storage", "filters", "stores"),
    [("unaligned", 8, 2), ("channels_last_unaligned", 6, 1), ("channels_last_unaligned", 16, 3)],
)
def test_a_residual_that_begins_anywhere(
    storage: str, filters: int, stores: int, emulator_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read it by pairs and fours, as y is written; where it is not aligned for them, it is copied."""
    gen, shape = generator(storage, "cpu"), (2, filters, 6, 8)
    x, w, b = (integers(each, torch.float16, gen) for each in ((2, 4, 6, 8), (filters, 4, 3, 3), (filters,)))
    x = store(x, storage.removesuffix("_unaligned").replace("unaligned", "contiguous"))
    residual = store(integers(shape, torch.float16, gen), storage)
    assert residual.data_ptr() % 4 == 2
    seen, source = [], conv.source
    monkeypatch.setattr(conv, "source", lambda *asked: seen.append(source(*asked)) or seen[-1])
    spec, epilogue = ConvSpec(padding=(1,) * 4, family="halo_sm80", strict=True), Epilogue(residual=True)
    plan.clear_plans()
    with emulated_device():
        got = plan.plan_fprop(x, w, b, spec, epilogue, residual).run(x, w, b, residual)
    plan.clear_plans()
    want = torch.conv2d(x.double(), w.double(), b.double(), padding=1) + residual.double()
    assert torch.equal(got, want.half()) and {dict(each.constants)["STORES"] for each in seen} == {stores}
