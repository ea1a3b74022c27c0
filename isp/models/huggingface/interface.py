"""`ModelInterface`: how isp calls a kind of model, and how the model's attention calls isp.

B batch, S' tokens of this rank, H heads, K KV heads, d head size, V logits of a token
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor, nn

from isp.core.attention.api import AttentionOptions
from isp.core.mixers.api import current_mixers
from isp.models.huggingface.expert_adapters import pass_factors
from isp.models.huggingface.patches.attention import check_dropout
from isp.models.huggingface.patches.calls import use_registered_mixers, wrap_free_functions
from isp.models.huggingface.patches.indexers import chosen_by
from isp.models.huggingface.versions import warn_of_version
from isp.models.positions import at_positions, give_positions

__all__ = [
    "HuggingFace",
    "LogitsOf",
    "ModelInterface",
    "RouterCoefficients",
    "check_row",
    "interface_of",
]

_COUNTS = "create_position_ids_from_input_ids"
"""A method of transformers' embeddings that count positions from the padding index."""
_WARNING = "warn_if_padding_and_no_attention_mask"
"""A method of transformers' models that reads the tokens to warn of padding."""


class RouterCoefficients(NamedTuple):
    """The coefficients of the router losses, and the rate of bias updates; 0 turns one off."""

    aux: float = 0.0
    """The coefficient of the load-balancing loss, num_experts * sum(f * p)."""
    z: float = 0.0
    """The coefficient of the z-loss: the mean over blocks and tokens of logsumexp(logits)^2."""
    bias_rate: float = 0.0
    """The change per step of the biases by which routers choose experts; see `ExpertLoad`."""

    @property
    def of_losses(self) -> bool:
        """True if one of the router losses is on."""
        return bool(self.aux or self.z)


class LogitsOf(Enum):
    """The target of a model's logits: the next token, or labels of a classifier."""

    VOCABULARY = auto()
    """The token after each token, by the head of a language model."""
    TOKEN_LABELS = auto()
    """A label of each token, by a head for token classification."""
    ROW_LABELS = auto()
    """A label of each row, by a head for sequence classification that reads the last token."""


class ModelInterface:
    """The interface to a plain module, called as `model(ids, positions)`; it has no state.

    The module may have a tensor-parallel plan `tp_plan` in the format of transformers, and a
    `config_json`. The mixers that `mix_by` has set compute its attention.
    """

    def connect(self, model: nn.Module) -> None:
        """Replace the model's own attention and mixers by calls of isp, in place."""
        use_registered_mixers(model)

    def forward(self, model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, S', V] of tokens [B, S'] at positions [B, S']."""
        with at_positions(positions):
            logits: Tensor = model(ids, positions)
        return logits

    def logits_of(self, model: nn.Module) -> LogitsOf:
        """Return what the logits predict; in every case `forward` returns logits of all tokens."""
        return LogitsOf.VOCABULARY

    def first_position(self, model: nn.Module) -> int:
        """Return the position that the model expects for the first token of a document."""
        return 0

    def without_values(self, model: nn.Module) -> nn.Module:
        """Change `model`, on the meta device, so that its code reads no tensor's values; return
        it."""
        return model

    def config(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's `config.json` as a dict; empty if it has none."""
        found: dict[str, Any] = getattr(model, "config_json", None) or {}
        return found

    def tensor_styles(self, model: nn.Module) -> dict[str, str]:
        """Return the model's tensor-parallel plan: styles by module name, with `*` for a number.

        Empty if the model has none.
        """
        plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
        return plan

    def length_limits(self, model: nn.Module) -> dict[nn.Module, int]:
        """Return by rotary module (longrope) the position from which on it uses its long factors.

        The modules are called with x and positions; `by_document` makes the wrapper that chooses.
        """
        return {}

    def most_tokens(self, model: nn.Module) -> int | None:
        """Return the row length from which on results are wrong, for `check_row`; None: no limit.

        Some models count the tokens of their input and compute differently from some number on. On
        a rank the input is only a part of the row, so the count is too small.
        """
        return None

    def router_coefficients(self, model: nn.Module) -> RouterCoefficients:
        """Return the coefficients of the losses that the model's own configuration turns on."""
        return RouterCoefficients()

    def published(self, model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a block's whole `weights` to the names and tensors that the model's files
        have."""
        return weights


class _Scored(Exception):
    """An exception that ends a forward when the logits of all tokens are computed."""


class HuggingFace(ModelInterface):
    """The interface to a model of transformers, through its registry of attention functions.

    All models use the function with the name "isp" in that registry. The registry of masks does not
    have this name, so transformers never makes a mask of S x S.
    """

    def connect(self, model: Any) -> None:
        """Replace the model's attention and mixers by calls of isp, in place.

        Raises ValueError if gradient checkpointing is on, or if the model does not call attention
        through transformers' attention interface.
        """
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise ValueError(
                "gradient checkpointing is on: call model.gradient_checkpointing_disable() and"
                " set model.checkpoint, the fraction of blocks to recompute"
            )
        from transformers import __version__
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        warn_of_version(__version__)
        ALL_ATTENTION_FUNCTIONS.register("isp", _attention_function)
        if hasattr(model, "peft_config"):
            pass_factors(model)
        text = model.config.get_text_config(decoder=True)
        registered = use_registered_mixers(model)
        if registered and not model._can_set_attn_implementation():
            # The registered forwards already replace attention. Only the code that makes masks
            # reads this attribute, and makes no mask for "isp".
            text._attn_implementation = "isp"
        else:
            # Set the implementation for the whole model ("") and for its text model. A vision
            # tower, which isp does not run, keeps its own.
            parts = (n for n in model.config.sub_configs if getattr(model.config, n) is text)
            model.set_attn_implementation(dict.fromkeys(["", *parts], "isp"))
        if text._attn_implementation != "isp":
            raise ValueError(
                f"{type(model).__name__} computes attention in its own code, not through"
                f" transformers' attention interface, so isp cannot shard its sequence"
            )
        wrap_free_functions(model)
        give_positions(model)
        # Turn off transformers' warning about padding without a mask: it reads token values, so the
        # host would wait for the device in each forward. isp has no padding.
        for part in model.modules():
            if hasattr(part, _WARNING):
                setattr(part, _WARNING, lambda *_: None)

    def forward(self, model: Any, ids: Tensor, positions: Tensor) -> Tensor:
        first = self.first_position(model)
        # `current_positions` count from 0, even if the model's own positions begin at another
        # number.
        with at_positions(positions):
            own = positions + first if first else positions
            with self._ended_by_score(model) as logits:
                more = {}
                if _adds_router_losses(model):
                    # The model would compute these losses on this rank's tokens only: isp does it
                    # instead.
                    more = {"output_router_logits": False}
                output = model(input_ids=ids, position_ids=own, use_cache=False, **more)
                logits.append(output.logits)
        return logits[0]

    def logits_of(self, model: Any) -> LogitsOf:
        # transformers derives loss_type from the name of the model's class.
        kinds = {"ForSequenceClassification": LogitsOf.ROW_LABELS}
        kinds["ForTokenClassification"] = LogitsOf.TOKEN_LABELS
        return kinds.get(model.loss_type, LogitsOf.VOCABULARY)

    @contextmanager
    def _ended_by_score(self, model: Any) -> Iterator[list[Tensor]]:
        """End forwards in this context after the head `score`; yield a list that gets all logits.

        Only for sequence classification, whose forward would go on to pick one token of each row;
        other models run unchanged. Raises ValueError for a classifier without `score`.
        """
        logits: list[Tensor] = []
        if self.logits_of(model) is not LogitsOf.ROW_LABELS:
            yield logits
            return
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        if not hasattr(base, "score"):
            raise ValueError(
                f"{type(base).__name__} classifies sequences with more than a linear layer"
                f" (`score`) at the last token, which is not supported"
            )

        def end(_: nn.Module, __: Any, found: Tensor) -> None:
            logits.append(found)
            raise _Scored

        hook = base.score.register_forward_hook(end)
        try:
            with suppress(_Scored):
                yield logits
        finally:
            hook.remove()

    def router_coefficients(self, model: Any) -> RouterCoefficients:
        config = model.config.get_text_config(decoder=True)
        if not _adds_router_losses(model):
            return RouterCoefficients()
        return RouterCoefficients(float(getattr(config, "router_aux_loss_coef", 0.0)))

    def first_position(self, model: Any) -> int:
        # RoBERTa and models like it count positions from padding_idx + 1.
        for module in model.modules():
            if hasattr(module, _COUNTS) and hasattr(module, "position_embeddings"):
                return int(module.padding_idx) + 1
        return 0

    def without_values(self, model: Any) -> Any:
        # Some types of rotary positions read the largest position, which has no value on meta.
        for part in model.modules():
            if isinstance(getattr(part, "rope_type", None), str):
                part.rope_type = "default"
                rope = getattr(model.config, "rope_parameters", None) or {}
                rope |= {"rope_type": "default"} if "rope_type" in rope else {}
        # Choose an implementation that does not read values: the eager one reads which tokens an
        # expert has. Models without experts, or with a single implementation, raise an error here.
        with suppress(ValueError, RuntimeError):
            model.set_experts_implementation("grouped_mm")
        return model

    def config(self, model: Any) -> dict[str, Any]:
        found: dict[str, Any] = model.config.get_text_config(decoder=True).to_dict()
        return found

    def tensor_styles(self, model: Any) -> dict[str, str]:
        more = _ATTENTION_PLAN if model.config.model_type in _PLANLESS else {}
        return {**more, **(model.tp_plan or {})}

    def length_limits(self, model: Any) -> dict[nn.Module, int]:
        found: dict[nn.Module, int] = {}
        for part in model.modules():
            if getattr(part, "rope_type", None) == "longrope":
                found[part] = part.config.rope_parameters["original_max_position_embeddings"]
        return found

    def most_tokens(self, model: Any) -> int | None:
        config = self.config(model)
        tuned = config.get("attn_temperature_tuning") and 0 in config.get("no_rope_layers", ())
        return int(config["floor_scale"]) if tuned else None

    def published(self, model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(model, weights)
        return found


def interface_of(model: nn.Module) -> ModelInterface:
    """Return the interface to a model: `HuggingFace` for transformers, else `ModelInterface`."""
    return HuggingFace() if hasattr(model, "set_attn_implementation") else ModelInterface()


_PLANLESS = frozenset(
    ["afmoe", "flint", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "phimoe"]
)
"""Model types whose plan in transformers leaves out attention, although it has the usual names."""

_ATTENTION_PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.gate_proj": "colwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
"""The attention part of the plan, for the types in `_PLANLESS`."""


def check_row(most: int | None, tokens: int) -> None:
    """Raise ValueError if rows of `tokens` tokens reach `most`, the result of `most_tokens`."""
    if most is not None and tokens >= most:
        raise ValueError(
            f"attn_temperature_tuning in the model's configuration counts only the tokens of one"
            f" rank, which changes the result for sequences of {tokens} tokens: use fewer than"
            f" {most}, or set it to false"
        )


def _adds_router_losses(model: Any) -> bool:
    """Return whether the model's configuration turns on its own router losses."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    return any(getattr(config, "output_router_logits", False) for config in configs)


_BIASES = ("position_bias", "indices", "block_indices")
"""The arguments with which a few models restrict or bias attention."""


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the current mixers, with the signature of transformers' functions.

    query [B, H, S', d], key [B, K, S', d], value [B, K, S', ..] -> ([B, S', H, ..], None).
    Raises ValueError for arguments that isp does not support, RuntimeError outside of a forward
    that isp runs.
    """
    chosen = chosen_by(module, others)
    foreign = [name for name in _BIASES if others.get(name) is not None]
    foreign += ["a mask of its own"] * (attention_mask is not None)
    if foreign and chosen is None:
        raise ValueError(
            f"{type(module).__name__} passes {foreign[0]} to attention, which is not supported"
        )
    check_dropout(module, dropout)
    mixers = current_mixers()
    if mixers is None:
        raise RuntimeError(
            f"{type(module).__name__} was called outside of a forward that isp runs: call a"
            f" parallelized model only through the run's `loss`, `log_probs`, `logits` or `hidden`"
        )
    causal = is_causal
    # BigBird-Pegasus' decoder has is_causal=False, although it is causal: is_decoder decides.
    if causal is None:
        causal = getattr(module, "is_causal", True) or getattr(module, "is_decoder", False)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    chunk, window = _chunk(module), sliding_window or _window(module)
    options = AttentionOptions(causal, window, scaling, softcap, s_aux, chunk, chosen)
    return mixers.attend(q, k, v, options), None


def _chunk(module: Any) -> int | None:
    """Return the chunk size of a layer with chunked attention, in tokens; None for other layers.

    transformers passes the chunk size to masks only and not to attention, so it is read from the
    configuration.
    """
    return module.config.attention_chunk_size if _is_of(module, "chunked_attention") else None


def _window(module: Any) -> int | None:
    """Return the window of a sliding layer in tokens, from the configuration; None: no window.

    Layers of Qwen2-MoE do not pass their window to attention, only to the mask.
    """
    return module.config.sliding_window if _is_of(module, "sliding_attention") else None


def _is_of(module: Any, kind: str) -> bool:
    """Return whether the configuration's `layer_types` has `kind` for the module's layer."""
    kinds = getattr(module.config, "layer_types", None) or ()
    # `index` is None for attention outside of the model's list of layers.
    index = getattr(module, "layer_idx", None)
    return index is not None and list(kinds[index : index + 1]) == [kind]
