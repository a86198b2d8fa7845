"""A convolution and what follows it in a module's forward, as one call: where its modules are what they were, and a
kernel applies the epilogue to the tensors at hand. Elsewhere it is the calls of which the forward consists.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack

from haloconv import autograd, logs
from haloconv import plan as plans
from haloconv.choose.choice import Choice, choose, choose_now
from haloconv.device import is_capturing
from haloconv.families import FAMILIES
from haloconv.functional import autocasted, cached_spec, functional_mode, goes_straight
from haloconv.fusion.chains import HOOKS, Chain
from haloconv.fusion.forwards import function_of
from haloconv.fusion.graph import shift_and_scale_of_norm
from haloconv.layout import strides_of
from haloconv.module import Conv2d
from haloconv.precision import torch_precision
from haloconv.problem import ConvSpec, Request, check_tensors
from haloconv.profiling import calls_of, profiler
from haloconv.reclass import BODIES

Tensor = torch.Tensor

_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_CLASSES = (torch.nn.Conv2d, Conv2d)
_OF_CONVOLUTION = ("in_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_PLAIN_VALUES = (int, float, str, bool, tuple, type(None))
_MOST_KNOWN = 64
_NO_PAIRS = torch.empty(0)


class _Kept(NamedTuple):
    """What bias and scale were computed of, with the versions that those tensors had, and the pairs (K, 2)."""

    tensors: tuple[Tensor | None, ...]
    versions: tuple[object, ...]
    pairs: Tensor


class _Watched:
    """The modules of a chain: whether they are where they were, and are what they were."""

    def __init__(self, module: torch.nn.Module, chain: Chain) -> None:
        inside = {path: module.get_submodule(path) for path in chain.modules}
        inside |= {
            name: each for path, top in inside.items() for name, each in top.named_modules(prefix=path) if name != path
        }
        owners = {path.rpartition(".")[0] for path in chain.statistics if path is not None} - {""}
        self._places, self._states = [], []
        for path in {part for name in (*inside, *owners) for part in _parts(name)}:
            owner, _, name = path.rpartition(".")
            held = vars(module.get_submodule(owner))["_modules"]
            self._places.append((held, name, held[name]))
        for path, each in inside.items():
            state = vars(each)
            is_conv = path == chain.conv
            names = (*_OF_CONVOLUTION,) if is_conv else tuple(k for k, v in state.items() if type(v) in _PLAIN_VALUES)
            names += BODIES
            classes = _CLASSES if is_conv else (type(each),)
            self._states.append((each, classes, names, tuple(map(state.get, names))))

    def unchanged(self) -> bool:
        """Whether nothing was replaced, assigned or hooked since then."""
        for held, name, module in self._places:
            if held.get(name) is not module:
                return False
        for module, classes, names, values in self._states:
            state = vars(module)
            if type(module) not in classes or tuple(map(state.get, names)) != values:
                return False
            if any([state.get(hooks) for hooks in HOOKS]):
                return False
        return not _has_any_global_hook()


class _Norm:
    """A batch norm of a chain: its tensors, and the bias and scale that it comes to."""

    def __init__(self, module: torch.nn.Module, chain: Chain, filters: int) -> None:
        self._eps, self._filters, self._kept = chain.eps, filters, _Kept((), (), _NO_PAIRS)
        self._held: list[tuple[dict[str, Tensor | None], str]] = []
        for path in chain.statistics:
            owner, _, name = (path or "").rpartition(".")
            state = vars(module.get_submodule(owner))
            self._held.append((state["_parameters" if name in state["_parameters"] else "_buffers"], name))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The batch norm's tensors in the order of STATISTICS; None for those that it has not."""
        return tuple([held.get(name) for held, name in self._held])

    def pairs(self, statistics: tuple[Tensor | None, ...], b: Tensor | None, x: Tensor) -> Tensor | None:
        """(K, 2) in fp32, bias and scale of sums without ``b``: kept until one of the tensors is written.

        None if the tensors are none that a batch norm of these images takes. Nothing is kept for a CUDA graph, whose
        replays see what was written since, nor on another stream than the one on which it was computed.
        """
        tensors, on_gpu = (*statistics, b), x.device.type == "cuda"
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if on_gpu else 0
        written = None if is_capturing(x.device) else _written(tensors)
        versions, kept = (stream, x.dtype, x.device, written), self._kept
        if written is not None and kept.versions == versions and _are_same(kept.tensors, tensors):
            return kept.pairs
        if not all([each is None or _is_of_filters(each, self._filters, x) for each in tensors]):
            return None
        mean, variance, factor, summand = statistics
        if mean is None or variance is None:
            return None
        with torch.no_grad():
            pairs = torch.stack(shift_and_scale_of_norm(mean, variance, (factor, summand), self._eps, b), 1)
        if written is not None:
            self._kept = _Kept(tensors, versions, pairs)
        return pairs


class _Known(NamedTuple):
    """What is known for tensors of a form: the choice, the form that a residual must have, and the plan once it ran."""

    choice: Choice
    y_form: tuple[object, ...] = ()
    plan: plans.Plan | None = None


class FusedCall:
    """One call for a ``chain`` of them; ``choice`` is the last that was made of what runs its convolution.

    ``layer`` is the name of that in logs and profiles.
    """

    def __init__(self, module: torch.nn.Module, chain: Chain, name: str) -> None:
        conv: Any = module.get_submodule(chain.conv)
        self.__name__, self.layer = name, chain.conv
        self.conv, self.choice = conv, _NOT_YET
        self.chain = chain._replace(nodes=(), addition=None, inner=None)  # which would keep the graph
        self._watched = _Watched(module, chain)
        self._norm = _Norm(module, chain, conv.out_channels) if chain.epilogue.scale else None
        arguments = (conv.stride, conv.padding, conv.dilation, conv.groups, conv.kernel_size, None, "auto", False)
        self._spec = cached_spec(*arguments)
        self._known: dict[tuple[object, ...], _Known] = {}
        self._own_calls, self._module = _own_calls(module, chain, name), ref(module)

    def __str__(self) -> str:
        return f"{self.chain.conv} with {' and '.join(self.chain.words)}"

    def told(self) -> str:
        """What runs the convolution, and whether with what follows it."""
        choice = self.choice
        if choice is _NOT_YET:
            return choice.reason
        state = "" if FAMILIES[choice.family].has_epilogue else "not as one call; "
        return f"{state}{choice.family}: {choice.reason}"

    def put_into(self, graph: torch.fx.Graph, chain: Chain) -> None:
        """Let this stand in the graph where the calls of the chain stand."""
        nodes = chain.nodes
        with graph.inserting_before(nodes[-1]):
            new = graph.call_function(self, _given(chain))
        nodes[-1].replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)

    def __call__(self, x: Tensor, *residual: Tensor) -> Tensor:
        y = self._at_once(x, *residual)
        return self._own_calls(self._module(), x, *residual) if y is None else y

    def _at_once(self, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """The result by one call, or None where it is not known to be the same, or not to be ahead."""
        served = type(x) is Tensor and x.dim() == 4 and self._watched.unchanged()
        if not served or (type(self.conv) is not Conv2d and _is_served_by_mode()):
            return None
        parameters = vars(self.conv)["_parameters"]
        w, b = parameters.get("weight"), parameters.get("bias")
        if w is None or not goes_straight(x, w, b):
            return None
        norm = self._norm
        statistics = () if norm is None else norm.tensors()
        recording = _grad_enabled() and _any_wants_gradients(x, w, b, residual, *statistics)
        if recording and not self.chain.recorded:
            return None
        images, filters, third = autocasted(x, w, b) if _any_autocast() else (x, w, b)
        spec = self._spec_for(x)
        key, known = self._look_up(images, filters, third, spec)
        fits = residual is None or _form_of(residual) == known.y_form
        if not (fits and FAMILIES[known.choice.family].has_epilogue):
            return None
        if norm is not None:
            third = norm.pairs(statistics, b, images)
            if third is None:
                return None
        if recording or known.plan is None or profiler._is_profiler_enabled or logs.names_layers:
            return self._run((images, filters, third), spec, residual, key)
        return known.plan.run(images, filters, third, *(() if residual is None else (residual,)))

    def _run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        spec: ConvSpec,
        residual: Tensor | None,
        key: tuple[object, ...],
    ) -> Tensor:
        """The call by its plan, which is kept for tensors of this form, where they have been seen before."""
        with calls_of(self.layer) if profiler._is_profiler_enabled or logs.names_layers else nullcontext():
            y = autograd.fprop_with(tensors, spec, self.chain.epilogue, residual)
        if key in self._known:
            plan = plans.plan_fprop(*tensors, spec, self.chain.epilogue, residual)
            self._known[key] = self._known[key]._replace(plan=plan if plan.kept else None)
        return y

    def _spec_for(self, x: Tensor) -> ConvSpec:
        """What the layer asks for; if it is one of ours, it also notes its input, for its repr."""
        conv: Any = self.conv
        if type(conv) is not Conv2d:
            return self._spec
        conv._noted(x)
        return vars(conv).get("_spec") or conv._new_spec(x.shape[-2:])

    def _look_up(self, x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec) -> tuple[tuple[object, ...], _Known]:
        """What runs the convolution of these tensors, and the key by which it is kept."""
        forms = (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
        key = (forms, b is None, spec, torch_precision(), plans.generation, (x.data_ptr() | w.data_ptr()) & 15)
        known = self._known.get(key)
        if known is not None:
            return key, known
        try:
            check_tensors(x, w, b, spec)
        except (RuntimeError, TypeError, ValueError):
            return key, _REFUSED  # the calls of the forward say so in PyTorch's words
        layout, epilogue = plans.result_layout(x, w), self.chain.epilogue
        plain = plans.problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout)
        problem = replace(plain, bias=b is not None and not epilogue.scale, epilogue=epilogue)
        y_form = (Tensor, problem.y_shape, strides_of(problem.y_shape, layout), x.dtype, x.device)
        if plans.is_noting():
            return key, _Known(choose(problem, x.device, spec.family, examines=False), y_form)
        request = Request(problem, plans.form_of(x), plans.form_of(w), layout, x.device)
        self.choice = choose_now(request, spec.family)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = self._known[key] = _Known(self.choice, y_form)
        return key, known


def _given(chain: Chain) -> tuple[torch.fx.Node, ...]:
    """The nodes of x and, if something is added, of that."""
    x: Any = chain.nodes[0].args[0]
    return (x,) if chain.residual is None else (x, chain.residual)


def _own_calls(module: torch.nn.Module, chain: Chain, name: str) -> Callable[..., Tensor]:
    """The calls of the chain as a function of the module, x and what is added; those before that as one call."""
    graph, nodes = torch.fx.Graph(), [*chain.nodes]
    placed = {each: graph.placeholder(f"given_{number}") for number, each in enumerate(_given(chain))}
    if chain.inner is not None:
        *_, last = before = chain.inner.nodes
        inner = FusedCall(module, chain.inner, f"{name}_inner")
        placed[last] = graph.call_function(inner, (placed[nodes[0].all_input_nodes[0]],))
        nodes = nodes[len(before) :]
    for node in nodes:
        for each in node.all_input_nodes:
            if each not in placed:  # a parameter or a buffer
                placed[each] = graph.node_copy(each)
        placed[node] = graph.node_copy(node, placed.__getitem__)
    graph.output(placed[chain.nodes[-1]])
    return function_of(graph)


_NOT_YET = Choice("aten", "chosen at its first input")
_REFUSED = _Known(Choice("aten", "PyTorch's convolution refuses its input"))


def _parts(path: str) -> list[str]:
    """``a.b.c`` as ``a``, ``a.b`` and ``a.b.c``."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _is_served_by_mode() -> bool:
    """Whether this is inside haloconv.functional_mode, whose settings hold for PyTorch's layers."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return any([isinstance(each, functional_mode) for each in modes])


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _any_wants_gradients(*tensors: Tensor | None) -> bool:
    return any([each is not None and each.requires_grad for each in tensors])


def _written(tensors: tuple[Tensor | None, ...]) -> tuple[object, ...] | None:
    """Versions and addresses of the tensors; None if one of them does not count its versions."""
    try:
        return tuple([each is not None and (each._version, each.data_ptr()) for each in tensors])
    except RuntimeError:  # made in inference mode
        return None


def _are_same(first: tuple[Tensor | None, ...], second: tuple[Tensor | None, ...]) -> bool:
    return all([one is other for one, other in zip(first, second, strict=True)])


def _is_of_filters(tensor: Tensor, filters: int, x: Tensor) -> bool:
    """Whether it is one number for each filter as batch norm takes them: in fp32, or as the images."""
    fits = tensor.shape == (filters,) and tensor.device == x.device and tensor.dtype in (x.dtype, torch.float32)
    return fits and type(tensor) in (Tensor, torch.nn.Parameter)
