"""Logits of packed documents equal those of transformers in each layout."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.mesh import ParallelConfig, Topology
from isp.core.mesh.config import Mode, TensorConfig, WeightConfig
from isp.evaluation.engine import Engine
from isp.models.build import build_model
from isp.models.traced_model import TracedModel
from tests.evaluation.models import FAMILIES, HYBRIDS, PROMPTS, made, read
from tests.ranks import run_each

COUNTS = [1, 7, 1]
"""For each prompt, the number of last tokens whose logits are requested."""

plain = cache(made)


def parallel_of(mode: Mode, size: int) -> ParallelConfig:
    return ParallelConfig(tensor=TensorConfig(mode=mode, size=size), weight=WeightConfig(size=size))


@cache
def traced(family: str) -> TracedModel:
    return TracedModel(made(family), in_place=False)


def logits_of(rank: int, case: tuple[str, ParallelConfig]) -> Tensor:
    family, parallel = case
    mesh, cpu = Mesh(Topology.create(parallel.tensor.size, parallel), rank), torch.device("cpu")
    built = build_model(traced(family), parallel, mesh, seed=None, device=cpu, dtype=torch.float64)
    engine = Engine(built, mesh, cpu)
    engine.logits(PROMPTS[:1], [2])  # an additional prompt must not change later results
    return engine.logits(PROMPTS, COUNTS)


def check(found: Tensor, family: str, name: str) -> None:
    expected = [
        read(plain(family), tuple(prompt))[-count:]
        for prompt, count in zip(PROMPTS, COUNTS, strict=True)
    ]
    torch.testing.assert_close(
        found, torch.cat(expected), rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_logits_equal_those_of_transformers(family: str) -> None:
    """Catches wrong masks, states at the start of documents, padding, and gathers."""
    check(logits_of(0, (family, ParallelConfig())), family, family)


def test_logits_are_equal_in_every_layout() -> None:
    """Catches wrong masks, states, padding and gathers of one layout."""
    cases = {f"gemma3_text {mode}": ("gemma3_text", parallel_of(mode, 2)) for mode in Mode}
    cases["gpt2 isp"] = "gpt2", parallel_of(Mode.ISP, 2)
    hybrids = "qwen3_next", "jamba", "olmo_hybrid", "deepseek_v32", "minimax_m3_vl_text (sparse)"
    cases |= {hybrid: (hybrid, parallel_of(Mode.ISP, 2)) for hybrid in hybrids}
    cases["qwen3_next msp"] = "qwen3_next", parallel_of(Mode.MSP, 2)
    for family in ("gemma3_text", "gpt2", *hybrids):
        traced(family)  # once, before ranks fork
    for name, of_ranks in run_each(2, logits_of, cases, timeout_seconds=110).items():
        for found in of_ranks:
            check(found, cases[name][0], name)
