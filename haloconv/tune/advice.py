"""What the user of a model can do to make it faster, each with the figure that it rests on; no advice without one.

A figure is measured where the user's or the shipped records of this GPU model have the problem, carried to its size by
pixels where they have it at another size of its bucket. Else it is modelled: the time that the GPU's arithmetic and
memory allow at best (haloconv/roofline.py), where somebody measured those of this GPU model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from haloconv import env
from haloconv.choose.buckets import size_of
from haloconv.choose.choice import DISABLED, choose
from haloconv.choose.records import shelf_of
from haloconv.device import device_facts, has_facts
from haloconv.layout import Layout
from haloconv.precision import torch_precision
from haloconv.precompile import Inputs, check_directions
from haloconv.problem import DIRECTIONS, Direction, Problem
from haloconv.roofline import limit_ms
from haloconv.tune.problems import Posed, problems_of

WORTH_SAYING = 1.05
"""The least gain, as a ratio of times, that is advised."""

_LARGE_PART = 0.2  # of a step's time: what is left to PyTorch, or chosen by rules alone, and worth a sentence
_MOST = 0.5  # of the time must be measured in both layouts, before one is advised

NEEDS_A_GPU = (
    "Nothing here is measured or modelled on a CPU. On the GPU where the model will run, this says: what channels_last "
    "and TF32 would gain, which part of the time is left to cuDNN, and how much of it was chosen without a measurement."
)
NOTHING_KNOWN = (
    "No record of {gpu} serves this model, and nobody has measured what that GPU allows at best: "
    "haloconv.tune(model, example_inputs) measures its layers."
)
_NAMES = {"fprop": "forward passes", "dgrad": "input gradients", "wgrad": "weight gradients"}


class Time(NamedTuple):
    """What a problem takes as it would run, in ms; ``measured`` if a record says so, else the roofline does."""

    ms: float
    measured: bool


class Piece(NamedTuple):
    """One piece of advice, and the figure that it rests on: a ratio of times, or a fraction of one."""

    sentence: str
    figure: float


@dataclass(frozen=True)
class Advice:
    """``pieces`` of advice, the largest figure first of each kind, and ``notes`` on what could not be said."""

    pieces: tuple[Piece, ...]
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """All that there is to say."""
        return [*(each.sentence for each in self.pieces), *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.sentences) or "Nothing is known that would make these convolutions faster."


def advise(model: torch.nn.Module, example_inputs: Inputs, *, directions: Collection[Direction] = DIRECTIONS) -> Advice:
    """What would make the convolutions of ``model`` faster, with measured or modelled figures.

    Nothing is timed: the model runs once, in evaluation mode, to learn its problems, and records of earlier
    measurements are asked (``haloconv.tune`` makes them). On a CPU the model does not run, and the advice says what a
    GPU would add.

    Args:
        model: any module, on the device where it will run.
        example_inputs: what it is called with, as for ``haloconv.tune``.
        directions: ``("fprop",)`` for inference.

    Raises:
        ValueError: a direction is none. Whatever the model raises for its inputs.
    """
    check_directions(directions)
    tensor = next((each for each in (*model.parameters(), *model.buffers())), None)
    if tensor is None or not has_facts(tensor.device):
        return Advice((), (NEEDS_A_GPU,))
    return advice_on(problems_of(model, example_inputs, directions))


def advice_on(posed: Sequence[Posed]) -> Advice:
    """``advise`` for problems of one device; of several devices those of the first are looked at."""
    if env.disabled():
        return Advice((), (f"{DISABLED}: unset it first.",))
    if not posed:
        return Advice((), ("No convolution that haloconv could run was met.",))
    device = posed[0].device
    if not has_facts(device):
        return Advice((), (NEEDS_A_GPU,))
    problems = [each.problem for each in posed if each.device == device]
    times = [(problem, time) for problem in problems if (time := time_of(problem, device)) is not None]
    if not times:
        return Advice((), (NOTHING_KNOWN.format(gpu=device_facts(device.index).name),))
    found = [
        _other_layout(problems, device),
        _tf32(times, device),
        *_left_to_pytorch(times, device),
        _unmeasured(times),
    ]
    missing = len(problems) - len(times)
    notes = (f"{missing} of {len(problems)} problems are left out: no record or ceiling is known.",) if missing else ()
    return Advice(tuple(each for each in found if each is not None), notes)


def time_of(problem: Problem, device: torch.device) -> Time | None:
    """What ``problem`` takes on ``device``; None if neither a record nor a ceiling is known."""
    facts = device_facts(device.index)
    found = None if problem.is_empty else shelf_of(facts).find(problem)
    if found is not None:
        record, (size, asked) = found[0], (found[0].size, size_of(problem))
        return Time(record.ms * (asked.n * asked.h * asked.w) / (size.n * size.h * size.w), True)
    if problem.precision == "tf32x3" and not choose(problem, device).in_terms:
        return time_of(replace(problem, precision="ieee"), device)
    limit = limit_ms(problem, facts.name)
    return None if limit is None else Time(limit, False)


# --- the kinds of advice


def _other_layout(problems: Sequence[Problem], device: torch.device) -> Piece | None:
    """Whether the other memory order is faster, over the problems that were measured in both."""
    here: Layout = "nhwc" if 2 * sum(each.layout == "nhwc" for each in problems) > len(problems) else "nchw"
    there: Layout = "nchw" if here == "nhwc" else "nhwc"
    now, then, all_ms = 0.0, 0.0, 0.0
    count = 0
    for problem in problems:
        one, other = (time_of(replace(problem, layout=each), device) for each in (here, there))
        all_ms += one.ms if one is not None else 0.0
        if one is not None and other is not None and one.measured and other.measured:
            now, then, count = now + one.ms, then + other.ms, count + 1
    if not then or now < WORTH_SAYING * then or now < _MOST * all_ms:
        return None
    names = {"nhwc": "channels_last", "nchw": "contiguous_format"}
    return Piece(
        f"This model gains {now / then:.2f}x in {names[there]}: its convolutions take {then:.3g} ms there and "
        f"{now:.3g} ms now, measured for {count} of {len(problems)} problems. "
        f"Say model.to(memory_format=torch.{names[there]}), and the same of its inputs.",
        now / then,
    )


def _tf32(times: Sequence[tuple[Problem, Time]], device: torch.device) -> Piece | None:
    """What TF32 would gain, if PyTorch's setting keeps it off."""
    if torch_precision() == "tf32":
        return None
    change: Callable[[Problem], Problem] = lambda problem: replace(problem, precision="tf32")  # noqa: E731
    affected = [(problem, time) for problem, time in times if problem.precision == "tf32x3"]
    changed = [(time, then) for problem, time in affected if (then := time_of(change(problem), device)) is not None]
    gained = sum(now.ms - then.ms for now, then in changed)
    whole = sum(time.ms for _, time in times)
    if gained <= 0 or whole < WORTH_SAYING * (whole - gained):
        return None
    factor = whole / (whole - gained)
    return Piece(
        f"TF32 is off: with it the convolutions would take {whole - gained:.3g} ms instead of {whole:.3g} ms "
        f"({factor:.2f}x, {_basis(time for pair in changed for time in pair)}), with factors rounded to 10 bits. "
        "Say torch.backends.cudnn.allow_tf32 = True.",
        factor,
    )


def _left_to_pytorch(times: Sequence[tuple[Problem, Time]], device: torch.device) -> list[Piece]:
    """The directions of which a large part of the time is PyTorch's own convolution."""
    whole = sum(time.ms for _, time in times)
    pieces = []
    for direction in DIRECTIONS:
        left = [
            (problem, time)
            for problem, time in times
            if problem.direction == direction and _family(problem, device) == "aten"
        ]
        ms = sum(time.ms for _, time in left)
        if ms < _LARGE_PART * whole:
            continue
        unknown = sum(not time.measured for _, time in left)
        why = "measured to be the fastest there" if not unknown else f"{unknown} of {len(left)} by rule alone"
        pieces.append(
            Piece(
                f"{ms / whole:.0%} of the convolutions' time is {_NAMES[direction]} at cuDNN ({ms:.3g} of "
                f"{whole:.3g} ms, {_basis(time for _, time in left)}; {why}).",
                ms / whole,
            )
        )
    return sorted(pieces, key=lambda each: -each.figure)


def _unmeasured(times: Sequence[tuple[Problem, Time]]) -> Piece | None:
    """How much runs on what rules chose, which measuring may better."""
    whole, by_rule = sum(time.ms for _, time in times), [time for _, time in times if not time.measured]
    part = sum(time.ms for time in by_rule) / whole
    if part < _LARGE_PART:
        return None
    return Piece(
        f"{len(by_rule)} of {len(times)} problems were never measured on this GPU model; they are {part:.0%} of the "
        f"time ({_basis(time for _, time in times)}). Say haloconv.tune(model, example_inputs).",
        part,
    )


def _family(problem: Problem, device: torch.device) -> str:
    """What runs the problem. A shipped record is believed here without the trial that it needs to be followed."""
    found = shelf_of(device_facts(device.index)).find(problem)
    return choose(problem, device).family if found is None else found[0].family


def _basis(times: Iterable[Time]) -> str:
    kinds = Counter(time.measured for time in times)
    return "measured" if not kinds[False] else "modelled by the roofline" if not kinds[True] else _MIXED


_MIXED = "measured in part, the rest modelled by the roofline"
