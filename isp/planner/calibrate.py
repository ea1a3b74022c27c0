"""Measurement of this machine (compute, memory copies, links), described as a fabric.

All ranks measure at the same time, as in a run, and the slowest one counts. A transfer of n bytes
takes latency + n / bandwidth, fitted to sizes from 4 KiB to 16 MiB with the least relative errors.
Between nodes, one rank of each node sends. Factors of products are random numbers: with equal
numbers a GPU draws less power and runs faster than in training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from isp.config import ConfigError
from isp.core.attention.local import make_local_attention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, Mesh, World, pinned_memory
from isp.core.mesh import Axis, ParallelConfig, Topology, WeightConfig
from isp.metrics import device_name
from isp.planner.fabric import DeviceSpec, Fabric, HostSpec, LinkSpec

__all__ = ["Line", "calibrate", "fit_line", "measure"]

TRANSFERS = tuple(4096 * 4**i for i in range(7))
"""Bytes that a rank sends in a measured transfer: 4 KiB to 16 MiB."""


class Line(NamedTuple):
    """Line that gives the seconds of a transfer: latency + bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Return the line through (size, seconds) with the least relative errors.

    Its latency is never negative, and its bandwidth is finite.
    """
    x, t = np.array(sizes, dtype=float), np.array(seconds, dtype=float)
    # Weights of 1 / t make errors relative: otherwise the largest transfers alone would decide.
    slope, start = np.polyfit(x, t, 1, w=1 / t)
    # If larger transfers do not take longer, latency is all of the time, and the bandwidth is at
    # least the highest one that was measured.
    if slope <= 0:
        return Line(float(t.min()), float((x / t).max()))
    return Line(max(0.0, float(start)), 1 / float(slope))


def calibrate(*, quick: bool = False) -> Fabric | None:
    """Measure the ranks that torchrun has started, or this process; returns None except on rank 0.

    `quick` checks that measuring works, with small sizes and rough results. Raises ConfigError if
    nodes have different numbers of ranks.
    """
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    with World(device) as world:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
        if world.size % local_size:
            raise ConfigError(
                f"{world.size} ranks over nodes of {local_size}: start the same number of ranks on"
                f" every node"
            )
        parallel = ParallelConfig(weight=WeightConfig(size=local_size))
        mesh = Mesh(Topology.create(world.size, parallel), world.rank)
        fabric = measure(mesh, device, quick=quick)
        return fabric if world.rank == 0 else None


def measure(mesh: Mesh, device: torch.device, *, quick: bool) -> Fabric:
    """Return the fabric of the ranks of `mesh`; a collective.

    Each weight group of `mesh` has to be all ranks of one node: transfers in it measure the link
    inside a node, and those of weight_data groups the link between nodes.
    """
    inside = _link(mesh[Axis.WEIGHT], device, quick)
    between = _link(mesh[Axis.WEIGHT_DATA], device, quick)
    spec = _device(mesh[Axis.WORLD], device, quick)
    ranks = mesh[Axis.WEIGHT].size
    # With one rank on the node there is no link to measure: assume the speed of memory.
    if inside is None:
        inside = LinkSpec(gb_per_second=spec.gb_per_second, latency_us=0.0)
    return Fabric(
        name=f"{spec.name}, {ranks} ranks a node",
        source="isp calibrate",
        measured=True,
        devices_per_node=ranks,
        device=spec,
        inside=inside,
        between=between,
        host=HostSpec(
            memory_gib=round(_node_bytes() / 2**30, 2),
            gb_per_second=_digits(_slowest(mesh[Axis.WORLD], _host_bytes(device, quick)) / 1e9),
        ),
    )


def _device(world: Channel, device: torch.device, quick: bool) -> DeviceSpec:
    """Measure the device of the slowest rank; a collective."""
    size = 256 if quick else (8192 if device.type == "cuda" else 1024)
    wide = _slowest(world, _product_tflops(size, torch.float32, device))
    narrow = _slowest(world, _product_tflops(size, torch.bfloat16, device))
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    attention = _slowest(world, _attention_tflops(size, dtype, device))
    return DeviceSpec(
        name=device_name(device),
        kind="cuda" if on_gpu else "cpu",
        memory_gib=round(_memory_bytes(device) / 2**30, 2),
        # `tflops` was measured on a large product, not taken from a data sheet: efficiency is 1.
        tflops=_digits(narrow),
        wide_tflops=_digits(wide),
        efficiency=1.0,
        attention_efficiency=min(1.0, _digits(attention / (narrow if on_gpu else wide))),
        gb_per_second=_digits(_slowest(world, _copied_bytes(device, quick)) / 1e9),
        memory_efficiency=1.0,
    )


def _product_tflops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the TFLOP/s of a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device) / 1e12


def _attention_tflops(length: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the TFLOP/s of causal attention with 4 heads of 64 features."""
    q, k, v = (torch.randn(1, length, 4, 64, device=device).to(dtype) for _ in range(3))
    attend, mask = make_local_attention(device=device, dtype=dtype), AttentionMask(causal=True)
    # Causal attention computes half of the length^2 pairs, each with 4 FLOPs per feature.
    flops = 4 * length**2 / 2 * 4 * 64
    return flops / _seconds(lambda: attend(q, k, v, mask=mask), device) / 1e12


def _copied_bytes(device: torch.device, quick: bool) -> float:
    """Return the bytes per second that a copy reads and writes on the device."""
    x = torch.ones((1 if quick else 64) * 2**20, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / _seconds(lambda: y.copy_(x), device)


def _host_bytes(device: torch.device, quick: bool) -> float:
    """Return the bytes per second that are copied from pinned memory of the host."""
    x = pinned_memory.zeros((1 if quick else 64) * 2**20, torch.float32, device)
    y = torch.empty(x.shape, device=device)
    return x.nbytes / _seconds(lambda: y.copy_(x, non_blocking=True), device)


def _memory_bytes(device: torch.device) -> float:
    """Return the bytes of memory of one rank."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _node_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _node_bytes() -> float:
    """Return the bytes of memory of this machine."""
    info = Path("/proc/meminfo")
    if info.exists():
        return int(info.read_text().split("MemTotal:")[1].split()[0]) * 1024.0
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _link(channel: Channel, device: torch.device, quick: bool) -> LinkSpec | None:
    """Measure the link of a channel by all-gathers; returns None for a channel of one rank."""
    if channel.size == 1:
        return None
    sizes = TRANSFERS[:3] if quick else TRANSFERS
    line = fit_line(sizes, [_transfer_seconds(channel, size, device) for size in sizes])
    return LinkSpec(
        gb_per_second=_digits(line.bytes_per_second / 1e9),
        # An all-gather in a ring has size - 1 hops.
        latency_us=_digits(line.latency_seconds / (channel.size - 1) * 1e6),
    )


def _transfer_seconds(channel: Channel, sent_bytes: int, device: torch.device) -> float:
    """Return the seconds of an all-gather in which each rank sends `sent_bytes`."""
    piece = torch.zeros(max(1, sent_bytes // (channel.size - 1) // 4), device=device)
    full = torch.empty(channel.size * piece.numel(), device=device)
    return _slowest(
        channel,
        _seconds(lambda: channel.all_gather_into(full, piece).wait(), device, choose=median),
        largest=True,
    )


def _seconds(
    act: Callable[[], object],
    device: torch.device,
    *,
    choose: Callable[[Sequence[float]], float] = min,
) -> float:
    """Run `act` six times, and return the time of the last five that `choose` picks, in seconds.

    The first run may allocate or compile, so it does not count.
    """
    found = []
    for _ in range(6):
        begin = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return choose(found[1:])


def _slowest(channel: Channel, value: float, *, largest: bool = False) -> float:
    """Return the minimum of `value` over all ranks, or the maximum; a collective."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    # A maximum of negative values is a minimum: channels only know `max`.
    sign = 1 if largest else -1
    own = torch.tensor(sign * value, dtype=torch.float64, device=device)
    return sign * channel.all_reduce(own, op="max").wait().item()


def _digits(value: float) -> float:
    """Return `value` rounded to three significant digits; the rest is noise."""
    return float(f"{value:.3g}")
