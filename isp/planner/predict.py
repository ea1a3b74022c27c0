"""Prediction of a step's time: few micro-batches are simulated and extrapolated to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from isp.core.pipeline.order import timeline
from isp.core.weights.uses import ActionKind, Block
from isp.planner.case import PlanCase
from isp.planner.costs import Costs
from isp.planner.declared import kinds_of, shape_of
from isp.planner.fabric import Fabric
from isp.planner.record import BlockRecord, Compute, Read, Work
from isp.planner.rehearsal import records_of
from isp.planner.walk import Walked, walk

__all__ = ["Prediction", "predict"]

_FORWARD = ActionKind.FORWARD


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted times of one step, in seconds, for the rank that takes longest."""

    step: float
    """Seconds from the start of a step to the start of the next one."""
    exposed: float
    """Seconds spent waiting for transfers and for slower ranks."""
    bubble: float
    """Seconds in a step for which a pipeline stage waits for other stages."""
    communication: float
    """Sum of the durations of all transfers, in seconds."""
    model_flops: float
    """FLOPs of a rank by `TracedModel.flops`, which leaves out recomputation."""
    tokens: int
    """Number of tokens in the global batch of a step."""

    @property
    def tflops(self) -> float:
        """Return the model TFLOP/s of a rank."""
        return self.model_flops / self.step / 1e12

    def tgs(self, world_size: int) -> float:
        """Return tokens per rank and second."""
        return self.tokens / self.step / world_size


def predict(case: PlanCase, fabric: Fabric) -> Prediction:
    """Return the predicted times of a step of `case` on `fabric`."""
    if case.topology.pipeline == 1:
        step, exposed, bubble, busy = _one_stage(case, fabric)
    else:
        step, exposed, bubble, busy = _pipeline(case, fabric)
    # Slow ranks lengthen compute only: the time in which a rank waits does not grow with it.
    straggling = fabric.straggling_over(case.topology.world_size) * (step - exposed - bubble)
    documents = case.rows * case.documents * case.micro_num
    lengths = [case.tokens // case.documents] * documents
    flops = case.language_model.flops(lengths) * case.topology.data / case.topology.world_size
    return Prediction(
        step=step + straggling,
        exposed=exposed + straggling,
        bubble=bubble,
        communication=busy,
        model_flops=flops,
        tokens=case.tokens_per_step,
    )


def _one_stage(case: PlanCase, fabric: Fabric) -> tuple[float, float, float, float]:
    """Return step, exposed, bubble and communication seconds without a pipeline.

    At most four micro-batches are simulated; each further one takes as long as the third.
    """
    few = min(case.micro_num, 4)
    walked = walk(case, fabric, 0, few)
    step, exposed = walked.working + walked.tail, walked.waiting
    # The first micro-batches fill the prefetch and the last one ends it: the third is typical.
    third = [(took, waited) for a, took, waited in walked.actions if a.micro_batch == 2]
    # Micro-batches that were not simulated.
    more = case.micro_num - few
    step += more * sum(took for took, _ in third)
    exposed += more * sum(waited for _, waited in third)
    busy = walked.busy
    if more:
        # `busy` is a sum over the step: what a shorter step lacks is the share of a micro-batch.
        busy += more * (busy - walk(case, fabric, 0, few - 1).busy)
    return step, exposed, 0.0, busy


def _pipeline(case: PlanCase, fabric: Fabric) -> tuple[float, float, float, float]:
    """Return step, exposed, bubble and communication seconds of a pipeline."""
    few, period = case.few_micro_batches, case.topology.pipeline
    order, walks = case.order, _walks(case, fabric, few)
    costs = {
        # The timeline of all stages is made of the median duration of each action.
        (order.stages_of(rank)[chunk], kind): _typical(walked, chunk, kind)
        for rank, walked in enumerate(walks)
        for chunk in range(case.parallel.pipeline.num_chunks)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    }
    halves = _weight_gradients(case, fabric)

    # A split backward is two actions: BACKWARD without the weight gradients, and WEIGHT_GRADIENT.
    # The simulation always has them together, so they are subtracted here.
    def cost(stage: int, kind: ActionKind) -> float:
        if kind is ActionKind.WEIGHT_GRADIENT:
            return halves[stage]
        return costs[stage, kind] - (halves[stage] if kind is ActionKind.BACKWARD else 0.0)

    send = fabric.seconds(case, case.between_stages)
    end, times = timeline(order, few, cost, send=send).end, (case.micro_num - few) / period

    def whole(short: float, longer: float) -> float:
        """Extrapolate from a short step and one that is a period longer: [Note: Long steps]."""
        return short + times * (longer - short)

    longer_walks = walks
    if times:
        end = whole(end, timeline(order, few + period, cost, send=send).end)
        longer_walks = _walks(case, fabric, few + period)
    if case.keeps_gathered:
        # The first forward of each stage gathers the weights for the whole step, and the stages do
        # so one after another.
        end += sum(map(_first_beyond_typical, walks))
    # The end of the timeline includes the waits for other stages. The rank with the most work waits
    # least: the rest of its time is the bubble.
    pairs = list(zip(walks, longer_walks, strict=True))
    work = max(whole(short.working, longer.working) for short, longer in pairs)
    exposed = max(whole(short.waiting, longer.waiting) for short, longer in pairs)
    busy = max(whole(short.busy, longer.busy) for short, longer in pairs)
    return end + max(walked.tail for walked in walks), exposed, max(0.0, end - work), busy


def _walks(case: PlanCase, fabric: Fabric, micro_num: int) -> list[Walked]:
    """Simulate each rank of a pipeline, once for ranks with the same kinds of blocks."""
    known: dict[object, Walked] = {}
    found = []
    for rank in range(case.topology.pipeline):
        chunks = shape_of(case, rank).chunks
        # Ranks differ in the number of forwards before the first backward, and with it in which
        # gathers the prefetch plan can leave out, so ranks that gather weights share no simulation.
        warm_up = rank if case.gathers_weights else 0
        key = warm_up, tuple(tuple(kinds_of(case, rank, chunk).values()) for chunk in chunks)
        if key not in known:
            known[key] = walk(case, fabric, rank * case.topology.stage, micro_num)
        found.append(known[key])
    return found


def _typical(walked: Walked, chunk: int, kind: ActionKind) -> float:
    """Return the median duration of a chunk's actions of one kind."""
    return median(took for a, took, _ in walked.actions if a.chunk == chunk and a.kind is kind)


def _first_beyond_typical(walked: Walked) -> float:
    """Return by how many seconds a rank's first forwards exceed the median forward.

    If weights stay gathered, the first forward of each chunk gathers them for the whole step. The
    first micro-batch passes through the stages one after another, so these seconds add up over
    ranks.
    """
    firsts = {a.chunk: took for a, took, _ in reversed(walked.actions) if a.kind is _FORWARD}
    return sum(took - _typical(walked, chunk, _FORWARD) for chunk, took in firsts.items())


def _weight_gradients(case: PlanCase, fabric: Fabric) -> dict[int, float]:
    """Return the seconds of each stage's weight gradients, which a split backward postpones."""
    costs, place = Costs(case, case.place(0), fabric.device, fabric.host), case.place(0)

    def seconds(rank: int, blocks: tuple[Block, ...]) -> float:
        found = records_of(case, place._replace(stage=rank), blocks)
        products = (p for block in blocks for p in _postponed(block, found[block.name]))
        return sum(map(costs.compute, products))

    return {
        stage: seconds(rank, blocks)
        for rank in range(case.topology.pipeline)
        for stage, blocks in zip(
            case.order.stages_of(rank), shape_of(case, rank).chunks, strict=True
        )
    }


def _postponed(block: Block, record: BlockRecord) -> Iterator[Compute]:
    """Yield the products whose weight gradient a split backward postpones.

    A layer that computes its weight gradient in parts, such as one in tiles, cannot postpone it.
    The declared use of such a layer has `in_recompute=False`.
    """
    # A product belongs to the use whose weight was read last. Its weight gradient has as many FLOPs
    # as the product itself, so the events of forward can be charged for it.
    waits = True
    for event in record.forward:
        if isinstance(event, Read):
            waits = block.uses[event.use].in_recompute
        elif isinstance(event, Compute) and event.kind is Work.PRODUCT and waits:
            yield event
