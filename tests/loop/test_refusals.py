"""Models that `isp.parallelize` refuses, and the messages; no ranks are started."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import isp
from isp.models.traced_model import TracedModel
from tests.models.models import job, tiny
from tests.models.own import Own, OwnBlock


def _parallelized() -> nn.Module:
    model = Own()
    isp.parallelize(model, job())
    return model


def _wrapped() -> nn.Module:
    model = Own()
    whole = model.norm.forward
    model.norm.forward = lambda x: whole(x)
    return model


def _compiled() -> nn.Module:
    model = Own()
    model.blocks[1].compile()
    return model


def _quantized() -> nn.Module:
    model = Own()
    weight = torch.zeros(32, 32, dtype=torch.int8)
    model.blocks[0].q.weight = nn.Parameter(weight, requires_grad=False)
    return model


class _TiedByHand(Own):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return F.linear(super().forward(ids, positions) @ self.tokens.weight, self.tokens.weight)


class _Reading(nn.Embedding):
    """An embedding that reads its weight in a way that fails with a rank's part of it."""

    way = ""

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "slice":
            return self.weight[: ids.shape[1]]
        if self.way == "size":
            return super().forward(ids.clamp(max=self.weight.shape[0] - 1))
        if self.way == "embedding":
            return F.embedding(ids, self.weight)
        return self.weight[ids]


def _reading(way: str, padding_idx: int | None = None) -> nn.Module:
    model = Own()
    model.positions = _Reading(64, 32, padding_idx=padding_idx)
    model.positions.way = way
    return model


def _table(**options: Any) -> nn.Module:
    model = Own()
    model.tokens = nn.Embedding(*model.tokens.weight.shape, **options)
    return model


def _computed(by: Callable[[nn.Module], object], name: str = "blocks.0.q") -> nn.Module:
    """Return a model one of whose weights is computed from others."""
    model = Own()
    by(model.get_submodule(name))
    return model


class _Scalar(Own):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class _NoAttention(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(ids)


class _Tuple(Own):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return super().forward(ids, positions), None


class _HeadsFirst(OwnBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return x + isp.attention(y, y, y).transpose(1, 2).flatten(2)


class _ReadsValues(OwnBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class _CalledTwice(Own):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class _LargeValues(OwnBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (4, 8))
        return x + isp.attention(y[..., :4], y[..., :4], y).flatten(2)


def _with_block(kind: type[OwnBlock]) -> nn.Module:
    model = Own()
    model.blocks[1] = kind(32, 4, 2, 0.0)
    return model


class _Counting(Own):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return super().forward(ids, torch.arange(ids.shape[1], device=ids.device)[None])


class _Mixing(OwnBlock):
    """A block that mixes tokens before it attends."""

    mix = staticmethod(lambda x: x.cumsum(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(x))


def _mixing(mix: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: _with_block(type("_Mixing", (_Mixing,), {"mix": staticmethod(mix)}))


class _ShortConvolution(nn.Module):
    """A convolution whose weight has the shape of stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.mT, (2, 0)), self.weight, groups=32).mT


def _convolution() -> nn.Module:
    model = Own()
    model.blocks[2].norm2 = nn.Sequential(model.blocks[2].norm2, _ShortConvolution())
    return model


class _SlicedAngles(OwnBlock):
    """A block that rotates q and k by the first rows of a table instead of those of the
    positions.
    """

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.register_buffer("angles", torch.arange(64.0)[:, None] / torch.arange(1, 33))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.get_buffer("angles")[: x.shape[1]]
        q = self.q(self.norm1(x)) * angles.cos()
        heads = (z.unflatten(-1, (4, 8)) for z in (q, q, self.out(x)))
        return x + isp.attention(*heads).flatten(2)


class _InTraining(OwnBlock):
    """A block that mixes tokens only in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y.roll(1, 1) if self.training else y


def _leaking() -> nn.Module:
    """Return a Llama with one MLP that sees the previous token."""
    model = tiny("llama")
    plain = type(model.model.layers[1].mlp)

    class _Shifting(plain):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + x.roll(1, 1))

    model.model.layers[1].mlp.__class__ = _Shifting
    return model


def _checkpointing() -> nn.Module:
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    return model


def _dora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], use_dora=True)
    return get_peft_model(tiny("llama"), config)


_QWEN4 = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip

_MINIMAX3 = {
    "num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"], "index_n_heads": 4,
    "index_head_dim": 8, "num_local_experts": 4,
}  # fmt: skip

_DEEPSEEK4 = {
    "q_lora_rank": 12, "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 4,
    "num_key_value_heads": 1,
}  # fmt: skip
"""Sizes with windows of 128 tokens, more than a trace has."""


def _without_positions() -> nn.Module:
    from transformers import TrOCRConfig, TrOCRForCausalLM

    sizes = {"vocab_size": 96, "d_model": 32, "decoder_layers": 1, "dropout": 0.0}
    return TrOCRForCausalLM(TrOCRConfig(use_learned_position_embeddings=False, **sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "twice": (_parallelized, "was parallelized before, or another library has wrapped it"),
    "copy": (
        lambda: copy.copy(_wrapped()),
        "norm (LayerNorm) has a forward that is not its class's",
    ),
    "compiled": (_compiled, "blocks.1 (OwnBlock) is compiled"),
    "quantised": (_quantized, "blocks.0.q.weight has dtype torch.int8"),
    "tied by hand": (_TiedByHand, "tokens.weight is read by"),
    "a table's rows by number": (lambda: _reading("slice"), "positions.weight is read by __getit"),
    "a table's size": (lambda: _reading("size"), "positions.weight is read by shape"),
    # plain, both rows of number 0 would take a gradient
    "a padding row": (lambda: _reading("embedding", 0), "positions.weight is read by embedding"),
    "a padding row by index": (lambda: _reading("index", 0), "positions.weight is read by __getit"),
    "a largest norm": (lambda: _table(max_norm=1.0), "a table with max_norm=1.0, which is not"),
    "frequencies": (lambda: _table(scale_grad_by_freq=True), "Use scale_grad_by_freq=False"),
    "sparse gradients": (lambda: _table(sparse=True), "tokens.weight is a table with sparse=True"),
    "spectral norm": (
        lambda: _computed(parametrizations.spectral_norm),
        "as its forward changes blocks.0.q.parametrizations.weight.0._u",
    ),
    "a table that is computed": (
        lambda: _computed(parametrizations.orthogonal, "positions"),
        "positions.weight is computed by a parametrization",
    ),
    **{
        f"{hook.__name__} by a hook": (
            partial(_computed, partial(hook, name="weight")),
            "blocks.0.q.weight is no parameter: a hook computes it",
        )
        for hook in (weight_norm, spectral_norm, prune.identity)
    },
    "scalar": (_Scalar, "scale is a scalar, which cannot be sharded: give it shape [1]"),
    "called twice": (_CalledTwice, "blocks.0 (OwnBlock) is called 2 times in one forward"),
    "large values": (lambda: _with_block(_LargeValues), "values of 8 features and keys of 4"),
    "no attention": (
        _NoAttention,
        "_NoAttention never mixes tokens through a call that isp can trace",
    ),
    "other call": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        "Sequential could not be traced: TypeError: ",
    ),
    "counts": (_Counting, "_Counting mixes or counts tokens outside of attention"),
    "cumsum": (lambda: _with_block(_Mixing), "blocks.1 (_Mixing) mixes or counts tokens"),
    "mean": (_mixing(lambda x: x - 1e-2 * x.mean(1)), "blocks.1 (_Mixing) mixes or counts tokens"),
    "shift": (
        _mixing(lambda x: x + F.pad(x, (0, 0, 1, -1))),
        "changing one token changes its output",
    ),
    "length": (_mixing(lambda x: x / x.shape[1]), "its output for a part of the tokens"),
    "in training": (lambda: _with_block(_InTraining), "blocks.1 (_InTraining) mixes or counts"),
    "sliced angles": (lambda: _with_block(_SlicedAngles), "blocks.1 (_SlicedAngles) mixes or"),
    "convolution": (_convolution, "blocks.2.norm2.1 (_ShortConvolution) mixes or counts tokens"),
    "a leak": (_leaking, "model.layers.1.mlp (_Shifting) mixes or counts tokens"),
    "tuple": (_Tuple, "_Tuple returns a tuple for tokens [1, 17]"),
    "heads first": (
        lambda: _with_block(_HeadsFirst),
        "blocks.1 calls attention with q, k, v of [1, 4, 17, 8], [1, 4, 17, 8], [1, 4, 17, 8] for"
        " 17 tokens: attention takes [B, S, H, d], so transpose(1, 2) tensors of [B, H, S, d]",
    ),
    "values": (
        lambda: _with_block(_ReadsValues),
        "blocks.1 (_ReadsValues) of Own could not be traced: its shapes or control flow depend"
        " on tensor values, which a trace does not have (test_refusals.py:",
    ),
    "sparse": (
        lambda: tiny("qwen4_exp_text", num_hidden_layers=4, **_QWEN4),
        "model.layers.3.self_attn.indexer (Qwen4ExpTextQSAIndexer) of Qwen4ExpForCausalLM could not"
        " be traced: it reads an attention mask, but isp passes none: attention that chooses keys",
    ),
    "heads of an indexer": (
        lambda: tiny("minimax_m3_vl_text", **_MINIMAX3),
        "index_n_heads=4 in the model's configuration does not match the 2 KV heads",
    ),
    "compressed windows": (
        lambda: tiny("deepseek_v4", **_DEEPSEEK4),
        "DeepseekV4HCACompressor adds a key for each window of tokens",
    ),
    "own attention": (
        lambda: tiny("cpmant"),
        "CpmAntForCausalLM computes attention in its own code",
    ),
    "dropout of own attention": (lambda: tiny("bloom", attention_dropout=0.1), "dropout 0.1"),
    "DoRA": (_dora, "the adapter 'default' uses DoRA"),
    "checkpointing": (_checkpointing, "model.gradient_checkpointing_disable()"),
    "dropout": (lambda: tiny("llama", attention_dropout=0.1), "uses attention dropout 0.1"),
    "counts by itself": (
        _without_positions,
        "(TrOCRSinusoidalPositionalEmbedding) mixes or counts tokens",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_models_are_refused(name: str) -> None:
    """Catches a model that is run wrongly, or fails without saying where and why."""
    make, said = MODELS[name]
    with pytest.raises(ValueError, match=r".") as raised:
        isp.parallelize(make(), job())
    assert said in str(raised.value)
    assert not dist.is_initialized()


def test_positions_that_depend_on_the_whole_row_are_refused() -> None:
    """Catches ranks that rotate their part of a row by other angles than those of the whole row."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"dynamic .* of parallel\.tensor\.size=2 ranks"):
        isp.parallelize(tiny("llama", rope_parameters=rope), job(tensor=2))
    assert not dist.is_initialized()


def test_rows_long_enough_for_a_models_attention_temperature_are_refused() -> None:
    """Catches a temperature that a model derives from a token's index among those of its rank."""
    kinds = {"no_rope_layers": [1, 1, 0], "num_local_experts": 2}
    run = isp.parallelize(tiny("llama4_text", floor_scale=80, **kinds), job())
    run.loss(torch.ones(1, 72, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"for sequences of 96 tokens: use fewer than 80, or set it to"
    ):
        run.loss(torch.ones(1, 96, dtype=torch.int64))
    run.train_step.drain()


def test_a_model_without_positions_is_accepted() -> None:
    """Catches a model without position_ids that is refused as if it counted tokens itself."""

    class _Nowhere(nn.Module):
        def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.zeros((), device=ids.device)

    model: Any = _without_positions()
    model.model.decoder.embed_positions = _Nowhere()
    assert not TracedModel(model).trace.reads_positions


def test_a_model_compiled_after_parallelize_is_refused() -> None:
    """Catches a compiled copy of code with collectives, which fails deep inside torch."""
    run = isp.parallelize(Own(), job())
    run.model.compile()
    with pytest.raises(ValueError, match=r"the model \(Own\) is compiled"):
        run.loss(torch.ones(1, 16, dtype=torch.int64))


def test_a_model_that_leaks_the_next_token_gives_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a loss near zero without an explanation."""
    sizes = {"type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    TracedModel(tiny("bert", is_decoder=True, **sizes))
    assert not caplog.text
    TracedModel(tiny("bert", **sizes))
    assert "BertLMHeadModel uses bidirectional attention" in caplog.text


def test_chunked_attention_is_refused_with_context_ranks() -> None:
    """Catches keys of other ranks that a plan for whole documents takes for those of a chunk."""
    model = tiny("llama4_text", num_local_experts=2)
    with pytest.raises(
        ValueError, match=r"chunked_attention .* parallel\.sequence_2D\.context_size=2"
    ):
        isp.parallelize(model, job(tensor=2, context=2))
    assert not dist.is_initialized()
