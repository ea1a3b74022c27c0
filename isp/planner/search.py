"""Search over the layouts of a model: which ones fit, their step times, and why not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from operator import attrgetter

from isp.config import JobConfig
from isp.core.comm.host_offload import TO_HOST
from isp.core.comm.tag import Purpose, Tag, Transfer
from isp.core.mesh import ContextExchange, Mode, Sequence2DConfig
from isp.core.mesh.config import PipelineSchedule
from isp.core.mesh.partition import divisors
from isp.core.mesh.phase import Phase
from isp.core.weights.uses import Block
from isp.planner.case import PlanCase
from isp.planner.costs import Costs
from isp.planner.declared import BlockKind, all_blocks, kinds_of, shape_of
from isp.planner.exchange import with_exchange
from isp.planner.experts import expert_layers, spread_instead, with_spread_experts
from isp.planner.fabric import Fabric
from isp.planner.lengths import Budget, Show, silent
from isp.planner.memory import Memory, peak
from isp.planner.predict import Prediction, predict
from isp.planner.record import BlockRecord, Compute, Launch, Reach
from isp.planner.rehearsal import record_of_kind
from isp.step.job_models import check_models

__all__ = ["Candidate", "Found", "evaluate", "rows_of", "search"]

RECOMPUTE = ((0.0, False), (0.5, True), (1.0, True), (0.5, False), (1.0, False))
"""Choices of `model.checkpoint` and `model.checkpoint_keeps_attention`, the cheapest first."""
WALKED = 24
"""Number of layouts whose step is simulated: those with the best estimates (`_estimate`)."""
WALKED_OF_MODE = 4
"""Number of layouts of each mode whose step is simulated in any case."""
TRIED_TO_STAY = 4
"""Number of the fastest layouts that are also tried with weights that stay gathered."""
STAYS_BELOW = 0.99
"""Weights stay gathered if this takes less than this share of the step time without."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its planned memory and time."""

    config: JobConfig
    case: PlanCase
    memory: Memory
    """Memory of the rank that takes the most."""
    prediction: Prediction | None = None
    """Time of a step; None if it was not predicted."""

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step; 0 without a prediction."""
        return self.prediction.step if self.prediction is not None else 0.0

    @property
    def overrides(self) -> list[str]:
        """Return the command-line words that choose this layout; equal layouts have equal words."""
        parallel, model, data = self.config.parallel, self.config.model, self.config.data
        t = self.case.topology
        words: dict[str, object] = {
            "parallel.tensor.mode": t.mode,
            "parallel.tensor.size": t.tensor,
        }
        if t.mode.gathers_weights:
            words["parallel.weight.size"] = t.weight
            words["parallel.weight.reshard_after_forward"] = not self.case.keeps_gathered
        words["parallel.pipeline.size"] = t.pipeline
        words["parallel.zero1.size"] = t.zero1
        words["data.micro_bsz"] = data.micro_bsz
        words["data.micro_num"] = data.num_micro_batches
        words["model.checkpoint"] = model.checkpoint
        if model.checkpoint:
            words["model.checkpoint_keeps_attention"] = model.checkpoint_keeps_attention
        if expert_layers(self.case):
            words["parallel.expert.size"] = t.expert
        if self.config.training.global_batch_size is not None:
            words["training.global_batch_size"] = self.config.training.global_batch_size
        if t.mode.slices_batch and parallel.sequence_2D.enable:
            two = "parallel.sequence_2D"
            words |= {
                f"{two}.enable": True,
                f"{two}.head_size": t.head,
                f"{two}.context_size": t.context,
                f"{two}.exchange": parallel.sequence_2D.exchange,
                f"{two}.device_placement_strategy.head_first": t.head_first,
            }
        return [
            f"--{key} {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in words.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Layouts that a search has compared: those that fit, and why others do not."""

    world_size: int
    rows: int
    """Number of sequences in the global batch of a step."""
    fabric: Fabric
    own: Candidate | str
    """The configuration's own layout, or the reason why it is refused."""
    fitting: tuple[Candidate, ...]
    """Layouts whose time was predicted, the fastest first."""
    num_fitting: int
    """Number of all layouts that fit into memory, of which some have no predicted time."""
    too_large: tuple[Candidate, ...]
    """For each mode and tensor size without a fitting layout, the layout with the least memory."""
    refused: tuple[str, ...]
    """Why group sizes were refused before their memory was planned; each reason once."""

    def fits(self, candidate: Candidate) -> bool:
        """Return True if a rank has enough memory for `candidate`."""
        return Budget.of(self.fabric, self.world_size).fits(candidate.memory)


def evaluate(config: JobConfig, world_size: int, fabric: Fabric, *, rows: int) -> Candidate:
    """Plan `config` as it is, with a global batch of `rows` sequences.

    Raises ValueError if its sizes do not fit, or the batch is not divisible.
    """
    data = config.topology(world_size).data
    config = _with_batch(config, rows, data, config.data.micro_bsz)
    candidate = _candidate(config, world_size, fabric)
    return replace(candidate, prediction=predict(candidate.case, fabric))


def rows_of(config: JobConfig, world_size: int) -> int:
    """Return the sequences per step that `config` asks for on `world_size` ranks."""
    parallel, data = config.parallel, config.data
    # Each tensor group of a stage reads its own sequences.
    replicas = max(1, world_size // (parallel.tensor.size * parallel.pipeline.size))
    rows = config.training.global_batch_size
    return rows or data.micro_bsz * data.num_micro_batches * replicas


def search(
    config: JobConfig,
    world_size: int,
    fabric: Fabric,
    *,
    rows: int | None = None,
    progress: Show = silent,
) -> Found:
    """Search the layouts of `config` with `rows` sequences a step on `world_size` ranks.

    Without `rows`, the batch of `config` is kept. Mode, tensor, heads x context, weight, pipeline,
    zero1, micro-batch and recomputation vary; all other keys are those of `config`. Of layouts that
    differ in recomputation only, the one that recomputes the least and fits is kept. The fastest
    layouts that gather weights are also tried with weights that stay gathered.
    """
    rows = rows or rows_of(config, world_size)
    own: Candidate | str
    try:
        own = evaluate(config, world_size, fabric, rows=rows)
    except ValueError as error:
        own = str(error)
    fitting, kept = list[Candidate](), list[Candidate]()
    smallest: dict[tuple[Mode, int], Candidate] = {}
    refused: dict[str, None] = {}
    budget = Budget.of(fabric, world_size)
    layouts = list(_layouts(config, world_size, fabric, rows, refused))
    for layout in progress(layouts, "memory of layouts"):
        found = _least_recomputed(layout, world_size, fabric, budget)
        # With `exchange: auto` context ranks gather keys and values if memory allows, else they
        # send them around a ring: plan the ring if the gather does not fit.
        if _may_ring(found) and not budget.fits(found.memory):
            layout = with_exchange(layout, ContextExchange.RING)
            found = _least_recomputed(layout, world_size, fabric, budget)
        # The alternative for experts: each one stays on one rank, and tokens are sent to it.
        others = (
            _least_recomputed(other, world_size, fabric, budget)
            for other in spread_instead(found.case, layout, fits=budget.fits(found.memory))
        )
        for one in (found, *others):
            group = one.case.mode, one.case.topology.tensor
            if budget.fits(one.memory):
                fitting.append(one)
            elif group not in smallest or one.memory.total < smallest[group].memory.total:
                smallest[group] = one
    # Simulating a step is slow, so only promising layouts are simulated.
    promising = progress(_promising(fitting, fabric), "time of layouts that fit")
    predicted = [replace(c, prediction=predict(c.case, fabric)) for c in promising]
    predicted.sort(key=attrgetter("seconds"))
    for candidate in [c for c in predicted if c.case.gathers_weights][:TRIED_TO_STAY]:
        there = _with_weights_kept(candidate, fabric)
        if budget.fits(there.memory):
            there = replace(there, prediction=predict(there.case, fabric))
            # Weights that stay gathered take memory, so they have to be clearly faster.
            if there.seconds < STAYS_BELOW * candidate.seconds:
                kept.append(there)
    # `smallest` is reported for a pair of mode and tensor size only if no layout of it fits.
    there_are = {(c.case.mode, c.case.topology.tensor) for c in fitting}
    return Found(
        world_size=world_size,
        rows=rows,
        fabric=fabric,
        own=own,
        fitting=tuple(sorted(predicted + kept, key=attrgetter("seconds"))),
        num_fitting=len(fitting) + len(kept),
        too_large=tuple(c for group, c in smallest.items() if group not in there_are),
        refused=tuple(refused),
    )


def _with_weights_kept(candidate: Candidate, fabric: Fabric) -> Candidate:
    """Return the layout of `candidate` with reshard_after_forward=false, and its memory."""
    parallel, world_size = candidate.config.parallel, candidate.case.topology.world_size
    weight = replace(parallel.weight, reshard_after_forward=False)
    config = replace(candidate.config, parallel=replace(parallel, weight=weight))
    return _candidate(config, world_size, fabric)


def _may_ring(candidate: Candidate) -> bool:
    """Return True if a ring may replace the planned gather of keys and values."""
    exchange = candidate.config.parallel.sequence_2D.exchange
    return candidate.case.topology.context > 1 and exchange is ContextExchange.AUTO


def _layouts(
    config: JobConfig, world_size: int, fabric: Fabric, rows: int, refused: dict[str, None]
) -> Iterator[JobConfig]:
    """Yield all valid layouts; the reasons why others are invalid are added to `refused`."""
    # A stage has at least one block; more than 32 stages are not tried, to keep the search short.
    pipelines = [n for n in divisors(world_size) if n <= min(config.model.num_layers, 32)]
    for mode, tensor, pipeline in product(Mode, divisors(world_size), pipelines):
        if world_size % (tensor * pipeline):
            continue

        stage = world_size // pipeline
        weights = divisors(stage) if mode.gathers_weights else [1]
        batches = sorted({1, config.data.micro_bsz})
        cuts = _cuts(config, mode, tensor, fabric)
        for two, weight, micro_bsz in product(cuts, weights, batches):
            # Number of replicas of a shard: of weights, or of features in modes without gathers.
            replicas = stage // (weight if mode.gathers_weights else tensor)
            for zero1 in _zero1_sizes(replicas, stage // replicas, fabric):
                try:
                    layout = _with_sizes(config, mode, tensor, two, weight, pipeline, zero1)
                    layout = _with_batch(layout, rows, stage // tensor, micro_bsz)
                except ValueError as error:
                    refused.setdefault(str(error))
                else:
                    yield layout


def _cuts(config: JobConfig, mode: Mode, tensor: int, fabric: Fabric) -> Iterator[Sequence2DConfig]:
    """Yield the ways to cut a tensor group into head ranks x context ranks.

    There are never more head ranks than heads. If the configuration does not enable context ranks,
    all ranks are head ranks; if the model has fewer KV heads than that, a cut is tried, too, in
    which no two head ranks need the same KV head. The placement of ranks varies only for groups
    over several nodes, where it matters.
    """
    two, model = config.parallel.sequence_2D, config.model
    contexts = [1]
    if mode.slices_batch and two.enable:
        contexts = divisors(tensor)
    elif mode.slices_batch and tensor <= model.num_heads:
        contexts = sorted({1, tensor // math.gcd(tensor, model.kv_heads)})
    for context in contexts:
        head = tensor // context
        if head > model.num_heads:
            continue
        cut = replace(two, enable=two.enable or context > 1, head_size=head, context_size=context)
        yield cut if cut.enable else two
        if two.enable and 1 < context < tensor and tensor > fabric.devices_per_node:
            place = two.device_placement_strategy
            other = replace(place, head_first=not place.head_first)
            yield replace(cut, device_placement_strategy=other)


def _zero1_sizes(replicas: int, stride: int, fabric: Fabric) -> list[int]:
    """Return the zero1 sizes to try: all replicas (-1), and the replicas within one node."""
    fit = (n for n in divisors(replicas) if n * stride <= fabric.devices_per_node)
    inside = max(fit, default=1)
    return [-1] if inside in (1, replicas) else [-1, inside]


def _with_sizes(
    config: JobConfig,
    mode: Mode,
    tensor: int,
    two: Sequence2DConfig,
    weight: int,
    pipeline: int,
    zero1: int,
) -> JobConfig:
    """Return `config` with these sizes; a pipeline of another size gets the 1F1B schedule."""
    config = with_spread_experts(config, 1)
    parallel, stages = config.parallel, config.parallel.pipeline
    if pipeline != stages.size:
        schedule = PipelineSchedule.ONE_F_ONE_B
        stages = replace(stages, size=pipeline, schedule=schedule, num_chunks=1)
    # Any number of micro-batches that the pipeline accepts; `_with_batch` sets the final one.
    micro_num = max(config.data.num_micro_batches, 2 * pipeline * stages.num_chunks)
    parallel = replace(
        parallel,
        tensor=replace(parallel.tensor, size=tensor, mode=mode),
        sequence_2D=two,
        weight=replace(parallel.weight, size=weight, reshard_after_forward=True),
        pipeline=stages,
        zero1=replace(parallel.zero1, size=zero1),
    )
    data = replace(config.data, micro_num=-(-micro_num // pipeline) * pipeline)
    return replace(config, data=data, parallel=parallel)


def _with_batch(config: JobConfig, rows: int, data: int, micro_bsz: int) -> JobConfig:
    """Return the layout with a global batch of `rows`.  Raises ValueError if not divisible."""
    if rows % (data * micro_bsz):
        raise ValueError(
            f"{rows} sequences a step cannot be shared by {data} data ranks in micro-batches of"
            f" {micro_bsz}: use a multiple of {data * micro_bsz} sequences"
        )
    sizes = replace(config.data, micro_bsz=micro_bsz, micro_num=rows // (data * micro_bsz))
    whole = None if config.training.global_batch_size is None else rows
    training = replace(config.training, global_batch_size=whole)
    found = replace(config, data=sizes, training=training)
    check_models(found)
    return found


def _least_recomputed(
    config: JobConfig, world_size: int, fabric: Fabric, budget: Budget
) -> Candidate:
    """Return `config` with the least recomputation that fits, or with all blocks recomputed."""

    def with_recompute(fraction: float, keeps: bool) -> Candidate:
        # Options that need recomputation are refused without it, so they are switched off.
        old, splits = config.model, config.parallel.tensor.mode.splits_sequence
        parts = old.checkpoint_distribute_activations and fraction > 0 and not splits
        model = replace(
            old,
            checkpoint=fraction,
            checkpoint_keeps_attention=keeps,
            checkpoint_distribute_activations=parts,
            checkpoint_offload=old.checkpoint_offload and fraction > 0,
            checkpoint_segment=0 if keeps or not fraction else old.checkpoint_segment,
        )
        return _candidate(replace(config, model=model), world_size, fabric)

    # Plan both ends first: the choices between them matter only if the least recomputation does not
    # fit and the most does.
    least, most = with_recompute(*RECOMPUTE[0]), with_recompute(*RECOMPUTE[-1])
    if budget.fits(least.memory):
        return least
    if not budget.fits(most.memory):
        return most
    between = (with_recompute(*choice) for choice in RECOMPUTE[1:-1])
    return next((one for one in between if budget.fits(one.memory)), most)


def _candidate(config: JobConfig, world_size: int, fabric: Fabric) -> Candidate:
    """Return the layout with its memory."""
    case = PlanCase.of(config, world_size, on_cpu=fabric.on_cpu)
    return Candidate(config, case, peak(case))


# -- estimates: which layouts to simulate ----------------------------------------------------


def _promising(candidates: list[Candidate], fabric: Fabric) -> list[Candidate]:
    """Return the best layouts by `_estimate`, and some of each mode."""
    ordered = sorted(candidates, key=lambda c: _estimate(c.case, fabric))
    chosen = ordered[:WALKED]
    for mode in Mode:
        of_mode = [c for c in ordered if c.case.mode is mode]
        chosen += [c for c in of_mode[:WALKED_OF_MODE] if c not in chosen]
    return chosen


def _estimate(case: PlanCase, fabric: Fabric) -> float:
    """Estimate the seconds of a step whose gathers and reductions overlap perfectly."""
    place, stages = case.place(0), case.topology.pipeline
    costs = Costs(case, place, fabric.device, fabric.host)
    kinds: dict[str, BlockKind] = {}
    for rank in range(stages):
        kinds |= kinds_of(case, rank, chain(*shape_of(case, rank).chunks))

    def seconds(blocks: Sequence[Block]) -> float:
        samples = {kinds[block.name]: block for block in blocks}
        counts = Counter(kinds[block.name] for block in blocks)
        return sum(
            n
            * _block_seconds(case, costs, fabric, samples[kind], record_of_kind(case, place, kind))
            for kind, n in counts.items()
        )

    first, *layers, last = all_blocks(case)
    block = seconds(layers)
    # Gathers of weights and reductions of gradients overlap with compute, so the slower one counts.
    if case.gathers_weights:
        counts = Counter(kinds[block.name] for block in layers)
        weights = (n * _weight_seconds(case, fabric, kind) for kind, n in counts.items())
        block = max(block, sum(weights))
    # Table and head are on different stages of a pipeline, so half of their time counts for each.
    micro = block / stages + seconds((first, last)) / (1 if stages == 1 else 2)
    update = costs.update + costs.newton_schulz(costs.of_matrices / case.topology.stage)
    # A pipeline of s stages takes as long as s - 1 further micro-batches: its bubble.
    return micro * (case.micro_num + stages - 1) + update + _gradient_seconds(case, fabric)


def _block_seconds(
    case: PlanCase, costs: Costs, fabric: Fabric, block: Block, record: BlockRecord
) -> float:
    """Return the seconds of a block's forward and backward without gathers and reductions.

    All other transfers count in full, as compute waits for them.
    """
    seconds = 0.0
    for event in (*record.forward, *record.backward):
        match event:
            # Copies to the host overlap with forward, so they do not count.
            case Launch(transfer) if transfer.kind != TO_HOST:
                seconds += fabric.seconds(case, transfer)
            case Compute():
                seconds += costs.compute(event)
            case Reach(use, phase) if block.uses[use].weight is not None:
                passes = 2 if phase is Phase.BACKWARD else 1
                seconds += passes * costs.before(block, use)
    return seconds


def _weight_seconds(case: PlanCase, fabric: Fabric, kind: BlockKind) -> float:
    """Return the seconds to gather a block's weights twice and reduce its gradients."""
    # Of a weight with n elements, each rank of a weight group of w sends n / w to the w - 1 others.
    numbers = sum(math.prod(shape) for _, shape in kind[1] if shape)
    sent = int(numbers * case.item_bytes / case.topology.weight * (case.topology.weight - 1))
    return 3 * fabric.seconds(case, Transfer("all_gather", "weight", Tag(Purpose.WEIGHT), sent))


def _gradient_seconds(case: PlanCase, fabric: Fabric) -> float:
    """Return the seconds to sum gradients over replicas and publish the updated weights."""
    topology = case.topology
    if topology.weight_data == 1:
        return 0.0
    # Summing and publishing together send as much as an all-reduce: 2 (n - 1) / n of the elements.
    own = case.language_model.num_parameters / topology.weight / topology.pipeline
    sent = int(2 * own * case.wide_bytes * (topology.weight_data - 1) / topology.weight_data)
    tag = Tag(Purpose.REPLICA_GRADIENT)
    return fabric.seconds(case, Transfer("all_reduce", "weight_data", tag, sent))
