"""Block inputs on the host, and recompute in two levels, for models of others: the same bits."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.comm.tag import Purpose
from isp.config import JobConfig
from isp.weights.plan import ActKind
from isp.weights.trace import sequential_actions
from tests.models.models import Rows, job, packed_rows, tiny
from tests.models.own import Own, OwnBlock
from tests.models.test_adapters import _half_frozen, _with_lora
from tests.ranks import run_each, run_ranks

DOCUMENTS = [[1, 30, 7, 26], [20, 44]]
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "offloaded": {"checkpoint_offload": True},
    "segments": {"checkpoint_segment": 2},
    "between linears": {
        "checkpoint": 0.5,
        "checkpoint_norm_outputs": True,
        "checkpoint_mlp_activation": True,
        "checkpoint_keeps_attention": True,
    },
    "segments, offloaded": {"checkpoint_segment": 2, "checkpoint_offload": True},
}


class _PairBlock(OwnBlock):
    """Gives its input, too, and takes that of the block before."""

    def forward(self, x: Tensor, before: Tensor) -> Any:
        return super().forward(x) + 0.1 * before, x


class _Pairs(Own):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_PairBlock(32, 4, 2, 0.0) for _ in range(3))

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = before = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x, before = block(x, before)
        x = self.norm(x) * self.gains["last"]
        return self.head(x) / self.temperature


MODELS: dict[str, Any] = {
    "llama": lambda: tiny("llama", num_hidden_layers=3),
    "gemma3": lambda: tiny("gemma3_text", num_hidden_layers=3, sliding_window=8),
    "adapters": _with_lora,
    "half frozen": _half_frozen,
    "dropout": lambda: Own(dropout=0.2).double(),
    "pairs": lambda: _Pairs().double(),
}


def _config(tensor: int, weight: int, way: str) -> JobConfig:
    config = job(tensor, weight, recompute=1.0)
    return replace(config, model=replace(config.model, **WAYS[way]))


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows]]) -> Any:
    model, config, data = case
    torch.manual_seed(3)
    run = isp.parallelize(model, config)
    run.mesh.log.collect()
    numbers = []
    for rows in data:
        outcome = run.step(run.loss(*rows.part(run.dp_rank, run.dp_size)))
        numbers.append((outcome.loss, outcome.grad_norm))
    run.train_step.drain()
    sent = Counter((t.tag.purpose, t.label) for t in run.mesh.log.take())
    copies = sum(n for (purpose, _), n in sent.items() if purpose is Purpose.BLOCK_INPUT)
    built = run.train_step.built
    assert built.communicator is not None
    start, steps = built.communicator.plan(sequential_actions(1))
    acts = [*start, *(act for step in steps for act in step.before)]
    gathers = Counter(name for a in acts if a.kind is ActKind.GATHER for name in a.parameters)
    if len(built.trained) == len(built.parameters):
        expected = {(Purpose.WEIGHT, name): len(data) * n for name, n in gathers.items()}
        assert {key: n for key, n in sent.items() if key[0] is Purpose.WEIGHT} == expected
        reduced = {n for (purpose, _), n in sent.items() if purpose is Purpose.WEIGHT_GRADIENT}
        assert reduced == {len(data)}
    weights = {p.name: p.parameter.detach().numpy() for p in built.parameters}
    return numbers, weights, copies, built.host.leased_bytes


def _ways(name: str) -> list[str]:
    """Each saving alone for one model; both together for all."""
    if name == "llama":
        return [*WAYS]
    of_calls = ["between linears"] if name in ("adapters", "half frozen", "dropout") else []
    return ["kept", "segments, offloaded", *of_calls]


def test_every_way_gives_the_same_bits() -> None:
    """Catches a block that is computed again with another's documents, calls or random numbers;
    weights gathered beside the plan, and gradients sent twice.
    """
    data = [packed_rows(2, 64, DOCUMENTS, seed) for seed in (1, 2)]
    models = {name: make() for name, make in MODELS.items()}
    cases = {
        f"{name}: {way}": (copy.deepcopy(model), _config(2, 2, way), data)
        for name, model in models.items()
        for way in _ways(name)
    }
    found = run_each(2, _train, cases, timeout_seconds=100)
    for name in MODELS:
        for rank in range(2):
            numbers, weights, _, _ = found[f"{name}: kept"][rank]
            for way in _ways(name):
                own, theirs, copies, leased = found[f"{name}: {way}"][rank]
                assert own == numbers, (name, way)
                assert all((theirs[k] == weights[k]).all() for k in weights), (name, way)
                assert leased == 0
                assert (copies > 0) == ("checkpoint_offload" in WAYS[way]), (name, way)


class Scaled(Own):
    """What a block takes is not what the one before gives."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = 0.5 * block(x)
        return self.head(self.norm(x))


def _scaled(rank: int) -> Any:
    model = Scaled().double()
    model.gains, model.temperature = nn.ParameterDict(), None
    data = packed_rows(1, 64, DOCUMENTS[1:])
    run = isp.parallelize(model, _config(1, 1, "segments"))
    with pytest.raises(ValueError, match=r"model\.checkpoint_segment") as raised:
        run.loss(*data)
    return str(raised.value)


def test_a_model_with_something_between_its_blocks_is_refused() -> None:
    """Catches inputs that are computed again as what they were not."""
    assert run_ranks(1, _scaled)[0].endswith("use 0")
