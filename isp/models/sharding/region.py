"""`Entrance`: make the input of a tensor-parallel region's column linears from a rank's tokens.

B batch, S sequence, S' tokens of this rank, D hidden size

    mode   forward               backward
    mtp    x as it is            dx: all-reduce
    msp    x: all-gather on S    dx: reduce-scatter on S (of [B S', D] on all tokens)
    fsp    as msp                as msp; x is gathered again, once for all columns

All column linears of a region (q, k and v, or gate and up) share one transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Mode
from isp.core.tensors import tensors_in
from isp.core.torch_private import storage_key
from isp.models.forwards import ModuleForward

__all__ = ["Entrance", "OnlyColumnsRead"]


class Entrance:
    """The entrance of a region: a module whose input only its column linears read.

    The input is [B, S', D], or also [B S', D] if the module contains no attention, because then the
    order of tokens does not matter.
    """

    def __init__(self, name: str, width: int, mode: Mode, tensor: Channel, attends: bool) -> None:
        """`name`: the module's name; `width`: features of the input, which recognize it.

        `tensor`: the tensor ranks; `attends`: True if the module contains attention.
        """
        self.name = name
        self.tensor = tensor
        self.gathers = mode.splits_sequence
        self.regathers = mode is Mode.FSP
        self.shown: Tensor | None = None
        """The tensor that the module gets in place of its input; None while the module does not
        run."""
        self.in_column = False
        """True while a column linear multiplies: `OnlyColumnsRead` allows it to read the input."""
        self._width = width
        self._dims = (3,) if attends else (2, 3)

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return the module's forward with its input replaced; the wrapper `Wrap.REGION`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._inside(inner, args, kwargs)

        return forward

    @contextmanager
    def column(self, x: Tensor) -> Iterator[None]:
        """Return a context in which a column linear multiplies x, the input of the region.

        In fsp x is not saved for backward, which gathers it again. Raises ValueError if x is not
        the region's input.
        """
        if x is not self.shown:
            raise ValueError(
                f"a column-parallel linear layer of {self.name} reads a tensor other than its input"
            )
        self.in_column = True
        try:
            if self.regathers and x.grad_fn is not None:
                with _regathered(x):
                    yield
            else:
                yield
        finally:
            self.in_column = False

    def _inside(self, forward: ModuleForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward with its input replaced by the output of the entrance.

        Raises ValueError if not exactly one of the arguments looks like the input.
        """
        # Models pass the input by position or under various names: recognize it by dtype and shape.
        found = [x for x in (*args, *kwargs.values()) if self._is_input(x)]
        if len(found) != 1:
            raise ValueError(
                f"{self.name} is called with {len(found)} tensors [.., {self._width}] of tokens"
                f" instead of one"
            )
        own = found[0]
        self.shown = shown = _Enter.apply(own, self)
        args = tuple(shown if x is own else x for x in args)
        kwargs = {key: shown if x is own else x for key, x in kwargs.items()}
        # A recompute may end in here with an exception, once it has restored all that it needs.
        try:
            return forward(*args, **kwargs)
        finally:
            self.shown = None

    def _is_input(self, x: object) -> bool:
        """Return whether x has the dtype, dims and width of the region's input."""
        return (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dim() in self._dims
            and x.shape[-1] == self._width
        )


class _Enter(Function):
    """The transfer of an entrance as one autograd node.

    forward   x [.., S', D] -> the input of the columns: all tokens in msp and fsp, x itself in mtp
    backward  the dual transfer for dx; fsp saves x, the rank's shard, to gather it again
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance, ctx.again = entrance, None
        ctx.save_for_backward(x if entrance.regathers else None)
        if not entrance.gathers:
            # In mtp nothing is sent, but backward needs this node.
            return x.view_as(x)
        tag = Tag(Purpose.ACTIVATION, entrance.name, "x")
        full: Tensor = entrance.tensor.all_gather(x, dim=-2, tag=tag).wait()
        # An autograd function must not return its input: return a view of it.
        return full.view_as(x) if full is x else full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        # Free the input that fsp gathered again, because all columns have read it by now.
        ctx.again = None
        entrance: Entrance = ctx.entrance
        tag = Tag(Purpose.INPUT_GRADIENT, entrance.name, "dx")
        # dx is this rank's part of a sum: its columns have only a part of the output features.
        if entrance.gathers:
            return entrance.tensor.reduce_scatter(dx, dim=-2, tag=tag).wait(), None
        return entrance.tensor.all_reduce(dx, tag=tag).wait(), None


def _regathered(x: Tensor) -> saved_tensors_hooks:
    """Return a context in which x, the output of an entrance, is not saved but gathered again.

    Autograd saves only the shape of x or of a view of it. The first column linear that reads x in
    backward gathers x from the shards, and the node of the entrance keeps it for the other columns.
    """
    node: Any = x.grad_fn
    memory = storage_key(x.untyped_storage())

    def pack(saved: Tensor) -> Tensor | torch.Size:
        # Recognize x by its storage, because a linear saves a flattened view of x.
        again = storage_key(saved.untyped_storage()) == memory
        return saved.shape if again else saved

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # All ranks reach this at the same column, so their calls of the all-gather meet.
        if node.again is None:
            (own,) = node.saved_tensors
            entrance: Entrance = node.entrance
            tag = Tag(Purpose.REGATHERED_ACTIVATION, entrance.name, "x")
            node.again = entrance.tensor.all_gather(own, dim=-2, tag=tag).wait()
        again: Tensor = node.again
        return again.view(packed)

    return saved_tensors_hooks(pack, unpack)


class OnlyColumnsRead(TorchFunctionMode):
    """A mode that raises ValueError if an operation other than column linears reads a region's
    input.

    Such an operation would compute the whole gradient on each rank, and the entrance would sum
    these over the ranks.
    """

    def __init__(self, entrances: tuple[Entrance, ...]) -> None:
        super().__init__()
        self._entrances = entrances

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if tensors_in(out):
            read = {*map(id, tensors_in(args, kwargs))}
            for entrance in self._entrances:
                if not entrance.in_column and id(entrance.shown) in read:
                    raise ValueError(
                        f"{entrance.name} passes its input to {getattr(func, '__name__', func)},"
                        f" not only to the linear layers of its plan"
                    )
        return out
