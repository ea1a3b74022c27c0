"""Every layout, with every key that saves memory, trains as plain torch does, in float64.

This is the one place where a run of the trainer is compared with a model and a loop without
layouts. Parts of it, and options that change no bit, are compared elsewhere with the run of a
layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis, ContextExchange, Mode, PipelineSchedule, WeightConfig
from isp.core.mesh.config import OverlapUnit
from isp.core.optim.config import OptimizerConfig
from model.build import language_model
from model.config import ModelConfig
from tests.model.plain import PlainDecoder, document_bounds, train_plainly
from tests.ranks import run_ranks
from tests.train.runs import (
    MAX_NORM,
    OPTIMIZER,
    SEQ_LEN,
    Layout,
    Meshes,
    Numbers,
    Task,
    largest_difference,
    learning_rate,
    make_run,
)

STEPS = (0, 1, 7)
"""Trained steps; in step 7 no rank has a label."""
EVALUATED = 9
"""The step whose batch is evaluated afterwards."""
TOLERANCE = 1e-9
"""Relative tolerance. Sums in another order differ by about 1e-15, which AdamW amplifies."""

# 50 rows of vocabulary are 13, 13, 13 and 11 on four ranks. One block, because each collective
# costs milliseconds on gloo.
GRID = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    qkv_bias=True,
    qk_norm=True,
    init_std=0.3,
)
TIED = replace(
    GRID,
    num_layers=2,
    qkv_bias=False,
    sliding_window=5,
    tie_embeddings=True,
)
ROWS = replace(GRID, num_layers=2, qk_norm=False)
KV_3 = replace(ROWS, hidden_size=24, num_heads=6, num_kv_heads=3)
KV_1 = replace(ROWS, num_kv_heads=1, vocab_size=52)
FIVE = replace(GRID, hidden_size=16, num_heads=4, num_kv_heads=2, num_layers=5, qk_norm=False)
NINE = replace(FIVE, num_layers=9)

KEYS: Mapping[str, Mapping[str, Any]] = {
    "loss in chunks": {"loss_chunk_tokens": 5},
    "half again": {"checkpoint": 0.5},
    "attention kept": {"checkpoint": 1.0, "checkpoint_keeps_attention": True},
    "norms again": {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True},
    "tiles": {"mlp_tile_tokens": 6},
    "inputs on the host": {"checkpoint": 1.0, "checkpoint_offload": True},
    "inputs of segments": {"checkpoint": 1.0, "checkpoint_segment": 2},
    "states on the host": {"offload_states": True},
}
"""Keys that save memory."""
ALL = (
    "loss in chunks",
    "tiles",
    "inputs on the host",
    "inputs of segments",
    "states on the host",
)
SETS = (
    ALL,
    ("loss in chunks", "half again", "norms again", "tiles", "states on the host"),
    (
        "loss in chunks",
        "attention kept",
        "norms again",
        "tiles",
        "inputs on the host",
        "states on the host",
    ),
    ("norms again", "inputs on the host", "inputs of segments", "states on the host"),
)
"""Sets of keys; every pair that a configuration accepts is in at least one."""

FEATURES = (Mode.MTP, Mode.MSP, Mode.FSP)
"""The modes that split features over the tensor group."""
RING = ContextExchange.RING
LOOP, ZERO, ZBV = (
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
    PipelineSchedule.ZBV,
)
ENDS = WeightConfig(embed_split_hidden=True, vocab_parallel_loss=True, own_reduce_group=True)
POISONED = WeightConfig(poison_freed_buffers=True)
PER_MODULE = replace(POISONED, forward_overlap_per=OverlapUnit.MODULE)
NOT_RESHARDED = replace(POISONED, reshard_after_forward=False)


class Case(NamedTuple):
    """A layout, and the model and keys trained in it."""

    layout: Layout
    model: ModelConfig = GRID
    packed: bool = True
    """Packed rows; otherwise two whole rows in a micro-batch."""
    saving: tuple[str, ...] = ()
    """Names of `KEYS`."""

    @property
    def task(self) -> Task:
        """The task, also for plain torch."""
        return Task(model=self.model, packed=self.packed, micro_bsz=2)

    def keys(self) -> dict[str, Any]:
        """Return the keys of model and optimizer that save memory."""
        return {key: value for name in self.saving for key, value in KEYS[name].items()}


def _grid() -> list[Case]:
    """Return modes x tensor 1 (isp), 2, 4 x weight 1, 2, 4 (isp) x data 1, 2 where they fit, and
    one of 8.

    One data rank has three micro-batches, two have one; `_zero1` has three on two.
    """
    features = itertools.product(FEATURES, (2, 4), (1,), (1, 2))
    isp = itertools.product((Mode.ISP,), (1, 2, 4), (1, 2, 4), (1, 2))
    layouts = [
        Layout(mode=mode, tensor=tensor, weight=weight, data=data, micro=3 if data == 1 else 1)
        for mode, tensor, weight, data in (*features, *isp)
        if tensor * data % weight == 0 and (tensor * data < 8 or weight == 4)
    ]
    return [Case(layout) for layout in (*layouts, Layout(weight=4, data=4, micro=3))]


def _zero1() -> list[Case]:
    """Return sizes of zero1 other than all replicas (those of the grid)."""
    layouts = [
        Layout(tensor=2, weight=1, data=2, micro=3, zero1=2),
        Layout(tensor=2, weight=2, data=2, micro=3, zero1=1),
        Layout(mode=Mode.MSP, tensor=2, data=2, micro=3, zero1=1),
        Layout(mode=Mode.FSP, data=4, zero1=2),
    ]
    return [Case(layout) for layout in layouts]


def _models() -> list[Case]:
    """Return other models, each in a layout or two of every mode that fits, here or in
    `_saving`.
    """
    some = [
        Layout(mode=Mode.MTP, tensor=4),
        Layout(mode=Mode.FSP, tensor=2, data=2),
        Layout(mode=Mode.MSP, tensor=2),
        Layout(tensor=4, weight=2),
        Layout(tensor=2, weight=4, data=2, options=ENDS),
    ]
    sizes = ((2, 2), (4, 1), (4, 4))
    return [
        *(Case(layout, TIED) for layout in some),
        *(Case(layout, ROWS, packed=False) for layout in some[2:]),
        *(Case(Layout(tensor=t, weight=w), KV_3) for t, w in sizes),
    ]


def _context() -> list[Case]:
    """Return cases of sequences split over heads x context."""
    return [
        Case(Layout(tensor=2, context=2, weight=2, micro=2), ROWS),
        Case(Layout(tensor=2, context=2, options=ENDS), TIED, packed=False),
        Case(Layout(tensor=4, context=2, weight=4), TIED, saving=("loss in chunks",)),
        Case(Layout(tensor=2, context=2, exchange=RING), ROWS),
        Case(Layout(tensor=4, context=4, exchange=RING), KV_1, saving=("attention kept",)),
        Case(Layout(tensor=4, context=2, exchange=RING), ROWS, packed=False, saving=ALL),
        Case(Layout(tensor=4, context=2, head_first=False, weight=2), KV_1, packed=False),
        Case(Layout(tensor=4, context=2, weight=2, options=ENDS), KV_1),
        Case(Layout(tensor=4, context=2), ROWS, saving=ALL),
        Case(Layout(tensor=2, context=2, weight=2, pipeline=2, micro=3), FIVE, saving=SETS[1]),
        Case(Layout(tensor=2, context=2, pipeline=2, schedule=ZBV, chunks=2), FIVE, packed=False),
    ]


def _pipelines() -> list[Case]:
    two = Layout(pipeline=2, micro=4, options=POISONED)
    isp = replace(two, tensor=2, weight=2)
    plain = [
        replace(two, mode=Mode.MTP, pipeline=4),
        replace(two, mode=Mode.MTP, data=2, micro=2, zero1=1),
        replace(two, weight=2, data=2, pipeline=3, micro=3),
        replace(isp, schedule=LOOP, chunks=2, options=NOT_RESHARDED),
        replace(two, mode=Mode.MTP, pipeline=4, schedule=ZERO),
        replace(two, mode=Mode.MSP, tensor=2, schedule=ZERO, chunks=2),
        replace(two, mode=Mode.FSP, tensor=2, schedule=ZBV, chunks=2),
    ]
    many = [
        replace(two, mode=Mode.FSP, tensor=2, schedule=LOOP, chunks=3),
        replace(two, mode=Mode.MTP, pipeline=4, schedule=LOOP, chunks=2),
        replace(isp, pipeline=4, schedule=ZBV, chunks=2, micro=7),
    ]
    tied = replace(FIVE, tie_embeddings=True)
    again = ("half again",)
    return [
        *(Case(layout, FIVE) for layout in plain),
        *(Case(layout, NINE) for layout in many),
        Case(replace(two, tensor=2, weight=4, data=2, micro=2), tied, packed=False, saving=again),
        Case(replace(isp, schedule=ZERO, chunks=2), tied, saving=again),
        Case(replace(isp, schedule=ZBV, chunks=2, options=PER_MODULE), tied, saving=again),
        Case(
            replace(two, mode=Mode.MTP, data=2, schedule=ZBV, chunks=2, micro=3, zero1=1),
            *(tied, False, again),
        ),
        Case(replace(two, mode=Mode.MTP, data=2, micro=2), FIVE, saving=("attention kept",)),
        Case(replace(isp, options=PER_MODULE), FIVE, packed=False, saving=("attention kept",)),
    ]


def _saving() -> list[Case]:
    """Return sets of keys that save memory: each in some mode, and one in every mode."""
    vocab = WeightConfig(vocab_parallel_loss=True)
    places = [
        (Layout(tensor=2, weight=2, micro=2), ROWS),
        (Layout(weight=2, data=2, micro=2), TIED),
        (Layout(tensor=2, options=vocab), TIED),
        (Layout(mode=Mode.MTP, tensor=2), ROWS),
        (Layout(mode=Mode.MSP, tensor=2, micro=2), TIED),
        (Layout(mode=Mode.FSP, tensor=2), ROWS),
        (Layout(pipeline=2, micro=2), replace(FIVE, tie_embeddings=True)),
        (Layout(pipeline=2, micro=4, schedule=ZBV, chunks=2), FIVE),
    ]
    found = []
    for number, (layout, model) in enumerate(places):
        for saving in (ALL,) if number == 1 else (ALL, SETS[1 + number % 3]):
            found.append(Case(layout, model, layout.micro > 1, saving))
    return found


CASES = [*_grid(), *_zero1(), *_models(), *_context(), *_pipelines(), *_saving()]
WORLDS = sorted({case.layout.world for case in CASES})


def cases_of(world: int) -> list[Case]:
    """Return the cases with this number of ranks."""
    return [case for case in CASES if case.layout.world == world]


def _train_all(
    rank: int, cases: list[Case], optimizer: OptimizerConfig, steps: tuple[int, ...]
) -> list[tuple[Numbers, float]]:
    """Return for each case the losses and norms of its steps, and the loss of an evaluation."""
    meshes, found = Meshes(rank), []
    for case in cases:
        try:
            keys = case.keys()
            config = replace(optimizer, offload_states=keys.pop("offload_states", False))
            task = replace(case.task, model=replace(case.model, **keys))
            run = make_run(meshes.of(case.layout), case.layout, task, config=config)
            numbers, data = run.numbers(steps), run.step.mesh[Axis.DATA]
            places = range(data.rank, case.layout.global_batch, data.size)
            batches = [task.batch(EVALUATED, place) for place in places]
            found.append((numbers, run.step.evaluate([batches])))
            run.close()
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    return found


@cache
def _plainly(
    task: Task,
    global_batch: int,
    optimizer: OptimizerConfig = OPTIMIZER,
    trained: tuple[int, ...] = STEPS,
) -> tuple[Numbers, float]:
    """Return the same results from plain torch."""
    layout = Layout(mode=Mode.MTP)
    initial = make_run(Meshes(0).of(layout), layout, task).weights()
    weights = {name: torch.from_numpy(array) for name, array in initial.items()}
    model = PlainDecoder(task.model).double().load_weights(weights)
    steps = (
        (learning_rate(step), [task.batch(step, place) for place in range(global_batch)])
        for step in trained
    )
    numbers = train_plainly(model, steps, optimizer, max_norm=MAX_NORM)
    total = count = 0.0
    for batch in (task.batch(EVALUATED, place) for place in range(global_batch)):
        logits = model(batch.tokens, batch.positions, document_bounds(batch)).detach()
        labels = batch.labels.flatten()
        count += int((labels != IGNORED).sum())
        total += F.cross_entropy(
            logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
        ).item()
    return numbers, total / count


def test_the_compared_samples_exercise_training() -> None:
    """Catches samples without learning, masks or clipping, with which all layouts would agree."""
    task = Case(Layout()).task
    losses, norms = zip(*_plainly(task, 6)[0], strict=True)
    empty = STEPS.index(7)
    assert losses[empty] == norms[empty] == 0, "step 7 has no valid token"
    assert all(math.isfinite(n) and n > 0.1 for s, n in enumerate(norms) if s != empty)
    assert any(n > MAX_NORM for n in norms)
    assert any(0 < n < MAX_NORM for n in norms)
    labels = [torch.cat([task.batch(1, m).labels for m in range(r, 6, 2)]) for r in (0, 1)]
    valid = [int((of_rank != IGNORED).sum()) for of_rank in labels]
    assert valid[0] > 0, valid
    assert valid[1] == 0, "the second of two data ranks has not one valid token in step 1"
    lengths = [tuple(task.batch(s, 0).cu_seqlens.diff().tolist()) for s in STEPS]
    assert len(set(lengths)) == len(STEPS)
    pairs = {frozenset(pair) for keys in SETS for pair in itertools.combinations(keys, 2)}
    shown = {(case.layout.mode, key) for case in CASES for key in case.saving}
    assert {(mode, "norms again") for mode in Mode} <= shown
    of_checkpoint = {name for name, keys in KEYS.items() if "checkpoint" in keys}
    for pair in map(frozenset, itertools.combinations(KEYS, 2)):
        assert pair in pairs or pair <= of_checkpoint or "inputs of segments" in pair, pair


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_trains_as_plain_torch(world: int) -> None:
    """Catches a sum that is wrong, missing or doubled in a layout, from the first step on."""
    assert_as_plain_torch(cases_of(world), OPTIMIZER, STEPS)


def assert_as_plain_torch(
    cases: list[Case], optimizer: OptimizerConfig, steps: tuple[int, ...]
) -> None:
    """Train cases with one number of ranks; compare losses, norms and an evaluation with plain
    torch.
    """
    for model in {case.model for case in cases}:
        language_model(model, "float64")  # traced once, for all ranks
    of_ranks = run_ranks(
        cases[0].layout.world, _train_all, cases, optimizer, steps, timeout_seconds=380
    )
    assert all(numbers == of_ranks[0] for numbers in of_ranks), "ranks tell different numbers"
    lines, worst = [], 0.0
    for case, (numbers, evaluated) in zip(cases, of_ranks[0], strict=True):
        expected, plainly_evaluated = _plainly(
            case.task, case.layout.global_batch, optimizer, steps
        )
        loss, norm = (
            largest_difference([n[i] for n in numbers], [n[i] for n in expected]) for i in (0, 1)
        )
        evaluation = largest_difference([evaluated], [plainly_evaluated])
        worst = max(worst, loss, norm, evaluation)
        lines.append(
            f"{case.layout}  loss {loss:.1e}  grad norm {norm:.1e}  evaluation {evaluation:.1e}"
            f"  {', '.join(case.saving)}"
        )
    table = "\n".join([f"\n{len(steps)} steps, largest relative difference to plain torch", *lines])
    print(table)
    assert worst < TOLERANCE, table


REFUSED = [
    *(
        (Layout(tensor=t, weight=w, data=d), GRID, f"parallel.weight.size={w} must divide")
        for t, w, d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2))
        if t * d % w
    ),
    *(
        (Layout(mode=mode, tensor=t), KV_3, f"parallel.tensor.size={t} must divide model.n")
        for mode, t in itertools.product(FEATURES, (2, 4))
    ),
    (Layout(tensor=2, data=2, zero1=3), GRID, "parallel.zero1.size=3 must divide"),
    (Layout(mode=Mode.MTP, tensor=2, data=2, zero1=4), GRID, "parallel.zero1.size=4 must div"),
]


@pytest.mark.parametrize(("layout", "model", "fault"), REFUSED, ids=str)
def test_a_layout_that_does_not_fit_is_refused(
    layout: Layout, model: ModelConfig, fault: str
) -> None:
    """Catches a layout missing in the table although no check refuses it."""
    with pytest.raises(ValueError, match=fault):
        _check(layout, model)


def test_the_compared_layouts_are_not_refused() -> None:
    """Catches a check that refuses a working layout, and a pair of keys excluded in one place
    only.
    """
    for case in CASES:
        _check(case.layout, case.model)
    with pytest.raises(ValueError, match=r"model\."):
        replace(GRID, **KEYS["attention kept"], checkpoint_segment=2)


def _check(layout: Layout, model: ModelConfig) -> None:
    model.check_layout(layout.parallel, SEQ_LEN)
    layout.topology()
