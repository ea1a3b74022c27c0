"""A checkpoint of any layout loads into any other layout, bit by bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isp.checkpoint import Checkpointer, inspect
from isp.config.sections import CheckpointConfig
from isp.core.mesh import Mode, Topology
from tests.checkpoint.runs import LION, chosen, clear, expect, fill, make_run
from tests.ranks import run_ranks
from tests.toolkit import topology

LAYOUTS = {
    "isp": topology(4, tensor=2, weight=2, zero1=2),
    "isp-wide": topology(4, tensor=4, weight=2, zero1=1),
    "mtp": topology(4, mode=Mode.MTP, tensor=2),
    "fsp": topology(4, mode=Mode.FSP, tensor=4),
    "one": topology(),
}
CONFIG = CheckpointConfig()


def _save(rank: int, layout: Topology, dtype: torch.dtype, folder: Path, **options: Any) -> None:
    run = make_run(rank, layout, dtype, **options)
    fill(run)
    with Checkpointer(folder, CONFIG, world=run.world) as checkpointer:
        shared, local = {"config": "a: 1"}, {"rank": rank}
        checkpointer.save(20, run.state, tokens=640, shared=shared, local=local)


def _load(
    rank: int,
    layout: Topology,
    dtype: torch.dtype,
    folder: Path,
    through: torch.dtype | None,
    **options: Any,
) -> int:
    run = make_run(rank, layout, dtype, **options)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    checkpointer.load(chosen(checkpointer), run.state)
    return expect(run, through)


def _load_all(rank: int, layout: Topology, dtype: torch.dtype, folder: Path) -> list[int]:
    run = make_run(rank, layout, dtype)
    compared = []
    for name in LAYOUTS:
        clear(run)
        checkpointer = Checkpointer(folder / name, CONFIG, world=run.world)
        info = chosen(checkpointer)
        resumed = checkpointer.load(info, run.state)
        assert (resumed.step, resumed.tokens, resumed.shared) == (20, 640, {"config": "a: 1"})
        assert resumed.local == ({"rank": rank} if LAYOUTS[name] == layout else None)
        compared.append(expect(run))
    return compared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for name, layout in LAYOUTS.items():
        run_ranks(layout.world_size, _save, layout, torch.float64, folder / name)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_every_other(saved: Path, name: str) -> None:
    """Catches a wrong box for tensors that are fused, uneven, empty, or cut by columns or zero1."""
    layout = LAYOUTS[name]
    compared = run_ranks(layout.world_size, _load_all, layout, torch.float64, saved)
    assert all(n > 0 for counts in compared for n in counts)


WIDE, MTP, BF16 = LAYOUTS["isp-wide"], LAYOUTS["mtp"], torch.bfloat16


def test_states_of_another_update_rule_load_in_another_layout(tmp_path: Path) -> None:
    """Catches states that are saved or loaded under the names of one update rule only."""
    run_ranks(WIDE.world_size, partial(_save, config=LION), WIDE, BF16, tmp_path)
    assert all(run_ranks(MTP.world_size, partial(_load, config=LION), MTP, BF16, tmp_path, None))
    assert "exp_avg\n" in inspect(tmp_path / "step_20")


def test_rows_of_a_fused_parameter_load_in_another_layout(tmp_path: Path) -> None:
    """Catches weights, masters and moments of q, k or v loaded from another parameter's rows."""
    run_ranks(WIDE.world_size, _save, WIDE, BF16, tmp_path)
    for dtype in (BF16, torch.float64):  # whose weights are the saved masters
        load = partial(_load, apart=True)
        assert all(run_ranks(MTP.world_size, load, MTP, dtype, tmp_path, torch.float32))


def test_frozen_parameters_are_saved_and_loaded_in_another_layout(tmp_path: Path) -> None:
    """Catches frozen weights that are not saved, and optimizer states expected for them."""
    there, frozen = LAYOUTS["isp"], frozenset({"embedding.weight", "wo.bias"})
    run_ranks(there.world_size, partial(_save, frozen=frozen), there, BF16, tmp_path)
    load = partial(_load, frozen=frozen)
    assert all(run_ranks(WIDE.world_size, load, WIDE, BF16, tmp_path, None))
