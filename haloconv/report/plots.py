"""The rooflines of a page, as SVG text that takes its colours from the page.

matplotlib draws with stand-in colours; they are replaced by the page's CSS variables, so that a plot becomes dark with
the page and light in print. Text stays text.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from haloconv import extras
from haloconv.report.rows import Row, RowDirection, RowPrecision
from haloconv.roofline import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OF_A_PAGE = ("a page", "jinja2", "matplotlib")
_WIDTH_IN = 4.3
_VARIABLES = {"#000001": "--ink", "#000002": "--faint", "#000003": "--line", "#000004": "--ground"} | {
    f"#00001{i}": f"--{name}" for i, name in enumerate(("fprop", "dgrad", "wgrad", "whole"))
}
_INK, _FAINT, _LINE, _GROUND = list(_VARIABLES)[:4]
_HUES = dict(zip(("fprop", "dgrad", "wgrad"), list(_VARIABLES)[4:7], strict=True))
_WHOLE = list(_VARIABLES)[7]
_POINTS = "p-"
"""How the identifiers of our points begin: behind it stands the direction."""
_MARKERS = {"fprop": "o", "dgrad": "^", "wgrad": "s"}
_STYLE: dict[Any, Any] = {  # matplotlib's stubs list every key
    "svg.fonttype": "none",
    "path.simplify": False,
    "font.size": 9.5,
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


def roofline(rows: Sequence[Row], ceilings: Ceilings, precision: RowPrecision, name: str) -> Plot | None:
    """TFLOP/s over FLOP per byte below the two ceilings; None if no row of this precision has all figures."""
    rate = ceilings.flops_per_s.get(precision)
    placed = [found for row in rows if row.precision == precision and (found := _placed(row)) is not None]
    if rate is None or not placed:
        return None
    best = max((each.row for each in placed), key=lambda row: row.roofline_fraction or 0.0)
    alt = (
        f"Roofline in {precision}: {len(placed)} measurements below {rate * 1e-12:.0f} TFLOP/s and "
        f"{ceilings.bytes_per_s * 1e-12:.2f} TB/s; {best.case} {best.direction} reaches "
        f"{best.roofline_fraction or 0:.0%} of its roofline."
    )
    svg = _drawn(lambda figure: _draw_roofline(figure, placed, rate, ceilings.bytes_per_s), name)
    for direction, points in _by_direction(placed).items():
        svg = _titled(svg, f"{name}-{_POINTS}{direction}", [each.title for each in points])
    return Plot(f"Roofline, {precision}", alt, svg)


class _Placed(NamedTuple):
    """A row in a roofline: FLOP per byte, and the TFLOP/s of both sides, PyTorch's None if they are within 2 %."""

    row: Row
    intensity: float
    tflops: float
    aten_tflops: float | None

    @property
    def title(self) -> str:
        """What a pointer on the point is told, in TFLOP/s as the axis."""
        row = self.row
        fraction = "" if row.roofline_fraction is None else f" ({row.roofline_fraction:.0%})"
        theirs = "" if self.aten_tflops is None else f", PyTorch {self.aten_tflops:.3g}"
        return f"{row.case} {row.direction} {row.layout}: {self.tflops:.3g}{fraction}{theirs}"


def _placed(row: Row) -> _Placed | None:
    if not row.flops or not row.bytes or not row.tflops:
        return None
    apart = row.aten_ms and row.haloconv_ms and not 0.98 <= row.aten_ms / row.haloconv_ms <= 1.02
    theirs = row.flops / row.aten_ms * 1e-9 if row.aten_ms and apart else None
    return _Placed(row, row.flops / row.bytes, row.tflops, theirs)


def _draw_roofline(figure: Figure, rows: Sequence[_Placed], rate: float, bytes_per_s: float) -> None:
    from matplotlib.ticker import LogLocator

    figure.set_size_inches(_WIDTH_IN, 3.2)
    axes = figure.add_subplot()
    intensities = [each.intensity for each in rows]
    ridge = rate / bytes_per_s
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    corner = [left, ridge, right]
    axes.plot(corner, [min(rate, x * bytes_per_s) * 1e-12 for x in corner], color=_FAINT, linewidth=1)
    for direction, found in _by_direction(rows).items():
        _draw_points(axes, direction, found)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    axes.set_xlim(left, right)
    axes.set_ylim(top=max(axes.get_ylim()[1], rate * 2e-12))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("FLOP per byte, every tensor once")
    axes.set_ylabel("TFLOP/s")
    axes.tick_params(axis="y", colors=_FAINT)
    axes.tick_params(left=False, bottom=False)  # the grid shows where
    axes.grid(color=_LINE, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    height = f"{rate * 1e-12:.0f} TFLOP/s"
    axes.annotate(
        height, (right, rate * 1e-12), (0, 3), textcoords="offset points", ha="right", color=_FAINT, fontsize=9
    )


def _by_direction(rows: Sequence[_Placed]) -> dict[RowDirection, list[_Placed]]:
    found: dict[RowDirection, list[_Placed]] = {}
    for each in rows:
        found.setdefault(each.row.direction, []).append(each)
    return found


def _draw_points(axes: Axes, direction: RowDirection, rows: Sequence[_Placed]) -> None:
    """The points of both sides, those of a row joined: one line each, so that the page names a style once."""
    hue, marker = _HUES.get(direction, _WHOLE), _MARKERS.get(direction, "D")
    known = [(each.intensity, each.aten_tflops, each.tflops) for each in rows if each.aten_tflops is not None]
    stems = [(x, y) for x, theirs, ours in known for y in (theirs, ours, math.nan)]
    axes.plot([x for x, _ in stems], [y for _, y in stems], color=hue, linewidth=0.6, zorder=2)
    axes.plot([x for x, _, _ in known], [y for _, y, _ in known], marker, color=hue, markerfacecolor=_GROUND,
              markersize=3.6, zorder=3)  # fmt: skip
    points = [each.intensity for each in rows], [each.tflops for each in rows]
    axes.plot(*points, marker, color=hue, markersize=4, zorder=4, gid=f"{_POINTS}{direction}")


def _drawn(draw: Callable[[Figure], None], name: str) -> str:
    """What ``draw`` puts on a figure, as an SVG element whose identifiers begin with ``name``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _compact(text.getvalue(), name)


def _compact(svg: str, name: str) -> str:
    """matplotlib's file as an element of a page, at a third of its size.

    Identifiers begin with ``name``; those that nothing refers to go. No style is for the page; a style that a group of
    points shares is the group's. Two decimals are left, of units of which the plot is 310 wide.
    """
    svg = svg[svg.index("<svg") :].strip()
    for gone in (r"<metadata>.*?</metadata>", r"<!--.*?-->", r"(?<=>)\s+|\s+(?=<)"):
        svg = re.sub(gone, "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</defs>", "", svg, count=1, flags=re.DOTALL)  # it would hold for the page
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg)
    used = dict.fromkeys(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', svg))
    short = {old: f"{name}-{i}" for i, old in enumerate(used)}
    svg = re.sub(r' id="([^"]*)"', lambda found: _identified(found, short, name), svg)
    svg = re.sub(r'(xlink:href="#|url\(#)([^")]+)', lambda found: found[1] + short[found[2]], svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)  # that of the page
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r'( [xy]="-?\d+\.\d)\d"', r'\1"', svg)
    svg = re.sub(r"\s*\n\s*([MLCz\"]|$)", r"\1", svg)
    svg = re.sub(r"([MLC]) (-?\d)", r"\1\2", svg)
    svg = re.sub(r"(M(\S+) [^ML]+)L\2 ([\d.]+)", r"\1V\3", svg)
    svg = re.sub(r"(<g[^>]*)>((?:<use [^>]*/>)+)</g>", _style_once, svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def _identified(found: re.Match[str], short: Mapping[str, str], name: str) -> str:
    """The attribute with the identifier as the page has it; none if nothing needs it."""
    old = found[1]
    new = f"{name}-{old}" if old.startswith(_POINTS) else short.get(old)
    return "" if new is None else f' id="{new}"'


def _style_once(group: re.Match[str]) -> str:
    """A group of uses that have one style: it moves to the group."""
    styles = set(re.findall(r' style="([^"]*)"', group[2]))
    if len(styles) != 1 or "style=" in group[1]:
        return group[0]
    return f'{group[1]} style="{styles.pop()}">' + re.sub(r' style="[^"]*"', "", group[2]) + "</g>"


def shared_styles(svgs: Sequence[str]) -> tuple[list[str], str]:
    """The drawings of one page with classes in place of styles, and the rules of these classes for its style sheet."""
    styles = dict.fromkeys(style for svg in svgs for style in re.findall(r' style="([^"]*)"', svg))
    names = {style: f"s{i}" for i, style in enumerate(styles)}
    classed = [re.sub(r' style="([^"]*)"', lambda found: f' class="{names[found[1]]}"', svg) for svg in svgs]
    return classed, "\n".join(f".{name} {{ {style} }}" for style, name in names.items())


def _titled(svg: str, identifier: str, titles: Sequence[str]) -> str:
    """The element with a title in each use of the group of this identifier. Raises ValueError if counts differ."""
    begin = svg.index(f'<g id="{identifier}">')
    end = svg.index("</g>", svg.index("<use ", begin))
    head, *uses = re.split(r"(?=<use )", svg[begin:end])
    if len(uses) != len(titles):
        raise ValueError(f"{len(uses)} points in the plot, {len(titles)} titles")
    named = [
        f"{use.removesuffix('/>')}><title>{html.escape(title)}</title></use>"
        for use, title in zip(uses, titles, strict=True)
    ]
    return svg[:begin] + head + "".join(named) + svg[end:]
