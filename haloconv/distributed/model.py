"""``haloconv.distributed.shard_spatially``: a model whose images are sharded over the ranks of a mesh.

Inside its forward pass every function of PyTorch that meets a sharded image is looked up here: it is run on shards with
what they need of each other, it is known to keep pixels apart and left to DTensor, or it is refused by name.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from haloconv.distributed import norms, pixels
from haloconv.distributed.convolution import conv2d
from haloconv.distributed.group import RankError, agree
from haloconv.distributed.image import COLUMNS, ROWS, Image, from_local, image_of, to_local

Tensor = torch.Tensor
Model = TypeVar("Model", bound=torch.nn.Module)


def _conv2d_of_operator(x: DTensor, w: Tensor, b: Tensor | None, *spec: Any, **named: Any) -> DTensor:
    """What layers of haloconv call: the fields of ConvSpec follow the tensors."""
    names = ("stride", "padding", "dilation", "groups", "precision", "family", "strict")
    given = {**dict(zip(names, spec)), **named}  # noqa: B905
    y: DTensor = conv2d(x, w, b, **{**given, "padding": tuple(given["padding"])})
    return y


def _dropout(input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DTensor:
    if training and p > 0:
        raise NotImplementedError(
            "haloconv.distributed: dropout of a sharded image is not that of one process, whose random numbers no rank "
            "has. Set p=0, or call eval()"
        )
    return input


SERVED: dict[Any, Callable[..., DTensor]] = {
    torch.conv2d: conv2d,
    torch.ops.haloconv.fprop: _conv2d_of_operator,
    torch.ops.haloconv.fprop.default: _conv2d_of_operator,
    functional.pad: pixels.pad,
    functional.max_pool2d: pixels.max_pool2d,
    torch.max_pool2d: pixels.max_pool2d,
    functional.avg_pool2d: pixels.avg_pool2d,
    functional.adaptive_avg_pool2d: pixels.adaptive_avg_pool2d,
    functional.interpolate: pixels.interpolate,
    functional.batch_norm: norms.batch_norm,
    functional.group_norm: norms.group_norm,
    functional.dropout: _dropout,
    functional.dropout2d: _dropout,
}
"""Functions that mix pixels or need more than a shard, and what they are of DTensors."""

_ARITHMETIC = (
    "add sub mul div true_divide neg abs exp log sqrt rsqrt square pow clamp clip minimum maximum lerp addcmul"
)
_ACTIVATIONS = (
    "relu relu6 silu gelu elu selu celu leaky_relu hardtanh hardsigmoid hardswish sigmoid tanh softplus mish "
    "logsigmoid softsign threshold _threshold"
)
_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv neg pow abs"
_FORMS = (
    "to float half bfloat16 double type type_as contiguous clone detach requires_grad_ zeros_like ones_like empty_like "
    "size dim ndimension stride numel nelement is_floating_point is_complex is_contiguous element_size "
    "register_hook retain_grad"
)
ON_SHARDS = frozenset([*f"{_ARITHMETIC} {_ACTIVATIONS} where".split(), *(f"__{name}__" for name in _OPERATORS.split())])
"""Names of functions and methods that run on shards alone, where these are divided alike."""
POINTWISE = ON_SHARDS | frozenset(
    [name + "_" for name in f"{_ARITHMETIC} {_ACTIVATIONS}".split()]
    + ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__len__", "__repr__", "__format__", "__hash__"]
    + _FORMS.split()
)
"""Names of functions and methods that keep pixels apart; those in place and of tensors of other forms DTensor runs."""
_NO_GRADIENT_IN_PLACE = ("relu6", "hardtanh", "hardswish", "hardsigmoid", "threshold", "_threshold")
"""What DTensor has no gradients for where it is in place (PyTorch 2.13)."""
_OVER_CHANNELS = {"cat": 1, "concat": 1, "concatenate": 1, "chunk": 2, "split": 2}  # the position of ``dim``
_MIXING_PROPERTIES = ("T", "mT", "H", "mH")


class _SpatialMode(TorchFunctionMode):
    """What functions of sharded images are. ``where()`` names the layer that calls."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.where = where

    @torch.compiler.disable
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        image = next((each for each in _dtensors((args, kwargs)) if _is_spatial(each)), None)
        served = SERVED.get(func)
        if served is not None and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return served(*args, **kwargs)
        if image is None or self._keeps_pixels_apart(func, args, kwargs):
            if image is not None:
                if _is_joined(func, args, kwargs):
                    return pixels.cat(args[0])
                if _is_on_shards(func, args, kwargs, image):
                    return _on_shards(func, args, kwargs, image)
                changed = _in_place(func, args, kwargs, image)
                if changed is not None:
                    return changed
                args, kwargs = tree_map_only(Tensor, partial(_beside, image), (args, kwargs))
            return func(*args, **kwargs)
        where, name = self.where(), _name_of(func)
        raise NotImplementedError(
            f"haloconv.distributed: {name}{f' in {where}' if where else ''} may mix pixels, and of an image that is "
            f"sharded as {list(image.placements)} no rank has all. Leave it out, or do it outside the sharded model, "
            "of image.full_tensor()"
        )

    def _keeps_pixels_apart(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return getattr(getattr(func, "__self__", None), "__name__", "") not in _MIXING_PROPERTIES
        if name in _OVER_CHANNELS:
            at = _OVER_CHANNELS[name]
            return kwargs.get("dim", args[at] if len(args) > at else 0) in (1, -3)
        return name in POINTWISE


def _dtensors(values: object) -> Iterator[DTensor]:
    return (each for each in tree_leaves(values) if isinstance(each, DTensor))


def _is_spatial(x: DTensor) -> bool:
    return any(each.is_shard(ROWS) or each.is_shard(COLUMNS) for each in x.placements)


def _is_on_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], image: DTensor) -> bool:
    """Whether a function of tensors that are all sharded alike gives the same shard by shard."""
    if getattr(func, "__name__", "") not in ON_SHARDS or kwargs.get("inplace") or "out" in kwargs or image.dim() != 4:
        return False
    form = (image.shape, image.placements)
    return not any(each.is_partial() for each in image.placements) and all(
        isinstance(each, DTensor) and (each.shape, each.placements) == form
        for each in tree_leaves((args, kwargs))
        if isinstance(each, Tensor)
    )


def _on_shards(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], image: DTensor, copied: object = None
) -> DTensor:
    """The function of this rank's shards; of a copy of the shard of ``copied``."""

    def local(each: DTensor) -> Tensor:
        return to_local(each).clone() if each is copied else to_local(each)

    args, kwargs = tree_map_only(DTensor, local, (args, kwargs))
    return Image(image.device_mesh, tuple(image.placements)).closed(func(*args, **kwargs), image.shape)


def _out_of_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What gives as a new tensor what a function makes of its first one in place; None of any other function."""
    name: str = getattr(func, "__name__", "")
    if kwargs.get("inplace"):
        return func
    if name.startswith("__i"):
        return getattr(Tensor, f"__{name[3:]}", None)
    if name.endswith("_") and not name.startswith("__"):
        return getattr(Tensor, name[:-1], None) or getattr(functional, name[:-1], None)
    return None


def _in_place(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], image: DTensor
) -> DTensor | None:
    """The first tensor, changed by a function that runs on shards; None where DTensor does that.

    It does not in gradients that it lacks, and it gathers what has fewer rows or columns than there are shards.
    Gradients see a copy of what was there before, as those of PyTorch do.
    """
    plain, rest = _out_of_place(func, kwargs), {name: value for name, value in kwargs.items() if name != "inplace"}
    if plain is None or not _is_on_shards(plain, args, rest, image):
        return None
    at = Image(image.device_mesh, tuple(image.placements))
    is_thin = any(len(at.bounds(image.shape[dim], dim)) - 1 > image.shape[dim] for dim in (0, ROWS, COLUMNS))
    if not is_thin and plain.__name__ not in _NO_GRADIENT_IN_PLACE:
        return None
    first = args[0] if args else kwargs["input"]
    is_recorded = torch.is_grad_enabled() and any(each.requires_grad for each in _dtensors((args, kwargs)))
    value = _on_shards(plain, args, rest, image, copied=first if is_recorded else None)
    changed: DTensor = _AssignInPlace.apply(first, value)
    return changed


class _AssignInPlace(torch.autograd.Function):
    """A DTensor that takes the value of another one, in its own memory."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, value: DTensor) -> DTensor:
        x.to_local().copy_(value.to_local())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[None, DTensor]:
        return None, gradient


def _is_joined(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function is the concatenation along channels of images that are sharded alike."""
    if getattr(func, "__name__", "") not in ("cat", "concat", "concatenate") or "out" in kwargs or not args:
        return False
    forms = {
        (each.shape[:1], each.shape[2:], each.placements, each.dtype) if isinstance(each, DTensor) else None
        for each in args[0]
    }
    if None in forms or len(forms) != 1 or args[0][0].dim() != 4:
        return False
    return not any(each.is_shard(1) or each.is_partial() for each in args[0][0].placements)


def _beside(image: DTensor, value: Tensor) -> Tensor:
    """A plain tensor beside a sharded image, as a parameter: one that all ranks have alike; its gradient is summed."""
    if isinstance(value, DTensor):
        return value
    alike = Image(image.device_mesh, (Replicate(),) * image.device_mesh.ndim)
    return from_local(value, alike, value.shape, value.stride())


def _name_of(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", None) or str(func)
    return f"Tensor.{getattr(owner, '__name__', name)}" if name == "__get__" else name


class _Sharding(threading.local):
    """What the hooks of a sharded model share: the mode of a forward pass, and the layers that run."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.layers: list[tuple[torch.nn.Module, str]] = []
        self.mode: _SpatialMode | None = None
        self.image: DTensor | None = None
        self.handled: BaseException | None = None

    def __deepcopy__(self, memo: dict[str, Any]) -> _Sharding:
        return self

    @torch.compiler.disable
    def enter(self, name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer runs. Raises TypeError if the model is given no image on its mesh."""
        if not self.layers:
            images = [each for each in _dtensors((args, kwargs)) if each.device_mesh == self.mesh]
            if not images and not name:
                raise TypeError(
                    "haloconv.distributed: a model that was sharded takes its images as DTensors on its mesh: "
                    "distribute_tensor(x, mesh, [Shard(2)]) of rows, Shard(3) of columns"
                )
            self.image = next(filter(_is_spatial, images), None)
            self.handled = sys.exc_info()[1]
            self.mode = _SpatialMode(lambda: self.layers[-1][1] if self.layers else "")
            self.mode.__enter__()
        self.layers.append((module, name))

    @torch.compiler.disable
    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        """After a layer ran, also if it failed: then the other ranks hear of it. Raises RankError if another failed."""
        if not self.layers or self.layers[-1][0] is not module:
            return
        self.layers.pop()
        if self.layers or self.mode is None:
            return
        self.mode.__exit__(None, None, None)
        raised = sys.exc_info()[1]
        error = None if raised is self.handled else raised
        image, self.image, self.mode = self.image, None, None
        everyone = None if image is None else image_of(image)[1].all_ranks()
        if everyone is None or isinstance(error, RankError):
            return
        if error is None:
            agree(everyone, "the end of the model's forward pass")
        elif isinstance(error, Exception):
            with contextlib.suppress(Exception):  # this rank raises its own
                agree(everyone, "", error)


def shard_spatially(model: Model, mesh: DeviceMesh) -> Model:
    """Let a model take images that are sharded over a mesh, as DTensors, and give such; changed in place.

    Convolutions (torch.nn.Conv2d and haloconv.Conv2d), max and average pooling, padding, interpolation by integers
    (nearest, bilinear), batch norm in training (statistics of all ranks), group norm, activations, arithmetic pixel by
    pixel, and concatenation along channels give what one process would give. It holds for functions as for layers.
    Whatever else meets an image that is sharded along rows or columns raises NotImplementedError with its name.

    Parameters stay plain tensors, which all ranks must have alike; gradients are sums over all ranks with different
    pixels, so that the ranks' optimizers keep them alike. DDP and FSDP2 go over another dimension of the mesh.

    Args:
        model: names of layers, parameters and state_dict stay as they are.
        mesh: the DeviceMesh that the images will be on, or the part of a larger one.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or it has a SyncBatchNorm, which is BatchNorm2d here. Its forward pass: no
            argument is a DTensor on ``mesh``.
        RankError: in its forward pass, on the other ranks with the sentence of one that failed.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard_spatially takes a module and a DeviceMesh, not {type(model).__name__} and {type(mesh).__name__}"
        )
    sharding = _Sharding(mesh)
    named = list(model.named_modules())
    for name, module in named:
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise TypeError(
                f"haloconv.distributed: {name or 'the model'} is a SyncBatchNorm, whose statistics go over ranks of "
                "its own. Take BatchNorm2d: those of a sharded model are of all its ranks"
            )
    for name, module in named:
        module.register_forward_pre_hook(partial(sharding.enter, name), with_kwargs=True, prepend=True)
        module.register_forward_hook(sharding.leave, always_call=True)
    return model
