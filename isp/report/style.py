"""Style of pictures: colours that colour-blind people can tell apart, bars, SVG and PNG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

from isp.foreign.files import written_whole

__all__ = [
    "FONT",
    "WIDTH",
    "Color",
    "Look",
    "Picture",
    "Stack",
    "add_bar",
    "draw_stacks",
    "key",
    "legend_above",
    "new_axes",
    "new_lanes",
    "to_png",
    "to_svg",
]

WIDTH = 1080
"""Pixels of a picture, on a page and at half the resolution of its PNG."""
FONT = 13
_POINTS_PER_INCH = 72
_LEAST_WIDTH = 720
"""Pixels below which text could not be read: a narrower page scrolls."""


class Color(StrEnum):
    """Source: Okabe and Ito 2008, Color Universal Design; grey is for the background."""

    BLACK = "#000000"
    ORANGE = "#E69F00"
    SKY = "#56B4E9"
    GREEN = "#009E73"
    YELLOW = "#F0E442"
    BLUE = "#0072B2"
    VERMILLION = "#D55E00"
    PURPLE = "#CC79A7"
    GREY = "#777777"
    EDGE = "#333333"


_STYLE: dict[RcKeyType, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": Color.GREY.value,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.8,
    "legend.fontsize": FONT,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: small, sharp, and found by searching
}


class Look(NamedTuple):
    """The filling of a bar."""

    color: str
    hatch: str = ""


class Stack(NamedTuple):
    """A bar of parts, one behind the other, with a text at its end."""

    name: str
    parts: Mapping[str, float]
    text: str


@dataclass(frozen=True)
class Picture:
    """A drawing, in the page and as a PNG beside it."""

    name: str
    """Of the PNG, without its ending."""
    caption: str
    alt: str
    """The content, for those who cannot see it."""
    draw: Callable[[], Figure]
    has_file: bool = True
    """Whether there is a PNG of it beside the page."""


def new_axes(
    *, xlabel: str, ylabel: str = "", width: float = WIDTH, height: float = 340
) -> tuple[Figure, Axes]:
    """A figure of this size in pixels, with one pair of labelled axes."""
    inches = width / _POINTS_PER_INCH, height / _POINTS_PER_INCH
    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def new_lanes(
    names: Sequence[str], *, xlabel: str, top: float, height: float, width: float = WIDTH
) -> tuple[Figure, Axes]:
    """Axes with a lane for each of `names`, the first one above; `top` lanes of room over it."""
    figure, axes = new_axes(xlabel=xlabel, width=width, height=height)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -top)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure, axes


def draw_stacks(
    stacks: Sequence[Stack],
    looks: Mapping[str, Look],
    *,
    xlabel: str,
    text: Callable[[float], str],
    limit: float = 0.0,
) -> tuple[Figure, Axes]:
    """A lane with the bars of each of `stacks`; the hover of a part has its value as `text`.

    The x axis reaches to `limit` at least.
    """
    names = [stack.name for stack in stacks]
    figure, axes = new_lanes(names, xlabel=xlabel, top=0.6, height=130 + 30 * len(stacks))
    most = max(limit, *(sum(stack.parts.values()) for stack in stacks)) or 1.0
    for lane, stack in enumerate(stacks):
        end = 0.0
        for part, value in stack.parts.items():
            begin, end = end, end + value
            hover = f"{stack.name}: {part} {text(value)}"
            add_bar(axes, begin, end, top=lane - 0.35, height=0.7, look=looks[part], hover=hover)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        at = end + 0.01 * most, lane
        axes.text(*at, stack.text, va="center", fontsize="small", bbox=box, zorder=3)
    axes.set_xlim(0, most * 1.1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    shown = {part: look for part, look in looks.items() if any(s.parts[part] for s in stacks)}
    if len(looks) > 1 and shown:
        handles = [key(*item) for item in shown.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=9)
    return figure, axes


def add_bar(
    axes: Axes,
    begin: float,
    end: float,
    *,
    top: float,
    height: float,
    look: Look,
    hover: str,
    edge: str = Color.EDGE,
) -> None:
    """Draw a bar from `begin` to `end`, whose text is seen under the mouse."""
    style: dict[str, Any] = {"edgecolor": edge, "linewidth": 0.4}
    style |= {"facecolor": look.color, "hatch": look.hatch, "gid": f"hover:{hover}"}
    axes.add_patch(Rectangle((begin, top), max(0.0, end - begin), height, **style))


def key(label: str, look: Look) -> Patch:
    """A bar in a legend."""
    return Patch(facecolor=look.color, edgecolor=Color.EDGE, hatch=look.hatch, label=label)


def legend_above(axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Name what is drawn, or `handles`, in one line above the axes, where it hides nothing."""
    shown = axes.get_legend_handles_labels()[0] if handles is None else handles
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(handles=shown, ncols=max(1, len(shown)), **place)


def to_png(picture: Picture, path: Path) -> None:
    """Write `picture` to `path`, at twice the resolution of the page."""
    with mpl.rc_context(_STYLE):
        figure = picture.draw()
        dpi = 2 * _POINTS_PER_INCH
        written_whole(path, lambda new: figure.savefig(new, format="png", dpi=dpi))


def to_svg(picture: Picture) -> str:
    """`picture` as an SVG element to be put into a page beside others.

    A group of the drawing whose gid is `hover:TEXT` shows TEXT under the mouse. The names of what
    is referred to differ between pictures, and the same numbers give the same text.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context(_STYLE | {"svg.hashsalt": picture.name}):
        figure = picture.draw()
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue().partition("?>")[2].partition(">")[2]  # behind XML's own two lines
    text = re.sub(r'<g id="hover:([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # of no use, and the same in every picture
    width = round(figure.get_figwidth() * _POINTS_PER_INCH)
    least = width if width > WIDTH else _LEAST_WIDTH
    label = f' role="img" aria-label="{html.escape(picture.alt)}" style="min-width: {least}px"'
    return re.sub(' width="[^"]*" height="[^"]*"', lambda _: label, text, count=1)
