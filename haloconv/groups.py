"""A convolution and what follows it in a module's forward, as one call: where its modules are what they were, and a
kernel applies the epilogue to the tensors at hand. Elsewhere it is the calls of which the forward consists.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from haloconv import autograd, logs
from haloconv import plan as plans
from haloconv.chains import HOOKS, Chain
from haloconv.choose.choice import Choice, choose, choose_now
from haloconv.device import is_capturing
from haloconv.families import FAMILIES
from haloconv.functional import autocasted, cached_spec, goes_straight
from haloconv.fusion import bias_and_scale_of_norm
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
_MOST_CHOICES = 64


class _Kept(NamedTuple):
    """What bias and scale were computed of, with the versions that those tensors had, and the pairs (K, 2)."""

    tensors: tuple[Tensor | None, ...]
    versions: tuple
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


class Group:
    """The chain of calls that it stands for, and the last ``choice`` of what runs its convolution."""

    def __init__(self, module: torch.nn.Module, chain: Chain, number: int) -> None:
        conv: Any = module.get_submodule(chain.conv)
        self.__name__ = f"group_{number}"
        self.chain, self.conv, self.choice = chain, conv, _NOT_YET
        self._module, self._watched = module, _Watched(module, chain)
        arguments = (conv.stride, conv.padding, conv.dilation, conv.groups, conv.kernel_size, None, "auto", False)
        self._spec = cached_spec(*arguments)
        self._choices: dict[tuple, Choice] = {}
        self._kept: _Kept | None = None
        self._owners = [
            None if path is None else (module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
            for path in chain.statistics
        ]
        self._calls = self._alone()

    def __str__(self) -> str:
        return f"{self.chain.conv} with {' and '.join(self.chain.words)}"

    def told(self) -> str:
        """What runs the convolution, and whether with what follows it."""
        choice = self.choice
        if choice is _NOT_YET:
            return choice.reason
        state = "" if FAMILIES[choice.family].has_epilogue else "not as one call; "
        return f"{state}{choice.family}: {choice.reason}"

    def put_into(self, graph: torch.fx.Graph) -> None:
        """Let the group stand in the graph where its calls stand."""
        nodes = self.chain.nodes
        with graph.inserting_before(nodes[-1]):
            new = graph.call_function(self, nodes[0].args)
        nodes[-1].replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._at_once(x)
        return self._calls(self._module, x) if y is None else y

    def _alone(self) -> Any:
        """The calls of the chain as a function of the module and x."""
        graph = torch.fx.Graph()
        first, *_ = nodes = self.chain.nodes
        placed = {first.args[0]: graph.placeholder("x")}
        for node in nodes:
            for each in node.all_input_nodes:
                if each not in placed:  # a parameter or a buffer
                    placed[each] = graph.node_copy(each)
            placed[node] = graph.node_copy(node, placed.__getitem__)
        graph.output(placed[nodes[-1]])
        return type(torch.fx.GraphModule(self._module, graph)).forward

    def _at_once(self, x: Tensor) -> Tensor | None:
        """The result by one call, or None where it is not known to be the same, or not to be ahead."""
        if type(x) is not Tensor or x.dim() != 4 or not self._watched.unchanged():
            return None
        parameters = vars(self.conv)["_parameters"]
        w, b = parameters.get("weight"), parameters.get("bias")
        statistics = tuple(None if each is None else getattr(*each) for each in self._owners)
        if w is None or not goes_straight(x, w, b):
            return None
        if not self.chain.recorded and _grad_enabled() and _any_wants_gradients(x, w, b, *statistics):
            return None
        images, filters, bias = autocasted(x, w, b) if _any_autocast() else (x, w, b)
        spec = self._spec_for(x)
        if not FAMILIES[self._chosen(images, filters, bias, spec).family].has_epilogue:
            return None
        if self.chain.epilogue.scale:
            bias = self._pairs(statistics, b, images)
            if bias is None:
                return None
        with calls_of(self.chain.conv) if profiler._is_profiler_enabled or logs.names_layers else nullcontext():
            return autograd.fprop(images, filters, bias, spec, None, self.chain.epilogue)

    def _spec_for(self, x: Tensor) -> ConvSpec:
        """What the layer asks for; if it is one of ours, it also notes its input, for its repr."""
        conv: Any = self.conv
        if type(conv) is not Conv2d:
            return self._spec
        conv._noted(x)
        return vars(conv).get("_spec") or conv._new_spec(x.shape[-2:])

    def _chosen(self, x: Tensor, w: Tensor, b: Tensor | None, spec: ConvSpec) -> Choice:
        """What runs the convolution of these tensors."""
        form = (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, b is None)
        key = (form, spec, torch_precision(), plans.generation)
        known = self._choices.get(key)
        if known is not None:
            return known
        try:
            check_tensors(x, w, b, spec)
        except (RuntimeError, TypeError, ValueError):
            return _REFUSED  # the calls of the forward say so in PyTorch's words
        layout = plans.result_layout(x, w)
        problem = plans.problem_of("fprop", x.shape, w.shape, spec, x.dtype, layout)
        if plans.is_noting():
            return choose(problem, x.device, spec.family, examines=False)
        request = Request(problem, plans.form_of(x), plans.form_of(w), layout, x.device)
        self.choice = choose_now(request, spec.family)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        self._choices[key] = self.choice
        return self.choice

    def _pairs(self, statistics: tuple[Tensor | None, ...], b: Tensor | None, x: Tensor) -> Tensor | None:
        """(K, 2) in fp32, bias and scale that the batch norm comes to: kept until one of its tensors is written.

        None if the tensors are none that a batch norm of these images takes. Nothing is kept for a CUDA graph, whose
        replays see what was written since, nor on another stream than the one on which it was computed.
        """
        tensors = (*statistics, b)
        given = [each for each in tensors if each is not None]
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.device.type == "cuda" else 0
        lasting = not (is_capturing(x.device) or any([each.is_inference() for each in given]))
        written = [(each._version, each.data_ptr()) for each in given] if lasting else []
        versions = (stream, x.dtype, x.device, *written)
        kept = self._kept
        if lasting and kept is not None and kept.versions == versions and _are_same(kept.tensors, tensors):
            return kept.pairs
        if not all([_is_of_filters(each, self.conv.out_channels, x) for each in given]):
            return None
        mean, variance, *own = statistics
        assert mean is not None and variance is not None
        with torch.no_grad():
            pairs = bias_and_scale_of_norm(mean, variance, (own[0], own[1]), self.chain.eps, b)
        if lasting:
            self._kept = _Kept(tensors, versions, pairs)
        return pairs


_NOT_YET = Choice("aten", "chosen at its first input")
_REFUSED = Choice("aten", "PyTorch's convolution refuses its input")


def _parts(path: str) -> list[str]:
    """``a.b.c`` as ``a``, ``a.b`` and ``a.b.c``."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _any_wants_gradients(*tensors: Tensor | None) -> bool:
    return any([each is not None and each.requires_grad for each in tensors])


def _are_same(first: tuple[Tensor | None, ...], second: tuple[Tensor | None, ...]) -> bool:
    return all([one is other for one, other in zip(first, second, strict=True)])


def _is_of_filters(tensor: Tensor, filters: int, x: Tensor) -> bool:
    """Whether it is one number for each filter as batch norm takes them: in fp32, or as the images."""
    fits = tensor.shape == (filters,) and tensor.device == x.device and tensor.dtype in (x.dtype, torch.float32)
    return fits and type(tensor) in (Tensor, torch.nn.Parameter)
