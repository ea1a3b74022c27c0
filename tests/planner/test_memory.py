"""Planned memory compared with tensors of real runs, and with the hybrid ZeRO formula."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.mask import AttentionMask
from isp.core.mesh import Mode, PipelineSchedule, WeightConfig
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.planner import rehearsal as rehearsals
from isp.planner.case import PlanCase
from isp.planner.declared import shape_of
from isp.planner.dry import DryAttention
from isp.planner.memory import _states as planned_states
from isp.planner.memory import gather_pool, memory, moments, states
from isp.planner.record import EventRecorder, PeakMemory
from isp.planner.rehearsal import records_of, rehearsal
from isp.train.monitor.out_of_memory import memory_owners
from model.build import language_model
from model.config import ModelConfig
from tests.planner.cases import plan_case
from tests.planner.live import LiveBytes, live_bytes, tensors_here
from tests.ranks import run_each, run_ranks
from tests.train.runs import Layout, Meshes, Run, Task, make_run

TOKENS = 256
LION = OptimizerConfig(name="lion")
NARROW = OptimizerConfig(moment_dtype="bfloat16")
HOST = OptimizerConfig(offload_states=True)
HOST_NARROW = OptimizerConfig(offload_states=True, moment_dtype="bfloat16")
MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=160,
)
ALL, HALF = replace(MODEL, checkpoint=1.0), replace(MODEL, checkpoint=0.5)
KEPT = replace(ALL, checkpoint_keeps_attention=True)
LONG = replace(MODEL, num_layers=9, hidden_size=96, intermediate_size=32, checkpoint=1.0)
OFF = replace(LONG, checkpoint_offload=True)
BOTH = replace(OFF, checkpoint_segment=3)
FOUR = replace(MODEL, num_layers=4)
FOUR_ALL = replace(FOUR, checkpoint=1.0)
LADDER = replace(
    FOUR_ALL,
    checkpoint_segment=2,
    checkpoint_offload=True,
    loss_chunk_tokens=16,
)
TILED = replace(MODEL, mlp_tile_tokens=32, intermediate_size=640, num_layers=2)
TILED_ALL = replace(TILED, checkpoint=1.0)
CHUNKED = replace(MODEL, vocab_size=2048, num_layers=2, loss_chunk_tokens=40)
EXPERTS = replace(
    MODEL,
    num_experts=8,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=96,
    num_dense_layers=1,
    num_layers=4,
)
EXCHANGED = WeightConfig(vocab_parallel_loss=True)
STAY = WeightConfig(reshard_after_forward=False)
CASES = [
    (Layout(), HALF, "bfloat16"),
    (Layout(weight=2, data=2, options=WeightConfig(overlap=False)), KEPT, "float32"),
    (Layout(tensor=2, weight=2), TILED_ALL, "bfloat16"),
    (Layout(tensor=2, weight=2, micro=2), MODEL, "bfloat16"),
    (Layout(tensor=2, weight=1, zero1=2), ALL, "bfloat16"),
    (Layout(mode=Mode.MTP, data=2), HALF, "float64"),
    (Layout(mode=Mode.FSP, tensor=2), HALF, "bfloat16"),
    (Layout(tensor=2, weight=2, options=EXCHANGED), CHUNKED, "float32"),
    (Layout(mode=Mode.MSP, tensor=2), CHUNKED, "bfloat16"),
    (Layout(mode=Mode.MTP, pipeline=2, micro=8), MODEL, "float32"),
    (Layout(pipeline=2, micro=4, schedule=PipelineSchedule.INTERLEAVED, chunks=2), FOUR, "float32"),
    (Layout(pipeline=2, micro=6, schedule=PipelineSchedule.ZBV, chunks=2), FOUR_ALL, "float32"),
    (Layout(pipeline=2, micro=3), LADDER, "float32"),
    (Layout(weight=2, data=2), BOTH, "bfloat16"),
    (Layout(tensor=2, weight=4, data=2, micro=2), EXPERTS, "bfloat16"),
    (Layout(mode=Mode.MTP, tensor=2, expert=2), EXPERTS, "float32"),
    (Layout(weight=4, data=4, expert=2), EXPERTS, "bfloat16"),
    (Layout(tensor=2, weight=4, data=2, expert=4), replace(EXPERTS, checkpoint=1.0), "float32"),
    (Layout(tensor=2, context=2, weight=2), KEPT, "float32"),
]
PARTS = [
    (Layout(mode=Mode.MSP, tensor=2, data=2), "bfloat16"),
    (Layout(weight=4, data=4), "float32"),
    (Layout(tensor=2, weight=2, data=2), "bfloat16"),
    (Layout(tensor=4, weight=2, zero1=1), "bfloat16"),
]
"""Layouts whose weights and optimizer are split in different ways."""


class Found(NamedTuple):
    """Measured bytes on a rank."""

    peak: int
    where: str
    states: tuple[int, int, int]
    host: int
    """Bytes in buffers of the host, which are not in `peak`."""


def _case(layout: Layout, model: ModelConfig, dtype: str, tokens: int = TOKENS) -> PlanCase:
    return plan_case(layout, model, dtype, tokens=tokens)


class _OneDocument(Task):
    """Rows of a given length, each a single document."""

    def batch(self, step: int, place: int) -> MicroBatch:
        tokens = torch.arange(TOKENS)[None] * 7 % self.model.vocab_size
        bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
        return MicroBatch(tokens, tokens.clone(), torch.arange(TOKENS)[None], bounds)


def _measured(rank: int, cases: list[tuple[Layout, ModelConfig, str]]) -> list[Found]:
    meshes, found = Meshes(rank), []
    for layout, model, dtype in cases:
        earlier = tensors_here().keys()
        task = _OneDocument(model=model)
        run = make_run(meshes.of(layout), layout, task, dtype=getattr(torch, dtype))
        run.numbers(range(1))
        # Pools are full in the second step.
        live = live_bytes(partial(run.numbers, range(1, 2)), earlier=earlier)
        host = run.step.built.host.reserved_bytes
        found.append(Found(live.peak - host, live.where, _states(run), host))
        run.close()
        del run
        gc.collect()
    return found


def _tensors_of(run: Run) -> list[torch.Tensor]:
    shards = run.optimizer.state_dict()["parameters"].values()
    states = [tensor for shard in shards for tensor in shard["tensors"].values()]
    grads = [run.step.gradients.summed(item.parameter) for item in run.parameters]
    return [*(item.parameter for item in run.parameters), *grads, *states]


def _states(run: Run) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer states; shared storages count once."""
    number = len(run.parameters)
    tensors = _tensors_of(run)
    seen: set[int] = set()
    sizes = []
    for group in (tensors[:number], tensors[number : 2 * number], tensors[2 * number :]):
        memories = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in group}
        sizes.append(sum(size for key, size in memories.items() if key not in seen))
        seen |= memories.keys()
    return sizes[0], sizes[1], sizes[2]


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", sorted({layout.world for layout, _, _ in CASES}))
def test_the_planned_peak_equals_the_measured_one(world: int) -> None:
    """Catches an owner forgotten or counted twice, and a peak searched at the wrong moment."""
    cases = [case for case in CASES if case[0].world == world]
    for _, model, dtype in cases:
        language_model(model, dtype)  # traced once, for all ranks
    of_ranks = run_ranks(world, _measured, cases, timeout_seconds=300)
    for number, (layout, model, dtype) in enumerate(cases):
        for rank in range(world):
            planned, found = memory(_case(layout, model, dtype), rank), of_ranks[rank][number]
            what = f"{layout} {dtype}: {planned.moment}, {found.where}"
            assert planned.total == pytest.approx(found.peak, rel=0.12), what
            assert planned.host == found.host, what
            states = planned.weights, planned.gradients, planned.optimizer
            assert states == found.states, what


@pytest.mark.parametrize(("layout", "dtype"), PARTS)
def test_states_follow_the_hybrid_zero_formula(layout: Layout, dtype: str) -> None:
    """Catches states not split over weight and zero1 groups as in the formula."""
    model = replace(MODEL, hidden_size=128, num_layers=8, intermediate_size=384)
    case = _case(layout, model, dtype)
    item, shard = case.item_bytes, case.language_model.num_parameters / case.topology.weight
    copies = 3 if dtype == "bfloat16" else 2
    formula = shard * (item + 4) + copies * 4 * shard / case.topology.zero1
    for rank in range(layout.world):
        assert states(case, case.place(rank)).states == pytest.approx(formula, rel=0.05)


class _Kept(NamedTuple):
    """Bytes kept on a rank."""

    states: tuple[int, int, int]
    """Bytes of weights, gradients, and optimizer states on any device."""
    owners: dict[str, int]
    """Bytes by owner in the memory report."""
    host: int
    update: int
    """Peak bytes allocated during an update."""


def _states_of(rank: int, optimizer: OptimizerConfig) -> _Kept:
    mesh = Meshes(rank).of(SHARED)
    run = make_run(mesh, SHARED, Task(model=MODEL), dtype=torch.bfloat16, config=optimizer)
    owners = memory_owners(run.step)
    run.optimizer.grad_norm()
    known = _tensors_of(run)
    with LiveBytes(known) as live:
        before = live.now
        run.optimizer._update(0.1)
    return _Kept(_states(run), owners, run.optimizer.host_bytes, live.peak - before)


SHARED = Layout(tensor=2, weight=1, zero1=2)
RULES = {"lion": LION, "narrow": NARROW, "host": HOST, "host, narrow": HOST_NARROW}
"""Update rules, with the parts of adamw's 12 bytes per parameter that each stores."""
PARTS_KEPT = {"lion": 8 / 12, "narrow": 8 / 12, "host": 1.0, "host, narrow": 8 / 12}


def test_states_are_planned_as_the_update_rule_stores_them() -> None:
    """Catches two moments planned or reported for a rule that has one, bfloat16 states planned as
    float32, and states planned on the wrong device.
    """
    plain = _case(SHARED, MODEL, "bfloat16")
    for name, of_ranks in run_each(2, _states_of, RULES).items():
        for rank, found in enumerate(of_ranks):
            case = replace(plain, optimizer=RULES[name])
            place = case.place(rank)
            planned, adamw = states(case, place), states(plain, place)
            kept = planned.optimizer + planned.host
            assert (planned.weights, planned.gradients, kept) == found.states, name
            assert kept == PARTS_KEPT[name] * adamw.optimizer
            assert planned.host == found.host == (kept if "host" in name else 0)
            assert kept == found.owners["optimizer states"]  # on CPU the host is the device
            if name != "lion":
                update = next(m for m in moments(case, rank) if m.moment == "the update")
                assert update.work == pytest.approx(max(found.update, 1), rel=0.02), name


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, weight=2, options=EXCHANGED),
        Layout(mode=Mode.MSP, tensor=2),
    ],
    ids=str,
)
def test_a_few_loss_chunks_represent_all(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a transfer, a product or bytes lost with the chunks that are not rehearsed."""
    case = _case(layout, replace(MODEL, loss_chunk_tokens=16), "float32", 256)
    few = rehearsal(case, case.place(0))
    run_few = rehearsals._loss
    monkeypatch.setattr(rehearsals, "_loss", lambda *given: run_few(*given[:3], 1, given[4]))
    rehearsals._rehearsed.cache_clear()
    every = rehearsal(case, case.place(0))
    rehearsals._rehearsed.cache_clear()
    for kind, record in every.records.items():
        assert few.records[kind].forward == record.forward
    assert few.loss == every.loss
    assert few.in_loss == pytest.approx(every.in_loss, rel=0.02)


@pytest.mark.parametrize("mode", [Mode.ISP, Mode.MTP])
def test_a_chunked_loss_needs_the_logits_of_one_chunk(mode: Mode) -> None:
    """Catches a second copy of a chunk's logits, and memory other than dx that grows with
    tokens.
    """
    vocab, hidden, chunk, parts = 8192, MODEL.hidden_size, 64, 2
    model = replace(MODEL, vocab_size=vocab, loss_chunk_tokens=chunk)
    layout = Layout(mode=mode, tensor=parts, weight=1 if mode is Mode.MTP else parts)

    def loss(tokens: int) -> int:
        case = _case(layout, model, "float32", tokens)
        return rehearsal(case, case.place(0)).in_loss

    split = parts if mode is Mode.MTP else 1
    logits, dw = 4 * chunk * vocab // split, 4 * vocab * hidden // split
    assert logits + dw < loss(1024) < 1.05 * (logits + dw) + 4 * 1024 * hidden
    dx = 4 * 1024 * hidden * split // parts
    assert loss(2048) - loss(1024) == pytest.approx(dx, rel=0.1)


def test_a_gpu_is_planned_without_the_copies_of_cpu_kernels() -> None:
    """Catches float32 copies of CPU kernels planned for GPU kernels, which need none."""
    on_cpu = _case(Layout(), MODEL, "bfloat16")
    on_gpu = replace(on_cpu, on_cpu=False)
    place = on_cpu.place(0)
    hidden, inner, heads = 64 * 2, 160 * 2, 64 * 2
    keys = 32 * 2
    expected = 2 * (2 * hidden + 4) + 3 * inner  # norms and MLP
    attention = heads + 2 * keys + heads + 4 * 4
    layer = shape_of(on_gpu, 0).chunks[0][1:2]
    (kept,) = (record.saved for record in records_of(on_gpu, place, layer).values())
    (on_host,) = (record.saved for record in records_of(on_cpu, place, layer).values())
    assert kept.activations == TOKENS * expected
    assert kept.attention == TOKENS * attention
    assert kept.total < on_host.total


def _backward_bytes(
    backend: str, kv_heads: int, *, dtype: torch.dtype, ring: bool = False, sinks: bool = False
) -> int:
    """Return the bytes that backward of planned CUDA attention allocates in addition to dq,
    dk, dv.
    """
    dry = DryAttention(EventRecorder(), AttentionBackend(backend), on_cpu=False)
    mask = AttentionMask.of_documents([TOKENS])
    q, k, v = (
        torch.empty(1, TOKENS, heads, 16, dtype=dtype, device="meta", requires_grad=True)
        for heads in (8, kv_heads, kv_heads)
    )
    with PeakMemory() as made:
        if ring:
            given = [x.detach()[0] for x in (q, q, k, v, q, q)]
            gradients = dry.gradients(*given, mask)
        else:
            out = dry(q, k, v, mask=mask, sinks=q.new_empty(8) if sinks else None)
            dout = torch.empty_like(out)
            there = made.peak_bytes
            gradients = torch.autograd.grad(out, (q, k, v), dout)
            made.peak_bytes -= there
    return made.peak_bytes - sum(x.nbytes for x in gradients)


@pytest.mark.parametrize(
    ("backend", "kv_heads", "bytes_per_feature"),
    [
        ("flash2", 8, 4),  # dq in float32
        ("flash2", 2, 4 + 2 * 2),  # and dk, dv of every query head in 16 bits
        ("varlen", 2, 4 + 2 * 2),
        ("sdpa", 2, 4 + 2 * 2),
        ("cudnn", 2, 4 + 2 * 2),  # as flash attention, until it is measured
        ("auto", 2, 4 + 2 * 2),
        ("flash3", 8, 4),
        ("flash3", 2, 4 + 2 * 4 / 4),  # and dk, dv of the KV heads in float32
        ("flash4", 2, 4 + 2 * 4 / 4),
    ],
)
def test_backward_of_attention_is_planned_with_its_workspace_on_a_gpu(
    backend: str, kv_heads: int, bytes_per_feature: float
) -> None:
    """Catches kernels of CUDA planned as if their backward needed no workspace."""
    expected = TOKENS * 8 * 16 * bytes_per_feature
    found = partial(_backward_bytes, backend, kv_heads)
    assert found(dtype=torch.bfloat16) == expected
    assert found(dtype=torch.float32) == 0
    of_varlen = TOKENS * 8 * 16 * (4 if kv_heads == 8 else 8)
    assert found(dtype=torch.bfloat16, ring=True) == of_varlen
    assert found(dtype=torch.bfloat16, sinks=True) == of_varlen


def test_the_configured_backend_is_planned() -> None:
    """Catches the workspace of another backend than that of the run, and any workspace on CPU."""
    model = replace(MODEL, num_heads=8, num_kv_heads=1, hidden_size=128, intermediate_size=16)

    def work(on_cpu: bool, **keys: AttentionBackend) -> int:
        case = replace(_case(Layout(), replace(model, **keys), "bfloat16"), on_cpu=on_cpu)
        layer = shape_of(case, 0).chunks[0][1:2]
        (record,) = records_of(case, case.place(0), layer).values()
        return record.work

    expanded, of_kv_heads = 2 * 2 * 128, 2 * 4 * 16
    auto, flash3 = work(False), work(False, attention_backend=AttentionBackend.FLASH3)
    assert auto - flash3 == TOKENS * (expanded - of_kv_heads)
    assert work(True) == work(True, attention_backend=AttentionBackend.FLASH3)


def test_weights_that_stay_need_buffers_of_every_layer() -> None:
    """Catches buffers for two blocks where all weights stay, or for all where two suffice."""
    pools = {
        (stays, layers): gather_pool(case, case.place(0))
        for stays in (False, True)
        for layers in (4, 9)
        for options in [STAY if stays else WeightConfig()]
        for model in [replace(MODEL, num_layers=layers)]
        for case in [_case(Layout(weight=2, data=2, options=options), model, "bfloat16")]
    }
    heads = 2 * (MODEL.num_heads + MODEL.kv_heads)
    block = MODEL.hidden_size**2 // MODEL.num_heads * heads
    block += 3 * MODEL.hidden_size * MODEL.intermediate_size
    assert pools[False, 9] == pools[False, 4]
    assert pools[True, 9] - pools[True, 4] == 5 * 2 * block


def test_states_are_planned_once_for_all_recomputation_and_batches() -> None:
    """Catches a search that adds up the same parameters for each of its layouts."""
    layout = Layout(tensor=2, weight=2)
    case = plan_case(layout, MODEL)
    others = [
        replace(case, model=replace(case.model, checkpoint=1.0)),
        replace(case, rows=3, tokens=2 * case.tokens, micro_num=5),
    ]
    found, before = states(case, case.place(0)), planned_states.cache_info()
    assert [states(other, other.place(0)) for other in others] == [found, found]
    after = planned_states.cache_info()
    assert (after.hits - before.hits, after.misses) == (2, before.misses)
    replicated = plan_case(Layout(tensor=2), case.model)
    assert states(replicated, replicated.place(0)) != found
