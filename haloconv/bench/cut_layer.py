"""A layer that is computed as interior and rims: padded by another mode than zeros, or in shards one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from haloconv import edges, reference
from haloconv.bench.layer import LAYOUTS, Layer, Step
from haloconv.choose.choice import Choice
from haloconv.families.base import Config
from haloconv.functional import conv2d
from haloconv.padding import gradient_of_copy, job_of, modes_in_use, padded_copy
from haloconv.plan import Plan
from haloconv.problem import ZEROS, Modes
from haloconv.rectangles import Messages, Rectangle, give, needed, packed, split
from haloconv.rims import Bounds, Cut, Place, axis_of, cut_of, even_bounds, output_bounds
from haloconv.shard_exchange import Alone, Gradients
from haloconv.strips import Job, convolve_cut, plan_at_once, plan_wgrad_at_once

Tensor = torch.Tensor


class InTurn(Alone):
    """The exchange of shards of one process, which run one after another: what each has is there for the others.

    ``shards`` has the x of each; ``owed`` gets the gradients that are for pixels of others, to be given at the end.
    """

    def __init__(self, cut: Cut, place: Place, shards: dict[Place, Tensor]) -> None:
        self.needed, self.shards = needed(cut, place), shards
        self.owed: list[tuple[Place, Rectangle, Tensor]] = []

    def start(self, x: Tensor) -> Callable[[], Messages]:
        """The rectangles of the others, as one flat tensor of each."""
        return lambda: {owner: packed(self.shards[owner], rectangles) for owner, rectangles in self.needed.items()}

    def start_back(self, sent: Messages | None, like: Tensor, *of_weights: Tensor | None) -> Callable[[], Gradients]:
        """Keep what others are owed."""
        self.owed = []
        for owner, message in (sent or {}).items():
            rectangles = self.needed[owner]
            self.owed += [(owner, *each) for each in zip(rectangles, split(message, rectangles, like), strict=True)]
        return super().start_back(None, like, *of_weights)


@dataclass(frozen=True)
class CutLayer(Layer):
    """A layer padded by ``modes``, or cut along H into ``shards``. Its problem is that of the image with zeros around.

    PyTorch's side convolves the whole image, behind a padded copy where it makes one. Of shards that side and the
    choice are those of the undivided layer.
    """

    modes: Modes = ZEROS
    shards: int = 1

    def convolve(self, x: Tensor, w: Tensor) -> Tensor:
        """haloconv's operation, with gradients; of an image that is one shard."""
        spec = self.spec
        settings: Any = {"precision": spec.precision, "family": spec.family, "strict": spec.strict}
        return conv2d(x, w, self.b, *spec[:4], padding_mode=self.modes, **settings)

    def convolve_by_torch(self, x: Tensor, w: Tensor) -> Tensor:
        """PyTorch's operation on a padded copy, with gradients."""
        modes = modes_in_use(self.modes, self.spec.padding)
        if modes == ZEROS:
            return super().convolve_by_torch(x, w)
        copy, left = padded_copy(x, self.spec, modes)
        top, _, cols, _ = left.padding
        return torch.conv2d(copy, w, self.b, left.stride, (top, cols), left.dilation, left.groups)

    def ours(self, step: Step) -> Callable[[], Tensor]:
        """haloconv's operation; of shards with their results put together."""
        if step == "bgrad":
            return super().ours(step)
        if self.shards == 1:
            return _of_step(self, step, self.convolve)
        run = self._shards.run_of(step)
        return (lambda: torch.stack(run()).sum(0)) if step == "wgrad" else lambda: torch.cat(run(), 2)

    def ran(self, step: Step) -> Config:
        """The config that runs the step: where one launch pads the image itself that one's, else the interior's.

        Of shards the first one's, which is no smaller than others; of a padded copy its own.
        """
        plan = self._plan_at_once(step)
        return self._convolved(step).ran(step) if plan is None else Config(plan.choice.kernel, plan.choice.config)

    def choice(self, step: Step) -> Choice:
        """What runs the step, and why: in one launch, perhaps saving a copy, by rims, or of a padded copy."""
        plan = self._plan_at_once(step)
        return self._convolved(step).choice(step) if plan is None else plan.choice

    def _convolved(self, step: Step) -> Layer:
        """What is convolved without modes: the image with zeros around it where it is cut, else its padded copy."""
        x, spec, modes = self.x, self.spec, modes_in_use(self.modes, self.spec.padding)
        if step != "bgrad" and self.shards == 1 and modes != ZEROS and self._job(step) is None:
            x, spec = padded_copy(x.detach(), spec, modes)
        return Layer(self.name, x, self.w, self.b, self.dy, spec, self.layout)

    def _job(self, step: Step) -> Job | None:
        """How the image is cut, of gradients where they are recorded; None if it is not."""
        if self.shards > 1 or step == "bgrad":
            return None
        with torch.set_grad_enabled(step != "fprop"):
            w = self.w.detach().requires_grad_(step != "fprop")
            return job_of(self.x.detach(), w, self.b, self.spec, modes_in_use(self.modes, self.spec.padding))

    def _plan_at_once(self, step: Step) -> Plan | None:
        job, x = self._job(step), self.x.detach()
        if self.shards > 1:
            job, x = self._shards.jobs[0], self._shards.x[0, 0]
        if job is None or job.padding_in_kernel is None:
            return None
        if step == "fprop":
            return plan_at_once(x, self.w, self.b, job)
        if step == "bgrad" or self.shards > 1:
            return None
        if step == "wgrad":
            return plan_wgrad_at_once(self.dy, x, self.w, job)
        return edges.plan_dgrad(self.dy, self.w, tuple(x.shape), self.layout, *job.padding_in_kernel)

    def timed(self, step: Step) -> Callable[[], object]:
        """haloconv's operation; the results of shards as they are."""
        return self.ours(step) if self.shards == 1 or step == "bgrad" else self._shards.run_of(step)

    def baseline(self, step: Step) -> Callable[[], Tensor]:
        """PyTorch's operation."""
        plain = step == "bgrad" or modes_in_use(self.modes, self.spec.padding) == ZEROS
        return super().baseline(step) if plain else _of_step(self, step, self.convolve_by_torch)

    def searches(self, step: Step) -> bool:
        """Whether PyTorch's convolution may run a part: each is chosen by itself, so of what is cut it may."""
        whole = self.shards == 1 and modes_in_use(self.modes, self.spec.padding) == ZEROS
        return super().searches(step) if whole else step != "bgrad"

    def oracle(self, step: Step) -> reference.Oracle:
        """The float64 answer, of a padded copy."""
        modes = modes_in_use(self.modes, self.spec.padding)
        if modes == ZEROS or step == "bgrad":
            return super().oracle(step)
        copy, left = padded_copy(self.x, self.spec, modes)
        if step != "dgrad":
            return replace(self, x=copy, spec=left, modes=ZEROS).oracle(step)
        of_copy = reference.oracle_dgrad(self.dy, self.w, tuple(copy.shape), left)
        return reference.Oracle(*(gradient_of_copy(each, tuple(self.x.shape), self.spec, modes) for each in of_copy))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say how much shards exchange; none without shards."""
        return self._shards.notes if self.shards > 1 else ()

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self)


def _of_step(layer: Layer, step: Step, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
    """fprop; or a gradient, as the backward pass of one forward pass that is kept."""
    x, w = layer.x.detach(), layer.w.detach()
    if step == "fprop":
        return lambda: function(x, w)
    wanted = (x if step == "dgrad" else w).requires_grad_()
    with torch.enable_grad():
        y = function(x, w)
    return lambda: torch.autograd.grad(y, wanted, layer.dy, retain_graph=True)[0]


class Shards:
    """The shards of a layer's image, bands of its rows; each has its own x and dy."""

    def __init__(self, layer: CutLayer) -> None:
        spec, extents, taps = layer.spec, layer.x.shape[2:], layer.w.shape[2:]
        sides: Any = (spec.padding[:2], spec.padding[2:])
        axes = tuple(map(axis_of, extents, taps, spec.stride, spec.dilation, sides, layer.modes))
        inputs = (even_bounds(extents[0], layer.shards), (0, extents[1]))
        outputs = tuple(map(output_bounds, axes, inputs))
        self.layer, self.places = layer, [(index, 0) for index in range(layer.shards)]
        self.x = dict(zip(self.places, self._bands(layer.x, inputs[0]), strict=True))
        self.dy = dict(zip(self.places, self._bands(layer.dy, outputs[0]), strict=True))
        self.jobs: list[Job] = []
        self.exchanges: list[InTurn] = []
        for place in self.places:
            cut: Any = cut_of(axes, inputs, outputs, place)
            self.exchanges.append(InTurn(cut, place, self.x))
            self.jobs.append(Job(cut, place, spec, self.exchanges[-1], ("zeros", layer.modes[1])))

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence: the bytes that a shard gets of others, and the messages."""
        x = self.layer.x
        pixels = max(
            sum(down.length * across.length for rectangles in one.needed.values() for down, across in rectangles)
            for one in self.exchanges
        )
        megabytes = pixels * x.shape[0] * x.shape[1] * x.itemsize / 1e6
        messages = max(len(one.needed) for one in self.exchanges)
        return (
            f"{self.layer.name}: a shard gets {megabytes:.3g} MB of others in {messages} messages before its rims, and "
            "sends as much back in dgrad; here both are copies on one GPU",
        )

    def run_of(self, step: Step) -> Callable[[], list[Tensor]]:
        """What computes the parts of a result; those of dw are to be added."""
        layer = self.layer
        if step == "fprop":
            return lambda: [convolve_cut(self.x[job.place], layer.w, layer.b, job) for job in self.jobs]
        parts = []
        for job in self.jobs:
            x, w = self.x[job.place].detach(), layer.w.detach()
            wanted = (x if step == "dgrad" else w).requires_grad_()
            with torch.enable_grad():
                parts.append((convolve_cut(x, w, layer.b, job), wanted, self.dy[job.place]))

        def run() -> list[Tensor]:
            found = [torch.autograd.grad(y, wanted, dy, retain_graph=True)[0] for y, wanted, dy in parts]
            for each in self.exchanges if step == "dgrad" else ():
                for owner, rectangle, gradient in each.owed:
                    give(found[owner[0]], rectangle, gradient)
            return found

        return run

    def _bands(self, tensor: Tensor, bounds: Bounds) -> Iterator[Tensor]:
        for begin, end in pairwise(bounds):
            yield tensor[:, :, begin:end].contiguous(memory_format=LAYOUTS[self.layer.layout])
