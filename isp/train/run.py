"""A training run from start to end: `main` is what `isp train` runs on each rank."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from isp.checkpoint.agreement import CheckpointError, exchange
from isp.config import JobConfig, to_yaml
from isp.core.comm import Mesh, RollCall
from isp.core.comm.cuda import compute_deterministically
from isp.core.mesh import ContextExchange
from isp.core.torch_private import Store
from isp.data.mixture import MixedDataset
from isp.data.packing import ExampleDataset
from isp.models.huggingface.config_json import beyond_positions
from isp.step.host_memory import check_host_memory
from isp.step.job_models import check_models
from isp.step.setup import make_world
from isp.train.data import StepData, open_for_rank
from isp.train.folder.environment import Environment, RankPlace
from isp.train.folder.log_files import run_logging
from isp.train.monitor.out_of_memory import MemoryGuard, memory_owners
from isp.train.signals import StopRequest
from isp.train.state.resume import open_on_all_ranks
from isp.train.trainer import Trainer

__all__ = ["ChooseExchange", "main"]

logger = logging.getLogger(__name__)


class ChooseExchange(Protocol):
    """Type of the function that chooses how context ranks exchange keys and values.

    The planner has one (`isp.planner.exchange`). `isp.train` may not import the planner, so it is
    an argument of `main`.
    """

    def __call__(
        self, config: JobConfig, world_size: int, memory_bytes: int | None, *, on_cpu: bool
    ) -> tuple[JobConfig, str]:
        """Return `config` with `auto` replaced by an exchange, and the reason for the choice.

        `memory_bytes` is the memory of the smallest device; None if unknown.
        """


GRACE_SECONDS = 15.0
"""Time that other ranks have to report where they wait, once a collective has timed out."""


def main(
    config: JobConfig, *, store: Store | None = None, choose_exchange: ChooseExchange | None = None
) -> signal.Signals | None:
    """Train as `config` describes: on this rank of torchrun's world, or in this process alone.

    Returns the signal that stopped the run on this rank, after saving; None if it finished, or was
    stopped by its time limit or by a signal to another rank.
    `store`: a torch store that already connects the ranks; None: make one. `choose_exchange`
    replaces `auto` in `parallel.sequence_2D.exchange`; None: `auto` means a gather.

    Raises ValueError (or OSError), before any process group starts, for mistakes in configuration
    and data; ValueError on all ranks if the run's folder cannot be opened; OutOfMemory; and
    CheckpointError, on rank 0 at the end, if the last checkpoint is not in `checkpoint.upload_to`.
    """
    begin = time.monotonic()  # Begin here: the setup, too, counts toward training.max_time.
    world = make_world(config, store)
    device = world.device
    # Keep the configuration as the user gave it: the run's config.yaml gets `given`.
    topology, given = config.topology(world.size), config
    config = config.for_ranks(world.size)
    # These checks come before the process groups: every rank fails at once with the same message,
    # and none waits for another in a collective.
    config.require_packages()
    check_models(config)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first_here = world.rank - int(os.environ.get("LOCAL_RANK", "0"))
    check_host_memory(config, topology, local_ranks, first_here)
    datasets = open_for_rank(config, topology, world.rank)
    torch.manual_seed(config.training.seed)
    if config.training.deterministic:
        compute_deterministically()
    with ExitStack() as stack:
        stack.enter_context(world)
        mesh = Mesh(topology, world.rank)
        start = stack.enter_context(open_on_all_ranks(config, mesh))
        folder = start.folder
        stack.enter_context(run_logging(folder.log_file(world.rank), rank=world.rank))
        here = tuple(RankPlace.here(device))
        # `exchange` is a collective: each rank gets the places of all ranks.
        places = [RankPlace(*place) for place in exchange(mesh.host, here)]
        if world.rank == 0:
            folder.describe(to_yaml(given, redact=True), Environment.of(places).to_json())
        for number, sizes in enumerate(topology.sizes()):
            logger.info("%-11s %s", "" if number else f"mode {topology.mode}", sizes)
        logger.info("run folder  %s", folder.path)
        if folder.logs is not None:
            logger.info("logs        %s, on the machine of each rank", folder.logs)
        if start.note:
            logger.warning("%s", start.note)
        if start.copied is not None:
            url = config.checkpoint.upload_to
            logger.info("copied      step %d from %s to %s", start.copied, url, start.checkpoints)
        if datasets is not None:
            for name, dataset in (("train", datasets.train), ("valid", datasets.valid)):
                if dataset is not None:
                    logger.info("%-11s %s", name, dataset.summary)
            if isinstance(datasets.train, MixedDataset):
                num_sequences = config.sequences(topology) * config.training.steps
                shares = datasets.train.shares(num_sequences)
                logger.info("%-11s in this run: %s", "mixture", shares)
            if isinstance(datasets.train, ExampleDataset):
                logger.info("%-11s %s", "example", datasets.train.shown(datasets.tokenizer))
        model, seq_len = config.model, config.data.seq_len
        if warning := beyond_positions(model.hf, model.hf_overrides, seq_len):
            logger.warning("%s", warning)
        if config.topology(world.size).context > 1:
            config = _with_exchange(config, mesh, device, choose_exchange)
        data = stack.enter_context(StepData(config, datasets, mesh, device))
        stop = StopRequest()
        profiler, snapshots = config.profiler, None
        if profiler.enable_memory_snapshot:
            snapshots = (folder.logs or folder.path) / profiler.save_memory_snapshot_folder
        guard = stack.enter_context(MemoryGuard(device, rank=world.rank, snapshots=snapshots))
        trainer = Trainer(
            config,
            mesh,
            device,
            start=start,
            data=data,
            stop=stop,
            hostnames=[place.hostname for place in places],
            begin=begin,
        )
        guard.watch(trainer.where, partial(memory_owners, trainer.train_step))
        stack.enter_context(trainer.checkpointer)
        grace_seconds = min(GRACE_SECONDS, config.comm.train_timeout_seconds)
        roll_call = RollCall(mesh.host, mesh.opened, grace_seconds=grace_seconds)
        # Handle signals only from here on: during the setup a signal simply ends the process. No
        # step is lost then, and it also works in a collective that waits for other ranks.
        with stop, roll_call:
            finished = trainer.run()
    # Raise only here, after all contexts have ended: some of them wait for all ranks.
    if finished and (fault := trainer.checkpointer.upload_fault) is not None:
        raise CheckpointError(
            f"training has finished, but {fault}: the same command, without checkpoint.load_step"
            " and checkpoint.auto_resume=false, copies it again and trains no step"
        )
    return None if finished else stop.received


def _with_exchange(
    config: JobConfig,
    mesh: Mesh,
    device: torch.device,
    choose: ChooseExchange | None,
) -> JobConfig:
    """Return `config` with the exchange of keys and values that `choose` picks; a collective."""
    if choose is None:
        if config.parallel.sequence_2D.exchange is ContextExchange.AUTO:
            logger.info(
                "context ranks exchange keys and values by gather:"
                " parallel.sequence_2D.exchange=auto chooses ring only in `isp train`, which plans"
                " the memory of both; use exchange=ring to have it here"
            )
        return config
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    # All ranks pass the smallest memory of any rank: `choose` then returns the same on each.
    least = min(exchange(mesh.host, memory)) or None
    config, why = choose(config, mesh.topology.world_size, least, on_cpu=device.type == "cpu")
    logger.info("context ranks exchange keys and values by %s", why)
    return config
