"""Experts that are gathered in groups: few are whole at once, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.layers.loss import IGNORED
from isp.models.model import TracedModel
from isp.parallel import (
    ExpertConfig,
    Mode,
    ParallelConfig,
    PipelineConfig,
    PipelineSchedule,
    TensorConfig,
    WeightConfig,
)
from isp.train.parallel_run import ParallelRun
from isp.weights.parts import WeightParts
from isp.weights.transfers import DeclaredWeight
from model.config import ModelConfig
from model.decoder import Decoder
from tests.models.models import (
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    tiny,
    trained,
    trained_plainly,
    whole_weights,
)
from tests.ranks import run_each, run_ranks

EXPERT = 3 * 32 * 16 * 8
"""Bytes of an expert."""
DECODER = ModelConfig(
    vocab_size=96, hidden_size=32, num_layers=3, num_heads=4, intermediate_size=48,
    num_experts=7, experts_per_token=3, moe_intermediate_size=16, num_dense_layers=1,
    init_std=0.3,
)  # fmt: skip


def _adapted() -> Any:
    """With adapters in attention, and nothing else trained."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(MODELS["mixtral"](), config).double()


MODELS = {
    "mixtral": lambda: tiny("mixtral", num_local_experts=4, intermediate_size=16),
    "qwen3": lambda: tiny("qwen3_moe", num_experts=9),
    "biases": lambda: tiny("gpt_oss", num_local_experts=6, intermediate_size=16),
    "decoder": lambda: Decoder(DECODER).double(),
    "deep": lambda: tiny("mixtral", num_local_experts=4, intermediate_size=16, num_hidden_layers=5),
    "adapters": _adapted,
}


class Case(NamedTuple):
    """A layout; a rank may have so many experts of `limit` whole at once."""

    model: str
    tensor: int
    weight: int
    limit: int
    recompute: float = 0.0
    expert: int = 1
    ahead: bool = True
    context: int = 1
    schedule: PipelineSchedule | None = None
    """Of two pipeline ranks with two chunks each."""
    between_linears: bool = False
    """Whether what lies there is recomputed, and no linear."""

    @property
    def config(self) -> JobConfig:
        """In isp mode."""
        config = job(self.tensor, self.weight, recompute=self.recompute, context=self.context)
        kept = ("checkpoint_norm_outputs", "checkpoint_mlp_activation")
        model = replace(config.model, **dict.fromkeys(kept, self.between_linears))
        weight = WeightConfig(size=self.weight, overlap=self.ahead, poison_freed_buffers=True)
        expert = ExpertConfig(size=self.expert, max_gathered_bytes=self.limit * EXPERT)
        keys: dict[str, Any] = {"weight": weight, "expert": expert}
        if self.schedule is not None:
            keys["pipeline"] = PipelineConfig(size=2, schedule=self.schedule, num_chunks=2)
        data, parallel = replace(config.data, micro_num=2), replace(config.parallel, **keys)
        return replace(config, model=model, data=data, parallel=parallel)


CASES = {
    2: {
        "does not": Case("qwen3", 2, 2, limit=8, recompute=1.0),
        "not ahead": Case("biases", 1, 2, limit=2, ahead=False),
        "linears kept": Case("mixtral", 2, 2, limit=4, recompute=0.4, between_linears=True),
        "adapters": Case("adapters", 2, 2, limit=4, recompute=0.5),
    },
    4: {
        "replicas": Case("decoder", 1, 2, limit=4),
        "spread": Case("qwen3", 1, 4, limit=4, expert=2, recompute=0.5),
        "heads and context": Case("biases", 4, 4, limit=8, context=2, recompute=0.5),
        "V": Case("deep", 2, 2, limit=4, schedule=PipelineSchedule.ZBV, recompute=0.5),
    },
}


@contextmanager
def _counting() -> Iterator[list[int]]:
    """The bytes of experts that are whole, at each of their gathers."""
    original, found = WeightParts.gather, list[int]()

    def gather(parts: WeightParts, part: DeclaredWeight) -> None:
        original(parts, part)
        there = (w for w in parts._gatherer.weights.values() if w.name.endswith("]") and w.gathered)
        of = (shard for weight in there for shard in weight.shards)
        found.append(sum(torch.Size(s.buffer_shape).numel() * s.parameter.itemsize for s in of))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightParts, "gather", gather)
        yield found


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows]]) -> tuple[Trained, int]:
    model, config, data = case
    with _counting() as found:
        return _in_two(isp.parallelize(model, config), data), max(found)


def _in_two(run: ParallelRun, data: list[Rows]) -> Trained:
    """Each step's gradients are of two backward passes, or of two through a pipeline."""
    losses, norms = [], []
    for rows in data:
        part, count = rows.part(run.dp_rank, run.dp_size), (rows.labels != IGNORED).sum()

        def loss(scores: Any, _: object = None, *, count: Any = count) -> Tensor:
            return -0.5 * scores.log_probs.sum() / count

        for _ in range(2):
            if run.config.parallel.pipeline.size > 1:
                rows_of = [part.part(i, 2)._asdict() for i in range(2)]
                run.forward_backward(rows_of, loss)
            else:
                run.backward(loss(run.log_probs(*part)))
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    return Trained(losses, norms, whole_weights(run))


def _data() -> list[Rows]:
    return [packed_rows(4, 64, 2 * [[1, 30, 7, 26], [20, 44]], seed) for seed in (1, 2)]


@pytest.mark.slow
def test_experts_in_groups_train_as_in_a_plain_loop() -> None:
    """Catches tokens that come to experts of another group, gradients added to other rows or lost,
    groups freed while they are read, and more of them at once than the limit allows.
    """
    data, models = _data(), {name: make() for name, make in MODELS.items()}
    expected = {name: trained_plainly(model, data) for name, model in models.items()}
    for size, cases in CASES.items():
        given = {n: (copy.deepcopy(models[c.model]), c.config, data) for n, c in cases.items()}
        for name, of_ranks in run_each(size, _train, given, timeout_seconds=100).items():
            case = cases[name]
            for found, most in of_ranks:
                plain = expected[case.model]
                own = {weight: plain.weights[weight] for weight in found.weights}  # of a stage
                assert_trained_as(plain._replace(weights=own), [found], name)
                assert case.limit * EXPERT / 2 < most <= case.limit * EXPERT, name


def _resumed(rank: int, folder: Path) -> Trained:
    grouped = Case("qwen3", 1, 4, limit=8, recompute=1.0).config
    spread = Case("qwen3", 2, 4, limit=4, expert=2).config
    msp = job(2, mode=Mode.MSP, expert=2)
    losses, norms = list[float](), list[float]()
    for number, config in enumerate((grouped, job(2, 2), spread, msp)):
        run = isp.parallelize(tiny("qwen3_moe", num_experts=9, seed=number), config)
        if number:
            run.load(folder / str(number - 1))
        one = trained(run, _data()[:1])
        losses, norms = losses + one.losses, norms + one.norms
        run.save(folder / str(number))
    return Trained(losses, norms, whole_weights(run))


def test_a_checkpoint_of_groups_loads_into_others(tmp_path: Path) -> None:
    """Catches shards of several groups, or cut over both axes, that are saved or read as if they
    were of one.
    """
    expected = trained_plainly(MODELS["qwen3"](), 4 * _data()[:1])
    assert_trained_as(expected, run_ranks(4, _resumed, tmp_path, timeout_seconds=60))


def _refused(rank: int) -> str:
    with pytest.raises(ValueError, match="max_gathered_bytes") as raised:
        isp.parallelize(MODELS["mixtral"](), Case("mixtral", 1, 2, limit=3).config)
    return str(raised.value)


def test_less_than_an_expert_of_each_rank_is_refused() -> None:
    """Catches a limit that is passed over in silence."""
    for words in run_ranks(2, _refused):
        assert f"{EXPERT} bytes from each of 2 ranks twice" in words
        assert f"use {4 * EXPERT} or more" in words


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tensor": TensorConfig(mode=Mode.MSP)}, "needs isp mode"),
        ({"weight": WeightConfig(size=2, reshard_after_forward=False)}, "use true, or leave"),
        ({"expert": ExpertConfig(max_gathered_bytes=9, num_chunks=2)}, "use num_chunks=1"),
    ],
)
def test_what_a_limit_does_not_go_with_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**{"expert": ExpertConfig(max_gathered_bytes=9), **keys})


def test_a_model_without_experts_or_in_tiles_is_refused() -> None:
    config = Case("", 1, 2, limit=9).config
    tiles = replace(config, model=replace(config.model, mlp_tile_tokens=4))
    for model, asked, words in (
        (tiny("llama"), config, "can shard, and LlamaForCausalLM has none: leave"),
        (MODELS["mixtral"](), tiles, "mlp_tile_tokens=4"),
    ):
        traced = TracedModel(model, recomputation=asked.model.recomputation)
        with pytest.raises(ValueError, match=words):
            traced.check_layout(asked.parallel, 8)
