"""`TracedModel`: somebody else's model as a `LanguageModel`, known by its trace."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from isp.attention import LocalAttention, make_local_attention
from isp.attention.explicit import ExplicitAttention
from isp.layers.factory import LayerFactory
from isp.parallel.config import ParallelConfig
from isp.settings.attention_backend import AttentionBackend
from isp.traced.chunk import InitialWeights, TracedChunk
from isp.traced.hosts import OwnModule, host_of
from isp.traced.model_folder import check_layout, check_model_config
from isp.traced.trace import (
    Kind,
    check_drivable,
    trace_model,
)
from isp.weights.trace import recomputed_blocks

__all__ = ["TracedModel"]


class TracedModel:
    """Somebody else's model, known by its trace."""

    def __init__(
        self,
        model: nn.Module,
        *,
        checkpoint: float = 0.0,
        attention_backend: AttentionBackend = AttentionBackend.AUTO,
        weights: InitialWeights | None = None,
        in_place: bool = True,
    ) -> None:
        """`weights`: the source of those of a `model` without memory; None: it has them.

        Not `in_place`, `build` takes a copy of the model each time.
        """
        self.host = host_of(model)
        self.checkpoint = checkpoint
        self.attention_backend = attention_backend
        self.model = model
        self._weights = weights
        self._in_place = in_place
        check_drivable(model)
        self._shape = self.host.without_values(on_meta(model))
        """Of the same structure and without memory, for those who plan."""
        shape = copy.deepcopy(self._shape)
        self.trace = trace_model(shape, self.host.connect, self.host.forward)
        if not self.trace.reads_positions and not isinstance(self.host, OwnModule):
            raise ValueError(
                f"{type(model).__name__} does not look at position_ids: it would count the tokens"
                f" of each rank, and of packed documents, from the wrong place"
            )

    @property
    def hidden_size(self) -> int:
        """Features of a token: those of the rows of the first table."""
        tables = (call.module for call in self.trace.calls if call.kind is Kind.TABLE)
        table = self._shape.get_submodule(next(tables))
        assert isinstance(table, nn.Embedding)
        return table.embedding_dim

    @property
    def num_parameters(self) -> int:
        """Parameters, shared ones once."""
        return sum(self.trace.sizes.values())

    @property
    def flop_rule(self) -> str:
        """The `flops` rule, in words."""
        return (
            "6 x parameters of linears x tokens + 6 x (size of keys + of values) x heads x half the"
            " square of each document's length, recomputation not counted"
        )

    def flops(self, document_lengths: Iterable[int]) -> int:
        """FLOPs of forward and backward; an expert counts as if every token went to it."""
        lengths = list(document_lengths)
        total = 6 * self.trace.multiplied * sum(lengths)
        for call in self.trace.calls:
            if call.sizes is not None:
                heads, _, key, value, window = call.sizes
                for length in lengths:
                    reach = min(length, window or length)
                    total += 3 * heads * (key + value) * reach * (2 * length - reach)
        return total

    @property
    def tied_weight(self) -> str | None:
        """None: there is one stage, which has both uses of a tied weight."""
        return None

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Raise ValueError, naming key, value and way out, if it cannot be split as asked."""
        check_layout(parallel, seq_len)
        check_model_config(self.host.config(self.model), parallel)

    def build(
        self,
        layers: LayerFactory,
        stages: Iterable[int] = (0,),
        num_stages: int = 1,
        *,
        attention: LocalAttention | None = None,
    ) -> tuple[TracedChunk, ...]:
        """As `isp.models.protocol.LanguageModel.build`.

        The model itself is sharded if that was asked for, else a copy of it; on the meta device
        one without memory.
        """
        model = self.model if self._in_place else copy.deepcopy(self.model)
        if layers.device.type == "meta":
            model = copy.deepcopy(self._shape)
        recomputed = recomputed_blocks(len(self.trace.blocks), self.checkpoint)

        def local(scale: float | None, softcap: float | None, sinks: bool, size: int) -> Any:
            if attention is not None:
                return attention
            if sinks or softcap is not None:
                return ExplicitAttention(scale=scale, softcap=softcap)
            return make_local_attention(
                self.attention_backend,
                device=layers.device,
                dtype=layers.dtype,
                head_dim=size,
                scale=scale,
            )

        chunk = TracedChunk(
            model, self.trace, self.host, layers, local, recomputed, weights=self._weights
        )
        return (chunk,)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` without memory for its parameters and buffers."""
    empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        value = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, empty)
