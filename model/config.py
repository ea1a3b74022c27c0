"""The `model` section of the configuration: sizes and options of a decoder; loads no torch."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from isp.core.attention.backend import AttentionBackend
from isp.core.layers.rope_scaling import RopeScaling
from isp.core.mesh.config import ParallelConfig, PipelineConfig
from isp.core.mesh.partition import usable
from isp.core.recompute.config import Recomputation
from isp.core.section import (
    Absent,
    Count,
    CountOrZero,
    Fraction,
    KeyRole,
    NotNegative,
    Size,
    section,
)
from isp.models.huggingface.adapter_config import AdapterConfig

__all__ = ["ComputeConfig", "ModelConfig"]


@section("model", KeyRole.METHOD)
class ComputeConfig:
    """The keys of `model` that say how to compute a model, whatever the model is."""

    adapter: Annotated[AdapterConfig | None, KeyRole.MODEL] = None
    """Adapters on the model of hf, whose own weights are then frozen; null: the whole model is
    trained."""
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    """Backend of attention; auto: the fastest that runs here."""
    compile: bool | Literal["auto"] = "auto"
    """Fuse rotary embedding and SwiGLU into one kernel each by torch.compile, with fewer roundings,
    and the loss into two; auto: on CUDA. In models other than ISP's own decoder, only the loss is
    compiled. Each layer costs a fraction of a millisecond of Python, so false may be faster with
    few tokens per rank."""
    allow_unchecked: bool = False
    """Train a model that could not be checked for code that mixes tokens outside of attention, with
    a warning; false: refuse it. The check runs the model on the CPU with random weights, and
    compares the operations in a row of full length with those in a short one. A model found to mix
    tokens is always refused."""
    loss_chunk_tokens: CountOrZero = 4096
    """Number of tokens for which a rank computes logits and losses at a time; 0: all at once."""
    router_aux_loss_coef: NotNegative = 0.0
    """Coefficient of the load-balancing loss of experts; 0: the one in config.json, if
    output_router_logits is set there.  Name and loss: transformers."""
    router_z_loss_coef: NotNegative = 0.0
    """Coefficient of the router z-loss, the mean square of the log-sum-exp of router logits."""
    moe_router_bias_update_rate: NotNegative = 0.0
    """Rate at which each step moves the biases for choosing experts towards an even load, as in
    DeepSeek-V3's balancing without a loss (0.001 there); 0: never.  Name: Megatron."""
    checkpoint: Fraction = 0.0
    """Fraction of the blocks, counted from the first, whose activations are recomputed in
    backward."""
    checkpoint_keeps_attention: bool = False
    """Recompute everything except attention: its inputs q, k, v and its outputs are kept."""
    checkpoint_distribute_activations: bool = False
    """mtp: each tensor rank keeps 1/p of a recomputed block's input, which is gathered in
    backward."""
    checkpoint_offload: bool = False
    """Keep the inputs of recomputed blocks in host memory (pinned on CUDA). They are copied out
    during forward, and back one block ahead of backward."""
    checkpoint_segment: CountOrZero = 0
    """Recompute in two levels: keep only the input of every n-th recomputed block, and compute the
    inputs of the blocks between again in backward, at the cost of one more forward; 0: keep the
    inputs of all. With m recomputed blocks in a stage, n = sqrt(m) needs the least memory."""
    checkpoint_norm_outputs: bool = False
    """In blocks that are not recomputed: recompute everything between linears, attention,
    convolutions and scans. In msp mode, inputs of linears are then gathered again. Must be set
    together with checkpoint_mlp_activation."""
    checkpoint_mlp_activation: bool = False
    """In blocks that are not recomputed: recompute the activation of the MLP, which is a part of
    what checkpoint_norm_outputs recomputes. Must be set together with it."""
    mlp_tile_tokens: CountOrZero = 0
    """Number of tokens for which the MLP is computed at a time; backward computes it again. A value
    above the tokens of a micro-batch: all at a time; 0: no tiles, and nothing is computed again.
    The cost is small from 8192 on. With model.hf, it applies to modules of a block that contain
    several linears or experts and no attention."""

    def __post_init__(self) -> None:
        if self.checkpoint_distribute_activations and not self.checkpoint:
            raise ValueError(
                "model.checkpoint_distribute_activations has no effect without recomputed blocks:"
                " set model.checkpoint above 0"
            )
        self._check_kept_inputs()

    def _check_kept_inputs(self) -> None:
        """Raise ValueError for keys of kept block inputs that have no effect together."""
        for key in ("checkpoint_offload", "checkpoint_segment"):
            if getattr(self, key) and not self.checkpoint:
                raise ValueError(
                    f"model.{key} applies to the inputs of recomputed blocks, but no block is"
                    f" recomputed: set model.checkpoint above 0"
                )
        if self.checkpoint_segment == 1:
            raise ValueError(
                "model.checkpoint_segment=1 keeps the input of every block: use 0, or 2 or more"
            )
        if self.checkpoint_segment and self.checkpoint_keeps_attention:
            raise ValueError(
                f"model.checkpoint_segment={self.checkpoint_segment} saves the memory of block"
                f" inputs, but model.checkpoint_keeps_attention=true keeps more than those: set"
                f" one of them to its default, 0 or false"
            )

    def check_beside(self, other: str) -> None:
        """Raise ValueError for keys that have no effect, because `other` runs and not isp's
        decoder."""
        # Read the property, which raises for keys that contradict each other.
        _ = self.recomputation
        if self.compile is True:
            raise ValueError(
                f"model.compile=true applies only to isp's own model, not to {other}: use auto or"
                f" false"
            )

    @property
    def recomputation(self) -> Recomputation:
        """Return what to recompute in backward.

        Raises ValueError for keys that contradict each other.
        """
        if self.checkpoint_norm_outputs != self.checkpoint_mlp_activation:
            raise ValueError(
                "model.checkpoint_norm_outputs and model.checkpoint_mlp_activation must be set"
                " together, because everything between linears is recomputed: set both, or none"
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


@section("model", KeyRole.MODEL)
class ModelConfig(ComputeConfig):
    """`model`: a preset, sizes, a preset with some sizes changed, or a model's folder."""

    preset: Annotated[str | None, KeyRole.PLACE] = None
    """Name of a known model (see `model/presets.py`). Sizes given here override its sizes."""
    hf: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of a Hugging Face causal language model, trained unchanged: config.json, and
    safetensors unless the weights should be random. Only checkpoint, checkpoint_*, mlp_tile_tokens,
    loss_chunk_tokens, attention_backend, compile, allow_unchecked, keys of routers, hf_overrides
    and adapter can be combined with it."""
    hf_overrides: Annotated[dict[str, Any] | None, Absent(None)] = field(default=None, hash=False)
    """Keys of config.json with other values than in the folder of hf, such as {rope_parameters:
    {rope_type: yarn, factor: 4, original_max_position_embeddings: 32768}, max_position_embeddings:
    131072}, by the names of the installed transformers (rope_scaling is the older name of
    rope_parameters). Mappings are merged key by key. In a folder with a text_config, keys are those
    of text_config. An export writes the overridden values to its config.json."""
    vocab_size: Size = 32000
    """Entries of the embedding table and of the logits, at least as many as the tokenizer has."""
    hidden_size: Size = 4096
    """Size of the hidden state between blocks."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Number of blocks."""
    num_heads: Size = 32
    """Number of query heads."""
    num_kv_heads: Size | None = None
    """Number of key and value heads, a divisor of num_heads; null: num_heads."""
    head_dim: Size | None = None
    """Size of a head; null: hidden_size / num_heads."""
    intermediate_size: Size = 11008
    """Hidden size of the MLP."""
    num_experts: CountOrZero = 0
    """Number of experts that replace an MLP; 0: none."""
    experts_per_token: Size = 2
    """Number of experts for each token, those with the largest probabilities."""
    moe_intermediate_size: Size | None = None
    """Hidden size of an expert; null: intermediate_size."""
    norm_topk_prob: bool = True
    """Divide the probabilities of a token's experts by their sum (Mixtral always does)."""
    shared_expert_intermediate_size: CountOrZero = 0
    """Hidden size of an expert for all tokens, multiplied by a sigmoid gate (Qwen2-MoE); 0: no
    such expert."""
    num_dense_layers: CountOrZero = 0
    """Number of first blocks that have an MLP instead of experts."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Annotated[float, Field(ge=1, le=1e30)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scales rotary positions to longer contexts; null: no scaling."""
    sliding_window: Count | None = None
    """Number of tokens that a token attends to, including itself; null: all tokens before it."""
    qkv_bias: bool = False
    """Whether the projections to q, k and v have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether each head of q and k goes through RMSNorm (Qwen3)."""
    tie_embeddings: bool = False
    """Whether the logits use the embedding table."""
    init_std: NotNegative = 0.02
    """Standard deviation of the initial weights; for the output projections of blocks, it is
    divided by sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None and self.hf is None:
            raise ValueError("model.adapter needs model.hf, the folder of the model that it adapts")
        if self.hf_overrides is not None and self.hf is None:
            raise ValueError(
                f"model.hf_overrides={json.dumps(self.hf_overrides)} changes the config.json of"
                f" model.hf, which is not given: name its folder, or leave hf_overrides out"
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
                f"rotary positions need a head size that is even and at least 4, not"
                f" {self.head_size}: set model.head_dim (or hidden_size / num_heads)"
            )

        self._check_experts()

    def _check_experts(self) -> None:
        """Raise ValueError for keys of experts that contradict each other."""
        if not self.num_experts:
            for key in ("shared_expert_intermediate_size", "num_dense_layers"):
                if getattr(self, key):
                    raise ValueError(
                        f"model.{key}={getattr(self, key)} needs experts: set model.num_experts,"
                        f" or leave it out"
                    )
        elif self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must be at most"
                f" model.num_experts={self.num_experts}"
            )
        elif self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} leaves no block of"
                f" model.num_layers={self.num_layers} for experts: use fewer, or num_experts=0"
            )

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Return the number of features of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def expert_size(self) -> int:
        """Return the number of hidden features of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Return the hidden features of the MLPs that modes may split, by key."""
        found = {"shared_expert_intermediate_size": self.shared_expert_intermediate_size}
        if not self.num_experts or self.num_dense_layers:
            found["intermediate_size"] = self.intermediate_size
        return {key: size for key, size in found.items() if size}

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Check that the model can be split as `parallel` says.

        `seq_len` is the number of tokens in one row of a batch. Raises ValueError with key, value
        and what to use instead.
        """
        size, mode = parallel.tensor.size, parallel.tensor.mode
        # Read the property, which raises for keys that contradict each other.
        _ = self.recomputation
        if mode.splits_features:
            split = {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads}
            for key, value in {**split, **self.mlp_sizes}.items():
                if value % size:
                    raise ValueError(
                        f"parallel.tensor.size={size} must divide model.{key}={value} in {mode}"
                        f" mode: use {usable(value, size)}, or isp mode, which does not split the"
                        f" features"
                    )
        parallel.for_heads(self.num_heads, self.kv_heads)
        _check_stages(self, parallel.pipeline)
        if self.checkpoint_distribute_activations:
            parallel.tensor.check_distributes_inputs(self.hidden_size, seq_len)
        if mode.splits_sequence and seq_len % size:
            raise ValueError(
                f"parallel.tensor.size={size} must divide the sequence of {seq_len} tokens"
                f" (data.seq_len, times data.micro_bsz if data.pack) in {mode} mode: use"
                f" {usable(seq_len, size)}"
            )
        # Each of p ranks takes ceil(V / p) entries, so a small vocabulary leaves no entry for the
        # last ranks.
        if mode.splits_features and self.vocab_size <= (size - 1) * -(-self.vocab_size // size):
            raise ValueError(
                f"model.vocab_size={self.vocab_size} leaves some of the {size} tensor ranks"
                f" without a part of the vocabulary: use a multiple of {size}"
            )
        exchanges_logits = not mode.splits_features and parallel.weight.vocab_parallel_loss
        if exchanges_logits and self.vocab_size % size:
            raise ValueError(
                f"parallel.tensor.size={size} must divide model.vocab_size={self.vocab_size} for"
                f" parallel.weight.vocab_parallel_loss: use a multiple of {size}, or the default"
                f" loss"
            )


def _check_stages(model: ModelConfig, pipeline: PipelineConfig) -> None:
    """Raise ValueError if there are more pipeline stages than layers."""
    stages = pipeline.size * pipeline.num_chunks
    if stages > model.num_layers:
        chunks = f" x num_chunks={pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
        raise ValueError(
            f"parallel.pipeline.size={pipeline.size}{chunks} is more than"
            f" model.num_layers={model.num_layers}: each stage needs a layer"
        )
