"""The page: sections of text, tables and pictures, in one HTML file that refers to no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from isp.profile.table import Table
from isp.report.style import Picture, to_svg

__all__ = ["Page", "Section", "kind_name", "mib", "ms"]


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
    """Names of menus that show one of `choices` at a time, the first one first."""
    choices: tuple[tuple[tuple[str, ...], Picture], ...] = ()
    """A value for each menu, and the picture."""


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
            yield from (picture for _, picture in section.choices)

    def to_html(self) -> str:
        """The text of the file; everything but the pictures is escaped."""
        environment = Environment(
            loader=PackageLoader("isp.report", ""), autoescape=True, undefined=StrictUndefined
        )
        environment.filters["svg"] = lambda picture: Markup(to_svg(picture))
        environment.filters["prose"] = _prose
        return environment.get_template("page.html").render(page=self)


def _prose(text: str) -> Markup:
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


# -- numbers and names as a page writes them ---------------------------------------------------


def ms(milliseconds: float) -> str:
    """Such as `12.3`; three digits where there are fewer before the point."""
    return f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def mib(num_bytes: float) -> str:
    """Bytes in MiB, such as `1.25`; without its unit."""
    return f"{num_bytes / 2**20:,.2f}"


def kind_name(kind: str) -> str:
    """The collective as people write it: `all-gather` for all_gather."""
    return kind.replace("_", "-")
