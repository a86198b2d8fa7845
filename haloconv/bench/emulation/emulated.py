"""A layer with our side on the emulator: checked against float64 and untimed, with what its kernels moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from haloconv.bench.emulation.model import MODELLED_KERNEL, modelled
from haloconv.bench.emulation.traffic import Launched
from haloconv.bench.layer import Layer, Step
from haloconv.bench.trial import AS_LARGE
from haloconv.choose.choice import Choice
from haloconv.emulator import EmulatedDevice, emulated_device
from haloconv.families.base import Config
from haloconv.problem import Problem
from haloconv.reference import Error, Limits, measure_error, raised, rounded_to_tf32
from haloconv.tune.judge import UNLIMITED

LAUNCH_LIMIT_S = 600.0


@dataclass
class Emulation:
    """How our side is emulated, and what came of it.

    ``seed`` draws the schedules. ``launches`` counts kernel launches; with ``statistics`` those of single layers are
    kept in ``launched``, one record each.
    """

    seed: int = 0
    statistics: bool = False
    launches: int = 0
    launched: list[Launched] = field(default_factory=list)

    @contextmanager
    def device(self, statistics: bool = False) -> Iterator[EmulatedDevice]:
        """The emulated device. Raises EmulatorError for what the emulator finds."""
        with emulated_device(seed=self.seed, limit_s=LAUNCH_LIMIT_S, statistics=statistics) as device:
            yield device
        self.launches += device.launches


@dataclass(frozen=True)
class EmulatedLayer(Layer):
    """A layer whose own side runs on the emulator; PyTorch's side and the oracle run as they are."""

    emulation: Emulation = field(default_factory=Emulation)

    @classmethod
    def of(cls, layer: Layer, emulation: Emulation) -> EmulatedLayer:
        """``layer`` with its own side on the emulator."""
        return cls(**_fields_of(layer), emulation=emulation)

    def choice(self, step: Step) -> Choice:
        """The family that runs the step on the emulated device, and why."""
        with self.emulation.device():
            return Layer(**_fields_of(self)).choice(step)

    def ran(self, step: Step) -> Config:
        """The config that runs the step on the emulated device."""
        with self.emulation.device():
            return Layer(**_fields_of(self)).ran(step)

    def problem(self, step: Step) -> Problem:
        """The problem as it is computed: some families form fp32 products in full precision where TF32 is allowed."""
        problem = super().problem(step)
        in_tf32 = step != "bgrad" and self.choice(step).in_terms
        return problem if in_tf32 else replace(problem, precision="ieee")

    def limits(self, step: Step, baseline: Error | None) -> Limits:
        """What passes. In TF32 no PyTorch stands beside, and rounding of the operands alone may err by more than 5e-4.

        So it may where a result is few sums of few products: one image of a filter of 27 taps.
        """
        limits = super().limits(step, baseline)
        if step == "bgrad" or self.problem(step).precision_label != "tf32":
            return limits
        x, w, dy = (rounded_to_tf32(each) for each in (self.x, self.w, self.dy))
        rounded = replace(self, x=x, w=w, dy=dy)
        rounding = measure_error(rounded.oracle(step).value, self.oracle(step), UNLIMITED, self.border(step))
        return raised(limits, rounding, AS_LARGE)

    def ours(self, step: Step) -> Callable[[], torch.Tensor]:
        """haloconv's operation on the emulator."""
        call, emulation = super().ours(step), self.emulation
        problem = None if step == "bgrad" else self.problem(step)
        gathered = {"fprop": self.x, "dgrad": self.dy}.get(step)
        has_model = step != "bgrad" and self.ran(step).kernel == MODELLED_KERNEL

        def emulated() -> torch.Tensor:
            with emulation.device(emulation.statistics) as device:
                result = call()
                model = None
                if has_model and problem is not None and gathered is not None:
                    model = modelled(problem, gathered)
            emulation.launched += [Launched(self.name, step, problem, seen, model) for seen in device.statistics]
            return result

        return emulated


def _fields_of(layer: Layer) -> dict[str, Any]:
    return {each.name: getattr(layer, each.name) for each in fields(Layer)}
