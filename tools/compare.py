"""Compare steps of an unmodified Llama by ISP, `fully_shard` and DeepSpeed, over a real link.

    python tools/compare.py --link 1gbit [--ranks 2] [--rounds 10]      # root: network namespaces

Every rank is in a network namespace of its own and sends over veth and `tc tbf` at the given speed.
Weights are sharded over all ranks, in float32. DeepSpeed is compared if it is installed. First the
losses of three steps are compared; then all ways take turns, a step each. A time is that of the
slowest rank.

On CPU `fully_shard` waits for each of its transfers. "asynchronous gathers" turns that off by a
private switch and gathers one unit ahead. "asynchronous" also reduces gradients by ISP's own
reduce-scatter, for which the step waits only before the update: the schedule that `fully_shard` has
on a GPU, with the bytes that ISP sends.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_overlap import run_ranks
from netns import Wires
from overlap_rows import gather_asynchronously, reduce_through
from table_parser import table_parser
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import isp
from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import TrainingConfig
from isp.core.comm import Channel, Pending
from isp.core.mesh import ParallelConfig, TensorConfig, WeightConfig
from isp.core.optim.config import OptimizerConfig
from model.config import ModelConfig

COLUMNS = """\
step       median time of a step
exposed    median over rounds of the step minus that of `compute alone`
of best    median over rounds of the step / that of the fastest row of `fully_shard` (of its own for
           rows with `weights stay`, where weights are gathered in forward and kept for backward)
memory     with --memory: peak memory of a process that trains in this way, after its imports
rows       compute alone: no communication, each rank updates its share of the weights; sequences
           shared: the ranks share each sequence, instead of having sequences of their own
"""
VOCAB, LR = 2048, 1e-4
ALONE, STAY, SHARED = "compute alone", ", weights stay", "sequences shared"
Step = Callable[[Tensor], float]


def ways() -> dict[str, dict[str, Any]]:
    """Return the variants to compare, by name: fully_shard, isp and DeepSpeed with their options.

    A value has the keyword arguments of the method of `Comparison` that builds the training step:
    `_fully_shard`, `_isp` or `_deepspeed`, by the first word of the name.
    """
    found: dict[str, dict[str, Any]] = {
        "fully_shard, default": {},
        "fully_shard, asynchronous gathers": {"gathers": True},
        "fully_shard, asynchronous": {"gathers": True, "reductions": True},
        "isp": {"reshard": True},
        f"isp, {SHARED}": {"reshard": True, "shared": True},
        f"fully_shard{STAY}": {"gathers": True, "reductions": True, "reshard": False},
        f"isp{STAY}": {"reshard": False},
    }
    if importlib.util.find_spec("deepspeed"):
        found |= {
            "DeepSpeed ZeRO-3": {"shared": False},
            f"DeepSpeed Ulysses + ZeRO-3, {SHARED}": {"shared": True},
        }
    return found


class Comparison:
    """The part of one rank in the comparison.

    Every rank makes one and calls `run`; rank 0 prints.
    """

    def __init__(self, rank: int, world: int, options: argparse.Namespace, wires: Wires) -> None:
        self.rank, self.world, self.options, self.wires = rank, world, options, wires
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        torch.set_num_threads(1)
        # Reset VmHWM, the peak of this process's memory.
        Path("/proc/self/clear_refs").write_text("5")
        self.began = _status("VmRSS")

    def run(self) -> None:
        """Compare the losses and time all ways at each speed; or measure the memory of one way."""
        shape = self.world, self.options.sequences, self.options.tokens
        ids = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))
        if self.options.only:
            self._measure_memory(self._ways()[self.options.only](), ids)
            return
        alone, ways = self._alone(), {name: way() for name, way in self._ways().items()}
        losses = {name: [step(ids) for _ in range(3)] for name, step in ways.items()}
        first = torch.tensor(next(iter(losses.values())))
        for name, found in losses.items():
            assert torch.allclose(torch.tensor(found), first, rtol=1e-5), (name, losses)
        if self.rank == 0:
            worst = max((torch.tensor(found) / first - 1).abs().max() for found in losses.values())
            print(f"losses of three steps: {first.tolist()}, apart by {worst:.0e} at most")
        for speed in self.options.speeds:
            self._measure(speed, {ALONE: alone, **ways}, ids)

    def _ways(self) -> dict[str, Callable[[], Step]]:
        """Return functions that build the step of each way, by name."""
        makers = {"fully_shard": self._fully_shard, "isp": self._isp, "DeepSpeed": self._deepspeed}
        return {
            name: partial(makers[name.split()[0].strip(",")], **keys)
            for name, keys in ways().items()
        }

    def _measure_memory(self, step: Step, ids: Tensor) -> None:
        """Make three steps; rank 0 writes the largest peak of all ranks, in MiB, to a file."""
        for _ in range(3):
            step(ids)
        peak = torch.tensor([_status("VmHWM") - self.began])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if self.rank == 0:
            Path(self.options.note).write_text(f"{peak.item() / 1024:.0f}")

    def _measure(self, speed: str, ways: dict[str, Step], ids: Tensor) -> None:
        """Time all ways in turn over a link of `speed`; rank 0 prints the table."""
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
        print(f"\n{speed} a rank{'':<33}{'step':>7}{'exposed':>12}  {'of best':>7}  memory")
        medians = {name: statistics.median(took) for name, took in seconds.items()}
        # Rows whose weights stay gathered send less: compare them only with each other.
        for stay in (False, True):
            own = [name for name in ways if (STAY in name) is stay]
            best = min((n for n in own if n.startswith("fully")), key=medians.__getitem__)
            for name in own:
                late, ratio = (
                    statistics.median(act(a, b) for a, b in zip(seconds[name], seconds[to]))  # noqa: B905
                    for act, to in ((float.__sub__, ALONE), (float.__truediv__, best))
                )
                cells = f"{medians[name] * 1e3:>8.0f} ms{late * 1e3:>9.0f} ms{ratio:>9.2f}"
                print(f"{name:<42}{cells}  {self.options.memory.get(name, '')}")

    def _model(self, attention: str = "sdpa") -> LlamaForCausalLM:
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
                attn_implementation=attention,
            )
        )

    def _alone(self) -> Step:
        """Build a step without communication, with the update of this rank's share of weights."""
        model = self._model()
        # Sharded ways update a share of the weights on each rank: here every world-th parameter.
        weights = [*model.parameters()][self.rank :: self.world]
        optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0, fused=True)

        def step(ids: Tensor) -> float:
            loss = self._loss_sum(model, ids[self.rank]) / ids[self.rank][:, 1:].numel()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss.item()

        return step

    def _fully_shard(
        self, *, gathers: bool = False, reductions: bool = False, reshard: bool = True
    ) -> Step:
        model: Any = self._model()
        trunk, deferred = model.model, list[Pending]()
        units = [trunk.embed_tokens, *trunk.layers, trunk.norm]
        if gathers:
            fully_shard(trunk.embed_tokens, reshard_after_forward=reshard)
            fully_shard([trunk.norm, model.lm_head], reshard_after_forward=False)
        for block in trunk.layers:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        if gathers:
            gather_asynchronously(model, units)
        if reductions:
            reduce_through(Channel(dist.group.WORLD), units, deferred=deferred)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

        def step(ids: Tensor) -> float:
            for unit in units[:2] if gathers else ():
                unit.unshard(async_op=True)
            loss = self._loss_sum(model, ids[self.rank]) / ids[self.rank][:, 1:].numel()
            # fully_shard averages gradients over the ranks, ISP's reduce-scatter sums them.
            (loss / self.world if reductions else loss).backward()
            while deferred:
                deferred.pop(0).wait()
            optimizer.step()
            optimizer.zero_grad()
            return self._mean(loss)

        return step

    def _deepspeed(self, *, shared: bool) -> Step:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        deepspeed.init_distributed("gloo")
        # DeepSpeed wraps the attention of this name in Ulysses, and leaves "sdpa" as it is.
        ALL_ATTENTION_FUNCTIONS.register("ulysses", ALL_ATTENTION_FUNCTIONS["sdpa"])
        model = self._model("ulysses" if shared else "sdpa")
        groups = None
        if shared:
            groups = UlyssesSPAttentionHF.register_with_transformers(
                model,
                core_attn_implementation="ulysses",
                sequence_parallel_size=self.world,
                micro_batch_size=self.world * self.options.sequences,
            )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "overlap_comm": True, "round_robin_gradients": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups)[
            0
        ]

        def step(ids: Tensor) -> float:
            whole = ids.flatten(0, 1) if shared else ids[self.rank]
            loss = self._loss_sum(engine, whole, shared=shared)
            # DeepSpeed averages gradients over all ranks, but with shared sequences the losses of
            # the ranks are parts of one sum.
            loss = loss * (self.world if shared else 1) / whole[:, 1:].numel()
            engine.backward(loss)
            engine.step()
            return self._mean(loss)

        return step

    def _loss_sum(self, model: Any, ids: Tensor, *, shared: bool = False) -> Tensor:
        """Return the sum of losses of `ids` [B, S]; if `shared`, of this rank's slice of S."""
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        if shared:
            ids, positions, labels = (
                x.chunk(self.world, 1)[self.rank].contiguous() for x in (ids, positions, labels)
            )
        logits = model(input_ids=ids, position_ids=positions).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def _mean(self, loss: Tensor) -> float:
        """Return the mean of `loss` over the ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def _isp(self, *, reshard: bool, shared: bool = False) -> Step:
        tensor = TensorConfig(size=self.world if shared else 1)
        weight = WeightConfig(size=self.world, reshard_after_forward=reshard)
        config = JobConfig(
            model=ModelConfig(),
            data=DataConfig(source="python-stdlib"),
            parallel=ParallelConfig(tensor=tensor, weight=weight),
            training=TrainingConfig(dtype="float32", max_norm=0.0),
            optimizer=OptimizerConfig(lr=LR, weight_decay=0.0, beta2=0.999),
        )
        run = isp.parallelize(self._model(), config)

        def step(ids: Tensor) -> float:
            return run.step(run.loss(ids.flatten(0, 1) if shared else ids[self.rank])).loss

        return step


def _status(field: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument(
        "--link", nargs="+", default=["10gbit", "1gbit", "0.5gbit"], help="speeds of a rank's link"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each way and speed")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument(
        "--memory", action="store_true", dest="memory_too", help="measure peak memory, too"
    )
    options = parser.parse_args()
    print(
        f"Llama of transformers, hidden {options.hidden}, {options.layers} layers, {options.ranks}"
        f" ranks of one thread, {options.sequences} x {options.tokens} tokens a rank, float32\n"
    )
    print(COLUMNS, flush=True)
    speeds, options.link = options.link, "real"
    options.speeds, options.memory = speeds, {}
    with tempfile.NamedTemporaryFile("r") as note:
        options.note = note.name
        for name in ways() if options.memory_too else ():
            options.only = name
            run_ranks(options.ranks, options, bench=Comparison)  # type: ignore[arg-type]
            options.memory[name] = f"{Path(note.name).read_text()} MiB"
    options.only = None
    run_ranks(options.ranks, options, bench=Comparison)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
