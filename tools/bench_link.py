"""Exposed time of a link of a given speed, modelled on one GPU: ours compared with fully_shard.

    python tools/bench_link.py --gb-per-second 100 200 400
    python tools/bench_link.py --device cpu --quick    # to see that it runs: on CPU nothing sleeps

This process is rank 0 of `--ranks`, and there are no others: torch's process group is the fake one.
An all-gather copies this rank's shard once for each rank, and a reduce-scatter takes this rank's
part of its own gradient. Both run one after the other on a stream of the link, after a kernel that
sleeps for as long as the bytes of the other ranks would need. So shapes, memory and order are those
of a real run, and losses and gradients mean nothing. NCCL's thread blocks and memory traffic are
not modelled: this is the best case, for ours and for fully_shard.

The contestants of `bench_fully_shard` take turns, a step each. Shown are the median times, the
bytes received, the time of the link and how much of it is exposed: the step minus the same
contestant's step over a link of infinite speed, which is measured first. On a GPU the time of the
link is measured, as the clock that a kernel sleeps by changes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_parts import draw_weights, fault_of, free_memory, prepare, save
from overlap_rows import Compute, Row, compute_alone, llama_layers, ours, theirs
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from isp.core.attention.local import make_local_attention
from isp.core.comm import Channel, Mesh, Pending, streams
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.mesh import Axis, Topology
from isp.core.mesh.config import OverlapUnit, ParallelConfig, TensorConfig, WeightConfig
from isp.metrics import device_name

LATENCY = 10e-6
"""Seconds that a transfer takes beyond its bytes."""


class ModelledLink:
    """The link of rank 0: a stream of its own, whose transfers last as long as their bytes."""

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        self.device = device
        self.bytes_per_second = bytes_per_second
        self.received = 0
        self._modelled = 0.0
        self._sleeps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stream = streams.new(device)
        self._hertz = _hertz(device)

    def transfer(self, received: int, act: Callable[[], object], *keep: Tensor) -> Pending:
        """Queue `act` after the time of `received` bytes; the last of `keep` is the result."""
        self.received += received
        streams.follow(self._stream)  # what is sent has been computed
        with streams.on(self._stream):
            seconds = LATENCY + received / self.bytes_per_second
            if self._stream is None:
                self._modelled += seconds
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                torch.cuda._sleep(int(seconds * self._hertz))
                end.record()
                self._sleeps.append((begin, end))
            act()
            done = streams.mark(self.device)
        return Pending((lambda: None) if done is None else done.wait, result=keep[-1], keep=keep)

    def take_seconds(self) -> float:
        """Return how long the transfers since the last call took; all must have ended.

        On CPU, where none sleeps, how long they would take.
        """
        slept = sum(begin.elapsed_time(end) for begin, end in self._sleeps) / 1e3
        found, self._modelled = self._modelled + slept, 0.0
        self._sleeps.clear()
        return found


def _hertz(device: torch.device) -> float:
    """Return the cycles per second that a sleeping kernel counts."""
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(4096, 4096, device=device, dtype=torch.bfloat16)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.5:  # the clock of an idle GPU is much slower
        x @ x
        torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 100_000_000
    torch.cuda._sleep(cycles // 10)  # loads the kernel
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / begin.elapsed_time(end) * 1e3


class LinkChannel(Channel):
    """Rank 0 of `size` ranks over a modelled link."""

    def __init__(self, size: int, name: str, link: ModelledLink) -> None:
        super().__init__(None, name=name)
        self.size, self.rank, self._modelled = size, 0, link

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        rows = out.view(self.size, -1)
        own = x.reshape(1, -1).expand_as(rows)  # expanded: fully_shard's x is a row of `out`
        return self._modelled.transfer(x.nbytes * (self.size - 1), lambda: rows.copy_(own), x, out)

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        x = x.to(out.dtype)  # as a real channel: sums are in the dtype of `out`
        own, count = x.view(self.size, -1)[0], x.nbytes // self.size * (self.size - 1)
        return self._modelled.transfer(count, lambda: out.view(-1).copy_(own), x, out)

    def all_reduce_(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        return Pending.ready(x)  # numbers of a step, too small to matter

    def broadcast_(self, x: Tensor, *, source: int = 0, tag: Tag = UNNAMED) -> Pending:
        return Pending.ready(x)


class LinkMesh(Mesh):
    """The channels of rank 0, all over one link."""

    def __init__(self, topology: Topology, link: ModelledLink) -> None:
        self._modelled = link
        super().__init__(topology, 0)

    def _make_group(self, axis: Axis, name: str) -> dist.ProcessGroup | None:
        return None

    def _add(
        self,
        axis: Axis,
        name: str,
        group: dist.ProcessGroup | None,
        *,
        sum_locally: bool | None = None,
    ) -> Channel:
        size = len(self.topology.group_of(axis, 0))
        channel = LinkChannel(size, name, self._modelled) if size > 1 else Channel.solo(name)
        self.opened.append(channel)
        return channel


def compute_of(options: argparse.Namespace, device: torch.device) -> Compute:
    """The work of a rank: layers of the sizes of llama3.1-8b, as in `bench_fully_shard`."""
    dtype = torch.float32 if options.quick else torch.bfloat16
    model = llama_layers(options.layers, quick=options.quick)
    attention = make_local_attention(device=device, dtype=dtype, head_dim=model.head_size, group=4)
    tokens = 64 if options.quick else options.tokens
    return Compute(
        model, 1, tokens, device=device, dtype=dtype, attention=attention, draw=draw_weights
    )


def contestants(compute: Compute, ranks: int, link: ModelledLink) -> dict[str, Callable[[], Row]]:
    """Compute alone, and ways to gather weights; each is built by a call."""
    parallel = ParallelConfig(tensor=TensorConfig(size=1), weight=WeightConfig(size=ranks))
    topology = Topology.create(ranks, parallel)

    def isp(name: str, *, own_group: bool = False, **prefetch: Any) -> Callable[[], Row]:
        def make() -> Row:
            mesh = LinkMesh(topology, link)
            apart = mesh.open(Axis.WEIGHT, "weight_reduce") if own_group else None
            return ours(name, compute, mesh, apart=apart, **prefetch)

        return make

    def sharded(name: str, prefetch: bool) -> Callable[[], Row]:
        return lambda: theirs(name, compute, LinkChannel(ranks, name, link), prefetch=prefetch)

    own, module, explicit = "own_reduce_group", "per module", "explicit prefetch"
    return {
        "compute alone": lambda: compute_alone(compute),
        "ours": isp("ours"),
        "fully_shard": sharded("fully_shard", False),
        f"fully_shard, {explicit}": sharded(explicit, True),
        "ours, no overlap": isp("no overlap", overlap=False),
        f"ours, {own}": isp(own, own_group=True),
        f"ours, {module}": isp(module, unit=OverlapUnit.MODULE),
    }


def measure(
    rows: dict[str, Row],
    link: ModelledLink,
    rounds: int,
    faults: dict[str, str],
    at_once: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Let all take turns over the link; the lines of the table. One that fails leaves `rows`.

    `at_once`: the line of each over a link of infinite speed; empty for that speed.
    """
    taken: dict[str, list[float]] = {name: [] for name in rows}
    on_link: dict[str, list[float]] = {name: [] for name in rows}
    received: dict[str, int] = {}
    for turn in range(rounds + 1):
        names = list(rows)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before = link.received
            link.take_seconds()
            try:
                taken[name].append(seconds(rows[name], link.device))
                on_link[name].append(link.take_seconds())
            except Exception as error:
                faults[name] = fault_of(error)
                del rows[name]
            received[name] = link.received - before
            if name in faults:
                free_memory()
    found = []
    for name in rows:
        ms, link_ms = (1e3 * statistics.median(s[name][1:]) for s in (taken, on_link))  # 1st: warms
        one = {"who": name, "ms": ms, "link_ms": link_ms, "received_bytes": received[name]}
        base = at_once.get(name)
        if base and received[name]:
            one["exposed"] = (ms - base["ms"]) / (link_ms - base["link_ms"])
        found.append(one)
    return found


def seconds(row: Row, device: torch.device) -> float:
    """Return the time of a step."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    row.step()
    wait()
    return time.perf_counter() - begin


def main() -> int:
    """Measure every speed; 1 if a contestant failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--gb-per-second", type=float, nargs="+", default=[100, 200, 400])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it runs")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    prepare(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    link = ModelledLink(device, float("inf"))
    rows, faults = {}, {}
    for name, make in contestants(compute_of(options, device), options.ranks, link).items():
        try:
            rows[name] = make()
        except Exception as error:
            faults[name] = fault_of(error)
            free_memory()
    print(f"rank 0 of {options.ranks}, {device_name(device)}, torch {torch.__version__}\n")
    print("| GB/s | who | ms a step | MB received | ms of the link | exposed |")
    print("|---:|---|---:|---:|---:|---:|")
    found: list[dict[str, Any]] = []
    at_once: dict[str, dict[str, Any]] = {}
    for speed in (float("inf"), *options.gb_per_second):
        link.bytes_per_second = speed * 1e9
        for one in measure(rows, link, options.rounds, faults, at_once):
            share = f"{one['exposed']:.0%}" if "exposed" in one else ""
            numbers = f"{one['ms']:.1f} | {one['received_bytes'] / 1e6:.0f} | {one['link_ms']:.1f}"
            print(f"| {speed:g} | {one['who']} | {numbers} | {share} |", flush=True)
            found.append({"gb_per_second": speed if speed < float("inf") else None, **one})
        at_once = at_once or {one["who"]: one for one in found}
        save([*found, *({"who": who, "fault": why} for who, why in faults.items())], options.json)
    for who, why in faults.items():
        print(f"{who}: {why}")
    dist.destroy_process_group()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
