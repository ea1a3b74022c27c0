"""An unmodified Llama of transformers: a step of ISP and of `fully_shard`, over a real link.

    python tools/compare.py --link 1gbit [--ranks 2] [--rounds 10]      # root: network namespaces

Every rank is in a network namespace of its own and sends over veth and `tc tbf` at the given speed.
Weights are sharded over all ranks, each rank has sequences of its own, in float32. The losses of
all contestants are compared; then each does a step in turn. The slowest rank counts; shown are
medians over the rounds, and the median of ratios within a round to the best row of `fully_shard`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_overlap import run_ranks
from netns import Wires
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import isp
from isp.config import JobConfig
from isp.data.config import DataConfig
from isp.parallel import ParallelConfig, WeightConfig
from isp.settings import OptimizerConfig, TrainingConfig
from model.config import ModelConfig

VOCAB, LR = 2048, 1e-4
Step = Callable[[Tensor], float]


class Comparison:
    """One rank's part."""

    def __init__(self, rank: int, world: int, options: argparse.Namespace, wires: Wires) -> None:
        self.rank, self.world, self.options, self.wires = rank, world, options, wires
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        torch.set_num_threads(1)

    def run(self) -> None:
        ways = {
            "fully_shard, as it comes": self._fully_shard(ahead=0, reshard=True),
            "fully_shard, 1 block ahead": self._fully_shard(ahead=1, reshard=True),
            "fully_shard, 2 blocks ahead": self._fully_shard(ahead=2, reshard=True),
            "isp": self._isp(reshard=True),
            "fully_shard, weights stay": self._fully_shard(ahead=1, reshard=False),
            "isp, weights stay": self._isp(reshard=False),
        }
        generator = torch.Generator().manual_seed(self.rank)
        shape = self.options.sequences, self.options.tokens
        ids = torch.randint(VOCAB, shape, generator=generator)
        losses = {name: [step(ids) for _ in range(3)] for name, step in ways.items()}
        first = next(iter(losses.values()))
        for name, found in losses.items():
            assert torch.allclose(torch.tensor(found), torch.tensor(first), rtol=1e-5), (
                name,
                found,
            )
        for speed in self.options.speeds:
            self._measure(speed, ways, ids)

    def _measure(self, speed: str, ways: dict[str, Step], ids: Tensor) -> None:
        self.wires.limit(self.rank, float(speed.removesuffix("gbit")) * 125e6)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        names = [*ways]
        for number in range(self.options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                ways[name](ids)
                took = torch.tensor([time.perf_counter() - began])
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                seconds[name].append(took.item())
        self.wires.unlimit(self.rank)
        if self.rank:
            return
        print(f"\n{speed} a rank{'':<24}{'step':>8}  of fully_shard's best")
        of_peer = {n: statistics.median(s) for n, s in seconds.items() if n.startswith("fully")}
        for stay in (False, True):
            own = [name for name in ways if ("stay" in name) is stay]
            best = min((n for n in own if n in of_peer), key=of_peer.__getitem__)
            for name in own:
                pairs = zip(seconds[name], seconds[best], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                print(f"{name:<30}{statistics.median(seconds[name]) * 1e3:>8.0f} ms{ratio:>8.2f}")

    def _model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        hidden = self.options.hidden
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=hidden,
                intermediate_size=hidden * 11 // 4,
                num_hidden_layers=self.options.layers,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=self.options.tokens,
                use_cache=False,
            )
        )

    def _fully_shard(self, *, ahead: int, reshard: bool) -> Step:
        model: Any = self._model()
        blocks = [*model.model.layers]
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        for i, block in enumerate(blocks if ahead else ()):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        positions = torch.arange(self.options.tokens).unsqueeze(0)

        def step(ids: Tensor) -> float:
            logits = model(input_ids=ids, position_ids=positions).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            return total.item() / self.world

        return step

    def _isp(self, *, reshard: bool) -> Step:
        weight = WeightConfig(size=self.world, reshard_after_forward=reshard)
        config = JobConfig(
            model=ModelConfig(),
            data=DataConfig(source="python-stdlib"),
            parallel=ParallelConfig(weight=weight),
            training=TrainingConfig(dtype="float32", max_norm=0.0),
            optimizer=OptimizerConfig(lr=LR, weight_decay=0.0, beta2=0.999),
        )
        run = isp.parallelize(self._model(), config)
        return lambda ids: run.step(run.loss(ids)).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", nargs="+", default=["10gbit", "1gbit", "0.5gbit"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    print(
        f"Llama of transformers, hidden {options.hidden}, {options.layers} layers, {options.ranks}"
        f" ranks of one thread, {options.sequences} x {options.tokens} tokens a rank, float32"
    )
    speeds, options.link = options.link, "real"
    options.speeds = speeds
    run_ranks(options.ranks, options, bench=Comparison)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
