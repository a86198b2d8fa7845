"""How x and dy of families/halo_sm90/wgrad/wgrad.cu come into shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from haloconv.families.common import ceil_div
from haloconv.families.halo_sm90.terms import TERMS
from haloconv.problem import ZEROS, EdgeModes, Problem, TensorForm

PIECE_BYTES, SPAN_BYTES = 16, 128
_RAW_STAGES = 2  # boxes before they are shifted
_MOST_POSITIONS = 1 << 31  # pixels of planes that are numbered by 32-bit integers


@dataclass(frozen=True)
class Operand:
    """How x or dy comes into shared memory.

    ``inner``: as [pixel][channels], else as [channel][pixels]. ``loads`` is 0 where TMA brings it, V where loads of V
    pixels do, -V where loads of V channels do. ``planes``: TMA brings lines that begin anywhere, from planes end to end
    of which every so many channels' begin at a multiple of 16 bytes (0: not so). ``transposed``: TMA brings
    [pixel][channels], and warps transpose it. ``steps`` are strides in elements; where an extent is 1, any that TMA
    takes. ``modes`` are the padding modes of x.
    """

    inner: bool
    loads: int
    steps: tuple[int, ...]
    planes: int = 0
    transposed: bool = False
    modes: EdgeModes = ZEROS

    @property
    def is_filled(self) -> bool:
        """Whether threads write pixels of the image left and right of lines that TMA brings."""
        return self.modes[1] != "zeros" and not self.loads and not self.planes

    @property
    def rows_apart(self) -> bool:
        """Whether lines of a box come from rows that do not follow one another."""
        return self.modes[0] != "zeros"

    @property
    def is_raw(self) -> bool:
        """Whether TMA brings boxes that warps shift or transpose."""
        return self.planes > 0 or self.transposed

    def words(self, depth: int) -> int:
        """Reads of a fragment of x by a lane; pairs of pixels may begin in the middle of a word."""
        if depth == 16:
            return 4 if self.inner else 8
        return 8 if self.inner else 4

    @classmethod
    def of(
        cls, problem: Problem, form: TensorForm, shape: tuple[int, ...], channels: int, is_dy: bool = False
    ) -> Operand:
        """``shape`` is (N, C, H, W), ``channels`` are those of a group.

        Of dy in fp32 pixels must be neighbours; in several terms threads must store it.
        """
        size = problem.dtype.itemsize
        piece = PIECE_BYTES // size
        steps = tuple(
            step if extent > 1 else ceil_div(max(step, 1), piece) * piece
            for extent, step in zip(shape, form.strides, strict=True)
        )
        n, c, h, w = steps

        def whole(*others: int) -> bool:
            return form.aligned and all(step > 0 and step % piece == 0 for step in others)

        stored = is_dy and problem.precision in TERMS
        if not stored and (form.strides[3] == 1 or shape[3] == 1) and whole(n, c, h):
            return cls(False, 0, steps)
        inner = form.strides[1] == 1 and (problem.groups == 1 or channels % piece == 0)
        if inner and whole(n, h, w):
            return cls(size == 2 or not is_dy, 0, steps, transposed=size == 4 and is_dy)
        planes = _planes(form._replace(strides=(n, *form.strides[1:])), shape, channels, piece)
        return cls(False, 0 if planes else _load_width(problem, form, shape, channels), steps, planes)

    def loaded(self, problem: Problem, form: TensorForm, shape: tuple[int, ...], channels: int) -> Operand:
        """The operand as threads load it, if it has raw boxes, which need room in shared memory; else itself."""
        if not self.is_raw:
            return self
        return Operand(False, _load_width(problem, form, shape, channels), form.strides, modes=self.modes)

    def raw_pixels(self, width: int, pixels: int, box_rows: int, size: int) -> int:
        """Pixels of a channel of a raw box, whose lines are ``width`` apart; of a line if it is transposed; else 0.

        A box that is shifted begins with the aligned piece in which its first line does, and has an odd number of them.
        """
        if not self.planes:
            return pixels if self.transposed else 0
        return (ceil_div(((box_rows - 1) * width + pixels) * size, PIECE_BYTES) + 1 | 1) * PIECE_BYTES // size

    def raw_bytes(self, rows: int, raw_pixels: int, box_rows: int, size: int) -> int:
        """Bytes of all raw boxes of ``rows`` channels that are in shared memory at a time."""
        if not self.planes:
            return _RAW_STAGES * box_rows * rows * raw_pixels * size if self.transposed else 0
        plane_bytes = rows // self.planes * raw_pixels * size
        return _RAW_STAGES * self.planes * ceil_div(plane_bytes, SPAN_BYTES) * SPAN_BYTES


def summed(problem: Problem, modes: EdgeModes) -> Problem:
    """The problem whose lines of x are summed over: rows that a mode names above and below the image are its own."""
    if modes[0] == "zeros":
        return problem
    top, bottom, left, right = problem.padding
    return replace(problem, h=problem.h + top + bottom, padding=(0, 0, left, right))


def _load_width(problem: Problem, form: TensorForm, shape: tuple[int, ...], channels: int) -> int:
    """Elements of a load: the most that its neighbours and the tensor's alignment allow."""
    n, c, h, w = form.strides
    widths = (4, 2, 1) if form.aligned else (1,)
    if w == 1:
        return next(each for each in widths if not any(value % each for value in (n, c, h, shape[3])))
    if c == 1:
        return -next(each for each in widths if not any(value % each for value in (n, h, w, channels)))
    return -1


def _planes(form: TensorForm, shape: tuple[int, ...], channels: int, piece: int) -> int:
    """Every how many channels one begins at a multiple of 16 bytes; 0 if rows and planes do not lie end to end."""
    _, _, h, w = shape
    n_step, c_step, h_step, w_step = form.strides
    ends = w_step == 1 and (h == 1 or h_step == w) and (c_step == h * w) and n_step % piece == 0
    if not form.aligned or not ends or n_step <= 0 or piece * h * w >= _MOST_POSITIONS:
        return 0
    return next((each for each in (1, 2, 4, 8) if each <= piece and each * h * w % piece == channels % each == 0), 0)


LOADED = Operand(False, -1, (0, 0, 0, 0))
"""What any tensor can be; of all operands it needs most room."""
