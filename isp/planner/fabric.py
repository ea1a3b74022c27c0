"""A machine in numbers: what devices compute, how fast bytes travel inside and between nodes."""

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
    """`device`: one rank's device."""

    name: str
    """As its maker calls it."""
    cuda_names: tuple[str, ...] = ()
    """Names that CUDA gives such devices, by which `isp train --parallel auto` finds the fabric."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Kind of kernels on it, which decides what they keep."""
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
    """Share of the peak that attention reaches."""
    scan_efficiency: Share = 0.05
    """Share of the peak that scans reach; assumed where nobody has measured it."""
    gb_per_second: Positive
    """Bandwidth of the memory, in 1e9 bytes a second."""
    memory_efficiency: Share = 0.8
    """Share of it that passes over memory reach."""
    layer_us: NotNegative = 0.0
    """Gaps between the kernels of a block's forward; its backward has twice as much."""

    @property
    def usable_bytes(self) -> int:
        """The bytes for tensors."""
        return int(self.memory_gib * 2**30 * self.usable)


@section("link")
class LinkSpec:
    """`inside` or `between`: what a device sends with, inside a node or to another one."""

    gb_per_second: Positive
    """One way, of one device, in 1e9 bytes a second."""
    latency_us: NotNegative
    """Of a hop from one device to the next: see `Fabric.latency`."""
    efficiency: Share = 1.0
    """Share of the bandwidth that collectives reach."""

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth reached."""
        return self.gb_per_second * 1e9 * self.efficiency


@section("host")
class HostSpec:
    """`host`: a node's own memory, and the link of each device to it."""

    memory_gib: Positive | None = None
    """Memory of a node that its ranks share, in GiB; null: not known, and no limit."""
    usable: Share = 0.9
    """Share of the memory for what a plan counts; the rest is the system's and the processes'."""
    gb_per_second: Positive = 25.0
    """Each way, of one device, in 1e9 bytes a second."""

    def usable_bytes(self, ranks: int) -> int | None:
        """The bytes for each of a node's `ranks`; None: no limit is known."""
        if self.memory_gib is None:
            return None
        return int(self.memory_gib * 2**30 * self.usable / ranks)


class Spread(NamedTuple):
    """A group's ranks over nodes."""

    size: int
    per_node: int
    """Ranks of the group in one node."""


@section("")
class Fabric:
    """Nodes of equal devices; ranks fill one node after the other."""

    name: str
    """For people."""
    source: str = ""
    """Origin of the numbers."""
    measured: bool = False
    """Whether efficiencies were measured on such a machine; false: assumed, as `source` says."""
    devices_per_node: Ranks
    """Ranks in a node."""
    device: DeviceSpec
    """A rank's device."""
    inside: LinkSpec
    """Between the devices of a node."""
    between: LinkSpec | None = None
    """Between nodes, of one device; null: there is one node."""
    host: HostSpec = field(default_factory=HostSpec)
    """The memory of a node."""
    straggling: NotNegative = 0.01
    """By what share of its compute a step grows whenever the number of nodes doubles: all ranks
    wait for the slowest."""

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on CPU."""
        return self.device.kind == "cpu"

    def check(self, world_size: int) -> None:
        """Raise ConfigError if this machine cannot have so many ranks."""
        if world_size > self.devices_per_node and self.between is None:
            raise ConfigError(
                f"--world {world_size} is more than the {self.devices_per_node} devices of"
                f" {self.name}, which has one node: give a fabric with a `between` section"
            )

    def wire(self, case: PlanCase, axis: Axis) -> str:
        """The wire the group along `axis` uses: `inside` or `between`."""
        spread = self.spread(case, axis)
        return "between" if spread.size > spread.per_node else "inside"

    def spread(self, case: PlanCase, axis: Axis) -> Spread:
        """The spread of a group along `axis` over nodes."""
        size, stride = case.size(axis), _stride(case, axis)
        node = self.devices_per_node
        if (size - 1) * stride < node:
            return Spread(size, size)
        return Spread(size, max(1, node // stride))

    def seconds(self, case: PlanCase, transfer: Transfer) -> float:
        """The time of a transfer with nothing else under way.

        Ring collectives between nodes are as fast as the links of all the group's ranks in a node
        together, but no faster than inside; an all-to-all sends by each rank's own link.
        """
        if transfer.kind in (TO_HOST, FROM_HOST):
            return transfer.sent_bytes / (self.host.gb_per_second * 1e9)
        spread = Spread(2, 2) if transfer.kind == "send" else self.spread(case, axis_of(transfer))
        if transfer.kind == "send" and case.topology.stage >= self.devices_per_node:
            spread = Spread(2, 1)
        latency, inside = self.latency(spread, transfer.kind), self.inside
        if spread.size == spread.per_node:
            return latency + transfer.sent_bytes / inside.bytes_per_second
        assert self.between is not None, "checked before"
        if transfer.kind == "all_to_all":
            away = (spread.size - spread.per_node) / (spread.size - 1)
            there = transfer.sent_bytes * away / self.between.bytes_per_second
            here = transfer.sent_bytes * (1 - away) / inside.bytes_per_second
            return latency + max(there, here)
        rate = min(inside.bytes_per_second, spread.per_node * self.between.bytes_per_second)
        return latency + transfer.sent_bytes / rate

    def latency(self, spread: Spread, kind: str) -> float:
        """Seconds of the hops that a transfer of no bytes takes.

        A gather or a reduce-scatter is a ring through all ranks; an all-reduce chains the ranks of
        a node and is a tree over nodes, there and back; of the others, all hops double those
        reached. Source: NCCL, src/graph/tuning.cc.
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
        """The cost of the slowest of so many ranks, as a share of compute."""
        return self.straggling * math.log2(max(1.0, world_size / self.devices_per_node))

    @property
    def title(self) -> str:
        """The name, and whether its speed is assumed."""
        return self.name + ("" if self.measured else " (efficiencies assumed, not measured)")

    def to_yaml(self) -> str:
        """The file that gives this fabric."""
        plain = TypeAdapter(Fabric).dump_python(self, mode="json")
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _doublings(size: int) -> int:
    return math.ceil(math.log2(size))


def axis_of(transfer: Transfer) -> Axis:
    """The axis along which a transfer goes."""
    return Axis(transfer.channel.removesuffix("_reduce"))


def _stride(case: PlanCase, axis: Axis) -> int:
    """Ranks from one member of a group to the next."""
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
    """Names of the fabrics that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_fabric(name: str | Path) -> Fabric:
    """The fabric in a YAML file, or one of `known_fabrics`.

    Raises ConfigError with every fault of the file.
    """
    path = Path(name)
    if path.suffix != ".yaml" and not path.exists():
        path = FOLDER / f"{name}.yaml"
        if not path.exists():
            raise ConfigError(
                f"--fabric {name}: neither a file nor a fabric that comes with isp:"
                f" {', '.join(known_fabrics())}; `isp calibrate` measures this machine"
            )
    try:
        file = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _validate(path, file.values, {k: f"line {n}" for k, n in file.lines.items()})


def _validate(path: Path, values: dict[str, Any], origins: dict[KeyPath, str]) -> Fabric:
    try:
        return TypeAdapter(Fabric).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        faults = describe_faults(error.errors(), origins, KeyTable.of(Fabric))
    raise ConfigError(
        "\n  ".join([f"{path}:", *faults] if len(faults) > 1 else [f"{path}: {faults[0]}"])
    )
