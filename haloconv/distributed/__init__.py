"""Images that are larger than one GPU: convolutions, and whole models, of DTensors sharded along rows and columns.

It stands on torch.distributed and DTensor, and needs PyTorch 2.6 or newer. ``import haloconv`` does not load it.
"""

from __future__ import annotations

import torch

if not torch.distributed.is_available() or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
    raise ImportError(
        f"haloconv.distributed needs PyTorch 2.6 or newer, built with torch.distributed; this is {torch.__version__}"
    )

from haloconv.distributed.convolution import conv2d  # noqa: E402
from haloconv.distributed.cost import ExchangeCost, exchange_cost  # noqa: E402
from haloconv.distributed.group import RankError  # noqa: E402
from haloconv.distributed.model import shard_spatially  # noqa: E402

__all__ = ["ExchangeCost", "RankError", "conv2d", "exchange_cost", "shard_spatially"]
