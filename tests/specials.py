"""Operands with NaN, infinities and denormal numbers, and what must come of them."""

from __future__ import annotations

import torch

from haloconv.reference import Oracle
from tests import oracle
from tests.cases import Case, Tensors, generator, make, store, with_special


def special_activations(result: str, one: Case, dtype: torch.dtype, device: str) -> tuple[Tensors, Oracle]:
    """Tensors with a NaN, +Inf and -Inf in x (fprop, wgrad) or dy (dgrad, bgrad), and the answer to them."""
    t = make(one, dtype, device)
    name = "x" if result in ("fprop", oracle.RELU, "wgrad") else "dy"
    t = t._replace(
        **{name: store(with_special(getattr(t, name), generator(f"{one.name} special", device)), one.storage)}
    )
    clean = t._replace(**{name: getattr(t, name).nan_to_num(0.0, 0.0, 0.0)})
    scale = oracle.expected(result, clean, one.spec).scale
    return t, Oracle(oracle.tap_sums(result, t, one.spec), scale)


def cut_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor without the 13 bits that TF32 lacks."""
    return t.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)
