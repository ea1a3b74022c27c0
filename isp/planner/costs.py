"""Seconds of compute of each visit of a step on one rank.

Products take 2 FLOPs for each pair of token and parameter forward, as many for each of the two
gradients. Attention over a causal document of n tokens has n^2 / 2 pairs of 4 d FLOPs a head; its
backward multiplies five times where the forward multiplies twice (Dao 2023, FlashAttention-2).
What only passes over memory (norms, rotations, activation, loss) is counted in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from isp.attention.heads import HeadPlan
from isp.planner.case import Case, Place
from isp.planner.declared import local_parameters
from isp.planner.fabric import DeviceSpec
from isp.weights.trace import Block

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """Costs of the rank at `place`."""

    case: Case
    place: Place
    device: DeviceSpec

    def product(self, flops: int) -> float:
        """Seconds of a product of matrices."""
        return flops / (self._peak * self.device.efficiency)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of local attention, forward and backward."""
        rate = self._peak * self.device.attention_efficiency
        return self.attention_flops / rate, 2.5 * self.attention_flops / rate

    @cached_property
    def attention_flops(self) -> float:
        """FLOPs of local attention in one forward of a micro-batch."""
        case, model = self.case, self.case.model
        length = case.tokens // case.documents
        reach = length if model.sliding_window is None else min(length, model.sliding_window)
        pairs = case.rows * case.documents * reach * (2 * length - reach) / 2
        heads = model.num_heads / case.feature_parts
        if not case.mode.facts.splits_features:
            plan = HeadPlan.of(model.num_heads, model.kv_heads, case.topology.tensor)
            heads = max(len(part) for part in plan.query)  # the busiest rank decides
        return 4 * pairs * heads * model.head_size

    def before(self, block: Block, number: int) -> float:
        """Seconds of what precedes the product of a visit of a block in forward.

        Passes over memory, and with the first visit of a layer the gaps between its kernels.
        Raises ValueError if the model does not say what passes there.
        """
        visit = block.visits[number]
        if visit.passes is None:
            raise ValueError(
                f"the time of {visit.name} in {block.name} cannot be planned: its DeclaredVisit"
                f" does not say what `passes` over memory before it"
            )
        case, (between, inside) = self.case, visit.passes
        numbers = case.tokens_between * between + case.tokens_inside * inside // case.feature_parts
        gaps = self.device.layer_us * 1e-6 if number == 0 and len(block.visits) > 1 else 0.0
        return self._over_memory(case.rows * numbers * case.item_bytes) + gaps

    @cached_property
    def loss(self) -> float:
        """Seconds of the loss, one way."""
        return self._over_memory(self.case.logits * 4 * self.case.wide_bytes)

    @cached_property
    def update(self) -> float:
        """Seconds of the norm, the update and packing of what is published."""
        numbers = sum(p.parameter.numel() for p in local_parameters(self.case, self.place))
        case, owned = self.case, numbers / self.case.topology.zero1
        wide, item = case.wide_bytes, case.item_bytes
        published = 3 * numbers * item if case.topology.zero1 > 1 else 0
        updated = owned * (3 * wide + 2 * case.state_bytes + item)
        return self._over_memory(numbers * wide + updated + published)

    # -- inside ------------------------------------------------------------------------------

    @cached_property
    def _peak(self) -> float:
        wide = self.case.item_bytes >= 4
        return (self.device.wide_tflops if wide else self.device.tflops) * 1e12

    def _over_memory(self, num_bytes: float) -> float:
        return num_bytes / (self.device.gb_per_second * 1e9 * self.device.memory_efficiency)
