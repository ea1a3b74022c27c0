"""Style of pictures: sizes, colours that colour-blind people can tell apart, SVG and PNG."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.typing import RcKeyType

__all__ = [
    "BLACK",
    "BLUE",
    "EDGE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PHONE",
    "PURPLE",
    "SKY",
    "VERMILLION",
    "WIDE",
    "Look",
    "Picture",
    "Size",
    "add_bar",
    "key",
    "legend_above",
    "new_axes",
    "new_figure",
    "new_lanes",
    "to_png",
    "to_svg",
]

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"
"""Source: Okabe and Ito 2008, Color Universal Design; grey is for what is in the background."""
EDGE = "#333333"
"""Around bars."""

_STYLE: dict[RcKeyType, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["DejaVu Sans"],
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: small, sharp, and found by searching
    "svg.hashsalt": "isp",  # the same numbers give the same file
}
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_URL = re.compile(r"url\(#([^)]*)\)")
_POINTS_PER_INCH = 72
_PNG_SCALE = 2  # pixels of a PNG for each of the page


class Look(NamedTuple):
    """The filling of a bar."""

    color: str
    hatch: str = ""


@dataclass(frozen=True)
class Size:
    """The room of a picture, in pixels of the page; `font` is the size of its text."""

    width: int
    height: int
    font: float


WIDE = Size(1080, 340, 13)
"""On a desktop, and in PNGs."""
PHONE = Size(360, 300, 12)
"""On a phone, where a shrunk desktop picture could not be read."""


@dataclass(frozen=True)
class Picture:
    """A drawing that is made again for each size."""

    name: str
    """Of the PNG, without its ending."""
    caption: str
    alt: str
    """The content, for those who cannot see it."""
    draw: Callable[[Size], Figure]
    wide: Size = WIDE
    """Its size on a desktop, and in the PNG."""
    phone: Size = PHONE
    has_file: bool = True
    """Whether there is a PNG of it beside the page."""


def new_figure(size: Size) -> Figure:
    """An empty figure of `size`."""
    inches = size.width / _POINTS_PER_INCH, size.height / _POINTS_PER_INCH
    return Figure(figsize=inches, layout="constrained")


def new_axes(size: Size, *, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A figure of `size` with one pair of labelled axes."""
    figure = new_figure(size)
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def new_lanes(size: Size, names: Sequence[str], *, xlabel: str, top: float) -> tuple[Figure, Axes]:
    """Axes with a lane for each of `names`, the first one above; `top` lanes of room over it."""
    figure, axes = new_axes(size, xlabel=xlabel, ylabel="")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -top)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
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
    edge: str = EDGE,
) -> None:
    """Draw a bar from `begin` to `end`, whose text is seen under the mouse."""
    bar = Rectangle(
        (begin, top),
        max(0.0, end - begin),
        height,
        facecolor=look.color,
        hatch=look.hatch,
        edgecolor=edge,
        linewidth=0.4,
        gid=f"hover:{hover}",
    )
    axes.add_patch(bar)


def key(label: str, look: Look) -> Patch:
    """A bar in a legend."""
    return Patch(facecolor=look.color, edgecolor=EDGE, hatch=look.hatch, label=label)


def legend_above(axes: Axes, *, columns: int, handles: Sequence[Artist] | None = None) -> None:
    """Name what is drawn, or `handles`, above the axes, where it hides nothing."""
    axes.legend(
        handles=axes.get_legend_handles_labels()[0] if handles is None else handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.2,
    )


def to_png(picture: Picture, path: Path) -> None:
    """Write `picture` to `path`, at twice the resolution of the page."""
    with _style(picture.wide):
        picture.draw(picture.wide).savefig(path, format="png", dpi=_POINTS_PER_INCH * _PNG_SCALE)


def to_svg(picture: Picture, size: Size) -> str:
    """`picture` as an SVG element to be put into a page beside others.

    A group of the drawing whose gid is `hover:TEXT` shows TEXT under the mouse.
    """
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _style(size):
        picture.draw(size).savefig(buffer, format="svg", metadata=nothing)
    root = ET.fromstring(buffer.getvalue())
    _isolate(root, f"{picture.name}-{size.width}-")
    for name in ("width", "height"):
        del root.attrib[name]  # the page decides, by its viewBox
    root.attrib |= {"role": "img", "aria-label": picture.alt}
    return ET.tostring(root, encoding="unicode")


@contextmanager
def _style(size: Size) -> Iterator[None]:
    texts: tuple[RcKeyType, ...] = ("font.size", "legend.fontsize", "axes.titlesize")
    sizes = dict.fromkeys(texts, size.font)
    with mpl.rc_context(_STYLE | sizes):
        yield


def _isolate(root: ET.Element, prefix: str) -> None:
    """Give the names of `root`, which hold in the whole page, a prefix; drop those of no use."""
    ids = {node.attrib["id"] for node in root.iter() if "id" in node.attrib}
    used = set()
    for node in root.iter():
        for key, value in node.attrib.items():
            if key == f"{{{_XLINK}}}href" and value[1:] in ids:
                used.add(value[1:])
                node.attrib[key] = f"#{prefix}{value[1:]}"
            elif "url(#" in value:
                used |= set(_URL.findall(value))
                node.attrib[key] = _URL.sub(rf"url(#{prefix}\1)", value)
    for node in root.iter():
        name = node.attrib.pop("id", "")
        if name in used:
            node.attrib["id"] = prefix + name
        if name.startswith("hover:"):
            title = ET.Element(f"{{{_SVG}}}title")
            title.text = name.removeprefix("hover:")
            node.insert(0, title)


ET.register_namespace("", _SVG)
ET.register_namespace("xlink", _XLINK)
