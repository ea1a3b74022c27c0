"""The engine for verl, where verl is not: see `tools/check_with_verl.py` for where it is."""

from __future__ import annotations

import re
from pathlib import Path

from isp.train.parallel_run import ParallelRun

ENGINE = Path(__file__).parents[2] / "isp/integrations/verl.py"


def test_the_engine_asks_a_run_for_what_it_has() -> None:
    """Catches a name of a run that changes below the engine, which nothing here imports."""
    asked = set(re.findall(r"self\.(?:engine\.)?run\.(\w+)", ENGINE.read_text()))
    known = {*dir(ParallelRun), "mesh", "device"}  # the latter two are set by its making
    assert {"log_probs", "backward", "step", "named_weights", "save", "load"} <= asked <= known
