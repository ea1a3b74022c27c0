"""Training steps of one model by ISP and by fully_shard: the rows that benchmarks compare.

For `bench_overlap`, `bench_fully_shard`, `bench_link`, `compare_plan` and `compare`.
"""

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
    """The loss of a step, and the end of its forward."""

    loss: Tensor
    """This rank's part of the mean over the tokens of all ranks."""
    forward_ended: float
    """The time, by `time.perf_counter`, at which the forward of the step ended."""


def llama_layers(number: int, *, quick: bool = False) -> ModelConfig:
    """Return a model of `number` layers with llama3.1-8b's sizes, 32 times narrower if `quick`."""
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
    """One way to make a training step: a row of a benchmark's table."""

    name: str
    step: Callable[[], StepResult]
    """Makes a step; all ranks must call it."""
    gradients: Callable[[], dict[str, Tensor]]
    """Returns this rank's part of each gradient of the last step, by the parameter's name."""
    pool: MemoryPool | None = None
    """The memory into which weights are gathered, if it is ISP's pool."""
    part: Callable[[str, Tensor], Tensor] = lambda _, whole: whole
    """Takes a parameter's name and a whole tensor of its shape; returns this rank's part of it."""


class Built(NamedTuple):
    """ISP's decoder on a rank: module, parameters and main gradients."""

    chunk: StageModule
    parameters: tuple[ShardedParameter, ...]
    gradients: MainGradients

    def by_name(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, by the parameter's name."""
        return {item.name: self.gradients.grad(item.parameter) for item in self.parameters}


LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the sum of the losses over tokens, given tokens, positions and labels, each [B, S]."""


@dataclass
class Compute:
    """Compute of a rank in a step: a model on rows of tokens, and how matmuls are slowed."""

    model: ModelConfig
    rows: int
    """Number of rows (sequences) of each rank."""
    tokens: int
    """Number of tokens of each row."""
    paced_gflops: float = 0.0
    """If not 0: after each matmul with a weight, sleep as long as it would take at this speed for
    `paced_tokens` tokens."""
    paced_tokens: int = 0
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    attention: LocalAttention = field(default_factory=CpuAttention, repr=False)
    draw: Callable[[Sequence[ShardedParameter]], object] | None = field(default=None, repr=False)
    """Fills the shards with random values, which may differ between the rows of the table.

    None: all rows have the same weights."""

    def build(self, mesh: Mesh, communicator: WPCommunicator) -> Built:
        """Build ISP's decoder, whose weights are the same in every row unless there is `draw`."""
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
        """Build the same decoder in plain torch, with float32 weights, as usual for fully_shard."""
        _, parameters, _ = replace(self, dtype=torch.float32).build(mesh_of(1, 0), LocalWeights())
        # The constructor draws weights, which `load_state_dict` below replaces.
        with self.device:
            model = Decoder(self.model)
        model.load_state_dict({item.name: item.parameter.detach() for item in parameters})
        for linear in model.modules() if self.paced_gflops else ():
            if isinstance(linear, nn.Linear):
                seconds = self.seconds(*linear.weight.shape)
                linear.register_forward_hook(lambda *_, s=seconds: time.sleep(s))
                linear.register_full_backward_hook(lambda *_, s=seconds: time.sleep(2 * s))
        return model

    def pause(self, layer: Any) -> float:
        """Return the seconds to sleep for one product with the weight of `layer`.

        An embedding's lookup does not sleep.
        """
        if isinstance(layer, ShardedEmbedding):
            return 0.0
        rows, columns = layer.layouts["weight"].global_shape
        # The head computes all its three products (output, input gradient, weight gradient) in
        # forward. So it should sleep for 3 products in all, but it sleeps three times, each for 3/2
        # of a product: in forward, for the weight gradient, and in backward, where it computes
        # nothing and only launches gathers. Its compute is 1.5 products too long.
        if layer.name == "lm_head":
            rows = 3 * rows // 2
        return self.seconds(rows, columns)

    def seconds(self, rows: int, columns: int) -> float:
        """Return the seconds of a product of `paced_tokens` tokens and a weight of this shape."""
        return 2e-9 * rows * columns * self.paced_tokens / self.paced_gflops

    def forward_and_backward(self, loss_of: LossOf) -> StepResult:
        """Run forward and backward on this rank's rows, with the gradients of the global mean."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (self.rows, self.tokens + 1)
        ids = torch.randint(self.model.vocab_size, shape, generator=generator).to(self.device)
        positions = torch.arange(self.tokens, device=self.device).expand(self.rows, -1)
        loss = self.scale * loss_of(ids[:, :-1], positions, ids[:, 1:])
        forward_ended = time.perf_counter()
        loss.backward()
        return StepResult(loss.detach(), forward_ended)

    def by_chunk(self, chunk: StageModule) -> LossOf:
        """Return a function of ids, positions and labels that runs ISP's decoder.

        It returns the sum of this rank's losses.
        """

        def loss_of(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
            expected = torch.tensor(self.scale, device=self.device)
            return chunk.loss(chunk(ids, positions, None), labels, expected)

        return loss_of

    @property
    def scale(self) -> float:
        """The factor from a rank's sum of losses to its part of the mean over all ranks' tokens."""
        return 1 / (self.rows * self.tokens * dist.get_world_size())


def compare(alone: Row, rows: Sequence[Row], tolerance: float) -> None:
    """Check that all rows compute the loss and gradients of `alone`, within `tolerance` (relative).

    All ranks must call this. Raises AssertionError.
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
    """Return the mesh of `rank`: weights sharded over all ranks, each rank with its own sequences.

    With one rank, no process group is made.
    """
    parallel = ParallelConfig(tensor=TensorConfig(size=1), weight=WeightConfig(size=world_size))
    return Mesh(Topology.create(world_size, parallel), rank, **options)


def compute_alone(compute: Compute) -> Row:
    """Return the row in which every rank has the whole model and nothing is communicated."""
    # Each rank builds the model in a mesh of its own with one rank.
    built = compute.build(mesh_of(1, 0), LocalWeights())

    def step() -> StepResult:
        built.gradients.zero()
        built.gradients.expect_last()
        result = compute.forward_and_backward(compute.by_chunk(built.chunk))
        built.gradients.reduce()
        return result

    def gradients() -> dict[str, Tensor]:
        """Return the whole gradients, summed over the ranks here, outside of the timed step."""
        named = {name: grad.clone() for name, grad in built.by_name().items()}
        for grad in named.values():
            dist.all_reduce(grad)
        return named

    return Row("compute alone", step, gradients)


def traffic(alone: Row, moves: Sequence[TimedTransfer], channel: Channel) -> Row:
    """Return the row that computes alone while a thread moves as many bytes as `moves`.

    No compute waits for these transfers.
    It shows what the transfers themselves cost the cores. `forward_ended` is the end of compute.
    """

    def step() -> StepResult:
        # Every rank makes the same transfers in the same order, so that they match each other.
        mover = threading.Thread(target=move, args=(moves, channel))
        mover.start()
        result = alone.step()
        ended = time.perf_counter()
        mover.join()
        return result._replace(forward_ended=ended)

    return Row("compute alone, traffic beside it", step, alone.gradients)


def move(moves: Sequence[TimedTransfer], channel: Channel, at_once: int = 4) -> None:
    """Repeat the transfers `moves` in order with other data, at most `at_once` in flight."""
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
    """Return the row of ISP's step with an `ISPCommunicator`; `prefetch` are fields of `Prefetch`.

    `apart`: a second channel of the weight axis, on which gradients are reduced.
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
        communicator.begin(sequential_actions(1))  # launches the first gathers
        result = compute.forward_and_backward(compute.by_chunk(built.chunk))
        communicator.finish()  # waits for the last reduce-scatters
        built.gradients.reduce()
        return result

    def part(name: str, whole: Tensor) -> Tensor:
        return layouts[name].shard(whole)

    return Row(name, step, built.by_name, communicator.pool, part)


class _Arriving(dist.Work):
    """Wraps a `Pending` as the `Work` that torch's fully_shard expects of a collective."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def wait(self, timeout: object = None) -> bool:
        self.pending.wait()
        return True


class _ThroughChannel:
    """A collective of fully_shard that is sent through a channel.

    So ISP and fully_shard use the same link, and their transfers are in the same log.
    """

    def __init__(self, channel: Channel, deferred: list[Pending] | None = None) -> None:
        self.channel = channel
        self.deferred = deferred

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_ThroughChannel):
    """The all-gather of fully_shard."""

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
    """The reduce-scatter of fully_shard; with `deferred`, the end of the step waits for it."""

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
    """Let fully_shard gather each unit while the one before it runs, on a device without streams.

    `units` are in forward order.
    """
    model._set_unshard_async_op(True)  # private: torch has no public switch for this
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def reduce_through(
    channel: Channel | None, units: Sequence[Any], *, deferred: list[Pending] | None
) -> None:
    """Let fully_shard sum gradients, over `channel` unless that is None.

    With `deferred`, fully_shard does not wait for a reduction: it is added there, for the caller to
    wait for.
    """
    for unit in units:
        if channel is not None:
            unit.set_custom_reduce_scatter(_ReduceScatter(channel, deferred))
        # Sum, as ISP does: the loss is already divided by the number of all tokens.
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
    """Return the row of torch's `fully_shard` on blocks and root, over `channel` or its own group.

    The model is the plain decoder with torch's cross-entropy. In 16-bit compute it keeps weights in
    float32, as is usual, and reduces gradients in float32, as ISP does.
    `prefetch`: gather the first two units before forward begins, and each other one while the unit
    before it runs: on CPU by explicit requests, on a GPU as fully_shard does by default. Embedding
    and head are units of their own.
    `defer_reduce`: reduce gradients asynchronously, too, and wait at the end of the step.
    fully_shard itself does so only on a GPU.
    """
    model: Any = compute.plain()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(compute.device.type, (dist.get_world_size(),))
    }
    if compute.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(compute.dtype, torch.float32)
    trunk = model.model
    chain: list[Any] = list(trunk.layers)  # units in forward order
    for block in chain:
        fully_shard(block, **options, reshard_after_forward=reshard_after_forward)
    if prefetch:
        fully_shard(trunk.embed_tokens, **options, reshard_after_forward=reshard_after_forward)
        fully_shard([trunk.norm, model.lm_head], **options, reshard_after_forward=False)
        chain = [trunk.embed_tokens, *chain, trunk.norm]
    fully_shard(model, **options)
    deferred: list[Pending] = []
    # Without prefetch, embedding, norm and head belong to the root; with it the root has no weight.
    units = [*chain, *([] if prefetch else [model])]
    reduce_through(channel, units, deferred=deferred if defer_reduce else None)
    for unit in units if channel is not None else ():
        unit.set_custom_all_gather(_Gather(channel))
    if prefetch and compute.device.type == "cpu":  # a GPU gathers ahead on a stream by default
        gather_asynchronously(model, chain)

    def loss_of(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids, positions).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def step() -> StepResult:
        model.zero_grad()
        # Request the first two units here, as no unit before them could.
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
        # fully_shard shards by `chunk`, which can return fewer chunks than there are ranks.
        rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size())
        return parts[rank] if rank < len(parts) else whole[:0]

    return Row(name, step, gradients, part=part)
