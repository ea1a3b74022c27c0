"""The parts that ranks record and hand in of a profiled step, and the profile made of them.

Parts are files in a folder that all ranks see, so that whoever puts them together need not be one
of them: `isp profile` starts the ranks of each mode anew and compares the modes afterwards.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from isp.comm import Mesh
from isp.config import JobConfig, to_yaml
from isp.metrics import device_name, shared_cores
from isp.models.schedule import schedule_text
from isp.parallel import Mode
from isp.profile import ModeProfile, Profile, RankProfile
from isp.profile.collectives import RankTimes, align
from isp.profile.recorder import RankRecord, Recorder
from isp.profile.totals import mean_totals, timeline, totals
from isp.profile.trace import Event, chrome_trace, torch_events, write_trace
from isp.profile.waits import worst_waits
from isp.train.step import TrainStep

__all__ = [
    "leave_part",
    "parts_folder",
    "recorder_for",
    "torch_profiler",
    "write_profile",
]


_PARTS = "parts"


def recorder_for(step: TrainStep, device: torch.device) -> Recorder:
    """A recorder of what `step` does, on its log."""
    parts: dict[str, nn.Module] = {}
    sites: list[tuple[str, nn.Module]] = []
    for chunk in step.chunks:
        parts.update(chunk.parts())
        for use in (use for block in chunk.weight_blocks() for use in block.uses):
            module = use.layer if use.at is None else use.at
            assert isinstance(module, nn.Module)
            sites.append((use.name, module))
    return Recorder(step.mesh.log, device, parts, sites)


@contextmanager
def torch_profiler(folder: Path, step: TrainStep) -> Iterator[None]:
    """Within it torch.profiler watches; afterwards what it saw lies in `folder`.

    [Note: Nothing under way] A transfer of gloo's ends its entry in the profile from a thread of
    its own, as it arrives, and by then that memory must not be gone. So what `step` has set off for
    a next one is waited for first, and set off anew afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # else it writes to stderr that it starts and stops
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        yield
        step.drain()
    step.weights_changed()
    seen.export_chrome_trace(str(_torch_trace_file(folder, step.mesh.rank)))


def parts_folder(folder: Path, mode: Mode) -> Path:
    """The folder that holds the ranks' parts of `mode` until the profile in `folder` is made."""
    return folder / _PARTS / mode


def leave_part(
    folder: Path,
    recorder: Recorder,
    mesh: Mesh,
    *,
    losses: Sequence[float],
    lead: float,
    first_measured: int,
    traced: int | None,
) -> None:
    """Leave this rank's part in `folder`; `RankPart` says what the numbers are."""
    device = recorder.device
    part = RankPart(
        record=recorder.record(),
        channels=mesh.members,
        clock_lead=lead,
        unix_zero=time.time() - time.perf_counter(),
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        first_measured=first_measured,
        traced=traced,
        device=device_name(device),
        shared_cores=shared_cores(
            device, int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.topology.world_size)))
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    _part_file(folder, mesh.rank).write_bytes(TypeAdapter(RankPart).dump_json(part))


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
    """Of each measured step; None if it is not finite, for which JSON has no word."""
    first_measured: int
    """The recorded step that is the first measured one; as many as there are losses."""
    traced: int | None
    """The recorded step that torch.profiler saw, if any."""
    device: str
    shared_cores: str
    """As in `Profile`."""


def _part_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def _torch_trace_file(folder: Path, rank: int) -> Path:
    return folder / f"torch_{rank}.json"


def write_profile(
    folder: Path,
    config: JobConfig,
    modes: Sequence[JobConfig],
    *,
    world_size: int,
    warmup_steps: int,
    command: str = "",
) -> Profile:
    """Write `profile.json` and `trace.json.gz` to `folder`, and take away the parts they are from.

    The ranks of each of `modes`, which are `config` in some mode, left theirs in `parts_folder`.
    """
    found, trace = [], []
    for number, mode in enumerate(modes):
        into = parts_folder(folder, mode.parallel.tensor.mode)
        read = [_part_file(into, rank).read_bytes() for rank in range(world_size)]
        parts = [TypeAdapter(RankPart).validate_json(text) for text in read]
        one, events = _mode_profile(mode, into, parts, number=number)
        found.append(one)
        trace += events
    first = parts[0]
    profile = Profile(
        created=datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        device=first.device,
        shared_cores=first.shared_cores,
        world_size=world_size,
        warmup_steps=warmup_steps,
        num_steps=len(first.losses),
        config=to_yaml(config),
        modes=tuple(found),
        command=command,
    )
    (folder / "profile.json").write_text(profile.to_json())
    write_trace(folder / "trace.json.gz", trace)
    shutil.rmtree(folder / _PARTS)
    return profile


def _mode_profile(
    config: JobConfig, folder: Path, parts: Sequence[RankPart], *, number: int
) -> tuple[ModeProfile, list[Event]]:
    """The profile of a run of `config`, and the trace of one of its steps.

    `number` sets it apart from other modes whose events go to the same trace.
    """
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
    topology = config.topology(len(parts))
    profile = ModeProfile(
        mode=topology.mode,
        tensor=config.parallel.tensor.size,
        weight=config.parallel.weight.size if topology.mode.facts.gathers_weights else 1,
        data=topology.world_size // config.parallel.tensor.size // config.parallel.pipeline.size,
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
        waits=worst_waits(times, steps, config.parallel),
        plan_grid=schedule_text(
            config.language_model, config.parallel, config.data.num_micro_batches
        )
        if topology.mode.facts.gathers_weights
        else None,
    )
    return profile, _trace(folder, parts, times, steps[typical], mode=topology.mode, number=number)


def _closest_to_median(values: Sequence[float]) -> int:
    median = statistics.median(values)
    return min(range(len(values)), key=lambda i: abs(values[i] - median))


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
        path = _torch_trace_file(folder, rank)
        if traced is not None and path.exists():
            moment = part.unix_zero + zero_here + part.clock_lead - parts[0].clock_lead
            seen = json.loads(path.read_bytes())
            title = f"{mode} rank {rank}"
            events += torch_events(seen, process=first + rank, title=title, zero_seconds=moment)
    return events
