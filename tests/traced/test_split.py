"""mtp, msp and fsp of transformers' models: what a rank keeps, draws and computes in."""

from __future__ import annotations

import torch
from torch import Tensor

import isp
from isp.parallel import Mode
from tests.ranks import run_each, run_ranks
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


def _routers(rank: int) -> list[Tensor]:
    model = tiny("mixtral", router_jitter_noise=0.1)
    torch.manual_seed(0)
    run = isp.parallelize(model, job(2, mode=Mode.MTP))
    for _ in range(2):
        run.step(run.loss(IDS))
    return [p.detach() for n, p in run.model.named_parameters() if n.endswith("gate.weight")]


def test_ranks_with_the_same_tokens_draw_the_same() -> None:
    """Catches weights that are whole on every rank and drift apart."""
    one, other = run_ranks(2, _routers)
    assert one
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0)
