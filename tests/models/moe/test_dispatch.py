"""Experts distributed over ranks: tokens are exchanged, and nothing else changes."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.comm import Purpose
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode, ParallelConfig, Topology
from isp.core.mesh.config import ExpertConfig, ExpertWeightConfig, TensorConfig, WeightConfig
from isp.models.traced_model import TracedModel
from tests.models.models import (
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained,
    trained_plainly,
    whole_weights,
)
from tests.models.own import Own, OwnBlock
from tests.ranks import run_each, run_ranks

DOCUMENTS = [[1, 30, 7, 26], [20, 44]]


def _config(
    tensor: int,
    weight: int,
    expert: int,
    *,
    mode: Mode = Mode.ISP,
    recompute: float = 0.0,
    chunks: int = 1,
    context: int = 1,
    **keys: Any,
) -> JobConfig:
    config = job(tensor, weight, mode=mode, recompute=recompute, context=context)
    of_weights = replace(config.parallel.weight, poison_freed_buffers=mode is Mode.ISP, **keys)
    experts = ExpertConfig(size=expert, num_chunks=chunks)
    return replace(config, parallel=replace(config.parallel, weight=of_weights, expert=experts))


def _all_to_one() -> nn.Module:
    """Return a model whose first layer routes every token to experts 1 and 2."""
    model = tiny("deepseek_v3", first_k_dense_replace=0)
    gate = model.model.layers[0].mlp.gate
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, 9.0, 9.0, 0.0]))
    return model


def _only_experts_trained() -> nn.Module:
    """Return a model of which only experts train, so that the first layer's input needs no
    gradient.
    """
    model = tiny("gpt_oss", num_local_experts=8)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)
        layer.mlp.router.bias[:4] += 99
    return model


def _count_is_read() -> nn.Module:
    """Return a model whose layers read the number of experts, 3."""
    model = tiny("qwen3_moe", num_experts=3)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, x: (x[0] * mlp.experts.num_experts / 3,))
    return model


def _computed_ahead() -> nn.Module:
    """Return a model with shared experts after the others, and hooks that change their
    gradients.
    """
    model = tiny("glm4_moe", first_k_dense_replace=0, num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.shared_experts.register_full_backward_hook(lambda _, dx, __: (2 * dx[0],))
    return model


_MODELS = {
    "biases": lambda: tiny("gpt_oss"),
    "three": _count_is_read,
    "one only": _all_to_one,
    "experts only": _only_experts_trained,
    "shared": lambda: tiny("qwen2_moe"),
    "ahead": _computed_ahead,
}
_CASES: dict[int, dict[str, tuple[str, JobConfig]]] = {
    2: {
        "in chunks": ("three", _config(2, 2, 2, chunks=3, recompute=0.5)),
        "frozen, recomputed": ("experts only", _config(2, 2, 2, mode=Mode.FSP, recompute=1.0)),
        "fsp": ("shared", _config(2, 2, 2, mode=Mode.FSP, recompute=1.0)),
        "ahead, mtp": ("ahead", _config(2, 2, 2, mode=Mode.MTP, recompute=0.5, chunks=2)),
    },
    4: {
        "both axes": ("three", _config(2, 4, 2, recompute=1.0, chunks=2)),
        "all over": ("one only", _config(1, 4, 4)),
        "heads and context": ("biases", _config(4, 4, 2, context=2, own_reduce_group=True)),
        "replicas": ("shared", _config(1, 2, 2, overlap=False)),
        "ahead": ("ahead", _config(2, 4, 2, recompute=1.0, chunks=2)),
    },
}


def _data() -> list[Rows]:
    return [packed_rows(4, 64, 2 * DOCUMENTS, seed) for seed in (1, 2)]


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows]]) -> Trained:
    model, config, data = case
    return trained(isp.parallelize(model, config), data)


@pytest.mark.slow
def test_distributed_experts_train_as_in_a_plain_loop() -> None:
    """Catches tokens sent to other experts or returned in another order, gradients of weights and
    biases that are lost or summed twice, and ranks without tokens that make others hang.
    """
    data, models = _data(), {name: make() for name, make in _MODELS.items()}
    expected = {name: trained_plainly(model, data) for name, model in models.items()}
    for size, cases in _CASES.items():
        given = {name: (copy.deepcopy(models[of]), how, data) for name, (of, how) in cases.items()}
        for name, of_ranks in run_each(size, _train, given, timeout_seconds=100).items():
            assert_trained_as(expected[cases[name][0]], of_ranks, name)


def _in_tiles(rank: int, rows: list[Rows]) -> Trained:
    config = _config(1, 2, 2)
    config = replace(config, model=replace(config.model, mlp_tile_tokens=4))
    run = isp.parallelize(tiny("deepseek_v3", first_k_dense_replace=0), config)
    run.mesh.log.collect()
    outcome = run.step(run.loss(*rows[run.dp_rank]))
    asked = [t for t in run.mesh.log.take() if t.tag.tensor == "tiles"]
    assert len(asked) == len(run.model.model.layers), "forward asks how many tiles there are"
    return Trained([outcome.loss], [outcome.grad_norm], whole_weights(run))


def test_ranks_with_unequal_tokens_have_equal_numbers_of_tiles() -> None:
    """Catches a rank that waits for an exchange in a tile that another rank lacks, or that cannot
    compute a tile without tokens.
    """
    rows = [packed_rows(1, length, [[length]]) for length in (70, 20)]
    count = sum(int((row.labels[:, 1:] != IGNORED).sum()) for row in rows)

    def loss(model: nn.Module, rows: list[Rows]) -> Tensor:
        return torch.stack([plain_loss(model, row, total=True) for row in rows]).sum() / count

    expected = trained_plainly(tiny("deepseek_v3", first_k_dense_replace=0), [rows], loss)
    assert_trained_as(expected, run_ranks(2, _in_tiles, rows))


def _transfers(rank: int, recompute: float) -> Counter[str]:
    """Return the number of exchanges in a step by their tensor."""
    run = isp.parallelize(tiny("qwen3_moe"), _config(1, 4, 2, recompute=recompute))
    log = run.mesh.log
    log.collect()
    run.step(run.loss(*_data()[0].part(run.dp_rank, run.dp_size)))
    found = (t for t in log.take() if t.tag.purpose is Purpose.EXPERTS)
    return Counter(t.tag.tensor for t in found)


def test_a_layer_exchanges_counts_once() -> None:
    """Catches additional exchanges: of counts, for which the host waits, or of rows."""
    layers, forwards = 3, 2
    for counts in run_ranks(4, _transfers, 1.0):
        assert counts == {
            "counts": layers * forwards,
            "dispatch": 2 * layers * forwards,  # tokens, and their weights
            "combine": layers * forwards,
            "combine.grad": layers,
            "dispatch.grad": 2 * layers,
        }


def _left_in_flight(rank: int, mode: Mode) -> list[str]:
    """Return the exchanges of a step that are never waited for."""
    run = isp.parallelize(tiny("qwen3_moe"), _config(2, 2, 2, mode=mode, recompute=1.0, chunks=2))
    log = run.mesh.log
    log.collect()
    run.step(run.loss(*_data()[0].part(run.dp_rank, run.dp_size)))
    found = [t for t in log.take() if t.tag.purpose is Purpose.EXPERTS]
    assert len({t.tag.tensor for t in found}) == 5
    return [t.tag.tensor for t in found if not t.waited]


def test_a_recompute_waits_for_all_its_exchanges() -> None:
    """Catches a recomputation that ends between two parts of the tokens with results in flight,
    whose buffers are never freed.
    """
    modes = {str(mode): mode for mode in Mode}
    for mode, of_ranks in run_each(2, _left_in_flight, modes).items():
        assert of_ranks == [[], []], mode


def _order(rank: int, case: tuple[str, float, Mode]) -> list[str]:
    """Return the operations and exchanges of the last layer in a step, in order."""
    kind, recompute, mode = case
    model = tiny(kind, **({"first_k_dense_replace": 0} if kind == "glm4_moe" else {}))
    run = isp.parallelize(model, _config(2, 2, 2, mode=mode, recompute=recompute))
    name, events = "model.layers.2.mlp", list[tuple[float, str]]()

    def computed(_: nn.Module, __: object, y: Tensor) -> None:
        events.append((time.perf_counter(), "shared expert"))
        if y.requires_grad:
            y.register_hook(lambda _: events.append((time.perf_counter(), "back through it")))

    for linear in ("gate_proj", "down_proj"):
        block: Any = run.model.get_submodule(name)
        shared = block.shared_experts if kind == "glm4_moe" else block.shared_expert
        shared.get_submodule(linear).register_forward_hook(computed)
    run.mesh.log.collect()
    run.step(run.loss(*_data()[0].part(run.dp_rank, run.dp_size)))
    for sent in run.mesh.log.take():
        if sent.tag.layer == f"{name}.experts":
            events.append((sent.launched, sent.tag.tensor))
            events.append((sent.wait_began, f"wait for {sent.tag.tensor}"))
    return [what for _, what in sorted(events)]


def test_a_shared_expert_is_computed_during_the_exchange() -> None:
    """Catches a wait for tokens, or for their gradients, before the shared expert is computed."""
    counts, trip = ["counts", "wait for counts"], ["combine", "wait for combine"]
    sent, came = ["dispatch"] * 2, ["wait for dispatch"] * 2  # tokens, and their weights
    forward = [*counts, *sent, *["shared expert"] * 2, *came, *trip]
    back = [*(f"{what}.grad" for what in trip), *(f"{what}.grad" for what in sent)]
    backward = [*back, *["back through it"] * 2, *(f"{what}.grad" for what in came)]
    cases = {
        "isp": ("glm4_moe", 0.0, Mode.ISP),
        "recomputed": ("glm4_moe", 1.0, Mode.ISP),
        "msp": ("glm4_moe", 0.0, Mode.MSP),
        "before the router in its own code": ("qwen2_moe", 0.0, Mode.ISP),
    }
    for name, of_ranks in run_each(2, _order, cases).items():
        again = forward if name == "recomputed" else []
        assert of_ranks == [[*forward, *again, *backward]] * 2, name


def _resumed(rank: int, folder: Path) -> Trained:
    losses, norms = list[float](), list[float]()
    configs = _config(1, 4, 2), job(2, 2), _config(2, 4, 2), _config(2, 1, 2, mode=Mode.MSP)
    for number, config in enumerate(configs):
        run = isp.parallelize(tiny("qwen3_moe", num_experts=9, seed=number), config)
        if number:
            run.load(folder / str(number - 1))
        one = trained(run, [packed_rows(4, 64, 2 * DOCUMENTS, 1)])
        losses, norms = losses + one.losses, norms + one.norms
        run.save(folder / str(number))
    return Trained(losses, norms, whole_weights(run))


def test_a_checkpoint_of_distributed_experts_loads_into_other_layouts(tmp_path: Path) -> None:
    """Catches shards cut over both axes that are saved or read as if cut over one."""
    data = 4 * [packed_rows(4, 64, 2 * DOCUMENTS, 1)]
    expected = trained_plainly(tiny("qwen3_moe", num_experts=9, seed=0), data)
    assert_trained_as(expected, run_ranks(4, _resumed, tmp_path, timeout_seconds=60))


_REFUSED = [
    (4, 3, None, Mode.ISP, "does not make parallel.weight.size=4: use an expert.size of 1, 2 or 4"),
    (4, 2, 4, Mode.ISP, "expert.size=2 x parallel.expert_weight.size=4 does not make parallel"),
    (4, 2, None, Mode.MTP, "use 1 (all experts on every rank) or parallel.tensor.size=4"),
]


@pytest.mark.parametrize(("size", "expert", "gathered", "mode", "words"), _REFUSED)
def test_sizes_that_do_not_fit_are_refused(
    size: int, expert: int, gathered: int | None, mode: Mode, words: str
) -> None:
    """Catches groups of experts that do not divide a copy of the weights."""
    with pytest.raises(ValueError, match=re.escape(words)):
        ParallelConfig(
            tensor=TensorConfig(size=size, mode=mode),
            weight=WeightConfig(size=size),
            expert=ExpertConfig(size=expert),
            expert_weight=ExpertWeightConfig(size=gathered),
        )


def test_models_whose_experts_cannot_be_distributed_are_refused() -> None:
    """Catches a size that silently has no effect, and experts called without routing weights."""
    parallel, zeros = _config(1, 2, 2).parallel, tiny("mixtral")
    zeros.config.zero_expert_num = 1  # as LongCat's
    for model, words in (
        (tiny("llama"), "has none"),
        (Unweighted(), "is called without routing weights"),
        (zeros, "without weights: use 1, which gathers all experts of a layer"),
    ):
        with pytest.raises(ValueError, match=words):
            TracedModel(model, in_place=False).check_layout(parallel, 64)


class _Halves(nn.Module):
    """Two experts without routing weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, size, size))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers > 0, x @ self.up[1], x @ self.up[0])


class _UnweightedBlock(OwnBlock):
    def __init__(self) -> None:
        super().__init__(32, 4, 2, 0.0)
        self.experts = _Halves(32)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        tokens = x.flatten(0, 1)
        return x + self.experts(tokens, (tokens[:, :1] > 0).long()).view(x.shape)


class Unweighted(Own):
    """A model with experts whose results are not weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_UnweightedBlock() for _ in range(2))


def test_expert_groups_are_inside_weight_groups() -> None:
    """Catches an order of ranks in which an expert's weights are gathered from distant ranks."""
    text = Topology.create(8, _config(1, 4, 2).parallel).describe()
    assert "weight 4 = expert 2 x expert_weight 2, expert_data 2" in text
    assert "expert         [0, 2]  [1, 3]  [4, 6]  [5, 7]" in text
    assert "expert_weight  [0, 1]  [2, 3]  [4, 5]  [6, 7]" in text
