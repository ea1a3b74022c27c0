"""`WeightParts`: parts of weights that no plan has; who reads them says when to gather."""

from __future__ import annotations

from torch import Tensor

from isp.weights.parameter import ShardedParameter
from isp.weights.plan import Act, ActKind
from isp.weights.transfers import DeclaredWeight, ErrorLatch, GradientReducer, WeightGatherer

__all__ = ["WeightParts"]


class WeightParts:
    """Gathers parts of weights, and reduces their gradients, beside those that a plan has."""

    def __init__(
        self, gatherer: WeightGatherer, reducer: GradientReducer, latch: ErrorLatch, overlap: bool
    ) -> None:
        """`overlap`: whether gathers are ahead of reads, and reductions behind."""
        self.overlap = overlap
        self._gatherer, self._reducer, self._latch = gatherer, reducer, latch

    def gather(self, part: DeclaredWeight) -> None:
        """Set all shards of a part on their way, if they are not there; a drain drops them."""
        self._latch.check()
        self._gatherer.weights.setdefault(part.name, part)
        if part.gathered is not None and part.gathered.is_stale():
            self.free(part)
        if part.gathered is None:
            self._gatherer.follow()
            self._gatherer.launch([Act(ActKind.GATHER, part.name, bias="all")])

    def read(self, part: DeclaredWeight) -> list[Tensor]:
        """The full tensors of a part, in order; waits for them."""
        self.gather(part)
        assert part.gathered is not None
        with self._latch:
            return [full.wait() for full in part.gathered.full]

    def free(self, part: DeclaredWeight) -> None:
        """Give the buffers of a part back, if it has any."""
        if self._latch.error is None:
            self._gatherer.free([Act(ActKind.FREE, part.name)])

    def reduce(self, sharded: ShardedParameter, grad: Tensor, *, returned: bool) -> Tensor | None:
        """Sum a full gradient over the ranks; None: the sum goes to the sink, if not `returned`."""
        if self._latch.error is not None:
            self._latch.check()
        if returned:
            with self._latch:
                return self._reducer.reduce(sharded, grad)
        # Outside: a sink that refuses has not harmed the group.
        place = self._reducer.promise(sharded, grad.dtype)
        with self._latch:
            self._reducer.launch(sharded, grad, place)
            if not self.overlap:
                self._reducer.finish()
        return None
