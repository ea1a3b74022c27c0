"""`profile_ranks`: what `isp profile` runs on each rank: a few recorded steps in each mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isp.checkpoint.agreement import attempt_first, exchange
from isp.config import JobConfig
from isp.core.comm import Mesh
from isp.core.mesh import Mode
from isp.core.optim.update_rules import learning_rate
from isp.metrics.device import reset_peak_memory
from isp.profile import Profile
from isp.profile.collectives import clock_lead
from isp.step.job_models import trained_model
from isp.step.setup import make_world
from isp.step.train_step import make_train_step
from isp.train.data import StepData, open_for_rank
from isp.train.folder.run_folder import explained, make_unique, run_name
from isp.train.garbage import collected_every
from isp.train.profiling.recording import (
    Measured,
    record_of,
    recorder_for,
    torch_profiler,
    write_profile,
)

__all__ = ["ProfileOptions", "config_for", "profile_ranks"]


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `isp profile`: which modes, and how many steps of each."""

    modes: tuple[Mode, ...] = tuple(Mode)
    """Modes to profile, one after the other."""
    warmup_steps: int = 2
    """Number of steps before the measured ones."""
    steps: int = 5
    """Number of measured steps."""
    with_torch: bool = True
    """True to run one more step under torch.profiler and add its events to the trace."""
    command: str = ""
    """The command line of the profile, as typed."""


def config_for(config: JobConfig, mode: Mode, world_size: int) -> JobConfig:
    """Return `config` in another mode, with the same tensor size.

    In isp the weight size is the configured one, or, if that is 1, all ranks of a pipeline stage.
    Raises ValueError if the sizes do not fit.
    """
    parallel = config.parallel
    weight = parallel.weight
    if mode.gathers_weights and weight.size == 1:
        weight = replace(weight, size=max(1, world_size // parallel.pipeline.size))
    tensor = replace(parallel.tensor, mode=mode)
    changed = replace(config, parallel=replace(parallel, tensor=tensor, weight=weight))
    changed.topology(world_size)  # raises if the sizes do not fit
    return changed.for_ranks(world_size)


def _make_folder(config: JobConfig) -> Path:
    """Make a new folder `outputs/<job>/profile/<time>`; raise ValueError if that fails."""
    folder = Path(config.job.dump_folder) / config.job.name / "profile"
    with explained(f"job.dump_folder={config.job.dump_folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        return make_unique(folder.absolute(), run_name())


def profile_ranks(
    config: JobConfig, options: ProfileOptions, *, note: Callable[[str], None] = lambda _: None
) -> tuple[Profile, Path] | None:
    """Profile each mode on this rank of torchrun's world, or in this process alone.

    Rank 0 calls `note` with a line of progress before each mode.
    Returns the profile and its folder on rank 0, None on others. Raises ValueError (or OSError),
    before any process group starts, for mistakes in configuration and data.
    """
    world = make_world(config)
    configs = [config_for(config, mode, world.size) for mode in options.modes]
    topologies = [c.topology(world.size) for c in configs]
    datasets = [open_for_rank(c, t, world.rank) for c, t in zip(configs, topologies, strict=True)]
    found, folder = [], None
    with world, collected_every(1) as give_memory_back:
        modes = zip(configs, topologies, datasets, strict=True)
        for number, (c, topology, read) in enumerate(modes, start=1):
            if world.rank == 0:
                steps = options.warmup_steps + options.steps + options.with_torch
                mode = c.parallel.tensor.mode
                note(f"profiling {mode} ({number} of {len(configs)} modes): {steps} steps")
            mesh = Mesh(topology, world.rank)
            folder = folder or Path(
                attempt_first(mesh.host, "making a folder", lambda: str(_make_folder(config)))
            )
            with StepData(c, read, mesh, world.device) as data:
                found.append(_profile_mode(c, options, mesh, world.device, data, folder))
            give_memory_back(1)  # free the model of this mode before the next one is built
        if world.rank != 0 or folder is None:
            return None
        profile = write_profile(
            folder,
            config,
            found,
            world.device,
            warmup_steps=options.warmup_steps,
            command=options.command,
        )
        return profile, folder


def _profile_mode(
    config: JobConfig,
    options: ProfileOptions,
    mesh: Mesh,
    device: torch.device,
    data: StepData,
    folder: Path,
) -> Measured:
    """Build the model in one mode; run warm-up, measured and traced steps; a collective."""
    torch.manual_seed(config.training.seed)
    reset_peak_memory(device)
    step = make_train_step(
        trained_model(config),
        config,
        mesh,
        device,
    )
    lead = clock_lead(mesh.host)
    losses: list[float] = []

    def take(number: int) -> None:
        """Run step `number`, counted from 0, and keep its loss."""
        lr = learning_rate(
            number,
            peak=config.optimizer.lr,
            total_steps=config.training.steps,
            config=config.lr_scheduler,
        )
        losses.append(step(data.training(number), lr).loss)

    last = options.warmup_steps + options.steps
    # Record from the last warm-up step on: its end launches the first gathers of measured steps.
    watched = max(0, options.warmup_steps - 1)
    for number in range(watched):
        take(number)
    with recorder_for(step, device) as recorder:
        for number in range(watched, last):
            recorder.begin_step()
            take(number)
        recorder.begin_step()  # ends the last measured step
        if options.with_torch:
            with torch_profiler(folder, step):
                # The recorded step that began above has only the start of torch.profiler: begin
                # another one, for the step that is traced.
                recorder.begin_step()
                take(last)
                recorder.begin_step()
        step.drain()
    return Measured(
        config=config,
        records=exchange(mesh.host, record_of(recorder, mesh, lead)),
        losses=losses[options.warmup_steps : last],
        first=options.warmup_steps - watched,
        traced=last - watched + 1 if options.with_torch else None,
    )
