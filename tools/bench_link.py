"""Compare the exposed time of ISP and fully_shard over a link that is modelled on one GPU.

    python tools/bench_link.py --gb-per-second 100 200 400
    python tools/bench_link.py --device cpu --quick    # to see that it runs: on CPU nothing sleeps

This process is rank 0 of `--ranks`, and there are no other ranks: torch's process group is the fake
one. An all-gather copies this rank's shard once for each rank, and a reduce-scatter takes this
rank's part of its own gradient. Both are queued on one stream, each after a kernel that sleeps for
the time that the bytes of the other ranks would need. So shapes, memory and order are those of a
real run; losses and gradients mean nothing. The thread blocks and memory traffic of NCCL are not
modelled: this is the best case, for ISP and for fully_shard.

The ways of `bench_fully_shard` take turns, a step each. The first lines are over a link of infinite
speed ("inf"), which gives the time without transfers.
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
from table_parser import table_parser
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from isp.core.attention.local import make_local_attention
from isp.core.comm import Channel, Mesh, Pending, streams
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.mesh import Axis, Topology
from isp.core.mesh.config import OverlapUnit, ParallelConfig, TensorConfig, WeightConfig
from isp.metrics import device_name

COLUMNS = """\
GB/s             speed of the modelled link
who              `compute alone`: no transfers; `ours`: ISP, by default or with the named setting
ms a step        median
MB received      bytes that this rank receives in a step
ms of the link   time of all transfers; on a GPU measured, as the clock of a sleeping kernel varies
exposed          step minus the same step over a link of infinite speed, as a share of the link's
                 time
"""

LATENCY = 10e-6
"""Seconds that a transfer takes in addition to the time of its bytes."""


class ModelledLink:
    """The link of rank 0: a stream on which each transfer sleeps for the time of its bytes."""

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        self.device = device
        self.bytes_per_second = bytes_per_second
        self.received = 0
        self._modelled = 0.0
        self._sleeps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stream = streams.new(device)
        self._hertz = _hertz(device)

    def transfer(self, received: int, act: Callable[[], object], *keep: Tensor) -> Pending:
        """Queue a transfer: the stream sleeps for the time of `received` bytes, then runs `act`.

        `keep` are the tensors that it uses, kept alive until its end; the last one is its result.
        """
        self.received += received
        # Let the transfer begin only after the kernels that compute its input.
        streams.follow(self._stream)
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
        """Return the seconds of all transfers since the last call; all must have ended.

        On CPU, where no transfer sleeps, these are the modelled seconds.
        """
        slept = sum(begin.elapsed_time(end) for begin, end in self._sleeps) / 1e3
        found, self._modelled = self._modelled + slept, 0.0
        self._sleeps.clear()
        return found


def _hertz(device: torch.device) -> float:
    """Return how many cycles `torch.cuda._sleep` counts per second; 0 on CPU."""
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(4096, 4096, device=device, dtype=torch.bfloat16)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.5:  # warms up: the clock of an idle GPU is much slower
        x @ x
        torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 100_000_000
    torch.cuda._sleep(cycles // 10)  # loads the kernel, which the events must not count
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / begin.elapsed_time(end) * 1e3


class LinkChannel(Channel):
    """A channel of rank 0 among `size` ranks, whose transfers take the time of a modelled link."""

    def __init__(self, size: int, name: str, link: ModelledLink) -> None:
        super().__init__(None, name=name)
        self.size, self.rank, self._modelled = size, 0, link

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        rows = out.view(self.size, -1)
        # Fill all of `out` by one copy from an expanded view of x. In fully_shard x is itself a
        # part of `out`, so it is not copied part by part.
        own = x.reshape(1, -1).expand_as(rows)
        return self._modelled.transfer(x.nbytes * (self.size - 1), lambda: rows.copy_(own), x, out)

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        # Count bytes as a real channel does: it sends in the dtype in which it sums.
        x = x.to(out.dtype)
        own, count = x.view(self.size, -1)[0], x.nbytes // self.size * (self.size - 1)
        return self._modelled.transfer(count, lambda: out.view(-1).copy_(own), x, out)

    def all_reduce_(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        # A step reduces only a few numbers, such as the norm, so no time is modelled for this.
        return Pending.ready(x)

    def broadcast_(self, x: Tensor, *, source: int = 0, tag: Tag = UNNAMED) -> Pending:
        return Pending.ready(x)


class LinkMesh(Mesh):
    """The mesh of rank 0, whose channels all share one modelled link."""

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
    """Return what a rank computes in a step: layers with the sizes of llama3.1-8b."""
    dtype = torch.float32 if options.quick else torch.bfloat16
    model = llama_layers(options.layers, quick=options.quick)
    attention = make_local_attention(device=device, dtype=dtype, head_dim=model.head_size, group=4)
    tokens = 64 if options.quick else options.tokens
    return Compute(
        model, 1, tokens, device=device, dtype=dtype, attention=attention, draw=draw_weights
    )


def contestants(compute: Compute, ranks: int, link: ModelledLink) -> dict[str, Callable[[], Row]]:
    """Return functions that build the rows, by name: compute alone, and ways to gather weights."""
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
    """Time all `rows` in turn over the link, and return the lines of the table.

    A row that fails is removed from `rows`, and its error is added to `faults`. `at_once` has
    each row's line over a link of infinite speed; it is empty in the call that measures these.
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
        # The first step warms up and is left out.
        ms, link_ms = (1e3 * statistics.median(s[name][1:]) for s in (taken, on_link))
        one = {"who": name, "ms": ms, "link_ms": link_ms, "received_bytes": received[name]}
        base = at_once.get(name)
        if base and received[name]:
            one["exposed"] = (ms - base["ms"]) / (link_ms - base["link_ms"])
        found.append(one)
    return found


def seconds(row: Row, device: torch.device) -> float:
    """Return the time of a step, until the device has finished it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    row.step()
    wait()
    return time.perf_counter() - begin


def main() -> int:
    """Measure all ways at every speed and print the table; return 1 if one failed."""
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that shard the weights")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank")
    parser.add_argument(
        "--gb-per-second",
        type=float,
        nargs="+",
        default=[100, 200, 400],
        help="speeds of the link of a rank",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way and speed")
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
    print(COLUMNS)
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
