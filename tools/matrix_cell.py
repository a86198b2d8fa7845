"""What ``make matrix`` runs in each environment: the installed wheel as a stranger first uses it, on the CPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

import torch

warnings.simplefilter("error", DeprecationWarning)  # of ours: PyTorch is imported, and may warn as it likes

import haloconv  # noqa: E402


def check_layer() -> None:
    """Forward and every gradient are PyTorch's, bit for bit: on a CPU its own convolution runs."""
    torch.manual_seed(0)
    ours = haloconv.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), groups=2)
    theirs = torch.nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), groups=2)
    theirs.load_state_dict(ours.state_dict())
    inputs = [torch.randn(2, 6, 13, 17).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    results = [layer(x) for layer, x in zip((ours, theirs), inputs, strict=True)]
    for y in results:
        y.square().sum().backward()
    pairs = [results, inputs_grads(inputs), inputs_grads(ours.parameters()), inputs_grads(theirs.parameters())]
    torch.testing.assert_close(*pairs[0], rtol=0, atol=0)
    torch.testing.assert_close(*pairs[1], rtol=0, atol=0)
    torch.testing.assert_close(pairs[2], pairs[3], rtol=0, atol=0)


def inputs_grads(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of some tensors."""
    return [tensor.grad for tensor in tensors]


def check_model() -> None:
    """A small network, swapped in place, trained a step, tuned and swapped back."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1, bias=False))
    x = torch.randn(2, 3, 9, 9)
    before = model(x)
    swapped = haloconv.accelerate(model)
    if len(swapped) != 2 or "2 of 2 convolutions swapped" not in str(swapped):
        raise AssertionError(f"accelerate reports {swapped}")
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    if not haloconv.tune(model, x).notes:
        raise AssertionError("tune reports nothing")
    haloconv.restore(model)
    if [type(model[i]) for i in (0, 2)] != [torch.nn.Conv2d] * 2:
        raise AssertionError("restore left layers of haloconv")


def main() -> None:
    if not haloconv.__file__.startswith(sys.prefix):
        raise AssertionError(f"haloconv comes from {haloconv.__file__}, not from the wheel")
    check_layer()
    check_model()
    print(torch.__version__)


if __name__ == "__main__":
    main()
