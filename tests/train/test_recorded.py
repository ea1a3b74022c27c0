"""A few of the recorded layouts; `python -m tests.train.recorded` compares all of them."""

from __future__ import annotations

import math
from pathlib import Path

from tests.train.recorded import LAYOUTS, TOLERANCES, difference, recorded, trained

FEW = ("one rank", "fsp 2", "isp 2 x 2, segments")


def test_layouts_train_as_recorded(tmp_path: Path) -> None:
    """Catches a change of results, equal in all layouts, by work that should not change any."""
    expected = recorded()
    assert expected.keys() == LAYOUTS.keys()
    last = expected[FEW[0]]["loss"]
    assert difference({"loss": [*last[:-1], math.nan]}, {"loss": last}) == math.inf
    for name, found in trained(FEW, tmp_path).items():
        away = difference(found, expected[name])
        assert away < TOLERANCES[LAYOUTS[name].dtype], (name, found, expected[name])
