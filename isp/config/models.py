"""The model that a `model` section describes, as the runtime asks for it."""

from __future__ import annotations

import os
from functools import lru_cache

from isp.models.protocol import LanguageModel
from isp.settings.packages import require_hf
from model.config import ModelConfig

__all__ = ["language_model"]


def language_model(model: ModelConfig, dtype: str, *, trains: bool = True) -> LanguageModel:
    """The section itself, or for a folder its traced model, to be computed in `dtype`.

    One that does not train may have dropout.

    Raises ValueError for a folder whose model cannot be made, or cannot be driven, and without the
    packages that read it.
    """
    if model.hf is None:
        # Until the plain decoder has taken the other's place.
        return _plain(model) if os.environ.get("ISP_PLAIN") == "1" else model
    require_hf(f"model.hf={model.hf}", "transformers", "safetensors")
    from isp.traced.pretrained import folder_model  # here: a configuration is read without torch

    return folder_model(
        model.hf,
        dtype,
        checkpoint=model.checkpoint,
        checkpoint_offload=model.checkpoint_offload,
        checkpoint_segment=model.checkpoint_segment,
        attention_backend=model.attention_backend,
        loss_chunk_tokens=model.loss_chunk_tokens,
        trains=trains,
    )


@lru_cache(maxsize=16)
def _plain(model: ModelConfig) -> LanguageModel:
    """The plain decoder, traced."""
    import torch

    from isp.traced.model import TracedModel
    from isp.traced.pretrained import begun_by_the_model
    from model.plain import Decoder
    from model.weight_names import earlier_names

    with torch.device("meta"):
        decoder = Decoder(model)
    names = earlier_names(model)
    return TracedModel(
        decoder,
        checkpoint=model.checkpoint,
        checkpoint_offload=model.checkpoint_offload,
        checkpoint_segment=model.checkpoint_segment,
        attention_backend=model.attention_backend,
        loss_chunk_tokens=model.loss_chunk_tokens,
        weights=begun_by_the_model(decoder, names),
        earlier_names=names,
        in_place=False,
    )
