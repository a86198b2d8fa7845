"""How fp32 products are formed: PyTorch's setting for convolutions is read, and changed, in this file only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

Precision = Literal["ieee", "tf32", "tf32x3"]
"""How fp32 products are formed: in full, of factors rounded to TF32, or as three products of factors that are two TF32
values each, within the error limits of fp32."""

PrecisionLabel = Literal["fp64", "fp32", "tf32", "tf32x3", "fp16", "bf16"]
"""A precision as rows, records and options name it: the dtype of the tensors, and of fp32 how products are formed."""
PRECISION_LABELS: tuple[PrecisionLabel, ...] = get_args(PrecisionLabel)

_get_operator_setting = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_operator_setting = getattr(torch._C, "_set_fp32_precision_setter", None)


def torch_precision() -> Precision:
    """PyTorch's precision of fp32 convolutions on CUDA: ``"tf32"`` (its default) or ``"ieee"``.

    Reads ``torch.backends.cudnn.conv.fp32_precision`` where it exists (PyTorch 2.9), else
    ``torch.backends.cudnn.allow_tf32``; the old flag sets the new one, so one read serves both.
    """
    if _get_operator_setting is not None:
        return "tf32" if _get_operator_setting("cuda", "conv") == "tf32" else "ieee"
    return "tf32" if torch._C._get_cudnn_allow_tf32() else "ieee"


def nearest_of_torch(precision: Precision) -> Precision:
    """The precision of PyTorch's own that is no less accurate: it has no ``"tf32x3"``, and computes in full instead."""
    return "tf32" if precision == "tf32" else "ieee"


def label_of(name: str) -> PrecisionLabel:
    """A name of a precision as the label that it is. Raises ValueError if it is none."""
    for label in PRECISION_LABELS:
        if label == name:
            return label
    raise ValueError(f"a precision is one of {', '.join(PRECISION_LABELS)}, not {name!r}")


@contextmanager
def convolution_precision(precision: Precision) -> Iterator[None]:
    """PyTorch's fp32 convolutions run at ``nearest_of_torch(precision)`` inside; nothing is touched if they do so."""
    before, wanted = torch_precision(), nearest_of_torch(precision)
    if before == wanted:
        yield
        return
    _set_torch_precision(wanted)
    try:
        yield
    finally:
        _set_torch_precision(before)


def _set_torch_precision(precision: Precision) -> None:
    if _set_operator_setting is not None:
        _set_operator_setting("cuda", "conv", precision)
    else:
        torch._C._set_cudnn_allow_tf32(precision == "tf32")
