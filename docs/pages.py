"""The pages of the documentation's site: the READMEs, and references made from the code."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "configs/README.md": "configs.md",
    "configs/passkey/README.md": "passkey.md",
    "isp/README.md": "isp.md",
    "isp/metrics/README.md": "metrics.md",
    "isp/models/README.md": "models.md",
    "isp/profile/README.md": "profile.md",
    "tools/README.md": "tools.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!http)([^)#\s]*)(#[^)\s]*)?\)")


def anchor(title: str, separator: str = "-") -> str:
    """The anchor that GitHub gives to a heading, which links in the READMEs use."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", separator)


def page(source: str) -> str:
    """The text of a README, with links to pages of the site; files of the repository are named."""
    folder = os.path.dirname(source)

    def link(found: re.Match[str]) -> str:
        image, text, target, place = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        path = os.path.normpath(os.path.join(folder, target))
        if image:
            return f"![{text}]({path})"
        to = PAGES.get(path)
        return text if to is None else f"[{text}]({to}{place})"

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
    """The typed signature of a function or a class, and its docstring."""
    try:
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(item)))
    except ValueError:
        signature = "(...)"
    return f"```python\n{title}{signature}\n```\n\n{inspect.getdoc(item) or ''}"


def reference() -> str:
    """All commands with their options, and all keys of a configuration, from the code."""
    from isp.cli.program import _build_parser
    from isp.config import JobConfig
    from isp.config.keys import KeyTable

    parts = ["# Keys and commands", "## Commands"]
    for name, help_text in _commands(_build_parser()):
        parts.append(f"### {name}\n\n```text\n{help_text.strip()}\n```")
    parts.append("## Keys")
    for section in JobConfig.__dataclass_fields__:
        parts.append(f"### {section}\n\n```text\n{KeyTable.of(JobConfig).reference(section)}\n```")
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser.format_help()
    for below in groups:
        for command in below.choices.values():
            yield from _commands(command)


def on_config(config: Any) -> Any:
    """Have mkdocs make the anchors of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    """Give mkdocs the pages, which are made anew each time."""
    from mkdocs.structure.files import File

    pages = {to: page(source) for source, to in PAGES.items()}
    pages |= {"reference.md": reference(), "api.md": api()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
        for picture in re.findall(r"!\[[^\]]*\]\(([\w/.]+)\)", text):
            made = File.generated(config, picture, abs_src_path=str(ROOT / picture))
            files.append(made)
    return files
