"""The case that is planned: a model in a layout, and the work of a rank in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from isp.config import JobConfig
from isp.core.comm.tag import Purpose, Tag, Transfer
from isp.core.mesh import Axis, Mode, ParallelConfig, Topology
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.sequence_split import SequenceSplit
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.torch_optimizer import count_states, optimizer_of
from isp.core.optim.update_rules import update_rule, values_of
from isp.core.pipeline.order import PipelineOrder
from isp.models.traced_model import TracedModel
from model.build import language_model
from model.config import ModelConfig

__all__ = ["Coordinates", "PlanCase"]

_DType = Literal["float64", "float32", "bfloat16", "float16"]


class Coordinates(NamedTuple):
    """Index of a rank in its tensor, weight, zero1 and pipeline group."""

    tensor: int
    weight: int
    zero1: int
    stage: int
    """Index in its pipeline; with an interleaved schedule a rank has several chunks."""


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A training step of a model in one layout."""

    model: ModelConfig
    parallel: ParallelConfig
    topology: Topology
    rows: int
    """Rows of a micro-batch; a tensor group shares each row."""
    tokens: int
    """Number of tokens in each row (sequence) of a batch."""
    micro_num: int
    """Micro-batches of a data rank in a step."""
    dtype: _DType = "float32"
    """Dtype of weights and activations."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Settings of the optimizer."""
    on_cpu: bool = False
    """Ranks run on CPU over gloo, which has no reduce-scatter: they exchange parts and add them."""
    documents: int = 1
    """Equal documents in a row; they decide attention's cost and which rank has which tokens."""
    saves_in_background: bool = False
    """A background save keeps a copy of a rank's state on the host (`checkpoint.async_mode`)."""

    @classmethod
    def of(cls, config: JobConfig, world_size: int, *, on_cpu: bool = False) -> PlanCase:
        """Return the case of `config` on `world_size` ranks; each sample counts as one document.

        Raises ConfigError if the sizes do not fit.
        """
        data = config.for_ranks(world_size).data
        return cls(
            model=config.model,
            parallel=config.parallel,
            topology=config.topology(world_size),
            rows=1 if data.pack else data.micro_bsz,
            tokens=config.row_tokens,
            micro_num=data.num_micro_batches,
            dtype=config.training.dtype,
            optimizer=config.optimizer,
            on_cpu=on_cpu,
            documents=data.micro_bsz if data.pack else 1,
            saves_in_background=config.checkpoint.copies_state,
        )

    @cached_property
    def language_model(self) -> TracedModel:
        """The traced model that `model` describes."""
        return language_model(self.model, self.dtype)

    @property
    def mode(self) -> Mode:
        """The tensor-parallel mode."""
        return self.topology.mode

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element of main gradients, master weights and losses, in float32 or wider."""
        return max(4, self.item_bytes)

    def state_bytes(self, name: str, layout: ParameterLayout) -> int:
        """Return the bytes of optimizer states per element of a parameter, without its master."""
        if (make := optimizer_of(self.optimizer, ())) is not None:
            return count_states(make) * self.wide_bytes
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        # A torch optimizer is asked for its own states; the built-in rules declare theirs.
        rule = values_of(name, layout, self.optimizer).rule
        kinds = update_rule(self.optimizer, rule).states(wide).values()
        return sum(dtype.itemsize for dtype in kinds)

    @property
    def gathers_weights(self) -> bool:
        """True if weights are sharded, and gathered for each use."""
        return self.mode.gathers_weights and self.topology.weight > 1

    @property
    def keeps_gathered(self) -> bool:
        """True if weights are gathered once a step, and kept."""
        return self.gathers_weights and not self.parallel.weight.reshard_after_forward

    @property
    def sums_locally(self) -> bool:
        """True if weight gradients are reduced by an all-to-all and a sum on each rank.

        It takes the place of a reduce-scatter (`parallel.weight.reduce_by`).
        """
        by = self.parallel.weight.reduce_by
        return by == "all_to_all" or (by == "auto" and self.on_cpu)

    @property
    def tokens_between(self) -> int:
        """Tokens of a row that a rank holds outside of attention and regions, as in a norm."""
        return self.tokens // (self.topology.tensor if self.mode.splits_sequence else 1)

    @cached_property
    def most_keys(self) -> int:
        """Index of the tensor rank whose queries see the most keys: it takes the most memory."""
        t, windows = self.topology, self.language_model.attention_windows
        if t.context == 1 or not windows:
            return 0
        # A slice of queries sees the earlier keys of its document that the window allows: count
        # the keys of each context rank's slices, once for each layer.
        lengths = (self.tokens // self.documents,) * self.documents
        laid_out = [
            sum(
                layers * (end - (0 if window is None else max(0, begin - window + 1)))
                for window, layers in windows
                for _, begin, end in held
            )
            for held in SequenceSplit.of(lengths, t.context, windows).slices
        ]
        return laid_out.index(max(laid_out)) * (t.head if t.head_first else 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.rows * self.tokens * self.micro_num * self.topology.data

    @cached_property
    def order(self) -> PipelineOrder:
        """The stages of each pipeline rank, and the order of their work."""
        return PipelineOrder(self.parallel.pipeline)

    @cached_property
    def between_stages(self) -> Transfer:
        """The transfer of a micro-batch to the next stage; its gradient has the same size."""
        hidden = self.language_model.hidden_size
        sent = self.rows * self.tokens_between * hidden * self.item_bytes
        return Transfer("send", Axis.PIPELINE.value, Tag(Purpose.STAGE_ACTIVATION), sent)

    def neighbors(self, rank: int) -> list[tuple[bool, bool]]:
        """Return, for each chunk of a pipeline rank, whether it exchanges tensors with neighbors.

        The first flag is True if another rank has the previous stage, the second if another rank
        has the next stage; both are False where there is no such stage.

        A V schedule has consecutive stages on one rank, which send nothing to each other.
        """
        own, last = self.order.stages_of(rank), self.order.num_stages - 1
        return [
            (stage > 0 and stage - 1 not in own, stage < last and stage + 1 not in own)
            for stage in own
        ]

    @property
    def few_micro_batches(self) -> int:
        """Micro-batches of a step that longer steps are extrapolated from: [Note: Long steps]."""
        pipeline = self.parallel.pipeline
        rest = self.micro_num % pipeline.size
        return min(self.micro_num, (2 + pipeline.num_chunks) * pipeline.size + rest)

    def place(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank."""
        topology = self.topology
        in_stage = rank % topology.stage
        return Coordinates(
            tensor=rank % topology.tensor,
            weight=rank % topology.weight,
            zero1=in_stage // topology.weight % topology.zero1,
            stage=rank // topology.stage,
        )

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in a group of `axis`.

        `Topology.size` lists all groups to find it, which is slow for large worlds.
        """
        if axis is Axis.EMBEDDING:
            return min(2, self.topology.pipeline)
        # `Topology` has a field with the size of each axis, called as the axis but for the world.
        name = "world_size" if axis is Axis.WORLD else axis.value
        size: int = getattr(self.topology, name)
        return size
