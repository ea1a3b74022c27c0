"""Generation equals transformers' own, in every layout: wrong caches, states, masks, gathers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.attention.cached import KeyValueCache
from isp.comm import Mesh
from isp.evaluation.engine import Engine
from isp.models.build import BuiltModel, build_model
from isp.models.model import TracedModel
from isp.parallel import ParallelConfig, Topology
from isp.parallel.config import Mode, TensorConfig, WeightConfig
from tests.evaluation.models import FAMILIES, HYBRIDS, PROMPTS, made, read
from tests.ranks import run_each

DECODED = 20
"""Two windows and a prompt: every ring of a cache comes round again."""


def count_of(family: str) -> int:
    """Tokens that are written; of states, enough to leave those of a convolution behind."""
    return 6 if family in HYBRIDS else DECODED + 1


plain = cache(made)


def parallel_of(mode: Mode, size: int, weight: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor=TensorConfig(mode=mode, size=size), weight=WeightConfig(size=weight)
    )


@cache
def traced(family: str) -> TracedModel:
    return TracedModel(made(family), in_place=False)


def traced_engine(family: str, parallel: ParallelConfig, rank: int) -> Engine:
    model, cache, cpu = traced(family), KeyValueCache(), torch.device("cpu")

    def build(parallel: ParallelConfig, mesh: Mesh) -> BuiltModel:
        return build_model(
            model, parallel, mesh, seed=None, device=cpu, dtype=torch.float64, cache=cache
        )

    mesh = Mesh(Topology.create(parallel.tensor.size, parallel), rank)
    return Engine(model, parallel, mesh, device=cpu, build=build, cache=cache)


def greedy(engine: Engine, prompts: list[list[int]], count: int) -> tuple[Tensor, Tensor]:
    """Tokens [n, count] and their logits [n, count, V]."""
    capacity = max(map(len, prompts)) + count
    logits = [engine.prefill(prompts, capacity)]
    tokens = [logits[-1].argmax(-1)]
    for _ in range(count - 1):
        logits.append(engine.decode(tokens[-1]))
        tokens.append(logits[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def check(
    found: tuple[Tensor, Tensor], model: Any, prompts: list[list[int]] = PROMPTS, name: str = ""
) -> None:
    """Each token is the likeliest to the plain model behind those before it."""
    for prompt, tokens, logits in zip(prompts, found[0].tolist(), found[1], strict=True):
        expected = read(model, (*prompt, *tokens))[len(prompt) - 1 : -1]
        torch.testing.assert_close(
            logits, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}"
        )
        assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_traced_models_write_what_transformers_writes(family: str) -> None:
    engine = traced_engine(family, ParallelConfig(), 0)
    check(greedy(engine, PROMPTS, count_of(family)), plain(family))
    check(greedy(engine, PROMPTS[1:2], 4), plain(family), PROMPTS[1:2])


def test_nothing_is_said_of_training(caplog: pytest.LogCaptureFixture) -> None:
    """Such as that logits exist as a whole, where features are split."""
    traced_engine("gemma2", parallel_of(Mode.MTP, 1), 0)
    assert not caplog.text


def of_layout(rank: int, case: tuple[str, ParallelConfig]) -> tuple[Tensor, Tensor]:
    family, parallel = case
    engine = traced_engine(family, parallel, rank)
    found = greedy(engine, PROMPTS, count_of(family))
    decoding = engine.decoding.tensor  # what is planned is what there is
    heads = (decoding.size, 1) if decoding.mode.splits_features else (1, decoding.size)
    assert engine.cache.num_bytes == len(PROMPTS) * traced(family).cache_bytes(
        engine.cache.capacity, 8, *heads
    )
    return found


def test_traced_models_write_the_same_in_every_layout() -> None:
    cases = {f"gemma3_text {mode}": ("gemma3_text", parallel_of(mode, 2, 2)) for mode in Mode}
    cases["gpt2 isp, also decoding"] = ("gpt2", parallel_of(Mode.ISP, 2, 2))
    hybrids = "qwen3_next", "jamba", "olmo_hybrid", "deepseek_v32", "minimax_m3_vl_text (sparse)"
    cases |= {hybrid: (hybrid, parallel_of(Mode.ISP, 2, 2)) for hybrid in hybrids}
    cases["qwen3_next msp"] = ("qwen3_next", parallel_of(Mode.MSP, 2, 2))
    for family in ("gemma3_text", "gpt2", *hybrids):
        traced(family)  # once, before ranks fork
    for name, of_ranks in run_each(2, of_layout, cases, timeout_seconds=110).items():
        for found in of_ranks:
            check(found, plain(cases[name][0]), name=name)
