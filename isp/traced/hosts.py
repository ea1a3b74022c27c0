"""The ways in which a model is called and in which it calls attention.

B batch, S' the tokens of this rank, H heads, K KV heads, d and e sizes of heads
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from typing import Any, Protocol
from weakref import WeakMethod

from torch import Tensor, nn

from isp.attention.call import Attend, AttentionOptions, attend_by

__all__ = ["Host", "HuggingFace", "OwnModule", "host_of"]

_numbers = count()

_WARNING = "warn_if_padding_and_no_attention_mask"


class Host(Protocol):
    """The manners of a family of models."""

    def connect(self, model: nn.Module, attend: Attend) -> None:
        """Let the model's calls of attention arrive at `attend`, a method, while its object is."""

    def forward(self, model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits [B, S', V] of tokens at positions [B, S']."""

    def without_values(self, model: nn.Module) -> nn.Module:
        """`model`, whose tensors are on meta, made to look at no value of theirs, in place."""

    def config(self, model: nn.Module) -> dict[str, Any]:
        """The model's `config.json`; empty if it has none."""

    def tensor_styles(self, model: nn.Module) -> dict[str, str]:
        """The model's tensor-parallel plan, by module with `*` for a number; empty if none."""

    def attending(self) -> AbstractContextManager[None]:
        """A context in which code of the model runs."""

    def published(self, model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights of a block under the names and in the pieces in which they are saved."""


def host_of(model: nn.Module) -> Host:
    """The manners of this model."""
    return HuggingFace() if hasattr(model, "set_attn_implementation") else OwnModule()


class OwnModule:
    """A module that is called with tokens and positions, and calls `isp.attention`."""

    def __init__(self) -> None:
        self._target: Attend | None = None

    def connect(self, model: nn.Module, attend: Attend) -> None:
        self._target = attend

    def forward(self, model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        with self.attending():
            logits: Tensor = model(ids, positions)
        return logits

    def without_values(self, model: nn.Module) -> nn.Module:
        return model

    def config(self, model: nn.Module) -> dict[str, Any]:
        return {}

    def tensor_styles(self, model: nn.Module) -> dict[str, str]:
        return {}

    def attending(self) -> AbstractContextManager[None]:
        return attend_by(self._target)

    def published(self, model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


class HuggingFace:
    """A causal language model of transformers, by its attention interface.

    Each model has a name of its own in the registry. A name of which the masks' registry does not
    know gets no mask: none of S x S is ever made.
    """

    def connect(self, model: nn.Module, attend: Attend) -> None:
        _check_options(model)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = f"isp_{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, _as_interface(attend))
        whole: Any = model
        whole.set_attn_implementation(name)
        for part in model.modules():  # it looks at the tokens, to warn of what is not so here
            if hasattr(part, _WARNING):
                setattr(part, _WARNING, lambda *_: None)

    def forward(self, model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    def without_values(self, model: nn.Module) -> nn.Module:
        for part in model.modules():  # some kinds of rotary positions look at the largest one
            if isinstance(getattr(part, "rope_type", None), str):
                setattr(part, "rope_type", "default")  # noqa: B010
        whole: Any = model
        with suppress(ValueError, RuntimeError):  # of models without experts, or with one way alone
            whole.set_experts_implementation("grouped_mm")
        return model

    def config(self, model: nn.Module) -> dict[str, Any]:
        whole: Any = model
        found: dict[str, Any] = whole.config.to_dict()
        return found

    def tensor_styles(self, model: nn.Module) -> dict[str, str]:
        return dict(getattr(model, "tp_plan", None) or {})

    def attending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def published(self, model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        whole: Any = model
        found: dict[str, Tensor] = revert_weight_conversion(whole, weights)
        return found


def _check_options(model: Any) -> None:
    """Raise ValueError for what was asked of a model and would not happen."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing is on: call model.gradient_checkpointing_disable(), and set"
            " model.checkpoint, the fraction of blocks that isp recomputes"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True asks for a loss that balances experts, which isp does not"
            " have: set it to False in the model's configuration"
        )


_BIASES = ("position_bias", "indices", "block_indices")
"""Further arguments by which a few models say what is attended."""


def _as_interface(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """`attend` as transformers calls it: q [B, H, S', d], k and v [B, K, S', ..].

    It is held weakly: the registry is there for good, and the model and its weights lie behind it.
    """
    held = WeakMethod(attend)

    def attention_function(
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
        foreign = [name for name in _BIASES if others.get(name) is not None]
        if foreign:
            raise ValueError(f"{type(module).__name__} gives attention {foreign[0]}: isp has none")
        if attention_mask is not None:
            raise ValueError(f"{type(module).__name__} gives attention a mask of its own")
        if dropout:
            raise ValueError(
                f"{type(module).__name__} asks for attention dropout {dropout}, which isp does not"
                f" have: make the model with attention_dropout=0 (GPT-2: attn_pdrop=0)"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options = AttentionOptions(causal, sliding_window, scaling, softcap, s_aux)
        found = held()
        if found is None:
            raise RuntimeError(f"{type(module).__name__} was parallelised by a run that is gone")
        return found(q, k, v, options), None

    return attention_function
