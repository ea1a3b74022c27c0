"""The page: sections of text, tables and pictures, in one HTML file that refers to no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from isp.report.style import Picture, to_svg

__all__ = [
    "Choice",
    "Column",
    "Page",
    "Section",
    "Table",
    "kind_name",
    "mib",
    "moment",
    "ms",
    "numbers",
    "share",
]


class Column(NamedTuple):
    """The head of a column; numbers stand at its right, sentences get room."""

    title: str
    numeric: bool = False
    prose: bool = False

    @property
    def css(self) -> str | None:
        """The class of its cells."""
        return "number" if self.numeric else "prose" if self.prose else None


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, numeric=True) for title in titles)


@dataclass(frozen=True)
class Table:
    """Rows of text, a cell for each column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def css(self) -> str | None:
        """The class of the table: one with sentences stacks its cells where there is no room."""
        return "stacked" if any(column.prose for column in self.columns) else None

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)


class Choice(NamedTuple):
    """One of several pictures, of which the reader sees one at a time."""

    values: tuple[str, ...]
    """Its subject, a value for each name of the section's `choose_by`."""
    picture: Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, and what there is below it, in this order."""

    title: str
    texts: tuple[str, ...] = ()
    """Paragraphs; what stands between backticks is shown as code, here and in a page's points."""
    facts: tuple[tuple[str, str], ...] = ()
    """A name, and its value."""
    table: Table | None = None
    pictures: tuple[Picture, ...] = ()
    listing: str | None = None
    """Text in columns, to be scrolled in a box of its own."""
    choose_by: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    """Wide pictures to be scrolled sideways; the first is seen first."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One report."""

    title: str
    name: str
    """Of the file, without its ending."""
    lead: str
    """The one sentence to remember, a short one."""
    points: tuple[str, ...] = ()
    """The other things to see first."""
    sections: tuple[Section, ...]
    command: str = ""
    """Command for the same numbers; empty where that is not known."""

    @property
    def pictures(self) -> Iterator[Picture]:
        """Those of all sections."""
        for section in self.sections:
            yield from section.pictures
            yield from (choice.picture for choice in section.choices)

    def to_html(self) -> str:
        """The text of the file; everything but the pictures is escaped."""
        environment = Environment(
            loader=PackageLoader("isp.report", ""), autoescape=True, undefined=StrictUndefined
        )
        environment.filters["svg"] = lambda picture, size: Markup(to_svg(picture, size))
        environment.filters["prose"] = _prose
        return environment.get_template("page.html").render(page=self)


def _prose(text: str) -> Markup:
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


# -- numbers and names as a page writes them ---------------------------------------------------


def ms(milliseconds: float) -> str:
    """Such as `12.3`; three digits where there are fewer before the point."""
    return f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def moment(milliseconds: float) -> str:
    """A place in time, such as `3.4`; without its unit."""
    return f"{milliseconds:.1f}"


def mib(num_bytes: float) -> str:
    """Bytes in MiB, such as `1.25`; without its unit."""
    return f"{num_bytes / 2**20:,.2f}"


def share(part: float, whole: float) -> str:
    """Such as `36%`; `0%` where there is no whole."""
    return f"{part / whole:.0%}" if whole else "0%"


def kind_name(kind: str) -> str:
    """The collective as people write it: `all-gather` for all_gather."""
    return kind.replace("_", "-")
