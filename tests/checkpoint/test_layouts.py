"""Any layout loads any other, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isp.checkpoint import Checkpointer, inspect
from isp.settings import CheckpointConfig
from tests.checkpoint.runs import LION, Layout, clear, expect, fill, make_run
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
    checkpointer.wait()


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


def _save_lion(rank: int, layout: Layout, folder: Path) -> None:
    run = make_run(rank, layout, torch.bfloat16, config=LION)
    fill(run)
    with Checkpointer(folder, CONFIG, world=run.world) as checkpointer:
        checkpointer.save(20, run.state, tokens=640)


def _load_lion(rank: int, layout: Layout, folder: Path) -> int:
    run = make_run(rank, layout, torch.bfloat16, config=LION)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    info = checkpointer.choose()
    assert info is not None
    checkpointer.load(info, run.state)
    return expect(run)


def test_another_rule_loads_in_another_layout(tmp_path: Path) -> None:
    """Catches states that are saved or loaded by the names of one update rule alone."""
    saved, loaded = LAYOUTS["isp-wide"], LAYOUTS["mtp"]
    run_ranks(saved.world, _save_lion, saved, tmp_path)
    assert all(run_ranks(loaded.world, _load_lion, loaded, tmp_path))
    assert "exp_avg\n" in inspect(tmp_path / "step_20")


def _load_apart(rank: int, layout: Layout, dtype: torch.dtype, folder: Path) -> int:
    run = make_run(rank, layout, dtype, apart=True)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    info = checkpointer.choose()
    assert info is not None
    checkpointer.load(info, run.state)
    return expect(run, torch.float32)


def test_rows_of_what_was_fused_are_loaded_in_another_layout(tmp_path: Path) -> None:
    """Catches weights, masters and moments of q, k or v that are another's rows."""
    saved, loaded = LAYOUTS["isp-wide"], LAYOUTS["mtp"]
    run_ranks(saved.world, _save, saved, torch.bfloat16, tmp_path)
    for dtype in (torch.bfloat16, torch.float64):  # whose weights are the saved masters
        assert all(run_ranks(loaded.world, _load_apart, loaded, dtype, tmp_path))


FROZEN = frozenset({"embedding.weight", "wo.bias"})


def _save_frozen(rank: int, layout: Layout, folder: Path) -> None:
    run = make_run(rank, layout, torch.bfloat16, frozen=FROZEN)
    fill(run)
    with Checkpointer(folder, CONFIG, world=run.world) as checkpointer:
        checkpointer.save(20, run.state, tokens=640)


def _load_frozen(rank: int, layout: Layout, folder: Path) -> int:
    run = make_run(rank, layout, torch.bfloat16, frozen=FROZEN)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    info = checkpointer.choose()
    assert info is not None
    checkpointer.load(info, run.state)
    return expect(run)


def test_frozen_parameters_are_saved_and_loaded_in_another_layout(tmp_path: Path) -> None:
    """Catches frozen weights that a checkpoint leaves out, and states asked for that they lack."""
    there, here = LAYOUTS["isp"], LAYOUTS["isp-wide"]
    run_ranks(there.world, _save_frozen, there, tmp_path)
    compared = run_ranks(here.world, _load_frozen, here, tmp_path)
    assert all(n > 0 for n in compared)
