"""The input of a rim whose pixels are all in one image, by one launch: indices name its rows and its columns."""

from __future__ import annotations

import torch

from haloconv.layout import Layout
from haloconv.rims import Piece, Place, Window

Tensor = torch.Tensor

_MOST = 4096  # pieces whose indices are kept
_indices: dict[tuple[Piece, Place, torch.device], tuple[Tensor, Tensor]] = {}


def gathered(x: Tensor, piece: Piece, place: Place, layout: Layout) -> Tensor | None:
    """What a piece reads of x (N, C, H, W), the shard at ``place``, stored in ``layout``: a new tensor.

    None if other shards have a part of it, or if indices would have to be brought to the device while a CUDA graph is
    being captured.
    """
    found = _indices.get((piece, place, x.device)) or _brought(piece, place, x.device)
    if found is None:
        return None
    rows, columns = found
    if layout == "nhwc":
        return x.permute(0, 2, 3, 1)[:, rows, columns].permute(0, 3, 1, 2)
    return x[:, :, rows, columns]


def _brought(piece: Piece, place: Place, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The indices on the device: rows (h, 1) and columns (w,)."""
    rows, columns = (_pixels(*each) for each in zip((piece.rows, piece.columns), place, strict=True))
    if rows is None or columns is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    if len(_indices) >= _MOST:
        _indices.clear()
    with torch.inference_mode(False):
        made = torch.tensor(rows, device=device).unsqueeze(1), torch.tensor(columns, device=device)
    _indices[piece, place, device] = made
    return made


def _pixels(window: Window, owner: int) -> list[int] | None:
    """The indices of what is read along one axis; None if another shard has some of it."""
    if any(run.owner != owner for run in window.runs):
        return None
    return [run.start + run.step * at for run in window.runs for at in range(run.length)]
