"""Whether a call of a function beside conv2d is right: output and all gradients, on small integers, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from haloconv.emulator import EmulatorError, emulated_device
from haloconv.precision import convolution_precision
from tests import oracle
from tests.cases import generator
from tests.exact import integers
from tests.fuzz.front_draw import PRECISIONS, FrontDraw
from tests.fuzz.outcome import Checked, Failure
from tests.launches import launched

RESULTS = ("y", "dx", "dw", "db")
OF_PYTORCH = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # its relative error where no kernel of ours ran; else 1e-6
Tensor = torch.Tensor


def check_front(draw: FrontDraw, device: str) -> list[Checked] | Failure:
    """Run the call twice, under two schedules: all gradients at once, and each alone. What was right, or a failure.

    What a kernel of ours computed is the reference's bits, PyTorch's function of that name in float64, each sum rounded
    once; what PyTorch computed, which may round in between, within its own error.
    """
    result, checked = "y", []
    try:
        operands = operands_of(draw, device)
        want = wanted(draw, operands)
        with oracle.Unchanged(operands):
            together = run(draw, operands, device, alone=False)
            alone = run(draw, operands, device, alone=True)
        for result, (got, kernels) in alone.items():
            for each in (got, together[result][0]):
                check_form(draw, each, want[result])
                if kernels:
                    check_sums(each.cpu(), want[result])
                else:
                    check_of_pytorch(draw, result, each, want[result], operands)
            assert not kernels or oracle.same_bits(got, together[result][0]), "a second run gave other bits"
            checked.append(Checked(kernels, "exact", 0.0))
    except (AssertionError, EmulatorError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return Failure(draw, f"{draw.function}, {result}", f"{type(error).__name__}: {first}")
    return checked


def operands_of(draw: FrontDraw, device: str) -> list[Tensor | None]:
    """x, w, b or None, and dy: integers without a zero, in their forms."""
    gen, (dtype, _) = generator(f"{draw} exact", device), PRECISIONS[draw.precision]
    x, dy = (integers(shape, dtype, gen) for shape in (draw.x, (draw.x[0], draw.filters, *draw.image)))
    b = integers((draw.filters,), dtype, gen) if draw.bias else None
    w = stored(integers(draw.w, dtype, gen), draw.second)
    x, dy = stored(x, draw.first), stored(dy, draw.third)
    return [x, w, b, dy] if draw.batched else [x[0], w, b, dy[0]]


def stored(tensor: Tensor, form: str) -> Tensor:
    """The values of the tensor in another form of memory; for ``"expanded"`` the first image or filter, repeated."""
    if form == "neighbours":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if form == "expanded":
        return tensor[:1].expand_as(tensor)
    if form == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if form == "offset":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return tensor


def wanted(draw: FrontDraw, operands: list[Tensor | None]) -> dict[str, Tensor]:
    """The float64 answers of PyTorch's function, on the CPU."""
    wide = [None if each is None else each.detach().cpu().double() for each in operands]
    answers, (x, w, b, dy) = of_pytorch(draw, wide), wide
    assert x is not None and w is not None and dy is not None
    if b is not None and draw.one.transposed:  # a kernel of its own adds the bias: y is rounded before, too
        plain = of_pytorch(draw, [x, w, None, dy])["y"]
        dtype, _ = PRECISIONS[draw.precision]
        answers["y"] = plain.to(dtype).double() + b.reshape(-1, *[1] * (dy.dim() - 1 - draw.batched))
    return answers


def of_pytorch(draw: FrontDraw, operands: list[Tensor | None]) -> dict[str, Tensor]:
    """What PyTorch's function gives of these operands, in their dtype and on their device.

    Padding that differs between the ends of a signal, which it does not have, is a padded copy.
    """
    x, w, b, dy = operands
    assert x is not None and w is not None and dy is not None
    leaves = [each.detach().requires_grad_() for each in (x, w, b) if each is not None]
    options = draw.options()
    image = leaves[0]
    if len(draw.padding) > len(draw.stride) and len({*draw.padding}) == 1:
        options["padding"] = draw.padding[0]
    elif len(draw.padding) > len(draw.stride):
        image, options["padding"] = torch.nn.functional.pad(image, draw.padding), 0
    y = draw.one.theirs(image, *leaves[1:], **options)
    return dict(zip(RESULTS, [y.detach(), *torch.autograd.grad(y, leaves, dy)], strict=False))


def run(draw: FrontDraw, operands: list[Tensor | None], device: str, *, alone: bool) -> dict[str, tuple]:
    """Output and gradients of our function on poisoned memory, each with the kernels launched for it.

    Each gradient ``alone`` is that of a call in which no other one is wanted; else the kernels are those of all.
    """
    *tensors, dy = operands
    emulated = emulated_device(draw.seed + alone, draw.sm_count, draw.arch) if device == "cpu" else nullcontext()
    fences = oracle.RedZones(device) if device == "cuda" else None
    found: dict[str, tuple] = {}
    with emulated, fences or nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a family that does not take the call
        names = [name for name, each in zip(RESULTS[1:], tensors, strict=True) if each is not None]
        for wanted in [[], *([name] for name in names)] if alone else [names]:
            given = [
                None if each is None else each.detach().requires_grad_(name in wanted)
                for name, each in zip(RESULTS[1:], tensors, strict=True)
            ]
            with launched() as of_y:
                y = called(draw, given)
            found.setdefault("y", (y.detach(), frozenset(of_y)))
            with launched() as of_gradients:
                leaves = [each for each in given if each is not None and each.requires_grad]
                gradients = torch.autograd.grad(y, leaves, dy) if leaves else ()
            for name, each in zip(wanted, gradients, strict=True):
                found[name] = (each, frozenset(of_gradients))
    if fences is not None:
        fences.check()
    return found


def called(draw: FrontDraw, given: list[Tensor | None]) -> Tensor:
    _, precision = PRECISIONS[draw.precision]
    y: Tensor = draw.one.ours(*given, **draw.options(), precision=precision, family=draw.family)
    return y


def check_form(draw: FrontDraw, got: Tensor, want: Tensor) -> None:
    """Raises AssertionError unless the result has its shape and dtype."""
    dtype, _ = PRECISIONS[draw.precision]
    assert got.shape == want.shape and got.dtype == dtype, f"{tuple(got.shape)} {got.dtype}, not {tuple(want.shape)}"


def check_sums(got: Tensor, want: Tensor) -> None:
    """Raises AssertionError unless a kernel's sums of integers are the reference's bits."""
    assert not want.numel() or want.abs().max() < oracle.EXACT_SUMS, "these sums are not exact in fp32"
    want = want.to(got.dtype)
    wrong = (got != want).nonzero()
    where = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), (
        f"{len(wrong)} of {got.numel()} sums of integers are wrong, the first at {where}: got {got[where].item()}, "
        f"expected {want[where].item()}"
    )


def after_other_values() -> Iterator[None]:
    """Several times, each after memory of many sizes was filled with large numbers and given back."""
    for _ in range(8):
        held = [torch.full((1 << size,), 1e30) for size in range(4, 16) for _ in range(4)]
        del held
        yield


def check_of_pytorch(draw: FrontDraw, result: str, got: Tensor, want: Tensor, operands: list[Tensor | None]) -> None:
    """Raises AssertionError unless what PyTorch computed is within its error, or PyTorch's function, called directly
    on these operands, is off as well.

    On some CPUs it is: PyTorch 2.13 gives other weight gradients than in float64 of depthwise layers in channels_last
    whose axis has a stride and a dilation, and other forwards and weight gradients in bf16 of strided layers whose
    output is one column. These depend on what memory held before, so the function is called after other values.
    """
    limit = OF_PYTORCH.get(got.dtype, 1e-6)
    error = relative_norm(got, want)
    if error <= limit:
        return
    with convolution_precision("ieee"):
        direct = [relative_norm(of_pytorch(draw, operands)[result], want) for _ in after_other_values()]
    assert any(not each <= limit for each in direct), (
        f"PyTorch's: off by {error:.1e} of the norm, {max(direct):.1e} at most where it is called directly"
    )


def relative_norm(got: Tensor, want: Tensor) -> float:
    """The norm of the difference by that of the reference; 0 where both are 0, NaN of a NaN."""
    difference, size = float((got.cpu().double() - want).norm()), float(want.norm())
    return difference / size if size else difference
