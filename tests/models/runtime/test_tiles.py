"""Modules of users' models in tiles of tokens against the same modules in one piece."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

import isp
from isp.config import JobConfig
from isp.core.comm.tag import Purpose
from isp.core.mesh import Mode
from isp.models.traced_model import TracedModel
from tests.models.models import job, packed_rows, tiny
from tests.models.own import Own
from tests.planner.live import LiveBytes
from tests.ranks import run_each, run_ranks

ROWS = packed_rows(2, 64, [[1, 30, 7, 26], [20, 44]])
TILES = {"mlp_tile_tokens": 7}
AGAIN = {**TILES, "checkpoint": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "one piece": {},
    "tiles": TILES,
    "tiles, again": {**AGAIN, "checkpoint_keeps_attention": True},
    "tiles, in segments": {**AGAIN, "checkpoint_segment": 2},
}
BETWEEN = {**TILES, "checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": ("llama", {}, WAYS),
    "gemma3": ("gemma3_text", {"sliding_window": 8}, {"one piece": {}, "again": AGAIN}),
    "gpt2": ("gpt2", {}, {"one piece": {}, "between": BETWEEN}),
    "experts, mtp": ("qwen3_moe", {}, {"one piece": {}, "tiles": TILES}),
    "experts and scores": ("gpt_oss", GPT_OSS, {"one piece": {}, "tiles, again": AGAIN}),
    "hybrid": ("qwen3_next", {"num_hidden_layers": 4}, {"one piece": {}, "between": BETWEEN}),
}


class Found(NamedTuple):
    """Results of one step on a rank."""

    loss: float
    gradients: dict[str, Any]
    sent: Counter[tuple[Purpose, str]]


def _step(rank: int, case: tuple[Any, JobConfig]) -> Found:
    model, config = case
    run = isp.parallelize(model, config)
    for _ in range(2):  # the first one measures the saved bytes
        run.mesh.log.collect()
        loss = run.loss(*ROWS.part(run.dp_rank, run.dp_size))
        run.step(loss, lr=0.0)
        run.train_step.drain()
        transfers = run.mesh.log.take()
    built = run.train_step.built
    gradients = {
        i.name: run.train_step.gradients.whole(i.parameter).numpy().copy() for i in built.trained
    }
    return Found(loss.item(), gradients, Counter((t.tag.purpose, t.label) for t in transfers))


def _config(name: str, keys: dict[str, Any]) -> JobConfig:
    split = next((mode for mode in (Mode.MSP, Mode.MTP) if mode in name), None)
    config = job(2, 2) if split is None else job(2, mode=split)
    training = replace(config.training, max_norm=0)
    return replace(config, model=replace(config.model, **keys), training=training)


@pytest.mark.slow
def test_tiles_train_as_one_piece() -> None:
    """Catches a tile that is left out, counted twice or of other tokens; a weight gathered, or a
    gradient reduced, for each tile; and a result that is read again but was not saved.
    """
    models = {name: tiny(kind, **sizes) for name, (kind, sizes, _) in MODELS.items()}
    cases = {
        f"{name}: {way}": (copy.deepcopy(models[name]), _config(name, keys))
        for name, (_, _, ways) in MODELS.items()
        for way, keys in ways.items()
    }
    found = run_each(2, _step, cases, timeout_seconds=110)
    for case, of_ranks in found.items():
        for own, whole in zip(of_ranks, found[f"{case.split(':')[0]}: one piece"], strict=True):
            assert own.loss == pytest.approx(whole.loss, rel=1e-12), case
            for name, expected in whole.gradients.items():
                apart = abs(own.gradients[name] - expected).max(initial=0)
                assert apart <= 1e-12 * abs(expected).max(initial=0), (case, name)
            weights = (Purpose.WEIGHT, Purpose.WEIGHT_GRADIENT)
            for key in {key for key in whole.sent if key[0] in weights and "bias" not in key[1]}:
                assert own.sent[key] <= whole.sent[key], (case, key)


def _peak(rank: int) -> list[int]:
    """Return the peak bytes in a step of a wide model for each tile size."""
    found = []
    for tokens in (0, 32, 8):
        sizes = {"intermediate_size": 2048, "num_hidden_layers": 2}
        config = _alone(tokens)
        run = isp.parallelize(tiny("llama", **sizes), config)
        for _ in range(2):
            parameters = [p.parameter for p in run.train_step.built.parameters]
            with LiveBytes(parameters) as live:
                run.step(run.loss(*ROWS))
        found.append(live.peak)
    return found


def _alone(tokens: int) -> JobConfig:
    config = job()
    return replace(config, model=replace(config.model, mlp_tile_tokens=tokens, checkpoint=1.0))


def test_hidden_activations_exist_for_one_tile_at_a_time() -> None:
    """Catches tiles that are all kept until the end."""
    ((whole, large, small),) = run_ranks(1, _peak)
    inside = 128 * 2048 * 8  # a feature inside of all tokens
    assert whole - large > 2 * inside
    assert large - small > inside / 4


def test_a_model_without_mlp_modules_is_refused() -> None:
    """Catches a key without effect: the linears of these blocks are in no module of their own."""
    from isp.core.recompute.config import Recomputation

    with pytest.raises(ValueError, match=r"mlp_tile_tokens=8: no module .* use 0"):
        TracedModel(Own(), recomputation=Recomputation(mlp_tile_tokens=8))
    names = TracedModel(tiny("qwen3_moe")).trace.by_token
    assert [*names] == [f"model.layers.{n}.mlp" for n in range(3)]
