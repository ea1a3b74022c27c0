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
    """This rank's shard of a parameter; one object, even if several modules share the parameter."""

    name: str
    """Qualified name of the parameter in the whole model."""
    parameter: nn.Parameter
    layout: ParameterLayout
    whole: ShardedParameter | None = None
    """The fused parameter that contains the rows of this one and is gathered in its place; None:
    this parameter is gathered alone."""

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of the pieces of all ranks, padded to equal sizes and concatenated on dim 0."""
        length, *rest = self.layout.piece_shape
        return self.layout.parts * length, *rest

    @cached_property
    def tag(self) -> Tag:
        """Tag of the gathers of this parameter."""
        layer, _, local = self.name.rpartition(".")
        return Tag(Purpose.WEIGHT, layer, local)

    @cached_property
    def gradient_tag(self) -> Tag:
        """Tag of the reductions of its gradient."""
        return Tag(Purpose.WEIGHT_GRADIENT, self.tag.layer, f"{self.tag.tensor}.grad")

    def to_send(self, x: Tensor, length: int) -> Tensor:
        """Return x, a shard or a full tensor, in the form in which collectives send it.

        The dim along which the parameter is cut over ranks comes first, and is padded to `length`.
        See [Note: Pieces] in docs/design/notes/weights.md.
        """
        if self.layout.is_cut_in_place:
            return x.contiguous()
        return pad_rows(x.movedim(self.layout.dim, 0), length)

    def without_padding(self, piece: Tensor) -> Tensor:
        """Return the shard in a piece that a reduction has delivered: a view without padding."""
        layout = self.layout
        if layout.is_cut_in_place:
            return piece
        return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])


def by_whole(
    parameters: Iterable[ShardedParameter],
) -> dict[ShardedParameter, list[ShardedParameter]]:
    """Group parameters by the parameter that is gathered, each group in the order of rows."""
    found: dict[ShardedParameter, list[ShardedParameter]] = {}
    for item in parameters:
        found.setdefault(item.whole or item, []).append(item)
    for members in found.values():
        members.sort(key=lambda item: item.layout.rows_before)
    return found
