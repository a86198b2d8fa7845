"""What runs inference where padding is no zeros: PyTorch's convolution of a padded copy, or a kernel that needs none.

A kernel that loses to PyTorch's convolution with zeros around the image may win by the copy that it saves: PyTorch pads
channels_last images at a tenth of the copy rate.
"""

from __future__ import annotations

from math import prod

import torch

from haloconv.choose.choice import Choice
from haloconv.choose.records import Record, shelf_of
from haloconv.choose.whole import known_instead
from haloconv.device import DeviceFacts, device_facts, has_facts
from haloconv.families import FAMILIES
from haloconv.layout import Layout
from haloconv.problem import Problem
from haloconv.roofline import ceilings_of, limit_ms

COPY_SHARES: dict[Layout, float] = {"nchw": 0.75, "nhwc": 0.15}
"""The share of the copy rate at which PyTorch pads, at most: 0.3 to 0.72, and 0.04 to 0.14, in the suite rims of an
NVIDIA H200 and an H100 (circular, reflect, replicate; rows of 2026-11-28); 0.83 and 1.27 on one layer, C in nchw."""
EDGE_COST = 1.06
"""Times as long as with zeros around the image: at most that in the same rows."""
UNKNOWN = 1.0
"""What a copy must take, in times of the roofline's limit, where nobody measured the layer. In rows of rims PyTorch is
at 0.5 to 0.8 of it where rules leave layers to PyTorch: a kernel of 0.6 times its speed is a limit behind, or less."""


def instead_of_copy(problem: Problem, device: torch.device, choice: Choice) -> Choice:
    """The choice for an fprop with zeros around the image, where PyTorch would convolve a padded copy of it.

    That is another one if it is PyTorch's and a kernel that knows padding modes makes up for what it loses: by a
    record of the layer's, else by the roofline.
    """
    if choice.family != "aten" or choice.refused or not has_facts(device):
        return choice
    facts = device_facts(device.index)
    ceilings, limit = ceilings_of(facts.name), limit_ms(problem, facts.name)
    families = [each for each in FAMILIES if FAMILIES[each].has_padding_modes]
    family = next((each for each in families if FAMILIES[each].why_not(problem, device) is None), None)
    if family is None or ceilings is None or limit is None:
        return choice
    n, c, h, w = problem.x_shape
    top, bottom, left, right = problem.padding
    moved = n * c * (h * w + (h + top + bottom) * (w + left + right)) * problem.dtype.itemsize
    copy_ms = moved / (COPY_SHARES[problem.layout] * ceilings.bytes_per_s) * 1e3
    record = _recorded(problem, facts)
    wins = copy_ms > UNKNOWN * limit if record is None else _makes_up(record, family, problem, copy_ms)
    reason = f"{choice.reason}; but behind a copy of the image, which takes {copy_ms:.2g} ms or more"
    return Choice(family, reason) if wins else choice


def _recorded(problem: Problem, facts: DeviceFacts) -> Record | None:
    """The layer's record, with or without a bias."""
    shelf = shelf_of(facts)
    found = (shelf.find(asked) for asked in (problem, *known_instead(problem)))
    return next((each[0] for each in found if each is not None), None)


def _makes_up(record: Record, family: str, problem: Problem, copy_ms: float) -> bool:
    """Whether the family's kernel in the record, perhaps of another size, loses less than the copy takes."""
    if record.own_ms is None or record.own is None or record.own.partition("/")[0] != family:
        return False
    scale = prod(record.size) / (problem.n * problem.h * problem.w)
    return EDGE_COST * record.own_ms < record.aten_ms + scale * copy_ms
