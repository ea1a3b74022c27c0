"""Recorders of profiled steps on each rank, and the profile that rank 0 writes from them."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from isp.config import JobConfig, to_yaml
from isp.core.comm import Mesh
from isp.core.mesh import Mode
from isp.metrics import device_name, shared_cores
from isp.models.rank_plans import schedule_text
from isp.profile import ModeProfile, Profile, RankProfile
from isp.profile.collectives import align
from isp.profile.recorder import RankRecord, Recorder, RegisterHook
from isp.profile.totals import mean_totals, timeline, totals
from isp.profile.trace import Event, chrome_trace, torch_events, write_trace
from isp.profile.waits import worst_waits
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep
from isp.utils.files import write_whole, written_whole

__all__ = ["Measured", "record_of", "recorder_for", "torch_profiler", "write_profile"]


def recorder_for(step: TrainStep, device: torch.device) -> Recorder:
    """Return a recorder of the forwards and backwards, uses of weights and transfers in `step`."""
    parts: dict[str, nn.Module] = {}
    sites: list[tuple[str, RegisterHook]] = []
    for chunk in step.chunks:
        parts.update(chunk.parts())
        for place in (place for block in chunk.weight_blocks() for place in block.uses):
            # A use without a module is a call that mixes tokens: hook into the call instead.
            register: RegisterHook = partial(chunk.position.register_mixing_hook, place.key)
            assert place.at is not None or place.layer is None, place.use.name
            if place.at is not None:
                register = place.at.register_forward_pre_hook
            sites.append((place.use.name, register))
    return Recorder(step.mesh.log, device, parts, sites)


@contextmanager
def torch_profiler(folder: Path, step: TrainStep) -> Iterator[None]:
    """Context that runs torch.profiler and writes its trace to `folder`, for `write_profile`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keep Kineto from writing to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        yield
        # When a gloo transfer arrives, a thread of gloo writes to the transfer's entry in the
        # profile, whose memory must still exist. So wait for the transfers that `step` has launched
        # for the next step before the profiler ends, and launch them again after.
        step.drain()
    step.weights_changed()
    path = _torch_trace(folder, step.mesh.topology.mode, step.mesh.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    written_whole(path, lambda new: profiler.export_chrome_trace(str(new)))


def _torch_trace(folder: Path, mode: Mode, rank: int) -> Path:
    """Return the file of a rank's trace by torch.profiler."""
    return folder / "torch" / f"{mode}_{rank}.json"


def record_of(recorder: Recorder, mesh: Mesh, lead: float) -> str:
    """Return what `recorder` has recorded on this rank as JSON, to be sent to rank 0.

    `lead`: seconds by which this rank's clock is ahead of rank 0's, from `clock_lead`.
    """
    record = replace(
        recorder.record(),
        channels=mesh.members,
        clock_lead=lead,
        unix_zero=time.time() - time.perf_counter(),  # converts the recorder's times to Unix time
    )
    return TypeAdapter(RankRecord).dump_json(record).decode()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The recorded steps of all ranks in one mode."""

    config: JobConfig
    """The configuration in this mode."""
    records: Sequence[str]
    """What each rank has recorded, as the text that `record_of` returns, in rank order."""
    losses: Sequence[float]
    """Loss of each measured step."""
    first: int
    """Index of the first measured step among the recorded ones."""
    traced: int | None
    """Index of the recorded step under torch.profiler; None if there is none."""


def write_profile(
    folder: Path,
    config: JobConfig,
    modes: Sequence[Measured],
    device: torch.device,
    *,
    warmup_steps: int,
    command: str = "",
) -> Profile:
    """Write the profile of `modes` to `folder` (`profile.json`, `trace.json.gz`) and return it.

    Called on rank 0. `trace.json.gz` includes the events of torch.profiler, whose own files are
    removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, trace = [], []
    for number, mode in enumerate(modes):
        one, events = _mode_profile(mode, folder, number=number)
        found.append(one)
        trace += events
    world_size = len(modes[0].records)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    profile = Profile(
        created=datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        device=device_name(device),
        shared_cores=shared_cores(device, ranks_here),
        world_size=world_size,
        warmup_steps=warmup_steps,
        num_steps=len(modes[0].losses),
        config=to_yaml(config, redact=True),
        modes=tuple(found),
        command=command,
    )
    write_whole(folder / "profile.json", profile.to_json())
    write_trace(folder / "trace.json.gz", trace)
    # Remove the traces of torch.profiler, one for each rank: `trace.json.gz` now has their events.
    shutil.rmtree(folder / "torch", ignore_errors=True)
    return profile


def _mode_profile(
    measured: Measured, folder: Path, *, number: int
) -> tuple[ModeProfile, list[Event]]:
    """Return the profile of a mode, and the events of one of its steps for the trace.

    `number` is the index of the mode. All modes are in one trace, where each rank of each mode is a
    process of its own.
    """
    config, losses = measured.config, measured.losses
    records = [TypeAdapter(RankRecord).validate_json(text) for text in measured.records]
    times = align(records)
    steps = [measured.first + number for number in range(len(losses))]
    by_rank = [[totals(own, step) for step in steps] for own in times]
    means = [mean_totals([of_rank[i] for of_rank in by_rank]) for i in range(len(steps))]
    median = statistics.median(mean.step_ms for mean in means)
    # The timeline shows a real step, the one nearest to the median, not an average.
    typical = min(range(len(means)), key=lambda i: abs(means[i].step_ms - median))
    zero = times[0].begins[steps[typical]]
    topology = config.topology(len(records))
    profile = ModeProfile(
        mode=topology.mode,
        tensor=config.parallel.tensor.size,
        weight=config.parallel.weight.size if topology.mode.gathers_weights else 1,
        data=topology.world_size // config.parallel.tensor.size // config.parallel.pipeline.size,
        pipeline=config.parallel.pipeline.size,
        topology=topology.describe(),
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        summary=means[typical],
        ranks=tuple(
            RankProfile(
                rank=rank,
                totals=tuple(by_rank[rank]),
                timeline=timeline(own, steps[typical], number=typical, zero=zero),
                peak_memory_gib=records[rank].peak_memory_gib,
            )
            for rank, own in enumerate(times)
        ),
        waits=worst_waits(times, steps, config.parallel),
        plan_grid=schedule_text(
            trained_model(config), config.parallel, config.data.num_micro_batches
        )
        if topology.mode.gathers_weights
        else None,
    )
    step = steps[typical] if measured.traced is None else measured.traced
    lanes = [timeline(own, step, number=step, zero=times[0].begins[step]) for own in times]
    first = number * len(records)
    events = chrome_trace(lanes, title=topology.mode, first_process=first)
    for rank, record in enumerate(records if measured.traced is not None else ()):
        # torch's events have Unix times. Align them with the recorded ones by the time at which
        # rank 0 began this step, converted to this rank's clock.
        begin = records[0].begins[step] - records[0].clock_lead + record.clock_lead
        events += torch_events(
            json.loads(_torch_trace(folder, topology.mode, rank).read_bytes()),
            process=first + rank,
            title=f"{topology.mode} rank {rank}",
            zero_seconds=record.unix_zero + begin,
        )
    return profile, events
