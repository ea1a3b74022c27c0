"""Per-token queries over one micro-batch, a class for each kind.

A query checks the caller's arguments, computes K numbers for each token, and turns these into what
the caller gets.

B batch, S sequence, N tokens of a row whose results this rank computes, V vocabulary, D hidden
size, K numbers of each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from isp.core.micro_batch import MicroBatch
from isp.loop.rows import RowReader, check_tensors
from isp.models.huggingface.interface import LogitsOf
from isp.models.runtime.stage_module import StageModule

__all__ = [
    "HiddenQuery",
    "LogitQuery",
    "ScoreQuery",
    "TokenQuery",
    "TokenScores",
    "TopTokens",
    "check_predicts",
]


class TokenScores(NamedTuple):
    """Scores of each label, [B, S] each; 0 at positions without a label."""

    log_probs: Tensor
    """Log-probability of the label given the tokens before it, in nats."""
    logsumexp: Tensor
    """Log-sum-exp of logits / temperature, for the logits [V] that predict the label."""
    entropy: Tensor | None = None
    """Entropy, in nats, of the model's distribution over the vocabulary at the position that
    predicts the label; None unless requested."""


class TopTokens(NamedTuple):
    """The largest logits at each position, [B, S, k] each, in descending order."""

    values: Tensor
    """Logits divided by the temperature."""
    indices: Tensor
    """Token ids of these logits, int64."""


class TokenQuery(ABC):
    """A per-token query over one micro-batch, with whole rows in the caller's order."""

    ahead = 0
    """Offset from a token to the position at which the caller gets the result of its logits: 1 for
    log-probabilities, because a token's logits predict the next token."""

    def __init__(
        self, batch: MicroBatch, *, length: int, width: int, inputs: Tensor, num_labels: Tensor
    ) -> None:
        self.batch = batch
        """The rows [B, S], padded so that the ranks divide S."""
        self.length = length
        """Number of tokens in the caller's rows, without the padding for the ranks."""
        self.width = width
        """K, the number of results of each token."""
        self.inputs = inputs
        """Numbers [B, S, ..] that `compute` needs for each token, such as its label."""
        self.num_labels = num_labels.sum().double()
        """Number of tokens that count as labels in a step's outcome; [], float64."""

    _rules: ResultRules
    """The rules by which results are computed from logits."""

    def compute(self, chunk: StageModule, output: Tensor, inputs: Tensor) -> Tensor:
        """Return the results [B, N, K] of this rank's tokens, from the last chunk's output.

        `inputs` [B, N, ..] are `self.inputs` for these tokens.
        """
        return chunk.results(output, inputs, self._rules)

    @abstractmethod
    def answer(self, found: Tensor) -> Any:
        """Return what the caller gets, given the results of whole rows [B, S, K]."""

    def places(self) -> Tensor:
        """Return, for each token, the index at which the caller gets its result; [B, S].

        It is an index into the flattened results [B S], at the position `ahead` tokens after the
        token. For the last `ahead` tokens of a sequence there is no such position: their index is
        B S, which means that their results are not used.
        """
        tokens, total = self.batch.tokens, self.batch.tokens.numel()
        places = torch.arange(total, device=tokens.device).view(tokens.shape) + self.ahead
        places[:, tokens.shape[1] - self.ahead :] = total
        return places


class ScoreQuery(TokenQuery):
    """The query of `ParallelRun.log_probs`: log-probability, log-sum-exp, entropy of each label."""

    ahead = 1

    def __init__(
        self,
        reader: RowReader,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        temperature: float,
        entropy: bool,
    ) -> None:
        check_predicts(reader, "log_probs")
        _check_temperature(temperature)
        batch = reader.read_padded(input_ids, labels, position_ids, attention_mask)
        super().__init__(
            batch,
            length=input_ids.shape[1],
            width=2 + entropy,
            inputs=batch.labels,
            num_labels=batch.labels != IGNORED,
        )
        self._rules = TokenScoreRules(temperature, entropy)

    def answer(self, found: Tensor) -> TokenScores:
        return TokenScores(*found[:, : self.length].unbind(-1))


class LogitQuery(TokenQuery):
    """The query of `ParallelRun.logits`: all logits of a token, some of them, or the largest."""

    def __init__(
        self,
        reader: RowReader,
        input_ids: Tensor,
        pick: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        top_k: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        _check_temperature(temperature)
        batch, num_labels = _without_labels(reader, input_ids, position_ids, attention_mask)
        _check_choice(reader, input_ids, pick, top_k)
        length, inputs = input_ids.shape[1], batch.tokens
        if pick is not None:
            width, self._rules = pick.shape[2], PickedLogits()
            # Rows may be padded for the ranks. Padding picks token 0, and `answer` cuts it off.
            padded = pick.new_zeros(*batch.tokens.shape, width)
            padded[:, :length] = pick
            inputs = padded.to(reader.device)
        # With top_k, a token has 2 top_k results: the logits, followed by their vocabulary entries
        # as numbers of the same dtype.
        elif top_k is not None:
            width, self._rules = 2 * top_k, TopLogits(top_k)
        else:
            width, self._rules = reader.traced.vocab_size, AllLogits()
        super().__init__(batch, length=length, width=width, inputs=inputs, num_labels=num_labels)
        self._top_k, self._temperature = top_k, temperature
        self._last: Tensor | None = None
        """Position in each row whose logits the caller gets, [B]; None: all positions."""
        if reader.logits_of is LogitsOf.ROW_LABELS:
            self._last = _last_seen(reader, input_ids, attention_mask)

    def answer(self, found: Tensor) -> Tensor | TopTokens:
        found = found[:, : self.length]
        if self._last is not None:
            found = found[torch.arange(len(found)), self._last]
        if self._top_k is None:
            return found / self._temperature
        values, indices = found.split(self._top_k, -1)
        return TopTokens(values / self._temperature, indices.detach().long())


class HiddenQuery(TokenQuery):
    """The query of `ParallelRun.hidden`: the head's input, in float32 or wider; K is D."""

    def __init__(
        self,
        reader: RowReader,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        head, model = reader.traced.trace.head, reader.traced.model
        if head is None:
            raise ValueError(
                f"run.hidden returns the input of the last linear, but the logits of"
                f" {type(model).__name__} are not the output of one linear: use run.logits"
            )
        width: Any = model.get_submodule(head).in_features
        batch, num_labels = _without_labels(reader, input_ids, position_ids, attention_mask)
        length = input_ids.shape[1]
        super().__init__(
            batch, length=length, width=width, inputs=batch.tokens, num_labels=num_labels
        )

    def compute(self, chunk: StageModule, output: Tensor, inputs: Tensor) -> Tensor:
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def answer(self, found: Tensor) -> Tensor:
        return found[:, : self.length]


def _without_labels(
    reader: RowReader,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[MicroBatch, Tensor]:
    """Return rows for results that need no labels, and a mask of the tokens that count as labels.

    These are the tokens that `attention_mask` does not mask.
    """
    check_tensors(input_ids=input_ids)
    nothing = torch.full_like(input_ids, IGNORED, dtype=torch.long)
    batch = reader.read_padded(input_ids, nothing, position_ids, attention_mask)
    seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return batch, seen.to(reader.device)


def _last_seen(reader: RowReader, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return, for each row, the position whose logits a sequence classifier returns; [B].

    As in transformers, it is the last token that is not the configuration's `pad_token_id`; if that
    is not set, the last token that `attention_mask` does not mask.
    """
    padding = reader.traced.interface.config(reader.traced.model).get("pad_token_id")
    seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if padding is not None:
        seen = input_ids != padding
    # The largest position of a seen token; 0 if there is none.
    return (torch.arange(input_ids.shape[1], device=seen.device) * seen).argmax(1)


def check_predicts(reader: RowReader, name: str) -> None:
    """Raise ValueError if the model's logits are not for vocabulary entries.

    `name`: the method of `ParallelRun` that needs them.
    """
    if reader.logits_of is not LogitsOf.VOCABULARY:
        raise ValueError(
            f"run.{name} needs logits of tokens, and {type(reader.traced.model).__name__} gives"
            f" logits of labels: make a loss of run.logits and call run.backward(loss)"
        )


def _check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature of 0 or less."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")


def _check_choice(
    reader: RowReader, input_ids: Tensor, pick: Tensor | None, top_k: int | None
) -> None:
    """Raise ValueError for a `pick` or `top_k` that does not fit the model or the tokens."""
    size = reader.traced.vocab_size
    if pick is not None and top_k is not None:
        raise ValueError("pass pick or top_k, not both")
    if reader.logits_of is LogitsOf.ROW_LABELS and (pick is not None or top_k is not None):
        raise ValueError(
            f"pick and top_k select tokens, but this model has {size} logits a sequence, which are"
            f" all returned: leave out pick and top_k"
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
        raise ValueError(f"pick has {foreign[0].item()}: pass tokens from 0 to {size - 1}")
