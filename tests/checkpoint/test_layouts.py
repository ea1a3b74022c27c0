"""Any layout loads any other, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isp.checkpoint import Checkpointer
from isp.settings import CheckpointConfig
from tests.checkpoint.runs import Layout, clear, expect, fill, make_run
from tests.ranks import run_ranks

LAYOUTS = {
    "isp": Layout(8, "isp", tensor=2, weight=4, zero1=2),
    "isp-wide": Layout(4, "isp", tensor=4, weight=2, zero1=1),
    "mtp": Layout(4, "mtp", tensor=2),
    "fsp": Layout(4, "fsp", tensor=4),
    "one": Layout(),
}
CONFIG = CheckpointConfig()


def _save(rank: int, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
    run = make_run(rank, layout, dtype)
    fill(run)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    checkpointer.save(20, run.state, tokens=640, shared={"config": "a: 1"}, local={"rank": rank})
    checkpointer.close()


def _load_all(rank: int, layout: Layout, dtype: torch.dtype, folder: Path) -> list[int]:
    run = make_run(rank, layout, dtype)
    compared = []
    for name in LAYOUTS:
        clear(run)
        checkpointer = Checkpointer(folder / name, CONFIG, world=run.world)
        info = checkpointer.choose()
        assert info is not None
        resumed = checkpointer.load(info, run.state)
        assert (resumed.step, resumed.tokens, resumed.shared) == (20, 640, {"config": "a: 1"})
        assert resumed.local == ({"rank": rank} if LAYOUTS[name] == layout else None)
        compared.append(expect(run))
    return compared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for name, layout in LAYOUTS.items():
        run_ranks(layout.world, _save, layout, torch.float64, folder / name)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_every_other(saved: Path, name: str) -> None:
    """Catches a box in the wrong place: fused, uneven, empty, split by columns, split by zero1."""
    layout = LAYOUTS[name]
    compared = run_ranks(layout.world, _load_all, layout, torch.float64, saved)
    assert all(n > 0 for counts in compared for n in counts)
