"""Checks of ISP that need a GPU, one at a time; --help names them.

    python tools/gpu_checks.py attention --device cuda
    python tools/gpu_checks.py syncs --device cpu      # at toy size, to see that it runs

A check prints a table, and exits with 1 if something is wrong. `--json` writes the same numbers for
programs, after each row. Weights are drawn on the device, except where results are compared with
those of a CPU. `bash tools/gpu.sh` runs all checks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_memory import CONFIG, GIB, peak
from bench_parts import fault_of, free_memory, make_step, prepare, save
from torch import Tensor

from isp.config import JobConfig, load_config
from isp.core.attention.backend import AttentionBackend
from isp.core.attention.local import make_local_attention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, CommLog, Mesh, World, cuda
from isp.core.comm.tag import UNNAMED
from isp.core.micro_batch import MicroBatch
from isp.core.torch_private import all_gather_single
from isp.metrics import device_name, peak_tflops
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep, make_train_step

TINY = ("--model.preset=tiny", "--training.dtype=float32")
Numbers = list[dict[str, Any]]
"""Rows of results, as they are saved."""


def job(device: torch.device, tokens: int, *keys: str) -> JobConfig:
    """Return the configuration of a run of one rank on rows of `tokens`, with further settings."""
    words = (f"--training.device={device.type}", f"--data.seq_len={tokens}", *keys)
    return load_config(CONFIG, words)


def qwen(device: torch.device, tokens: int, *keys: str) -> JobConfig:
    """Return a run of qwen3-0.6b in bfloat16; on CPU, of a small model in float32."""
    if device.type == "cpu":
        return job(device, 64, *TINY, "--model.num_layers=2", *keys)
    return job(device, tokens, *keys)


def rows(config: JobConfig, device: torch.device, number: int, documents: int = 4) -> MicroBatch:
    """Return a row of random tokens in documents of equal length; `number` is its seed."""
    random, length = torch.Generator().manual_seed(number), config.data.seq_len
    tokens = torch.randint(config.model.vocab_size, (1, length + 1), generator=random)
    ends = torch.linspace(0, length, documents + 1).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in ends.diff().tolist()])[None]
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ends)
    return batch.to(device)


def wait(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(act: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the median seconds of `act` over `times` calls, after one that warms up."""
    found = []
    for _ in range(times + 1):
        wait(device)
        begin = time.perf_counter()
        act()
        wait(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def collective(device: torch.device) -> Numbers:
    """Measure the host time of an all-gather of 4 KiB and its wait, by torch and by a channel."""
    calls = 20 if device.type == "cpu" else 2000
    with World(device) as world:
        if world.size == 1:  # `World` makes no process group for one rank
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        group, log = dist.group.WORLD, CommLog()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        channel = Channel(group, name="weight", log=log)
        x = torch.zeros(1024, device=device)
        out = x.new_empty(world.size * 1024)

        def raw() -> None:
            gather(out, x, group=group, async_op=True).wait()

        def start() -> dist.Work:
            return all_gather_single(group, out, x)

        def ours() -> None:
            # Not `all_gather_into`: with one rank that returns without a collective.
            channel._launch("all_gather", UNNAMED, 4096, start, out, keep=(x, out)).wait()

        def micro(act: Callable[[], object]) -> float:
            for _ in range(calls // 10):
                act()
            wait(device)
            begin = time.perf_counter()
            for _ in range(calls):
                act()
            taken = time.perf_counter() - begin
            wait(device)
            return taken / calls * 1e6

        found = {"raw": micro(raw), "channel": micro(ours)}
        log.collect(device)
        found["channel, timed"] = micro(ours)
        log.take()
        if world.rank == 0:
            for name, us in found.items():
                print(f"{name:<16} {us:7.1f} us a call, {world.size} ranks")
        if world.size == 1:
            dist.destroy_process_group()
    return [{"what": name, "microseconds": us} for name, us in found.items()]


def attention(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure TFLOP/s of every attention backend, counting half the square of each document.

    `forward` is forward alone, `both` and `ms` are forward and backward. Rows: one document, packed
    documents, one document with a sliding window.
    """
    toy = device.type == "cpu"
    length, dtype = (256, torch.float32) if toy else (131072, torch.bfloat16)
    cases = [("plain", [length], None), ("packed", [length // 16] * 16, None)]
    cases.append(("window", [length], length // 32))
    q, k, v = (torch.randn(1, length, n, 128, device=device, dtype=dtype) for n in (4, 1, 1))
    leaves, dout = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    print(f"4 heads, 1 KV head of 128, {length:,} tokens, {dtype}; TFLOP/s\n")
    print(f"{'backend':<8} {'row':<7} {'forward':>8} {'both':>8} {'ms':>9}")
    made = {}
    for backend in AttentionBackend:
        if backend is AttentionBackend.AUTO:
            continue
        try:
            made[backend] = make_local_attention(
                backend, device=device, dtype=dtype, head_dim=128, group=4
            )
        except ValueError as error:
            print(f"{backend:<8} {error}")
    for (name, lengths, window), (backend, attend) in product(cases, made.items()):
        mask = AttentionMask.of_documents(lengths, window=window)
        reach = min(window or length, lengths[0])
        pairs = sum(reach * (n - reach / 2) for n in lengths)

        def both(attend: Any = attend, mask: AttentionMask = mask) -> None:
            torch.autograd.grad(attend(*leaves, mask=mask), leaves, dout)

        def forward(attend: Any = attend, mask: AttentionMask = mask) -> None:
            with torch.no_grad():
                attend(*leaves, mask=mask)

        try:
            one, two = seconds(forward, device, 3), seconds(both, device, 3)
        except Exception as error:  # for example, a kernel without this mask
            fault = fault_of(error)
            print(f"{backend:<8} {name:<7} {fault[:90]}", flush=True)
            yield {"backend": backend, "row": name, "fault": fault}
        else:
            # A pair of query and key costs two products of size 128 in forward, that is 4 * 128
            # FLOPs for each head; forward and backward together are counted as 3 forwards.
            rates = [factor * 4 * 128 * pairs / s / 1e12 for factor, s in ((1, one), (3, two))]
            print(
                f"{backend:<8} {name:<7} {rates[0]:8.1f} {rates[1]:8.1f} {two * 1e3:9.2f}",
                flush=True,
            )
            yield {"backend": backend, "row": name, "tflops": rates[1], "forward": rates[0]}
        free_memory()


def loss(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the peak memory of the loss of 16,384 tokens, vocabulary 128,256, by chunk size."""
    tokens, words, size = (16384, 128256, 4096) if device.type == "cuda" else (64, 512, 32)
    dtype, width = ("bfloat16", 2) if device.type == "cuda" else ("float32", 4)
    model = (f"vocab_size={words}", f"hidden_size={size}", "num_layers=1", "intermediate_size=64")
    keys = [f"--model.{key}" for key in (*model, f"num_heads={size // 32}", "num_kv_heads=1")]
    keys += ["--model.preset=tiny", f"--training.dtype={dtype}"]
    print(f"all logits once, in {dtype}: {tokens * words * width / GIB:.3f} GiB; a step's peak")
    for chunk in ("1024", "4096", "0"):
        config = job(device, tokens, *keys, f"--model.loss_chunk_tokens={chunk}")
        one: dict[str, Any] = {"chunk_tokens": int(chunk)}
        told = f"model.loss_chunk_tokens={chunk:<5}"
        free_memory()
        try:
            step, batch = make_step(config, device), rows(config, device, 0, 1)
            step([batch], 1e-4)
            one["peak_gib"] = peak(step, batch, device) / GIB
            del step
            print(f"{told} {one['peak_gib']:7.3f} GiB more than before the step", flush=True)
        except Exception as error:
            one["fault"] = fault_of(error)
            print(f"{told} {one['fault']}", flush=True)
        yield one


def losses(
    step: TrainStep, config: JobConfig, device: torch.device, steps: int
) -> tuple[list[float], list[Tensor]]:
    """Make `steps` training steps; return their losses, and the weights after them."""
    found = []
    for number in range(steps):
        found.append(step([rows(config, device, number)], 1e-3).loss)
    step.drain()
    return found, [item.parameter.detach().cpu() for item in step.built.parameters]


def parity(device: torch.device) -> Numbers:
    """Check that 20 float32 losses on the device are within 1e-3 of those on CPU."""
    cpu, keys = torch.device("cpu"), (*TINY, "--model.checkpoint=0.5")
    steps, tokens = (20, 512) if device.type == "cuda" else (2, 64)

    def on(where: torch.device) -> list[float]:
        # Draw the initial weights as a training run does: they are the same on every device.
        config = job(where, tokens, *keys)
        step = make_train_step(
            trained_model(config),
            config,
            Mesh(config.topology(1), 0),
            where,
        )
        return losses(step, config, where, steps)[0]

    here, there = on(device), on(cpu)
    off = [abs(a / b - 1) for a, b in zip(here, there, strict=True)]
    for number in sorted({0, 1, steps // 4, steps // 2, steps - 1}):
        print(
            f"step {number + 1:>2}  {here[number]:.7f}  cpu {there[number]:.7f}  {off[number]:.1e}"
        )
    assert max(off) < 1e-3, f"the losses differ by {max(off):.1e}"
    pairs = zip(here, there, strict=True)
    return [{"step": i, "loss": a, "on_cpu": b} for i, (a, b) in enumerate(pairs, start=1)]


def deterministic(device: torch.device) -> Numbers:
    """Check that two runs with training.deterministic have the same bits in losses and weights."""
    cuda.compute_deterministically()
    config, steps = (
        qwen(device, 2048, "--training.deterministic"),
        10 if device.type == "cuda" else 2,
    )

    def trained() -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        return losses(make_step(config, device), config, device, steps)

    (one, first), (two, second) = trained(), trained()
    assert one == two, f"the losses differ: {one} and {two}"
    assert all(map(torch.equal, first, second)), "the weights differ"
    print(f"{len(one)} losses and {len(first)} weights are the same in every bit")
    return [{"losses": one}]


def syncs(device: torch.device) -> Numbers:
    """Find the lines of code that make the host wait for the device.

    The steps have two micro-batches.
    """
    config = qwen(device, 2048, "--data.micro_num=2")
    step, steps = make_step(config, device), 3
    batches = [[rows(config, device, 2 * i + j) for j in range(2)] for i in range(steps + 1)]
    step(batches[0], 1e-4)
    wait(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        for number in range(steps):
            step(batches[number + 1], 1e-4)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    told = (w for w in caught if "called a synchronizing" in str(w.message))
    lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in told)
    for line, count in lines.most_common():
        print(f"{count / steps:6.1f} a step  {line}")
    total = sum(lines.values()) / steps
    print(f"{total:.1f} a step in all")
    assert total <= 1, f"a step waits {total:.1f} times; only the wait for the norm is needed"
    return [{"line": line, "a_step": count / steps} for line, count in lines.items()]


def kernels(device: torch.device) -> Numbers:
    """List the kernels of a step of qwen3-0.6b at 8,192 tokens, and how long the device is busy."""
    config = qwen(device, 8192)
    step, batch = make_step(config, device), rows(config, device, 0)
    for _ in range(3):
        step([batch], 1e-4)
    alone = seconds(lambda: step([batch], 1e-4), device, 3)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        begin = time.perf_counter()
        step([batch], 1e-4)
        wait(device)
        taken = time.perf_counter() - begin
    on_gpu = device.type == "cuda"
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [e for e in profile.key_averages() if not on_gpu or e.device_type.name == "CUDA"]
    events.sort(key=lambda e: -getattr(e, own))
    busy = sum(getattr(e, own) for e in events) / 1e6
    print(f"step {alone * 1e3:.1f} ms, kernels {busy * 1e3:.1f} ms, {busy / alone:.0%} of it;")
    print(f"under the profiler {taken * 1e3:.1f} ms, {busy / taken:.0%}; the longest kernels\n")
    found: Numbers = [{"step_ms": alone * 1e3, "busy_ms": busy * 1e3, "profiled_ms": taken * 1e3}]
    for event in events[:20]:
        ms = getattr(event, own) / 1e3
        print(f"{ms:9.3f} ms {ms / alone / 10:5.1f}% {event.count:>6} x {event.key[:90]}")
        found.append({"kernel": event.key, "ms": ms, "calls": event.count})
    return found


def efficiencies(device: torch.device) -> Numbers:
    """Measure the device's share of its peak FLOP/s and bytes/s, for isp/planner/fabrics."""
    toy = device.type == "cpu"
    tokens, copied = (64, 2**20) if toy else (8192, 2**31)
    dtype = torch.float32 if toy else torch.bfloat16
    shapes = {"wqkv": (4096, 6144), "wo": (4096, 4096), "w13": (4096, 28672), "w2": (14336, 4096)}
    name, flops, taken = device_name(device), 0.0, 0.0
    peak_rate = peak_tflops(name) or float("nan")
    for layer, (inner, outer) in shapes.items():
        if toy:
            inner, outer = inner // 64, outer // 64
        x, w = (
            torch.randn(*s, device=device, dtype=dtype) for s in ((tokens, inner), (inner, outer))
        )
        dy = torch.randn(tokens, outer, device=device, dtype=dtype)
        one = seconds(lambda x=x, w=w, dy=dy: (x @ w, dy @ w.T, x.T @ dy), device)  # type: ignore[misc]
        count = 6 * tokens * inner * outer
        print(
            f"{layer:<6} {count / one / 1e12:7.1f} TFLOP/s, forward and both products of backward"
        )
        flops, taken = flops + count, taken + one
    length = 4 * tokens
    leaves = [
        torch.randn(1, length, n, 128, device=device, dtype=dtype, requires_grad=True)
        for n in (32, 8, 8)
    ]
    attend = make_local_attention(device=device, dtype=dtype, head_dim=128, group=4)
    dout, mask = leaves[0].detach(), AttentionMask.of_documents([length])
    both = seconds(lambda: torch.autograd.grad(attend(*leaves, mask=mask), leaves, dout), device)
    # Count FLOPs as `isp plan` does: a backward as 2.5 forwards.
    attended = 3.5 * 2 * 32 * 128 * length**2
    x = torch.empty(copied, dtype=torch.uint8, device=device)
    copy = 2 * copied / seconds(lambda: x.clone(), device)
    found: dict[str, float] = {
        "efficiency": flops / taken / 1e12 / peak_rate,
        "attention_efficiency": attended / both / 1e12 / peak_rate,
        "copied_gb_per_second": copy / 1e9,
    }
    if not toy:
        host = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
        found["host_gb_per_second"] = copied / 1e9 / seconds(lambda: host.copy_(x), device)
    print(f"\n# {name}, torch {torch.__version__}, {tokens:,} tokens; peak {peak_rate:g} TFLOP/s")
    for key, value in found.items():
        print(f"{key}: {value:.3g}")
    print("# memory_efficiency: copied_gb_per_second over device.gb_per_second")
    return [{"device": name, **found}]


CHECKS: tuple[Callable[[torch.device], Iterable[dict[str, Any]]], ...] = (
    collective, attention, loss, parity, syncs, kernels, deterministic, efficiencies,
)  # fmt: skip


def main() -> int:
    """Run the check that the command line names; return 1 if it finds something wrong."""
    named = {check.__name__: check for check in CHECKS}
    asks = "\n".join(f"  {name:<14} {(c.__doc__ or '').strip()}" for name, c in named.items())
    parser = argparse.ArgumentParser(
        description="The checks:\n" + asks, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=named, help="a check of the list above")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    prepare(device)
    found: Numbers = []
    try:
        for row in named[options.check](device):
            found.append(row)
            save(found, options.json)
    except AssertionError as error:
        print(f"wrong: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
