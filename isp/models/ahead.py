"""Modules of a block that are computed ahead of their call, by an order of the runtime's own.

[Note: Computed ahead] A shared expert reads the tokens that a block gives to its experts, and most
blocks call it behind them. So it is computed where the experts are called: the tokens that are
sent are on their way meanwhile, or weights that are gathered. Backward comes to the experts first,
and the gradients of the tokens that they sent back travel while it goes through the shared expert.
The block's own call is given what there is. The trace shows which module that is.

N tokens, D and E features
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from isp.models.calls import Ahead, same_rows
from isp.models.forward_pass import ForwardPass

__all__ = ["ComputedAhead"]


class ComputedAhead:
    """A module [.., D] -> [.., E] that is computed ahead of its call, of each token by itself."""

    def __init__(
        self, module: nn.Module, ahead: Ahead, under_way: Callable[[str], ForwardPass]
    ) -> None:
        """`under_way` gives the pass in which the module of this name is computed."""
        self._name, self._dims = ahead
        self._forward, self._under_way = module.forward, under_way
        module.forward = self._called

    def compute(self, tokens: Tensor) -> None:
        """Compute what the next call in this pass gives, of tokens [N, D]."""
        x = tokens if self._dims == 2 else tokens.unsqueeze(0)
        self._under_way(self._name).ahead[self._name] = tokens, self._forward(x)

    def _called(self, x: Tensor) -> Tensor:
        tokens, y = self._under_way(self._name).ahead.pop(self._name, (x, None))
        if y is None:
            y = self._forward(x)
        elif not same_rows(x, tokens):
            raise RuntimeError(
                f"{self._name} was called with other tokens than the experts before it, and with"
                f" the same ones when the model was traced: isp computes it ahead"
            )
        return y.reshape(*x.shape[:-1], y.shape[-1])
