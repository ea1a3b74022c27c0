"""Peak memory and time of a step against the length of its row, key by key of the memory ladder.

    python tools/bench_memory.py                          # Llama-shaped, vocabulary 32,768, on CPU
    python tools/bench_memory.py --device cuda --lengths 65536,131072 --model.preset llama3-8b \\
        --optimizer.offload_states

Each rung has the keys of those before it. A peak on CPU is the most bytes of tensors that a step
makes, beside weights, gradients and states, and buffers on the host; on CUDA that of the allocator.
Weights are drawn on the device. A rung that fails has its fault in its row; the next one follows.
From two lengths and more follow what is fixed and what a token takes; `planned` is the part of the
peak that `isp plan` expects. With `--rounds`, steps of the longest row are timed instead, of all
rungs in turn, and compared with full recompute.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from bench_parts import OUT_OF_MEMORY, fault_of, free_memory, make_step, prepare, save

from isp.config import JobConfig, load_config
from isp.core.micro_batch import MicroBatch
from isp.planner.case import PlanCase
from isp.planner.memory import memory
from isp.planner.record import PeakMemory
from isp.step.train_step import TrainStep

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "one_gpu.yaml"
LLAMA = (
    "--model.preset=tiny",
    "--model.vocab_size=32768",
    "--model.hidden_size=256",
    "--model.num_layers=8",
    "--model.num_heads=4",
    "--model.num_kv_heads=4",
    "--model.intermediate_size=688",
    "--training.dtype=float32",
)
"""The model, unless a preset is named."""
RUNGS = {
    "nothing": ("--model.loss_chunk_tokens=0",),
    "loss in chunks": ("--model.loss_chunk_tokens=1024",),
    "recompute all blocks": ("--model.checkpoint=1",),
    "MLP in tiles": ("--model.mlp_tile_tokens=1024",),
    "inputs on the host": ("--model.checkpoint_offload",),
    "every 4th of them": ("--model.checkpoint_segment=4",),
}
"""What each adds to those before it."""
COMPARED = "recompute all blocks"
"""The rung whose time is 1."""
GIB, KIB = 2**30, 2**10


class Row(NamedTuple):
    """A rung at a length."""

    rung: str
    tokens: int
    peak: int = 0
    """Bytes beside `fixed`."""
    fixed: int = 0
    """Bytes that a step begins with: as planned for weights, gradients and states; on CUDA those of
    the allocator."""
    planned: float = 0.0
    """What is planned, as a part of `peak` and `fixed`."""
    outside: int = 0
    """Bytes of the device that the allocator does not have: of CUDA, libraries, other processes."""
    fault: str = ""
    """Why there are no numbers."""

    @property
    def gib(self) -> float:
        """The peak with what is fixed."""
        return (self.fixed + self.peak) / GIB


def config_of(rungs: int, tokens: int, options: argparse.Namespace) -> JobConfig:
    """The configuration of the first `rungs` rungs for a row of `tokens`."""
    words = [word for rung in list(RUNGS)[:rungs] for word in RUNGS[rung]]
    device = f"--training.device={options.device}"
    named = any(word.startswith("--model.preset") for word in options.overrides)
    sizes = () if named else LLAMA
    words = [*sizes, device, *words, f"--data.seq_len={tokens}", *options.overrides]
    return load_config(options.config, words)


def batch_of(config: JobConfig, device: torch.device) -> MicroBatch:
    """A row of one document."""
    tokens = torch.arange(config.data.seq_len, device=device)[None] * 7 % config.model.vocab_size
    ends = torch.tensor([0, config.data.seq_len], dtype=torch.int32)
    positions = torch.arange(config.data.seq_len, device=device)[None]
    return MicroBatch(tokens, tokens.roll(-1, 1), positions, ends)


def made(
    rung: int, tokens: int, options: argparse.Namespace
) -> tuple[TrainStep, MicroBatch, PlanCase]:
    """A step with the keys up to `rung`, and what it is given."""
    config, device = config_of(rung + 1, tokens, options), torch.device(options.device)
    step = make_step(config, device)
    case = PlanCase.of(config, 1, on_cpu=device.type == "cpu")
    return step, batch_of(config, device), case


def measure(rung: int, tokens: int, options: argparse.Namespace) -> Row:
    """A rung at a length."""
    step, batch, case = made(rung, tokens, options)
    step([batch], 1e-4)  # buffers are there from the second step on
    device, planned = torch.device(options.device), memory(case, 0)
    gc.collect()
    held, outside = planned.states, 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated()
        free, whole = torch.cuda.mem_get_info()
        outside = whole - free - torch.cuda.memory_reserved()
    most = peak(step, batch, device)
    part = planned.total / (held + most)
    return Row(list(RUNGS)[rung], tokens, most, held, part, outside)


def measure_or_fault(rung: int, tokens: int, options: argparse.Namespace) -> Row:
    """Measure a rung at a length; the row has the fault of one that fails."""
    try:
        return measure(rung, tokens, options)
    except Exception as error:
        return Row(list(RUNGS)[rung], tokens, fault=fault_of(error))
    finally:
        free_memory()


def peak(step: TrainStep, batch: MicroBatch, device: torch.device) -> int:
    """Bytes of a step at its peak, beside those that were there before it."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step([batch], 1e-4)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as made:
        step([batch], 1e-4)
    return made.peak_bytes


def line_of(rows: list[Row]) -> tuple[float, float]:
    """GiB that are fixed and KiB a token, by the shortest and the longest row."""
    first, last = rows[0], rows[-1]
    slope = (last.peak - first.peak) / (last.tokens - first.tokens)
    return (first.fixed + first.peak - slope * first.tokens) / GIB, slope / KIB


def draw(found: dict[str, list[Row]], path: Path) -> None:
    """Write a picture: peak against tokens, a line a rung."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for rung, rows in found.items():
        axes.plot([r.tokens for r in rows], [r.gib for r in rows], marker="o", label=rung)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(title="cumulative", frameon=False, loc="upper left")
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("peak of a step, GiB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure or time what is asked for; 1 if a rung failed other than by memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens in a row")
    parser.add_argument("--rungs", type=int, default=len(RUNGS), help="the first so many")
    parser.add_argument("--rounds", type=int, default=0, help="time so many steps of each instead")
    parser.add_argument("--only", default="", help="these rungs alone, in this order, with commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--png", type=Path, help="where to draw the picture")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options, options.overrides = parser.parse_known_args()
    if unknown := [name for name in options.only.split(",") if name and name not in RUNGS]:
        parser.error(f"--only {','.join(unknown)} is no rung: use {', '.join(RUNGS)}")
    torch.set_num_threads(options.threads)
    prepare(torch.device(options.device))
    chosen = options.only.split(",") if options.only else list(RUNGS)[: options.rungs]
    lengths = sorted(int(n) for n in options.lengths.split(","))
    if options.rounds:
        _time(chosen, lengths[-1], options)
        return 0
    rows: list[Row] = []
    found: dict[str, list[Row]] = {}
    """The rows of each rung that ran."""
    for name in chosen:
        for tokens in lengths:
            rows.append(measure_or_fault(list(RUNGS).index(name), tokens, options))
            save([row._asdict() for row in rows], options.json)
        own = rows[-len(lengths) :]
        found[name] = ran = [row for row in own if not row.fault]
        told = f"{name:<20} {' '.join(f'{row.gib:8.3f}' for row in ran)} GiB"
        told += "".join(f" | {row.fault} at {row.tokens:,} tokens" for row in own if row.fault)
        if len(ran) > 1:
            fixed, slope = line_of(ran)
            told += f" | {fixed:.3f} GiB + {slope:8.2f} KiB a token"
        print(f"{told} | planned {' '.join(f'{row.planned:.2f}' for row in ran)}", flush=True)
    if options.png:
        draw(found, options.png)
    return int(any(row.fault not in ("", OUT_OF_MEMORY) for row in rows))


def _time(chosen: list[str], tokens: int, options: argparse.Namespace) -> None:
    """Time a step of each chosen rung in turn, `options.rounds` times, and print ratios."""
    steps = {name: made(list(RUNGS).index(name), tokens, options)[:2] for name in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        turn = number % len(chosen)
        for name in chosen[turn:] + chosen[:turn]:
            seconds[name].append(_seconds(*steps[name], options.device))
    for name, (_, *times) in seconds.items():  # buffers are there from the second step on
        told = f"{name:<20} {statistics.median(times):8.2f} s a step of {tokens} tokens"
        if COMPARED in seconds:
            pairs = zip(times, seconds[COMPARED][1:], strict=True)
            told += f" | {statistics.median(a / b for a, b in pairs):.3f} of {COMPARED}"
        print(told, flush=True)


def _seconds(step: TrainStep, batch: MicroBatch, device: str) -> float:
    begin = time.perf_counter()
    step([batch], 1e-4)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
