"""haloconv: a drop-in 2-D convolution for PyTorch on its own CUDA kernels, specialised per layer at run time."""

from __future__ import annotations

from haloconv.accelerate import accelerate, restore
from haloconv.export.export import export
from haloconv.functional import conv2d
from haloconv.module import Conv2d
from haloconv.tune.ahead import tune
from haloconv.version import __version__

__all__ = ["Conv2d", "__version__", "accelerate", "conv2d", "export", "restore", "tune"]
