"""Host time a layer: ours in every mode beside plain torch's, alone and under `fully_shard`.

    python tools/bench_host.py --rounds 30

Tensors are so small that what is measured is Python and the dispatch of torch's ops. Two ranks
share weights or sequence, of which this process is one; their wire is torch's fake process group,
which is there at once, behind the path that NCCL takes. Times are processor time of the main
thread, of a long model less a short one, by the layers between them; forward and backward are those
of the trainer's step, the latter up to the last delivered gradient; as there, Python's garbage is
collected between steps alone. Models take turns. Of all rounds the least is shown, which other
programs disturb least, and of what lies beyond plain torch the median, too.

Beside the times stand counts of the same layers: collectives, torch ops, calls of Python functions,
those of ours among them, and blocks of Python's memory that forward leaves for backward.
"""

from __future__ import annotations

import argparse
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

TOKENS = 16
PLAIN, SHARDED = "plain torch", "fully_shard over 2"
RECOMPUTED, STAY = ", recomputed", ", weights stay"
SHORT, LONG = 2, 10
"""Layers of the two models, whose difference is shown."""
OWN = tuple(str(Path(__file__).parents[1] / folder) for folder in ("isp", "model"))
"""Folders of this project's functions."""
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=SHORT,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
)


class Pass(NamedTuple):
    """A step in two halves: forward gives a loss, backward what its gradients need.

    All micro-batches but the last are in the first half.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    before: Callable[[], None]
    """What a step has to do beside these."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    parallel: ParallelConfig | None = None
    """None: plain torch, or `fully_shard`."""
    recompute: bool = False
    metered: bool = False
    """Whether the log keeps what is launched, as for the lines that the trainer writes."""
    micro_num: int = 1
    """Micro-batches of a step; what is shown is of one."""

    def build(self, layers: int) -> Pass:
        config = replace(CONFIG, num_layers=layers, checkpoint=float(self.recompute))
        if self.parallel is not None:
            return _ours(config, self)
        return _plain(config, self.name)


def rows() -> list[Row]:
    """Plain torch first; all with and without recompute."""
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
    def forward(self, *args: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False)


def _plain(config: ModelConfig, name: str) -> Pass:
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

    return Pass(forward, Tensor.backward, model.zero_grad)


def _ours(config: ModelConfig, row: Row) -> Pass:
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

    return Pass(forward, backward, before)


def _batch() -> MicroBatch:
    tokens = torch.arange(TOKENS).unsqueeze(0)
    return MicroBatch(tokens, tokens, tokens, None)


class _Attention:
    """One call, as in plain torch: that on CPU gives the host more work than one on a GPU."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


@contextmanager
def as_on_device() -> Iterator[None]:
    """One of two ranks without the other, on the path of NCCL."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with (
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
    """Of one step, in seconds of the main thread's processor time."""

    forward: float
    backward: float


def timed(step: Pass) -> Times:
    """The times of a step."""
    step.before()
    begin = time.thread_time()
    loss = step.forward()
    middle = time.thread_time()
    step.backward(loss)
    return Times(middle - begin, time.thread_time() - middle)


class Counts(NamedTuple):
    """Of one step, or of one layer of it."""

    collectives: float
    ops: float
    """Of torch, as the dispatcher counts them, collectives among them."""
    calls: float
    """Of Python functions."""
    own_calls: float
    """Those of this project."""
    alive: float
    """Blocks of Python's memory that forward has left for backward."""


class _Ops(TorchDispatchMode):
    count = collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def counted(step: Pass) -> Counts:
    """The counts of a step: the same each time, but for the first."""
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


def of_a_layer(short: Pass, long: Pass, between: int = LONG - SHORT, number: int = 1) -> Counts:
    """The counts of a layer and micro-batch; `long` has so many layers more than `short`."""
    layers = between * number
    counts = zip(counted(short), counted(long), strict=True)
    found = Counts(*((b - a) / layers for a, b in counts))
    return found._replace(alive=number * found.alive)  # the last micro-batch's alone are there


def measure(rounds: int, every: list[Row]) -> None:
    """Print the table of these rows, plain torch first."""
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
    """Of the steps of a short and a long model, each of `number` micro-batches, the chosen times.

    By the layers between them and the micro-batches.
    """
    short, long = (
        Times(choose(t.forward for t in of), choose(t.backward for t in of))
        for of in zip(*taken, strict=True)
    )
    layers = number * (LONG - SHORT)
    return Times(*((b - a) / layers for a, b in zip(short, long, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="plain torch and isp by weight alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what nobody has sent is what memory held, and could be slow
    with as_on_device():
        measure(options.rounds, rows()[:4] if options.quick else rows())


if __name__ == "__main__":
    main()
