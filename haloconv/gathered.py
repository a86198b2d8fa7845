"""The input of rims whose pixels are all in one image, by one launch: indices name their rows and their columns."""

from __future__ import annotations

from functools import lru_cache

import torch

from haloconv.layout import Layout
from haloconv.rim_batch import Batch, transposed
from haloconv.rims import Place, Window

Tensor = torch.Tensor

_MOST = 4096  # batches whose indices are kept
_indices: dict[tuple[Batch, Place, torch.device], tuple[Tensor, Tensor]] = {}


def gathered(x: Tensor, batch: Batch, place: Place, layout: Layout, upright: bool) -> Tensor | None:
    """What pieces of one form read of x (N, C, H, W), the shard at ``place``: (N * pieces, C, h, w) in ``layout``.

    Of ``upright`` pieces it is (N * pieces, C, w, h). The pieces of an image are neighbours. None if other shards have
    a part of it, or if indices would have to be brought to the device while a CUDA graph is being captured.
    """
    if upright:
        x, batch, place = x.transpose(2, 3), transposed(batch), (place[1], place[0])
    found = _indices.get((batch, place, x.device)) or _brought(batch, place, x.device)
    if found is None:
        return None
    rows, columns = found
    if layout == "nhwc":
        return x.permute(0, 2, 3, 1)[:, rows, columns].flatten(0, 1).permute(0, 3, 1, 2)
    if len(batch) == 1:
        return x[:, :, rows[0], columns[0]]
    images, channels = (_counted(extent, dim, x.device) for dim, extent in enumerate(x.shape[:2]))
    return x[images, channels, rows.unsqueeze(1), columns.unsqueeze(1)].flatten(0, 1)


@lru_cache(maxsize=64)
def _counted(extent: int, dim: int, device: torch.device) -> Tensor:
    """The numbers of all images, or of all channels, beside pieces, rows and columns."""
    with torch.inference_mode(False):
        return torch.arange(extent, device=device).view(-1, *(1,) * (4 - 2 * dim))


def _brought(batch: Batch, place: Place, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The indices on the device: rows (pieces, h, 1) and columns (pieces, 1, w)."""
    windows = [list(zip((piece.rows, piece.columns), place, strict=True)) for piece in batch]
    elsewhere = any(run.owner != owner for piece in windows for window, owner in piece for run in window.runs)
    if elsewhere or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    found = [[_pixels(window) for window, _ in piece] for piece in windows]
    if len(_indices) >= _MOST:
        _indices.clear()
    with torch.inference_mode(False):
        rows, columns = (torch.tensor(each, device=device) for each in zip(*found, strict=True))
        made = rows.unsqueeze(2), columns.unsqueeze(1)
    _indices[batch, place, device] = made
    return made


def _pixels(window: Window) -> list[int]:
    """The indices of what is read along one axis."""
    return [run.start + run.step * at for run in window.runs for at in range(run.length)]
