"""Blocks whose MLP is computed in tiles of tokens against the same blocks in one piece.

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
WHOLE: dict[str, Any] = {"checkpoint": 1.0}
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
    "tiles, in segments": Case(Layout(tensor=2, weight=2), FOUR, TILES, SEGMENTS),
    "tiles, on the host": Case(Layout(weight=2, data=2, micro=2), FOUR, TILES, OFFLOADED),
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
            assert parts.sent[Purpose.HEADS] == whole.sent[Purpose.HEADS], name


def _of_weights(moved: Counter[tuple[Purpose, str, str]]) -> dict[Any, int]:
    """But for biases: backward reads them again only where it computes outputs again."""
    found = {key: count for key, count in moved.items() if key[0] in WEIGHTS}
    return {key: count for key, count in found.items() if not key[2].endswith(".bias")}


TOKENS, HIDDEN, INNER = 256, 32, 512
LARGE = ModelConfig(
    vocab_size=32,
    hidden_size=HIDDEN,
    num_layers=1,
    num_heads=2,
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


def _peaks(_: int) -> tuple[int, dict[int, int]]:
    """Of a plain block, and of one in n tiles."""
    return _peak({}), {n: _peak({"mlp_tile_tokens": TOKENS // n}) for n in (4, 8)}


def test_a_block_takes_what_a_tile_takes() -> None:
    """Catches tiles that are all kept until the end: what is inside falls with their number."""
    ((plain, tiles),) = run_ranks(1, _peaks)
    inside = TOKENS * 4 * INNER * ITEM  # gate and up, their product, and its gradient at least
    assert plain - tiles[4] > inside / 2
    assert tiles[8] <= tiles[4]


def test_a_graph_that_is_kept_goes_back_again() -> None:
    """Catches sums of a first pass that are still there in a second, and an input that is gone."""
    model = filled(replace(LARGE, **TILES))
    (block,) = model.blocks()
    x = torch.randn(1, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = block(x, model.rotary(torch.arange(8)[None], dtype=x.dtype), AttentionMask(causal=True))
    leaves = [x, *block.parameters()]
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)
