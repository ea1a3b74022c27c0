"""The drawing of imports in docs/design/overview.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from draw_imports import MARKERS, PAGE, Package, import_graph, layered, tables


def test_the_design_notes_are_up_to_date() -> None:
    """Catches an import between packages that the drawing lacks, or one that is gone."""
    drawn = PAGE.read_text().split(MARKERS[0])[1].split(MARKERS[1])[0]
    assert drawn == tables(import_graph()), "run python tools/draw_imports.py --write"


def test_implied_imports_are_left_out_and_cycles_drawn_as_one() -> None:
    """Catches an arrow that others imply, a wrong layer, and a cycle that hides what is below."""
    imports = {
        "cli": {"train", "utils"},
        "train": {"step", "utils"},
        "step": {"loop"},
        "loop": {"step", "core"},
        "core": {"utils"},
        "data": {"utils"},
        "utils": set(),
    }
    assert layered(imports) == [
        Package(5, ("cli",), ("train",)),
        Package(4, ("train",), ("step",)),
        Package(3, ("loop", "step"), ("core",)),
        Package(2, ("core",), ("utils",)),
        Package(2, ("data",), ("utils",)),
        Package(1, ("utils",), ()),
    ]
