"""Host half of families/halo_sm90/wgrad_ss/nchw_to_nhwc.cu: dense planes, copied so that channels are neighbours."""

from __future__ import annotations

from dataclasses import replace

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.halo_sm90.wgrad.arrange import Copies
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "halo_sm90/nchw_to_nhwc"
_THREADS, _CHANNELS, _SMALL_PLANE, _PIXELS = 256, 32, 512, 128  # of a block
_PIECE = 8  # elements of 16 bytes
# Of the launch, and bytes that all multiprocessors read and write in a cycle. Not measured.
_LAUNCH_CYCLES, _BYTES_OF_CYCLE = 4000, 1500

_Shape = tuple[int, ...]


def takes(request: Request) -> bool:
    """Whether both tensors are dense planes, from which 16 bytes are read at a time."""
    problem = request.problem
    return _takes(request.first, problem.y_shape) and _takes(request.second, problem.x_shape)


def _takes(form: TensorForm, shape: _Shape) -> bool:
    n, channels, rows, cols = shape
    plane = rows * cols
    dense = form.strides[1:] == (plane, cols, 1) and (n == 1 or form.strides[0] % _PIECE == 0)
    return dense and form.aligned and channels % _PIECE == 0 and (plane <= _SMALL_PLANE or plane % _PIECE == 0)


def copied(request: Request) -> Request:
    """The request of the copies."""
    forms = (_form(shape) for shape in (request.problem.y_shape, request.problem.x_shape))
    dy, x = forms
    return replace(request, first=dy, second=x)


def _form(shape: _Shape) -> TensorForm:
    _, channels, rows, cols = shape
    return TensorForm((rows * cols * channels, 1, cols * channels, channels), True)


def elems(problem: Problem) -> tuple[int, int]:
    """Elements of the copies of x and of dy."""
    return _elems(problem.x_shape), _elems(problem.y_shape)


def _elems(shape: _Shape) -> int:
    n, channels, rows, cols = shape
    return n * channels * rows * cols


def cycles(problem: Problem) -> float:
    """Cycles that the copies take, by an estimate."""
    return _LAUNCH_CYCLES + 2 * problem.dtype.itemsize * sum(elems(problem)) / _BYTES_OF_CYCLE


def source(problem: Problem) -> KernelSource:
    """The specialised source. All extents and strides are run-time values."""
    return kernel_source(KERNEL, "halo_sm90_nchw_to_nhwc", {"ELEM": ELEMENTS[problem.dtype]})


def bind(request: Request) -> Copies:
    """What copies x and dy of a request."""
    problem = request.problem
    x, x_blocks = _tensor(request.second, problem.x_shape)
    dy, dy_blocks = _tensor(request.first, problem.y_shape)
    fields: dict[str, Value] = {"tensors": [x, dy], "x_blocks": x_blocks}
    launch = Launch(source(problem), request.device, LaunchShape(x_blocks + dy_blocks, _THREADS), fields)
    return Copies(launch, *elems(problem))


def _tensor(form: TensorForm, shape: _Shape) -> tuple[dict[str, Value], int]:
    """The struct of x or dy, and blocks that move it."""
    n, channels, rows, cols = shape
    plane = rows * cols
    channel_blocks = ceil_div(channels, _CHANNELS)
    pixel_blocks = 1 if plane <= _SMALL_PLANE else ceil_div(plane, _PIXELS)
    fields: dict[str, Value] = {
        **{"image": form.strides[0], "to_image": plane * channels, "channels": channels, "plane": plane},
        **{"channel_blocks": channel_blocks, "pixel_blocks": pixel_blocks},
    }
    return fields, n * channel_blocks * pixel_blocks
