"""Our passes over the graph that Inductor lowers, behind autograd; one that a user has set runs after them."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from haloconv import moments
from haloconv.fusion.lowered import foreach, norms

SETTING = "post_grad_custom_pre_pass"
"""The setting of Inductor that they are given as."""


class OwnPasses(CustomGraphPass):
    """Statistics that come with convolutions, and few kernels for many small ones; then ``before``."""

    def __init__(self, before: Any = None) -> None:
        self._before = before

    def __call__(self, graph: torch.fx.Graph) -> None:
        norms.replace_statistics(graph)
        foreach.gather(graph)
        if self._before is not None:
            self._before(graph)

    def uuid(self) -> Any:
        """What compiled code on disk is found by; None: it is not kept."""
        files = (__file__, *(str(module.__file__) for module in (foreach, norms, moments)))
        own = get_hash_for_files(files)
        if self._before is None:
            return own
        before = self._before.uuid() if isinstance(self._before, CustomGraphPass) else None
        return None if before is None else (own, before)
