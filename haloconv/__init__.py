"""haloconv: a drop-in 2-D convolution for PyTorch on its own CUDA kernels, specialised per layer at run time.

What measures, reports, exports and fuses is loaded when it is first asked for, and so is each family of kernels.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import haloconv.export
import haloconv.tune  # noqa: F401
from haloconv.accelerate import accelerate, restore
from haloconv.choose import measuring
from haloconv.decompositions import decompositions
from haloconv.fronts import Conv1d, Conv3d, ConvTranspose1d, ConvTranspose2d
from haloconv.functional import conv2d, functional_mode
from haloconv.logs import set_logs
from haloconv.module import Conv2d
from haloconv.one_dimension import conv1d
from haloconv.precompile import precompile
from haloconv.three_dimensions import conv3d
from haloconv.transposed import conv_transpose1d, conv_transpose2d
from haloconv.version import __version__

if TYPE_CHECKING:
    from haloconv.export.export import export
    from haloconv.fusion.fuse import fuse
    from haloconv.tune.advice import advise
    from haloconv.tune.ahead import tune

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "__version__",
    "accelerate",
    "advise",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "decompositions",
    "export",
    "functional_mode",
    "fuse",
    "precompile",
    "restore",
    "set_logs",
    "tune",
]

_LOADED_WHEN_ASKED_FOR = {
    "advise": "haloconv.tune.advice",
    "export": "haloconv.export.export",
    "fuse": "haloconv.fusion.fuse",
    "tune": "haloconv.tune.ahead",
}
for _name in ("export", "tune"):
    del globals()[_name]  # the packages, imported above: the names are those of functions

measuring.register(partial(import_module, "haloconv.tune.first_use"))


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = function = getattr(import_module(_LOADED_WHEN_ASKED_FOR[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
