"""Compare memory and time of `run.log_probs` with those of the chunked loss.

    python tools/bench_log_probs.py [--hidden 256] [--rounds 3]

Measures the head alone, and a step of a Llama of transformers with a head of that size, on one
rank, in float32, with loss chunks of 1,024 tokens. A peak is the most bytes of tensors above 64 KiB
that operations made and that are not freed. Times are processor time of forward and backward: the
median over rounds of log_probs / loss.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import isp
from isp.core.comm import Channel
from isp.core.layers.head import HeadLoss
from isp.core.layers.linear import Moves
from isp.core.layers.token_results import TokenScoreRules, results_of_head
from isp.core.layers.vocab_loss import LogitShard
from isp.core.weights.wp_communicator import LocalWeights

TOKENS, VOCAB, CHUNK = 8192, 32768, 1024
CONFIG = f"model: {{loss_chunk_tokens: {CHUNK}}}\ntraining: {{dtype: float32}}\n"


class _Head(nn.Module):
    """A linear of the shape of a head, with only those attributes that `HeadLoss` reads."""

    name, weight_name, bias, transposed = "head", "weight", None, False
    moves, communicator = Moves(), LocalWeights()

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, hidden) * 0.02)


class _Peak(TorchDispatchMode):
    """Records the largest number of bytes in storages that operations made and that still live.

    Storages of at most 64 KiB are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # views share the storage: count it once
        if key in self._alive or size <= 1 << 16:
            return
        self._alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def _compare(what: str, ways: dict[str, Callable[[], object]], rounds: int) -> None:
    """Time the functions `ways` in turn; print the ratio of each one's time to the first's.

    The ratio is the median over rounds.
    """
    first, *others = ways
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            before = time.process_time()
            run()
            seconds[name].append(time.process_time() - before)
    for name in others:
        ratios = [a / b for a, b in zip(seconds[name], seconds[first], strict=True)]
        print(f"{what}, {name}: processor time {statistics.median(ratios):.2f} times the loss's")


def _bench_head(hidden: int, rounds: int) -> None:
    """Print peak memory and relative time of forward and backward of the head."""
    head, labels = _Head(hidden), torch.randint(VOCAB, (1, TOKENS))
    of = HeadLoss(head, Moves(), LogitShard(Channel.solo("head"), 0, VOCAB), CHUNK)
    x = torch.randn(1, TOKENS, hidden)

    def scores(x: Tensor, entropy: bool) -> Tensor:
        found = results_of_head(of, x, labels, TokenScoreRules(entropy=entropy))
        return found[..., 0].sum() + found[..., -1].sum()

    ways = {
        "loss": lambda: of.total(x.requires_grad_(), labels).backward(),
        "log_probs": lambda: scores(x.requires_grad_(), False).backward(),
        "log_probs and entropy": lambda: scores(x.requires_grad_(), True).backward(),
    }
    for name, run in ways.items():
        x.grad = head.weight.grad = None
        with _Peak() as peak:
            run()
        print(f"head, {name}: peak {peak.peak / 2**20:.0f} MiB")
    _compare("head", ways, rounds)


def _bench_step(hidden: int, rounds: int) -> None:
    """Print the relative time of a step whose loss is computed from log-probabilities."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": VOCAB}
    heads = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        run = isp.parallelize(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), config)
    ids = torch.randint(VOCAB, (8, TOKENS // 8))

    def own() -> None:
        run.backward(-run.log_probs(ids).log_probs.sum() / ids.numel())
        run.step()

    ways = {"loss": lambda: run.step(run.loss(ids)), "log_probs": own}
    _compare("step of 8 layers", ways, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _bench_head(options.hidden, options.rounds)
    _bench_step(options.hidden, options.rounds)


if __name__ == "__main__":
    main()
