"""`Subject`: a small model for `isp check`, made from a Hugging Face folder, keys, or a module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.recompute.config import Recomputation
from isp.models.huggingface.make import limited_model
from isp.models.huggingface.overrides import OverrideError, check_overrides, overridden_config
from isp.models.huggingface.tiny import fewer_heads, kept_in_float64, tiny_model
from isp.models.huggingface.weight_files import read_json
from isp.models.traced_model import TracedModel
from isp.utils.environment import require
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = ["Subject", "num_blocks", "read_folder"]

_TILE_TOKENS, _LOSS_CHUNK_TOKENS, _SEGMENT = 5, 7, 2
"""Upper limits of these keys for a small model: with larger values it would have one tile, loss
chunk or segment, and the check would not see what goes wrong between two."""

_DEFAULT = ModelConfig()


def num_blocks(stages: int, how: ModelConfig) -> int:
    """Return how many blocks a small model needs for `stages` pipeline stages.

    That is one for each stage, or two segments for each if `how` recomputes by segments.
    """
    return stages * (_SEGMENT + 1 if how.checkpoint_segment else 1)


class Subject:
    """A small model to check, in two forms: plain, and as a run builds it.

    `how`: the `model` section, which says how the model is computed; its sizes are not read.
    """

    def __init__(self, name: str, model: nn.Module, how: ModelConfig) -> None:
        self.name = name
        self.model = model
        self._recomputation = how.recomputation._replace(
            mlp_tile_tokens=min(how.mlp_tile_tokens, _TILE_TOKENS),
            segment=min(how.checkpoint_segment, _SEGMENT),
        )
        chunk = min(how.loss_chunk_tokens, _LOSS_CHUNK_TOKENS)
        self._traced = TracedModel(
            model,
            recomputation=how.recomputation,
            in_place=False,  # the plain copies need the model's own modules, unchanged
            loss_chunk_tokens=chunk,
            allow_unchecked=how.allow_unchecked,
        )
        self.vocab_size = min(self._traced.vocab_rows, self._traced.vocab_size)

    @classmethod
    def of_config(cls, config: Any, layers: int = 2, how: ModelConfig = _DEFAULT) -> Subject:
        """Return a small model of transformers with the structure of the one in `config`.

        It has at least `layers` layers, unless the large model has fewer.
        """
        return cls(config.model_type, tiny_model(config, layers), how)

    @classmethod
    def of_module(cls, model: nn.Module, how: ModelConfig = _DEFAULT) -> Subject:
        """Return a copy of a user's module, weights included, in float64 on CPU; no dropout."""
        copied = copy.deepcopy(model).to("cpu").eval()
        return cls(type(model).__name__, kept_in_float64(copied), how)

    @classmethod
    def of_decoder(cls, config: ModelConfig, layers: int = 2) -> Subject:
        """Return a small decoder of `model/` with the options of `config`, computed as it says."""
        # Fewer heads, but divisible by 2 and 4 only if those of `config` are: a layout in which
        # the large model cannot be split is then refused for the small one, too.
        kv_heads = fewer_heads(config.kv_heads)
        small = replace(
            config,
            preset=None,
            vocab_size=160,
            hidden_size=64,
            num_layers=layers,
            num_heads=kv_heads * min(config.num_heads // config.kv_heads, 4),
            num_kv_heads=kv_heads,
            head_dim=8,
            intermediate_size=48,
            num_experts=min(config.num_experts, 6),
            experts_per_token=min(config.experts_per_token, 2),
            moe_intermediate_size=24,
            shared_expert_intermediate_size=min(config.shared_expert_intermediate_size, 24),
            num_dense_layers=min(config.num_dense_layers, layers // 2),
            sliding_window=config.sliding_window and min(config.sliding_window, 9),
            init_std=0.2,
        )
        decoder = Decoder(small).double()
        with torch.no_grad():
            for parameter in decoder.parameters():
                # Change the initial 1 of norms and 0 of biases, which would hide mistakes in them.
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return cls.of_module(decoder, config)

    @property
    def ways(self) -> str:
        """Methods of the plain model and of the layouts, in words, with versions of packages."""
        ways = f"torch {torch.__version__}"
        if not hasattr(self.model, "set_experts_implementation"):
            return ways
        ways += f", transformers {version('transformers')}; the plain model with eager attention"
        config: Any = self.model.config
        way = config.get_text_config(decoder=True)._experts_implementation
        if way == "grouped_mm" and any(p.dim() == 3 for p in self.model.parameters()):
            ways += " and its experts one by one, the layouts' by grouped products"
        return ways

    def plain(self) -> nn.Module:
        """Return a copy of the plain model with the initial weights.

        A model of transformers uses eager attention and computes its experts one by one, so that
        the reference is the simplest code. Layouts compute as a run does: experts by grouped
        products.
        """
        model: Any = copy.deepcopy(self.model)
        for choose in ("set_attn_implementation", "set_experts_implementation"):
            if hasattr(model, choose):
                getattr(model, choose)("eager")
        return model  # type: ignore[no-any-return]

    def logits(self, plain: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of a `plain` copy: ids and positions [B, S] -> [B, S, V]."""
        return self._traced.interface.forward(plain, ids, positions)

    def language_model(self, checkpoint: float) -> TracedModel:
        """Return the traced model, from which `build_model` makes that of a layout.

        With `checkpoint` 0 it recomputes no block; with 1 as many as the keys say, or else all.
        """
        recomputation = self._recomputation
        part = checkpoint * (recomputation.checkpoint or 1.0)
        if not part:
            tile, between = recomputation.mlp_tile_tokens, recomputation.between_linears
            recomputation = Recomputation(mlp_tile_tokens=tile, between_linears=between)
        recomputation = recomputation._replace(checkpoint=part)
        return self._traced.with_options(recomputation=recomputation)


def read_folder(folder: Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' configuration of the model in a Hugging Face folder; reads no weights.

    `overrides` is `model.hf_overrides`. Raises ValueError if the folder has no config.json, or that
    of a model that transformers does not know.
    """
    kind = read_json(folder / "config.json").get("model_type")
    require(str(folder), "transformers")
    from transformers import logging

    logging.set_verbosity_error()  # hides advice on faster kernels and on ids of a large vocabulary
    try:
        if overrides:
            # Limit time and memory: the check builds the model, to compare shapes of weights.
            with limited_model(str(folder)):
                check_overrides(folder, overrides)
        return overridden_config(folder, overrides)
    except OverrideError:
        raise
    except (KeyError, OSError, TypeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{folder / 'config.json'} (model_type {kind!r}) cannot be read by transformers:"
            f" {first_line}"
        ) from error
