"""What all layers of haloconv share: settings, states, repr, and calls that are kept for tensors of a form."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from haloconv import logs
from haloconv import plan as plans
from haloconv.autograd import Call
from haloconv.choose.choice import Choice, choose
from haloconv.functional import behind_casts, check_names, is_plain_call
from haloconv.library import autocast_dtype, autocast_to
from haloconv.precision import Precision, torch_precision
from haloconv.problem import Problem
from haloconv.profiling import calls_of, current_layer, named_range, profiler
from haloconv.reclass import change_class, why_not_plain
from haloconv.support import why_not_elements

Tensor = torch.Tensor
OwnLayer = TypeVar("OwnLayer", bound="Layer")
_Kept = tuple[tuple[object, ...], Call, tuple[object, ...]]  # the form of tensors, its call, and details of the form

_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_MOST_CALLS = 64  # that a layer keeps
_SPEC_NAMES = frozenset(
    ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "precision", "family", "strict")
) | {"output_padding"}
_DERIVED = frozenset(("_spec", "_last_input", "_calls"))  # noted in calls, in this process and for its devices
OWN_NAMES = frozenset(("precision", "family", "strict", "swapped", "_layer_name")) | _DERIVED
"""What a layer of ours has on top of PyTorch's."""

NOT_QUANTISED = (
    "torch.ao.quantization knows layers by their exact type and would leave a layer of haloconv in floating point "
    "without a word. Call haloconv.restore(model) before prepare, and accelerate after convert what stays in floating "
    "point; or keep the layer in floating point by a qconfig of None: layer.qconfig = None, or "
    "QConfigMapping().set_object_type(type(layer), None)"
)
NOT_SCRIPTED = (
    "torch.jit.script cannot compile a layer of haloconv. Use torch.jit.trace, torch.export or torch.compile, which "
    "run our kernels; or call haloconv.restore(model) first, and script PyTorch's layers"
)


class Layer(torch.nn.modules.conv._ConvNd):
    """The part of haloconv.Conv2d, Conv1d, ... that stands above PyTorch's class of that name.

    ``torch_class`` is that class. A class below it has ``_run``, which convolves, and ``_problem_of``.
    ``swapped`` is true for what haloconv.accelerate made of a layer of PyTorch's.
    """

    swapped = False
    torch_class: type[torch.nn.modules.conv._ConvNd]
    original: type[torch.nn.modules.conv._ConvNd]  # what haloconv.restore makes of a layer of exactly this class
    function_name: str  # its name in torch.nn.functional
    precision: Precision | None = None  # these three for layers from files that were written before there was one
    family: str = "auto"
    strict: bool = False

    @classmethod
    def from_torch(
        cls: type[OwnLayer],
        conv: torch.nn.modules.conv._ConvNd,
        *,
        precision: Precision | None = None,
        family: str = "auto",
        strict: bool = False,
    ) -> OwnLayer:
        """``conv`` as a haloconv layer that shares its parameters and keeps its hooks, mode, device and dtype.

        Raises TypeError if ``conv`` is not of PyTorch's class of this name, or of a subclass that may compute something
        else; ValueError for an unknown precision or family.
        """
        if not isinstance(conv, cls.torch_class):
            raise TypeError(f"from_torch() takes a torch.nn.{cls.torch_class.__name__}, not {type(conv).__name__}")
        check_names(precision, family)
        ours = isinstance(conv, Layer)
        reason = None if ours else why_not_plain(conv, OWN_NAMES, cls.torch_class)
        if reason is not None:
            name = cls.torch_class.__name__
            raise TypeError(f"from_torch() takes what computes exactly what torch.nn.{name} does: {reason}")
        layer: Any = cls.__new__(cls) if ours else cls.torch_class.__new__(type(conv))
        layer.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(conv).items()}
        )
        layer._compiled_call_impl = None  # it would call ``conv``
        if not ours:
            change_class(layer, cls.torch_class, cls)
        layer.set_up(precision, family, strict)
        layer.__dict__.pop("swapped", None)
        own: OwnLayer = layer
        return own

    def set_up(self, precision: Precision | None, family: str, strict: bool) -> None:
        """Take these settings from the next call on."""
        self.precision, self.family, self.strict = precision, family, strict

    def __getstate__(self) -> dict[str, object]:
        """What copies and files get: the settings, without what was derived from them in calls."""
        return {name: value for name, value in super().__getstate__().items() if name not in _DERIVED}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig" and value is not None:
            raise RuntimeError(NOT_QUANTISED)
        super().__setattr__(name, value)
        if name in _SPEC_NAMES:
            self.__dict__.pop("_spec", None)
            self.__dict__.pop("_calls", None)

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What torch.jit.script asks for, to compile it instead of the layer: raises RuntimeError with the ways out."""
        raise RuntimeError(NOT_SCRIPTED)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of ``input``. Raises as the function of haloconv that has the layer's name."""
        parameters = self.__dict__["_parameters"]  # past nn.Module.__getattr__; a parametrized one is not in here
        weight = parameters.get("weight")
        bias = parameters.get("bias") if "bias" in parameters else self.bias
        return self._conv_forward(input, self.weight if weight is None else weight, bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution with a family chosen. What ran for tensors of a form is kept for the calls that follow, as
        long as nothing changes that the choice depends on; where all that a call needs goes to PyTorch, they are
        PyTorch's own calls, autocast and all.
        """
        calls: dict[tuple[object, ...], _Kept] | None = None
        if not _is_compiling():
            if (profiler._is_profiler_enabled or logs.names_layers) and current_layer() != self._shown_name():
                with calls_of(self._shown_name()):
                    return self._conv_forward(input, weight, bias)
            calls = self.__dict__.get("_calls")
        if calls is not None and type(input) is Tensor:
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

    def _first_call(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of tensors of a form whose call is not kept; after it, it is, where it may be."""
        if not isinstance(input, Tensor):
            if isinstance(input, torch.fx.Proxy):
                return self._traced(input, weight, bias)
            raise TypeError(f"{self.function_name}(): input must be a Tensor, not {type(input).__name__}")
        notes: list[Call] = []
        y = self._run(input, weight, bias, notes)
        if notes and type(input) is Tensor:
            self._keep(notes[0], input, weight, bias)
        return y

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Call]) -> Tensor:
        """The convolution. ``notes`` gets the call that does the same for tensors of this form, if there is one."""
        raise NotImplementedError

    def _noted(self, input: Tensor) -> Tensor:
        """The input, noted as the last that was seen."""
        if type(input) is Tensor and not _is_compiling():  # extents of fake tensors may be symbols
            dtype = autocast_dtype(input) if _any_autocast() else input.dtype
            self.__dict__["_last_input"] = (input.shape, input.stride(), dtype, input.device)
        return input

    def _keep(self, call: Call, x: Tensor, w: Tensor, b: Tensor | None) -> None:
        """Let later calls with tensors of this form be this one."""
        calls = self.__dict__.setdefault("_calls", {})
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        place, form = _form_of(x, w, b)
        calls[place] = (form, behind_casts(call, x, w, b), _details_of(x, w, b, form))

    def _shown_name(self) -> str:
        """The layer's name in the model that was accelerated, else what it is."""
        return self.__dict__.get("_layer_name") or f"{type(self).__name__}({super().extra_repr()})"

    def _traced(self, input: Any, weight: object, bias: object) -> torch.fx.Proxy:
        """The node of torch.fx for a call: the layer stays whole, as those of torch.nn do."""
        proxy: torch.fx.Proxy = input.tracer.create_proxy(
            "call_module", input.tracer.path_of_module(self), (input,), {}
        )
        return proxy

    def extra_repr(self) -> str:
        choice = self.choice() if "_last_input" in vars(self) else None
        in_use = "" if choice is None or choice.family == self.family else f" -> {choice.family} ({choice.reason})"
        return f"{super().extra_repr()}, {self.settings()}{in_use}"

    def settings(self) -> str:
        """Precision and family that are asked for, in words."""
        precision = self.precision or f"{plans.default_precision()} (PyTorch's setting)"
        return f"precision={precision}, family={self.family}" + (", strict" if self.strict else "")

    def choice(self) -> Choice | None:
        """The family that runs the last input's forward pass, and why. None before it, unless it is known without."""
        seen = vars(self).get("_last_input")
        if self.family == "aten":
            return Choice("aten", "asked for")
        if seen is None:
            return self._choice_by_elements()
        shape, strides, dtype, device = seen
        if len(shape) == self.weight.dim() - 1:
            shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
        posed = self._problem_of(tuple(shape), tuple(strides), dtype, device)
        return posed if isinstance(posed, Choice) else choose(posed, device, self.family)

    def _problem_of(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Problem | Choice:
        """The forward pass for a batch of images of that form; or, where it is none of ours, what runs it."""
        raise NotImplementedError

    def _choice_by_elements(self) -> Choice | None:
        """PyTorch's convolution if no kernel of ours takes the parameters' dtype and device, else None."""
        parameter = next(self.parameters(), None)
        if parameter is None or parameter.device.type == "meta":
            return None
        reason = why_not_elements(parameter.dtype, parameter.device)
        return None if reason is None else Choice("aten", reason, refused=True)


def _form_of(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What the choice of a family depends on: what may alternate from call to call, and what seldom changes."""
    wanted = _grad_enabled() and (x.requires_grad, w.requires_grad, b is not None and b.requires_grad)
    tensors = (x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
    return (x.shape, wanted), (tensors, torch_precision(), plans.generation, _any_autocast())


def _details_of(x: Tensor, w: Tensor, b: Tensor | None, form: tuple[object, ...]) -> tuple[object, ...]:
    """What a call of ours depends on besides: alignment, classes, the bias, and autocast's dtype if there is one."""
    bias = None if b is None else (type(b), b.shape, b.dtype, b.device)
    return (x.data_ptr() | w.data_ptr()) & 15, type(w), bias, form[3] and autocast_to(x.device.type)
