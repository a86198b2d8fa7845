"""A convolution of one shard of an image as interior and rims (haloconv.rims), differentiable to any order.

The shard is convolved as it is, with zeros around it, into the whole of y; then the outputs of each rim, which that got
wrong, are computed of a strip and written over it. So neither x nor y is copied. Gradients are those of that whole
convolution, of x, dy and dx as they are, and of what the strips hold from elsewhere than their place in the shard: it
is added to the pixels that it came from, here or, by an Exchange, in other shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch

from haloconv import autograd, edges, logs
from haloconv import plan as plans
from haloconv.gathered import gathered
from haloconv.layout import Layout, neighbours_of, strides_of
from haloconv.problem import ZEROS, ConvSpec, Direction, EdgeModes, Modes, output_extent
from haloconv.profiling import calls_of, current_layer, profiler
from haloconv.rectangles import Messages, Rectangle, give, needed, owner_of, take
from haloconv.rim_batch import Asked, Batch, Posed, is_upright, oriented, packed_windows, posed, windows_of
from haloconv.rims import Cut, HaloRows, Piece, Place, halo_of, reads_outside
from haloconv.shard_exchange import Alone, Exchange
from haloconv.strip_autograd import received_pixels, recorded_strips, views

Tensor = torch.Tensor


class Job(NamedTuple):
    """What is asked of one shard beside its tensors; the padding in ``spec`` is not looked at.

    ``modes`` are the padding modes of rows and of columns, zeros of those that are divided. ``saves_copy``: it is asked
    for in the place of a padded copy, which ``edges`` counts.
    """

    cut: Cut
    place: Place
    spec: ConvSpec
    exchange: Exchange = Alone()
    modes: Modes = ZEROS
    saves_copy: bool = False

    @property
    def halo(self) -> HaloRows | None:
        """Rows above and below the shard of an image that is divided there, which one launch may read beside it."""
        return halo_of(self.cut, self.place) if self.modes[0] == "zeros" else None

    @property
    def is_alone(self) -> bool:
        """Whether all of the image is here, so that strips can be put together again."""
        return not needed(self.cut, self.place)

    @property
    def padding_in_kernel(self) -> tuple[ConvSpec, EdgeModes] | None:
        """The padding that one launch may find in the image and its halo, and its modes; None where there is none."""
        whole, (rows, columns) = self.cut.padded, reads_outside(self.cut)
        modes: EdgeModes = self.modes if self.halo is None else ("halo", self.modes[1])
        if whole is None or modes == ZEROS or (rows and modes[0] == "zeros") or (columns and modes[1] == "zeros"):
            return None
        return self.spec_of(whole), modes

    def spec_of(self, piece: Piece) -> ConvSpec:
        return self.spec._replace(padding=piece.padding)


def convolve_cut(x: Tensor, w: Tensor, b: Tensor | None, job: Job) -> Tensor:
    """The shard's y (N, K, P, Q) of its x (N, C, H, W), w (K, C/G, R, S), b (K,) or None: plain eager tensors."""
    with job.exchange.telling():
        if autograd.is_recording(x, w, b) and not plans.is_noting():  # then PyTorch's convolutions run, recorded
            y: Tensor = _Convolve.apply(x, w, b, job)
            return y
        return _fprop(x, w, b, job, keeps=False)[0]


# --- strips that are put together from rectangles


def _pixels(x: Tensor, rectangle: Rectangle, received: dict[Place, Iterator[Tensor]], place: Place) -> Tensor:
    owner = owner_of(rectangle)
    if owner is None:
        return x.new_zeros(()).expand(*x.shape[:2], rectangle[0].length, rectangle[1].length)
    return take(x, rectangle) if owner == place else next(received[owner])


def _strips(x: Tensor, messages: Messages, job: Job) -> list[Tensor]:
    """The input of each batch of rims, (N * rims, C, h, w), or of upright ones (N * rims, C, w, h), in x's order."""
    received = received_pixels(messages, job.cut, job.place, x)
    layout, strips = plans.layout_of(x), []
    for batch in job.cut.batches:
        upright = is_upright(batch, job.cut)
        strip = gathered(x, batch, job.place, layout, upright)
        if strip is None:
            extents = (batch[0].columns.length, batch[0].rows.length) if upright else _extents(batch)
            shape = (x.shape[0] * len(batch), x.shape[1], *extents)
            strip = x.new_empty_strided(shape, strides_of(shape, layout))
            for piece, part in _parts(oriented(strip, upright), batch):
                for view, rectangle in views(part, piece):
                    view.copy_(_pixels(x, rectangle, received, job.place))
        strips.append(strip)
    return strips


def _extents(batch: Batch) -> tuple[int, int]:
    """Rows and columns that each rim of a batch reads."""
    return batch[0].rows.length, batch[0].columns.length


def _parts(strip: Tensor, batch: Batch) -> list[tuple[Piece, Tensor]]:
    """Each rim of a batch, and its part (N, ...) of a tensor (N * rims, ...): a view."""
    return list(zip(batch, strip.unflatten(0, (-1, len(batch))).unbind(1), strict=True))


# --- fprop and its gradients, unseen by autograd


def _rectangle(piece: Piece) -> Rectangle:
    """What an interior reads of its shard."""
    return piece.rows.runs[0], piece.columns.runs[0]


def _part(x_shape: tuple[int, ...], w_shape: tuple[int, ...], piece: Piece, job: Job) -> Rectangle | None:
    """What the convolution of the shard alone reads of it; None for all of it, pixels left over by a stride with it."""
    spec, sides = job.spec, (piece.rows.padding, piece.columns.padding)
    rectangle = _rectangle(piece)
    outputs = tuple(
        output_extent(x_shape[dim + 2], sum(sides[dim]), w_shape[dim + 2], spec.stride[dim], spec.dilation[dim])
        for dim in (0, 1)
    )
    return None if outputs == job.cut.outputs and not (rectangle[0].start or rectangle[1].start) else rectangle


def _own(x: Tensor, w_shape: tuple[int, ...], piece: Piece, job: Job) -> Tensor:
    """What the convolution of the shard alone is given of it: x itself, or a view."""
    rectangle = _part(tuple(x.shape), w_shape, piece, job)
    return x if rectangle is None else take(x, rectangle)


def _rims(direction: Direction, x: Tensor, w: Tensor, layout: Layout, job: Job) -> tuple[Posed, ...]:
    """The batches of rims, of a shard x, or of its size (N, C, ...)."""
    n, c, *_ = x.shape
    return posed(Asked(direction, job.cut, job.spec, n, c, tuple(w.shape), w.dtype, layout, w.device))


def plan_at_once(x: Tensor, w: Tensor, b: Tensor | None, job: Job) -> plans.Plan | None:
    """The plan of one launch that computes all of y, of what the shard alone would read of x; None if there is none."""
    if job.padding_in_kernel is None or job.cut.padded is None:
        return None
    own = _own(x, tuple(w.shape), job.cut.padded, job)
    return edges.plan_fprop(own, w, b, *job.padding_in_kernel, job.saves_copy)


def plan_wgrad_at_once(dy: Tensor, x: Tensor, w: Tensor, job: Job) -> plans.Plan | None:
    """The plan of one launch that computes all of dw, or None. Rows that others have are in no tensor that it reads."""
    if job.padding_in_kernel is None or job.cut.padded is None or job.halo is not None:
        return None
    own, shape = _own(x, tuple(w.shape), job.cut.padded, job), tuple(w.shape)
    return edges.plan_wgrad(dy, own, shape, plans.layout_of(w), *job.padding_in_kernel)


def _halo(x: Tensor, own: Tensor, messages: Messages, job: Job, rows: HaloRows) -> Tensor:
    """The halo of ``own``, a part of the shard x, as Request has it."""
    received, (n, c, _, width) = received_pixels(messages, job.cut, job.place, x), own.shape
    shape = (n, c, rows.rows, width)
    halo = x.new_empty_strided(shape, strides_of(shape, neighbours_of(own.stride())))
    if sum(run.length for _, run in rows.at) < rows.rows:
        halo.zero_()
    for rim in job.cut.rims:
        for *_, down, across in rim.rectangles():
            pixels, row = _pixels(x, (down, across), received, job.place), rows.at.get((rim, down))
            if row is not None and across.inside:
                halo[:, :, row : row + down.length].copy_(pixels)
    return halo


def _fprop(x: Tensor, w: Tensor, b: Tensor | None, job: Job, keeps: bool) -> tuple[Tensor, list[Tensor]]:
    """y, and the strips of its batches of rims if the caller ``keeps`` them."""
    cut, arrive = job.cut, job.exchange.start(x)
    y, plan = None, plan_at_once(x, w, b, job)
    if plan is not None and cut.padded is not None:
        messages, own = arrive(), _own(x, tuple(w.shape), cut.padded, job)
        halo = [] if job.halo is None else [_halo(x, own, messages, job, job.halo)]
        return edges.run(plan, own, w, b, *halo), _strips(x, messages, job) if keeps else []
    if cut.padded is not None:
        y = plans.fprop(_own(x, tuple(w.shape), cut.padded, job), w, b, job.spec_of(cut.padded))
    strips = _strips(x, arrive(), job)
    for rims, strip in zip(_rims("fprop", x, w, plans.result_layout(x, w), job), strips, strict=True):
        outputs = plans.fprop(strip, oriented(w, rims.upright), b, rims.spec)
        if y is None:
            y = outputs  # the rim is the whole
            continue
        windows = windows_of(y, rims.batch)
        windows.copy_(oriented(outputs, rims.upright).unflatten(0, windows.shape[:2]))
    return x.new_empty(x.shape[0], w.shape[0], *cut.outputs) if y is None else y, strips


def _keep_what_is_outside(strips: list[Tensor], job: Job) -> None:
    """Zeros in the strips for what the convolution of the shard alone reads, too, so that gradients count it once."""
    if job.cut.padded is not None:
        upright = [
            oriented(each, is_upright(batch, job.cut)) for each, batch in zip(strips, job.cut.batches, strict=True)
        ]
        for piece, strip in chain.from_iterable(map(_parts, upright, job.cut.batches)):
            for view, (down, across) in views(strip, piece):
                if down.inside and across.inside:
                    view.zero_()


def _dgrad_of_shard(dy: Tensor, w: Tensor, x_shape: tuple[int, ...], layout: Layout, job: Job) -> Tensor:
    """dx of the convolution of the shard alone. It is copied where that reads a part of x."""
    piece = job.cut.padded
    if piece is None:
        return dy.new_zeros(()).expand(x_shape).contiguous(memory_format=_format(layout))
    rectangle, spec = _part(x_shape, tuple(w.shape), piece, job), job.spec_of(piece)
    if rectangle is None:
        return plans.dgrad(dy, w, x_shape, layout, spec)
    dx = dy.new_zeros(()).expand(x_shape).contiguous(memory_format=_format(layout))
    shape = (*x_shape[:2], *(run.length for run in rectangle))
    take(dx, rectangle).copy_(plans.dgrad(dy, w, shape, layout, spec))
    return dx


def _format(layout: Layout) -> torch.memory_format:
    return torch.channels_last if layout == "nhwc" else torch.contiguous_format


def _wgrad(dy: Tensor, x: Tensor, w: Tensor, strips: list[Tensor], job: Job) -> Tensor:
    """dw: in one launch, or the sum over the shard alone and its rims, in that order; their strips may not be kept."""
    plan = plan_wgrad_at_once(dy, x, w, job)
    if plan is not None and job.cut.padded is not None:
        return edges.run(plan, dy, _own(x, tuple(w.shape), job.cut.padded, job))
    if not strips and job.is_alone:
        strips = _strips(x, {}, job)
        _keep_what_is_outside(strips, job)
    padded, layout, shape, parts = job.cut.padded, plans.layout_of(w), tuple(w.shape), []
    if padded is not None:
        parts.append(plans.wgrad(dy, _own(x, shape, padded, job), shape, layout, job.spec_of(padded)))
    for rims, strip in zip(_rims("wgrad", x, w, plans.layout_of(x), job), strips, strict=True):
        windows = packed_windows(dy, rims.batch, rims.upright)
        filter_shape = tuple(oriented(w, rims.upright).shape)
        parts.append(oriented(plans.wgrad(windows, strip, filter_shape, layout, rims.spec), rims.upright))
    if len(parts) < 2:
        return parts[0] if parts else torch.zeros_like(w)
    total = parts[0].to(torch.promote_types(w.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(w.dtype)


def _gradients_of_strips(dy: Tensor, x: Tensor, w: Tensor, layout: Layout, job: Job) -> Iterator[tuple[Piece, Tensor]]:
    """Each rim, and the gradient of its strip."""
    for rims in _rims("dgrad", x, w, layout, job):
        windows = packed_windows(dy, rims.batch, rims.upright)
        gradient = plans.dgrad(windows, oriented(w, rims.upright), rims.strip_shape, layout, rims.spec)
        yield from _parts(oriented(gradient, rims.upright), rims.batch)


def _by_owner(gradients: Iterable[tuple[Piece, Tensor]], job: Job) -> tuple[list[tuple[Rectangle, Tensor]], Messages]:
    """The gradients of strips as those of this shard's own rectangles, and what others are sent.

    What the convolution of the shard alone reads, too, has its gradient from there.
    """
    own: list[tuple[Rectangle, Tensor]] = []
    sent: dict[Place, list[Tensor]] = defaultdict(list)
    for piece, gradient in gradients:
        for part, (down, across) in views(gradient, piece):
            owner, counted = owner_of((down, across)), job.cut.padded is not None and down.inside and across.inside
            if owner == job.place and not counted:
                own.append(((down, across), part))
            elif owner is not None and owner != job.place:
                sent[owner].append(part.reshape(-1))
    return own, {owner: torch.cat(parts) for owner, parts in sent.items()}


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, job: Job) -> Tensor:
        y, strips = _fprop(x, w, b, job, keeps=ctx.needs_input_grad[1] and not job.is_alone)
        if ctx.needs_input_grad[1] and strips:
            _keep_what_is_outside(strips, job)
        ctx.save_for_backward(x, w, b, *(strips if ctx.needs_input_grad[1] else ()))
        ctx.job, ctx.layer = job, current_layer() if profiler._is_profiler_enabled or logs.names_layers else ""
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        with ctx.job.exchange.telling(), calls_of(ctx.layer) if ctx.layer else nullcontext():
            return _Convolve._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w, b, *strips = ctx.saved_tensors
        job, wanted = ctx.job, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_differentiable_gradients(dy, (x, w, b), wanted, job), None
        layout, exchange = plans.result_layout(x, w), job.exchange
        own: list[tuple[Rectangle, Tensor]] = []
        dx = sent = None
        if wanted[0] and job.padding_in_kernel is not None:
            dx = edges.dgrad(dy, w, tuple(x.shape), layout, *job.padding_in_kernel)
        if wanted[0] and dx is None:
            own, sent = _by_owner(_gradients_of_strips(dy, x, w, layout, job), job)
        dw = _wgrad(dy, x, w, strips, job) if wanted[1] else None
        db = plans.bgrad(dy, job.spec) if wanted[2] else None
        if sent is not None:
            dx = _dgrad_of_shard(dy, w, tuple(x.shape), layout, job)
        # Now that all is launched: blocks of NCCL that wait for another rank would displace those of a kernel.
        arrived, of_weights = exchange.start_back(sent, x, dw, db)()
        if dx is not None:
            for rectangle, gradient in (*own, *arrived):
                give(dx, rectangle, gradient)
        return dx, *of_weights, None


# --- the same for autograd to see, for gradients of gradients


def _differentiable_gradients(dy: Tensor, inputs: Sequence[Any], wanted: Sequence[bool], job: Job) -> tuple[Any, ...]:
    y = _recorded(inputs, job)
    asked = [each for each, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def _recorded(inputs: Sequence[Any], job: Job) -> Tensor:
    """_fprop of operations that each have gradients of any order; interior and rims are copied into y."""
    cut, exchange, x = job.cut, job.exchange, inputs[0]
    strips, empty = recorded_strips(x, cut, job.place, exchange)
    w, b = exchange.replicated(*inputs[1:])
    assert w is not None
    y = x.new_empty(x.shape[0], w.shape[0], *cut.outputs)
    if cut.interior is not None:
        inner = autograd.fprop(take(x, _rectangle(cut.interior)), w, b, job.spec_of(cut.interior))
        y = _written(y, cut.interior, inner)
    for piece, strip in zip(cut.rims, strips, strict=True):
        y = _written(y, piece, autograd.fprop(strip, w, b, job.spec_of(piece)))
    return exchange.tied(y, x, w, b, empty)


def _written(y: Tensor, piece: Piece, values: Tensor) -> Tensor:
    return y.slice_scatter(
        y[:, :, piece.rows.begin : piece.rows.end].slice_scatter(values, 3, piece.columns.begin, piece.columns.end),
        2, piece.rows.begin, piece.rows.end,
    )  # fmt: skip
