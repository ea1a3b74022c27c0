"""Small runs in any layout with the same samples, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from isp.core.comm import Mesh
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import (
    Axis,
    ContextExchange,
    DevicePlacementConfig,
    Mode,
    ParallelConfig,
    PipelineConfig,
    PipelineSchedule,
    Sequence2DConfig,
    TensorConfig,
    Topology,
    WeightConfig,
    Zero1Config,
)
from isp.core.mesh.config import ExpertConfig
from isp.core.micro_batch import MicroBatch
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.build import build_model
from isp.step.train_step import TrainStep
from model.build import language_model
from model.config import ModelConfig

__all__ = [
    "MAX_NORM",
    "OPTIMIZER",
    "SEED",
    "SEQ_LEN",
    "Layout",
    "Meshes",
    "Numbers",
    "Run",
    "Task",
    "Weights",
    "largest_difference",
    "learning_rate",
    "make_run",
]

SEED = 5
SEQ_LEN = 32
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1)
MAX_NORM = 3.0
"""Some steps of these runs have a larger gradient and some a smaller one."""
CPU = torch.device("cpu")

Numbers = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

Weights = dict[str, npt.NDArray[np.float64]]
"""Weights by name, as arrays, because a rank's tensors cannot be read after it has ended."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and the kind of rows it trains on."""

    model: ModelConfig
    packed: bool = True
    micro_bsz: int = 1
    """Rows of a micro-batch that is not packed."""

    def batch(self, step: int, place: int) -> MicroBatch:
        """Return micro-batch number `place` of the global batch of `step`.

        Documents have unequal lengths and masks. Every third step no odd place has a label: with
        two data ranks, one of them has no label at all. In step 7 no rank has.
        """
        random = torch.Generator().manual_seed(1000 * step + place)
        shape = (1 if self.packed else self.micro_bsz, SEQ_LEN)
        tokens = torch.randint(self.model.vocab_size, shape, generator=random)
        labels = torch.randint(self.model.vocab_size, shape, generator=random)
        labels[torch.rand(shape, generator=random) < 0.2] = IGNORED
        labels[:, : (5 * place + step) % 20] = IGNORED
        if step == 7 or (step % 3 == 1 and place % 2 == 1):
            labels[:] = IGNORED
        if not self.packed:
            return MicroBatch(tokens, labels, torch.arange(SEQ_LEN).expand(shape).clone(), None)
        cuts = torch.randperm(SEQ_LEN - 1, generator=random)[: (step + place) % 5] + 1
        bounds = [0, *sorted(cuts.tolist()), SEQ_LEN]
        labels[0, torch.tensor(bounds[1:]) - 1] = IGNORED
        pieces = [torch.arange(b - a) for a, b in pairwise(bounds)]
        return MicroBatch(
            tokens, labels, torch.cat(pieces)[None], torch.tensor(bounds, dtype=torch.int32)
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Split of a run; each of `data` data ranks has `micro` micro-batches."""

    mode: Mode = Mode.ISP
    tensor: int = 1
    weight: int = 1
    data: int = 1
    pipeline: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: int = 1
    micro: int = 1
    zero1: int = -1
    context: int = 1
    """Context ranks, in isp mode."""
    head_first: bool = True
    exchange: ContextExchange = ContextExchange.GATHER
    expert: int = 1
    """Number of ranks that share the experts."""
    options: WeightConfig = field(default_factory=WeightConfig)
    """Other keys of `parallel.weight`; `weight` gives the size."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tensor * self.data * self.pipeline

    @property
    def global_batch(self) -> int:
        """The micro-batches of all data ranks in a step."""
        return self.data * self.micro

    @property
    def parallel(self) -> ParallelConfig:
        """The section `parallel` of the configuration."""
        return ParallelConfig(
            tensor=TensorConfig(size=self.tensor, mode=self.mode),
            weight=replace(self.options, size=self.weight),
            pipeline=PipelineConfig(
                size=self.pipeline, schedule=self.schedule, num_chunks=self.chunks
            ),
            zero1=Zero1Config(size=self.zero1),
            expert=ExpertConfig(size=self.expert),
            sequence_2D=Sequence2DConfig(
                enable=self.context > 1,
                context_size=self.context,
                exchange=self.exchange,
                device_placement_strategy=DevicePlacementConfig(head_first=self.head_first),
            ),
        )

    def topology(self) -> Topology:
        """Return the groups of the layout.

        Raises ValueError if the sizes do not fit.
        """
        return Topology.create(self.world, self.parallel)

    def __str__(self) -> str:
        sizes = f"tensor {self.tensor}  weight {self.weight}  data {self.data}  micro {self.micro}"
        plain = asdict(WeightConfig())
        changed = [f"  {k}={v}" for k, v in asdict(self.options).items() if v != plain[k]]
        if self.context > 1:
            first = "" if self.head_first else " first"
            sizes += f"  context {self.context}{first} {self.exchange}"
        if self.expert > 1:
            sizes += f"  expert {self.expert}"
        if self.pipeline > 1:
            sizes += f"  pipeline {self.pipeline}"
        if self.chunks > 1:
            sizes += f"  {self.schedule} {self.chunks}"
        return f"{self.mode:<4} {sizes}  zero1 {self.zero1:>2}{''.join(changed)}"


@dataclass(frozen=True)
class Run:
    """The objects of a trainer on one rank."""

    step: TrainStep
    parameters: list[ShardedParameter]
    optimizer: Zero1Optimizer
    layout: Layout
    task: Task

    def numbers(self, steps: Iterable[int]) -> Numbers:
        """Train `steps`; return loss and gradient norm of each."""
        data, parts = self.step.mesh[Axis.DATA], self.layout.global_batch
        numbers = []
        for step in steps:
            places = range(data.rank, parts, data.size)  # see the note [Global batch]
            device = self.parameters[0].parameter.device
            batches = [self.task.batch(step, place).to(device) for place in places]
            outcome = self.step(batches, learning_rate(step))
            # 0 where no token has a label: NaN does not equal itself
            loss = outcome.loss if outcome.valid_tokens else 0.0
            numbers.append((loss, outcome.grad_norm))
        return numbers

    def weights(self) -> Weights:
        """Return copies of this rank's shards by name."""
        for item in self.parameters:
            self.optimizer.published(item.parameter)
        shards = {item.name: item.parameter.detach().double() for item in self.parameters}
        return {name: shard.cpu().numpy().copy() for name, shard in shards.items()}

    def close(self) -> None:
        """Wait for transfers in flight, so that another run can use the same groups."""
        self.weights()
        self.step.hook.after_step()


def learning_rate(step: int) -> float:
    """Return a rate that changes with each step, so that an update with another step's rate
    shows.
    """
    return OPTIMIZER.lr * (1 + step % 3) / 3


def make_run(
    mesh: Mesh,
    layout: Layout,
    task: Task,
    *,
    dtype: torch.dtype = torch.float64,
    config: OptimizerConfig = OPTIMIZER,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    device: torch.device = CPU,
) -> Run:
    """Return a run on this rank."""
    model = task.model
    if isinstance(model, ModelConfig):  # otherwise a model that the test has built
        model = language_model(model, str(dtype).removeprefix("torch."))
    built = build_model(model, layout.parallel, mesh, seed=SEED, device=device, dtype=dtype)
    parameters = list(built.trained)
    gradients = MainGradients(parameters, mesh, rows_of=mesh[Axis.ZERO1])
    optimizer = Zero1Optimizer(
        gradients,
        mesh,
        config,
        max_norm=MAX_NORM,
        bucket_bytes=bucket_bytes,
        names=built.model.trained_names,
        counted_elsewhere=built.counted_elsewhere,
    )
    step = TrainStep(built, gradients, optimizer, mesh, micro_num=layout.micro)
    return Run(step, parameters, optimizer, layout, task)


class Meshes:
    """The mesh of each topology on this rank, built once, since connecting groups takes long."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[Topology, Mesh] = {}

    def of(self, layout: Layout) -> Mesh:
        """Return the mesh of `layout`; all ranks must request the same ones in the same order."""
        topology = layout.topology()
        if topology not in self._made:
            self._made[topology] = Mesh(topology, self._rank)
        return self._made[topology]


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two series; absolute where 0 is expected.

    NaN if one difference is NaN, which `max` would drop.
    """
    pairs = zip(found, expected, strict=True)
    return float(np.max([abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]))
