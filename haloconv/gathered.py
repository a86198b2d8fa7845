"""The input of rims whose pixels are all in one image, by one launch: an index names the pixel of each of theirs."""

from __future__ import annotations

import torch

from haloconv.device import is_capturing
from haloconv.layout import Layout, strides_of
from haloconv.rim_batch import Batch
from haloconv.rims import Place, Window

Tensor = torch.Tensor

_MOST = 256  # batches whose indices are kept, each 8 bytes a pixel of its strips
_indices: dict[tuple[Batch, Place, bool, int, torch.device], Tensor] = {}
_captured: dict[int, Tensor] = {}  # by address: those that CUDA graphs read at every replay


def gathered(x: Tensor, batch: Batch, place: Place, layout: Layout, upright: bool) -> Tensor | None:
    """What pieces of one form read of x (N, C, H, W), the shard at ``place``: (N * pieces, C, h, w) in ``layout``.

    Of ``upright`` pieces it is (N * pieces, C, w, h). The pieces of an image are neighbours. None if other shards have
    a part of it, if the rows of x do not lie end to end, or if the index would have to be brought to the device while a
    CUDA graph is being captured.
    """
    n, c, height, width = x.shape
    if x.stride(2) != width * x.stride(3):
        return None
    key = (batch, place, upright, width, x.device)
    index = _indices.get(key)
    if index is None:
        index = _brought(batch, place, upright, width, x.device)
        if index is None:
            return None
        if len(_indices) >= _MOST:
            _forget()
        _indices[key] = index
    elif is_capturing(x.device):
        _captured[index.data_ptr()] = index
    pixels = x.as_strided((n, c, height * width), x.stride()[:2] + x.stride()[3:])
    if x.requires_grad and torch.is_grad_enabled():  # what is written into a tensor autograd does not see
        if layout == "nhwc":
            return pixels.transpose(1, 2)[:, index].flatten(0, 1).permute(0, 3, 1, 2)
        return pixels[:, :, index].transpose(1, 2).flatten(0, 1)
    shape = (n * len(batch), c, *index.shape[1:])
    strip = x.new_empty_strided(shape, strides_of(shape, layout))
    parts = strip.unflatten(0, (n, len(batch)))
    if layout == "nhwc":
        torch.ops.aten.index.Tensor_out(pixels.transpose(1, 2), [None, index], out=parts.permute(0, 1, 3, 4, 2))
    else:
        torch.ops.aten.index.Tensor_out(pixels, [None, None, index], out=parts.transpose(1, 2))
    return strip


def _forget() -> None:
    """Drop all indices, once no stream reads one: their memory would be given to others at once."""
    for device in {index.device for index in _indices.values() if index.is_cuda}:
        torch.cuda.synchronize(device)
    _indices.clear()


def _brought(batch: Batch, place: Place, upright: bool, width: int, device: torch.device) -> Tensor | None:
    """The index on the device: (pieces, h, w), or (pieces, w, h), of pixels counted row by row."""
    windows = [list(zip((piece.rows, piece.columns), place, strict=True)) for piece in batch]
    elsewhere = any(run.owner != owner for piece in windows for window, owner in piece for run in window.runs)
    if elsewhere or is_capturing(device):
        return None
    with torch.inference_mode(False):
        rows, columns = (torch.tensor([_pixels(piece[axis][0]) for piece in windows]) for axis in (0, 1))
        index = rows.unsqueeze(2) * width + columns.unsqueeze(1)
        return (index.transpose(1, 2) if upright else index).contiguous().to(device)


def _pixels(window: Window) -> list[int]:
    """The indices of what is read along one axis."""
    return [run.start + run.step * at for run in window.runs for at in range(run.length)]
