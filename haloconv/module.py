"""``haloconv.Conv2d``: torch.nn.Conv2d on our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from haloconv import logs
from haloconv import plan as plans
from haloconv.autograd import Call
from haloconv.choose.choice import Choice, choose
from haloconv.functional import behind_casts, cached_spec, check_names, convolve, is_plain_call, make_spec
from haloconv.layout import is_channels_last
from haloconv.library import autocast_dtype, autocast_to
from haloconv.plan import problem_of
from haloconv.precision import Precision, torch_precision
from haloconv.problem import ConvSpec, Pair
from haloconv.profiling import calls_of, current_layer, named_range, profiler
from haloconv.reclass import change_class, why_not_plain
from haloconv.support import why_not_elements

_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_MOST_CALLS = 64  # that a layer keeps
_SPEC_NAMES = frozenset(
    ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "precision", "family", "strict")
)
_DERIVED = frozenset(("_spec", "_last_input", "_calls"))  # noted in calls, in this process and for its devices
OWN_NAMES = frozenset(("precision", "family", "strict", "swapped", "_layer_name")) | _DERIVED
"""What a layer of ours has on top of a torch.nn.Conv2d."""

NOT_QUANTISED = (
    "torch.ao.quantization knows layers by their exact type and would leave a haloconv.Conv2d in floating point "
    "without a word. Call haloconv.restore(model) before prepare, and accelerate after convert what stays in floating "
    "point; or keep the layer in floating point by a qconfig of None: layer.qconfig = None, or "
    "QConfigMapping().set_object_type(type(layer), None)"
)
NOT_SCRIPTED = (
    "torch.jit.script cannot compile a haloconv.Conv2d. Use torch.jit.trace, torch.export or torch.compile, which run "
    "our kernels; or call haloconv.restore(model) first, and script PyTorch's layers"
)


class Conv2d(torch.nn.Conv2d):
    """A drop-in for torch.nn.Conv2d: same constructor, parameters in the same order, same state_dict, same results.

    It takes (N, C, H, W), or (C, H, W) for one image, and gives (N, K, P, Q) or (K, P, Q), where
    P = (H + top + bottom - dilation * (R - 1) - 1) // stride + 1 and Q likewise; channels_last if input or weight is.

    Args:
        in_channels: C, divisible by ``groups``.
        out_channels: K, divisible by ``groups``.
        kernel_size: rows R and columns S of a filter, an int or (R, S).
        stride: pixels between neighbours of the output, an int or (vertical, horizontal).
        padding: pixels around the image: an int, (vertical, horizontal), (top, bottom, left, right), ``"same"`` or
            ``"valid"``.
        dilation: pixels between neighbours of the filter, an int or (vertical, horizontal).
        groups: number of groups.
        bias: whether (K,) numbers are learned and added.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``; but for zeros PyTorch pads a copy.
        device: where the parameters are.
        dtype: their dtype: our kernels take float32, float16, bfloat16 and float64.
        precision: how fp32 products are formed: ``"ieee"``, ``"tf32"``, or None to follow PyTorch's setting.
        family: ``"auto"``, or the family that runs what it takes; haloconv.conv2d names them.
        strict: raise RuntimeError instead of running PyTorch's convolution where our kernels do not take the problem.

    ``weight`` is (K, C / groups, R, S), ``bias`` (K,) or None. ``swapped`` is true for what haloconv.accelerate made of
    a torch.nn.Conv2d, and haloconv.restore turns back.

    Raises:
        ValueError: an unknown ``precision`` or ``family``, or what torch.nn.Conv2d raises ValueError for.
        RuntimeError, TypeError: what torch.nn.Conv2d raises for arguments or inputs that it refuses.
    """

    swapped = False
    original: type[torch.nn.Conv2d] = torch.nn.Conv2d  # what haloconv.restore makes of a layer of exactly this class
    one_spec = True  # for images of all extents
    precision: Precision | None = None  # these three for layers from files that were written before there was one
    family: str = "auto"
    strict: bool = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> None:
        check_names(precision, family)
        sides = tuple(padding) if isinstance(padding, (tuple, list)) and len(padding) == 4 else None
        inherited = padding if sides is None else 0
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            inherited,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        if sides is not None:
            top, bottom, left, right = self.padding = sides
            self._reversed_padding_repeated_twice = [left, right, top, bottom]
        self.set_up(precision, family, strict)

    @classmethod
    def from_torch(
        cls, conv: torch.nn.Conv2d, *, precision: Precision | None = None, family: str = "auto", strict: bool = False
    ) -> Conv2d:
        """``conv`` as a haloconv layer that shares its parameters and keeps its hooks, mode, device and dtype.

        Raises TypeError if ``conv`` is not a torch.nn.Conv2d, or a subclass that may compute something else; ValueError
        for an unknown precision or family.
        """
        if not isinstance(conv, torch.nn.Conv2d):
            raise TypeError(f"from_torch() takes a torch.nn.Conv2d, not {type(conv).__name__}")
        check_names(precision, family)
        ours = isinstance(conv, Conv2d)
        reason = None if ours else why_not_plain(conv, OWN_NAMES)
        if reason is not None:
            raise TypeError(f"from_torch() takes what computes exactly what torch.nn.Conv2d does: {reason}")
        layer = cls.__new__(cls) if ours else torch.nn.Conv2d.__new__(type(conv))
        layer.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(conv).items()}
        )
        layer._compiled_call_impl = None  # it would call ``conv``
        if not ours:
            change_class(layer, torch.nn.Conv2d, cls)
        layer.set_up(precision, family, strict)
        layer.__dict__.pop("swapped", None)
        return layer

    def set_up(self, precision: Precision | None, family: str, strict: bool) -> None:
        """Take these settings from the next call on."""
        self.precision, self.family, self.strict = precision, family, strict

    def __getstate__(self) -> dict[str, object]:
        """What copies and files get: the settings, without what was derived from them in calls."""
        return {name: value for name, value in super().__getstate__().items() if name not in _DERIVED}

    def __setattr__(self, name: str, value: object) -> None:
        if name == "qconfig" and value is not None:
            raise RuntimeError(NOT_QUANTISED)
        super().__setattr__(name, value)
        if name in _SPEC_NAMES:
            self.__dict__.pop("_spec", None)
            self.__dict__.pop("_calls", None)

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What torch.jit.script asks for, to compile it instead of the layer: raises RuntimeError with the ways out."""
        raise RuntimeError(NOT_SCRIPTED)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, K, P, Q) of ``input`` (N, C, H, W), or (K, P, Q) of (C, H, W). Raises as haloconv.conv2d."""
        parameters = self.__dict__["_parameters"]  # past nn.Module.__getattr__; a parametrized one is not in here
        weight = parameters.get("weight")
        bias = parameters.get("bias") if "bias" in parameters else self.bias
        return self._conv_forward(input, self.weight if weight is None else weight, bias)

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The convolution with a family chosen. What ran for tensors of a form is kept for the calls that follow, as
        long as nothing changes that the choice depends on; where all that a call needs goes to PyTorch, they are
        PyTorch's own calls, autocast and all.
        """
        calls = None
        if not _is_compiling():
            if (profiler._is_profiler_enabled or logs.names_layers) and current_layer() != self._shown_name():
                with calls_of(self._shown_name()):
                    return self._conv_forward(input, weight, bias)
            calls = self.__dict__.get("_calls")
        if calls is not None and type(input) is torch.Tensor:
            place, form = _form_of(input, weight, bias)
            known = calls.get(place)
            if known is not None and known[0] == form:
                _, (function, arguments, native), details = known
                if profiler._is_profiler_enabled:
                    if native:
                        with named_range("fprop", "aten"):
                            return function(input, weight, bias, *arguments)
                elif native or (is_plain_call() and details == _details_of(input, weight, bias, form)):
                    return function(input, weight, bias, *arguments)
        return self._first_call(input, weight, bias)

    def _first_call(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The convolution of tensors of a form whose call is not kept; after it, it is, where it may be."""
        if not isinstance(input, torch.Tensor):
            if isinstance(input, torch.fx.Proxy):
                return self._traced(input, weight, bias)
            raise TypeError(f"conv2d(): input must be a Tensor, not {type(input).__name__}")
        spec = self.__dict__.get("_spec") or self._new_spec(input.shape[-2:])
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if type(input) is torch.Tensor and not _is_compiling():  # extents of fake tensors may be symbols
            dtype = autocast_dtype(input) if _any_autocast() else input.dtype
            self.__dict__["_last_input"] = (input.shape, input.stride(), dtype, input.device)
        notes: list[Call] = []
        y = convolve(input, weight, bias, spec, notes)
        if notes and self.padding_mode == "zeros" and type(input) is torch.Tensor:
            self._keep(notes[0], input, weight, bias)
        return y

    def _keep(self, call: Call, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Let later calls with tensors of this form be this one."""
        calls = self.__dict__.setdefault("_calls", {})
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        place, form = _form_of(x, w, b)
        calls[place] = (form, behind_casts(call, x, w, b), _details_of(x, w, b, form))

    def _shown_name(self) -> str:
        """The layer's name in the model that was accelerated, else what it is."""
        return self.__dict__.get("_layer_name") or f"{type(self).__name__}({super().extra_repr()})"

    def _traced(self, input: torch.fx.Proxy, weight: object, bias: object) -> torch.fx.Proxy:
        """The node of torch.fx for a call: the layer stays whole, as those of torch.nn do."""
        return input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})

    @staticmethod
    def padding_for(layer: torch.nn.Conv2d, image: Sequence[int]) -> int | tuple[int, ...] | str:
        """conv2d's ``padding`` for an image of these extents (H, W); ``layer`` may still be of PyTorch's class."""
        return layer.padding if layer.padding_mode == "zeros" else 0

    def _new_spec(self, image: Sequence[int]) -> ConvSpec:
        """What the attributes ask for of an image (H, W); if of all, it is kept until one of them is assigned."""
        padding = self.padding_for(self, image)
        extent, choice = self.kernel_size, (self.precision, self.family, self.strict)
        arguments = (self.stride, padding, self.dilation, self.groups, extent, *choice)
        if _is_compiling():
            return make_spec(*arguments)
        if not self.one_spec:
            pairs = tuple(self.stride), padding, tuple(self.dilation), self.groups, tuple(extent)
            return cached_spec(*pairs, *choice)
        spec = self.__dict__["_spec"] = make_spec(*arguments)
        return spec

    def extra_repr(self) -> str:
        choice = self.choice() if "_last_input" in vars(self) else None
        in_use = "" if choice is None or choice.family == self.family else f" -> {choice.family} ({choice.reason})"
        return f"{super().extra_repr()}, {self.settings()}{in_use}"

    def settings(self) -> str:
        """Precision and family that are asked for, in words."""
        precision = self.precision or f"{torch_precision()} (PyTorch's setting)"
        return f"precision={precision}, family={self.family}" + (", strict" if self.strict else "")

    def choice(self) -> Choice | None:
        """The family that runs fprop of the last input, and why. None before the first, unless it is known without."""
        seen = vars(self).get("_last_input")
        if self.family == "aten":
            return Choice("aten", "asked for")
        if seen is None:
            return self._choice_by_elements()
        shape, strides, dtype, device = seen
        if len(shape) == 3:
            shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
        weight = self.weight
        nhwc = is_channels_last(shape, strides) or is_channels_last(weight.shape, weight.stride())
        layout, bias = "nhwc" if nhwc else "nchw", self.bias is not None
        problem = problem_of("fprop", tuple(shape), tuple(weight.shape), self._new_spec(shape[-2:]), dtype, layout)
        return choose(replace(problem, bias=bias), device, self.family)

    def _choice_by_elements(self) -> Choice | None:
        """PyTorch's convolution if no kernel of ours takes the parameters' dtype and device, else None."""
        parameter = next(self.parameters(), None)
        if parameter is None or parameter.device.type == "meta":
            return None
        reason = why_not_elements(parameter.dtype, parameter.device)
        return None if reason is None else Choice("aten", reason, refused=True)


def _form_of(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> tuple[tuple, tuple]:
    """What the choice of a family depends on: what may alternate from call to call, and what seldom changes."""
    wanted = _grad_enabled() and (x.requires_grad, w.requires_grad, b is not None and b.requires_grad)
    tensors = (x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
    return (x.shape, wanted), (tensors, torch_precision(), plans.generation, _any_autocast())


def _details_of(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, form: tuple) -> tuple:
    """What a call of ours depends on besides: alignment, classes, the bias, and autocast's dtype if there is one."""
    bias = None if b is None else (type(b), b.shape, b.dtype, b.device)
    return (x.data_ptr() | w.data_ptr()) & 15, type(w), bias, form[3] and autocast_to(x.device.type)
