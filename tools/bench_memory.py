"""Measure peak memory or time of a training step by row length, for each rung of a memory ladder.

    python tools/bench_memory.py                          # Llama-shaped, vocabulary 32,768, on CPU
    python tools/bench_memory.py --device cuda --lengths 65536,131072 --model.preset llama3-8b \\
        --optimizer.offload_states

A rung is a setting that saves memory; it is measured together with all rungs before it. On CPU a
peak is the bytes of weights, gradients and optimizer states, plus the most bytes of tensors that a
step makes, host buffers included; on CUDA it is the peak of torch's allocator. Weights are drawn on
the device. If a rung fails, its line shows the error and the next rung follows. With `--rounds`,
steps of the longest row are timed instead, of all rungs in turn.
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

COLUMNS = """\
GiB               peak of a step at each length
GiB + KiB a token, with two lengths or more: the line through the shortest and the longest row
planned           peak that `isp plan` predicts / the measured one, at each length
with --rounds     median seconds of a step, and the median over rounds of its ratio to a step of the
                  rung `recompute all blocks`
"""
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
"""Keys of the model that is measured if no preset is named."""
RUNGS = {
    "nothing": ("--model.loss_chunk_tokens=0",),
    "loss in chunks": ("--model.loss_chunk_tokens=1024",),
    "recompute all blocks": ("--model.checkpoint=1",),
    "MLP in tiles": ("--model.mlp_tile_tokens=1024",),
    "inputs on the host": ("--model.checkpoint_offload",),
    "every 4th of them": ("--model.checkpoint_segment=4",),
}
"""The keys that each rung adds to those of the rungs before it."""
COMPARED = "recompute all blocks"
"""The rung whose time the others are divided by."""
GIB, KIB = 2**30, 2**10


class Row(NamedTuple):
    """The memory of one rung of `RUNGS` (settings that save memory, each added to those before)
    at one length of the row."""

    rung: str
    tokens: int
    peak: int = 0
    """Bytes at the peak of a step, in addition to `fixed`."""
    fixed: int = 0
    """Bytes allocated when a step begins. On CPU: planned bytes of weights, gradients and optimizer
    states."""
    planned: float = 0.0
    """Peak that the planner predicts, divided by the measured peak, `peak` + `fixed`."""
    outside: int = 0
    """Bytes of the device taken outside of torch's allocator: CUDA, libraries, other processes."""
    fault: str = ""
    """The error, if the rung could not be measured."""

    @property
    def gib(self) -> float:
        """The whole peak in GiB: `fixed` + `peak`."""
        return (self.fixed + self.peak) / GIB


def config_of(rungs: int, tokens: int, options: argparse.Namespace) -> JobConfig:
    """Return the configuration with the keys of the first `rungs` of `RUNGS`, for `tokens`."""
    words = [word for rung in list(RUNGS)[:rungs] for word in RUNGS[rung]]
    device = f"--training.device={options.device}"
    named = any(word.startswith("--model.preset") for word in options.overrides)
    sizes = () if named else LLAMA
    words = [*sizes, device, *words, f"--data.seq_len={tokens}", *options.overrides]
    return load_config(options.config, words)


def batch_of(config: JobConfig, device: torch.device) -> MicroBatch:
    """Return a row of one document of `data.seq_len` tokens."""
    tokens = torch.arange(config.data.seq_len, device=device)[None] * 7 % config.model.vocab_size
    ends = torch.tensor([0, config.data.seq_len], dtype=torch.int32)
    positions = torch.arange(config.data.seq_len, device=device)[None]
    return MicroBatch(tokens, tokens.roll(-1, 1), positions, ends)


def made(
    rung: int, tokens: int, options: argparse.Namespace
) -> tuple[TrainStep, MicroBatch, PlanCase]:
    """Build the training step of rung number `rung` of `RUNGS`.

    Returns it with its micro-batch, and with the case from which `isp plan` predicts its memory.
    """
    config, device = config_of(rung + 1, tokens, options), torch.device(options.device)
    step = make_step(config, device)
    case = PlanCase.of(config, 1, on_cpu=device.type == "cpu")
    return step, batch_of(config, device), case


def measure(rung: int, tokens: int, options: argparse.Namespace) -> Row:
    """Measure the memory of rung number `rung` of `RUNGS` for a row of `tokens`."""
    step, batch, case = made(rung, tokens, options)
    step([batch], 1e-4)  # the first step allocates buffers that stay
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
    """Call `measure`; if it fails, return a row with the error."""
    try:
        return measure(rung, tokens, options)
    except Exception as error:
        return Row(list(RUNGS)[rung], tokens, fault=fault_of(error))
    finally:
        free_memory()


def peak(step: TrainStep, batch: MicroBatch, device: torch.device) -> int:
    """Return the bytes at the peak of a step, without those allocated before it."""
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
    """Return intercept (GiB) and slope (KiB a token) of the line through first and last row."""
    first, last = rows[0], rows[-1]
    slope = (last.peak - first.peak) / (last.tokens - first.tokens)
    return (first.fixed + first.peak - slope * first.tokens) / GIB, slope / KIB


def draw(found: dict[str, list[Row]], path: Path) -> None:
    """Draw peak memory by length, one line for each rung, to `path`."""
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
    """Measure or time the chosen rungs of `RUNGS`.

    Returns 1 if one failed for another reason than a lack of memory.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"{COLUMNS}\nOther arguments, such as --model.preset=tiny, set configuration keys.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default=str(CONFIG), help="configuration file to start from")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens in a row, with commas")
    parser.add_argument("--rungs", type=int, default=len(RUNGS), help="measure only the first N")
    parser.add_argument("--rounds", type=int, default=0, help="time N steps of each rung instead")
    parser.add_argument("--only", default="", help="names of rungs to measure, with commas")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--png", type=Path, help="where to draw the picture")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options, options.overrides = parser.parse_known_args()
    if unknown := [name for name in options.only.split(",") if name and name not in RUNGS]:
        parser.error(f"--only: no rung is named {','.join(unknown)}: use {', '.join(RUNGS)}")
    torch.set_num_threads(options.threads)
    prepare(torch.device(options.device))
    chosen = options.only.split(",") if options.only else list(RUNGS)[: options.rungs]
    lengths = sorted(int(n) for n in options.lengths.split(","))
    if options.rounds:
        _time(chosen, lengths[-1], options)
        return 0
    print(COLUMNS)
    rows: list[Row] = []
    found: dict[str, list[Row]] = {}
    """The rows that were measured, by name of the memory option."""
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
    """Time a step of each chosen rung of `RUNGS` in turn, `options.rounds` times.

    Prints the median of each, and its ratio to the rung `COMPARED`.
    """
    steps = {name: made(list(RUNGS).index(name), tokens, options)[:2] for name in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        turn = number % len(chosen)
        for name in chosen[turn:] + chosen[:turn]:
            seconds[name].append(_seconds(*steps[name], options.device))
    # Leave out the first step, which allocates buffers.
    for name, (_, *times) in seconds.items():
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
