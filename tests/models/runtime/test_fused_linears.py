"""Linears gathered, computed and reduced as one, against the same linears one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.checkpoint import Checkpointer, TrainState
from isp.config.sections import CheckpointConfig
from isp.core.comm.tag import Purpose
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.loop.parallel_run import ParallelRun
from isp.models.runtime.fused_linears import groups_of
from isp.models.traced_model import TracedModel
from tests.models.models import job, packed_rows, tiny
from tests.models.own import Own
from tests.ranks import run_ranks

ROWS = packed_rows(12, 24, [[24], [20, 4], [8, 16]] * 4)


def _groups(model: nn.Module) -> list[str]:
    traced = TracedModel(model)
    return [" ".join(linears) for linears in groups_of(model, traced.trace)]


def test_linears_with_one_input_are_found() -> None:
    """Catches linears of another input, of another kind, or shared ones among them."""
    own = Own()
    _, second, third = own.blocks
    second.k.requires_grad_(False)  # the bias, too
    third.q = nn.Linear(32, 32, bias=False)
    third.q.weight = third.out.weight
    assert _groups(own) == ["blocks.0.q blocks.0.k blocks.0.v", "blocks.2.k blocks.2.v"]
    llama = tiny("llama", num_hidden_layers=1)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert _groups(llama) == [
        " ".join(f"{attention}.{name}_proj" for name in "qkv"),
        f"{mlp}.gate_proj {mlp}.up_proj",
    ]


@pytest.mark.parametrize(("ahead", "behind"), [(0, 9), (4, 5), (8, 1), (9, 0)])
def test_parts_of_a_fused_cut_cover_each_parameter(ahead: int, behind: int) -> None:
    """Catches rows that two ranks have, or none; the cut is that of 14 rows over 4 ranks."""
    layouts = [
        ParameterLayout(
            global_shape=(5, 2), parts=4, index=i, rows_before=ahead, rows_after=behind,
            reduce_over=Axis.WEIGHT_DATA,
        )
        for i in range(4)
    ]  # fmt: skip
    rows = torch.arange(10.0).view(5, 2)
    assert torch.equal(torch.cat([layout.shard(rows) for layout in layouts]), rows)
    for layout in layouts:
        ((start, stop),) = layout.intervals()
        within = range(ahead + start, ahead + stop)
        assert set(within) <= set(range(4 * layout.index, 4 * layout.index + 4))
        assert layout.local_shape == (len(within), 2)


def _apart(*_: Any) -> tuple[tuple[str, ...], ...]:
    return ()


class _Found(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    gathered: dict[str, int]
    """Number of gathers in the last step by tensor, in order."""
    reduced: dict[str, int]


def _train(run: ParallelRun, steps: int = 2) -> _Found:
    losses = []
    for _ in range(steps):
        run.mesh.log.collect()
        loss = run.loss(*ROWS.part(run.dp_rank, run.dp_size))
        losses.append(run.step(loss).loss)
    counts: list[dict[str, int]] = []
    transfers = [t.tag for t in run.mesh.log.take()]
    for purpose in (Purpose.WEIGHT, Purpose.WEIGHT_GRADIENT):
        names = [f"{c.layer}.{c.tensor}" for c in transfers if c.purpose is purpose]
        counts.append({name: names.count(name) for name in dict.fromkeys(names)})
    built = run.train_step.built
    weights = {item.name: run.weights.whole(item) for item in built.parameters}
    return _Found(losses, weights, *counts)


def _compared(rank: int, name: str, tensor: int, weight: int) -> list[_Found]:
    """Return the results with fused linears and with separate ones."""
    found = []
    for groups in (groups_of, _apart):
        config = job(tensor, weight, recompute=0.5)
        model = Own().double() if name == "own" else tiny(name)
        with mock.patch("isp.models.runtime.weight_holders.groups_of", groups):
            run = isp.parallelize(model, config)
        found.append(_train(run))
    return found


def test_a_block_of_llama_makes_as_many_transfers_as_with_fused_weights() -> None:
    """Catches a weight that is sent alone, or again."""
    for one, _ in run_ranks(2, _compared, "llama", 1, 2):
        block = "model.layers.1."
        expected = [
            "self_attn.q_proj+k_proj+v_proj.weight",
            "self_attn.o_proj.weight",
            "mlp.gate_proj+up_proj.weight",
            "mlp.down_proj.weight",
        ]
        gathered, reduced = (
            {name.removeprefix(block): n for name, n in found.items() if name.startswith(block)}
            for found in (one.gathered, one.reduced)
        )
        assert gathered == dict.fromkeys(expected, 2)
        assert [*reduced.items()] == [(f"{name}.grad", 1) for name in reversed(expected)]


def _resumed(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    """Return the results of two more steps, resumed from the other way's checkpoint and
    undisturbed.
    """
    runs = []
    for groups in (_apart, groups_of):
        with mock.patch("isp.models.runtime.weight_holders.groups_of", groups):
            runs.append(isp.parallelize(tiny("qwen2"), job(1, 2)))
    old, new = runs
    _train(old)
    states = [
        TrainState(
            parameters=run.train_step.built.parameters,
            optimizer=run.train_step.optimizer,
            topology=run.mesh.topology,
        )
        for run in runs
    ]
    with Checkpointer(folder, CheckpointConfig(), world=old.mesh[Axis.WORLD]) as checkpointer:
        checkpointer.save(1, states[0], tokens=0, wait=True)
        checkpointer.load(checkpointer.choose(), states[1])
    new.train_step.weights_changed()
    return _train(new).losses, _train(old).losses


def test_a_checkpoint_of_separate_linears_loads_into_fused_ones(tmp_path: Path) -> None:
    """Catches weights or optimizer states bound to one way of sharding."""
    for found, expected in run_ranks(2, _resumed, tmp_path):
        assert found == pytest.approx(expected, rel=1e-13)


def _called_otherwise(rank: int) -> str:
    model = Own().double()
    run = isp.parallelize(model, job(1, 2))
    model.blocks[1].k.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    with pytest.raises(RuntimeError) as error:
        run.loss(*ROWS.part(rank, 2))
    return str(error.value)


def test_an_input_that_differs_from_the_traced_one_is_refused_by_name() -> None:
    """Catches outputs for one tensor that are returned for another."""
    for text in run_ranks(2, _called_otherwise):
        assert text.startswith("blocks.1.k was called with a different tensor than blocks.1.q")
