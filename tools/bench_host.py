"""Compare the host time of a layer in every mode with plain torch, alone and under `fully_shard`.

    python tools/bench_host.py --rounds 30

Tensors are so small that the time is that of Python and of the dispatch of torch's ops. This
process is one of two ranks. The other one does not exist: torch's fake process group completes a
collective at once, on the code path that NCCL takes. The time of a layer is the processor time of
the main thread in a model of 10 layers, minus that in a model of 2 layers, divided by 8. Forward
and backward are those of the trainer's step; backward ends when the last gradient is delivered. As
in the trainer, Python's garbage is collected only between steps. Models take turns.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_world1 import Plain, PlainBlock
from table_parser import table_parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isp.core.attention.mask import AttentionMask
from isp.core.comm import Mesh, streams
from isp.core.mesh import Mode
from isp.core.mesh.config import ParallelConfig, TensorConfig, WeightConfig
from isp.core.mesh.topology import Topology
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from isp.models.build import build_model
from isp.step.train_step import TrainStep
from isp.train.garbage import collected_every
from model.build import language_model
from model.config import ModelConfig

COLUMNS = """\
forward, backward   ms of a layer: the least of all rounds, which other programs disturb least
beyond              forward + backward minus those of plain torch, of the least times
median              the same of the median times
collectives, ops    collectives and torch ops that a layer launches; ops include the collectives
calls, own_calls    calls of Python functions, and how many of these are functions of ISP
alive               blocks of Python's memory that the forward of a layer keeps for its backward
"""
TOKENS = 16
PLAIN, SHARDED = "plain torch", "fully_shard over 2"
RECOMPUTED, STAY = ", recomputed", ", weights stay"
SHORT, LONG = 2, 10
"""Layers of the two models whose difference is shown."""
OWN = tuple(str(Path(__file__).parents[1] / folder) for folder in ("isp", "model"))
"""Folders whose functions are counted as ISP's."""
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=SHORT,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
)


class StepHalves(NamedTuple):
    """A training step without its update, in two halves that are timed one after the other."""

    forward: Callable[[], Tensor]
    """Returns the loss. Of several micro-batches, all but the last run backward here as well."""
    backward: Callable[[Tensor], None]
    """Runs backward of the last micro-batch, until its gradients are delivered."""
    before: Callable[[], None]
    """Prepares a step; is not timed."""


@dataclass(frozen=True)
class Row:
    """A line of the table, and how its model is built."""

    name: str
    parallel: ParallelConfig | None = None
    """The layout of ISP; None: plain torch, or `fully_shard`."""
    recompute: bool = False
    """Whether backward recomputes each block."""
    metered: bool = False
    """Whether the communication log records transfers, as in steps for which the trainer logs."""
    micro_num: int = 1
    """Micro-batches of a step; the table shows the time of one."""

    def build(self, layers: int) -> StepHalves:
        """Build the model with `layers` layers, and its step."""
        config = replace(CONFIG, num_layers=layers, checkpoint=float(self.recompute))
        if self.parallel is not None:
            return _ours(config, self)
        return _plain(config, self.name)


def rows() -> list[Row]:
    """Return the lines of the table: plain torch first, most lines without and with recompute."""
    plain = [Row(PLAIN), Row(SHARDED)]
    sizes = ((1, 1), (1, 2), (2, 2))
    isp = {f"isp, tensor {t}, weight {w}": _parallel(Mode.ISP, t, w) for t, w in sizes}
    others = {f"{mode}, tensor 2": _parallel(mode, 2, 1) for mode in (Mode.MTP, Mode.MSP, Mode.FSP)}
    ours = [Row(name, parallel) for name, parallel in {**isp, **others}.items()]
    every = [*plain, *ours]
    recomputed = [replace(r, name=r.name + RECOMPUTED, recompute=True) for r in every]
    _, two, both, *_ = ours
    metered = replace(both, name=f"{both.name}, metered", metered=True)
    kept = _parallel(Mode.ISP, 1, 2, reshard_after_forward=False)
    stay = replace(two, name=two.name + STAY, parallel=kept)
    four = replace(stay, name=f"{stay.name}, 4 micro-batches", micro_num=4)
    return [*every, metered, Row(SHARDED + STAY), stay, four, *recomputed]


def _parallel(mode: Mode, tensor: int, weight: int, **options: bool) -> ParallelConfig:
    return ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode), weight=WeightConfig(size=weight, **options)
    )


class _Recomputed(PlainBlock):
    """A plain block that is recomputed in backward by torch's `checkpoint`."""

    def forward(self, *args: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False)


def _plain(config: ModelConfig, name: str) -> StepHalves:
    """Build the step of plain torch, under `fully_shard` if `name` says so."""
    model = Plain(config)
    if config.checkpoint:
        model.layers = nn.ModuleList(_Recomputed(config) for _ in range(config.num_layers))
    if name.startswith(SHARDED):
        mesh = init_device_mesh("cpu", (2,))
        stays = {"reshard_after_forward": False} if name.endswith(STAY) else {}
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, **stays)
    batch = _batch()

    def forward() -> Tensor:
        logits = model(batch.tokens, batch.positions)
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    return StepHalves(forward, Tensor.backward, model.zero_grad)


def _ours(config: ModelConfig, row: Row) -> StepHalves:
    """Build the step of ISP as rank 0 of two, in the layout of `row`."""
    assert row.parallel is not None
    mesh = Mesh(Topology.create(2, row.parallel), 0)
    device = torch.device("cpu")
    model = language_model(config, "float32")
    built = build_model(model, row.parallel, mesh, seed=0, device=device, dtype=torch.float32)
    gradients = MainGradients(built.trained, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, OptimizerConfig())
    batches = [_batch() for _ in range(row.micro_num)]
    step = TrainStep(built, gradients, optimizer, mesh, micro_num=row.micro_num)
    work = step.start(batches)

    def before() -> None:
        nonlocal work
        if row.metered:
            mesh.log.collect()
        work = step.start(batches)

    def forward() -> Tensor:
        for number in range(row.micro_num - 1):
            step.backward(step.forward(work, number), last=False)
        return step.forward(work, row.micro_num - 1)

    def backward(loss: Tensor) -> None:
        step.backward(loss, last=True)
        step.hook.after_step()

    return StepHalves(forward, backward, before)


def _batch() -> MicroBatch:
    tokens = torch.arange(TOKENS).unsqueeze(0)
    return MicroBatch(tokens, tokens, tokens, None)


class _Attention:
    """Attention in one call of torch, as in the plain model.

    ISP's own attention on CPU would cost the host more than its attention on a GPU does.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


@contextmanager
def as_on_device() -> Iterator[None]:
    """Let this process be rank 0 of two, without rank 1, on the code path of NCCL.

    Collectives of the fake process group do nothing and return at once.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with (
        # As if the device had streams: a channel then waits as it does for NCCL, not for gloo.
        mock.patch.object(streams, "serve", return_value=True),
        mock.patch.object(Mesh, "open_host", lambda mesh, axis, name: mesh[axis]),
        mock.patch("isp.core.attention.kinds.make_local_attention", return_value=_Attention()),
    ):
        try:
            yield
        finally:
            dist.destroy_process_group()


# -- counts and times ------------------------------------------------------------------------


class Times(NamedTuple):
    """Processor time of the main thread in a step or a layer, in seconds."""

    forward: float
    backward: float


def timed(step: StepHalves) -> Times:
    """Make a step and return its times."""
    step.before()
    begin = time.thread_time()
    loss = step.forward()
    middle = time.thread_time()
    step.backward(loss)
    return Times(middle - begin, time.thread_time() - middle)


class Counts(NamedTuple):
    """Number of operations of each kind in a step, or of one layer in a step."""

    collectives: float
    """Number of collectives launched."""
    ops: float
    """Number of torch ops that reach the dispatcher, collectives included."""
    calls: float
    """Number of calls of Python functions."""
    own_calls: float
    """Number of calls of Python functions that are part of ISP."""
    alive: float
    """Number of blocks of memory of Python's allocator that forward keeps for backward."""


class _Ops(TorchDispatchMode):
    """Counts torch ops, and the collectives among them."""

    count = collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def counted(step: StepHalves) -> Counts:
    """Return the counts of a step that has run once before.

    The first run allocates buffers and is not counted.
    """
    # One run for each kind of count: a dispatch mode and a profile function would add calls.
    step.before()
    step.backward(step.forward())
    step.before()
    gc.collect()
    blocks = sys.getallocatedblocks()
    loss = step.forward()
    alive = sys.getallocatedblocks() - blocks
    step.backward(loss)
    step.before()
    with _Ops() as ops:
        step.backward(step.forward())
    step.before()
    calls = own_calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, own_calls
        if event == "call":
            calls += 1
            own_calls += frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(note)
    try:
        step.backward(step.forward())
    finally:
        sys.setprofile(None)
    return Counts(ops.collectives, ops.count, calls, own_calls, alive)


def of_a_layer(
    short: StepHalves, long: StepHalves, between: int = LONG - SHORT, number: int = 1
) -> Counts:
    """Return the counts of one layer in one of `number` micro-batches.

    The model of `long` has `between` layers more than that of `short`.
    """
    layers = between * number
    counts = zip(counted(short), counted(long), strict=True)
    found = Counts(*((b - a) / layers for a, b in counts))
    # When forward ends, only the last micro-batch's blocks are alive: do not divide by `number`.
    return found._replace(alive=number * found.alive)


def measure(rounds: int, every: list[Row]) -> None:
    """Measure the models of the rows `every` and print the table; the first row is plain torch."""
    print(COLUMNS)
    models = {row.name: (row.build(SHORT), row.build(LONG)) for row in every}
    heads = ["forward", "backward", "beyond", "median", *Counts._fields]
    print(f"| | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    counts = {row.name: of_a_layer(*models[row.name], number=row.micro_num) for row in every}
    taken: dict[str, list[tuple[Times, Times]]] = {name: [] for name in models}
    with collected_every(1) as collect_garbage:
        for index in range(rounds):
            names = list(models)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                short, long = models[name]
                taken[name].append((timed(short), timed(long)))
            collect_garbage(index)
    least = {row.name: _a_layer(taken[row.name], min, row.micro_num) for row in every}
    median = {
        row.name: _a_layer(taken[row.name], statistics.median, row.micro_num) for row in every
    }
    for row in every:
        plain = PLAIN + RECOMPUTED if row.recompute else PLAIN
        beyond = (1e3 * (sum(found[row.name]) - sum(found[plain])) for found in (least, median))
        times = [f"{number:.2f}" for number in (*(1e3 * t for t in least[row.name]), *beyond)]
        numbers = [f"{number:.0f}" for number in counts[row.name]]
        print(f"| {' | '.join([row.name, *times, *numbers])} |", flush=True)


def _a_layer(
    taken: list[tuple[Times, Times]], choose: Callable[[Iterable[float]], float], number: int
) -> Times:
    """Return the times of one layer in one of `number` micro-batches.

    `taken` has the times of the short and the long model's step in each round; `choose`, such as
    `min`, picks the time of each over the rounds.
    """
    short, long = (
        Times(choose(t.forward for t in of), choose(t.backward for t in of))
        for of in zip(*taken, strict=True)
    )
    layers = number * (LONG - SHORT)
    return Times(*((b - a) / layers for a, b in zip(short, long, strict=True)))


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each row")
    parser.add_argument(
        "--quick", action="store_true", help="only the first four rows: plain, fully_shard, isp"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A fake collective leaves in its output what the memory held: denormal numbers would be slow.
    torch.set_flush_denormal(True)
    with as_on_device():
        measure(options.rounds, rows()[:4] if options.quick else rows())


if __name__ == "__main__":
    main()
