"""Planned transfers equal those of real runs, in number and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isp.core.comm.tag import Purpose
from isp.core.mesh import ContextExchange, Mode, PipelineSchedule, WeightConfig
from isp.core.mesh.config import LaunchPoint, OverlapUnit
from isp.core.micro_batch import MicroBatch
from isp.planner.case import PlanCase
from isp.planner.counts import traffic
from isp.planner.declared import shape_of
from isp.planner.record import Launch
from isp.planner.rehearsal import records_of
from model.build import language_model
from model.config import ModelConfig
from tests.planner.cases import Counts, counted, plan_case, share
from tests.ranks import run_ranks
from tests.train.runs import SEQ_LEN, Layout, Meshes, Task, make_run

BASE = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    init_std=0.3,
)
FEW_KV = replace(BASE, num_kv_heads=2, qkv_bias=True, qk_norm=True)
TIED = replace(FEW_KV, tie_embeddings=True, checkpoint=0.5)
ODD = replace(BASE, num_heads=6, num_kv_heads=3, head_dim=8, checkpoint=1.0)
KEPT = replace(BASE, checkpoint=0.7, checkpoint_keeps_attention=True, qkv_bias=True)
EVEN = replace(KEPT, vocab_size=52)
FIVE = replace(BASE, num_layers=5, checkpoint=1.0)
TWO_LEVELS = replace(FIVE, checkpoint_segment=2)
DROPS = replace(BASE, checkpoint_norm_outputs=True, checkpoint_mlp_activation=True)
TILED = replace(TIED, mlp_tile_tokens=5, checkpoint=0.0)
TILED_ALL = replace(TILED, checkpoint=1.0)
TILED_KEPT = replace(TILED, checkpoint=0.5, checkpoint_keeps_attention=True)
ENDS = WeightConfig(vocab_parallel_loss=True, embed_split_hidden=True, own_reduce_group=True)
LATE = WeightConfig(
    launch_allgather_before=LaunchPoint.W1,
    forward_overlap_per=OverlapUnit.MODULE,
    reduce_by="reduce_scatter",
)
STAY = WeightConfig(reshard_after_forward=False)

DEEP = replace(TIED, num_layers=4)
EXPERTS = replace(
    DEEP,
    num_experts=5,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    num_dense_layers=1,
)
ROUND, V = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV

CASES: list[tuple[Layout, ModelConfig, str]] = [
    (Layout(mode=Mode.MTP, data=4, zero1=2, micro=2), BASE, "bfloat16"),
    (Layout(mode=Mode.MTP, tensor=2, data=2, zero1=1), replace(TIED, vocab_size=49), "float64"),
    (Layout(mode=Mode.MTP, tensor=4), replace(TWO_LEVELS, checkpoint_offload=True,
        checkpoint_distribute_activations=True), "float32"),
    (Layout(mode=Mode.MSP, tensor=2, pipeline=2, micro=4), TWO_LEVELS, "float32"),
    (Layout(mode=Mode.FSP, tensor=2, data=2, micro=2), TIED, "float64"),
    (Layout(tensor=2, weight=4, data=2, micro=3, options=STAY), TIED, "float64"),
    (Layout(tensor=4, weight=4), ODD, "float64"),
    (Layout(tensor=2, weight=2, data=2, micro=2, options=ENDS), EVEN, "float32"),
    (Layout(tensor=2, weight=2, pipeline=2, micro=4, options=LATE), TILED_KEPT, "float64"),
    (Layout(tensor=2, weight=4, data=2, options=WeightConfig(overlap=False)), DROPS, "float64"),
    (Layout(weight=2, data=2, pipeline=2, micro=4, schedule=ROUND, chunks=2), DEEP, "float32"),
    (Layout(mode=Mode.MTP, tensor=2, pipeline=2, micro=4, schedule=V, chunks=2), DEEP, "float32"),
    (Layout(tensor=2, weight=4, data=2, micro=2), EXPERTS, "bfloat16"),
    (Layout(tensor=2, weight=4, data=2, micro=2, expert=2), EXPERTS, "float32"),
    (Layout(weight=4, data=4, expert=4), replace(EXPERTS, checkpoint=1.0), "bfloat16"),
    (Layout(mode=Mode.MTP, tensor=2, data=2, expert=2), EXPERTS, "float32"),
]  # fmt: skip

TWO_AXES: list[tuple[Layout, ModelConfig, str]] = [
    (Layout(tensor=4, context=4, weight=2, micro=2), FEW_KV, "bfloat16"),
    (Layout(tensor=4, context=2, head_first=False, weight=4), TILED_ALL, "float32"),
    (Layout(tensor=4, context=2), replace(ODD, sliding_window=5), "float64"),
    (Layout(tensor=4, context=4, exchange=ContextExchange.RING), KEPT, "float32"),
    (Layout(tensor=2, context=2, weight=2, pipeline=2, micro=4), TWO_LEVELS, "float32"),
]
"""Cases of sequences split over heads x context."""

DOCUMENTS = 4
_OF_TOKENS = "all_to_all", "expert"


class EqualDocuments(Task):
    """Rows of equal documents, as plans of heads x context assume for packed rows."""

    def batch(self, step: int, place: int) -> MicroBatch:
        batch, length = super().batch(step, place), SEQ_LEN // DOCUMENTS
        if not self.packed:
            return batch
        positions = torch.arange(SEQ_LEN).remainder(length)[None]
        ends = torch.arange(0, SEQ_LEN + 1, length, dtype=torch.int32)
        return replace(batch, positions=positions, cu_seqlens=ends)


def _task(number: int, layout: Layout, model: ModelConfig) -> Task:
    """Return the task of a case: odd cases have two unpacked rows per micro-batch."""
    kind = EqualDocuments if layout.context > 1 else Task
    return kind(model=model, packed=number % 2 == 0, micro_bsz=2)


def case_of(layout: Layout, task: Task, dtype: Any) -> PlanCase:
    """Return the plan's case for a run of `tests.train.runs`."""
    return plan_case(
        layout,
        task.model,
        dtype,
        rows=1 if task.packed else task.micro_bsz,
        documents=DOCUMENTS if isinstance(task, EqualDocuments) and task.packed else 1,
    )


def _counted(rank: int, cases: list[tuple[Layout, ModelConfig, str]]) -> list[Counts]:
    meshes, found = Meshes(rank), []
    for number, (layout, model, dtype) in enumerate(cases):
        task = _task(number, layout, model)
        mesh = meshes.of(layout)
        run = make_run(mesh, layout, task, dtype=getattr(torch, dtype))
        if number % 3 == 0:
            run.numbers(range(1))  # a later step has the same transfers as the first
        mesh.log.collect()
        share([task.batch(1, place) for place in range(layout.micro)], mesh)
        run.numbers(range(2, 3))
        found.append(counted(mesh.log))
        run.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", sorted({layout.world for layout, _, _ in CASES}))
def test_planned_transfers_equal_those_of_a_run(world: int) -> None:
    """Catches a collective that is forgotten, counted twice, or of another size, in any mode."""
    _check([case for case in CASES if case[0].world == world])


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_planned_transfers_of_heads_x_context_equal_those_of_a_run() -> None:
    """Catches keys and values planned for other tokens, or along another axis, than are sent."""
    _check(TWO_AXES)


def _check(cases: list[tuple[Layout, ModelConfig, str]]) -> None:
    (world,) = {layout.world for layout, _, _ in cases}
    for _, model, dtype in cases:
        language_model(model, dtype)  # traced once, for all ranks
    of_ranks = run_ranks(world, _counted, cases, timeout_seconds=300)
    for n, (layout, model, dtype) in enumerate(cases):
        task = _task(n, layout, model)
        case = case_of(layout, task, dtype)
        others = {world - 1 - n % world} if layout.pipeline > 1 else set()
        for rank in {n % world} | others:
            planned, found = traffic(case, rank).by_channel, of_ranks[rank][n]
            if layout.expert > 1:  # the number of exchanged tokens depends on the router
                calls, sent = planned.pop(_OF_TOKENS)
                assert found.pop(_OF_TOKENS) == (calls, pytest.approx(sent, rel=0.5))
            assert planned == found, f"{layout} {dtype} {model} rank {rank}"


def test_long_steps_repeat_the_steady_state_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a schedule whose steady state gathers differently from what the plan assumes."""
    model = replace(KEPT, num_layers=9)
    modules = WeightConfig(forward_overlap_per=OverlapUnit.MODULE)
    for pipeline, options, schedule, chunks in (
        (1, WeightConfig(), PipelineSchedule.ONE_F_ONE_B, 1),
        (2, WeightConfig(), PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 2),
        (2, modules, PipelineSchedule.ZBV, 2),
        (2, STAY, PipelineSchedule.INTERLEAVED, 2),
    ):
        sizes = {"pipeline": pipeline, "schedule": schedule, "chunks": chunks}
        layout = Layout(weight=2, data=2, micro=14, options=options, **sizes)  # type: ignore[arg-type]
        case = case_of(layout, Task(model=model), "float32")
        assert case.few_micro_batches < 14, "else nothing was left out"
        found = [traffic(case, rank) for rank in (0, layout.world - 1)]
        with monkeypatch.context() as patch:
            patch.setattr(PlanCase, "few_micro_batches", 14)
            assert [traffic(case, rank) for rank in (0, layout.world - 1)] == found, schedule


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [(Mode.MTP, 2 * 2, 2 * 2), (Mode.MSP, 4, 4), (Mode.FSP, 4, 6)],
)
def test_volumes_of_a_block_match_the_papers(mode: Mode, forward: int, backward: int) -> None:
    """Catches a mode that sends more than published; in units of (t - 1) / t x [B, S, D].

    InternEvo (arXiv 2401.09149) counts two all-reduces in each direction for mtp, an all-gather and
    a reduce-scatter in place of each for msp, and another gather of the inputs for fsp.
    """
    case = _whole_blocks(mode, tensor=4, weight=1)
    unit = 3 * SEQ_LEN * 32 * 4 // 4
    block = shape_of(case, 0).chunks[0][2]
    record = records_of(case, case.place(0), [block])[block.name]
    for events, sent in ((record.forward, forward), (record.backward, backward)):
        launches = [event.transfer for event in events if isinstance(event, Launch)]
        assert sum(transfer.sent_bytes for transfer in launches) == sent * unit


def test_volumes_of_isp_blocks_match_the_papers() -> None:
    """Catches heads or weights sent more often than in Ulysses and ZeRO-3.

    q, k, v and the output of attention, [B, S/p, D] each, are exchanged by all-to-all in forward
    and backward; the weights are gathered in both, and their gradients reduce-scattered. The
    weights of the last block are gathered once.
    """
    sent = traffic(_whole_blocks(Mode.ISP, tensor=4, weight=4), 0).by_purpose
    heads = 3 * (SEQ_LEN // 4) * 32 * 4 // 4
    assert sent[Purpose.HEADS].sent_bytes == 3 * 8 * heads
    weights, ends = 4 * 32 * 32 + 3 * 32 * 40, 52 * 32
    assert sent[Purpose.WEIGHT_GRADIENT].sent_bytes == (3 * weights + 2 * ends) * 4 * 3 // 4
    assert sent[Purpose.WEIGHT].sent_bytes == (5 * weights + 2 * ends) * 4 * 3 // 4


def _whole_blocks(mode: Mode, *, tensor: int, weight: int) -> PlanCase:
    """Return three blocks with as many KV heads as query heads."""
    layout = Layout(mode=mode, tensor=tensor, weight=weight)
    model = replace(BASE, num_kv_heads=8, vocab_size=52)
    return case_of(layout, Task(model=model), "float32")
