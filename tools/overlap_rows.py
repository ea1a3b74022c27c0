"""A training step of one model, run in different ways; for `bench_overlap`, `bench_fully_shard`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from paced import Paced
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isp.attention import CpuAttention, DistributedAttention, LocalAttention
from isp.comm import Channel, Mesh, Pending, TimedTransfer
from isp.comm.tag import Purpose, Tag
from isp.layers.factory import LayerFactory
from isp.layers.head import VocabParallelHead
from isp.layers.module import init_weights, named_parameters
from isp.optim import MainGradients
from isp.parallel import Axis, Mode, Topology
from isp.parallel.config import ParallelConfig, Prefetch, TensorConfig, WeightConfig
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.pool import MemoryPool
from isp.weights.trace import sequential_actions
from isp.weights.wp import EmbeddingWeightParallelCommunicator, LocalWeights, WPCommunicator
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = [
    "Compute",
    "Row",
    "StepResult",
    "compare",
    "compute_alone",
    "mesh_of",
    "ours",
    "theirs",
    "traffic",
]

CPU = torch.device("cpu")


class StepResult(NamedTuple):
    """What a step says of itself."""

    loss: Tensor
    forward_ended: float
    """In `time.perf_counter`."""


@dataclass(frozen=True)
class Row:
    """A contestant."""

    name: str
    step: Callable[[], StepResult]
    gradients: Callable[[], dict[str, Tensor]]
    """This rank's rows of each gradient of the last step, by the parameter's name."""
    pool: MemoryPool | None = None
    """What weights are gathered into."""


@dataclass
class Compute:
    """The work of a rank in a step: a model, tokens, and how long a matmul takes."""

    model: ModelConfig
    rows: int
    tokens: int
    paced_gflops: float = 0.0
    """Each matmul with a weight sleeps for as long as it would take at this speed on `paced_tokens`
    tokens, besides what it takes; 0: it does not."""
    paced_tokens: int = 0
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    attention: LocalAttention = field(default_factory=CpuAttention, repr=False)

    def decoder(
        self, mesh: Mesh, communicator: WPCommunicator, *, dtype: torch.dtype | None = None
    ) -> Decoder:
        """The model with the same weights in every contestant, of `dtype` if that is another."""
        layers = LayerFactory(
            mode=Mode.ISP,
            tensor=mesh[Axis.TENSOR],
            weight=mesh[Axis.WEIGHT],
            communicator=Paced(communicator, self.pause) if self.paced_gflops else communicator,
            device=self.device,
            dtype=dtype or self.dtype,
        )
        model = Decoder(self.model, layers, DistributedAttention(self.attention, Channel.solo()))
        init_weights(model, seed=1)
        return model

    def pause(self, layer: Any) -> float:
        """Seconds that a product with the weight of `layer` takes; a lookup takes none."""
        if isinstance(layer.communicator, EmbeddingWeightParallelCommunicator):
            return 0.0
        rows, columns = layer.layouts["weight"].global_shape
        if isinstance(layer, VocabParallelHead):  # three products in one use and one gradient
            rows = 3 * rows // 2
        return 2e-9 * rows * columns * self.paced_tokens / self.paced_gflops  # type: ignore[no-any-return]

    def forward_and_backward(self, model: nn.Module) -> StepResult:
        """A pass over this rank's rows; the loss is the mean over the tokens of all ranks."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (self.rows, self.tokens + 1)
        ids = torch.randint(self.model.vocab_size, shape, generator=generator).to(self.device)
        positions = torch.arange(self.tokens, device=self.device).expand(self.rows, -1)
        scale = 1 / (self.rows * self.tokens * dist.get_world_size())
        hidden = model(ids[:, :-1], positions, None)
        factor = torch.tensor(scale, device=self.device)
        loss = scale * model.loss(hidden, ids[:, 1:], factor)  # type: ignore[operator]
        forward_ended = time.perf_counter()
        loss.backward()
        return StepResult(loss.detach(), forward_ended)


def compare(alone: Row, rows: Sequence[Row], tolerance: float) -> None:
    """Every row computes the loss and the gradients of `alone`, within `tolerance` of their norms.

    Raises AssertionError.
    """
    expected = alone.step().loss
    dist.all_reduce(expected)
    wanted = alone.gradients()
    for row in rows:
        loss = row.step().loss
        dist.all_reduce(loss)
        assert (loss - expected).abs() <= tolerance * expected.abs(), (row.name, loss, expected)
        for name, grad in row.gradients().items():
            whole = wanted[name]
            if grad.shape != whole.shape:  # fully_shard cuts the norms' weights, too
                whole = whole.chunk(dist.get_world_size())[dist.get_rank()]
            off = (grad.float() - whole.float()).norm()
            assert off <= tolerance * whole.float().norm(), (row.name, name, off)


def mesh_of(world_size: int, rank: int, **options: Any) -> Mesh:
    """Weights split over all ranks, a sequence to each; of one rank, without any group."""
    parallel = ParallelConfig(tensor=TensorConfig(size=1), weight=WeightConfig(size=world_size))
    return Mesh(Topology.create(world_size, parallel), rank, **options)


def compute_alone(compute: Compute) -> Row:
    """The whole model on every rank, nothing travels."""
    model = compute.decoder(mesh_of(1, 0), LocalWeights())

    def step() -> StepResult:
        model.zero_grad()
        return compute.forward_and_backward(model)

    def gradients() -> dict[str, Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for grad in named.values():
            dist.all_reduce(grad)
        return {
            name: grad.chunk(size)[rank] if grad.dim() > 1 else grad for name, grad in named.items()
        }

    return Row("compute alone", step, gradients)


def traffic(alone: Row, moves: Sequence[TimedTransfer], channel: Channel) -> Row:
    """Compute alone, while the same bytes move beside it and nobody waits for them."""

    def step() -> StepResult:
        mover = threading.Thread(target=move, args=(moves, channel))
        mover.start()
        result = alone.step()
        ended = time.perf_counter()
        mover.join()
        return result._replace(forward_ended=ended)

    return Row("compute alone, traffic beside it", step, alone.gradients)


def move(moves: Sequence[TimedTransfer], channel: Channel, at_once: int = 4) -> None:
    """The same transfers one after another, `at_once` in flight."""
    flying: list[Pending] = []
    for transfer in moves:
        piece = torch.zeros(transfer.sent_bytes // (channel.size - 1) // 4)
        full = torch.zeros(channel.size, piece.numel())
        if transfer.kind == "all_gather":
            flying.append(channel.all_gather_into(full, piece))
        else:
            flying.append(channel.reduce_scatter_into(piece, full))
        if len(flying) == at_once:
            flying.pop(0).wait()
    for pending in flying:
        pending.wait()


def ours(
    name: str, compute: Compute, mesh: Mesh, *, apart: Channel | None = None, **prefetch: Any
) -> Row:
    """The step with an `ISPCommunicator`; `prefetch` are fields of `Prefetch`.

    `apart`: a channel of their own for gradients.
    """
    communicator = ISPCommunicator(
        mesh[Axis.WEIGHT],
        ISPCommModelConfig(device=compute.device),
        prefetch=Prefetch(**prefetch),
        reduce_channel=apart,
    )
    model = compute.decoder(mesh, communicator)
    communicator.declare([model.weight_blocks()])
    parameters = list(named_parameters(model))
    gradients = MainGradients(parameters, mesh)
    communicator.deliver_to(gradients)

    def step() -> StepResult:
        gradients.zero()
        gradients.expect_last()
        communicator.begin(sequential_actions(1))
        result = compute.forward_and_backward(model)
        communicator.finish()
        gradients.reduce()
        return result

    def shards() -> dict[str, Tensor]:
        return {item.name: gradients.grad(item.parameter) for item in parameters}

    return Row(name, step, shards, communicator.pool)


class _Arriving(dist.Work):
    """A `Pending` as torch knows it."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def wait(self, timeout: object = None) -> bool:
        self.pending.wait()
        return True


class _ThroughChannel:
    """fully_shard's collectives through a channel, so that link and log are the same for all."""

    def __init__(self, channel: Channel, deferred: list[Pending] | None = None) -> None:
        self.channel = channel
        self.deferred = deferred

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_ThroughChannel):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        tag = Tag(Purpose.WEIGHT, "unit")
        pending = self.channel.all_gather_into(output_tensor, input_tensor, tag=tag)
        if async_op:
            return _Arriving(pending)
        pending.wait()
        return None


class _ReduceScatter(_ThroughChannel):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        tag = Tag(Purpose.WEIGHT_GRADIENT, "unit", "grad")
        pending = self.channel.reduce_scatter_into(output_tensor, input_tensor, tag=tag)
        if self.deferred is None:
            pending.wait()
        else:
            self.deferred.append(pending)


def theirs(
    name: str,
    compute: Compute,
    channel: Channel | None,
    *,
    prefetch: bool,
    defer_reduce: bool = False,
    reshard_after_forward: bool = True,
) -> Row:
    """The step with torch's `fully_shard`, on blocks and root, through a channel or by itself.

    Where the model computes in 16 bit it keeps its weights in float32, as is usual, and sums
    gradients in float32, as ours does.
    `prefetch`: asynchronous unshard, each unit requested while the one before it runs, forward and
    backward, the first ones before the forward begins; embedding and head are units of their own.
    `defer_reduce`: gradients are reduced asynchronously too. fully_shard does so on a GPU alone; a
    custom reduce-scatter that nobody waits for until the step ends does it here.
    """
    model: Any = compute.decoder(mesh_of(1, 0), LocalWeights(), dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(compute.device.type, (dist.get_world_size(),))
    }
    if compute.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(compute.dtype, torch.float32)
    chain: list[Any] = list(model.blocks())
    for block in chain:
        fully_shard(block, **options, reshard_after_forward=reshard_after_forward)
    if prefetch:
        fully_shard(model.embedding, **options, reshard_after_forward=reshard_after_forward)
        fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
        chain = [model.embedding, *chain, model.norm]
    fully_shard(model, **options)
    deferred: list[Pending] = []
    for unit in [*chain, *([] if prefetch else [model])]:
        if channel is not None:
            unit.set_custom_all_gather(_Gather(channel))
            unit.set_custom_reduce_scatter(
                _ReduceScatter(channel, deferred if defer_reduce else None)
            )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if prefetch and compute.device.type == "cpu":  # where there are no streams
        model._set_unshard_async_op(True)  # the one switch that is not public
        for unit, following in pairwise(chain):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])

    def step() -> StepResult:
        model.zero_grad()
        if prefetch:
            for unit in chain[:2]:
                unit.unshard(async_op=True)
        result = compute.forward_and_backward(model)
        while deferred:
            deferred.pop(0).wait()
        return result

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}

    return Row(name, step, gradients)
