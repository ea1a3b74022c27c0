"""`Topology`, the sizes and groups of all ranks of a run, as plain arithmetic.

    activations   (pipeline, data,        tensor)    tensor = ranks that share one sequence
    weights       (pipeline, weight_data, weight)    weight = ranks that share a copy of weights

Both are meshes over the same ranks, in Megatron-LM's order: the last axis varies fastest. In isp
mode the two are sized independently; in the other modes the weights are split over the tensor
group, so that weight *is* tensor and weight_data *is* data.

Axes with the same ranks share a process group if neither delays the other.
See [Note: Shared groups] in docs/design/notes/mesh.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from isp.core.mesh.config import Mode, ParallelConfig
from isp.core.mesh.partition import any_of, divisors
from isp.utils.text import counted

__all__ = ["Axis", "Topology"]


class Axis(StrEnum):
    """A division of the world into groups; every rank is in exactly one group of each axis."""

    __hash__ = str.__hash__  # Python 3.11's Enum hashes in Python code, which slows every look-up

    TENSOR = "tensor"
    """Ranks that share one sequence (the TP group; in isp mode the SP group)."""
    HEAD = "head"
    """Ranks of a tensor group that exchange tokens for heads; without sequence_2D, all of it."""
    CONTEXT = "context"
    """Ranks of a tensor group with the same heads, which exchange keys and values."""
    DATA = "data"
    """Ranks with the same position in their sequence, on different data."""
    WEIGHT = "weight"
    """Ranks that together hold one copy of a stage's weights."""
    EXPERT = "expert"
    """Ranks of a weight group that have different experts of a layer, and send each other tokens;
    without expert parallelism, the rank alone."""
    EXPERT_WEIGHT = "expert_weight"
    """Ranks of a weight group that gather the same experts; by default all of the group."""
    WEIGHT_DATA = "weight_data"
    """Ranks that hold the same weight shard."""
    ZERO1 = "zero1"
    """Ranks over which the optimizer states of one weight shard are split."""
    PIPELINE = "pipeline"
    """Ranks with the same index in each stage."""
    EMBEDDING = "embedding"
    """Ranks with the same index in the first and the last stage; in those between, the rank alone.
    """
    STAGE = "stage"
    """All ranks of one pipeline stage: data x tensor = weight_data x weight."""
    WORLD = "world"
    """All ranks."""


_FULLY_SHOWN_RANKS = 16
"""Largest world size for which every group is printed, with every rank."""
_SHOWN_WORDS = 4
"""Lists of up to so many ranks or groups are printed completely in larger worlds, too."""
_MAY_SHARE = (
    (Axis.TENSOR, Axis.EXPERT),
    (Axis.WORLD, Axis.STAGE, Axis.DATA, Axis.EMBEDDING),
    (Axis.WEIGHT_DATA, Axis.ZERO1),
)
"""Axes that share a process group if they have the same ranks [Note: Shared groups]."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The sizes of a run and the groups of ranks that follow from them; makes no process groups.

    Raises ValueError, naming the key, its value and the accepted ones, if the sizes do not fit.
    """

    world_size: int
    """Number of all ranks."""
    mode: Mode
    tensor: int
    """Number of ranks that share one sequence."""
    weight: int
    """Number of ranks that together have one copy of a stage's weights."""
    pipeline: int
    """Number of pipeline stages."""
    zero1: int
    """Number of ranks over which the optimizer states of one weight shard are split."""
    context: int = 1
    """Number of ranks of a tensor group that attend with the same heads."""
    expert: int = 1
    """Number of ranks of a weight group that have different experts."""
    head_first: bool = True
    """True if ranks of a head group are neighbors, False if ranks of a context group are."""
    reduces_apart: bool = False
    """True if gradients of weights are reduced over process groups of their own."""

    @classmethod
    def create(cls, world_size: int, parallel: ParallelConfig) -> Topology:
        """Return the topology of `parallel` on `world_size` ranks.

        Raises ValueError, naming the key, if a size does not divide the number of ranks over which
        its groups are made.
        """
        mode, tensor, pipeline = parallel.tensor.mode, parallel.tensor.size, parallel.pipeline.size
        # In other modes than isp, weights are cut over the tensor group.
        weight = parallel.weight.size if mode.gathers_weights else tensor
        _require_divides("parallel.pipeline.size", pipeline, "the world size", world_size)
        stage = world_size // pipeline
        ranks = "the world size" if pipeline == 1 else "the ranks of one pipeline stage"
        _require_divides("parallel.tensor.size", tensor, ranks, stage)
        if mode.gathers_weights:
            _require_divides("parallel.weight.size", weight, ranks, stage)
        replicas = stage // weight
        # 0 and -1 mean all replicas.
        zero1 = parallel.zero1.size if parallel.zero1.size > 0 else replicas
        axis = Axis.WEIGHT_DATA if mode.gathers_weights else Axis.DATA
        _require_divides("parallel.zero1.size", zero1, f"the {axis} size", replicas)
        return cls(
            world_size=world_size,
            mode=mode,
            tensor=tensor,
            weight=weight,
            pipeline=pipeline,
            zero1=zero1,
            context=parallel.context_size,
            expert=parallel.expert.size,
            head_first=parallel.sequence_2D.device_placement_strategy.head_first,
            reduces_apart=mode.gathers_weights and parallel.weight.reduces_apart,
        )

    @property
    def head(self) -> int:
        """Number of ranks of a tensor group that exchange tokens for heads."""
        return self.tensor // self.context

    @property
    def expert_weight(self) -> int:
        """Number of ranks that gather the same experts."""
        return self.weight // self.expert

    @property
    def experts_stay(self) -> bool:
        """True if each expert is on one rank as a whole."""
        return self.expert > 1 and self.expert_weight == 1

    @property
    def stage(self) -> int:
        """Number of ranks in one pipeline stage."""
        return self.world_size // self.pipeline

    @property
    def data(self) -> int:
        """Number of tensor groups in a stage, each of which computes another sequence."""
        return self.stage // self.tensor

    @property
    def weight_data(self) -> int:
        """Number of weight groups in a pipeline stage; each has one whole copy of the weights."""
        return self.stage // self.weight

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in a group of `axis` (for embedding: in the first group)."""
        return len(self.groups(axis)[0])

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return every group of `axis`, each a list of ranks in the group's own order."""
        stages = _consecutive(range(self.world_size), self.stage)
        match axis:
            case Axis.WORLD:
                return [list(range(self.world_size))]
            case Axis.STAGE:
                return stages
            case Axis.PIPELINE:
                return _strided(range(self.world_size), self.stage)
            case Axis.EMBEDDING:
                pipelines = self.groups(Axis.PIPELINE)
                # With one stage, a group is one rank. Ranks of stages between the first and the
                # last are alone in their groups, too.
                ends = [sorted({pipeline[0], pipeline[-1]}) for pipeline in pipelines]
                return ends + [[rank] for pipeline in pipelines for rank in pipeline[1:-1]]
            case Axis.TENSOR:
                return [g for s in stages for g in _consecutive(s, self.tensor)]
            case Axis.HEAD | Axis.CONTEXT:
                # The ranks of a group are neighbors along one of these two axes. Along the other, a
                # group has every `near`-th rank of the tensor group.
                near = self.head if self.head_first else self.context
                cut = _consecutive if (axis is Axis.HEAD) is self.head_first else _strided
                return [g for sequence in self.groups(Axis.TENSOR) for g in cut(sequence, near)]
            case Axis.DATA:
                return [g for s in stages for g in _strided(s, self.tensor)]
            case Axis.WEIGHT:
                return [g for s in stages for g in _consecutive(s, self.weight)]
            # Neighbors gather the same experts; ranks with different experts are further apart.
            case Axis.EXPERT:
                weights = self.groups(Axis.WEIGHT)
                return [g for ranks in weights for g in _strided(ranks, self.expert_weight)]
            case Axis.EXPERT_WEIGHT:
                weights = self.groups(Axis.WEIGHT)
                return [g for ranks in weights for g in _consecutive(ranks, self.expert_weight)]
            case Axis.WEIGHT_DATA:
                return [g for s in stages for g in _strided(s, self.weight)]
            case Axis.ZERO1:
                replicas = self.groups(Axis.WEIGHT_DATA)
                return [g for ranks in replicas for g in _consecutive(ranks, self.zero1)]

    def channel_axis(self, axis: Axis) -> Axis:
        """Return the axis whose channel `axis` uses, because it has the same ranks and purpose.

        This is `axis` itself, with two exceptions. Head or context uses the channel of tensor if it
        has all ranks of the tensor group. Without expert parallelism, expert_weight uses the
        channel of weight.
        """
        if axis is Axis.EXPERT_WEIGHT and self.expert == 1:
            return Axis.WEIGHT
        parts = {Axis.HEAD: self.head, Axis.CONTEXT: self.context}
        return Axis.TENSOR if parts.get(axis) == self.tensor else axis

    def group_axis(self, axis: Axis) -> Axis:
        """Return the axis whose process group `axis` uses.

        This is the first axis with the same ranks among those that may share a group with `axis`,
        else `axis` itself. See [Note: Shared groups] in docs/design/notes/mesh.md.
        """
        if axis is Axis.WEIGHT and not self.mode.gathers_weights:
            # In these modes the axis has the ranks of the tensor axis, and no weights are sent.
            return Axis.TENSOR
        # Compare all groups of the axes, not only this rank's, so that all ranks get one result.
        kind = next((axes for axes in _MAY_SHARE if axis in axes), (axis,))
        return next(a for a in kind if sorted(self.groups(a)) == sorted(self.groups(axis)))

    @property
    def process_groups(self) -> dict[Axis, list[Axis]]:
        """The process groups with several ranks: each axis that owns one, and the axes that use it.

        A key is an axis that has a process group; its value lists this axis and the axes that share
        the group.
        """
        shared: dict[Axis, list[Axis]] = {}
        for axis in Axis:
            if self.channel_axis(axis) is axis and max(map(len, self.groups(axis))) > 1:
                shared.setdefault(self.group_axis(axis), []).append(axis)
        return shared

    def group_of(self, axis: Axis, rank: int) -> list[int]:
        """Return the group of `axis` that contains `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def index(self, axis: Axis, rank: int) -> int:
        """Return the index of `rank` in its group of `axis`."""
        return self.group_of(axis, rank).index(rank)

    def sizes(self) -> list[str]:
        """Return the sizes of the meshes as lines: `world 8 = pipeline 1 x data 4 x tensor 2`."""
        world = f"world {self.world_size} = pipeline {self.pipeline}"
        lines = [f"{world} x data {self.data} x tensor {self.tensor}"]
        if self.context > 1:
            lines.append(f"tensor {self.tensor} = head {self.head} x context {self.context}")
        if self.mode.gathers_weights:
            lines.append(f"{world} x weight_data {self.weight_data} x weight {self.weight}")
        if self.expert > 1:
            whole = f"{'weight' if self.mode.gathers_weights else 'tensor'} {self.weight}"
            own = f"expert {self.expert} x expert_weight {self.expert_weight}"
            lines.append(f"{whole} = {own}, expert_data {self.weight_data}")
        return lines

    def describe(self) -> str:
        """Return sizes and groups as text, as `isp topology` prints them."""
        shown = [Axis.TENSOR, Axis.DATA, Axis.PIPELINE]
        if self.context > 1:
            shown[1:1] = [Axis.HEAD, Axis.CONTEXT]
        if self.mode.gathers_weights:
            shown[-1:-1] = [Axis.WEIGHT, Axis.WEIGHT_DATA]
        if self.expert > 1:
            shown[-1:-1] = [Axis.EXPERT, Axis.EXPERT_WEIGHT]
        shown.append(Axis.ZERO1)
        lines = [f"mode {self.mode}", *self.sizes()]
        width = max(len(axis) for axis in shown)
        for axis in shown:
            groups = [f"[{', '.join(self._shown(map(str, g)))}]" for g in self.groups(axis)]
            lines.append(f"{axis:<{width}}  {'  '.join(self._shown(groups))}")
        return "\n".join([*lines, self._describe_process_groups()])

    def _shown(self, words: Iterable[str]) -> list[str]:
        """Return `words` for the log; in a large world only the first three and last of many."""
        every = list(words)
        if self.world_size <= _FULLY_SHOWN_RANKS or len(every) <= _SHOWN_WORDS:
            return every
        return [*every[:3], "..", every[-1]]

    def _describe_process_groups(self) -> str:
        """Return the process groups in words: `2 process groups per rank: tensor, world = stage`.

        A second line names the groups for values in CPU memory, of which a run on GPUs opens more.
        """
        named = [" = ".join(axes) for axes in self.process_groups.values()]
        if self.reduces_apart and self.weight > 1:
            named.append("gradients of weight")
        why = " (axes with the same ranks share a group where neither delays the other)"
        shares = any(len(axes) > 1 for axes in self.process_groups.values())
        count = f"{counted(len(named), 'process group')} per rank"
        line = f"{count}: {', '.join(named) or 'none'}{why if shares else ''}"
        if self.world_size == 1:
            return line
        # The groups that `Mesh.open_host` and the checkpointer open.
        hosts = ["host", *(["tensor_host"] if self.tensor > 1 else []), "checkpoint"]
        of_gpus = f"on GPUs {len(hosts)}: {', '.join(hosts)}"
        return f"{line}\na run adds 1 for values in CPU memory: {hosts[-1]}; {of_gpus}"


def _require_divides(key: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        raise ValueError(
            f"{key}={value} must divide {whole_name} {whole}: use {any_of(divisors(whole))}"
        )


def _consecutive(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Return `ranks` cut into groups of `size` neighbors."""
    return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]


def _strided(ranks: Sequence[int], stride: int) -> list[list[int]]:
    """Return `ranks` cut into `stride` groups, each of every `stride`-th rank."""
    return [list(ranks[i::stride]) for i in range(stride)]
