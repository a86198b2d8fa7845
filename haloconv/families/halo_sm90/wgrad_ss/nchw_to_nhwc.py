"""Host half of families/halo_sm90/wgrad_ss/nchw_to_nhwc.cu: dense planes, copied so that channels are neighbours."""

from __future__ import annotations

from dataclasses import replace

from haloconv.families.common import ELEMENTS, ceil_div
from haloconv.families.halo_sm90.wgrad.arrange import Copies
from haloconv.jit import KernelSource, kernel_source
from haloconv.jit.launch import Launch, LaunchShape, Value
from haloconv.problem import Problem, Request, TensorForm

KERNEL = "halo_sm90/nchw_to_nhwc"
_THREADS, _PIECE = 256, 8  # of a block; elements of 16 bytes
_SMALL_ELEMS, _CHANNELS, _PIXELS = 16384, (32, 16), 128  # of a block, as nchw_to_nhwc.cu has them
# Of the launch, and bytes that all multiprocessors read and write in a cycle. Not measured.
_LAUNCH_CYCLES, _BYTES_OF_CYCLE = 4000, 1500

_Shape = tuple[int, ...]


def takes(request: Request) -> bool:
    """Whether both tensors are dense planes, from which 16 bytes are read at a time.

    A stride is taken of 1x1 layers without padding, whose copies have the pixels that outputs meet.
    """
    problem = request.problem
    if problem.stride != (1, 1) and ((problem.r, problem.s) != (1, 1) or any(problem.padding)):
        return False
    return _takes(request.first, problem.y_shape, (1, 1)) and _takes(request.second, problem.x_shape, problem.stride)


def _takes(form: TensorForm, shape: _Shape, stride: tuple[int, int]) -> bool:
    n, channels, rows, cols = shape
    plane = rows * cols
    dense = form.strides[1:] == (plane, cols, 1) and (n == 1 or form.strides[0] % _PIECE == 0)
    in_pieces = plane % _PIECE == 0 if stride == (1, 1) else cols % _PIECE == 0 and cols <= _PIXELS // 2
    return dense and form.aligned and channels % _PIECE == 0 and (_channels_at_once(plane) > 0 or in_pieces)


def _channels_at_once(plane: int) -> int:
    """Channels of a block that moves whole planes; 0 if they are too large."""
    return next((channels for channels in _CHANNELS if channels * plane <= _SMALL_ELEMS), 0)


def copied(request: Request) -> Request:
    """The request of the copies: of a 1x1 layer without a stride, if it has one."""
    problem = _seen(request.problem)
    dy, x = (_form(shape) for shape in (problem.y_shape, problem.x_shape))
    return replace(request, problem=problem, first=dy, second=x)


def _seen(problem: Problem) -> Problem:
    if problem.stride == (1, 1):
        return problem
    return replace(problem, h=problem.p, w=problem.q, stride=(1, 1))


def _form(shape: _Shape) -> TensorForm:
    _, channels, rows, cols = shape
    return TensorForm((rows * cols * channels, 1, cols * channels, channels), True)


def elems(problem: Problem) -> tuple[int, int]:
    """Elements of the copies of x and of dy."""
    seen = _seen(problem)
    return _elems(seen.x_shape), _elems(seen.y_shape)


def _elems(shape: _Shape) -> int:
    n, channels, rows, cols = shape
    return n * channels * rows * cols


def cycles(problem: Problem) -> float:
    """Cycles that the copies take, by an estimate."""
    moved = _elems(problem.x_shape) + _elems(problem.y_shape) + sum(elems(problem))
    return _LAUNCH_CYCLES + problem.dtype.itemsize * moved / _BYTES_OF_CYCLE


def source(problem: Problem) -> KernelSource:
    """The specialised source. All extents and strides are run-time values."""
    return kernel_source(KERNEL, "halo_sm90_nchw_to_nhwc", {"ELEM": ELEMENTS[problem.dtype]})


def bind(request: Request) -> Copies:
    """What copies x and dy of a request."""
    problem = request.problem
    x, x_blocks = _tensor(request.second, problem.x_shape, problem.stride, (problem.p, problem.q))
    dy, dy_blocks = _tensor(request.first, problem.y_shape, (1, 1), (problem.p, problem.q))
    fields: dict[str, Value] = {"tensors": [x, dy], "x_blocks": x_blocks}
    launch = Launch(source(problem), request.device, LaunchShape(x_blocks + dy_blocks, _THREADS), fields)
    return Copies(launch, *elems(problem))


def _tensor(
    form: TensorForm, shape: _Shape, stride: tuple[int, int], met: tuple[int, int]
) -> tuple[dict[str, Value], int]:
    """The struct of x or dy, of which a stride leaves ``met`` rows and columns, and blocks that move it.

    Without one all pixels of a plane are one row.
    """
    n, channels, rows, cols = shape
    plane, at_once = rows * cols, _channels_at_once(rows * cols)
    if stride == (1, 1):
        pixels, row, down, across = plane, plane, 0, 1
        runs, run, block_pixels = 1, _PIXELS, _PIXELS
    else:
        pixels, row, down, across = met[0] * met[1], met[1], stride[0] * cols, stride[1]
        runs, run = max(1, _PIXELS // cols), cols
        block_pixels = runs * row
    if at_once:
        runs, run, block_pixels = 0, 0, pixels
    channel_blocks, pixel_blocks = ceil_div(channels, at_once or _CHANNELS[0]), ceil_div(pixels, block_pixels)
    fields: dict[str, Value] = {
        **{"image": form.strides[0], "to_image": pixels * channels, "channels": channels, "plane": plane},
        **{"pixels": pixels, "cols": row, "down": down, "across": across},
        **{"block_channels": at_once or _CHANNELS[0], "block_pixels": block_pixels},
        **{"channel_blocks": channel_blocks, "pixel_blocks": pixel_blocks, "runs": runs, "run": run},
    }
    return fields, n * channel_blocks * pixel_blocks
