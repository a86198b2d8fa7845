"""Rows name the kernel that ran and the source it had: a hash that changes with what decides its results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from haloconv import plan
from haloconv.bench import suite, trial
from haloconv.bench.emulation.emulated import EmulatedLayer, Emulation
from haloconv.emulator import device as emulated
from haloconv.families import closure
from haloconv.families.closure import JOIN, source_of, stamp_hash
from haloconv.jit.source import kernel_path

CPU = torch.device("cpu")
DEPTHWISE = suite.Case("small", (2, 8, 9, 11), 8, (3, 3), padding=(1, 1), groups=8)
QUICK = trial.Budget(seconds=0.0, min_runs=1)


def test_rows_on_the_emulator_name_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each direction: the launched kernel is the one of the row, whose config the family offers first."""
    launched: list[str] = []
    real = emulated.EmulatedKernel.__init__

    def load(self, source, smem_bytes):
        launched.append(source.kernel)
        real(self, source, smem_bytes)

    monkeypatch.setattr(emulated.EmulatedKernel, "__init__", load)
    layer = EmulatedLayer.of(DEPTHWISE.layer("fp32", "nchw", "depthwise", CPU), Emulation())
    for step in ("fprop", "dgrad", "wgrad"):
        launched.clear()
        plan.clear_plans()
        row = trial.try_step(layer, step, trial.UNTIMED)
        assert row.passed, row.complaint
        assert row.kernel.startswith("depthwise/") and row.kernel in launched
        assert row.source == stamp_hash(row.kernel) and len(row.source) == 64


def test_pytorchs_rows_have_no_source_of_ours() -> None:
    row = trial.try_step(DEPTHWISE.layer("fp32", "nchw", "aten", CPU), "fprop", QUICK)
    assert (row.family, row.kernel, row.config, row.source) == ("aten", "aten", "", "")


def test_a_step_names_the_kernels_of_its_directions() -> None:
    row = trial.try_training_step(DEPTHWISE.layer("fp32", "nchw", "aten", CPU), QUICK)
    assert row.kernel == JOIN.join(["aten"] * 3) and row.source == source_of(row.kernel) == JOIN.join([""] * 3)


def test_sources_of_several_kernels_are_joined() -> None:
    both = JOIN.join(["depthwise/band", "aten"])
    assert source_of(both) == stamp_hash("depthwise/band") + JOIN
    assert source_of("no/such_kernel") == ""


@pytest.mark.parametrize("kernel", closure.kernels())
def test_a_kernels_source_covers_its_device_code(kernel: str) -> None:
    assert kernel in closure.launched(kernel)
    names = {file.relative_to(closure.SOURCE_ROOT).as_posix() for file in closure.stamped_files(kernel)}
    assert {f"{kernel_path(kernel)}.cu", f"{kernel_path(kernel)}.py"} <= names


def test_a_launch_whose_kernel_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("kernel_source(name(), 'entry', {})\n")
    monkeypatch.setattr(closure, "host_files", lambda kernel: [file])
    with pytest.raises(ValueError):
        closure.launched("odd/odd")
    file.write_text("kernel_source(NAME, 'entry', {})\n")
    closure._tree.cache_clear()
    with pytest.raises(ValueError, match="must be a kernel's name"):
        closure.launched("odd/odd")
    file.write_text("NAME = 'odd/even'\nkernel_source(NAME, 'entry', {})\n")
    closure._tree.cache_clear()
    assert closure.launched("odd/odd") == ["odd/even"]


def test_a_changed_header_changes_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {kernel: stamp_hash(kernel) for kernel in ("depthwise/band", "depthwise_window/window")}
    header = next(file for file in closure.stamped_files("depthwise/band") if file.name == "strips.cuh")
    real = closure.canonical

    def canonical(file: Path) -> str:
        return real(file) + ("int added;" if file == header else "")

    monkeypatch.setattr(closure, "canonical", canonical)
    closure.stamp_hash.cache_clear()
    after = {kernel: stamp_hash(kernel) for kernel in before}
    closure.stamp_hash.cache_clear()
    assert [kernel for kernel in before if before[kernel] != after[kernel]] == ["depthwise/band"]
