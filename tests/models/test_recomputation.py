"""What is computed again of the blocks of a model of others: the same bits, fewer bytes kept."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

import isp
from isp.comm.tag import Purpose
from isp.config import JobConfig
from isp.parallel import Mode
from tests.models.models import job, packed_rows, tiny
from tests.ranks import run_each
from tests.saved import saved_bytes

DATA = [packed_rows(2, 64, [[1, 30, 7, 26], [20, 44]], seed) for seed in (1, 2)]
BETWEEN = {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True}
KEPT = {"checkpoint": 1.0, "checkpoint_keeps_attention": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "between": BETWEEN,
    "kept": KEPT,
    "all": {"checkpoint": 1.0},
    "distributed": {"checkpoint": 1.0, "checkpoint_distribute_activations": True},
    "both": {**KEPT, **BETWEEN, "checkpoint": 0.5, "checkpoint_offload": True},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ("plain", "between", "kept", "all", "both")),
    "llama, msp": ("llama", {}, ("plain", "both")),
    "llama, mtp": ("llama", {}, ("plain", "distributed")),
    "gemma3": ("gemma3_text", {"sliding_window": 8}, ("plain", "between", "kept", "all")),
    "experts": ("qwen3_moe", EXPERTS, ("plain", "both")),
    "hybrid": ("qwen3_next", {**EXPERTS, **HYBRID}, ("plain", "both")),
}


class Found(NamedTuple):
    """Two steps on a rank."""

    numbers: list[tuple[float, float]]
    weights: dict[str, Any]
    saved: int
    """Bytes that the second forward keeps."""
    sent: Counter[Purpose]
    """Transfers of both."""


def _train(rank: int, case: tuple[Any, JobConfig]) -> Found:
    model, config = case
    run = isp.parallelize(model, config)
    run.mesh.log.collect()
    numbers, saved = [], 0
    for rows in DATA:
        part = rows.part(run.dp_rank, run.dp_size)
        loss, saved = saved_bytes(lambda part=part: run.loss(*part))  # type: ignore[misc]
        outcome = run.step(loss)
        numbers.append((outcome.loss, outcome.grad_norm))
    run.train_step.drain()
    sent = Counter(t.tag.purpose for t in run.mesh.log.take())
    weights = {p.name: p.parameter.detach().numpy() for p in run.train_step.built.parameters}
    return Found(numbers, weights, saved, sent)


def _config(name: str, way: str) -> JobConfig:
    split = next((mode for mode in (Mode.MSP, Mode.MTP) if mode in name), None)
    config = job(2, 2) if split is None else job(2, mode=split)
    return replace(config, model=replace(config.model, **WAYS[way]))


def test_what_is_computed_again_gives_the_same_bits_and_keeps_less() -> None:
    """Catches a result that was not kept and is read again, or was written into; a linear, an
    exchange or a gather that is made again; and what is kept although it is computed again.
    """
    models = {name: tiny(kind, **sizes) for name, (kind, sizes, _) in MODELS.items()}
    cases = {
        f"{name}: {way}": (copy.deepcopy(models[name]), _config(name, way))
        for name, (_, _, ways) in MODELS.items()
        for way in ways
    }
    found = run_each(2, _train, cases, timeout_seconds=110)
    for name, (_, _, ways) in MODELS.items():
        for rank in range(2):
            of_ways = [found[f"{name}: {way}"][rank] for way in ways]
            plain = of_ways[0]
            for way, own in zip(ways, of_ways, strict=True):
                assert own.numbers == plain.numbers, (name, way)
                assert all((own.weights[k] == plain.weights[k]).all() for k in own.weights)
                assert own.sent[Purpose.WEIGHT] == plain.sent[Purpose.WEIGHT], (name, way)
                if way == "distributed":
                    assert own.sent[Purpose.BLOCK_INPUT] == 2 * 3, name
                if way != "all":
                    assert own.sent[Purpose.HEADS] == plain.sent[Purpose.HEADS], (name, way)
            if "plain" in ways and "all" in ways:
                sizes = [found[f"{name}: {way}"][rank].saved for way in WAYS if way in ways[:4]]
                assert sizes == sorted(set(sizes), reverse=True), name


def test_what_is_kept_between_linears_is_counted() -> None:
    """Catches q, k, v before their rotation and the outputs of MLPs that are kept for nobody."""
    tokens, hidden, inner, item, layers = 64, 32, 48, 8, 3
    cases = {
        f"{way}, {n}": (tiny("llama", num_hidden_layers=n), _alone(way))
        for way in ("between", "kept")
        for n in (layers, layers + 1)
    }
    found = run_each(1, _train, cases)
    of_block = {
        way: found[f"{way}, {layers + 1}"][0].saved - found[f"{way}, {layers}"][0].saved
        for way in ("between", "kept")
    }
    heads = 2 * tokens * item * (hidden + hidden + 2 * hidden // 2)  # q, result, k and v
    sums = 2 * tokens * 4 * item  # of each of 4 heads
    stays = 2 * tokens * hidden * item  # a hidden state
    assert of_block["kept"] == pytest.approx(stays + heads + sums, rel=0.01)
    between = 2 * stays + heads + sums + 2 * tokens * 2 * inner * item
    weights = item * (3 * hidden * hidden + 3 * hidden * inner)  # which linears save
    assert of_block["between"] == pytest.approx(between + weights, rel=0.01)


def _alone(way: str) -> JobConfig:
    config = job()
    return replace(config, model=replace(config.model, **WAYS[way]))
