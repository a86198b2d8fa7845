"""What was launched is known by kernel, on every device; what a test records goes to the kernels that have stamps."""

from __future__ import annotations

import pytest
import torch

from haloconv.device import DeviceFacts
from haloconv.jit.launch import Launch
from haloconv.jit.source import kernel_path
from tests import oracle
from tests.cases import pick
from tests.families import DIRECT, HALO_SM90, Subject
from tests.gpu.sanitizer_driver import Call, placed
from tests.launches import launched
from tests.recorder import Recorder, stamped
from tests.sources import noted_sources
from tools import stamps

H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")


def run(subject: Subject, name: str, result: str) -> None:
    call = Call(subject.on(*pick(name), torch.float32), torch.float32, result)
    oracle.run(result, placed(call, "cpu")[1], call.one)


def test_launches_are_noted_by_kernel_in_every_context_that_is_open() -> None:
    with noted_sources(H200):
        with launched() as both:
            with launched() as first:
                run(DIRECT, "one_row", "fprop")
            with launched() as second:
                run(HALO_SM90, "border_3x3", "fprop")
        run(DIRECT, "one_row", "bgrad")
    assert first == {"direct/direct"} and "halo_sm90/implicit_gemm" in second and both == first | second


def test_nothing_is_noted_or_in_the_way_afterwards() -> None:
    plain = Launch.__call__
    with noted_sources(H200), pytest.raises(KeyError), launched() as names:
        run(DIRECT, "one_row", "fprop")
        raise KeyError
    assert Launch.__call__ is plain and names == {"direct/direct"}


def test_a_plan_that_was_bound_before_is_noted() -> None:
    with noted_sources(H200):
        run(DIRECT, "one_row", "fprop")
        with launched() as names:
            run(DIRECT, "one_row", "fprop")
    assert names == {"direct/direct"}


def test_records_go_to_the_kernels_that_have_stamps() -> None:
    record = Recorder()
    record({"halo_sm90/conv", "halo_sm90/pack"}, "fprop", "fp16", 2e-4)
    record({"halo_sm90/conv"}, "fprop", "fp16", 3e-4)
    record({"halo_sm90/conv"}, "fprop", "fp16", kind="exact")
    record({"direct/direct", "reduce/partials"}, "wgrad", "fp32", 1e-7, kind="fuzz")
    assert record.as_json() == {
        "errors": [
            ["direct/direct", "wgrad", "fp32", 1e-7], ["halo_sm90/conv", "fprop", "fp16", 3e-4],
            ["reduce/partials", "wgrad", "fp32", 1e-7],
        ],
        "counts": {
            "random": {"halo_sm90/conv": 2}, "exact": {"halo_sm90/conv": 1},
            "fuzz": {"direct/direct": 1, "reduce/partials": 1},
        },
    }  # fmt: skip
    with pytest.raises(KeyError):
        record({"direct/direct"}, "fprop", "fp32", kind="other")


@pytest.mark.parametrize("kernel", stamps.kernels())
def test_every_kernel_is_stamped_and_its_stamp_covers_its_own_device_code(kernel: str) -> None:
    assert stamped([kernel, f"{kernel}/other"]) == [kernel]
    assert kernel in stamps.launched(kernel)
    assert stamps.SOURCE_ROOT / f"{kernel_path(kernel)}.cu" in stamps.stamped_files(kernel)
