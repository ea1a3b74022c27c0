"""Pages of the documentation's site that are generated from the code, or are files at the root."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files at the root of the repository, and the pages made of them."""

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def anchor(title: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading, so that links work there and on the site.

    `separator` is not used: mkdocs passes it.
    """
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def page(source: str) -> str:
    """Return the text of a file at the root, with its links made relative to docs/.

    A link to a file that is no page becomes the file's name.
    """

    def link(found: re.Match[str]) -> str:
        image, text, target, place = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        path = os.path.normpath(target)
        to = FROM_ROOT.get(path)
        below = path.removeprefix("docs/")
        is_shown = below in GENERATED or (
            path.endswith((".md", ".png")) and (ROOT / path).is_file()
        )
        if below != path and is_shown:
            to = below
        return text if to is None else f"{image}[{text}]({to}{place})"

    return _LINK.sub(link, (ROOT / source).read_text(encoding="utf-8"))


def api() -> str:
    """Return the public names with their signatures and docstrings, from the code."""
    import isp
    from isp import data_parallel, tensor_parallel

    parts = [
        "# Public API",
        "`import isp` gives these names; those of `isp.tensor_parallel` and `isp.data_parallel` are"
        " below. In shapes, B is batch, S sequence, D hidden size, H heads, d head size, V"
        " vocabulary; `/p` means sharded over p ranks.",
    ]
    for module in (isp, tensor_parallel, data_parallel):
        parts += _names_of(module)
    return "\n\n".join(parts) + "\n"


def _names_of(module: ModuleType) -> list[str]:
    """Return a section for each public name of a module, functions before classes."""
    parts = []
    named = {name: getattr(module, name) for name in sorted(module.__all__)}
    named = {name: item for name, item in named.items() if callable(item)}
    for name in sorted(named, key=lambda name: isinstance(named[name], type)):
        item, title = named[name], f"{module.__name__}.{name}"
        parts += [f"## {title}", _described(title, item)]
        for member in dir(item) if isinstance(item, type) else ():
            value = inspect.getattr_static(item, member)
            code = value.fget if isinstance(value, property) else value
            own = inspect.isfunction(code) and code.__module__.startswith("isp.")
            if own and not member.startswith("_") and inspect.getdoc(code):
                parts += [f"### {name}.{member}", _described(member, code)]
    return parts


def _described(title: str, item: Any) -> str:
    """Return the typed signature of a function or class, and its docstring."""
    try:
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(item)))
    except ValueError:
        signature = "(...)"
    return f"```python\n{title}{signature}\n```\n\n{inspect.getdoc(item) or ''}"


def commands() -> str:
    """Return all commands with their options, from the parser."""
    from isp.cli.program import _build_parser

    parts = ["# Commands", "The help of each command: `isp COMMAND --help` prints the same."]
    for name, help_text in _commands(_build_parser()):
        parts.append(f"## {name}\n\n```text\n{help_text.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of each command below `parser`."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser.format_help()
    for below in groups:
        for command in below.choices.values():
            yield from _commands(command)


def keys() -> str:
    """Return all keys of a configuration, section by section, from their dataclasses."""
    from isp.config import JobConfig
    from isp.config.keys import KeyTable

    parts = [
        "# Keys",
        "All keys of a configuration, with types and defaults: `isp config --help-keys [SECTION]`"
        " prints the same. `--section.key value` after the file overrides one.",
    ]
    for section in JobConfig.__dataclass_fields__:
        parts.append(f"## {section}\n\n```text\n{KeyTable.of(JobConfig).reference(section)}\n```")
    return "\n\n".join(parts) + "\n"


GENERATED = {
    "reference/api.md": api,
    "reference/commands.md": commands,
    "reference/keys.md": keys,
}
"""Pages made from the code, and what makes them; docs/ has stubs, for readers on GitHub."""


def on_config(config: Any) -> Any:
    """Make mkdocs use the anchors of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here; mkdocs calls this at each build."""
    from mkdocs.structure.files import File

    texts = {to: page(source) for source, to in FROM_ROOT.items()}
    texts |= {name: text_of() for name, text_of in GENERATED.items()}
    for name, text in texts.items():
        if (stub := files.get_file_from_path(name)) is not None:
            files.remove(stub)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with links that mkdocs needs.

    Each [Note: Name] links to the section of that name, and a link to a file at the root, which
    works on GitHub, to its page.
    """
    here = os.path.dirname(page.file.src_uri)

    def note(found: re.Match[str]) -> str:
        name = " ".join(found[1].split())
        if (place := _notes().get(name)) is None:
            return found[0]
        return f"[{found[0][1:-1]}]({os.path.relpath(place, here)}#{anchor(name)})"

    def link(found: re.Match[str]) -> str:
        image, text, target, place = found[1], found[2], found[3], found[4] or ""
        to = FROM_ROOT.get(os.path.relpath(os.path.join("docs", here, target)))
        return found[0] if to is None else f"{image}[{text}]({os.path.relpath(to, here)}{place})"

    return re.sub(r"\[Note: ([^]]+)\](?!\()", note, _LINK.sub(link, markdown))


@cache
def _notes() -> dict[str, str]:
    """Return the page of each note by its name."""
    found = {}
    for file in (ROOT / "docs" / "design" / "notes").glob("*.md"):
        for title in re.findall(r"^## (.*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found[title] = f"design/notes/{file.name}"
    return found
