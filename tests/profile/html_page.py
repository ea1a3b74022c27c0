"""Reads an HTML page as a browser does, and records content that it must not have."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "hr", "img", "input"}
_REFERENCES = {"src", "href", "xlink:href", "action", "poster", "data", "srcset"}


class HtmlPage(HTMLParser):
    """Elements, texts and references of `html`; raises AssertionError if tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        """Targets of attributes, except links that a user can follow."""
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = []
        self.hovers: list[str] = []
        """The texts of `title` elements in drawings."""
        self.styles = ""
        """All style text, in which a style sheet could load something."""
        self.unboxed: list[str] = []
        """Elements with a fixed width that are not in a scrolling box."""
        self._open: list[str] = []
        self._boxes: list[bool] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    @property
    def text(self) -> str:
        """Return the visible text, with words separated by one space."""
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        values = {name: value or "" for name, value in attrs}
        is_box = "scroll" in values.get("class", "").split()
        is_wide = tag in ("table", "pre") or int(values.get("width", "0").partition(".")[0]) > 360
        if is_wide and not is_box and self._boxes[-1:] != [True]:
            self.unboxed.append(tag)
        for name, value in attrs:
            if name in _REFERENCES and tag != "a":
                self.references.append(value or "")
            elif name == "id":
                self.ids[value or ""] += 1
            elif value and name not in ("xmlns", "xmlns:xlink"):
                self.styles += value
        if tag not in _VOID:
            self._open.append(tag)
            self._boxes.append(is_box or self._boxes[-1:] == [True])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()
            self._boxes.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag
        self._boxes.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self.styles += data
        elif "title" in self._open and "svg" in self._open:
            self.hovers.append(data)
        elif "script" not in self._open:
            self.texts.append(data)
