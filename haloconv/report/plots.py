"""The plots of a page, as SVG text that takes its colours from the page: speed-ups as bars, and the roofline.

matplotlib draws with stand-in colours; they are replaced by the page's CSS variables, so that a plot turns dark with
the page and light in print. Text stays text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from haloconv import extras
from haloconv.report.rows import Row
from haloconv.report.table import ratio_text
from haloconv.roofline import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 42
"""Bars of one plot; the layers that do not fit go on in the next one."""

_OF_A_PAGE = ("a page", "jinja2", "matplotlib")
_WIDTH_IN, _BAR_IN, _GAP_IN, _FRAME_IN = 4.3, 0.145, 0.09, 0.62
_LABEL_CHARS = 22
_VARIABLES = {"#000001": "--ink", "#000002": "--faint", "#000003": "--line", "#000004": "--ground"} | {
    f"#00001{i}": f"--{name}" for i, name in enumerate(("fprop", "dgrad", "wgrad", "whole"))
}
_INK, _FAINT, _LINE, _GROUND = list(_VARIABLES)[:4]
_HUES = dict(zip(("fprop", "dgrad", "wgrad"), list(_VARIABLES)[4:7], strict=True))
_WHOLE = list(_VARIABLES)[7]
_MARKERS = {"fprop": "o", "dgrad": "^", "wgrad": "s"}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 8.4,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _FAINT,
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


class Plot(NamedTuple):
    """One plot: its heading, what it shows in words for those who do not see it, and the SVG element."""

    heading: str
    alt: str
    svg: str


def missing() -> str | None:
    """Why no page can be made and what to do, or None."""
    return extras.missing(*_OF_A_PAGE)


def require() -> None:
    """Raise ModuleNotFoundError, with the sentence of ``missing``, if no page can be made."""
    extras.require(*_OF_A_PAGE)


def bars(rows: Sequence[Row], heading: str, name: str) -> list[Plot]:
    """Speed-ups over PyTorch by layer and direction, on a logarithmic scale; none for rows without times.

    ``name`` makes the identifiers of the plot unique in its page.
    """
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if row.ratio is not None and row.ratio > 0:
            cases.setdefault(row.case, []).append(row)
    plots: list[Plot] = []
    for part in _parts(cases):
        shown = [row for found in part.values() for row in found]
        best, worst = max(shown, key=lambda row: row.known_ratio), min(shown, key=lambda row: row.known_ratio)
        alt = (
            f"Bars of haloconv's speed over PyTorch's, {heading}: {len(shown)} measurements, from "
            f"{ratio_text(worst.ratio)} ({worst.case} {worst.direction}) to "
            f"{ratio_text(best.ratio)} ({best.case} {best.direction})."
        )
        plots.append(Plot(heading, alt, _drawn(partial(_draw_bars, cases=part), f"{name}{len(plots)}")))
    return plots


def _parts(cases: Mapping[str, list[Row]]) -> list[dict[str, list[Row]]]:
    parts: list[dict[str, list[Row]]] = []
    room = 0
    for case, found in cases.items():
        if len(found) > room:
            parts.append({})
            room = MOST_BARS
        parts[-1][case] = found
        room -= len(found)
    return parts


def _draw_bars(figure: Figure, cases: Mapping[str, list[Row]]) -> None:
    count = sum(map(len, cases.values()))
    figure.set_size_inches(_WIDTH_IN, _FRAME_IN + count * _BAR_IN + len(cases) * _GAP_IN)
    axes = figure.add_subplot()
    y, ticks = 0.0, []
    for found in cases.values():
        top = y
        for row in found:
            _draw_bar(axes, y, row)
            y += _BAR_IN
        ticks.append((top + y - _BAR_IN) / 2)
        y += _GAP_IN
    axes.set_xscale("log", base=2)
    axes.set_yticks(ticks, _labels(list(cases)))
    axes.set_ylim(y - _GAP_IN / 2, -_BAR_IN)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7) / 1.45, max(high, 1.5) * 1.45)  # room for the figures at the bars' ends
    _logarithmic_ticks(axes)
    axes.axvline(1.0, color=_FAINT, linewidth=0.8)
    axes.set_xlabel("times as fast as PyTorch")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bar(axes: Axes, y: float, row: Row) -> None:
    won = row.known_ratio >= 1
    axes.barh(y, row.known_ratio - 1, left=1.0, height=_BAR_IN * 0.86, color=_HUES.get(row.direction, _WHOLE))
    axes.annotate(
        ratio_text(row.ratio), (row.known_ratio, y), (3 if won else -3, 0), textcoords="offset points",
        ha="left" if won else "right", va="center_baseline", fontsize=7.2, color=_INK,
    )  # fmt: skip


def _logarithmic_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, math.ceil(len(powers) / 7))
    chosen = [power for power in powers if power % step == 0]
    axes.set_xticks([2.0**power for power in chosen], [f"{2.0**power:g}x" for power in chosen])
    axes.minorticks_off()


def _labels(cases: Sequence[str]) -> list[str]:
    """The names without the model's, if all share it, and of long ones the end, which is what tells layers apart."""
    models = {case.partition(".")[0].removesuffix(" (model)") for case in cases}
    prefix = f"{next(iter(models))}." if len(models) == 1 else None
    names = [case.removeprefix(prefix) if prefix else case for case in cases]
    return [name if len(name) <= _LABEL_CHARS else "…" + name[-_LABEL_CHARS + 1 :] for name in names]


def roofline(rows: Sequence[Row], ceilings: Ceilings, precision: str, name: str) -> Plot | None:
    """TFLOP/s over FLOP per byte below the two ceilings; None if no row of this precision has all figures."""
    rate = ceilings.flops_per_s.get(precision)
    placed = [found for row in rows if row.precision == precision and (found := _placed(row)) is not None]
    if rate is None or not placed:
        return None
    best = max((each.row for each in placed), key=lambda row: row.share or 0.0)
    alt = (
        f"Roofline in {precision}: {len(placed)} measurements below {rate * 1e-12:.0f} TFLOP/s and "
        f"{ceilings.bytes_per_s * 1e-12:.2f} TB/s; {best.case} {best.direction} reaches "
        f"{best.share or 0:.0%} of its roofline."
    )
    svg = _drawn(lambda figure: _draw_roofline(figure, placed, rate, ceilings.bytes_per_s), name)
    return Plot(f"Roofline, {precision}", alt, svg)


class _Placed(NamedTuple):
    """A row in a roofline: FLOP per byte, and the TFLOP/s of both sides."""

    row: Row
    intensity: float
    tflops: float
    aten_tflops: float | None


def _placed(row: Row) -> _Placed | None:
    if not row.flops or not row.bytes or not row.tflops:
        return None
    theirs = row.flops / row.aten_ms * 1e-9 if row.aten_ms else None
    return _Placed(row, row.flops / row.bytes, row.tflops, theirs)


def _draw_roofline(figure: Figure, rows: Sequence[_Placed], rate: float, bytes_per_s: float) -> None:
    figure.set_size_inches(_WIDTH_IN, 3.2)
    axes = figure.add_subplot()
    intensities = [each.intensity for each in rows]
    ridge = rate / bytes_per_s
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    corner = [left, ridge, right]
    axes.plot(corner, [min(rate, x * bytes_per_s) * 1e-12 for x in corner], color=_FAINT, linewidth=1)
    for row, intensity, tflops, theirs in rows:
        hue, marker = _HUES.get(row.direction, _WHOLE), _MARKERS.get(row.direction, "D")
        if theirs is not None:
            axes.plot([intensity] * 2, [theirs, tflops], color=hue, linewidth=0.6, zorder=2)
            axes.plot(intensity, theirs, marker, color=hue, markerfacecolor=_GROUND, markersize=3.6, zorder=3)
        axes.plot(intensity, tflops, marker, color=hue, markersize=4, zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(top=max(axes.get_ylim()[1], rate * 2e-12))
    axes.set_xlabel("FLOP per byte, every tensor once")
    axes.set_ylabel("TFLOP/s")
    axes.tick_params(axis="y", colors=_FAINT)
    axes.tick_params(which="minor", length=0)
    axes.grid(color=_LINE, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    height = f"{rate * 1e-12:.0f} TFLOP/s"
    axes.annotate(
        height, (right, rate * 1e-12), (0, 3), textcoords="offset points", ha="right", color=_FAINT, fontsize=7.5
    )


def _drawn(draw: Callable[[Figure], None], name: str) -> str:
    """What ``draw`` puts on a figure, as an SVG element whose identifiers begin with ``name``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):  # type: ignore[arg-type]  # its stubs list every key
        figure = Figure(layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</defs>\s*", "", svg, count=1, flags=re.DOTALL)  # it would hold for the page
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
