"""A Llama-family decoder in plain modules, the same code in every mode, and its stages.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens and V' the features that this rank
computes (see `isp.layers.factory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from isp.attention import (
    AttentionMask,
    DistributedAttention,
    LocalAttention,
    make_local_attention,
)
from isp.layers.compiled import compiles
from isp.layers.embedding import VocabParallelEmbedding
from isp.layers.factory import LayerFactory
from isp.layers.module import bind_names, init_weights, named_parameters
from isp.layers.rotary import RotaryEmbedding
from isp.pipeline import split_layers
from isp.recompute import Recomputer
from isp.rng import RngStatesTracker
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.parameter import ShardedParameter
from isp.weights.trace import Passes, inputs_kept, recomputed_blocks
from model.block import Block
from model.config import ModelConfig

__all__ = ["Decoder", "LayerSpan", "build_stages", "stage_spans"]


class LayerSpan(NamedTuple):
    """The blocks [start, stop) of the whole model that a pipeline stage has.

    The one with the first block has the embedding too, the one with the last norm and head.
    """

    start: int
    stop: int


class Decoder(nn.Module):
    """Tokens to losses, or the part of the way that one pipeline stage goes; a `Chunk`.

    Names are those of the whole model: a stage's first block may be `layers.4`. Where the head is
    tied, the last stage has an `embedding`, too: `table`, if the first stage is on this rank, else
    a copy, whose gradients have to be added to those of the first stage's.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerFactory,
        core: DistributedAttention,
        span: LayerSpan | None = None,
        *,
        table: VocabParallelEmbedding | None = None,
    ):
        super().__init__()
        self.config = config
        self.span = LayerSpan(0, config.num_layers) if span is None else span
        self.is_first = self.span.start == 0
        self.is_last = self.span.stop == config.num_layers
        self.embedding = self.norm = self.head = None
        if self.is_first or (self.is_last and config.tie_embeddings):
            self.embedding = table or layers.embedding(
                config.vocab_size, config.hidden_size, std=config.init_std
            )
        self.rotary = RotaryEmbedding(
            config.head_size, base=config.rope_theta, scaling=config.rope_scaling
        )
        self.recompute = recompute = Recomputer(
            tracker=RngStatesTracker(layers.device),
            announce=layers.recomputing,
            distribute_over=layers.tensor if config.checkpoint_distribute_activations else None,
            offload_to=layers.host if config.checkpoint_offload else None,
            segment=config.checkpoint_segment,
        )
        recomputed = recomputed_blocks(config.num_layers, config.checkpoint)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, layers, core, recompute, recomputed=recomputed[i])
                for i in range(*self.span)
            }
        )
        if self.is_last:
            self.norm = layers.rms_norm(config.hidden_size, eps=config.norm_eps)
            self.head = layers.head(
                config.hidden_size,
                config.vocab_size,
                std=config.init_std,
                tied_to=self.embedding if config.tie_embeddings else None,
                loss_chunk_tokens=config.loss_chunk_tokens,
            )
        self.splits_logits = layers.splits_logits
        self.vocab_size = config.vocab_size
        bind_names(self)

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """x and positions [B, S'] -> [B, S', D], on the last stage behind the last norm."""
        mask = AttentionMask(causal=True, window=self.config.sliding_window, cu_seqlens=cu_seqlens)
        if self.is_first and self.embedding is not None:
            x = self.embedding(x)
        rotary = self.rotary(positions, dtype=x.dtype)
        self.recompute.begin()
        for block in self.blocks():
            x = block(x, rotary, mask)
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of what the last stage's forward gave, [B, S', D] -> [B, S', V']."""
        assert self.head is not None
        logits: Tensor = self.head(hidden)
        return logits

    def logits_of(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        pick: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The logits [B, n.., V'] of the tokens that `pick`, [B, S', D] -> [B, n, D], leaves.

        x, positions, cu_seqlens: those of a forward.
        """
        return self.logits(pick(self(x, positions, cu_seqlens)))

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        assert self.head is not None
        loss: Tensor = self.head(output, labels, expected)
        return loss

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, as the labels; of what `loss` gives the sum of. No gradient."""
        assert self.head is not None
        return self.head.losses.each(output, labels)

    def blocks(self) -> Iterator[Block]:
        """The blocks, in order."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield block

    def shards(self) -> Iterator[ShardedParameter]:
        return named_parameters(self)

    def init_weights(self, seed: int | None) -> None:
        init_weights(self, seed)

    def parts(self) -> dict[str, nn.Module]:
        parts = {
            "embedding": self.embedding if self.is_first else None,
            **{f"layers.{i}": block for i, block in self.layers.items()},
            "norm": self.norm,
            "head": self.head,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        declared, written = [], Passes(between=2 * self.config.hidden_size)
        recomputed = tuple(block.recomputed for block in self.blocks())
        kept = inputs_kept(recomputed, self.config.checkpoint_segment)
        if self.is_first and self.embedding is not None:
            table = DeclaredUse(
                name="embedding", layer=self.embedding, weight_in_backward=False, passes=written
            )
            declared.append(DeclaredBlock(name="embedding", module=self.embedding, uses=(table,)))
        declared += [
            DeclaredBlock(
                name=f"layers.{self.span.start + i}",
                module=block,
                uses=block.weight_uses(),
                recomputed=block.recomputed,
                input_kept=kept[i],
            )
            for i, block in enumerate(self.blocks())
        ]
        if self.norm is not None and self.head is not None:
            use = DeclaredUse(
                name="head", layer=self.head, weight_in_backward=False, passes=written
            )
            last = nn.ModuleList((self.norm, self.head))
            declared.append(DeclaredBlock(name="head", module=last, uses=(use,)))
        return tuple(declared)


def build_stages(
    config: ModelConfig,
    layers: LayerFactory,
    stages: Iterable[int],
    num_stages: int,
    attention: LocalAttention | None,
) -> tuple[Decoder, ...]:
    """The chunks of a rank that has these stages: see `isp.models.protocol.LanguageModel.build`."""
    compiled = compiles(config.compile, layers.device)
    layers = replace(layers, compiled=compiled)
    if attention is None:
        attention = make_local_attention(
            config.attention_backend,
            device=layers.device,
            dtype=layers.dtype,
            head_dim=config.head_size,
            group=config.num_heads // config.kv_heads,
            everyone=layers.everyone,
        )
    core = layers.attention(attention)
    spans = stage_spans(config, num_stages)
    chunks: list[Decoder] = []
    for stage in stages:
        table = chunks[0].embedding if chunks else None
        chunks.append(Decoder(config, layers, core, spans[stage], table=table))
    return tuple(chunks)


def stage_spans(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The blocks of each stage, so that the one that multiplies most multiplies least.

    The head counts as so many blocks as it has their parameters; an embedding multiplies nothing.
    Raises ValueError if there are more stages than blocks.
    """
    head = config.vocab_size * config.hidden_size
    spans = split_layers([1.0] * config.num_layers, stages, after=head / config.block_parameters)
    return [LayerSpan(*span) for span in spans]
