"""Recomputation of blocks of users' models, and where block inputs are saved: equal bits, less
memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.comm.tag import Purpose
from isp.core.mesh import Mode
from isp.core.weights.prefetch_plan import WeightOpKind
from isp.core.weights.uses import sequential_actions
from isp.loop.parallel_run import ParallelRun
from tests.models.huggingface.test_adapters import _with_lora
from tests.models.models import job, packed_rows, tiny
from tests.models.own import Own, OwnBlock
from tests.ranks import run_each, run_ranks
from tests.saved import saved_bytes

DATA = [packed_rows(2, 64, [[1, 30, 7, 26], [20, 44]], seed) for seed in (1, 2)]
ALL = {"checkpoint": 1.0}
BETWEEN = {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True}
KEPT = {**ALL, "checkpoint_keeps_attention": True}
HOST = {"checkpoint_offload": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "between": BETWEEN,
    "kept": KEPT,
    "all": ALL,
    "distributed": {**ALL, "checkpoint_distribute_activations": True},
    "segments": {**ALL, "checkpoint_segment": 2},
    "segments, offloaded": {**ALL, **HOST, "checkpoint_segment": 2},
    "both": {**KEPT, **BETWEEN, "checkpoint": 0.5},
    "both, offloaded": {**KEPT, **BETWEEN, **HOST, "checkpoint": 0.5},
}
FEWER = "plain", "between", "kept", "all"
"""Settings of which each saves fewer bytes than the previous one."""


class _PairBlock(OwnBlock):
    """A block that also returns its input, and takes that of the previous block."""

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


def _gemma() -> nn.Module:
    return tiny("gemma3_text", sliding_window=8)


BOTH = "segments, offloaded"
MODELS: dict[str, tuple[Callable[[], nn.Module], Mode, tuple[str, ...]]] = {
    "llama": (lambda: tiny("llama"), Mode.ISP, (*FEWER, "segments", BOTH, "both, offloaded")),
    "gemma3": (_gemma, Mode.ISP, ("plain", "kept", BOTH)),
    "experts": (lambda: tiny("qwen3_moe"), Mode.ISP, ("plain", "both, offloaded")),
    "hybrid": (
        lambda: tiny("qwen3_next", num_hidden_layers=4),
        Mode.ISP,
        ("plain", "both, offloaded"),
    ),
    "adapters": (_with_lora, Mode.ISP, ("all", BOTH)),
    "dropout": (lambda: Own(dropout=0.2).double(), Mode.ISP, ("all", BOTH, "both")),
    "pairs": (lambda: _Pairs().double(), Mode.ISP, ("all", BOTH)),
    "llama, mtp": (lambda: tiny("llama"), Mode.MTP, ("plain", "distributed", BOTH)),
    "gemma3, msp": (_gemma, Mode.MSP, ("plain", "both, offloaded")),
    "phi3, fsp": (lambda: tiny("phi3"), Mode.FSP, ("plain", BOTH)),
}


class Found(NamedTuple):
    """Results of two steps on a rank."""

    numbers: list[tuple[float, float]]
    weights: dict[str, Any]
    saved: int
    """Bytes that the second forward saves."""
    sent: Counter[Purpose]
    """Transfers of both steps."""


def _train(rank: int, case: tuple[nn.Module, JobConfig]) -> Found:
    model, config = case
    torch.manual_seed(3)
    run = isp.parallelize(model, config)
    run.mesh.log.collect()
    numbers, saved = [], 0
    for rows in DATA:
        part = rows.part(run.dp_rank, run.dp_size)
        loss, saved = saved_bytes(lambda part=part: run.loss(*part))  # type: ignore[misc]
        outcome = run.step(loss)
        numbers.append((outcome.loss, outcome.grad_norm))
    run.train_step.drain()
    sent = Counter((t.tag.purpose, t.label) for t in run.mesh.log.take())
    of_purpose = Counter[Purpose]()
    for (purpose, _), count in sent.items():
        of_purpose[purpose] += count
    built = run.train_step.built
    if built.communicator is not None and len(built.trained) == len(built.parameters):
        _check_plan(run, sent)
    assert built.host.leased_bytes == 0
    weights = {p.name: p.parameter.detach().numpy() for p in built.parameters}
    return Found(numbers, weights, saved, of_purpose)


def _check_plan(run: ParallelRun, sent: Counter[tuple[Purpose, str]]) -> None:
    """Check that weights are gathered as planned, and each gradient is reduced once a step."""
    communicator = run.train_step.built.communicator
    assert communicator is not None
    start, steps = communicator.plan(sequential_actions(1))
    acts = [*start, *(act for step in steps for act in step.before)]
    gathers = Counter(name for a in acts if a.kind is WeightOpKind.GATHER for name in a.parameters)
    expected = {(Purpose.WEIGHT, name): len(DATA) * n for name, n in gathers.items()}
    assert {key: n for key, n in sent.items() if key[0] is Purpose.WEIGHT} == expected
    reduced = {n for (purpose, _), n in sent.items() if purpose is Purpose.WEIGHT_GRADIENT}
    assert reduced == {len(DATA)}


def _config(mode: Mode, way: str) -> JobConfig:
    config = job(2, 2) if mode is Mode.ISP else job(2, mode=mode)
    return replace(config, model=replace(config.model, **WAYS[way]))


@pytest.mark.slow
def test_recomputation_changes_no_bit_and_saves_memory() -> None:
    """Catches a block recomputed with another block's documents, calls or random numbers; a result
    that was freed but is read again, or was written to; a linear, an exchange or a gather that is
    repeated or not in the plan; and tensors saved although they are recomputed.
    """
    models = {name: make() for name, (make, _, _) in MODELS.items()}
    cases = {
        f"{name}: {way}": (copy.deepcopy(models[name]), _config(mode, way))
        for name, (_, mode, ways) in MODELS.items()
        for way in ways
    }
    found = run_each(2, _train, cases, timeout_seconds=200)
    for name, (_, _, ways) in MODELS.items():
        for rank in range(2):
            of_ways = {way: found[f"{name}: {way}"][rank] for way in ways}
            first = of_ways[ways[0]]
            for way, own in of_ways.items():
                assert own.numbers == first.numbers, (name, way)
                assert all((own.weights[k] == first.weights[k]).all() for k in own.weights)
                if "segments" not in way and ways[0] == "plain":
                    assert own.sent[Purpose.WEIGHT] == first.sent[Purpose.WEIGHT], (name, way)
                copies = own.sent[Purpose.BLOCK_INPUT]
                if way == "distributed":
                    assert copies == 2 * 3, name
                else:
                    assert (copies > 0) == ("offloaded" in way), (name, way)
                if (ways[0] == "plain" and "keeps" in str(WAYS[way])) or way == "between":
                    assert own.sent[Purpose.HEADS] == first.sent[Purpose.HEADS], (name, way)
            if set(FEWER) <= set(ways):
                sizes = [of_ways[way].saved for way in FEWER]
                assert sizes == sorted(set(sizes), reverse=True), name


def test_saved_tensors_between_linears_are_the_expected_ones() -> None:
    """Catches saved q, k, v before their rotation, and saved outputs of MLPs, which nothing
    reads.
    """
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
    state = 2 * tokens * hidden * item  # a hidden state
    assert of_block["kept"] == pytest.approx(state + heads + sums, rel=0.01)
    between = 2 * state + heads + sums + 2 * tokens * 2 * inner * item
    weights = item * (3 * hidden * hidden + 3 * hidden * inner)  # which linears save
    assert of_block["between"] == pytest.approx(between + weights, rel=0.01)


def _alone(way: str) -> JobConfig:
    config = job()
    return replace(config, model=replace(config.model, **WAYS[way]))


class Scaled(Own):
    """A model whose blocks do not take the output of the previous block."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = 0.5 * block(x)
        return self.head(self.norm(x))


def _scaled(rank: int) -> str:
    model = Scaled().double()
    model.gains, model.temperature = nn.ParameterDict(), None
    run = isp.parallelize(model, _alone("segments"))
    with pytest.raises(ValueError, match=r"model\.checkpoint_segment") as raised:
        run.loss(*packed_rows(1, 64, [[20, 44]]))
    return str(raised.value)


def test_a_model_with_something_between_its_blocks_is_refused() -> None:
    """Catches block inputs recomputed without the operations between the blocks."""
    assert run_ranks(1, _scaled)[0].endswith("use model.checkpoint_segment=0")
