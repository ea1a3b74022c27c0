"""`ShardedParameter`: a rank's shard of a parameter, with its layout and tags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.layout import ParameterLayout
from isp.core.tensors import pad_rows

__all__ = ["ShardedParameter", "by_whole"]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's shard of a parameter; one, even if several modules share the parameter."""

    name: str
    """Name in the whole model."""
    parameter: nn.Parameter
    layout: ParameterLayout
    whole: ShardedParameter | None = None
    """The fused parameter whose rows contain this one's and which is gathered in its place; None:
    it is gathered alone."""

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of all pieces, padded and concatenated, as collectives move them."""
        length, *rest = self.layout.piece_shape
        return self.layout.parts * length, *rest

    @cached_property
    def tag(self) -> Tag:
        """Tag of its gathers."""
        layer, _, local = self.name.rpartition(".")
        return Tag(Purpose.WEIGHT, layer, local)

    @cached_property
    def gradient_tag(self) -> Tag:
        """Tag of the reductions of its gradient."""
        return Tag(Purpose.WEIGHT_GRADIENT, self.tag.layer, f"{self.tag.tensor}.grad")

    def as_it_travels(self, x: Tensor, length: int) -> Tensor:
        """Return a shard, or a full tensor, as it is sent: `length` rows [Note: Pieces]."""
        if self.layout.is_cut_in_place:
            return x.contiguous()
        return pad_rows(x.movedim(self.layout.dim, 0), length)

    def without_padding(self, piece: Tensor) -> Tensor:
        """Return the shard of a piece as a reduction delivers it: without padding, as a view."""
        layout = self.layout
        if layout.is_cut_in_place:
            return piece
        return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])


def by_whole(
    parameters: Iterable[ShardedParameter],
) -> dict[ShardedParameter, list[ShardedParameter]]:
    """Group parameters by what is gathered, in the order of rows."""
    found: dict[ShardedParameter, list[ShardedParameter]] = {}
    for item in parameters:
        found.setdefault(item.whole or item, []).append(item)
    for members in found.values():
        members.sort(key=lambda item: item.layout.rows_before)
    return found
