"""Seconds of compute on one rank.

A product takes 2 FLOPs for each pair of token and parameter in forward, and twice that in backward.
Attention over a causal document of n tokens has n^2 / 2 pairs of 4 d FLOPs per head; its backward
has five products for the forward's two (Dao 2023, FlashAttention-2). Operations that are bound by
memory bandwidth (norms, rotary embedding, activation, loss) are counted in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from isp.core.optim.matrices import matrices_of
from isp.core.optim.update_rules import values_of
from isp.core.weights.uses import Block
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import updated_parameters
from isp.planner.fabric import DeviceSpec, HostSpec
from isp.planner.record import Compute, Work

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """Costs of compute on the rank at `place`, in seconds."""

    case: PlanCase
    place: Coordinates
    device: DeviceSpec
    host: HostSpec = field(default_factory=HostSpec)

    def compute(self, event: Compute) -> float:
        """Return the seconds of a computation."""
        return event.amount / self._rates[event.kind]

    def before(self, block: Block, number: int) -> float:
        """Return the seconds of the memory-bound operations before a use's product in forward.

        The first use of a decoder block also counts the gaps between the block's kernels.
        """
        passes = block.uses[number].passes
        assert passes is not None, "a traced model declares them"
        numbers = self.case.tokens_between * passes
        gaps = self.device.layer_us * 1e-6 if number == 0 and len(block.uses) > 1 else 0.0
        return self._over_memory(self.case.rows * numbers * self.case.item_bytes) + gaps

    @cached_property
    def update(self) -> float:
        """Return the seconds of the gradient norm, the update, and packing the published weights.

        Offloaded states travel to the device and back while the update runs.
        """
        case, zero1 = self.case, self.case.topology.zero1
        trained = updated_parameters(case, self.place)
        numbers = sum(p.parameter.numel() for p in trained)
        states = sum(p.parameter.numel() * case.state_bytes(p.name, p.layout) for p in trained)
        wide, item = case.wide_bytes, case.item_bytes
        # Packing and unpacking published weights reads or writes them three times.
        published = 3 * numbers * item if zero1 > 1 else 0
        # Gradient and master are read, master and weight written; states are read and written.
        updated = (numbers * (3 * wide + item) + 2 * states) / zero1
        passing = 0.0
        if case.optimizer.offload_states:
            passing = (states + (numbers * wide if item < wide else 0)) / zero1
        # Update and transfer overlap, so the slower of them counts.
        streamed = max(self._over_memory(updated), passing / (self.host.gb_per_second * 1e9))
        return self._over_memory(numbers * wide + published) + streamed

    @cached_property
    def of_matrices(self) -> int:
        """Return the FLOPs of Newton-Schulz for all matrices of the stage."""
        asked = self.case.optimizer
        if "muon" not in asked.rules:
            return 0
        return sum(
            matrix.flops(asked.muon)
            for p in updated_parameters(self.case, self.place)
            if values_of(p.name, p.layout, asked).rule == "muon"
            for matrix in matrices_of(p.name, p.layout, asked)
        )

    def newton_schulz(self, flops: float) -> float:
        """Return the seconds of `flops` of Newton-Schulz, which runs in bfloat16.

        On CPU and in float64 training it runs at the speed of float32.
        """
        wide = self.case.on_cpu or self.case.dtype == "float64"
        peak = self.device.wide_tflops if wide else self.device.tflops
        return flops / (peak * 1e12 * self.device.efficiency)

    # -- inside ------------------------------------------------------------------------------

    @cached_property
    def _rates(self) -> dict[Work, float]:
        """Return, for each kind of work, how many FLOPs or bytes the device does in a second."""
        device = self.device
        wide = self.case.item_bytes >= 4
        peak = (device.wide_tflops if wide else device.tflops) * 1e12
        return {
            Work.PRODUCT: peak * device.efficiency,
            Work.ATTENTION: peak * device.attention_efficiency,
            Work.SCAN: peak * device.scan_efficiency,
            Work.MEMORY: device.gb_per_second * 1e9 * device.memory_efficiency,
        }

    def _over_memory(self, num_bytes: float) -> float:
        """Return the seconds to read or write `num_bytes`."""
        return num_bytes / self._rates[Work.MEMORY]
