"""Decoding on one rank beside `transformers` with its own caches, on the same weights.

    python tools/bench_generate.py [--models tiny,100m] [--tokens 64] [--prompt 128] [--rounds 5]

Each round measures every way once, one after another, so that what else the machine does meets all
of them; the ratios are those of a round, and their median is told. `cpu` is processor time of the
process, `wall` time by the clock; both are of decoding alone, without the prefill. Weights are
random, numbers float32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isp.comm import Mesh
from isp.inference.engine import Engine
from isp.inference.sampling import Sampler, SamplingConfig
from isp.inference.source import open_source
from isp.parallel import ParallelConfig, Topology

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 512},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 16384},
}  # fmt: skip


class Spent(NamedTuple):
    """Milliseconds a token."""

    cpu: float
    wall: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,100m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.models.split(","):
        _compare(name, args)


def _compare(name: str, args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SIZES[name], max_position_embeddings=4096, eos_token_id=None, bos_token_id=None
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        own = _own(Path(folder))
        traced = _traced(model, folder)
        prompt = (torch.arange(args.prompt) * 7 % 500).unsqueeze(0)
        ways: dict[str, Callable[[int], list[int]]] = {
            "isp, decoder": lambda count: _by_isp(own, prompt, count),
            "isp, traced": lambda count: _by_isp(traced, prompt, count),
            "transformers, dynamic": lambda count: _generated(model, prompt, count, "dynamic"),
            "transformers, static": lambda count: _generated(model, prompt, count, "static"),
            "transformers, bare loop": lambda count: _bare_loop(model, prompt, count),
        }
        spent: dict[str, list[Spent]] = {way: [] for way in ways}
        tokens = {way: run(8) for way, run in ways.items()}  # which also warms up
        assert len({tuple(found) for found in tokens.values()}) == 1, tokens
        for _ in range(args.rounds):
            for way, run in ways.items():
                spent[way].append(_decoding(run, args.tokens))
    _tell(name, model.num_parameters(), spent, args)


def _tell(
    name: str, parameters: int, spent: dict[str, list[Spent]], args: argparse.Namespace
) -> None:
    print(
        f"{name}: {parameters:,} parameters, {args.tokens} tokens behind {args.prompt},"
        f" {args.rounds} rounds, {args.threads} thread"
    )
    print(f"  {'':24} {'cpu ms':>8} {'wall ms':>8}   times the decoder: cpu    wall")
    own = spent["isp, decoder"]
    for way, rounds in spent.items():
        cpu, wall = (statistics.median(x) for x in zip(*rounds, strict=True))
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(rounds, own, strict=True)) for i in (0, 1)
        ]
        print(f"  {way:24} {cpu:8.2f} {wall:8.2f} {ratios[0]:26.2f} {ratios[1]:7.2f}")


def _decoding(run: Callable[[int], list[int]], count: int) -> Spent:
    """Milliseconds a decoded token: those of a long answer less those of a short one."""
    whole, first = _timed(run, count + 1), _timed(run, 1)
    cpu, wall = ((a - b) / count * 1e3 for a, b in zip(whole, first, strict=True))
    return Spent(cpu, wall)


def _timed(run: Callable[[int], list[int]], count: int) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run(count)
    return time.process_time() - cpu, time.perf_counter() - wall


def _own(folder: Path) -> Engine:
    source = open_source(folder, tokenizer="bytes")
    parallel = ParallelConfig()
    return source.engine(parallel, Mesh(Topology.create(1, parallel), 0), torch.device("cpu"))


def _traced(model: Any, folder: str) -> Engine:
    """The folder read as it is, as a model that the decoder does not compute would be."""
    from dataclasses import replace

    from model.config import ModelConfig

    source = replace(open_source(Path(folder), tokenizer="bytes"), section=ModelConfig(hf=folder))
    parallel = ParallelConfig()
    return source.engine(parallel, Mesh(Topology.create(1, parallel), 0), torch.device("cpu"))


def _by_isp(engine: Engine, prompt: torch.Tensor, count: int) -> list[int]:
    """As `isp generate` does, without text."""
    sampler, found = Sampler(SamplingConfig(), 1), []
    logits = engine.prefill(prompt.tolist(), prompt.shape[1] + count)
    for number in range(count):
        chosen = engine.agree(sampler(logits))
        found += chosen.tolist()
        if number < count - 1:
            logits = engine.decode(chosen)
    return found


def _generated(model: Any, prompt: torch.Tensor, count: int, cache: str) -> list[int]:
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
    )
    return out[0, prompt.shape[1] :].tolist()


@torch.inference_mode()
def _bare_loop(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """The model with its cache and nothing of `generate` around it."""
    from transformers import DynamicCache

    cache, ids, found = DynamicCache(config=model.config), prompt, []
    for _ in range(count):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(ids))
    return found


if __name__ == "__main__":
    main()
