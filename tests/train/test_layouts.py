"""Every layout trains as one process does, and one process as plain torch: in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from isp.data.dataset import IGNORE_INDEX
from isp.parallel import Mode, WeightConfig
from model.config import ModelConfig
from tests.model.plain import PlainDecoder, train_plainly
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

STEPS = (0, 1, 7, 8)
"""In step 7 nobody has a label."""
TOLERANCE = 1e-9
"""Relative. Sums in another order differ by about 1e-15, which steps of AdamW carry on."""

GRID_TASK = "grid"
TASKS = {
    # 50 rows of vocabulary are 13, 13, 13 and 11 on four ranks. One block, because each collective
    # costs milliseconds on gloo; the other tasks have two.
    GRID_TASK: Task(
        model=ModelConfig(
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
    ),
    "tied, window": Task(
        model=ModelConfig(
            vocab_size=49,
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            intermediate_size=40,
            sliding_window=5,
            tie_embeddings=True,
            checkpoint=0.5,
            init_std=0.3,
        )
    ),
    "3 kv heads": Task(
        model=ModelConfig(
            vocab_size=50,
            hidden_size=24,
            num_layers=2,
            num_heads=6,
            num_kv_heads=3,
            intermediate_size=40,
            init_std=0.3,
        )
    ),
    "2 whole rows": Task(
        model=ModelConfig(
            vocab_size=50,
            hidden_size=16,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            intermediate_size=40,
            qkv_bias=True,
            checkpoint=1.0,
            checkpoint_keeps_attention=True,
            init_std=0.3,
        ),
        packed=False,
        micro_bsz=2,
    ),
}
FEATURE_MODES = (Mode.MTP, Mode.MSP, Mode.FSP)
"""The modes that split features over the tensor group."""


def _grid() -> list[tuple[Layout, str]]:
    """Modes x tensor 1, 2, 4 x weight 1, 2, 4 (isp) x data 1, 2, where they fit.

    One data rank has three micro-batches, two have one; `_zero1` has three on two. Weight 4 on
    tensor 1 needs data 4.
    """
    features = itertools.product(FEATURE_MODES, (1, 2, 4), (1,), (1, 2))
    isp = itertools.product((Mode.ISP,), (1, 2, 4), (1, 2, 4), (1, 2))
    layouts = [
        Layout(mode=mode, tensor=tensor, weight=weight, data=data, micro=3 if data == 1 else 1)
        for mode, tensor, weight, data in (*features, *isp)
        if tensor * data % weight == 0
    ]
    layouts += [Layout(tensor=1, weight=4, data=4, micro=micro) for micro in (1, 3)]
    return [(layout, GRID_TASK) for layout in layouts]


def _zero1() -> list[tuple[Layout, str]]:
    """The sizes of zero1 that are neither all replicas (the grid's) nor the only one."""
    isp = [
        Layout(tensor=2, weight=1, data=2, micro=3, zero1=1),
        Layout(tensor=2, weight=1, data=2, zero1=2),
        Layout(tensor=2, weight=2, data=2, micro=3, zero1=1),
        Layout(tensor=4, weight=2, data=2, micro=3, zero1=2),
    ]
    others = [
        Layout(mode=Mode.MTP, data=2, micro=3, zero1=1),
        Layout(mode=Mode.MSP, tensor=2, data=2, micro=3, zero1=1),
        Layout(mode=Mode.FSP, data=4, zero1=2),
    ]
    return [(layout, GRID_TASK) for layout in isp + others]


def _options() -> list[tuple[Layout, str]]:
    """The other tasks, each in a layout or two of every mode that they fit."""
    found = []
    for task in ("tied, window", "2 whole rows"):
        found += [
            (Layout(mode=Mode.MTP, tensor=4), task),
            (Layout(mode=Mode.MSP, tensor=2), task),
            (Layout(mode=Mode.FSP, tensor=2, data=2), task),
            (Layout(tensor=2, weight=4, data=2), task),
            (Layout(weight=2, data=2), task),
            (Layout(tensor=4, weight=2), task),
        ]
    sizes = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    return [*found, *((Layout(tensor=t, weight=w), "3 kv heads") for t, w in sizes)]


def _ends() -> list[tuple[Layout, str]]:
    """Other ways of splitting embedding and head in isp mode."""
    ends = WeightConfig(embed_split_hidden=True, vocab_parallel_loss=True, own_reduce_group=True)
    sizes = ((2, 2, 1), (2, 4, 2))
    return [
        (Layout(tensor=t, weight=w, data=d, options=ends), name)
        for t, w, d in sizes
        for name in (GRID_TASK, "2 whole rows")
    ]


CASES = [*_grid(), *_zero1(), *_options(), *_ends()]


def _train_all(rank: int, cases: list[tuple[Layout, str]]) -> list[Numbers]:
    meshes, found = Meshes(rank), []
    for layout, name in cases:
        try:
            run = make_run(meshes.of(layout), layout, TASKS[name])
            found.append(run.numbers(STEPS))
            run.close()
        except Exception as error:
            raise AssertionError(f"{layout} {name}: {error}") from error
    return found


PLAIN = {(name, 3) for name in TASKS}
"""Tasks and global batches that plain torch is trained on."""


@pytest.fixture(scope="module")
def one_process() -> dict[tuple[str, int], Numbers]:
    """What one process gives on each task and global batch."""
    keys = sorted({(name, layout.global_batch) for layout, name in CASES} | PLAIN)
    cases = [(Layout(mode=Mode.MTP, micro=micro), name) for name, micro in keys]
    return dict(zip(keys, run_ranks(1, _train_all, cases)[0], strict=True))


def _train_plainly(_: int, name: str, micro: int) -> Numbers:
    task = TASKS[name]
    layout = Layout(mode=Mode.MTP)
    initial = make_run(Meshes(0).of(layout), layout, task).weights()
    weights = {name: torch.from_numpy(array) for name, array in initial.items()}
    model = PlainDecoder(task.model).double().load_weights(weights)
    steps = (
        (learning_rate(step), [task.batch(step, place) for place in range(micro)]) for step in STEPS
    )
    return train_plainly(model, steps, OPTIMIZER, max_norm=MAX_NORM)


@pytest.mark.parametrize(("name", "micro"), sorted(PLAIN))
def test_one_process_trains_as_plain_torch(name, micro, one_process):
    """Catches a model, loss, mask, clipping or update that is the same mistake in every layout."""
    expected = run_ranks(1, _train_plainly, name, micro)[0]
    found = one_process[name, micro]
    for i, what in enumerate(("loss", "grad norm")):
        difference = largest_difference([n[i] for n in found], [n[i] for n in expected])
        assert difference < TOLERANCE, (what, found, expected)


def test_the_runs_compared_are_worth_comparing(one_process):
    """Catches samples on which nothing is learned, masked or clipped, so that all would agree."""
    losses, norms = zip(*one_process[GRID_TASK, 6], strict=True)
    empty = STEPS.index(7)
    assert losses[empty] == norms[empty] == 0, "step 7 has no valid token"
    assert all(math.isfinite(n) and n > 0.1 for s, n in enumerate(norms) if s != empty)
    assert any(n > MAX_NORM for n in norms)
    assert any(0 < n < MAX_NORM for n in norms)
    task = TASKS[GRID_TASK]
    labels = [torch.cat([task.batch(1, m).labels for m in range(r, 6, 2)]) for r in (0, 1)]
    valid = [int((of_rank != IGNORE_INDEX).sum()) for of_rank in labels]
    assert valid[0] > 0, valid
    assert valid[1] == 0, "the second of two data ranks has not one valid token in step 1"
    lengths = [tuple(task.batch(s, 0).cu_seqlens.diff().tolist()) for s in STEPS]
    assert len(set(lengths)) == len(STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", sorted({layout.world for layout, _ in CASES}))
def test_every_layout_trains_as_one_process(world, one_process):
    """Catches a sum that is wrong, missing or doubled in some layout, from the first step on."""
    cases = [(layout, name) for layout, name in CASES if layout.world == world]
    of_ranks = run_ranks(world, _train_all, cases, timeout_seconds=380)
    assert all(numbers == of_ranks[0] for numbers in of_ranks), "ranks tell different numbers"
    lines, worst = [], 0.0
    for (layout, name), numbers in zip(cases, of_ranks[0], strict=True):
        expected = one_process[name, layout.global_batch]
        loss, norm = (
            largest_difference([n[i] for n in numbers], [n[i] for n in expected]) for i in (0, 1)
        )
        lines.append(f"{layout}  {name:<12}  loss {loss:.1e}  grad norm {norm:.1e}")
        worst = max(worst, loss, norm)
    table = "\n".join([f"\n{len(STEPS)} steps, largest relative difference to one process", *lines])
    print(table)
    assert worst < TOLERANCE, table


REFUSED = [
    *(
        (Layout(tensor=t, weight=w, data=d), GRID_TASK, f"parallel.weight.size={w} must divide")
        for t, w, d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2))
        if t * d % w
    ),
    *(
        (Layout(mode=mode, tensor=t), "3 kv heads", f"parallel.tensor.size={t} must divide model.n")
        for mode, t in itertools.product(FEATURE_MODES, (2, 4))
    ),
    (Layout(tensor=2, data=2, zero1=3), GRID_TASK, "parallel.zero1.size=3 must divide"),
    (Layout(mode=Mode.MTP, tensor=2, data=2, zero1=4), GRID_TASK, "parallel.zero1.size=4 must div"),
]


@pytest.mark.parametrize(("layout", "name", "fault"), REFUSED, ids=str)
def test_a_layout_that_does_not_fit_is_refused(layout, name, fault):
    """Catches a layout that is left out of the table without having been refused."""
    with pytest.raises(ValueError, match=fault):
        _check(layout, name)


def test_the_layouts_compared_are_not_refused():
    """Catches a check that refuses what works."""
    for layout, name in CASES:
        _check(layout, name)


def _check(layout: Layout, name: str) -> None:
    task = TASKS[name]
    task.model.check_layout(layout.parallel, SEQ_LEN)
    layout.topology()
