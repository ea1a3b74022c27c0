"""A machine in numbers: compute of its devices, and speed of links inside and between nodes."""

from __future__ import annotations

import json
import math
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from isp.config import ConfigError
from isp.config.faults import describe_faults
from isp.config.keys import KeyTable
from isp.config.yaml_file import KeyPath, read_yaml
from isp.core.comm.host_offload import FROM_HOST, TO_HOST
from isp.core.comm.tag import Transfer
from isp.core.mesh import Axis
from isp.core.section import NotNegative, Positive, Ranks, section
from isp.planner.case import PlanCase

__all__ = [
    "DeviceSpec",
    "Fabric",
    "HostSpec",
    "LinkSpec",
    "axis_of",
    "known_fabrics",
    "load_fabric",
]

FOLDER = Path(__file__).with_name("fabrics")


Share = Annotated[float, Field(gt=0, le=1)]


@section("device")
class DeviceSpec:
    """Section `device` of a fabric file: memory and speed of the device of one rank."""

    name: str
    """Name that its maker gives it."""
    cuda_names: tuple[str, ...] = ()
    """Names that CUDA gives such devices; `isp train --parallel auto` finds the fabric by them."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Kind of its kernels, which decides what they save for backward."""
    memory_gib: Positive
    """Memory, in GiB."""
    usable: Share = 0.92
    """Share of the memory that tensors may take; the rest is for libraries and fragmentation."""
    tflops: Positive
    """Peak TFLOP/s in bfloat16 (float16), dense."""
    wide_tflops: Positive
    """Peak TFLOP/s in float32 and float64."""
    efficiency: Share
    """Share of the peak that matrix products reach."""
    attention_efficiency: Share
    """Share of the peak that attention kernels reach."""
    scan_efficiency: Share = 0.05
    """Share of the peak that scans reach; the default is an assumption."""
    gb_per_second: Positive
    """Memory bandwidth, in 1e9 bytes per second."""
    memory_efficiency: Share = 0.8
    """Share of the bandwidth that operations bound by memory reach."""
    layer_us: NotNegative = 0.0
    """Gaps between the kernels of a block's forward, in microseconds; backward has twice that."""

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of memory for tensors."""
        return int(self.memory_gib * 2**30 * self.usable)


@section("link")
class LinkSpec:
    """Section `inside` or `between` of a fabric file: a device's link in its node, or beyond it."""

    gb_per_second: Positive
    """Bandwidth of one device in one direction, in 1e9 bytes per second."""
    latency_us: NotNegative
    """Latency of a hop between devices, in microseconds: see `Fabric.latency`."""
    efficiency: Share = 1.0
    """Share of the bandwidth that collectives reach."""

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth that collectives reach."""
        return self.gb_per_second * 1e9 * self.efficiency


@section("host")
class HostSpec:
    """Section `host` of a fabric file: the memory of a node, and each device's link to it."""

    memory_gib: Positive | None = None
    """Memory of a node, shared by its ranks, in GiB; null: not known, and not limited."""
    usable: Share = 0.9
    """Share of the memory that a plan may fill; the rest is for the system and its processes."""
    gb_per_second: Positive = 25.0
    """Bandwidth of one device in each direction, in 1e9 bytes per second."""

    def usable_bytes(self, ranks: int) -> int | None:
        """Return the bytes for each of a node's `ranks`, or None if the memory is not known."""
        if self.memory_gib is None:
            return None
        return int(self.memory_gib * 2**30 * self.usable / ranks)


class Spread(NamedTuple):
    """Number of ranks of a group, and of those in each node."""

    size: int
    per_node: int
    """Ranks of the group in each node."""


@section("")
class Fabric:
    """A cluster of nodes with equal devices; ranks fill one node after the other."""

    name: str
    """Name of the cluster, as reports show it."""
    source: str = ""
    """Where the speeds and efficiencies come from, such as a data sheet."""
    measured: bool = False
    """Whether efficiencies were measured on such a machine; false: assumed, as `source` says."""
    devices_per_node: Ranks
    """Number of ranks in a node."""
    device: DeviceSpec
    """Device of a rank."""
    inside: LinkSpec
    """Link between the devices of a node."""
    between: LinkSpec | None = None
    """Link of one device to other nodes; null if there is one node only."""
    host: HostSpec = field(default_factory=HostSpec)
    """Memory of a node."""
    straggling: NotNegative = 0.01
    """Share of compute by which a step grows each time the number of nodes doubles, since all ranks
    wait for the slowest."""

    @property
    def on_cpu(self) -> bool:
        """Return True if ranks compute on CPU."""
        return self.device.kind == "cpu"

    def check(self, world_size: int) -> None:
        """Raise ConfigError if the machine does not have `world_size` devices."""
        if world_size > self.devices_per_node and self.between is None:
            raise ConfigError(
                f"--world {world_size} is more than the {self.devices_per_node} devices of"
                f" {self.name}, which has one node: give a fabric with a `between` section"
            )

    def wire(self, case: PlanCase, axis: Axis) -> str:
        """Return the link that groups along `axis` use: `inside` or `between` nodes."""
        spread = self.spread(case, axis)
        return "between" if spread.size > spread.per_node else "inside"

    def spread(self, case: PlanCase, axis: Axis) -> Spread:
        """Return how a group along `axis` is spread over nodes."""
        size, stride = case.size(axis), _stride(case, axis)
        node = self.devices_per_node
        if (size - 1) * stride < node:
            return Spread(size, size)
        return Spread(size, max(1, node // stride))

    def seconds(self, case: PlanCase, transfer: Transfer) -> float:
        """Return the seconds of a transfer while nothing else is in flight.

        Ring collectives between nodes use the links of all the group's ranks in a node together,
        but are no faster than inside a node; in an all-to-all each rank uses its own link.
        """
        if transfer.kind in (TO_HOST, FROM_HOST):
            return transfer.sent_bytes / (self.host.gb_per_second * 1e9)
        spread = Spread(2, 2) if transfer.kind == "send" else self.spread(case, axis_of(transfer))
        # The next stage is on another node once a stage fills a node.
        if transfer.kind == "send" and case.topology.stage >= self.devices_per_node:
            spread = Spread(2, 1)
        latency, inside = self.latency(spread, transfer.kind), self.inside
        if spread.size == spread.per_node:
            return latency + transfer.sent_bytes / inside.bytes_per_second
        assert self.between is not None, "`check` has refused this"
        if transfer.kind == "all_to_all":
            # What is sent to ranks of other nodes and of the same node takes different links at the
            # same time, so the slower of the two counts.
            away = (spread.size - spread.per_node) / (spread.size - 1)
            there = transfer.sent_bytes * away / self.between.bytes_per_second
            here = transfer.sent_bytes * (1 - away) / inside.bytes_per_second
            return latency + max(there, here)
        rate = min(inside.bytes_per_second, spread.per_node * self.between.bytes_per_second)
        return latency + transfer.sent_bytes / rate

    def latency(self, spread: Spread, kind: str) -> float:
        """Return the seconds of a transfer of no bytes: the latencies of all its hops.

        An all-gather or reduce-scatter is a ring through all ranks. An all-reduce goes through a
        chain inside each node and a tree over nodes, and back. Other transfers reach twice as many
        ranks with each hop. Source: NCCL, src/graph/tuning.cc.
        """
        nodes = spread.size // spread.per_node
        if kind in ("all_gather", "reduce_scatter"):
            inside, between = spread.size - nodes, nodes - 1
        elif kind == "all_reduce":
            inside, between = 2 * (spread.per_node - 1), 2 * _doublings(nodes)
        else:
            hops = _doublings(spread.size)
            inside, between = (hops, 0) if nodes == 1 else (0, hops)
        outside = 0.0 if self.between is None else self.between.latency_us
        return (inside * self.inside.latency_us + between * outside) * 1e-6

    def straggling_over(self, world_size: int) -> float:
        """Return the time lost to the slowest of `world_size` ranks as a share of compute time."""
        return self.straggling * math.log2(max(1.0, world_size / self.devices_per_node))

    @property
    def title(self) -> str:
        """The name, with a note if its efficiencies are assumed."""
        return self.name + ("" if self.measured else " (efficiencies assumed, not measured)")

    def to_yaml(self) -> str:
        """Return the YAML file that describes this fabric."""
        plain = TypeAdapter(Fabric).dump_python(self, mode="json")
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _doublings(size: int) -> int:
    """Return the number of doublings from 1 to at least `size`."""
    return math.ceil(math.log2(size))


def axis_of(transfer: Transfer) -> Axis:
    """Return the axis of a transfer's channel, such as `weight` for `weight_reduce`."""
    return Axis(transfer.channel.removesuffix("_reduce"))


def _stride(case: PlanCase, axis: Axis) -> int:
    """Return the distance in ranks between neighbors in a group along `axis`."""
    topology = case.topology
    match axis:
        case Axis.HEAD:
            return 1 if topology.head_first else topology.context
        case Axis.CONTEXT:
            return topology.head if topology.head_first else 1
        case Axis.DATA:
            return topology.tensor
        case Axis.WEIGHT_DATA | Axis.ZERO1:
            return topology.weight
        case Axis.EXPERT:
            return topology.expert_weight
        case Axis.PIPELINE:
            return topology.stage
        case Axis.EMBEDDING:
            return topology.stage * (topology.pipeline - 1)
    return 1


def known_fabrics() -> list[str]:
    """Return the names of the fabrics that ship with ISP."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_fabric(name: str | Path) -> Fabric:
    """Return the fabric in a YAML file, or one of `known_fabrics` by its name.

    Raises ConfigError with all faults of the file.
    """
    path = Path(name)
    if path.suffix != ".yaml" and not path.exists():
        path = FOLDER / f"{name}.yaml"
        if not path.exists():
            raise ConfigError(
                f"--fabric {name}: neither a file nor a fabric that ships with isp"
                f" ({', '.join(known_fabrics())}); `isp calibrate` measures this machine"
            )
    try:
        file = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _validate(path, file.values, {k: f"line {n}" for k, n in file.lines.items()})


def _validate(path: Path, values: dict[str, Any], origins: dict[KeyPath, str]) -> Fabric:
    """Build the fabric from a file's values; faults name the line and the key."""
    try:
        return TypeAdapter(Fabric).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        faults = describe_faults(error.errors(), origins, KeyTable.of(Fabric))
    raise ConfigError(
        "\n  ".join([f"{path}:", *faults] if len(faults) > 1 else [f"{path}: {faults[0]}"])
    )
