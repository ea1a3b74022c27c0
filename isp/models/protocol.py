"""The runtime's requests of a model: the one door through which any model enters.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens and V' the logits of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a configuration is read without torch
    from torch import Tensor, nn

    from isp.attention import LocalAttention
    from isp.layers.factory import LayerFactory
    from isp.layers.module import RowsOf
    from isp.parallel.config import ParallelConfig
    from isp.parallel.context import Windows
    from isp.weights.declare import DeclaredBlock
    from isp.weights.parameter import ShardedParameter

__all__ = ["Chunk", "LanguageModel"]


class Chunk(Protocol):
    """One pipeline stage of a model on one rank; all of it where there is no pipeline."""

    splits_logits: bool
    """Whether the losses need the labels of the whole sequence, or those of this rank's tokens."""

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Forward: x and positions [B, S'] -> [B, S', D], or what `loss` takes.

        x are the tokens; on a later stage, what the one before gave, [B, S', D]. cu_seqlens
        [documents + 1], int32, in host memory: where the documents of the *full* row of all ranks
        begin, B being 1; None if rows are not packed.
        """

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
        """On the last stage, the sum of all tokens' losses, ignored ones left out; [].

        `output` is what the forward gave, whatever that is. Labels [B, S'] are those of all S
        tokens if `splits_logits`. `expected` [], not 0, is the gradient that the sum will have if
        there is a backward: for those who compute gradients together with the loss.
        """

    def shards(self) -> Iterator[ShardedParameter]:
        """The parameters, each once, with their names in the whole model."""

    def init_weights(self, seed: int | None) -> None:
        """Give the parameters their initial weights, the same in every layout.

        None leaves the parameters to others; buffers that no checkpoint has get their values.
        """

    def parts(self) -> dict[str, nn.Module]:
        """The modules that forward and loss call in turn, by name; they have all parameters."""

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        """The weights gathered in a forward, in order."""


class LanguageModel(Protocol):
    """A model that can be built for any layout: sizes and options, no weights."""

    @property
    def hidden_size(self) -> int:
        """Features of a token that travel between stages."""

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""

    @property
    def num_parameters(self) -> int:
        """Parameters, shared ones once."""

    @property
    def tied_weight(self) -> str | None:
        """The weight that the first and the last stage both have, by name, if there is one."""

    @property
    def earlier_names(self) -> Mapping[str, RowsOf]:
        """Of parameters, by name, what they are in checkpoints of earlier versions."""

    @property
    def flop_rule(self) -> str:
        """The `flops` rule, in words."""

    @property
    def attention_windows(self) -> Windows:
        """The windows of its attention layers, with how many have each; empty: it attends to none.

        Of packed rows they decide which rank has which tokens.
        """

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Raise ValueError, naming key, value and way out, if the model cannot be split as asked.

        `seq_len` is the number of tokens in one row of a batch.
        """

    def flops(self, document_lengths: Iterable[int]) -> int:
        """FLOPs of forward and backward over documents of these lengths, in tokens."""

    def cache_bytes(self, tokens: int, item_bytes: int, parts: int, ranks: int = 1) -> int:
        """Bytes that a rank keeps of a document of so many tokens to go on from it, at most.

        A number of a token has `item_bytes`. The rank's layers have one of `parts` of the heads,
        which `ranks` exchange for tokens.
        """

    def build(
        self,
        layers: LayerFactory,
        stages: Iterable[int] = (0,),
        num_stages: int = 1,
        *,
        attention: LocalAttention | None = None,
    ) -> tuple[Chunk, ...]:
        """The chunks of a rank that has these of `num_stages` stages, weights uninitialised.

        Their layers are of `layers`. A weight that two of them use is one parameter. `attention`
        computes the attention of whole sequences; None: what the model asks for, on the device of
        `layers`. Raises ValueError if that does not run there.
        """
