"""The outputs of a model and its gradients by name, whatever it is called with and whatever it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.utils import _pytree

from haloconv.layout import Layout
from haloconv.plan import layout_of
from haloconv.precompile import evaluating
from haloconv.problem_file import Inputs, how_it_ended, map_tensors, tensors_in
from haloconv.reference import unsearched

Values = dict[str, torch.Tensor]

GRADIENT = "gradient of "
"""How the names of gradients begin."""


class ModelError(Exception):
    """A model cannot be used; the message is a sentence for the person who wrote it."""


def values_of(model: torch.nn.Module, inputs: Inputs, seed: int, gradients: bool = True) -> Values:
    """The outputs, the gradients of the inputs' tensors and of the parameters, by name; or the outputs alone.

    The output gradients are standard normal, the same for every dtype. The model gets copies of the tensors that are
    no leaves of the graph, so that it may change them in place. All are copies: the next call of a compiled model may
    write where this one did.
    """
    leaves = map_tensors(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), inputs)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradients):
        outputs = output_tensors(model(*map_tensors(torch.clone, leaves)))
        _backward(outputs, seed)
    values = {name: tensor.detach().clone() for name, tensor in outputs.items()}
    values |= {f"{GRADIENT}input {i}": x.grad for i, x in enumerate(tensors_in(leaves)) if x.grad is not None}
    values |= {f"{GRADIENT}{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return values


def output_tensors(output: object) -> Values:
    """The floating-point tensors in a model's output, named ``output`` or ``output 0``, ``output 1``...

    Complex ones are pairs of real numbers. They may stand in lists, tuples, dicts and fields of dataclasses.
    """
    leaves = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point()]
    return {"output" if len(leaves) == 1 else f"output {i}": leaf for i, leaf in enumerate(leaves)}


def _leaves(output: object) -> list[object]:
    found: list[object] = []
    for leaf in _pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, each.name) for each in dataclasses.fields(leaf)])
        else:
            found.append(leaf)
    return found


def _backward(outputs: Values, seed: int) -> None:
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [normal(root, seed + i) for i, root in enumerate(roots)])


def normal(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Standard normal numbers of the tensor's shape, dtype and device."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def device_of(inputs: Inputs) -> torch.device:
    """The device of the first tensor among a model's arguments."""
    return tensors_in(inputs)[0].device


def image_layout(inputs: Inputs) -> Layout:
    """The memory order of the first tensor of 4 dimensions, ``"nchw"`` if there is none."""
    return next((layout_of(x) for x in tensors_in(inputs) if x.dim() == 4), "nchw")


def warmed(model: torch.nn.Module, inputs: Inputs) -> tuple[object, Callable[[], Inputs]]:
    """The output of a call without a graph, and a function that gives the arguments for one more call.

    They are the inputs themselves, or copies for a model that changes them in place: then each call needs its own.
    """
    given = map_tensors(torch.clone, inputs)
    before = [x._version for x in tensors_in(given)]
    with torch.no_grad():
        output = model(*given)
    if before == [x._version for x in tensors_in(given)]:
        return output, lambda: inputs
    return output, lambda: map_tensors(torch.clone, inputs)


def forward_call(
    model: torch.nn.Module, output: object, arguments: Callable[[], Inputs], seed: int
) -> Callable[[], object]:
    """Inference, to be timed. The arguments are those of ``step_call``."""

    def call() -> object:
        with torch.no_grad():
            return model(*arguments())

    return call


def step_call(
    model: torch.nn.Module, output: object, arguments: Callable[[], Inputs], seed: int
) -> Callable[[], object]:
    """Forward and backward as in training, to be timed: gradients of the parameters, none of the inputs.

    ``output`` is like what the model returns, ``arguments`` gives those of a call, ``seed`` fixes output gradients.
    """
    gradients = [normal(tensor, seed) for tensor in output_tensors(output).values()]

    def call() -> None:
        pairs = zip(output_tensors(model(*arguments())).values(), gradients, strict=True)
        wanted = [(root, gradient) for root, gradient in pairs if root.requires_grad]
        if wanted:
            torch.autograd.backward([root for root, _ in wanted], [gradient for _, gradient in wanted])
        model.zero_grad(set_to_none=True)

    return call


def check_model(model: torch.nn.Module, inputs: Inputs) -> None:
    """Run the model once, in evaluation mode, and raise ModelError unless there is something to compare in its output.

    That is: it runs, and returns floating-point tensors of which some element is neither NaN nor infinite.
    """
    for i, x in enumerate(inputs):
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and tensor.numel() and tensor.isnan().all():
                raise ModelError(f"every element of get_inputs()[{i}] is NaN, so nothing can be compared")
    with torch.no_grad(), evaluating(model), unsearched():
        output = run_theirs(lambda: model(*map_tensors(torch.clone, inputs)), "Model's forward")
    tensors = output_tensors(output).values()
    if not tensors:
        kind = type(output).__name__
        raise ModelError(f"Model's forward returned no floating-point tensor ({kind}), so nothing can be compared")
    if not any(tensor.isfinite().any() for tensor in tensors):
        raise ModelError("Model's forward returned no finite number, so nothing can be compared")


def run_theirs(call: Callable[[], object], what: str) -> object:
    """Call what is not haloconv's. Raises ModelError for what it raises; OutOfMemoryError and Ctrl-C pass."""
    try:
        return call()
    except (KeyboardInterrupt, torch.cuda.OutOfMemoryError):
        raise
    except BaseException as error:
        raise ModelError(f"{what} {how_it_ended(error)}") from error
