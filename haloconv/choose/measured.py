"""Which GPU models the rules were read off, and what ``auto`` runs on others.

``measured.json`` lists the models with committed results (``benchmarks/results``), each with the least ratio to
PyTorch's speed of all rows that a rule takes, by direction, precision and layout; ``python -m tools.measured`` writes
it. On a model with a random sample of layers rules are followed. Elsewhere one is where its kind of layer was not
behind on that very model, else where it was far ahead on the nearest sampled model of the same architecture.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from haloconv.choose.rules import Ruling, bgrad_by_rule, by_rule
from haloconv.device import DeviceFacts, device_facts
from haloconv.problem import Problem

FAR_AHEAD = 1.3
"""The least ratio on a measured GPU model with which a rule is followed on another one."""
NOTHING_MEASURED = "nothing of the kind was measured"
"""What the reason says where a rule is held back on a GPU model."""
PATH = Path(__file__).resolve().with_suffix(".json")


class Measured(NamedTuple):
    """A GPU model with committed results; ``least`` is the least ratio of a kind's rows, by ``kind_of``.

    ``sampled``: with rows of random layers, so that it is known what ``auto`` does on layers that nobody chose.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    sampled: bool
    least: dict[str, float]


@cache
def measured_models() -> tuple[Measured, ...]:
    """The GPU models with committed results."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return tuple(
        Measured(name=name, **{**each, "capability": tuple(each["capability"])}) for name, each in content.items()
    )


def is_measured(facts: DeviceFacts) -> bool:
    """Whether results of this GPU model vouch for the rules."""
    return any(each.name == facts.name and each.sampled for each in measured_models())


def kind_of(rule: str, problem: Problem) -> str:
    """What of a rule is judged at a time: ``"depthwise has_few_taps fprop fp16 nchw"``."""
    return f"{rule} {problem.direction} {problem.precision_label} {problem.layout}"


def by_measured_rule(problem: Problem, device: torch.device) -> tuple[str, str]:
    """The family that runs ``problem`` on ``device``, and why; on a GPU model without results PyTorch, in doubt.

    Where that leaves tf32x3 to PyTorch it gets what full fp32 gets.
    """
    family, reason = _followed(by_rule(problem, device), problem, device)
    if family == "aten" and problem.precision == "tf32x3":
        return by_measured_rule(replace(problem, precision="ieee"), device)
    return family, reason


def _followed(ruling: Ruling, problem: Problem, device: torch.device) -> tuple[str, str]:
    """What a rule says, where it may be followed on the device."""
    (family, reason, rule), facts = ruling, device_facts(device.index)
    if family == "aten" or is_measured(facts):
        return family, reason
    kind = kind_of(rule, problem)
    found = [each.least[kind] for each in measured_models() if each.name == facts.name and kind in each.least]
    if found and found[0] >= 1:
        return family, f"{reason}, at least {found[0]:.2f}x PyTorch on {facts.name}"
    if found:
        return "aten", f"by rule: {family} fell to {found[0]:.2f}x PyTorch on {facts.name}"
    unknown = f"by rule: {NOTHING_MEASURED} on {facts.name}"
    near = [each for each in measured_models() if each.capability == facts.capability and each.sampled]
    if not near:
        return "aten", f"{unknown}, nor on another GPU of its architecture; haloconv.tune measures here"
    nearest = min(near, key=lambda each: abs(each.sm_count - facts.sm_count))
    least = nearest.least.get(kind, 0.0)
    if least < FAR_AHEAD:
        return "aten", f"{unknown}, and {family} is not far ahead on {nearest.name}; haloconv.tune measures here"
    return family, f"{reason}, at least {least:.2f}x PyTorch on {nearest.name}"


def bgrad_by_measured_rule(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> tuple[str, str]:
    """The family that sums dy of this shape (N, K, P, Q) over images and pixels, and why.

    PyTorch on a GPU model without results.
    """
    family, reason = bgrad_by_rule(shape, strides)
    facts = device_facts(device.index)
    if family == "aten" or is_measured(facts):
        return family, reason
    return "aten", f"by rule: nothing was measured on {facts.name}"
