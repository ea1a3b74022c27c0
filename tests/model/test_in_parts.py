"""Blocks computed in parts (tiles of tokens, groups of heads) against the same blocks in one piece.

Each case is trained a step in float64 in a layout, as it is and in parts: the loss, the gradient
norm and every main gradient of every rank are compared, and what was gathered and reduced. The
step in parts comes after one that changes no weight, so it finds pools and plans in use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from isp.attention import AttentionMask
from isp.comm import Mesh
from isp.comm.tag import Purpose
from isp.models.build import build_model
from isp.optim import MainGradients, Zero1Optimizer
from isp.parallel import Axis, Mode, PipelineSchedule, WeightConfig
from isp.parallel.config import OverlapUnit
from isp.train.step import TrainStep
from model.config import ModelConfig
from tests.model.test_decoder import filled
from tests.planner.live import LiveBytes
from tests.ranks import run_each, run_ranks
from tests.train.runs import CPU, MAX_NORM, OPTIMIZER, SEED, Layout, Meshes, Task

TOLERANCE = 1e-9
MODEL = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    qkv_bias=True,
    qk_norm=True,
    init_std=0.3,
)
TIED = replace(MODEL, tie_embeddings=True, sliding_window=7)
FOUR = replace(MODEL, num_layers=4)
POISONED = WeightConfig(poison_freed_buffers=True)
PER_MODULE = replace(POISONED, forward_overlap_per=OverlapUnit.MODULE)
NO_OVERLAP = replace(POISONED, overlap=False)
ZERO, ZBV = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV

TILES: dict[str, Any] = {"mlp_tile_tokens": 5}
HEADS: dict[str, Any] = {"attention_head_groups": 2}
BOTH: dict[str, Any] = {**TILES, "attention_head_groups": 4}
WHOLE: dict[str, Any] = {"checkpoint": 1.0}
HALF: dict[str, Any] = {"checkpoint": 0.5}
DISTRIBUTED: dict[str, Any] = {**WHOLE, "checkpoint_distribute_activations": True}
SEGMENTS: dict[str, Any] = {**WHOLE, "checkpoint_segment": 2, "checkpoint_offload": True}
OFFLOADED: dict[str, Any] = {**WHOLE, "checkpoint_offload": True}
KEPT: dict[str, Any] = {"checkpoint": 0.5, "checkpoint_keeps_attention": True}


@dataclass(frozen=True)
class Case:
    """A layout, what is trained in it, and how its blocks are computed."""

    layout: Layout
    model: ModelConfig
    parts: dict[str, Any]
    recompute: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    """What the names of weights that are not trained contain."""
    rows: int = 0
    """Rows of a micro-batch that is not packed; 0: packed."""

    def task(self, **changes: Any) -> Task:
        """Its model with some keys changed, on its rows."""
        model = replace(self.model, **self.recompute, **changes)
        return Task(model=model, packed=not self.rows, micro_bsz=max(self.rows, 1))


CASES = {
    "tiles": Case(Layout(micro=2), MODEL, TILES),
    "tiles of two rows": Case(Layout(), TIED, TILES, WHOLE, rows=2),
    "tiles, MLPs alone": Case(Layout(), MODEL, TILES, frozen="attention"),
    "tiles, all else alone": Case(Layout(), MODEL, TILES, WHOLE, frozen="f"),
    "tiles, mtp": Case(Layout(mode=Mode.MTP, tensor=2), MODEL, TILES, KEPT),
    "tiles, msp": Case(Layout(mode=Mode.MSP, tensor=2, micro=2), TIED, TILES),
    "tiles, fsp": Case(Layout(mode=Mode.FSP, tensor=2), MODEL, TILES, WHOLE, rows=2),
    "tiles, isp": Case(Layout(tensor=2, weight=2, options=POISONED), MODEL, TILES),
    "tiles, isp, whole": Case(Layout(tensor=2, weight=2, options=POISONED), TIED, TILES, WHOLE),
    "tiles, isp, kept": Case(Layout(weight=2, data=2, options=POISONED), MODEL, TILES, KEPT),
    "tiles, isp, frozen": Case(
        Layout(tensor=2, weight=2, options=POISONED), MODEL, TILES, WHOLE, frozen="w13"
    ),
    "tiles, no overlap": Case(Layout(tensor=2, weight=2, options=NO_OVERLAP), MODEL, TILES, WHOLE),
    "tiles, per module": Case(
        Layout(tensor=2, weight=2, micro=2, options=PER_MODULE), MODEL, TILES, KEPT
    ),
    "tiles, zero bubble": Case(
        Layout(pipeline=2, schedule=ZERO, chunks=2, micro=4), FOUR, TILES, WHOLE
    ),
    "heads": Case(Layout(micro=2), MODEL, HEADS),
    "heads that share a KV head": Case(Layout(), TIED, {"attention_head_groups": 8}, rows=2),
    "heads, attention alone": Case(Layout(), MODEL, HEADS, WHOLE, frozen="feed_forward"),
    "both, their norms alone": Case(Layout(), MODEL, BOTH, frozen="attention.w"),
    "both, MLPs alone": Case(Layout(), MODEL, BOTH, WHOLE, frozen="attention"),
    "heads, mtp": Case(Layout(mode=Mode.MTP, tensor=2), MODEL, HEADS, DISTRIBUTED),
    "both, msp": Case(Layout(mode=Mode.MSP, tensor=2, micro=2), TIED, BOTH),
    "both, fsp": Case(Layout(mode=Mode.FSP, tensor=2), MODEL, BOTH, HALF, rows=2),
    "heads, isp": Case(Layout(tensor=2, weight=2, options=POISONED), MODEL, HEADS, WHOLE),
    "both, isp": Case(Layout(tensor=2, weight=2, micro=2, options=POISONED), TIED, BOTH),
    "both, isp, frozen": Case(
        Layout(tensor=2, weight=2, options=POISONED), MODEL, BOTH, WHOLE, frozen="wqkv.weight"
    ),
    "both, no overlap": Case(Layout(tensor=2, weight=2, options=NO_OVERLAP), MODEL, BOTH, HALF),
    "both, per module": Case(Layout(weight=2, data=2, micro=2, options=PER_MODULE), MODEL, BOTH),
    "both, in segments": Case(Layout(tensor=2, weight=2), FOUR, BOTH, SEGMENTS),
    "both, on the host": Case(Layout(weight=2, data=2, micro=2), FOUR, BOTH, OFFLOADED),
    "both, zero bubble": Case(
        Layout(pipeline=2, schedule=ZERO, chunks=2, micro=4), FOUR, BOTH, WHOLE
    ),
    "heads, few KV heads": Case(
        Layout(tensor=4, weight=4, options=POISONED),
        replace(TIED, num_kv_heads=2),
        HEADS,
        rows=2,
    ),
    "both, isp 4": Case(Layout(tensor=4, weight=2, options=POISONED), MODEL, HEADS | TILES, HALF),
    "both, V": Case(
        Layout(tensor=2, weight=2, pipeline=2, schedule=ZBV, chunks=2, micro=4, options=PER_MODULE),
        replace(FOUR, tie_embeddings=True),
        BOTH,
        WHOLE,
    ),
    "tiles, isp 4": Case(Layout(tensor=4, weight=4, options=POISONED), MODEL, TILES, WHOLE),
    "tiles, V": Case(
        Layout(tensor=2, weight=2, pipeline=2, schedule=ZBV, chunks=2, micro=4, options=PER_MODULE),
        replace(FOUR, tie_embeddings=True),
        TILES,
        WHOLE,
    ),
}


class Found(NamedTuple):
    """What a step of a run gave on a rank."""

    numbers: tuple[float, float, float]
    """Loss, gradient norm, and the loss of an evaluation after it."""
    grads: dict[str, Any]
    moved: Counter[tuple[Purpose, str, str]]
    """Transfers by purpose, kind and label."""
    sent: Counter[Purpose]
    """Bytes by purpose."""


def _step(mesh: Mesh, case: Case, task: Task, *, first: bool) -> Found:
    layout = case.layout
    built = build_model(
        task.model, layout.parallel, mesh, seed=SEED, device=CPU, dtype=torch.float64
    )
    for item in built.parameters:
        frozen = case.frozen and case.frozen in item.name
        item.parameter.requires_grad_(not frozen)
    gradients = MainGradients(built.trained, mesh)
    optimizer = Zero1Optimizer(
        gradients, mesh, OPTIMIZER, max_norm=MAX_NORM, counted_elsewhere=built.counted_elsewhere
    )
    step = TrainStep(built, gradients, optimizer, mesh, micro_num=layout.micro)
    own = range(mesh[Axis.DATA].rank, layout.global_batch, layout.data)
    batches = [task.batch(2, place) for place in own]
    if not first:
        step(batches, 0.0)
    mesh.log.collect()
    outcome = step(batches, 1e-2)
    transfers = mesh.log.take()
    grads = {i.name: gradients.grad(i.parameter).clone().numpy() for i in built.trained}
    evaluated = step.evaluate([batches])
    for item in built.trained:
        optimizer.published(item.parameter)
    step.hook.after_step()
    moved = Counter((t.tag.purpose, t.kind, t.label) for t in transfers)
    sent: Counter[Purpose] = Counter()
    for t in transfers:
        sent[t.tag.purpose] += t.sent_bytes
    return Found((outcome.loss, outcome.grad_norm, evaluated), grads, moved, sent)


_meshes = cache(Meshes)
"""Those of a rank, for all cases."""


def _both(rank: int, case: Case) -> tuple[Found, Found]:
    mesh = _meshes(rank).of(case.layout)
    whole = _step(mesh, case, case.task(), first=True)
    return whole, _step(mesh, case, case.task(**case.parts), first=False)


WEIGHTS = (Purpose.WEIGHT, Purpose.WEIGHT_GRADIENT)


@pytest.mark.parametrize("world", sorted({case.layout.world for case in CASES.values()}))
def test_blocks_in_parts_train_as_in_one_piece(world: int) -> None:
    """Catches a part that is left out, counted twice or of another's tokens; a weight that is
    gathered, or a gradient that is reduced, for each part; buffers read when they were given back.
    """
    cases = {name: case for name, case in CASES.items() if case.layout.world == world}
    for name, of_ranks in run_each(world, _both, cases, timeout_seconds=100).items():
        for whole, parts in of_ranks:
            for found, expected in zip(parts.numbers, whole.numbers, strict=True):
                assert abs(found - expected) < TOLERANCE * expected, name
            assert parts.grads.keys() == whole.grads.keys()
            for key, expected in whole.grads.items():
                difference = abs(parts.grads[key] - expected).max() / abs(expected).max()
                assert difference < TOLERANCE, (name, key, difference)
            found, expected = _of_weights(parts.moved), _of_weights(whole.moved)
            if cases[name].layout.options.forward_overlap_per is OverlapUnit.MODULE:
                # which weight is kept from forward to backward depends on what is one unit
                assert sum(found.values()) <= sum(expected.values()), name
            else:
                assert found == expected, name
            if "checkpoint_segment" not in cases[name].recompute:
                assert parts.sent[Purpose.HEADS] == _heads_bytes(name, whole), name


def _of_weights(moved: Counter[tuple[Purpose, str, str]]) -> dict[Any, int]:
    """But for biases: backward reads them again only where it computes outputs again."""
    found = {key: count for key, count in moved.items() if key[0] in WEIGHTS}
    return {key: count for key, count in found.items() if not key[2].endswith(".bias")}


def _heads_bytes(name: str, whole: Found) -> int:
    """Those of heads in groups, which are exchanged once more where plain ones are kept."""
    case, sent = CASES[name], whole.sent[Purpose.HEADS]
    if "attention_head_groups" not in case.parts:
        return sent
    fraction = case.recompute.get("checkpoint", 0.0)
    return round(sent / (2 + fraction) * 3)


TOKENS, HIDDEN, WIDE, INNER = 256, 32, 128, 512
LARGE = ModelConfig(
    vocab_size=32,
    hidden_size=HIDDEN,
    num_layers=1,
    num_heads=8,
    head_dim=WIDE // 8,
    intermediate_size=INNER,
    checkpoint=1.0,
)
ITEM = 8


def _peak(parts: dict[str, Any]) -> int:
    """Bytes at most of a block that goes forward and back, besides its weights."""
    model = filled(replace(LARGE, **parts))
    (block,) = model.blocks()
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    rotary = model.rotary(torch.arange(TOKENS)[None], dtype=x.dtype)
    mask = AttentionMask(causal=True)
    block(x, rotary, mask).sum().backward()
    with LiveBytes([x, *rotary, *model.parameters()]) as live:
        before = live.now
        block(x, rotary, mask).sum().backward()
    return live.peak - before


def _peaks(_: int) -> tuple[int, dict[int, int], dict[int, int]]:
    """Of a plain block, of one in n tiles, and of one in small tiles and n groups."""
    tiles = {n: _peak({"mlp_tile_tokens": TOKENS // n}) for n in (4, 8)}
    groups = {n: {"mlp_tile_tokens": TOKENS // 16, "attention_head_groups": n} for n in (2, 4, 8)}
    return _peak({}), tiles, {n: _peak(parts) for n, parts in groups.items()}


def test_a_block_takes_what_a_tile_and_a_group_take() -> None:
    """Catches parts that are all kept until the end: what is inside falls with their number."""
    ((plain, tiles, both),) = run_ranks(1, _peaks)
    inside = TOKENS * 4 * INNER * ITEM  # gate and up, their product, and its gradient at least
    assert plain - tiles[4] > inside / 2
    assert tiles[8] <= tiles[4]
    heads = TOKENS * 4 * WIDE * ITEM  # q, k, v and what heads give
    assert both[2] < tiles[8] - heads / 4
    assert both[4] < both[2] - heads / 4
    assert both[8] < both[4] - heads / 8
    assert plain > 4 * both[8]


def test_a_graph_that_is_kept_goes_back_again() -> None:
    """Catches sums of a first pass that are still there in a second, and an input that is gone."""
    model = filled(replace(LARGE, num_kv_heads=2, **BOTH))
    (block,) = model.blocks()
    x = torch.randn(1, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = block(x, model.rotary(torch.arange(8)[None], dtype=x.dtype), AttentionMask(causal=True))
    leaves = [x, *block.parameters()]
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)
