"""Construction of the model that a `model` section describes: the decoder, or that of a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from isp.core.section import KeyRole, defaults_of
from isp.models.huggingface.interface import RouterCoefficients
from isp.models.loading import begun_by_the_model, folder_model
from isp.models.traced_model import TracedModel
from isp.utils.environment import require
from model.config import ComputeConfig, ModelConfig
from model.decoder import Decoder
from model.weight_names import earlier_names

__all__ = ["how_computed", "language_model"]


def language_model(model: ModelConfig, dtype: str, *, trains: bool = True) -> TracedModel:
    """Return the traced model of a `model` section: the decoder, or the model in its folder.

    It will compute in `dtype`. `trains`: False allows a folder's model to have dropout, which is
    then off. Raises ValueError if the model cannot be made or is not supported, or if packages to
    read it are missing.
    """
    if model.hf is None:
        # Reset the keys that do not change the model, so that the cache of `_decoder` has one entry
        # for all their values. `compile` stays, because the decoder's modules read it.
        plain = defaults_of(ModelConfig, KeyRole.METHOD, KeyRole.PLACE)
        own = replace(model, **{**plain, "compile": model.compile})
        return _decoder(own).with_options(**how_computed(model))
    require(f"model.hf={model.hf}", "transformers", "safetensors")
    if model.adapter is not None:
        require("model.adapter", "peft", extra="peft")
    return folder_model(
        model.hf,
        dtype,
        trains=trains,
        overrides=json.dumps(model.hf_overrides) if model.hf_overrides else None,
        adapter=model.adapter,
        **how_computed(model),
    )


def how_computed(model: ComputeConfig) -> dict[str, Any]:
    """Return the keys that decide how the model is computed, as arguments of `TracedModel`."""
    return {
        "recomputation": model.recomputation,
        "attention_backend": model.attention_backend,
        "loss_chunk_tokens": model.loss_chunk_tokens,
        "compile": model.compile,
        "allow_unchecked": model.allow_unchecked,
        "router_losses": RouterCoefficients(
            model.router_aux_loss_coef,
            model.router_z_loss_coef,
            model.moe_router_bias_update_rate,
        ),
    }


@lru_cache(maxsize=16)
def _decoder(model: ModelConfig) -> TracedModel:
    """Return the traced decoder of a section, cached; `language_model` sets how it computes."""
    with torch.device("meta"):
        decoder = Decoder(model)
    names = earlier_names(model)
    weights = begun_by_the_model(decoder, names)
    return TracedModel(decoder, weights=weights, earlier_names=names, in_place=False)
