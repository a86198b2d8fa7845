"""Tensors of more than 2^31 elements, checked on windows far beyond the reach of a 32-bit offset."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from haloconv import reference, support
from tests import oracle
from tests.cases import Case, Tensors, case, case_id, generator, make
from tests.families import Subject, computing, each_subject

HALF = torch.float16
WINDOW = 24
LAYERS = (
    case("one_image", "a single plane beyond 2^31 pixels", (1, 1, 46400, 46400), (1, 3, 3), padding=(1, 2, 2, 1)),
    case("many_channels", "planes before and after 2^31", (2, 64, 4100, 4160), (64, 3, 3), padding=1, groups=64),
    case("nhwc", "the same in channels_last", (2, 64, 4100, 4160), (64, 3, 3), padding=1, groups=64,
         storage="channels_last"),
    case("many_images", "the batch reaches beyond 2^31, strided and dilated, the output is larger than the input",
         (9, 4, 3900, 3890), (16, 2, 3), stride=1, padding=(1, 0, 2, 2), dilation=(1, 2)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _enough_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def random_half(shape: tuple[int, ...], storage: str, name: str) -> torch.Tensor:
    layout = torch.channels_last if storage == "channels_last" else torch.contiguous_format
    out = torch.empty(shape, dtype=HALF, device="cuda", memory_format=layout)
    return out.normal_(generator=generator(name, "cuda"))


def places(rng: random.Random, n: int, channels: int, rows: int, cols: int) -> list[tuple[int, int, int, int]]:
    """(image, channel, row, column) of windows: both ends of the tensor and a few between."""
    row, col = max(0, rows - WINDOW), max(0, cols - WINDOW)
    inner = [(rng.randrange(n), rng.randrange(channels), rng.randint(0, row), rng.randint(0, col)) for _ in range(6)]
    return [(0, 0, 0, 0), (n - 1, channels - 1, row, col), (n - 1, channels - 1, row, 0), *inner]


def check_window(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor, limits: reference.Limits) -> None:
    error = reference.measure_error(got, reference.Oracle(want, scale), limits)
    assert error.passed, error


def y_window(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, one: Case, place: tuple) -> list[torch.Tensor]:
    """Output [image, channel, row:row+WINDOW, col:col+WINDOW] and its scale in float64, from a cropped input."""
    image, k, row, col = place
    problem, (top, _, left, _) = one.problem(), one.spec.padding
    rows, cols = min(WINDOW, problem.p - row), min(WINDOW, problem.q - col)
    group = k // problem.k_per_group
    channels = slice(group * problem.c_per_group, (group + 1) * problem.c_per_group)
    h, v = rows + one.spec.dilation[0] * (problem.r - 1), cols + one.spec.dilation[1] * (problem.s - 1)
    crop = torch.zeros(problem.c_per_group, h, v, dtype=torch.float64, device=x.device)
    h0, w0 = row - top, col - left
    h1, w1 = min(h0 + h, problem.h), min(w0 + v, problem.w)
    a, c = max(h0, 0), max(w0, 0)
    crop[:, a - h0 : h1 - h0, c - w0 : w1 - w0] = x[image, channels, a:h1, c:w1].double()
    taps, bias = w[k : k + 1].double(), b[k : k + 1].double()
    return [
        torch.nn.functional.conv2d(image_crop[None], filters, offset, dilation=one.spec.dilation)[0, 0]
        for image_crop, filters, offset in ((crop, taps, bias), (crop.abs(), taps.abs(), bias.abs()))
    ]


@pytest.mark.parametrize("subject", each_subject(computing("fprop")), ids=str)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_fprop(one: Case, subject: Subject) -> None:
    forced, problem = subject.on(one, HALF), one.problem()
    assert max(torch.Size(problem.x_shape).numel(), torch.Size(problem.y_shape).numel()) > 2**31
    x = random_half(problem.x_shape, one.storage, one.name)
    w, b = random_half(problem.w_shape, "contiguous", "w"), random_half((problem.k,), "contiguous", "b")
    y = oracle.run("fprop", Tensors(x, w, b, x), forced)
    assert tuple(y.shape) == problem.y_shape
    for image, k, row, col in places(random.Random(one.name), problem.n, problem.k, problem.p, problem.q):
        want, scale = y_window(x, w, b, one, (image, k, row, col))
        got = y[image, k, row : row + WINDOW, col : col + WINDOW]
        check_window(got, want, scale, reference.error_limits(one.problem("fprop", HALF)))


@pytest.mark.parametrize("subject", each_subject(), ids=str)
@pytest.mark.parametrize("one", LAYERS, ids=case_id)
def test_gradients(one: Case, subject: Subject) -> None:
    """dy is zero but for a few windows: dw and db are sums over these, and dx is known around each of them."""
    forced, problem = subject.on(one, HALF), one.problem()
    x = random_half(problem.x_shape, one.storage, one.name)
    w = random_half(problem.w_shape, "contiguous", "w")
    layout = torch.channels_last if one.storage == "channels_last" else torch.contiguous_format
    dy = torch.empty(problem.y_shape, dtype=HALF, device="cuda", memory_format=layout).zero_()
    gen = generator(f"{one.name} dy", "cuda")
    spots = places(random.Random(one.name), problem.n, problem.k, problem.p, problem.q)
    for image, k, row, col in spots:
        dy[image, k, row : row + WINDOW, col : col + WINDOW].normal_(generator=gen)
    t = Tensors(x, w, None, dy)
    if "wgrad" in subject.results:
        check_sums(t, one, forced, spots)
    if "dgrad" not in subject.results:
        return
    if forced.spec.family != "direct" and support.why_no_tensor_cores(oracle.problem_of("dgrad", t, forced.spec)):
        with pytest.raises(RuntimeError, match=r"2\^31 or more, in rows of no multiple of 16 bytes"):
            oracle.run("dgrad", t, forced)
        return
    dx = oracle.run("dgrad", t, forced)
    assert tuple(dx.shape) == problem.x_shape
    reached = [check_input_gradient(dx, t, one, spot) for spot in spots]
    for region in reached:
        region.zero_()
    assert not dx.any(), "dx is not zero where no output with a gradient reads"


def check_sums(t: Tensors, one: Case, forced: Case, spots: list[tuple[int, int, int, int]]) -> None:
    """dw and db, which are sums over the windows of dy at ``spots``."""
    problem = one.problem()
    want_db, scale_db = torch.zeros(2, problem.k, dtype=torch.float64, device="cuda")
    want_dw, scale_dw = torch.zeros(2, *problem.w_shape, dtype=torch.float64, device="cuda")
    for n, k in sorted({spot[:2] for spot in spots}):
        p, q = pixels_of([spot[2:] for spot in spots if spot[:2] == (n, k)], problem.p, problem.q)
        add_filter_gradient(t, one, (n, k, p, q), want_dw, scale_dw)
        want_db[k] += t.dy[n, k, p, q].double().sum()
        scale_db[k] += t.dy[n, k, p, q].double().abs().sum()
    summed = one.problem("wgrad", HALF)
    check_window(oracle.run("wgrad", t, forced), want_dw, scale_dw, reference.error_limits(summed))
    check_window(oracle.run("bgrad", t, forced), want_db, scale_db, reference.bgrad_limits(summed))


def pixels_of(corners: list[tuple[int, int]], rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of every pixel inside the windows at ``corners``, each pixel once."""
    span = torch.arange(WINDOW, device="cuda")
    windows = [(row + span[row + span < rows])[:, None] * cols + col + span[col + span < cols] for row, col in corners]
    flat = torch.cat([window.flatten() for window in windows]).unique()
    return flat // cols, flat % cols


def add_filter_gradient(t: Tensors, one: Case, pixels: tuple, want: torch.Tensor, scale: torch.Tensor) -> None:
    """Add what the given pixels (rows p, columns q) of one image and filter of dy contribute."""
    (n, k, p, q), problem, (top, _, left, _) = pixels, one.problem(), one.spec.padding
    values = t.dy[n, k, p, q].double()
    group = k // problem.k_per_group
    for c in range(problem.c_per_group):
        image = t.x[n, group * problem.c_per_group + c]
        for r in range(problem.r):
            for s in range(problem.s):
                h = p * one.spec.stride[0] + r * one.spec.dilation[0] - top
                v = q * one.spec.stride[1] + s * one.spec.dilation[1] - left
                inside = (h >= 0) & (h < problem.h) & (v >= 0) & (v < problem.w)
                products = values[inside] * image[h[inside], v[inside]].double()
                want[k, c, r, s] += products.sum()
                scale[k, c, r, s] += products.abs().sum()


def check_input_gradient(dx: torch.Tensor, t: Tensors, one: Case, place: tuple[int, int, int, int]) -> torch.Tensor:
    """Compare dx of the group's channels around one window of dy; returns the region, all that the window reaches."""
    n, k, row, col = place
    problem, (top, _, left, _) = one.problem(), one.spec.padding
    reach_h, reach_w = one.spec.dilation[0] * (problem.r - 1), one.spec.dilation[1] * (problem.s - 1)
    p0, q0 = max(row - 8 - reach_h, 0), max(col - 8 - reach_w, 0)
    p1, q1 = min(row + WINDOW + 8 + reach_h, problem.p), min(col + WINDOW + 8 + reach_w, problem.q)
    group = k // problem.k_per_group
    filters = slice(group * problem.k_per_group, (group + 1) * problem.k_per_group)
    dy, w = t.dy[n : n + 1, filters, p0:p1, q0:q1].double(), t.w[filters].double()
    full = [
        torch.nn.functional.conv_transpose2d(a, f, dilation=one.spec.dilation)[0]
        for a, f in ((dy, w), (dy.abs(), w.abs()))
    ]
    # full[., i, j] is dx at row i + p0 - top, complete where no output outside the crop reaches it.
    i0, i1 = (reach_h if p0 else top), full[0].shape[1] - (reach_h if p1 < problem.p else 0)
    j0, j1 = (reach_w if q0 else left), full[0].shape[2] - (reach_w if q1 < problem.q else 0)
    i1, j1 = min(i1, problem.h - p0 + top), min(j1, problem.w - q0 + left)
    channels = slice(group * problem.c_per_group, (group + 1) * problem.c_per_group)
    got = dx[n, channels, i0 + p0 - top : i1 + p0 - top, j0 + q0 - left : j1 + q0 - left]
    assert got.numel() and got.any()
    limits = reference.error_limits(one.problem("dgrad", HALF))
    check_window(got, full[0][:, i0:i1, j0:j1], full[1][:, i0:i1, j0:j1], limits)
    return got


@pytest.mark.parametrize("subject", each_subject(computing("dgrad")), ids=str)
def test_more_residues_than_a_launch_has_blocks(subject: Subject) -> None:
    """A stride of 70000 in both axes has 4.9e9 residue classes, of which few have pixels."""
    one = case("stride_beyond_image", "few residues have pixels", (1, 3, 6, 7), (4, 2, 2), stride=70000, padding=1)
    forced = subject.on(one, torch.float32)
    t = make(forced, torch.float32, "cuda")
    for result in subject.results:
        want = oracle.expected(result, t, forced.spec)._replace(value=oracle.tap_sums(result, t, forced.spec))
        oracle.check(result, oracle.run(result, t, forced), t, forced.spec, want=want)
