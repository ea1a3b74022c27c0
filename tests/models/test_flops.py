"""FLOPs of models against counted products and written-out ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isp.models.traced_model import TracedModel
from model.build import language_model
from model.config import ModelConfig
from tests.models.folders import small_config

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
)


def count(run: Callable[[], Tensor]) -> int:
    """Return the forward and backward FLOPs of the products in `run`."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def products(config: ModelConfig) -> nn.Sequential:
    """Return the model's linears in order; q, k, v as well as gate and up are parts of fused
    ones.
    """
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    d, inner = config.hidden_size, config.intermediate_size
    block = [(d, q + 2 * kv), (q, d), (d, 2 * inner), (inner, d)]
    sizes = [*(block * config.num_layers), (d, config.vocab_size)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def run_products(linears: nn.Sequential, tokens: int) -> Tensor:
    outs = [
        linear(torch.ones(tokens, linear.in_features, requires_grad=True)).sum()
        for linear in linears
    ]
    return torch.stack(outs)


def attend(config: ModelConfig, lengths: list[int]) -> Tensor:
    """Compute attention by einsum over all pairs, document by document, in every layer."""
    outs = []
    for length in lengths * config.num_layers:
        q, k, v = (
            torch.ones(config.num_heads, length, config.head_size, requires_grad=True)
            for _ in range(3)
        )
        outs.append(torch.einsum("hqk,hkd->hqd", torch.einsum("hqd,hkd->hqk", q, k), v).sum())
    return torch.stack(outs)


def traced(config: ModelConfig) -> TracedModel:
    return language_model(config, "float32")


def attention_flops(config: ModelConfig, lengths: list[int]) -> int:
    model = traced(config)
    return model.flops(lengths) - 6 * model.trace.multiplied * sum(lengths)


def test_linears_are_counted_as_torch_counts_them() -> None:
    """Catches a forgotten projection, a counted embedding, and a head that is not counted."""
    linears = products(CONFIG)
    assert count(lambda: run_products(linears, 7)) == 6 * traced(CONFIG).trace.multiplied * 7
    assert sum(p.numel() for p in linears.parameters()) == traced(CONFIG).trace.multiplied


@pytest.mark.parametrize("lengths", [[24], [5, 11, 8], [2] * 12])
def test_causal_attention_is_half_of_the_squares(lengths: list[int]) -> None:
    """Catches a packed row counted as one document, and causal attention counted in full."""
    squares = count(lambda: attend(CONFIG, lengths))
    assert 2 * attention_flops(CONFIG, lengths) == squares


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 1000])
def test_a_window_counts_only_the_pairs_inside_it(window: int) -> None:
    """Catches an ignored window, and a window longer than the document counted in full."""
    length = 64
    config = replace(CONFIG, sliding_window=window)
    row, column = torch.arange(length)[:, None], torch.arange(length)
    pairs = int(((column <= row) & (column > row - window)).sum())
    per_pair = 12 * config.num_layers * config.num_heads * config.head_size
    # The rule integrates a line and the mask has steps: they differ by half a pair a token at most.
    difference = pairs - attention_flops(config, [length]) / per_pair
    assert difference == pytest.approx(min(window, length) / 2)


def test_a_tied_head_is_counted() -> None:
    """Catches the number of stored parameters taken for that of multiplied ones."""
    tied = replace(CONFIG, tie_embeddings=True)
    assert traced(tied).flops([10]) == traced(CONFIG).flops([10])


def test_convolutions_and_scans_are_counted() -> None:
    """Catches a hybrid whose TFLOPS and MFU are those of its linears only."""
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "conv_kernel": 4}
    model = TracedModel(
        transformers.AutoModelForCausalLM.from_config(small_config("mamba2", **sizes))
    )
    channels, states = 4 * 16 + 2 * 2 * 8, 4 * 16 * 8
    mixing = 2 * channels * 4 + 4 * states  # the update of a state, and its query
    assert model.flops([10, 5]) == 15 * (6 * model.trace.multiplied + 3 * 2 * mixing)
