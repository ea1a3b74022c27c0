"""Per-token queries over one micro-batch, a class for each kind.

A query checks the caller's arguments, says which numbers are computed for each token and how, and
turns them into the caller's form.

B batch, S sequence, N tokens of a row whose results this rank computes, V vocabulary, D hidden
size, K numbers of each token
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


class TokenQuery(ABC):
    """A per-token query over one micro-batch, with whole rows in the caller's order."""

    ahead = 0
    """Positions from the token whose logits give a result to the token that the caller gets it for:
    1 for log-probabilities, which logits of the token before predict."""

    def __init__(
        self, batch: MicroBatch, *, length: int, width: int, beside: Tensor, num_labels: Tensor
    ) -> None:
        self.batch = batch
        """The rows, [B, S], padded for the ranks."""
        self.length = length
        """Tokens of the caller's rows, without that padding."""
        self.width = width
        """K, the number of results of each token."""
        self.beside = beside
        """Further input of `compute` for each token, such as its label; [B, S, ..]."""
        self.num_labels = num_labels.sum().double()
        """Number of tokens that count as labels in a step's outcome; [], float64."""

    _rules: ResultRules
    """The rules of results that are made of logits."""

    def compute(self, chunk: StageModule, output: Tensor, beside: Tensor) -> Tensor:
        """Return the results [B, N, K] from the last chunk's output; `beside` is for its tokens."""
        return chunk.results(output, beside, self._rules)

    @abstractmethod
    def answer(self, found: Tensor) -> Any:
        """Return what the caller gets, from the results of whole rows [B, S, K]."""

    def places(self) -> Tensor:
        """Return the index, in the caller's flattened rows, of each token's result; [B, S].

        The last `ahead` tokens of a row have no later position: B S marks their results unused.
        """
        tokens, total = self.batch.tokens, self.batch.tokens.numel()
        places = torch.arange(total, device=tokens.device).view(tokens.shape) + self.ahead
        places[:, tokens.shape[1] - self.ahead :] = total
        return places


class ScoreQuery(TokenQuery):
    """The query of `ParallelRun.log_probs`."""

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
            beside=batch.labels,
            num_labels=batch.labels != IGNORED,
        )
        self._rules = TokenScoreRules(temperature, entropy)

    def answer(self, found: Tensor) -> TokenScores:
        return TokenScores(*found[:, : self.length].unbind(-1))


class LogitQuery(TokenQuery):
    """The query of `ParallelRun.logits`: all logits of a token, picked ones, or the largest."""

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
        length, beside = input_ids.shape[1], batch.tokens
        if pick is not None:
            width, self._rules = pick.shape[2], PickedLogits()
            # Rows may be padded for the ranks. The padding picks token 0; `answer` cuts it off.
            padded = pick.new_zeros(*batch.tokens.shape, width)
            padded[:, :length] = pick
            beside = padded.to(reader.device)
        elif top_k is not None:  # the logits, then their tokens as numbers of the same dtype
            width, self._rules = 2 * top_k, TopLogits(top_k)
        else:
            width, self._rules = reader.traced.vocab_size, AllLogits()
        super().__init__(batch, length=length, width=width, beside=beside, num_labels=num_labels)
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
                f"run.hidden is what the last linear is given, and the logits of"
                f" {type(model).__name__} are made of more: use run.logits"
            )
        width: Any = model.get_submodule(head).in_features
        batch, num_labels = _without_labels(reader, input_ids, position_ids, attention_mask)
        length = input_ids.shape[1]
        super().__init__(
            batch, length=length, width=width, beside=batch.tokens, num_labels=num_labels
        )

    def compute(self, chunk: StageModule, output: Tensor, beside: Tensor) -> Tensor:
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def answer(self, found: Tensor) -> Tensor:
        return found[:, : self.length]


def _without_labels(
    reader: RowReader,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[MicroBatch, Tensor]:
    """Read rows for results that need no labels; return them and a mask of those that count.

    Every token that `attention_mask` does not mask counts as a label.
    """
    check_tensors(input_ids=input_ids)
    nothing = torch.full_like(input_ids, IGNORED, dtype=torch.long)
    batch = reader.read_padded(input_ids, nothing, position_ids, attention_mask)
    seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return batch, seen.to(reader.device)


def _last_seen(reader: RowReader, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the position in each row whose logits a sequence classifier returns, [B].

    As in transformers: the last token that is not `pad_token_id`; without one, the last token that
    `attention_mask` does not mask.
    """
    padding = reader.traced.interface.config(reader.traced.model).get("pad_token_id")
    seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if padding is not None:
        seen = input_ids != padding
    # The largest position among the tokens seen; 0 if there is none.
    return (torch.arange(input_ids.shape[1], device=seen.device) * seen).argmax(1)


def check_predicts(reader: RowReader, name: str) -> None:
    """Raise ValueError, naming the method `name`, if the model's logits are not of tokens."""
    if reader.logits_of is not LogitsOf.VOCABULARY:
        raise ValueError(
            f"run.{name} is of tokens, and {type(reader.traced.model).__name__} gives logits of"
            f" labels: make a loss of run.logits and call run.backward(loss)"
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
            f"pick and top_k select tokens, but this model gives {size} logits a sequence, and all"
            f" are returned"
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
