"""The `parallel` section of the configuration: how one run is split over its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from isp.core.mesh.partition import any_of, divisors, usable
from isp.core.section import KeyRole, Ranks, section


class Mode(StrEnum):
    """The split of linears over ranks; `isp.core.layers.linear` has a table of the collectives."""

    MTP = "mtp"
    """Megatron tensor parallel: weights are split over the tensor group, activations replicated."""
    MSP = "msp"
    """Megatron sequence parallel: like mtp, but activations between linears are split by tokens."""
    FSP = "fsp"
    """Flash sequence parallel: like msp, but of a gathered input each rank saves only its shard."""
    ISP = "isp"
    """Intern sequence parallel: weights are split over the weight group, tokens over the tensor
    group."""

    @property
    def splits_features(self) -> bool:
        """True if a linear computes the rank's share of the features (heads, hidden units,
        vocabulary) for all tokens of a sequence, False if it computes all features for the tokens
        of the rank."""
        return self is not Mode.ISP

    @property
    def splits_sequence(self) -> bool:
        """True if a rank has its own tokens between the linears, False if the whole sequence."""
        return self is not Mode.MTP

    @property
    def gathers_weights(self) -> bool:
        """True if weights are cut over a weight group of their own and gathered for use, False if
        they are cut like the features, over the tensor group, and stay on their rank."""
        return self is Mode.ISP

    @property
    def slices_batch(self) -> bool:
        """True if a rank reads its own tokens of the batch, False if the embedding splits them."""
        return not self.splits_features


class LaunchPoint(StrEnum):
    """Point in a block at which the next block is prefetched (`forward_overlap_per: layer`)."""

    WQKV = "wqkv"
    """The linear of q, k and v."""
    ATTN = "attn"
    """Attention, which reads no weight."""
    WO = "wo"
    """The output linear of attention."""
    W1 = "w1"
    """The first linear of the MLP."""


class OverlapUnit(StrEnum):
    """The unit of prefetch in forward."""

    LAYER = "layer"
    """All weights of a block."""
    MODULE = "module"
    """The weight of one linear."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """The settings of the prefetch plan, which depends on nothing else but the model."""

    unit: OverlapUnit = OverlapUnit.LAYER
    """The unit of prefetch in forward."""
    launch: LaunchPoint = LaunchPoint.WO
    """Point in a block at which the all-gather of the next block is launched."""
    overlap: bool = True
    """True: weights are gathered ahead of their use; False: when they are read."""
    reshard_after_forward: bool = True
    """True: a gathered weight is freed after forward; False: after its last read in the step."""


class PipelineSchedule(StrEnum):
    """The order of a stage's micro-batches, named as in `torch.distributed.pipelining`."""

    ONE_F_ONE_B = "1F1B"
    """One forward, one backward. Source: Narayanan et al. 2019, PipeDream-Flush."""
    INTERLEAVED = "Interleaved1F1B"
    """1F1B with several model chunks on each rank. Source: Narayanan et al. 2021."""
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    """ZB1P: weight gradients are computed in the bubbles. Source: Qi et al. 2023, Zero Bubble."""
    ZBV = "ZBVZeroBubble"
    """ZB-V: two model chunks on each rank; stages go from the first rank to the last and back, so
    the first rank has the first and the last stage."""

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed later than the gradients of inputs."""
        return self in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)

    @property
    def is_v(self) -> bool:
        """True if stages go from the first rank to the last and back, False if round robin."""
        return self is PipelineSchedule.ZBV


@section("parallel.tensor", KeyRole.PLACE)
class TensorConfig:
    """`parallel.tensor`: the ranks that share one sequence."""

    size: Ranks = 1
    """Number of ranks in a tensor group, which share a sequence in isp, msp and fsp mode."""
    mode: Mode = Mode.ISP
    """How a tensor group shares the work: isp splits sequences and gathers weights; mtp splits
    weights; msp and fsp split weights, and tokens between them (fsp keeps fewer activations)."""

    def check_distributes_inputs(self, hidden_size: int, seq_len: int) -> None:
        """Raise ValueError unless each tensor rank can keep 1 / `size` of a block's input."""
        if self.mode.splits_sequence:
            raise ValueError(
                f"model.checkpoint_distribute_activations is for mtp mode: in {self.mode} mode each"
                f" tensor rank keeps its own tokens only; set it to false"
            )
        if (elements := seq_len * hidden_size) % self.size:
            raise ValueError(
                f"parallel.tensor.size={self.size} must divide the {seq_len} tokens of a sequence"
                f" times model.hidden_size={hidden_size} for"
                f" model.checkpoint_distribute_activations: use {usable(elements, self.size)}, or"
                f" set it to false"
            )


@section("parallel.weight", KeyRole.PLACE)
class WeightConfig:
    """`parallel.weight`: the ranks that share one copy of the weights; used in isp mode only."""

    size: Ranks = 1
    """Number of ranks in a weight group; may be smaller or larger than the tensor size."""
    overlap: bool = True
    """Gather weights ahead of their use, and reduce gradients while backward continues."""
    memory_pool: bool = True
    """Reuse the buffers of gathers and reductions instead of allocating new ones."""
    launch_allgather_before: LaunchPoint = LaunchPoint.WO
    """Point in a block at which the all-gather of the next block is launched."""
    forward_overlap_per: OverlapUnit = OverlapUnit.LAYER
    """Unit of prefetch in forward: a whole block (layer) or one linear (module)."""
    reshard_after_forward: bool = True
    """false: gather each weight once per step and keep it until its last use, over all
    micro-batches: fewer bytes are sent, but all weights of the stage are in memory.  Name:
    FSDP2."""
    reduce_dtype: Literal["float32", "gradient"] = "float32"
    """Dtype of the sum of gradients: float32, or the dtype of the gradient."""
    reduce_by: Literal["auto", "reduce_scatter", "all_to_all"] = "auto"
    """all_to_all: exchange the parts and add them in rank order; auto: all_to_all on gloo,
    reduce_scatter elsewhere."""
    own_reduce_group: bool = False
    """Reduce gradients in a process group of their own, so that gathers do not queue behind
    them."""
    nccl_ub: bool = False
    """Gather into buffers registered with NCCL (user buffers), which saves copies, on GPUs with
    NVLink SHARP. Cannot be combined with expandable_segments.  Name: Megatron-LM."""
    embed_split_hidden: bool = False
    """Shard the embedding table by hidden features instead of vocabulary."""
    vocab_parallel_loss: bool = False
    """Compute the loss with all tokens and a part of the vocabulary on each rank of a
    sequence; by default, each rank has its own tokens and the whole vocabulary, and no
    logits are exchanged."""
    poison_freed_buffers: bool = False
    """For debugging: fill freed gather buffers with NaN, so that a late read shows up in
    the loss."""

    @property
    def reduces_apart(self) -> bool:
        """True if weight gradients are reduced over a channel of their own."""
        return self.own_reduce_group or self.reduce_by != "auto"

    @property
    def unused(self) -> list[str]:
        """Keys that were changed but have no effect, because weights are not gathered (size 1)."""
        # vocab_parallel_loss has an effect without a weight group, too: it shards the loss over the
        # tensor group.
        alone = WeightConfig(vocab_parallel_loss=self.vocab_parallel_loss)
        keys = (item.name for item in fields(self)) if self.size == 1 else ()
        return [key for key in keys if getattr(self, key) != getattr(alone, key)]

    @property
    def prefetch(self) -> Prefetch:
        """The settings of the prefetch plan."""
        return Prefetch(
            unit=self.forward_overlap_per,
            launch=self.launch_allgather_before,
            overlap=self.overlap,
            reshard_after_forward=self.reshard_after_forward,
        )


@section("parallel.pipeline", KeyRole.PLACE)
class PipelineConfig:
    """`parallel.pipeline`: the stages that a model is split into."""

    size: Ranks = 1
    """Number of stages."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """Order of micro-batches on each stage."""
    num_chunks: Ranks = 1
    """Number of model chunks on each rank (virtual pipeline stages)."""

    def __post_init__(self) -> None:
        chunks = f"parallel.pipeline.num_chunks={self.num_chunks}"
        schedule = f"parallel.pipeline.schedule={self.schedule}"
        if self.size == 1:
            if self.num_chunks > 1:
                raise ValueError(
                    f"{chunks} needs parallel.pipeline.size=2 or more: set it, or use num_chunks=1"
                )
            return
        if self.schedule is PipelineSchedule.ONE_F_ONE_B and self.num_chunks > 1:
            raise ValueError(
                f"{chunks} with {schedule}: use num_chunks=1, or schedule="
                f"{PipelineSchedule.INTERLEAVED} or {PipelineSchedule.INTERLEAVED_ZERO_BUBBLE}"
            )
        if self.schedule is PipelineSchedule.INTERLEAVED and self.num_chunks == 1:
            raise ValueError(
                f"{schedule} with {chunks}: use num_chunks=2 or more, or schedule="
                f"{PipelineSchedule.ONE_F_ONE_B}"
            )
        if self.schedule is PipelineSchedule.ZBV and self.num_chunks != 2:
            raise ValueError(f"{schedule} has two chunks on each rank, not {chunks}: use 2")

    def check_micro_batches(self, micro_num: int, key: str = "data.micro_num") -> None:
        """Raise ValueError if the schedule cannot run `micro_num` micro-batches, set by `key`."""
        if micro_num < self.size:
            raise ValueError(
                f"parallel.pipeline.size={self.size} needs at least as many micro-batches, but"
                f" {key}={micro_num}: use {key}={self.size} or more, ideally a multiple of it"
            )
        rounds = micro_num // self.size
        loops = (PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)
        if self.size > 1 and self.schedule in loops and micro_num % rounds:
            raise ValueError(
                f"parallel.pipeline.schedule={self.schedule} goes through its"
                f" {key}={micro_num} micro-batches in {rounds} equal rounds: use a"
                f" multiple of parallel.pipeline.size={self.size}"
            )


class ContextExchange(StrEnum):
    """The way in which context ranks exchange keys and values."""

    AUTO = "auto"
    """The ring, if the keys and values that a gather receives do not fit into the device's memory;
    else gather."""
    GATHER = "gather"
    """Each rank receives the keys and values that its tokens attend to, stripe by stripe of heads,
    and attends once."""
    RING = "ring"
    """Each rank receives one block of keys and values after another, and merges the results; layers
    with windows gather."""


class SequenceScan(StrEnum):
    """The way in which the ranks of a sequence compute a scan (linear attention, state spaces)."""

    AUTO = "auto"
    """By heads or by state, whichever receives fewer bytes; this depends on the sizes of the layer
    and on the documents of the micro-batch."""
    HEADS = "heads"
    """Tokens are exchanged for heads, as for attention; a head's result is that of one process."""
    STATE = "state"
    """Each rank scans its own tokens, from the states that ranks with earlier tokens send it."""


@section("parallel.sequence_2D.device_placement_strategy", KeyRole.PLACE)
class DevicePlacementConfig:
    """`parallel.sequence_2D.device_placement_strategy`: which ranks are neighbors."""

    head_first: bool = True
    """true: the ranks of a head group are neighbors; false: the ranks of a context group are."""


@section("parallel.sequence_2D", KeyRole.PLACE)
class Sequence2DConfig:
    """`parallel.sequence_2D`: the head ranks x context ranks over which a tensor group splits
    attention; used in isp mode only."""

    enable: bool = False
    """Split the attention of a tensor group over head_size x context_size ranks."""
    head_size: Ranks | None = None
    """Number of ranks that exchange tokens for heads; null: tensor size / context_size, or, if that
    is null, too, the largest number of ranks that get equally many KV heads without copies."""
    context_size: Ranks | None = None
    """Number of ranks that hold the same heads of different tokens; null: tensor size /
    head_size."""
    exchange: ContextExchange = ContextExchange.AUTO
    """How keys and values reach the ranks of a context group."""
    device_placement_strategy: DevicePlacementConfig = field(default_factory=DevicePlacementConfig)
    """Which ranks are neighbors."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """(head_size, context_size) as configured."""
        return self.head_size, self.context_size

    def check_fits(self, tensor: int) -> None:
        """Raise ValueError if head x context cannot be the `tensor` size."""
        for key, size in zip(("head_size", "context_size"), self.sizes, strict=True):
            if size is not None and tensor % size:
                raise ValueError(
                    f"parallel.sequence_2D.{key}={size} must divide parallel.tensor.size={tensor}:"
                    f" use {any_of(divisors(tensor))}"
                )
        head, context = self.sizes
        if head is not None and context is not None and head * context != tensor:
            raise ValueError(
                f"parallel.sequence_2D.head_size={head} x context_size={context} is not"
                f" parallel.tensor.size={tensor}: use context_size={tensor // head}, or leave one"
                f" of the two out"
            )


@section("parallel.expert", KeyRole.PLACE)
class ExpertConfig:
    """`parallel.expert`: the ranks over which the experts of a layer are sharded."""

    size: Ranks = 1
    """Number of ranks that share the experts of a layer, to which tokens are sent: a divisor of
    the weight size in isp mode, 1 or the tensor size in other modes; 1: weights of experts are
    gathered instead.  Name: InternEvo."""
    num_chunks: Ranks = 1
    """Number of parts of a rank's tokens; each part is sent while the part before is computed."""


@section("parallel.expert_weight", KeyRole.PLACE)
class ExpertWeightConfig:
    """`parallel.expert_weight`: the ranks that have the same experts of a layer, over which the
    weights of these experts are sharded."""

    size: Ranks | None = None
    """Number of ranks that gather experts from each other; null: weight size / expert size.  Name:
    InternEvo."""


@section("parallel.zero1", KeyRole.PLACE)
class Zero1Config:
    """`parallel.zero1`: the ranks over which the optimizer states of one shard are split."""

    size: Annotated[int, Field(ge=-1, le=2**20)] = -1
    """Number of ranks over which optimizer states are sharded, a divisor of the number of copies of
    the weights (in isp mode the weight_data size, in other modes the data size); 0 or -1: all
    copies, which also halves the bytes of gradients sent between replicas."""


@section("parallel", KeyRole.PLACE)
class ParallelConfig:
    """`parallel`: mode and sizes; the remaining factor of the number of ranks is data parallel."""

    tensor: TensorConfig = field(default_factory=TensorConfig)
    """The ranks that share one sequence, and the mode."""
    weight: WeightConfig = field(default_factory=WeightConfig)
    """The ranks that share one copy of the weights (isp)."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """The pipeline stages, and the order of micro-batches on them."""
    zero1: Zero1Config = field(default_factory=Zero1Config)
    """The ranks over which the optimizer states are sharded."""
    sequence_2D: Sequence2DConfig = field(default_factory=Sequence2DConfig)
    """How a tensor group splits attention: by heads, by tokens (context), or both (isp)."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """The ranks that share the experts of a layer, and send each other tokens."""
    expert_weight: ExpertWeightConfig = field(default_factory=ExpertWeightConfig)
    """The ranks that gather the same experts."""
    sequence_scan: SequenceScan = SequenceScan.AUTO
    """How linear attention and state spaces are split over the ranks of a sequence, by heads or by
    state (not in mtp mode)."""

    def __post_init__(self) -> None:
        if self._has_two_axes:
            self.sequence_2D.check_fits(self.tensor.size)
        self._check_experts()

    def _check_experts(self) -> None:
        """Raise ValueError if expert x expert_weight cannot be the weight size."""
        expert, gathered = self.expert.size, self.expert_weight.size
        other = "" if gathered is None else f" x parallel.expert_weight.size={gathered}"
        given = f"parallel.expert.size={expert}{other}"
        if not self.tensor.mode.gathers_weights:
            if expert not in (1, self.tensor.size) or gathered not in (None, 1):
                raise ValueError(
                    f"{given} in mode {self.tensor.mode}, where weights stay on their"
                    f" rank: use 1 (all experts on every rank) or parallel.tensor.size="
                    f"{self.tensor.size}, and leave parallel.expert_weight.size out"
                )
            return
        weight = self.weight.size
        if weight % expert or gathered not in (None, weight // expert):
            raise ValueError(
                f"{given} does not make parallel.weight.size={weight}: use an expert.size of"
                f" {any_of(divisors(weight))}, and leave expert_weight.size out"
            )

    @property
    def _has_two_axes(self) -> bool:
        """True if tensor groups are head x context ranks."""
        return self.sequence_2D.enable and self.tensor.mode.slices_batch

    @property
    def context_size(self) -> int:
        """Number of ranks in a context group.  Raises ValueError if it depends on the model."""
        head, context = self.sequence_2D.sizes if self._has_two_axes else (None, 1)
        if context is not None:
            return context
        if head is None:
            raise ValueError(
                "parallel.sequence_2D.enable=true needs head_size or context_size: set one of them"
                f" to a divisor of parallel.tensor.size={self.tensor.size}"
            )
        return self.tensor.size // head

    @property
    def head_size(self) -> int:
        """Number of ranks in a head group, which exchange tokens for heads."""
        return self.tensor.size // self.context_size

    def for_heads(self, query: int, kv: int) -> ParallelConfig:
        """Return this configuration with both sizes of sequence_2D set, for a model's heads.

        `query` and `kv`: numbers of query and KV heads. Raises ValueError if there are head ranks
        without a query head.
        """
        if not self._has_two_axes:
            return self
        two, tensor = self.sequence_2D, self.tensor.size
        if two.sizes == (None, None):
            # The most head ranks that need no copies of KV heads. With more, KV heads would be
            # copied, so that a rank would receive no fewer bytes.
            two = replace(two, head_size=math.gcd(tensor, kv))
        found = replace(self, sequence_2D=two)
        two = replace(two, head_size=found.head_size, context_size=found.context_size)
        if found.head_size > query:
            usable = [n for n in divisors(tensor) if n <= query]
            raise ValueError(
                f"parallel.sequence_2D.head_size={found.head_size} leaves ranks without any of the"
                f" {query} query heads: use {any_of(usable)}"
            )
        return replace(self, sequence_2D=two)

    @property
    def least_ranks(self) -> int:
        """The smallest world size that fits; other world sizes must be multiples of it."""
        weight = self.weight.size if self.tensor.mode.gathers_weights else self.tensor.size
        return self.pipeline.size * math.lcm(self.tensor.size, weight * max(1, self.zero1.size))
