"""How a decoder is cut into pipeline stages."""

from __future__ import annotations

from isp.pipeline import split_layers
from model.config import ModelConfig
from model.decoder import LayerSpan

__all__ = ["stage_spans"]


def stage_spans(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The blocks of each stage, so that the one that multiplies most multiplies least.

    The head counts as so many blocks as it has their parameters; an embedding multiplies nothing.
    Raises ValueError if there are more stages than blocks.
    """
    head = config.vocab_size * config.hidden_size
    spans = split_layers(config.num_layers, stages, after=head / config.block_parameters)
    return [LayerSpan(*span) for span in spans]
