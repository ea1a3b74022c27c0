"""Compare ISP's attention over split sequences with DeepSpeed's, or with direct kernel calls.

    python tools/bench_attention.py --ranks 2 4             # CPU ranks, against DeepSpeed
    python tools/bench_attention.py --device cuda           # one GPU, against the kernels

On CPU, every case runs our `DistributedAttention` and DeepSpeed's on the same ranks, with the same
inputs and the same local attention, forward and backward. They take turns, and each round another
one begins. A time is that of the slowest rank. The bytes that a forward and backward sends, as
counted by the channel, have to be those of the formula

    bytes sent by a rank = 2 passes * B * S/p * (p - 1)/p * d * (2 H + 2 K) * bytes of an element

The local attention `none` returns q + k + v: almost only the exchange between ranks is left.

On a GPU, local attention as `DistributedAttention` calls it is timed against each kernel that can
be imported, called directly, on the heads that one of `p` ranks has of a model with H heads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.local import LocalAttention, make_local_attention
from isp.core.attention.mask import AttentionMask
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel

CPU_COLUMNS = """\
case        B rows of S tokens, H heads, K KV heads of size d, and the local attention
ours        median ms of a forward and backward, on the slowest rank; theirs: DeepSpeed's
ratio       median over rounds of our time / DeepSpeed's
processor   the same ratio, of the processor time of all ranks: other programs disturb it less
sent        MB that rank 0 sent in a forward and backward; formula: what it should send
messages    number of these transfers
"""

GPU_COLUMNS = """\
p           ranks that would share the sequence; H/p and K/p: heads and KV heads of one of them
ours        median ms of forward and backward by DistributedAttention; kernel: called directly
ratio       median over rounds of our time / the kernel's; kernel: the name of the fastest one
"""

HOW_TO_GET_DEEPSPEED = (
    "error: on CPU this compares with DeepSpeed, which is not installed. In an environment of its"
    " own, run pip install torch, then pip install deepspeed, then pip install -e ."
)


@dataclass(frozen=True)
class Case:
    """One comparison of ISP's attention with DeepSpeed's: sizes, and what computes attention.

    `local` is what a rank calls for its heads: sdpa, or none, which returns q + k + v, so that
    almost only the transfers take time.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    local: str

    def __str__(self) -> str:
        return (
            f"B={self.batch} S={self.tokens} H={self.heads} K={self.kv_heads} d={self.head_dim}"
            f" {self.local}"
        )

    def bytes_sent(self, ranks: int, element_size: int) -> int:
        """Return the bytes that a rank sends in forward and backward, by the formula.

        The numbers of heads and KV heads must be divisible by `ranks`.
        """
        elements = self.batch * self.tokens // ranks * self.head_dim
        heads = 2 * self.heads + 2 * self.kv_heads
        return 2 * elements * heads * (ranks - 1) // ranks * element_size


WARM_UP = 5
"""Rounds that are not counted: in the first ones the allocator takes new memory."""

CPU_CASES = [
    Case(1, 2048, 8, 8, 64, "sdpa"),
    Case(1, 2048, 8, 4, 64, "sdpa"),
    Case(2, 1024, 8, 8, 64, "sdpa"),
    Case(1, 512, 8, 4, 64, "sdpa"),
    Case(1, 4096, 16, 16, 64, "none"),
    Case(1, 2048, 8, 4, 64, "none"),
    Case(2, 1024, 8, 8, 64, "none"),
    Case(1, 256, 8, 4, 64, "none"),
]


def no_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
    """Return q + k + v: every input has a gradient, at almost no cost."""
    del mask
    heads = k.shape[2]
    return q + (k + v).repeat_interleave(q.shape[2] // heads, 2)


def their_attention(local: LocalAttention, mask: AttentionMask) -> Callable[..., Tensor]:
    """Return DeepSpeed's distributed attention around `local`, as a function of q, k and v."""
    import deepspeed
    import deepspeed.comm.comm as their_comm
    from deepspeed.sequence.layer import DistributedAttention as Theirs

    # Set up DeepSpeed's communication by hand: its `init_distributed` would look for MPI and
    # compile an all-reduce over shared memory, and the all-to-all measured here uses neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    their_comm.cdb = their_comm.TorchBackend("gloo", timedelta(minutes=5), None)
    around = Theirs(
        lambda q, k, v: local(q, k, v, mask=mask), dist.group.WORLD, scatter_idx=2, gather_idx=1
    )
    return lambda q, k, v: around(q, k, v, 0)


class Cost(NamedTuple):
    """Time of one forward and backward of attention, in seconds."""

    wall: float
    """Time that passed on the slowest rank."""
    processor: float
    """Processor time, summed over the ranks."""


def run_once(attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> Cost:
    """Run one forward and backward on all ranks, and return its cost."""
    for x in inputs:
        x.grad = None
    dist.barrier()
    begin, processor = time.perf_counter(), time.process_time()
    attend(*inputs).backward(dout)
    wall = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    used = torch.tensor(time.process_time() - processor, dtype=torch.float64)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return Cost(float(wall), float(used))


def compare(rank: int, ranks: int, case: Case, repeats: int) -> None:
    """Check and time both attentions on one case; rank 0 prints the row of the table."""
    mask = AttentionMask()
    local: LocalAttention = CpuAttention() if case.local == "sdpa" else no_attention
    channel = Channel(dist.group.WORLD, name="sequence")
    around = DistributedAttention(local, channel)
    attends = [lambda q, k, v: around(q, k, v, mask=mask), their_attention(local, mask)]
    torch.manual_seed(rank)
    shape = (case.batch, case.tokens // ranks)
    sizes = [(*shape, heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    inputs = [torch.randn(size).requires_grad_() for size in sizes]
    dout = torch.randn(sizes[0])

    results = []
    for attend in attends:
        run_once(attend, inputs, dout)
        results.append([attend(*inputs).detach(), *(x.grad for x in inputs)])
    error = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    if error > 1e-3:
        raise RuntimeError(f"{case}: the two attentions differ by {error}")
    channel.log.collect()
    run_once(attends[0], inputs, dout)
    sent = CommTotals(channel)

    costs: list[list[Cost]] = [[], []]
    for turn in range(WARM_UP + repeats):
        for which in (turn % 2, 1 - turn % 2):
            cost = run_once(attends[which], inputs, dout)
            if turn >= WARM_UP:
                costs[which].append(cost)
    if rank == 0:
        ours, theirs = (1e3 * statistics.median(cost.wall for cost in each) for each in costs)
        pairs = list(zip(*costs, strict=True))
        ratio = statistics.median(a.wall / b.wall for a, b in pairs)
        used = statistics.median(a.processor / b.processor for a, b in pairs)
        formula = case.bytes_sent(ranks, inputs[0].element_size())
        print(
            f"{ranks:>5}  {case!s:<34} {ours:>9.2f} {theirs:>10.2f} {ratio:>6.2f}"
            f" {used:>9.2f} {sent.bytes / 1e6:>9.3f} {formula / 1e6:>9.3f} {sent.count:>9}",
            flush=True,
        )
        if sent.bytes != formula:
            raise RuntimeError(f"{case}: sent {sent.bytes} bytes, the formula says {formula}")


class CommTotals:
    """Number of transfers in a channel's log, and the bytes that they sent.

    Making one empties the log, so the next one counts only later transfers.
    """

    def __init__(self, channel: Channel) -> None:
        transfers = channel.log.take()
        self.bytes = sum(t.sent_bytes for t in transfers)
        self.count = len(transfers)


def rank_main(rank: int, ranks: int, folder: str, repeats: int) -> None:
    """Run all cases on one CPU rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for case in CPU_CASES:
        if case.kv_heads % ranks == 0:  # DeepSpeed's attention refuses other numbers of heads
            compare(rank, ranks, case, repeats)
    dist.barrier()
    dist.destroy_process_group()


def bench_cpu(ranks: list[int], repeats: int) -> None:
    """Print the table of all cases, for each number of ranks."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SystemExit(HOW_TO_GET_DEEPSPEED)
    print(
        f"torch {torch.__version__}, deepspeed {importlib.metadata.version('deepspeed')},"
        f" float32, 1 thread a rank, median of {repeats}"
    )
    print(CPU_COLUMNS)
    print(
        f"{'ranks':>5}  {'case':<34} {'ours, ms':>9} {'theirs, ms':>10} {'ratio':>6}"
        f" {'processor':>9} {'sent, MB':>9} {'formula':>9} {'messages':>9}"
    )
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                rank_main, (count, folder, repeats), nprocs=count, start_method="spawn"
            )


# -- one GPU -------------------------------------------------------------------------------------


def direct_kernels(scale: float) -> dict[str, Callable[..., Any]]:
    """Return a function of q, k and v for each attention kernel that can be imported, by name.

    It calls the kernel directly, as the kernel's documentation shows.
    """
    kernels: dict[str, Callable[..., Any]] = {
        "sdpa": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    }
    for name, module in (
        ("flash2", "flash_attn"),
        ("flash3", "flash_attn_interface"),
        ("flash4", "flash_attn.cute"),
    ):
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, OSError, AttributeError):
            continue
        kernels[name] = lambda q, k, v, function=function: function(
            q, k, v, softmax_scale=scale, causal=True
        )
    return kernels


def time_on_gpu(attend: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> float:
    """Return the milliseconds of one forward and backward, by events on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    out = attend(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    torch.autograd.grad(out, inputs, dout)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def bench_gpu(tokens: list[int], heads: int, kv_heads: int, head_dim: int, repeats: int) -> None:
    """Print the table of local attention against the fastest kernel, a line for each length.

    A sequence of n tokens is split over n / 32,768 ranks (at least 1, at most `heads`), and each
    rank has some of the heads.
    """
    device = torch.device("cuda")
    mask = AttentionMask()
    local = make_local_attention(AttentionBackend.AUTO, device=device, dtype=torch.bfloat16)
    around = DistributedAttention(local, Channel.solo())
    kernels = direct_kernels(head_dim**-0.5)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {type(local).__name__}")
    print(GPU_COLUMNS)
    print(
        f"{'tokens':>8} {'p':>3} {'H/p':>4} {'K/p':>4} {'ours, ms':>10} {'kernel, ms':>10}"
        f" {'ratio':>6}  kernel"
    )
    for length in tokens:
        ranks = max(1, min(heads, length // 32_768))
        own, own_kv = max(1, heads // ranks), max(1, kv_heads // ranks)
        sizes = [(1, length, count, head_dim) for count in (own, own_kv, own_kv)]
        inputs = [
            torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()
            for size in sizes
        ]
        dout = torch.randn_like(inputs[0])
        attends = {"ours": lambda q, k, v: around(q, k, v, mask=mask), **kernels}
        times: dict[str, list[float]] = {name: [] for name in attends}
        for turn in range(repeats + 1):
            for name, attend in attends.items():
                took = time_on_gpu(attend, inputs, dout)
                if turn > 0:  # the first turn compiles and warms up
                    times[name].append(took)
        medians = {name: statistics.median(t) for name, t in times.items()}
        best = min(kernels, key=lambda name: medians[name])
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times[best], strict=True))
        print(
            f"{length:>8} {ranks:>3} {own:>4} {own_kv:>4} {medians['ours']:>10.2f}"
            f" {medians[best]:>10.2f} {ratio:>6.3f}  {best}",
            flush=True,
        )


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"columns on CPU:\n{CPU_COLUMNS}\ncolumns on a GPU:\n{GPU_COLUMNS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="CPU ranks")
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are timed")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[2**n for n in range(15, 21)],
        help="lengths of the sequence, on a GPU",
    )
    parser.add_argument("--heads", type=int, default=32, help="heads of the model, on a GPU")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of the model, on a GPU")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head, on a GPU")
    options = parser.parse_args()
    if options.device == "cpu":
        bench_cpu(options.ranks, options.repeats)
    elif not torch.cuda.is_available():
        raise SystemExit("error: --device cuda, but torch finds no CUDA device: use --device cpu")
    else:
        bench_gpu(
            options.tokens, options.heads, options.kv_heads, options.head_dim, options.repeats
        )


if __name__ == "__main__":
    main()
