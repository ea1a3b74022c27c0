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
from isp.planner.saved import logits

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """What the rank at `place` computes."""

    case: Case
    place: Place
    device: DeviceSpec

    def product(self, name: str) -> float:
        """Seconds of one product of the visit `name`: forward, or one of its two gradients."""
        return self._product_seconds.get(name, 0.0)

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

    def passes(self, name: str) -> float:
        """Seconds of what precedes the product of visit `name` in forward: passes over memory, and
        with the first of a block its gaps between kernels."""
        return self._passes_seconds.get(name, 0.0)

    @cached_property
    def loss(self) -> float:
        """Seconds of the loss, one way."""
        return self._over_memory(logits(self.case) * 4 * self.case.wide_bytes)

    @cached_property
    def update(self) -> float:
        """Seconds of the norm, the update and packing of what is published."""
        numbers = sum(p.parameter.numel() for p in local_parameters(self.case, self.place))
        case, owned = self.case, numbers / self.case.topology.zero1
        wide, item = case.wide_bytes, case.item_bytes
        published = 3 * numbers * item if case.topology.zero1 > 1 else 0
        updated = owned * (3 * wide + 2 * case.state_bytes + item)
        return self._over_memory(numbers * wide + updated + published)

    @property
    def forward_flops(self) -> float:
        """FLOPs of one forward through a whole block and its attention."""
        return self._block_flops + self.attention_flops

    # -- inside ------------------------------------------------------------------------------

    @cached_property
    def _peak(self) -> float:
        wide = self.case.item_bytes >= 4
        return (self.device.wide_tflops if wide else self.device.tflops) * 1e12

    def _over_memory(self, num_bytes: float) -> float:
        return num_bytes / (self.device.gb_per_second * 1e9 * self.device.memory_efficiency)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Parameters that a rank multiplies in each visit."""
        model, parts = self.case.model, self.case.feature_parts
        query, key = model.num_heads * model.head_size, model.kv_heads * model.head_size
        hidden, inner = model.hidden_size, model.intermediate_size
        return {
            "wqkv": hidden * (query + 2 * key) // parts,
            "wo": hidden * query // parts,
            "w1": 2 * hidden * inner // parts,
            "w2": hidden * inner // parts,
            "head": hidden * -(-model.vocab_size // parts),
        }

    @property
    def _block_flops(self) -> float:
        tokens = self.case.rows * self.case.tokens_inside
        return 2.0 * tokens * sum(n for name, n in self._sizes.items() if name != "head")

    @cached_property
    def _product_seconds(self) -> dict[str, float]:
        rate = self._peak * self.device.efficiency
        tokens = self.case.rows * self.case.tokens_inside
        return {name: 2 * tokens * n / rate for name, n in self._sizes.items()}

    @cached_property
    def _passes_seconds(self) -> dict[str, float]:
        case, model, item = self.case, self.case.model, self.case.item_bytes
        hidden = case.rows * case.tokens_between * model.hidden_size * item
        inside = case.rows * case.tokens_inside * item // case.feature_parts
        turned = inside * (model.num_heads + model.kv_heads) * model.head_size
        norm_and_sum = 5 * hidden
        return {
            "embedding": self._over_memory(2 * hidden),
            "wqkv": self._over_memory(norm_and_sum + 2 * turned) + self.device.layer_us * 1e-6,
            "w1": self._over_memory(norm_and_sum),
            "w2": self._over_memory(3 * inside * model.intermediate_size),
            "head": self._over_memory(2 * hidden),
        }
