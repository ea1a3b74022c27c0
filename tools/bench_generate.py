"""Decoding on one rank beside `transformers` with its own caches, on the same weights.

    python tools/bench_generate.py [--models tiny,100m] [--tokens 16] [--prompt 128] [--rounds 15]

Each round measures every way once, one after another, so that what else the machine does meets all
of them. A round's time is the median of its tokens', behind the first, which the prefill gives. The
ratios are that of the least rounds, and the median of those of a round. `cpu` is processor time of
the process, `wall` time by the clock. Weights are random, numbers float32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isp.comm import Mesh
from isp.evaluation.engine import Engine
from isp.evaluation.sampling import Sampler, SamplingConfig
from isp.evaluation.source import open_source
from isp.parallel import ParallelConfig, Topology

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 512},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 16384},
}  # fmt: skip


class Spent(NamedTuple):
    """Milliseconds."""

    cpu: float
    wall: float

    @staticmethod
    def now() -> Spent:
        return Spent(time.process_time() * 1e3, time.perf_counter() * 1e3)


Way = Callable[[int, Callable[[], None]], list[int]]
"""Gives so many tokens; it calls what it is given behind each of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,100m")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
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
        prompt = (torch.arange(args.prompt) * 7 % 500).unsqueeze(0)
        ways: dict[str, Way] = {
            "isp, own decoder": partial(_by_isp, _own(Path(folder)), prompt),
            "isp, the folder as it is": partial(_by_isp, _as_it_is(model, folder), prompt),
            "transformers, dynamic": partial(_generated, model, prompt, "dynamic"),
            "transformers, static": partial(_generated, model, prompt, "static"),
            "transformers, bare loop": partial(_bare_loop, model, prompt),
        }
        tokens = {way: run(8, lambda: None) for way, run in ways.items()}  # which also warms up
        assert len({tuple(found) for found in tokens.values()}) == 1, tokens
        spent: dict[str, list[Spent]] = {way: [] for way in ways}
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
    print(f"  {'':24} {'ms a token':>16}   {'times the decoder, least and median':>36}")
    print(f"  {'':24} {'cpu':>8} {'wall':>8} {'cpu':>17} {'wall':>17}")
    own = spent["isp, own decoder"]
    for way, rounds in spent.items():
        told = [f"{statistics.median(x):8.2f}" for x in zip(*rounds, strict=True)]
        for i in (0, 1):
            ratios = [a[i] / b[i] for a, b in zip(rounds, own, strict=True)]
            least = min(a[i] for a in rounds) / min(b[i] for b in own)
            told.append(f"{least:11.2f} {statistics.median(ratios):5.2f}")
        print(f"  {way:24} {' '.join(told)}")


def _decoding(run: Way, count: int) -> Spent:
    """A decoded token's: the median."""
    ends: list[Spent] = []
    run(count + 1, lambda: ends.append(Spent.now()))
    clocks = zip(*ends, strict=True)
    return Spent(*(statistics.median(b - a for a, b in pairwise(clock)) for clock in clocks))


def _own(folder: Path) -> Engine:
    source = open_source(folder, tokenizer="bytes")
    parallel = ParallelConfig()
    return source.engine(parallel, Mesh(Topology.create(1, parallel), 0), torch.device("cpu"))


def _as_it_is(model: Any, folder: str) -> Engine:
    """The code of transformers, as for a model that the decoder does not compute."""
    from dataclasses import replace

    from model.config import ModelConfig

    source = replace(open_source(Path(folder), tokenizer="bytes"), section=ModelConfig(hf=folder))
    parallel = ParallelConfig()
    return source.engine(parallel, Mesh(Topology.create(1, parallel), 0), torch.device("cpu"))


def _by_isp(
    engine: Engine, prompt: torch.Tensor, count: int, done: Callable[[], None]
) -> list[int]:
    """As `isp generate` does, without text."""
    sampler, found = Sampler(SamplingConfig(), 1), []
    logits = engine.prefill(prompt.tolist(), prompt.shape[1] + count)
    for number in range(count):
        chosen = engine.agree(sampler(logits))
        found += chosen.tolist()
        done()
        if number < count - 1:
            logits = engine.decode(chosen)
    return found


class _Streamer:
    """What `generate` gives the prompt first, then each token."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._calls = chain([lambda: None], repeat(done))

    def put(self, _: torch.Tensor) -> None:
        next(self._calls)()

    def end(self) -> None: ...


def _generated(
    model: Any, prompt: torch.Tensor, cache: str, count: int, done: Callable[[], None]
) -> list[int]:
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        streamer=_Streamer(done),
    )
    return out[0, prompt.shape[1] :].tolist()


@torch.inference_mode()
def _bare_loop(model: Any, prompt: torch.Tensor, count: int, done: Callable[[], None]) -> list[int]:
    """The model with its cache and nothing of `generate` around it."""
    from transformers import DynamicCache

    cache, ids, found = DynamicCache(config=model.config), prompt, []
    for _ in range(count):
        # by its place: transformers 5.24 has renamed the argument
        logits = model(ids, None, None, cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(ids))
        done()
    return found


if __name__ == "__main__":
    main()
