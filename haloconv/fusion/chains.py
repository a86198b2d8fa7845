"""Which calls of a module's forward are a convolution and what can be its epilogue, and why others are not.

It is the pass of torch.compile's backend (graph.py) on a graph in which what follows a convolution is spelled out as
calls of functions: each module there is replaced by the graph of its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from haloconv.fusion.forwards import graph_of
from haloconv.fusion.graph import Fused, behind, is_norm_of_batch, norm_arguments
from haloconv.layer import OWN_NAMES
from haloconv.module import Conv2d
from haloconv.problem import Epilogue
from haloconv.reclass import BODIES, name_of, own_class, why_not_plain

Node = torch.fx.Node

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
STATISTICS = ("running_mean", "running_var", "weight", "bias")
_RESULT = torch.empty(0, device="meta")  # of every node: forms are compared when there are tensors
_RECORDED_RESULT = torch.empty(0, device="meta", requires_grad=True)


class Chain(NamedTuple):
    """Calls of a graph, each the only one that reads the result of the one before, that one convolution may do.

    ``conv`` is the path of the first, ``modules`` are those of all that are modules. ``statistics`` are the paths of a
    batch norm's tensors in the order of STATISTICS, None for those that it has not; it is empty without a norm.
    ``addition`` is the call that adds, if there is one, and ``inner`` the chain before it. ``recorded`` if the chain is
    the same where autograd records.
    """

    conv: str
    modules: tuple[str, ...]
    nodes: tuple[Node, ...]
    epilogue: Epilogue
    statistics: tuple[str | None, ...]
    eps: float
    words: tuple[str, ...]
    recorded: bool = False
    addition: Node | None = None
    inner: Chain | None = None

    @property
    def residual(self) -> Node | None:
        """The node that has what is added: it may have been replaced since the chain was found."""
        given = () if self.addition is None else self.addition.all_input_nodes
        return next((each for each in given if each not in self.nodes), None)


def chains_of(module: torch.nn.Module, graph: torch.fx.Graph) -> Iterator[tuple[str, Chain | str]]:
    """Each 2-D convolution that the graph calls: its path, and its chain or a sentence that says why it has none."""
    spelled_out, starts = _spelled_out(module, graph)
    for node in graph.nodes:
        if _is_convolution(module, node):
            yield str(node.target), _chain_of(module, node, spelled_out, starts)


def called(module: torch.nn.Module, node: Node) -> torch.nn.Module:
    """The module that a node of the graph calls."""
    return module.get_submodule(str(node.target))


def _is_convolution(module: torch.nn.Module, node: Node) -> bool:
    return node.op == "call_module" and isinstance(called(module, node), torch.nn.Conv2d)


def _chain_of(
    module: torch.nn.Module, node: Node, spelled_out: dict[Node, Any], starts: dict[Node, Node]
) -> Chain | str:
    """The longest chain that begins with the node; or a sentence, why there is none."""
    first = spelled_out[node]
    fused = behind(first, False, lambda _: _RESULT, waits=True)
    if fused is None:
        return _why_nothing(module, node, [*first.users])
    inner, longest = None, _told_of(module, node, fused, starts)
    if fused.residual is not None and fused.norm is not None:
        inner = _told_of(module, node, Fused(Epilogue(True), (fused.norm,), fused.norm, None), starts)
    if isinstance(longest, str):
        return inner or longest
    recorded = behind(first, True, lambda _: _RECORDED_RESULT, waits=True) == fused
    return longest._replace(recorded=recorded, inner=inner if isinstance(inner, Chain) else None)


def _told_of(module: torch.nn.Module, node: Node, fused: Fused, starts: dict[Node, Node]) -> Chain | str:
    """The chain of what is fused, or why it may not be one."""
    last = starts.get(fused.last)
    if last is None:
        return f"what follows it, {_named(module, next(iter(node.users)))}, does more than a kernel applies"
    nodes = [node]
    while nodes[-1] is not last:
        nodes += nodes[-1].users
    given = {} if fused.norm is None else norm_arguments(fused.norm)
    tensors = [given[name] for name in STATISTICS] if given else []
    if any(each is not None and each.op != "get_attr" for each in tensors):
        return "the statistics of the batch norm behind it are arguments of a call"
    chain = Chain(
        conv=str(node.target),
        modules=tuple(str(each.target) for each in nodes if each.op == "call_module"),
        nodes=tuple(nodes),
        epilogue=fused.epilogue,
        statistics=tuple(None if each is None else str(each.target) for each in tensors),
        eps=given.get("eps", 0.0),
        words=fused.names,
        addition=None if fused.residual is None else starts.get(fused.nodes[0 if fused.norm is None else 1]),
    )
    if fused.residual is not None and chain.residual is None:
        return "what is added to it is inside a module"
    return _why_not(module, chain) or chain


def _why_not(module: torch.nn.Module, chain: Chain) -> str | None:
    """None if nothing was done to the modules of the chain that their classes do not tell, else a sentence."""
    conv: Any = module.get_submodule(chain.conv)
    if torch.nn.utils.parametrize.is_parametrized(conv):
        return "it has parametrisations"
    reason = None if type(conv) is Conv2d else why_not_plain(conv, OWN_NAMES)
    if reason is not None:
        return reason
    if type(conv) not in (torch.nn.Conv2d, Conv2d):
        return f"its class {name_of(own_class(conv))} may compute something else"
    if conv.padding_mode != "zeros":
        return f"its padding_mode is {conv.padding_mode!r}"
    if len(chain.nodes[0].args) != 1 or chain.nodes[0].kwargs:
        return "it is not called with an image alone"
    for path in chain.modules:
        for name, each in module.get_submodule(path).named_modules(prefix=path):
            if any(getattr(each, hooks, None) for hooks in HOOKS):
                return f"{name} has hooks"
            if any(body in vars(each) for body in BODIES):
                return f"the forward of {name} is replaced on the instance"
            if getattr(each, "qconfig", None) is not None:
                return f"{name} is prepared for quantisation"
            if isinstance(each, torch.jit.ScriptModule) or torch.nn.utils.parametrize.is_parametrized(each):
                return f"{name} is compiled by torch.jit, or has parametrisations"
    return None


def _why_nothing(module: torch.nn.Module, node: Node, calls: list[Node]) -> str:
    """The sentence for a convolution behind which nothing was found; ``calls`` read its result, spelled out."""
    users = [*node.users]
    if len(users) != 1:
        return f"its result is read {len(users)} times"
    if users[0].op == "output":
        return "it is the last of what its module does"
    named = f"what follows it, {_named(module, users[0])},"
    if users[0].op == "call_module" and called(module, users[0]).training:
        return f"{named} is in training mode"
    if is_norm_of_batch(calls[0]):
        return f"{named} has no running statistics"
    return f"{named} is nothing that a kernel applies"


def _named(module: torch.nn.Module, node: Node) -> str:
    """What a node calls, in words."""
    if node.op == "call_module":
        return f"{node.target} ({type(called(module, node)).__name__})"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _spelled_out(module: torch.nn.Module, graph: torch.fx.Graph) -> tuple[dict[Node, Any], dict[Node, Node]]:
    """A copy of the graph, in which what follows convolutions is spelled out: node -> the node of the copy with its
    result, and back: node of the copy -> the first node whose result it has.
    """
    copy = torch.fx.Graph()
    placed: dict[Node, Any] = {}
    starts: dict[Node, Node] = {}
    follows: set[Node] = set()
    for node in graph.nodes:
        inside = _inside(module, node) if follows.intersection(node.all_input_nodes) else None
        if inside is None:
            placed[node] = copy.node_copy(node, placed.__getitem__)
        else:
            placed[node] = _pasted(copy, inside, str(node.target), placed[node.all_input_nodes[0]])
        starts.setdefault(placed[node], node)
        passes = node.op != "call_module" or inside is not None
        if _is_convolution(module, node) or (passes and follows.intersection(node.all_input_nodes)):
            follows.add(node)
    return placed, starts


def _inside(module: torch.nn.Module, node: Node) -> torch.fx.Graph | None:
    """The graph of the module that a node calls with one image, if it gives one result; None if it is not known."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    inner: Any = called(module, node)
    if "forward" in vars(inner) or any(isinstance(each, torch.nn.modules.conv._ConvNd) for each in inner.modules()):
        return None
    graph, _ = graph_of(inner, type(inner).forward, opens=True)
    if graph is None:
        return None
    inputs = [each for each in graph.nodes if each.op == "placeholder"]
    result = next(each for each in graph.nodes if each.op == "output").args[0]
    return graph if len(inputs) == 1 and isinstance(result, Node) else None


def _pasted(copy: torch.fx.Graph, inside: torch.fx.Graph, path: str, image: Node) -> Node:
    """The node that has the result, after the graph of the module at ``path`` was added to the copy."""
    placed: dict[Any, Node] = {}
    result = image
    for node in inside.nodes:
        if node.op == "placeholder":
            placed[node] = image
        elif node.op == "output":
            result = placed[node.args[0]]
        else:
            new = placed[node] = copy.node_copy(node, placed.__getitem__)
            if node.op in ("get_attr", "call_module"):
                new.target = f"{path}.{node.target}"
    return result
