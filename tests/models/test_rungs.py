"""What saves memory, with transformers' models in the modes that split features."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import isp
from isp.comm.tag import Purpose
from isp.config import JobConfig
from isp.parallel import Mode
from tests.models.models import Trained, job, packed_rows, tiny, trained_plainly, worst
from tests.ranks import run_each

DATA = [packed_rows(2, 64, [[1, 30, 7, 26], [20, 44]], seed) for seed in (1, 2)]
AGAIN = {"checkpoint": 1.0}
RUNGS: dict[str, dict[str, Any]] = {
    "loss in chunks": {**AGAIN, "loss_chunk_tokens": 7},
    "inputs on the host": {**AGAIN, "checkpoint_offload": True},
    "inputs of segments": {**AGAIN, "checkpoint_segment": 2},
    "all": {**AGAIN, "checkpoint_offload": True, "checkpoint_segment": 2, "loss_chunk_tokens": 7},
}
MODELS = {"llama": Mode.MTP, "gemma3_text": Mode.MSP, "phi3": Mode.FSP}


def _train(rank: int, case: tuple[Any, JobConfig]) -> Trained:
    model, config = case
    run = isp.parallelize(model, config)
    run.mesh.log.collect()
    losses, norms = [], []
    for rows in DATA:
        outcome = run.step(run.loss(*rows.part(run.dp_rank, run.dp_size)))
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    run.train_step.drain()
    copies = [t for t in run.mesh.log.take() if t.tag.purpose is Purpose.BLOCK_INPUT]
    assert bool(copies) == config.model.checkpoint_offload
    assert run.train_step.built.host.leased_bytes == 0
    assert (run.train_step.optimizer.host_bytes > 0) == config.optimizer.offload_states
    weights = {p.name: run._whole(p).clone() for p in run.train_step.built.parameters}
    return Trained(losses, norms, weights)


def _config(mode: Mode, rung: str) -> JobConfig:
    config = job(2, mode=mode, offload_states=rung == "all")
    return replace(config, model=replace(config.model, **RUNGS[rung]))


def test_every_rung_trains_as_the_unmodified_model() -> None:
    """Catches parts of sequences or features that are computed again, or come back, as others."""
    models = {name: tiny(name, num_hidden_layers=3) for name in MODELS}
    cases = {
        f"{name}: {rung}": (copy.deepcopy(models[name]), _config(mode, rung))
        for name, mode in MODELS.items()
        for rung in RUNGS
    }
    expected = {name: trained_plainly(model, DATA) for name, model in models.items()}
    for told, of_ranks in run_each(2, _train, cases, timeout_seconds=110).items():
        for found in of_ranks:
            assert worst(found, expected[told.split(":")[0]]) < 1e-9, told
