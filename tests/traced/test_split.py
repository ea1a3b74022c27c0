"""mtp, msp and fsp of transformers' models: what a rank keeps, draws and computes in."""

from __future__ import annotations

import torch

import isp
from isp.parallel import Mode
from tests.ranks import run_each
from tests.traced.models import job, tiny

IDS = torch.arange(64).view(1, 64)


def _kept(rank: int, mode: Mode) -> int:
    run = isp.parallelize(tiny("llama"), job(2, mode=mode, recompute=1.0))
    run.step(run.loss(IDS))
    (chunk,) = run.train_step.chunks
    return sum(entrance.shown is not None for entrance in chunk.entrances.values())


def test_a_recompute_leaves_nothing_behind() -> None:
    """Catches the activations of all blocks kept after they were computed again."""
    modes = {mode: mode for mode in (Mode.MTP, Mode.MSP, Mode.FSP)}
    assert set(map(tuple, run_each(2, _kept, modes).values())) == {(0, 0)}
