"""Cutting a decoder into pipeline stages, and building it of them."""

from __future__ import annotations

from collections.abc import Iterable

from isp.attention import DistributedAttention, LocalAttention, make_local_attention
from isp.layers.factory import LayerFactory
from isp.pipeline import split_layers
from model.config import ModelConfig
from model.decoder import Decoder, LayerSpan

__all__ = ["build_stages", "stage_spans"]


def build_stages(
    config: ModelConfig,
    layers: LayerFactory,
    stages: Iterable[int],
    num_stages: int,
    attention: LocalAttention | None,
) -> tuple[Decoder, ...]:
    """As `isp.models.protocol.LanguageModel.build`."""
    if attention is None:
        attention = make_local_attention(
            config.attention_backend,
            device=layers.device,
            dtype=layers.dtype,
            head_dim=config.head_size,
        )
    core = DistributedAttention(attention, layers.attention_channel)
    spans = stage_spans(config, num_stages)
    chunks: list[Decoder] = []
    for stage in stages:
        table = chunks[0].embedding if chunks else None
        chunks.append(Decoder(config, layers, core, spans[stage], table=table))
    return tuple(chunks)


def stage_spans(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The blocks of each stage, so that the one that multiplies most multiplies least.

    The head counts as so many blocks as it has their parameters; an embedding multiplies nothing.
    Raises ValueError if there are more stages than blocks.
    """
    head = config.vocab_size * config.hidden_size
    spans = split_layers(config.num_layers, stages, after=head / config.block_parameters)
    return [LayerSpan(*span) for span in spans]
