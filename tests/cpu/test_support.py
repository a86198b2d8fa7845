"""What kernels refuse, by the sentence that says why; and what they must take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from haloconv import support
from haloconv.emulator import emulated_device
from haloconv.families import FAMILIES
from haloconv.problem import DIRECTIONS, Problem
from tests.cases import FULL_CASES, case_dtypes
from tests.families import SUBJECTS, Subject


def _problem(**change: object) -> Problem:
    given = {"direction": "fprop", "n": 1, "c": 32, "h": 64, "w": 64, "k": 32, "r": 1, "s": 1, "dtype": torch.float16}
    return Problem(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"direction": "wgrad"}, "no weight gradient"),
        ({"dtype": torch.float64}, "do not take torch.float64"),
        ({"dtype": torch.float32, "precision": "ieee"}, "fp32 products in full precision"),
        ({"h": 46345, "w": 46345}, "46345 x 46345 pixels has 2"),
        ({"h": 46345, "w": 46345, "direction": "dgrad"}, "46345 x 46345 pixels has 2"),
    ],
)
def test_refused(change: dict[str, object], sentence: str) -> None:
    assert sentence in support.why_no_tensor_cores(_problem(**change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"h": 46336, "w": 46352},  # rows of whole 16 bytes are not numbered end to end
        {"h": 46345, "w": 46345, "layout": "nhwc"},
        {"h": 46300, "w": 46309},  # below 2^31
    ],
)
def test_taken(change: dict[str, object]) -> None:
    assert support.why_no_tensor_cores(_problem(**change)) is None


@pytest.mark.parametrize(("found", "needed", "newer", "taken"), [
    ((8, 0), (8, 0), True, True),
    ((9, 0), (8, 0), True, True),
    ((7, 5), (8, 0), True, False),
    ((9, 0), (9, 0), False, True),
    ((10, 0), (9, 0), False, False),
])  # fmt: skip
def test_capability(found: tuple[int, int], needed: tuple[int, int], newer: bool, taken: bool) -> None:
    reason = support.why_not_capability(found, needed, newer)
    assert (reason is None) == taken
    if reason is not None:
        which = f"{needed[0]}.{needed[1]}{' or newer' if newer else ''}"
        assert reason == f"the kernels need compute capability {which}; the device has {found[0]}.{found[1]}"


NEEDS_MORE = {"halo_sm80": {}, "halo_sm80_wgrad": {"direction": "wgrad"}, "halo_sm80_f64": {"dtype": torch.float64},
              "depthwise_toeplitz": {"k": 32, "groups": 32, "r": 7, "s": 7, "padding": (3, 3, 3, 3)}}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_an_older_device_is_refused_by_what_the_registry_says(name: str) -> None:
    problem, reasons = _problem(**NEEDS_MORE[name]), {}
    for arch in ("sm_75", "sm_80"):
        with emulated_device(arch=arch):
            reasons[arch] = FAMILIES[name].why_not(problem, torch.device("cpu"))
    assert reasons == {"sm_75": "the kernels need compute capability 8.0 or newer; the device has 7.5", "sm_80": None}


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_every_case_is_taken(subject: Subject) -> None:
    """What the GPU tests force upon a family it takes, however odd the extents: without a GPU nothing else says so."""
    refused = {}
    with emulated_device():
        for one, dtype in case_dtypes(FULL_CASES):
            precision = "tf32" if subject.label(dtype) == "tf32" else "ieee"
            for direction in set(DIRECTIONS) & set(subject.results) if dtype in subject.dtypes else ():
                problem = replace(one.problem(direction, dtype), precision=precision)
                reason = FAMILIES[subject.name].why_not(problem, torch.device("cpu"))
                refused |= {f"{one.name} {direction} {dtype}": reason} if reason is not None else {}
    assert refused == {}
