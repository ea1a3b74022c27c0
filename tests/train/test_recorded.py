"""A few of the layouts whose numbers are recorded; `python -m tests.train.recorded` has all."""

from __future__ import annotations

import math
from pathlib import Path

from tests.train.recorded import LAYOUTS, TOLERANCES, difference, recorded, trained

FEW = ("one rank", "fsp 2", "isp 2 x 2, segments")


def test_layouts_train_as_recorded(tmp_path: Path) -> None:
    """Catches work that was to change no numbers and does, in all layouts alike."""
    expected = recorded()
    assert expected.keys() == LAYOUTS.keys()
    last = expected[FEW[0]]["loss"]
    assert difference({"loss": [*last[:-1], math.nan]}, {"loss": last}) == math.inf
    for name, found in trained(FEW, tmp_path).items():
        away = difference(found, expected[name])
        assert away < TOLERANCES[LAYOUTS[name].dtype], (name, found, expected[name])
