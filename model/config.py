"""The `model` section of the configuration: sizes and options of a decoder; read without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isp.layers.rope_scaling import RopeScaling
from isp.parallel.config import ParallelConfig, PipelineConfig
from isp.parallel.distributable import check_distributable
from isp.parallel.partition import any_of
from isp.settings.adapter import AdapterConfig
from isp.settings.attention_backend import AttentionBackend
from isp.settings.recomputation import Recomputation
from isp.settings.section import (
    Count,
    CountOrZero,
    Fraction,
    KeyRole,
    NotNegative,
    Size,
    section,
)

__all__ = ["ModelConfig"]


@section("model", KeyRole.MODEL)
class ModelConfig:
    """`model`: a preset, sizes, a preset with some sizes changed, or a model's folder."""

    preset: Annotated[str | None, KeyRole.PLACE] = None
    """Name of a known model (see `model.presets`) whose sizes hold where none are given here."""
    hf: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of a Hugging Face causal language model, which is run as it is: a config.json, which
    has the sizes, with safetensors, or without for random weights. Of the other keys only
    checkpoint and checkpoint_*, loss_chunk_tokens, attention_backend and adapter go with it."""
    adapter: AdapterConfig | None = None
    """Adapters on the model of hf, which are trained in its place; null: all of it is trained."""
    init_from: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of a Hugging Face model (Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE,
    InternLM2): its sizes hold, and a run without checkpoints begins from its weights."""
    vocab_size: Size = 32000
    """Entries of the embedding table and of the logits; at least those of the tokenizer."""
    hidden_size: Size = 4096
    """Features of a token between the blocks."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Blocks."""
    num_heads: Size = 32
    """Query heads."""
    num_kv_heads: Size | None = None
    """Key and value heads, a divisor of num_heads; null: as many as num_heads."""
    head_dim: Size | None = None
    """Features of a head; null: hidden_size / num_heads."""
    intermediate_size: Size = 11008
    """Hidden features of the MLP."""
    num_experts: CountOrZero = 0
    """Experts in the place of an MLP; 0: none."""
    experts_per_token: Size = 2
    """Experts that a token goes to, those with the largest probabilities."""
    moe_intermediate_size: Size | None = None
    """Hidden features of an expert; null: intermediate_size."""
    norm_topk_prob: bool = True
    """Divide the probabilities of a token's experts by their sum (Mixtral always does)."""
    shared_expert_intermediate_size: CountOrZero = 0
    """Hidden features of an expert that all tokens go to, times a sigmoid gate (Qwen2-MoE); 0:
    none."""
    num_dense_layers: CountOrZero = 0
    """First blocks that have an MLP and no experts."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Annotated[float, Field(ge=1, le=1e30)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretches rotary positions to longer contexts; null: not at all."""
    sliding_window: Count | None = None
    """Tokens a token attends to, itself included; null: all before it."""
    qkv_bias: bool = False
    """Whether the projections to q, k and v have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether each head of q and k goes through RMSNorm (Qwen3)."""
    tie_embeddings: bool = False
    """Whether the logits use the embedding table."""
    attention_backend: Annotated[AttentionBackend, KeyRole.METHOD] = AttentionBackend.AUTO
    """Backend of attention; auto: the fastest that runs here."""
    compile: Annotated[bool | Literal["auto"], KeyRole.METHOD] = "auto"
    """Compute rotations and SwiGLU by a kernel each that torch.compile makes at the start, and
    rounds less; auto: on CUDA. Of isp's own model alone: others are computed as they are written.
    It takes part of a millisecond of Python a layer: with few tokens a rank, false may be
    faster."""
    init_std: NotNegative = 0.02
    """Standard deviation of the initial weights; the output projections of a block have it divided
    by sqrt(2 num_layers)."""

    loss_chunk_tokens: Annotated[CountOrZero, KeyRole.METHOD] = 4096
    """Tokens whose logits and losses a rank computes at a time; 0: all at once."""
    router_aux_loss_coef: Annotated[NotNegative, KeyRole.METHOD] = 0.0
    """Weight of the load-balancing loss of experts; 0: that of config.json, if it has
    output_router_logits.  Name and loss: transformers."""
    router_z_loss_coef: Annotated[NotNegative, KeyRole.METHOD] = 0.0
    """Weight of the routers' z-loss, the mean square of their logits' log-sum-exp."""
    moe_router_bias_update_rate: Annotated[NotNegative, KeyRole.METHOD] = 0.0
    """Let each step move the biases by which routers choose experts so much towards the mean of
    their tokens, as DeepSeek-V3 without a loss (0.001 there); 0: not.  Name: Megatron."""
    checkpoint: Annotated[Fraction, KeyRole.METHOD] = 0.0
    """Fraction of the blocks, the first ones, whose activations are recomputed in backward."""
    checkpoint_keeps_attention: Annotated[bool, KeyRole.METHOD] = False
    """Recompute all but attention, with what it takes and gives: q, k, v and the heads' outputs."""
    checkpoint_distribute_activations: Annotated[bool, KeyRole.METHOD] = False
    """mtp: keep 1/p of a recomputed block's input on each tensor rank; gather it in backward."""
    checkpoint_offload: Annotated[bool, KeyRole.METHOD] = False
    """Keep the inputs of recomputed blocks in host memory, pinned where there is a device: they
    are copied out behind the forward, and back one block ahead of the backward."""
    checkpoint_segment: Annotated[CountOrZero, KeyRole.METHOD] = 0
    """Recompute in two levels: keep the input of every so many-th recomputed block only, and
    compute those between again in backward, by one more forward; 0: keep all. Of a stage with n
    such blocks, about sqrt(n) keeps least."""
    checkpoint_norm_outputs: Annotated[bool, KeyRole.METHOD] = False
    """In blocks that are not recomputed: recompute all that lies between linears, attention,
    convolutions and scans; then linears gather again in msp mode, too. Goes with
    checkpoint_mlp_activation."""
    checkpoint_mlp_activation: Annotated[bool, KeyRole.METHOD] = False
    """Goes with checkpoint_norm_outputs."""
    mlp_tile_tokens: Annotated[CountOrZero, KeyRole.METHOD] = 0
    """Compute the MLP for so many tokens of a rank at a time, and again in backward; more than a
    micro-batch has: for all at once; 0: the MLP as any layer. 8192 and more cost little. Of
    model.hf: the modules of a block that have several linears or experts and no attention."""

    def __post_init__(self) -> None:
        if self.checkpoint_distribute_activations and not self.checkpoint:
            raise ValueError(
                "model.checkpoint_distribute_activations has nothing to distribute without"
                " recomputed blocks: set model.checkpoint above 0"
            )
        self._check_kept_inputs()
        if self.adapter is not None and self.hf is None:
            raise ValueError(
                "model.adapter is for the models of model.hf: name the folder of one with that"
            )
        if self.hf is not None:
            self.check_beside(f"model.hf={self.hf}")
            return
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} must divide model.hidden_size="
                f"{self.hidden_size}, unless model.head_dim is given"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.kv_heads} must divide model.num_heads={self.num_heads}"
            )
        if self.head_size % 2 or self.head_size < 4:
            raise ValueError(
                f"a head of {self.head_size} features cannot be rotated: model.head_dim (or"
                f" hidden_size / num_heads) must be even and at least 4"
            )

        self._check_experts()

    def _check_experts(self) -> None:
        if not self.num_experts:
            for key in ("shared_expert_intermediate_size", "num_dense_layers"):
                if getattr(self, key):
                    raise ValueError(
                        f"model.{key}={getattr(self, key)} is of a model with experts: set"
                        f" model.num_experts, or leave it out"
                    )
        elif self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must be at most"
                f" model.num_experts={self.num_experts}"
            )
        elif self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} leaves no block of"
                f" model.num_layers={self.num_layers} with experts: use fewer, or num_experts=0"
            )

    def _check_kept_inputs(self) -> None:
        for key in ("checkpoint_offload", "checkpoint_segment"):
            if getattr(self, key) and not self.checkpoint:
                raise ValueError(
                    f"model.{key} is about the inputs of recomputed blocks, and there are none: set"
                    f" model.checkpoint above 0"
                )
        if self.checkpoint_segment == 1:
            raise ValueError(
                "model.checkpoint_segment=1 keeps the input of every block: use 0, or 2 or more"
            )
        if self.checkpoint_segment and self.checkpoint_keeps_attention:
            raise ValueError(
                f"model.checkpoint_segment={self.checkpoint_segment} spares the inputs of blocks,"
                f" and model.checkpoint_keeps_attention=true keeps more than those: set one of them"
                f" to its default, 0 or false"
            )

    def check_beside(self, other: str) -> None:
        """Raise ValueError for keys of how to compute that do not go with `other`, which is run."""
        _ = self.recomputation
        if self.compile is True:
            raise ValueError(
                f"model.compile=true is for the layers of isp's own model, and {other} is another:"
                f" use auto or false"
            )

    @property
    def recomputation(self) -> Recomputation:
        """What is computed again in backward.

        Raises ValueError for keys that do not go together.
        """
        if self.checkpoint_norm_outputs != self.checkpoint_mlp_activation:
            raise ValueError(
                "model.checkpoint_norm_outputs and model.checkpoint_mlp_activation go together, as"
                " all that lies between linears is recomputed: set both, or none"
            )
        return Recomputation(
            checkpoint=self.checkpoint,
            keeps_attention=self.checkpoint_keeps_attention,
            distributed=self.checkpoint_distribute_activations,
            offload=self.checkpoint_offload,
            segment=self.checkpoint_segment,
            between_linears=self.checkpoint_norm_outputs,
            mlp_tile_tokens=self.mlp_tile_tokens,
        )

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def expert_size(self) -> int:
        """Hidden features of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Hidden features of the MLPs that modes may split, by key."""
        found = {"shared_expert_intermediate_size": self.shared_expert_intermediate_size}
        if not self.num_experts or self.num_dense_layers:
            found["intermediate_size"] = self.intermediate_size
        return {key: size for key, size in found.items() if size}

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Raise ValueError, naming key, value and way out, if it cannot be split as asked.

        `seq_len` is the number of tokens in one row of a batch.
        """
        size, mode = parallel.tensor.size, parallel.tensor.mode
        _ = self.recomputation
        if mode.splits_features:
            split = {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads}
            for key, value in {**split, **self.mlp_sizes}.items():
                if value % size:
                    raise ValueError(
                        f"parallel.tensor.size={size} must divide model.{key}={value} in {mode}"
                        f" mode: use {_usable(value, size)}, or isp mode, which does not split the"
                        f" features"
                    )
        parallel.for_heads(self.num_heads, self.kv_heads)
        _check_stages(self, parallel.pipeline)
        if self.checkpoint_distribute_activations:
            check_distributable(self.hidden_size, parallel, seq_len)
        if mode.splits_sequence and seq_len % size:
            raise ValueError(
                f"parallel.tensor.size={size} must divide the {seq_len} tokens of a row"
                f" (data.seq_len, times data.micro_bsz if data.pack) in {mode} mode:"
                f" use {_usable(seq_len, size)}"
            )
        if mode.splits_features and self.vocab_size <= (size - 1) * -(-self.vocab_size // size):
            raise ValueError(
                f"model.vocab_size={self.vocab_size} leaves some of the {size} tensor ranks without"
                f" a row: use a multiple of {size}"
            )
        exchanges_logits = not mode.splits_features and parallel.weight.vocab_parallel_loss
        if exchanges_logits and self.vocab_size % size:
            raise ValueError(
                f"parallel.tensor.size={size} must divide model.vocab_size={self.vocab_size} for"
                f" parallel.weight.vocab_parallel_loss: use a multiple of {size}, or the default"
                f" loss"
            )


def _check_stages(model: ModelConfig, pipeline: PipelineConfig) -> None:
    stages = pipeline.size * pipeline.num_chunks
    if stages > model.num_layers:
        chunks = f" x num_chunks={pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
        raise ValueError(
            f"parallel.pipeline.size={pipeline.size}{chunks} is more than"
            f" model.num_layers={model.num_layers}: each stage needs a layer"
        )


def _usable(whole: int, below: int) -> str:
    return any_of([n for n in range(1, 2 * below) if whole % n == 0])
