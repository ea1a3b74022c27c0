"""Measure how much slower attention kernels are on the slices of context ranks than on a whole row.

    python tools/bench_slices.py --device cuda --tokens 32768    # tokens of a rank
    python tools/bench_slices.py --tokens 1024                   # on CPU

One device computes the attention of each context rank in turn, forward and backward, with the keys
that the rank would have received. Nothing is communicated, and inputs are laid out for the kernel
before the time begins.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from bench_balance import log_normal_row
from table_parser import table_parser
from torch import Tensor

from isp.core.attention.context_parallel.route import gather_route
from isp.core.attention.local import LocalAttention, make_local_attention
from isp.core.attention.mask import AttentionMask
from isp.core.mesh.sequence_split import SequenceSplit
from isp.metrics import device_name

COLUMNS = """\
row            the documents in the row
ms             median time of one call for the whole row, forward and backward
slices / row   median of the time of all ranks' calls together / one call for the whole row
busiest        median of the slowest rank's time / the mean of the ranks - 1
"""


class SliceBench:
    """The attention of one row of documents, in one call and in a call for each context rank."""

    def __init__(self, options: argparse.Namespace, lengths: tuple[int, ...]) -> None:
        self.device = torch.device(options.device)
        dtype = getattr(torch, options.dtype)
        self.attend: LocalAttention = make_local_attention(
            device=self.device, dtype=dtype, head_dim=options.head_size
        )
        q, k, v = (
            torch.randn(sum(lengths), n, options.head_size, device=self.device, dtype=dtype)
            for n in (options.heads, options.kv_heads, options.kv_heads)
        )
        plan = SequenceSplit.of(lengths, options.ranks)
        self.row = self._call(q, k, v, AttentionMask.of_documents(lengths))
        self.ranks = []
        # `plan.order` lists the row's tokens rank by rank: each rank's queries are a piece of it.
        places = torch.from_numpy(plan.order).split([_tokens(held) for held in plan.slices])
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for rank, own in enumerate(places):
            route = gather_route(plan, rank, causal=True, window=None)
            # A rank's queries see their documents from the first token to the end of the slice.
            seen = [
                torch.arange(starts[document], starts[document] + end)
                for document, _, end in plan.slices[rank]
            ]
            keys = torch.cat(seen).to(self.device)
            self.ranks.append(self._call(q[own.to(self.device)], k[keys], v[keys], route.mask))

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Callable[[], float]:
        """Return a function that runs forward and backward, and returns the seconds they took."""
        leaves = [x.unsqueeze(0).detach().requires_grad_() for x in (q, k, v)]
        dout = torch.ones_like(leaves[0])

        def timed() -> float:
            self._wait()
            begin = time.perf_counter()
            torch.autograd.grad(self.attend(*leaves, mask=mask), leaves, dout)
            self._wait()
            return time.perf_counter() - begin

        return timed

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, rounds: int) -> tuple[float, float, float]:
        """Return medians over rounds: seconds of one call for the whole row, and two ratios.

        The first is the time of all ranks' calls together / the time of that one call. The second
        is the time of the slowest rank / the mean of the ranks, minus 1.
        """
        found = []
        for number in range(rounds + 1):
            row, ranks = self.row(), [rank() for rank in self.ranks]
            # The first round warms up and is left out.
            if number:
                mean = sum(ranks) / len(ranks)
                found.append((row, sum(ranks) / row, max(ranks) / mean - 1))
        row, ratio, busiest = map(statistics.median, zip(*found, strict=True))
        return row, ratio, busiest


def _tokens(held: tuple[tuple[int, int, int], ...]) -> int:
    return sum(end - begin for _, begin, end in held)


def main() -> None:
    """Print the table for one document and for packed documents."""
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a rank")
    parser.add_argument("--ranks", type=int, default=4, help="context ranks")
    parser.add_argument("--heads", type=int, default=8, help="heads of a rank")
    parser.add_argument("--kv-heads", type=int, default=2, help="KV heads of a rank")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    tokens = options.tokens * options.ranks
    packed = tuple(log_normal_row(random.Random(0), tokens, tokens // 50, 1.3))
    print(
        f"{device_name(torch.device(options.device))}, torch {torch.__version__},"
        f" {options.dtype}: {options.ranks} context ranks of {options.tokens:,} tokens"
    )
    print(f"\n{COLUMNS}")
    print("| row | ms | slices / row | busiest |\n|---|---:|---:|---:|")
    for lengths in ((tokens,), packed):
        row, ratio, busiest = SliceBench(options, lengths).measure(options.rounds)
        name = "one document" if len(lengths) == 1 else f"{len(lengths)} documents"
        print(f"| {name} | {row * 1e3:.1f} | {ratio:.3f} | {busiest:.1%} |")


if __name__ == "__main__":
    main()
