"""All pairs of the keys that save memory, and all of them, against steps without any."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from isp.parallel import Mode, PipelineSchedule, WeightConfig
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import OPTIMIZER, Layout, Meshes, Numbers, Task, Weights, make_run

MODEL = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    init_std=0.3,
    sliding_window=11,
    loss_chunk_tokens=0,
)
TIED = replace(MODEL, tie_embeddings=True, qk_norm=True, sliding_window=None)
FOUR, FOUR_TIED = replace(MODEL, num_layers=4), replace(TIED, num_layers=4)
AGAIN = {"checkpoint": 1.0}
KEYS: dict[str, dict[str, Any]] = {
    "loss in chunks": {"loss_chunk_tokens": 5},
    "half again": {"checkpoint": 0.5},
    "attention kept": {**AGAIN, "checkpoint_keeps_attention": True},
    "norms again": {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True},
    "tiles": {"mlp_tile_tokens": 6},
    "inputs on the host": {**AGAIN, "checkpoint_offload": True},
    "inputs of segments": {**AGAIN, "checkpoint_segment": 2},
    "states on the host": {"offload_states": True},
}
LAYOUTS = (
    (Layout(tensor=2, weight=2, micro=2), MODEL),
    (Layout(weight=2, data=2, micro=2), TIED),
    (Layout(tensor=2, options=WeightConfig(vocab_parallel_loss=True)), TIED),
    (Layout(mode=Mode.MTP, tensor=2), MODEL),
    (Layout(mode=Mode.MSP, tensor=2, micro=2), TIED),
    (Layout(mode=Mode.FSP, tensor=2), MODEL),
    (Layout(pipeline=2, micro=2), FOUR_TIED),
    (Layout(pipeline=2, micro=4, schedule=PipelineSchedule.ZBV, chunks=2), FOUR),
)
EXCLUDED = {("attention kept", "inputs of segments")}
"""Pairs that a configuration refuses."""
ALL = tuple(name for name in KEYS if name not in ("half again", "attention kept", "norms again"))
SETS = [*(pair for pair in combinations(KEYS, 2) if pair not in EXCLUDED), ALL]


def _trained(
    rank: int, cases: list[tuple[Layout, ModelConfig, bool]]
) -> list[tuple[Numbers, Weights]]:
    meshes, found = Meshes(rank), []
    for layout, model, on_host in cases:
        task = Task(model=model, packed=layout.micro > 1, micro_bsz=2)
        optimizer = replace(OPTIMIZER, offload_states=on_host)
        run = make_run(meshes.of(layout), layout, task, config=optimizer)
        found.append((run.numbers(range(2)), run.weights()))
        run.close()
    return found


def _with_keys(model: ModelConfig, names: tuple[str, ...]) -> tuple[ModelConfig, bool]:
    keys = {key: value for name in names for key, value in KEYS[name].items()}
    on_host = keys.pop("offload_states", False)
    return replace(model, **keys), on_host


def test_every_pair_trains_as_none_of_them() -> None:
    """Catches two savings of memory that are right alone, and wrong together."""
    plain = [(layout, model, False) for layout, model in LAYOUTS]
    chosen = [(number * 3 + number // 8) % len(LAYOUTS) for number in range(len(SETS))]
    chosen[-1:] = range(len(LAYOUTS))
    sets = SETS[:-1] + [ALL] * len(LAYOUTS)
    cases = [
        (LAYOUTS[place][0], *_with_keys(LAYOUTS[place][1], names))
        for place, names in zip(chosen, sets, strict=True)
    ]
    assert set(chosen) == set(range(len(LAYOUTS)))
    of_ranks = run_ranks(2, _trained, plain + cases, timeout_seconds=110)
    for of_rank in of_ranks:
        expected, found = of_rank[: len(plain)], of_rank[len(plain) :]
        for place, names, (numbers, weights) in zip(chosen, sets, found, strict=True):
            told = f"{' with '.join(names)}, {LAYOUTS[place][0]}"
            np.testing.assert_allclose(numbers, expected[place][0], rtol=1e-9, err_msg=told)
            assert weights.keys() == expected[place][1].keys()
            for name, weight in expected[place][1].items():
                np.testing.assert_allclose(
                    weights[name], weight, rtol=1e-7, atol=1e-9, err_msg=f"{told}: {name}"
                )


@pytest.mark.parametrize("pair", sorted(EXCLUDED))
def test_pairs_that_are_not_trained_are_refused(pair: tuple[str, str]) -> None:
    """Catches a pair that is left out here and taken there."""
    with pytest.raises(ValueError, match=r"model\."):
        _with_keys(MODEL, pair)
