"""The parts that ranks record of profiled steps, and the profile that rank 0 makes of them."""

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

__all__ = ["RankPart", "part_of", "parts_from", "recorder_for", "torch_profiler", "write_profile"]


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
    """Within it torch.profiler watches; afterwards `folder` has what it saw, till `write_profile`.

    [Note: Nothing under way] A transfer of gloo's ends its entry in the profile from a thread of
    its own, as it arrives, and by then that memory must not be gone. So what `step` has set off for
    a next one is waited for first, and set off anew afterwards.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to stderr that it starts
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        yield
        step.drain()
    step.weights_changed()
    path = _torch_trace(folder, step.mesh.topology.mode, step.mesh.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(path))


def _torch_trace(folder: Path, mode: Mode, rank: int) -> Path:
    return folder / "torch" / f"{mode}_{rank}.json"


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


def part_of(
    recorder: Recorder,
    mesh: Mesh,
    *,
    losses: Sequence[float],
    lead: float,
    first_measured: int,
    traced: int | None,
) -> str:
    """This rank's part, as JSON to be sent to others; `RankPart` says what the numbers are."""
    device = recorder.device
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.topology.world_size)))
    part = RankPart(
        record=recorder.record(),
        channels=mesh.members,
        clock_lead=lead,
        unix_zero=time.time() - time.perf_counter(),
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        first_measured=first_measured,
        traced=traced,
        device=device_name(device),
        shared_cores=shared_cores(device, ranks_here),
    )
    return TypeAdapter(RankPart).dump_json(part).decode()


def parts_from(texts: Sequence[str]) -> list[RankPart]:
    """The parts of all ranks, in rank order, that `part_of` gave."""
    return [TypeAdapter(RankPart).validate_json(text) for text in texts]


def write_profile(
    folder: Path,
    config: JobConfig,
    modes: Sequence[tuple[JobConfig, Sequence[RankPart]]],
    *,
    warmup_steps: int,
    command: str = "",
) -> Profile:
    """Write `profile.json` and `trace.json.gz` to `folder`: of `config` in each of `modes`."""
    folder.mkdir(parents=True, exist_ok=True)
    found, trace = [], []
    for number, (mode, parts) in enumerate(modes):
        one, events = _mode_profile(mode, folder, parts, number=number)
        found.append(one)
        trace += events
    first = modes[0][1][0]
    profile = Profile(
        created=datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        device=first.device,
        shared_cores=first.shared_cores,
        world_size=len(modes[0][1]),
        warmup_steps=warmup_steps,
        num_steps=len(first.losses),
        config=to_yaml(config),
        modes=tuple(found),
        command=command,
    )
    (folder / "profile.json").write_text(profile.to_json())
    write_trace(folder / "trace.json.gz", trace)
    shutil.rmtree(folder / "torch", ignore_errors=True)
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
    mode: Mode,
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
        path = _torch_trace(folder, mode, rank)
        if traced is not None and path.exists():
            moment = part.unix_zero + zero_here + part.clock_lead - parts[0].clock_lead
            seen = json.loads(path.read_bytes())
            title = f"{mode} rank {rank}"
            events += torch_events(seen, process=first + rank, title=title, zero_seconds=moment)
    return events
