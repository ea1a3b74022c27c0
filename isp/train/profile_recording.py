"""Recording a training step on a rank: where its hooks go, and what the rank hands in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from isp.comm import Mesh
from isp.metrics import device_name, shared_cores
from isp.profile.recorder import Recorder
from isp.train.profile_parts import RankPart, torch_trace_file
from isp.train.step import TrainStep

__all__ = ["part_of", "recorder_for", "torch_profiler"]


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
    """What this rank hands in."""
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
