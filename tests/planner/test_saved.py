"""Bytes that a forward saves for backward, planned and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from isp.core.mesh import Axis, Mode, WeightConfig
from isp.planner.declared import shape_of
from isp.planner.rehearsal import records_of, rehearsal
from isp.step.step_work import slice_sequence
from model.config import ModelConfig
from tests.planner.test_counts import case_of
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Task, make_run

BASE = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
)
NORMED = replace(BASE, qk_norm=True, qkv_bias=True)
PART = replace(BASE, checkpoint=0.6)
KEPT = replace(PART, checkpoint_keeps_attention=True)
DROPS = replace(BASE, checkpoint_norm_outputs=True, checkpoint_mlp_activation=True)
TILED = replace(NORMED, mlp_tile_tokens=7)
PIECES = replace(KEPT, checkpoint_distribute_activations=True)
EXCHANGED = WeightConfig(vocab_parallel_loss=True)

CASES = {
    1: [
        (Layout(), BASE, "bfloat16"),
        (Layout(), DROPS, "float32"),
        (Layout(), TILED, "bfloat16"),
    ],
    2: [
        (Layout(tensor=2, weight=2), NORMED, "bfloat16"),
        (Layout(tensor=2, weight=2, options=EXCHANGED), KEPT, "float32"),
        (Layout(mode=Mode.MTP, tensor=2), PIECES, "bfloat16"),
        (Layout(mode=Mode.MSP, tensor=2), DROPS, "bfloat16"),
        (Layout(mode=Mode.MSP, tensor=2), replace(TILED, checkpoint=0.6), "float32"),
        (Layout(tensor=2, context=2, weight=2), BASE, "float32"),
    ],
}  # fmt: skip
"""Cases by number of ranks."""


def _measured(rank: int, cases: list[tuple[Layout, ModelConfig, str]]) -> list[tuple[int, int]]:
    """Return the bytes saved by the model, and by model and loss, on this rank, without weights."""
    meshes, found = Meshes(rank), []
    for number, (layout, config, dtype) in enumerate(cases):
        task = _task(config, number)
        mesh = meshes.of(layout)
        run = make_run(mesh, layout, task, dtype=getattr(torch, dtype))
        (model,) = run.step.chunks
        batch = whole = task.batch(0, 0)
        if layout.mode is Mode.ISP:
            batch = slice_sequence(batch, mesh[Axis.TENSOR])
        labels = (whole if model.splits_logits else batch).labels
        inputs: Any = (batch.tokens, batch.positions, batch.cu_seqlens)

        def forward(model: Any = model, inputs: Any = inputs, labels: Any = labels) -> Any:
            return model.loss(model(*inputs), labels, torch.ones((), dtype=torch.float64))

        weights = (item.parameter for item in model.shards())
        known = {x.untyped_storage()._cdata for x in (*weights, batch.tokens)}
        if model.learns:  # later forwards save less
            forward().backward()
            run.step.hook.after_step()
        of_model = _kept(lambda model=model, inputs=inputs: model(*inputs), known)  # type: ignore[misc]
        found.append((of_model, _kept(forward, known) - of_model))
        run.step.hook.after_step()
        run.close()
    return found


def _kept(forward: Callable[[], Any], known: set[int]) -> int:
    """Return the bytes that `forward` saves in addition to `known`; shared storages count once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    del out
    return sum(memory.nbytes() for key, memory in kept.items() if key not in known)


def _task(config: ModelConfig, number: int) -> Task:
    return Task(model=config, packed=number % 2 == 0, micro_bsz=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_planned_activations_equal_the_saved_ones(world: int) -> None:
    """Catches a saved tensor that is not planned, or planned whole although it is split."""
    of_ranks = run_ranks(world, _measured, CASES[world])
    for number, (layout, config, dtype) in enumerate(CASES[world]):
        case = case_of(layout, _task(config, number), dtype)
        for rank in range(world):
            place = case.place(rank)
            (blocks,) = shape_of(case, 0).chunks
            kept = sum(t.saved.total for t in records_of(case, place, blocks).values())
            common = rehearsal(case, place)
            found = of_ranks[rank][number]
            assert found == (kept + common.shared, common.loss), f"{layout} {dtype} {config}"
