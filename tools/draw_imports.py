"""Draw which packages of ISP import which, for docs/design/overview.md.

python tools/draw_imports.py            # print, with the number of modules and lines of each
python tools/draw_imports.py --write    # replace the tables in docs/design/overview.md

A package is on the layer above all that it imports. An import that also follows from others is left
out: if `train` imports `step` and `step` imports `core`, then `train` -> `core` is not drawn.
Packages that import each other, directly or through others, are drawn as one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "overview.md"
MARKERS = "<!-- by tools/draw_imports.py --write -->\n", "<!-- end -->\n"
SCOPES = "isp", "isp.core", "isp.models"


class Package(NamedTuple):
    """One box of a drawing: packages in the same layer, and what they import."""

    layer: int
    names: tuple[str, ...]
    imports: tuple[str, ...]


def import_graph() -> grimp.ImportGraph:
    """Return the imports between the modules of this checkout, not of an installed ISP."""
    sys.path.insert(0, str(ROOT))
    return grimp.build_graph("isp", "model", cache_dir=None)


def imports_between(graph: grimp.ImportGraph, scope: str) -> dict[str, set[str]]:
    """Return what each module or package directly inside of `scope` imports of the others.

    The decoder in the package `model` stands next to the packages of `isp`.
    """

    def name_of(module: str) -> str:
        if scope == "isp" and module.split(".")[0] == "model":
            return "model"
        inside = module.startswith(f"{scope}.")
        return module.removeprefix(f"{scope}.").split(".")[0] if inside else ""

    found: dict[str, set[str]] = {}
    for module in graph.modules:
        if name := name_of(module):
            imported = map(name_of, graph.find_modules_directly_imported_by(module))
            found.setdefault(name, set()).update({*imported} - {"", name})
    return found


def layered(imports: dict[str, set[str]]) -> list[Package]:
    """Return the packages from the top layer down.

    If a package imports b, and b imports c, an import of c by the package itself is left out.
    """
    # For each package, all that it imports: directly, or through another package.
    below = {name: {*others} for name, others in imports.items()}
    for middle in below:
        for others in below.values():
            if middle in others:
                others |= below[middle]
    # Packages that import each other in a cycle have no order: draw them as one box.
    cycle = {a: tuple(sorted({a} | {b for b in below[a] if a in below[b]})) for a in below}
    layers: dict[tuple[str, ...], int] = {}
    for names in sorted({*cycle.values()}, key=lambda names: len(below[names[0]] - {*names})):
        # The layers of these packages are known, as packages with fewer imports come first.
        under = {cycle[b] for b in below[names[0]] - {*names}}
        layers[names] = 1 + max((layers[other] for other in under), default=0)
    found = []
    for names, layer in layers.items():
        direct = {b for a in names for b in imports[a]} - {*names}
        implied = {c for b in direct for c in below[b] if b not in below[c]}
        found.append(Package(layer, names, tuple(sorted(direct - implied))))
    return sorted(found, key=lambda package: (-package.layer, package.imports, package.names))


def tables(graph: grimp.ImportGraph) -> str:
    """Return the drawing as Markdown: a table for each scope, a row for each layer."""
    text = ""
    for scope in SCOPES:
        text += f"\n| layer | `{scope}` |\n|--:|---|\n"
        packages = layered(imports_between(graph, scope))
        for layer, row in groupby(packages, key=lambda package: package.layer):
            entries = []
            for imports, alike in groupby(row, key=lambda package: package.imports):
                names = (" + ".join(f"`{name}`" for name in package.names) for package in alike)
                below = ", ".join(f"`{name}`" for name in imports)
                entries.append(", ".join(names) + f" → {below}" * bool(imports))
            text += f"| {layer} | {'; '.join(entries)} |\n"
    return text + "\n"


def counts(graph: grimp.ImportGraph) -> Iterator[str]:
    """Yield a line for each package: layer, name, modules, lines, imports."""
    for scope in SCOPES:
        yield f"{scope}\n"
        for layer, names, imports in layered(imports_between(graph, scope)):
            files = [path for name in names for path in _files(scope, name)]
            lines = sum(path.read_text().count("\n") for path in files)
            name, below = " + ".join(names), ", ".join(imports)
            yield f"{layer:4}  {name:24} {len(files):4} modules {lines:6} lines  {below}\n"


def _files(scope: str, name: str) -> list[Path]:
    place = ROOT / name if name == "model" else ROOT.joinpath(*scope.split("."), name)
    return [*place.rglob("*.py")] or [place.with_suffix(".py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="replace the text in docs/design/overview.md"
    )
    graph = import_graph()
    if parser.parse_args().write:
        before, old = PAGE.read_text().split(MARKERS[0])
        after = old.split(MARKERS[1])[1]
        PAGE.write_text(before + MARKERS[0] + tables(graph) + MARKERS[1] + after)
    else:
        print("".join(counts(graph)), end="")


if __name__ == "__main__":
    main()
