"""The decoder against plain torch and against transformers, its presets, and what it refuses."""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.attention import make_local_attention
from isp.comm import Channel
from isp.config import load_config
from isp.layers.factory import LayerFactory
from isp.layers.module import init_weights, named_parameters
from isp.layers.rope_scaling import RopeScaling, RopeScalingType
from isp.parallel import Mode, ParallelConfig, TensorConfig, WeightConfig
from isp.weights.wp import LocalWeights
from model.config import ModelConfig
from model.decoder import Decoder, build_stages
from model.presets import PRESETS
from tests.model.plain import PlainDecoder

S = 24
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    rope_theta=100.0,
    init_std=0.3,
)
PACKED = [0, 5, 6, 17, S]
WHOLE = [0, S]

SCALINGS = [
    RopeScaling(type=RopeScalingType.LINEAR, factor=3.0),
    RopeScaling(
        type=RopeScalingType.NTK, factor=2.0, original_max_position_embeddings=8, target_length=S
    ),
    RopeScaling(
        type=RopeScalingType.YARN, factor=3.0, original_max_position_embeddings=64, beta_slow=0.5
    ),
    RopeScaling(type=RopeScalingType.LLAMA3, factor=3.0, original_max_position_embeddings=64),
]


def _decoder(
    config: ModelConfig, *, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> Decoder:
    """The decoder of a single process."""
    where = torch.device(device)
    layers = LayerFactory(
        mode=Mode.MTP,
        tensor=Channel.solo("tensor"),
        weight=Channel.solo("weight"),
        communicator=LocalWeights(),
        device=where,
        dtype=dtype,
    )
    local = make_local_attention(device=torch.device("cpu"), dtype=dtype)
    (decoder,) = build_stages(config, layers, (0,), 1, local)
    return decoder


def filled(config: ModelConfig) -> Decoder:
    """With weights of which none is 0 or 1: biases and norms count too."""
    model = _decoder(config)
    init_weights(model, 3)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for item in named_parameters(model):
            noise = torch.randn(item.parameter.shape, generator=random, dtype=torch.float64)
            item.parameter.add_(0.1 * noise)
    return model


def _weights(model: Decoder) -> dict[str, Tensor]:
    return {item.name: item.parameter.detach().clone() for item in named_parameters(model)}


def _tokens(config: ModelConfig, rows: int, bounds: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions, which restart at each of `bounds`."""
    random = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(config.vocab_size, (2, rows, S), generator=random)
    labels[:, ::3] = -100
    starts = torch.tensor(bounds[:-1]).repeat_interleave(torch.tensor(bounds).diff())
    return tokens, labels, (torch.arange(S) - starts).expand(rows, S)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": None},
        {"num_heads": 6, "num_kv_heads": 3, "head_dim": 6},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"tie_embeddings": True},
        {"sliding_window": 4},
        {"norm_eps": 0.3},
        {"checkpoint": 0.5},
        {"checkpoint": 1.0, "checkpoint_keeps_attention": True},
        *({"rope_scaling": scaling} for scaling in SCALINGS),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_every_gradient_match_plain_torch(changes, packed):
    """Catches an option that is dropped, misread, or not part of the backward pass."""
    config = replace(CONFIG, **changes)
    model = filled(config)
    bounds, rows = (PACKED, 1) if packed else (WHOLE, 2)
    tokens, labels, positions = _tokens(config, rows, bounds)
    scaling = config.rope_scaling or RopeScaling()
    is_yarn = scaling.type is RopeScalingType.YARN
    plain = PlainDecoder(
        config,
        frequencies=_frequencies(config.rope_theta, config.head_size, scaling),
        logit_scale=0.1 * math.log(scaling.factor) + 1 if is_yarn else 1.0,
    )
    plain.double().load_weights(_weights(model))

    wanted = plain(tokens, positions, bounds)
    F.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if packed else None
    hidden = model(tokens, positions, cu_seqlens)
    logits = model.logits(hidden)
    model.loss(hidden, labels).backward()

    torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-11)
    # Gradients have the names and shapes of the weights, so they can be split up like them.
    mine = PlainDecoder(config).double()
    mine.load_weights({i.name: i.parameter.grad for i in named_parameters(model)})
    for (name, found), expected in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(
            found.detach(), expected.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_nothing_holds_what_attention_took():
    """Catches q, k and v on a rank that has sent them away."""
    model, taken, alive = _decoder(CONFIG), [], []
    for block in model.blocks():
        block.attention.core.register_forward_pre_hook(
            lambda _, given: taken.extend(weakref.ref(x) for x in given[:3])
        )
        block.feed_forward.w13.register_forward_pre_hook(
            lambda *_: alive.append(sum(x() is not None for x in taken))
        )
    tokens, _, positions = _tokens(CONFIG, 1, WHOLE)
    with torch.no_grad():
        model(tokens, positions, None)
    assert len(taken) == 6
    assert alive == [0, 0]


def _frequencies(base: float, d: int, scaling: RopeScaling) -> Tensor:
    """Radians a token of each pair, as the papers have them."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.type is RopeScalingType.NTK:
        assert scaling.target_length is not None
        stretch = factor * scaling.target_length / original - (factor - 1)
        base *= stretch ** (d / (d - 2))
    found = []
    for i in range(d // 2):
        plain = base ** (-2 * i / d)
        kept = 1.0
        if scaling.type is RopeScalingType.LINEAR:
            kept = 0.0
        elif scaling.type is RopeScalingType.LLAMA3:  # a ramp over 1 / wavelength
            wavelength = 2 * math.pi / plain
            kept = min(1.0, max(0.0, (original / wavelength - 1.0) / (4.0 - 1.0)))
        elif scaling.type is RopeScalingType.YARN:  # a ramp over dims
            low, high = (
                d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (32.0, 0.5)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
            kept = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        found.append(plain * kept + plain / factor * (1 - kept))
    return torch.tensor(found, dtype=torch.float64)


def test_every_scaling_turns_these_positions_by_other_angles():
    """Catches scalings that agree on the positions above, so that a mixed-up type would pass."""
    kinds = [_frequencies(CONFIG.rope_theta, CONFIG.head_size, s) for s in SCALINGS]
    kinds.append(_frequencies(CONFIG.rope_theta, CONFIG.head_size, RopeScaling()))
    for i, a in enumerate(kinds):
        for b in kinds[:i]:
            assert (a - b).abs().max() > 1e-3
    assert {scaling.type for scaling in SCALINGS} | {RopeScalingType.NONE} == set(RopeScalingType)


# -- transformers ----------------------------------------------------------------------------------

_HF_ROPE = {
    RopeScalingType.NONE: {"rope_type": "default"},
    RopeScalingType.LINEAR: {"rope_type": "linear", "factor": 3.0},
    RopeScalingType.NTK: {"rope_type": "dynamic", "factor": 2.0},
    RopeScalingType.YARN: {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 0.5,
    },
    RopeScalingType.LLAMA3: {
        "rope_type": "llama3",
        "factor": 3.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *(("llama", replace(CONFIG, rope_scaling=scaling)) for scaling in (None, *SCALINGS)),
        ("qwen2", replace(CONFIG, qkv_bias=True, tie_embeddings=True)),
        ("qwen3", replace(CONFIG, qk_norm=True, head_dim=12)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_logits_match_transformers(family, config):
    """Catches what we and our own reference misunderstand alike: names, orders, conventions."""
    transformers = pytest.importorskip("transformers", minversion="5")
    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    scaling = config.rope_scaling or RopeScaling()
    rope = {"rope_theta": config.rope_theta, **_HF_ROPE[scaling.type]}
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=8 if scaling.type is RopeScalingType.NTK else 64,
            rope_parameters=rope,
        )
    ).double()
    model = filled(config)
    _copy_to_transformers(_weights(model), theirs, config)
    tokens, _, positions = _tokens(config, 2, WHOLE)
    with torch.no_grad():
        logits, wanted = model.logits(model(tokens, positions, None)), theirs(tokens).logits
    # transformers takes norms and angles in float32.
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def _copy_to_transformers(weights: dict[str, Tensor], theirs, config: ModelConfig) -> None:
    named = dict(theirs.named_parameters())
    heads = [config.num_heads * config.head_size, *[config.kv_heads * config.head_size] * 2]
    ours = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    if not config.tie_embeddings:
        ours["lm_head.weight"] = weights["head.weight"]
    for name, weight in weights.items():
        if not (match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)):
            continue
        block, part, kind = f"model.layers.{match[1]}", match[2], match[3]
        parts = {
            "attention.wqkv": [f"self_attn.{x}_proj" for x in "qkv"],
            "attention.wo": ["self_attn.o_proj"],
            "attention.q_norm": ["self_attn.q_norm"],
            "attention.k_norm": ["self_attn.k_norm"],
            "feed_forward.w13": ["mlp.gate_proj", "mlp.up_proj"],
            "feed_forward.w2": ["mlp.down_proj"],
            "attention_norm": ["input_layernorm"],
            "ffn_norm": ["post_attention_layernorm"],
        }[part]
        cuts = heads if part == "attention.wqkv" else len(weight) // len(parts)
        for target, piece in zip(parts, weight.split(cuts), strict=True):
            ours[f"{block}.{target}.{kind}"] = piece
    assert ours.keys() == named.keys()
    for name, parameter in named.items():
        parameter.copy_(ours[name])


# -- presets and layouts ---------------------------------------------------------------------------

PUBLISHED_PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "internlm2-1.8b": 1_889_110_016,
    "internlm2-7b": 7_737_708_544,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


def _preset(name: str, tmp_path) -> ModelConfig:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{preset: {name}}}\ndata: {{source: python-stdlib}}\n")
    return load_config(path).model


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_parameters(name, tmp_path):
    """Catches a wrong size in a preset, and a count that is not that of the model built from it."""
    config = _preset(name, tmp_path)
    model = _decoder(config, device="meta", dtype=torch.float32)
    assert sum(item.parameter.numel() for item in named_parameters(model)) == config.num_parameters
    if name in PUBLISHED_PARAMETERS:
        assert config.num_parameters == PUBLISHED_PARAMETERS[name]
    else:
        assert config.num_parameters < 30e6, "small ones of our own"


@pytest.mark.parametrize(
    ("mode", "tensor", "changes", "seq_len", "fault"),
    [
        (
            Mode.MTP,
            3,
            {},
            24,
            "parallel.tensor.size=3 must divide model.num_heads=4 in mtp mode: use 1, 2 or 4,",
        ),
        (
            Mode.MSP,
            4,
            {},
            24,
            "parallel.tensor.size=4 must divide model.num_kv_heads=2 in msp mode: use 1 or 2,",
        ),
        (
            Mode.FSP,
            2,
            {"intermediate_size": 41},
            24,
            "parallel.tensor.size=2 must divide model.intermediate_size=41 in fsp mode: use 1,",
        ),
        (Mode.MSP, 2, {}, 25, "parallel.tensor.size=2 must divide the 25 tokens of a row"),
        (Mode.ISP, 5, {}, 24, "parallel.tensor.size=5 must divide the 24 tokens of a row"),
        (
            Mode.MTP,
            4,
            {"vocab_size": 9, "num_kv_heads": 4},
            24,
            "model.vocab_size=9 leaves some of the 4 tensor ranks without a row",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(mode, tensor, changes, seq_len, fault):
    """Catches a layout that would fail, or train something else, after the ranks have started."""
    parallel = ParallelConfig(tensor=TensorConfig(size=tensor, mode=mode))
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(CONFIG, **changes).check_layout(parallel, seq_len)


def test_isp_refuses_neither_odd_heads_nor_odd_vocabularies():
    """Catches a rule of the feature modes applied to isp, which splits no features."""
    odd = replace(CONFIG, num_heads=6, num_kv_heads=3, head_dim=6, vocab_size=9)
    parallel = ParallelConfig(tensor=TensorConfig(size=4), weight=WeightConfig(size=8))
    odd.check_layout(parallel, S)
    exchanged = replace(parallel, weight=WeightConfig(size=8, vocab_parallel_loss=True))
    with pytest.raises(ValueError, match=r"parallel.tensor.size=4 must divide model.vocab_size=9"):
        odd.check_layout(exchanged, S)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 must divide model.num_heads=4"),
        ({"num_heads": 5, "num_kv_heads": 5}, "model.num_heads=5 must divide model.hidden_size=32"),
        ({"head_dim": 7}, "a head of 7 features cannot be rotated"),
        ({"checkpoint": 1.5}, "model.checkpoint=1.5 must be at most 1"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes, fault):
    """Catches sizes that fail later, in a matmul far from the key that is wrong."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True, "checkpoint": 0.5},
        {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True},
        {"mlp_tile_tokens": 5},
    ],
    ids=str,
)
def test_compiled_layers_train_as_the_plain_ones(changes):
    """Catches a gradient lost on the way through the sum that a norm is computed with.

    The kernels themselves are checked in tests/layers/test_compiled.py.
    """
    tokens, labels, positions = _tokens(CONFIG, 2, WHOLE)
    losses, weights = [], []
    with torch.compiler.set_stance("force_eager"):
        for compiled in (False, True):
            model = filled(replace(CONFIG, compile=compiled, **changes))
            assert model.norm.compiled == compiled
            trained = list(model.parameters())
            losses.append([])
            for _ in range(3):
                loss = model.loss(model(tokens, positions, None), labels)
                losses[-1].append(loss.detach())
                with torch.no_grad():
                    for w, dw in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                        w -= 1e-3 * dw
            weights.append(_weights(model))
    torch.testing.assert_close(*map(torch.stack, losses), rtol=1e-11, atol=0)
    assert losses[0][2] < losses[0][0]
    for name, plain in weights[0].items():
        torch.testing.assert_close(weights[1][name], plain, rtol=1e-10, atol=1e-11)
