"""The decoder over the inference layers against itself over those of training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.attention import make_local_attention
from isp.comm import Channel
from isp.layers.factory import LayerFactory
from isp.layers.module import init_weights
from isp.parallel import Mode
from isp.weights.wp import LocalWeights
from model import inference
from model.config import ModelConfig
from model.decoder import Decoder
from model.inference import InferenceDecoder
from tests.ranks import run_each

CPU, DTYPE = torch.device("cpu"), torch.float64
PLAIN = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=40,
    init_std=0.3,
)
CONFIGS = {
    "plain": PLAIN,
    "tied, bias, norms of heads, window": replace(
        PLAIN, tie_embeddings=True, qkv_bias=True, qk_norm=True, sliding_window=5
    ),
}
LENGTHS = [[5, 11], [3], [9, 8], [1]]
"""Documents of a call; 16 tokens are split over 2 and 4 ranks, the others are not."""
TILE = 6
"""Tokens of an MLP at a time."""
CASES = {f"{name}, {mode}": (name, mode) for name in CONFIGS for mode in (Mode.MTP, Mode.MSP)}


def decoder(config: ModelConfig, mode: Mode, channel: Channel) -> Decoder:
    layers = LayerFactory(
        mode=mode,
        tensor=channel,
        weight=channel,
        communicator=LocalWeights(),
        device=CPU,
        dtype=DTYPE,
    )
    local = make_local_attention("sdpa", device=CPU, dtype=DTYPE, head_dim=config.head_size)
    made = Decoder(config, layers, layers.attention(local))
    init_weights(made, seed=1)
    return made


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions [1, T], and the ends of documents."""
    total = sum(lengths)
    ids = torch.randint(50, (1, total), generator=torch.Generator().manual_seed(total))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, positions, ends


def _as_trained(rank: int, case: tuple[str, Mode]) -> None:
    name, mode = case
    channel, config = Channel(dist.group.WORLD, name="tensor"), CONFIGS[name]
    trained, alone = decoder(config, mode, channel), decoder(config, Mode.MTP, Channel.solo())
    fast = InferenceDecoder(trained, channel, split_tokens=mode.facts.splits_sequence)
    for lengths in LENGTHS:
        ids, positions, ends = packed(lengths)
        last = ends[1:].long() - 1
        with torch.no_grad():
            logits = fast.logits_of(ids, positions, ends, lambda x, i=last: x.index_select(1, i))
            whole = alone.logits(alone(ids, positions, ends))[:, last]
            first = trained.head.losses.first
            own = whole[..., first : first + logits.shape[-1]]
            # ranks' products are added up in another order, and some CPUs add those of few rows so
            torch.testing.assert_close(logits, own, rtol=1e-12, atol=1e-12)
            if mode is Mode.MTP or ids.shape[1] % channel.size == 0:
                logits = fast.logits_of(ids, positions, ends, lambda x: x)
                own = trained.logits(trained(ids, positions, ends))
                torch.testing.assert_close(logits, own, rtol=1e-12, atol=1e-12)


def test_buffers_of_a_prompt_are_not_kept_while_decoding() -> None:
    """Catches memory that only a prompt needs, and buffers that move from token to token."""
    channel = Channel.solo()
    fast = InferenceDecoder(decoder(PLAIN, Mode.MTP, channel), channel, split_tokens=False)
    made = [fast._made_for(tokens) for tokens in (16, 10, 2, 1, 1, 2, 17)]
    assert [layers.max_tokens for layers in made] == [16, 16, 16, 1, 1, 2, 17]
    assert made[0] is made[2]
    assert made[3] is made[4]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_logits_are_those_of_the_training_layers(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a norm or residual of another block, tokens of another rank, a buffer too early."""
    monkeypatch.setattr(inference, "_TILE_TOKENS", TILE)
    run_each(world, _as_trained, CASES)
