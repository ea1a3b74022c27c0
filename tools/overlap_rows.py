"""A training step of one model, run in different ways; for `bench_overlap`, `bench_fully_shard`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from paced import Paced
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.local import LocalAttention
from isp.core.comm import Channel, Mesh, Pending, TimedTransfer
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import Axis, Mode, Topology
from isp.core.mesh.config import ParallelConfig, Prefetch, TensorConfig, WeightConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.pool import MemoryPool
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import sequential_actions
from isp.core.weights.wp_communicator import LocalWeights, WPCommunicator
from isp.models.runtime.sharded_modules import ShardedEmbedding
from isp.models.runtime.stage_module import StageModule
from model.build import language_model
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = [
    "Compute",
    "Row",
    "StepResult",
    "compare",
    "compute_alone",
    "llama_layers",
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


def llama_layers(number: int, *, quick: bool = False) -> ModelConfig:
    """Return a model of `number` layers of the sizes of llama3.1-8b; `quick`: 32 times narrower."""
    hidden, heads = (128, 4) if quick else (4096, 32)
    return ModelConfig(
        vocab_size=8 * hidden,
        hidden_size=hidden,
        num_layers=number,
        num_heads=heads,
        num_kv_heads=heads // 4,
        intermediate_size=hidden * 7 // 2,
    )


@dataclass(frozen=True)
class Row:
    """A contestant."""

    name: str
    step: Callable[[], StepResult]
    gradients: Callable[[], dict[str, Tensor]]
    """This rank's part of each gradient of the last step, by the parameter's name."""
    pool: MemoryPool | None = None
    """What weights are gathered into."""
    part: Callable[[str, Tensor], Tensor] = lambda _, whole: whole
    """Cuts this rank's part of a parameter out of the whole."""


class Built(NamedTuple):
    """The decoder on a rank."""

    chunk: StageModule
    parameters: tuple[ShardedParameter, ...]
    gradients: MainGradients

    def by_name(self) -> dict[str, Tensor]:
        """This rank's part of each gradient."""
        return {item.name: self.gradients.grad(item.parameter) for item in self.parameters}


LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Gives the sum of the losses of tokens, positions and labels [B, S]."""


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
    draw: Callable[[Sequence[ShardedParameter]], object] | None = field(default=None, repr=False)
    """Fills the shards of each contestant in its own way; None: the same weights in all."""

    def build(self, mesh: Mesh, communicator: WPCommunicator) -> Built:
        """Build the decoder, with the same weights in every contestant unless there is `draw`."""
        layers = RankLayers(
            mode=Mode.ISP,
            tensor=mesh[Axis.TENSOR],
            weight=mesh[Axis.WEIGHT],
            communicator=Paced(communicator, self.pause) if self.paced_gflops else communicator,
            device=self.device,
            dtype=self.dtype,
        )
        model = language_model(self.model, str(self.dtype).removeprefix("torch."))
        (chunk,) = model.build(layers, attention=self.attention)
        parameters = tuple(chunk.shards())
        chunk.init_weights(1 if self.draw is None else None)
        if self.draw is not None:
            self.draw(parameters)
        return Built(chunk, parameters, MainGradients(parameters, mesh))

    def plain(self) -> Decoder:
        """The same decoder in plain torch with weights in float32, as is usual."""
        _, parameters, _ = replace(self, dtype=torch.float32).build(mesh_of(1, 0), LocalWeights())
        with self.device:  # to draw weights there, which are replaced
            model = Decoder(self.model)
        model.load_state_dict({item.name: item.parameter.detach() for item in parameters})
        for linear in model.modules() if self.paced_gflops else ():
            if isinstance(linear, nn.Linear):
                seconds = self.seconds(*linear.weight.shape)
                linear.register_forward_hook(lambda *_, s=seconds: time.sleep(s))
                linear.register_full_backward_hook(lambda *_, s=seconds: time.sleep(2 * s))
        return model

    def pause(self, layer: Any) -> float:
        """Seconds that a product with the weight of `layer` takes; a lookup takes none."""
        if isinstance(layer, ShardedEmbedding):
            return 0.0
        rows, columns = layer.layouts["weight"].global_shape
        if layer.name == "lm_head":  # three products in one use and one gradient
            rows = 3 * rows // 2
        return self.seconds(rows, columns)

    def seconds(self, rows: int, columns: int) -> float:
        """Those of a product with a weight of this shape."""
        return 2e-9 * rows * columns * self.paced_tokens / self.paced_gflops

    def forward_and_backward(self, loss_of: LossOf) -> StepResult:
        """A pass over this rank's rows; the loss is the mean over the tokens of all ranks."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (self.rows, self.tokens + 1)
        ids = torch.randint(self.model.vocab_size, shape, generator=generator).to(self.device)
        positions = torch.arange(self.tokens, device=self.device).expand(self.rows, -1)
        loss = self.scale * loss_of(ids[:, :-1], positions, ids[:, 1:])
        forward_ended = time.perf_counter()
        loss.backward()
        return StepResult(loss.detach(), forward_ended)

    def by_chunk(self, chunk: StageModule) -> LossOf:
        """The losses of a traced decoder."""

        def loss_of(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
            expected = torch.tensor(self.scale, device=self.device)
            return chunk.loss(chunk(ids, positions, None), labels, expected)

        return loss_of

    @property
    def scale(self) -> float:
        """What makes a mean of a rank's sum of losses."""
        return 1 / (self.rows * self.tokens * dist.get_world_size())


def compare(alone: Row, rows: Sequence[Row], tolerance: float) -> None:
    """Every row computes the loss and the gradients of `alone`, within `tolerance` of their norms.

    Raises AssertionError.
    """
    expected = alone.step().loss
    dist.all_reduce(expected)
    wholes = alone.gradients()
    for row in rows:
        loss = row.step().loss
        dist.all_reduce(loss)
        assert (loss - expected).abs() <= tolerance * expected.abs(), (row.name, loss, expected)
        for name, grad in row.gradients().items():
            own = row.part(name, wholes[name])
            off = (grad.float() - own.float()).norm()
            assert off <= tolerance * own.float().norm(), (row.name, name, off)


def mesh_of(world_size: int, rank: int, **options: Any) -> Mesh:
    """Weights split over all ranks, a sequence to each; of one rank, without any group."""
    parallel = ParallelConfig(tensor=TensorConfig(size=1), weight=WeightConfig(size=world_size))
    return Mesh(Topology.create(world_size, parallel), rank, **options)


def compute_alone(compute: Compute) -> Row:
    """The whole model on every rank, nothing travels."""
    built = compute.build(mesh_of(1, 0), LocalWeights())

    def step() -> StepResult:
        built.gradients.zero()
        built.gradients.expect_last()
        result = compute.forward_and_backward(compute.by_chunk(built.chunk))
        built.gradients.reduce()
        return result

    def gradients() -> dict[str, Tensor]:
        """Whole, summed over the ranks."""
        named = {name: grad.clone() for name, grad in built.by_name().items()}
        for grad in named.values():
            dist.all_reduce(grad)
        return named

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
    built = compute.build(mesh, communicator)
    communicator.declare([built.chunk.weight_blocks()])
    communicator.deliver_to(built.gradients)
    layouts = {item.name: item.layout for item in built.parameters}

    def step() -> StepResult:
        built.gradients.zero()
        built.gradients.expect_last()
        communicator.begin(sequential_actions(1))
        result = compute.forward_and_backward(compute.by_chunk(built.chunk))
        communicator.finish()
        built.gradients.reduce()
        return result

    def part(name: str, whole: Tensor) -> Tensor:
        return layouts[name].shard(whole)

    return Row(name, step, built.by_name, communicator.pool, part)


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


def gather_asynchronously(model: Any, units: Sequence[Any]) -> None:
    """Let fully_shard gather each unit while the one before it runs, where there are no streams."""
    model._set_unshard_async_op(True)  # the one switch that is not public
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def reduce_through(
    channel: Channel | None, units: Sequence[Any], *, deferred: list[Pending] | None
) -> None:
    """Let fully_shard sum gradients over `channel`; into `deferred` goes what nobody waits for."""
    for unit in units:
        if channel is not None:
            unit.set_custom_reduce_scatter(_ReduceScatter(channel, deferred))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


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

    The model is the plain decoder, and its loss torch's cross-entropy. Where it computes in 16 bit
    it keeps its weights in float32, as is usual, and sums gradients in float32, as ours does.
    `prefetch`: asynchronous unshard, each unit requested while the one before it runs, forward and
    backward, the first ones before the forward begins; embedding and head are units of their own.
    `defer_reduce`: gradients are reduced asynchronously too. fully_shard does so on a GPU alone; a
    custom reduce-scatter that nobody waits for until the step ends does it here.
    """
    model: Any = compute.plain()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(compute.device.type, (dist.get_world_size(),))
    }
    if compute.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(compute.dtype, torch.float32)
    trunk = model.model
    chain: list[Any] = list(trunk.layers)
    for block in chain:
        fully_shard(block, **options, reshard_after_forward=reshard_after_forward)
    if prefetch:
        fully_shard(trunk.embed_tokens, **options, reshard_after_forward=reshard_after_forward)
        fully_shard([trunk.norm, model.lm_head], **options, reshard_after_forward=False)
        chain = [trunk.embed_tokens, *chain, trunk.norm]
    fully_shard(model, **options)
    deferred: list[Pending] = []
    units = [*chain, *([] if prefetch else [model])]
    reduce_through(channel, units, deferred=deferred if defer_reduce else None)
    for unit in units if channel is not None else ():
        unit.set_custom_all_gather(_Gather(channel))
    if prefetch and compute.device.type == "cpu":
        gather_asynchronously(model, chain)

    def loss_of(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids, positions).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def step() -> StepResult:
        model.zero_grad()
        if prefetch:
            for unit in chain[:2]:
                unit.unshard(async_op=True)
        result = compute.forward_and_backward(loss_of)
        while deferred:
            deferred.pop(0).wait()
        return result

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}

    def part(_: str, whole: Tensor) -> Tensor:
        rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size())
        return parts[rank] if rank < len(parts) else whole[:0]

    return Row(name, step, gradients, part=part)
