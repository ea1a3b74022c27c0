"""`Asking`: builds the per-token query of a micro-batch (`Asked`) from a caller's arguments.

B batch, S sequence, V vocabulary, K results of a token
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.layers.token_results import (
    AllLogits,
    PickedLogits,
    ResultRules,
    TokenScoreRules,
    TopLogits,
)
from isp.core.layers.vocab_loss import IGNORED
from isp.loop.callers_graphs import Asked
from isp.loop.rows import RowReader, check_tensors
from isp.models.huggingface.interface import LogitsOf
from isp.models.runtime.stage_module import StageModule
from isp.models.traced_model import TracedModel

__all__ = ["Asking", "TokenScores", "TopTokens"]


class TokenScores(NamedTuple):
    """Figures of the distribution of each label, [B, S] each; 0 at positions without a label."""

    log_probs: Tensor
    """Log-probability of the label given the tokens before it, in nats."""
    logsumexp: Tensor
    """Logarithm of the sum of exponentials of the logits, divided by the temperature."""
    entropy: Tensor | None = None
    """Entropy of the distribution, in nats; None unless requested."""


class TopTokens(NamedTuple):
    """The largest logits at each position, [B, S, k] each, in descending order."""

    values: Tensor
    """Logits divided by the temperature."""
    indices: Tensor
    """Vocabulary entries of these logits, int64."""


class Asking:
    """Builds per-token queries; raises ValueError for one that the model does not support."""

    def __init__(self, traced: TracedModel, rows: RowReader) -> None:
        self._traced, self._rows = traced, rows
        self.logits_of = traced.interface.logits_of(traced.model)
        """The kind of the model's logits: vocabulary entries, or labels of tokens or rows."""

    def check_predicts(self, name: str) -> None:
        """Raise ValueError, naming the method `name`, if the model's logits are not of tokens."""
        if self.logits_of is not LogitsOf.VOCABULARY:
            raise ValueError(
                f"run.{name} is of tokens, and {type(self._traced.model).__name__} gives logits of"
                f" labels: make a loss of run.logits and call run.backward(loss)"
            )

    def scores(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        temperature: float,
        entropy: bool,
    ) -> Asked:
        """Return the query of `ParallelRun.log_probs`."""
        self.check_predicts("log_probs")
        _check_temperature(temperature)
        batch = self._rows.read_padded(input_ids, labels, position_ids, attention_mask)

        rules = TokenScoreRules(temperature, entropy)
        num_labels = (batch.labels != IGNORED).sum().double()
        length = input_ids.shape[1]
        return Asked(
            batch=batch,
            width=2 + entropy,
            find=partial(_find, rules),
            beside=batch.labels,
            num_labels=num_labels,
            answer=lambda found: TokenScores(*found[:, :length].unbind(-1)),  # without padding
            ahead=1,  # position t predicts the label at t + 1, where the caller gets the result
        )

    def logits(
        self,
        input_ids: Tensor,
        pick: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        top_k: int | None = None,
        temperature: float = 1.0,
    ) -> Asked:
        """Return the query of `ParallelRun.logits`."""
        _check_temperature(temperature)
        size = self._traced.vocab_size
        asked = self._asked(input_ids, position_ids, attention_mask)
        self._check_choice(input_ids, pick, top_k)
        width, length = size, input_ids.shape[1]
        rules: ResultRules = AllLogits()
        if pick is not None:
            # Rows may be padded for the ranks. The padding picks token 0; `answer` cuts it off.
            padded = pick.new_zeros(*asked.batch.tokens.shape, pick.shape[2])
            padded[:, :length] = pick
            asked = asked._replace(beside=padded.to(self._rows.device))
            width, rules = pick.shape[2], PickedLogits()
        elif top_k is not None:  # the logits, then their tokens as numbers of the same dtype
            width, rules = 2 * top_k, TopLogits(top_k)

        def answer(found: Tensor) -> Any:
            """Return the results without padding; for a classifier of rows, only each row's."""
            found = found[:, :length]
            if self.logits_of is LogitsOf.ROW_LABELS:
                found = found[torch.arange(len(found)), self._last(input_ids, attention_mask)]
            if top_k is None:
                return found / temperature
            values, indices = found.split(top_k, -1)
            return TopTokens(values / temperature, indices.detach().long())

        return asked._replace(width=width, find=partial(_find, rules), answer=answer)

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Asked:
        """Return the query of `ParallelRun.hidden`."""
        head, model = self._traced.trace.head, self._traced.model
        if head is None:
            raise ValueError(
                f"run.hidden is what the last linear is given, and the logits of"
                f" {type(model).__name__} are made of more: use run.logits"
            )
        width: Any = model.get_submodule(head).in_features
        return self._asked(input_ids, position_ids, attention_mask)._replace(width=width)

    def _asked(
        self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Asked:
        """Return the query of the head's input for all tokens; its width is to be set.

        Every token that `attention_mask` does not mask counts as a label.
        """
        check_tensors(input_ids=input_ids)
        nothing = torch.full_like(input_ids, IGNORED, dtype=torch.long)
        batch = self._rows.read_padded(input_ids, nothing, position_ids, attention_mask)
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        num_labels = seen.to(self._rows.device).sum().double()
        length = input_ids.shape[1]
        return Asked(
            batch=batch,
            width=0,
            find=_hidden,
            beside=batch.tokens,
            num_labels=num_labels,
            answer=lambda found: found[:, :length],
        )

    def _check_choice(self, input_ids: Tensor, pick: Tensor | None, top_k: int | None) -> None:
        """Raise ValueError for a `pick` or `top_k` that does not fit the model or the tokens."""
        size = self._traced.vocab_size
        if pick is not None and top_k is not None:
            raise ValueError("pass pick or top_k, not both")
        if self.logits_of is LogitsOf.ROW_LABELS and (pick is not None or top_k is not None):
            raise ValueError(
                f"pick and top_k select tokens, but this model gives {size} logits a sequence, and"
                f" all are returned"
            )
        if top_k is not None and not 1 <= top_k <= size:
            raise ValueError(f"top_k={top_k} must be from 1 to {size}, the logits of a token")
        if pick is None:
            return
        check_tensors(pick=pick)
        if pick.dim() != 3 or pick.shape[:2] != input_ids.shape:
            expected = f"[{', '.join(map(str, input_ids.shape))}, k]"
            raise ValueError(f"pick must be {expected}, got {list(pick.shape)}")
        foreign = pick[(pick < 0) | (pick >= size)]
        if foreign.numel():
            raise ValueError(f"pick has {foreign[0].item()}: give tokens from 0 to {size - 1}")

    def _last(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the position in each row whose logits a sequence classifier returns, [B].

        As in transformers: the last token that is not `pad_token_id`; without one, the last token
        that `attention_mask` does not mask.
        """
        padding = self._traced.interface.config(self._traced.model).get("pad_token_id")
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if padding is not None:
            seen = input_ids != padding
        # The largest position among the tokens seen; 0 if there is none.
        return (torch.arange(input_ids.shape[1], device=seen.device) * seen).argmax(1)


def _find(rules: ResultRules, chunk: StageModule, output: Tensor, beside: Tensor) -> Tensor:
    """Return results of the logits by `rules`, [B, N, K]."""
    return chunk.results(output, beside, rules)


def _hidden(_: StageModule, output: Tensor, __: Tensor) -> Tensor:
    """Return the head's input in float32 or wider, [B, N, K]."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature of 0 or less."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
