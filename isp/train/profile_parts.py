"""The parts that ranks record and hand in of a profiled step, and the profile made of them.

Parts are files in a folder that all ranks see, so that whoever puts them together need not be one
of them: `isp profile` starts the ranks of each mode anew and compares the modes afterwards.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import nn

from isp.comm import Mesh
from isp.config import JobConfig, to_yaml
from isp.metrics import device_name, shared_cores
from isp.models.schedule import schedule_text
from isp.parallel import Topology
from isp.profile import ModeProfile, Profile, RankProfile
from isp.profile.collectives import RankTimes, align
from isp.profile.recorder import RankRecord, Recorder
from isp.profile.totals import mean_totals, timeline, totals
from isp.profile.trace import Event, chrome_trace, torch_events, write_trace
from isp.profile.waits import WaitSettings, worst_waits
from isp.train.step import TrainStep

__all__ = [
    "ProfiledMode",
    "RankPart",
    "finite",
    "mode_profile",
    "part_of",
    "profile_of",
    "recorder_for",
    "torch_profiler",
    "torch_trace_file",
    "write_profile",
]


def recorder_for(step: TrainStep, device: torch.device) -> Recorder:
    """A recorder of what `step` does, on its log."""
    parts: dict[str, nn.Module] = {}
    sites: list[tuple[str, nn.Module]] = []
    for chunk in step.chunks:
        parts.update(chunk.parts())
        for visit in (visit for block in chunk.weight_blocks() for visit in block.visits):
            module = visit.at if visit.layer is None else visit.layer
            assert isinstance(module, nn.Module)
            sites.append((visit.name, module))
    return Recorder(step.mesh.log, device, parts, sites)


@contextmanager
def torch_profiler(folder: Path, step: TrainStep) -> Iterator[None]:
    """Within it torch.profiler watches; afterwards what it saw lies in `folder`.

    [Note: Nothing under way] A transfer of gloo's ends its entry in the profile from a thread of
    its own, as it arrives, and by then that memory must not be gone. So what `step` has set off for
    a next one is waited for first, and set off anew afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it tells stderr that it starts and stops
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        yield
        step.drain()
    step.weights_changed()
    seen.export_chrome_trace(str(torch_trace_file(folder, step.mesh.rank)))


def part_of(
    recorder: Recorder,
    mesh: Mesh,
    *,
    losses: Sequence[float | None],
    lead: float,
    first_measured: int,
    traced: int | None,
) -> RankPart:
    """This rank's part."""
    device = recorder.device
    return RankPart(
        record=recorder.record(),
        channels=mesh.members,
        clock_lead=lead,
        unix_zero=time.time() - time.perf_counter(),
        losses=tuple(losses),
        first_measured=first_measured,
        traced=traced,
        device=device_name(device),
        shared_cores=shared_cores(
            device, int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.topology.world_size)))
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """One rank's record of a run."""

    record: RankRecord
    channels: dict[str, tuple[int, ...]]
    """The ranks of each of its channels."""
    clock_lead: float
    """Seconds by which its `time.perf_counter` is ahead of rank 0's."""
    unix_zero: float
    """Unix time, in seconds, when its `time.perf_counter` was 0."""
    losses: tuple[float | None, ...]
    """Of each measured step."""
    first_measured: int
    """The recorded step that is the first measured one; as many as there are losses."""
    traced: int | None
    """The recorded step that torch.profiler saw, if any."""
    device: str
    shared_cores: str
    """As in `Profile`."""

    def write(self, folder: Path, rank: int) -> None:
        """Leave the part of `rank` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        _file(folder, rank).write_bytes(TypeAdapter(RankPart).dump_json(self))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankPart:
        """Read `write`'s part."""
        return TypeAdapter(RankPart).validate_json(_file(folder, rank).read_bytes())


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def torch_trace_file(folder: Path, rank: int) -> Path:
    """The file of a rank's torch.profiler trace."""
    return folder / f"torch_{rank}.json"


class ProfiledMode(NamedTuple):
    """All ranks' parts put together."""

    profile: ModeProfile
    device: str
    shared_cores: str
    trace: list[Event]
    """Of one step."""


def mode_profile(
    config: JobConfig, folder: Path, world_size: int, *, number: int = 0
) -> ProfiledMode:
    """The profile of a run of `config`, from the parts that its ranks left in `folder`.

    `number` tells it from other modes whose events go to the same trace.
    """
    parts = [RankPart.read(folder, rank) for rank in range(world_size)]
    times = align(
        [part.record for part in parts],
        [part.channels for part in parts],
        [part.clock_lead for part in parts],
    )
    losses = parts[0].losses
    steps = [parts[0].first_measured + number for number in range(len(losses))]
    by_rank = [[totals(own, step) for step in steps] for own in times]
    means = [mean_totals([of_rank[i] for of_rank in by_rank]) for i in range(len(steps))]
    typical = _closest_to_median([mean.step_ms for mean in means])
    zero = times[0].begins[steps[typical]]
    topology = config.topology(world_size)
    profile = ModeProfile(
        mode=topology.mode,
        tensor=config.parallel.tensor.size,
        weight=config.parallel.weight.size if topology.mode.facts.gathers_weights else 1,
        data=_data_size(topology, config),
        pipeline=config.parallel.pipeline.size,
        topology=topology.describe(),
        losses=losses,
        summary=means[typical],
        ranks=tuple(
            RankProfile(
                rank=rank,
                totals=tuple(by_rank[rank]),
                timeline=timeline(own, steps[typical], number=typical, zero=zero),
                peak_memory_gib=parts[rank].record.peak_memory_gib,
            )
            for rank, own in enumerate(times)
        ),
        waits=worst_waits(
            times,
            steps,
            WaitSettings(mode=config.parallel.tensor.mode, weight=config.parallel.weight),
        ),
        plan_grid=schedule_text(config.model, config.parallel, config.data.micro_num)
        if topology.mode.facts.gathers_weights
        else None,
    )
    return ProfiledMode(
        profile,
        parts[0].device,
        parts[0].shared_cores,
        _trace(folder, parts, times, steps[typical], mode=topology.mode, number=number),
    )


def _closest_to_median(values: Sequence[float]) -> int:
    median = statistics.median(values)
    return min(range(len(values)), key=lambda i: abs(values[i] - median))


def _data_size(topology: Topology, config: JobConfig) -> int:
    parallel = config.parallel
    return topology.world_size // parallel.tensor.size // parallel.pipeline.size


def _trace(
    folder: Path,
    parts: Sequence[RankPart],
    times: Sequence[RankTimes],
    typical: int,
    *,
    mode: str,
    number: int,
) -> list[Event]:
    """The step that torch.profiler saw, with its events; else the typical one with our own."""
    traced = parts[0].traced
    step = typical if traced is None else traced
    zero = times[0].begins[step]
    first = number * len(parts)
    lanes = [timeline(own, step, number=step, zero=zero) for own in times]
    events = chrome_trace(lanes, title=mode, first_process=first)
    zero_here = parts[0].record.begins[step]
    for rank, part in enumerate(parts):
        path = torch_trace_file(folder, rank)
        if traced is not None and path.exists():
            moment = part.unix_zero + zero_here + part.clock_lead - parts[0].clock_lead
            seen = json.loads(path.read_bytes())
            title = f"{mode} rank {rank}"
            events += torch_events(seen, process=first + rank, title=title, zero_seconds=moment)
    return events


def profile_of(
    config: JobConfig,
    modes: Sequence[ProfiledMode],
    *,
    world_size: int,
    warmup_steps: int,
    command: str,
) -> Profile:
    """All modes together, with what they ran on."""
    return Profile(
        created=datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        device=modes[0].device,
        shared_cores=modes[0].shared_cores,
        world_size=world_size,
        warmup_steps=warmup_steps,
        num_steps=len(modes[0].profile.losses),
        config=to_yaml(config),
        modes=tuple(mode.profile for mode in modes),
        command=command,
    )


def finite(loss: float) -> float | None:
    """The loss, or None where JSON has no word for it."""
    return loss if math.isfinite(loss) else None


def write_profile(folder: Path, profile: Profile, trace: Sequence[Event]) -> None:
    """Write `profile.json` and `trace.json.gz` to `folder`."""
    (folder / "profile.json").write_text(profile.to_json())
    write_trace(folder / "trace.json.gz", trace)
