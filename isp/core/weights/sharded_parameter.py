"""`ShardedParameter`: what is known of a parameter, and what is the same each time it travels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from isp.core.comm.tag import Purpose, Tag
from isp.core.megatron.mappings import pad_rows
from isp.core.mesh.layout import ParameterLayout

__all__ = ["ShardedParameter", "by_whole"]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's shard of a parameter of a model, once, even if several modules share it."""

    name: str
    """In the whole model."""
    parameter: nn.Parameter
    layout: ParameterLayout
    whole: ShardedParameter | None = None
    """What travels in its place, with other rows before and behind; None: it does itself."""

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        """That of all pieces as they travel, one behind the other."""
        length, *rest = self.layout.piece_shape
        return self.layout.parts * length, *rest

    @cached_property
    def tag(self) -> Tag:
        """Of the full tensor on its way."""
        layer, _, local = self.name.rpartition(".")
        return Tag(Purpose.WEIGHT, layer, local)

    @cached_property
    def gradient_tag(self) -> Tag:
        """Of its full gradient on its way."""
        return Tag(Purpose.WEIGHT_GRADIENT, self.tag.layer, f"{self.tag.tensor}.grad")

    def as_it_travels(self, x: Tensor, length: int) -> Tensor:
        """A shard, or a full tensor, in `length` rows [Note: Pieces]."""
        if self.layout.travels_as_it_lies:
            return x.contiguous()
        return pad_rows(x.movedim(self.layout.dim, 0), length)


def by_whole(
    parameters: Iterable[ShardedParameter],
) -> dict[ShardedParameter, list[ShardedParameter]]:
    """What travels, each with the parameters that it consists of, in the order of its rows."""
    found: dict[ShardedParameter, list[ShardedParameter]] = {}
    for item in parameters:
        found.setdefault(item.whole or item, []).append(item)
    for members in found.values():
        members.sort(key=lambda item: item.layout.ahead)
    return found
