"""`Checkpointer`: saves a run, chooses the newest good checkpoint, and loads it into any layout.

Saves in the background have a thread of ISP's own in place of torch's `async_save`. See
[Note: Why not async_save] in docs/design/notes/checkpoints.md.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from isp.checkpoint.agreement import CheckpointError, attempt, attempt_first
from isp.checkpoint.boxes import BoxLoadPlanner, BoxSavePlanner, Shard
from isp.checkpoint.folder import (
    Candidates,
    CheckpointFolder,
    CheckpointInfo,
    candidates_at,
    candidates_in,
    choose,
)
from isp.checkpoint.manifest import Damaged, FileRecord, Manifest, SavedTopology
from isp.checkpoint.plain import Plain, from_tensor, to_json, to_tensor
from isp.checkpoint.remote import Uploads
from isp.checkpoint.state import (
    Resumed,
    TrainState,
    local_key,
    num_elements,
    other_rule,
    saved_shards,
    targets_for,
)
from isp.checkpoint.storage import CheckedWriter, SafeReader, quietly, read_metadata
from isp.config.sections import CheckpointConfig
from isp.core.comm import Channel, streams
from isp.core.comm.pinned_memory import zeros
from isp.core.layers.module import RowsOf

__all__ = ["CheckpointInfo", "Checkpointer"]

logger = logging.getLogger(__name__)

_REPORTED_SECONDS = 0.1
"""A wait for an earlier save is logged if it takes longer than this."""
_LAST_SECONDS = 60.0
"""Longest wait for a save in flight, and for a copy to a store, after the run has failed."""


class Checkpointer:
    """Saves and loads checkpoints of a run in `folder`, which all ranks share.

    All methods except `wait` are collectives over the world: every rank calls them in the same
    order. They use a process group of their own on CPU, created here (also a collective): a save in
    the background could otherwise meet a collective of the run on the same group.

    With `async_mode: async`, `save` returns when the state has been copied to CPU memory, and a
    thread writes and publishes it. At most one save is in flight. Leaving the object as a context
    waits for the save in flight and for copies to `upload_to`, but at most for a minute each if the
    run has failed.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        *,
        world: Channel,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.folder = CheckpointFolder(Path(folder))
        self.write_seconds = 0.0
        """Seconds that writing the last checkpoint took, in the foreground or the background."""
        self._config = config
        self._channel = _own_channel(world, timeout_seconds)
        self._first = self._channel.rank == 0
        self._staging = _Staging()
        self._flight: _Flight | None = None
        self._uploads: Uploads | None = None
        if config.upload_to is not None and self._first:
            self._uploads = Uploads(config.upload_to, config.keep_latest_k)

    def at(self, folder: Path, *, keep_latest_k: int = 0) -> Self:
        """Return a checkpointer for another folder that uses the same process group.

        No save may be in flight. The returned one copies nothing to `upload_to`.
        """
        assert self._flight is None
        other = copy.copy(self)
        other.folder = CheckpointFolder(folder)
        other._config = replace(self._config, keep_latest_k=keep_latest_k)
        other._uploads = None
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._flight is not None:
            # If all ranks leave for the same reason, they finish the save. If one is gone, its part
            # of the save never comes: wait for a limited time.
            self._flight.join(_LAST_SECONDS)
            if not self._flight.over:
                logger.warning(
                    "the save of step %d has not finished within %.0f s: the run ends without it",
                    self._flight.step,
                    _LAST_SECONDS,
                )
        if self._uploads is not None:
            self._uploads.wait(None if kind is None else _LAST_SECONDS)

    @property
    def upload_fault(self) -> str | None:
        """Failure of the last copy to `upload_to`, on rank 0; None if there is none."""
        return None if self._uploads is None else self._uploads.fault

    def upload_again(self, info: CheckpointInfo) -> None:
        """Copy a checkpoint to `upload_to` in the background, unless the store has it already.

        A run calls this for the checkpoint that it resumes from: the run that saved it may have
        ended before it was copied.
        """
        if self._uploads is not None:
            self._uploads.put(info.path, only_missing=True)

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        tokens: int,
        shared: Mapping[str, Plain] | None = None,
        local: Mapping[str, Plain] | None = None,
        wait: bool = False,
    ) -> None:
        """Save the state after `step` steps and `tokens` tokens, and publish it as `step_<step>`.

        `shared`: plain values that are equal on all ranks; those of rank 0 are saved. `local`:
        plain values of each rank, which only a run with the same layout gets back. With `wait`, the
        checkpoint has been published on return, also in async mode.

        Raises CheckpointError on all ranks if the save fails on any: the run may continue, and
        older checkpoints are unchanged. A failure in the background is logged when it happens and
        raised by `wait`. If a save is in flight, this waits for it first (logged, if it takes
        time), and then saves even if the earlier save has failed.
        """
        # Wait for an earlier save before the copy below: its thread may still read the staging
        # memory, which `_Staging.copy` overwrites.
        if self._flight is not None and (waited := self._flight.join()) > _REPORTED_SECONDS:
            before = self._flight.step
            logger.info("step %d waited %.1f s until step %d was saved", step, waited, before)
        self._flight = None
        background = self._config.async_mode == "async" and not wait
        shards: dict[str, Shard] = {}

        def collect() -> None:
            # This raises if a value is not plain, or if memory for the copies is lacking. `attempt`
            # then ends the save on all ranks, which would otherwise wait for this rank in torch's
            # collective `save`.
            mine = Shard.whole(local_key(self._channel.rank), to_tensor(dict(local or {})))
            found = {**saved_shards(state), mine.key: mine}
            to_json(dict(shared or {}))
            shards.update(self._staging.copy(found) if background else found)

        attempt(self._channel, f"collecting the state of step {step}", collect)
        optimizer = state.optimizer
        manifest = Manifest(
            step=step,
            tokens=tokens,
            num_updates=-1 if optimizer is None else optimizer.state_dict()["step"],
            topology=SavedTopology.of(state.topology),
            shared=dict(shared or {}),
            saved_at=time.time(),
            files={},
        )
        if background:
            self._flight = _Flight(step, lambda: self._write_in_background(manifest, shards))
        else:
            self._write(manifest, shards)

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error if it failed.

        The error is raised once: a second call returns without it.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.join()
            if flight.error is not None:
                raise flight.error

    def _write_in_background(self, manifest: Manifest, shards: dict[str, Shard]) -> None:
        """Write and publish a checkpoint in the thread of a save.

        Logs an error when it happens, since `wait` may raise it much later.
        """
        try:
            self._write(manifest, shards)
        except CheckpointError as error:
            if self._first:
                logger.error("%s The run continues.", error)
            raise
        except Exception as error:  # a collective failed: a rank is gone, and the run will fail too
            logger.error("saving step %d failed: %s", manifest.step, error)
            raise

    def _write(self, manifest: Manifest, shards: dict[str, Shard]) -> None:
        """Write the shards, publish the checkpoint, delete old ones, and start the upload.

        Raises CheckpointError on all ranks if writing or publishing fails on any. A failed deletion
        or upload is only logged.
        """
        step, begin = manifest.step, time.perf_counter()
        what = f"saving {self.folder.published(step)}"
        try:
            attempt_first(self._channel, what, lambda: self.folder.begin(step))
            answers = attempt(self._channel, what, lambda: self._write_shards(step, shards))
            files = {
                name: FileRecord(*record) for answer in answers for name, record in answer.items()
            }
            complete = manifest.model_copy(update={"files": files})
            attempt_first(self._channel, what, lambda: self._publish(complete))
        except CheckpointError as error:
            if self._first:
                self.folder.abandon(step)
            raise CheckpointError(f"{error}. Older checkpoints are unchanged.") from None
        seconds = self.write_seconds = time.perf_counter() - begin
        if self._first:
            mib = complete.num_bytes / 2**20
            path = self.folder.published(step)
            logger.info("saved %s: %.1f MiB in %.2f s", path, mib, seconds)
            self._prune(step)
            if self._uploads is not None:
                self._uploads.put(path)

    def _write_shards(self, step: int, shards: dict[str, Shard]) -> Plain:
        """Write the boxes assigned to this rank; return (bytes, sha256) of each file, by name."""
        writer = CheckedWriter(self.folder.temporary(step))
        with quietly():
            save(
                shards,
                storage_writer=writer,
                planner=BoxSavePlanner(),
                process_group=self._channel.group,
                no_dist=self._channel.group is None,
            )
        return {name: list(record) for name, record in writer.records.items()}

    def _publish(self, manifest: Manifest) -> None:
        """Check on rank 0 that the files of all ranks are there; write the manifest and publish."""
        folder = self.folder.temporary(manifest.step)
        try:
            manifest.check(folder, contents=False)
        except Damaged as fault:
            raise CheckpointError(
                f"{fault}: do all ranks write to the same file system? Name a folder that all"
                f" machines share"
            ) from None
        manifest.write(folder)
        self.folder.publish(manifest.step)

    def _prune(self, step: int) -> None:
        """Delete old checkpoints, except those that are being uploaded; log a failure."""
        try:
            used = [] if self._uploads is None else self._uploads.unfinished()
            self.folder.prune(self._config.keep_latest_k, newest=step, used=used)
        except OSError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    # -- loading -----------------------------------------------------------------------------

    def choose(self, find: Callable[[], Candidates] | None = None) -> CheckpointInfo | None:
        """Return the first undamaged candidate of those that `find` returns on rank 0, or None.

        Without `find`, the candidates are the checkpoints of the folder, the newest first. Verifies
        every byte. Raises CheckpointError if `find` raises, or all candidates are damaged.
        """
        if self._flight is not None:
            self._flight.join()
        return choose(find or (lambda: candidates_in(self.folder)), self._channel)

    def choose_initial(self, path: Path) -> CheckpointInfo:
        """Return the checkpoint at `path`, or the newest undamaged one in that folder.

        `path` is a checkpoint, a folder of checkpoints, or a run's folder. Verifies every byte.
        Raises CheckpointError if there is no checkpoint, or all are damaged.
        """
        found = self.choose(lambda: candidates_at(path))
        assert found is not None
        return found

    def load(
        self, info: CheckpointInfo, state: TrainState, *, weights_only: bool = False
    ) -> Resumed:
        """Load a checkpoint of any layout into the parameters and optimizer of `state`.

        With `weights_only`, only weights and master weights are loaded. If another update rule of
        the same optimizer trained some weights, their optimizer states begin at zero, with a
        warning. Raises ValueError on all ranks if another optimizer saved the states, and
        CheckpointError on all ranks if the checkpoint is of another model or cannot be read.
        """
        what = f"loading {info.path}"
        manifest, optimizer = info.manifest, state.optimizer
        same_layout = manifest.topology == SavedTopology.of(state.topology)
        has_local = same_layout and not weights_only
        key = local_key(self._channel.rank)
        local, values = torch.empty(0, dtype=torch.uint8), None
        tasks: list[tuple[dict[str, Shard], BoxLoadPlanner, SafeReader]] = []
        anew: dict[str, list[Shard]] = {}

        # Three attempts: prepare, read, decode. If one rank cannot prepare, none enters torch's
        # collective `load`, which would wait for that rank.
        def prepare() -> str | None:
            # Returns the text of an error that the user can correct, which the caller raises as a
            # ValueError on all ranks. `attempt` would turn an exception into a CheckpointError.
            nonlocal local
            metadata = read_metadata(info.path, manifest.files)
            if optimizer is not None and manifest.num_updates < 0 and not weights_only:
                raise CheckpointError(
                    "it was saved without an optimizer: load only its weights, by"
                    " checkpoint.initial_load_path with checkpoint.initial_load_model_only=true"
                )
            if not weights_only and (odd := other_rule(state, metadata)) is not None:
                return odd
            targets = targets_for(state, metadata, weights_only=weights_only)
            shards, sources, required = targets.shards, targets.sources, targets.required
            anew.update(targets.anew)
            if has_local:
                local = local.new_empty(num_elements(metadata, key, most=manifest.num_bytes))
                shards[key], sources[key] = Shard.whole(key, local), RowsOf(key)
            planner = BoxLoadPlanner(sources, required=required)
            tasks.append((shards, planner, SafeReader(info.path, metadata)))
            return None

        def decode() -> None:
            nonlocal values
            values = from_tensor(local) if has_local else None

        if (odd := attempt(self._channel, what, prepare)[0]) is not None:
            raise ValueError(f"{info.path} {odd}")
        attempt(self._channel, what, lambda: self._read(*tasks[0]))
        attempt(self._channel, what, decode)
        self._begin_anew(info, anew)
        if optimizer is not None:
            optimizer.states_changed(None if weights_only else manifest.num_updates)
        return Resumed(
            step=manifest.step,
            tokens=manifest.tokens,
            shared=manifest.shared,
            local=values,
        )

    def _begin_anew(self, info: CheckpointInfo, anew: Mapping[str, Sequence[Shard]]) -> None:
        """Set the optimizer states `anew` to zero, as at the first step of a run, and warn."""
        for shards in anew.values():
            for shard in shards:
                for piece in shard.pieces:
                    piece.data.zero_()
        if anew and self._first:
            logger.warning(
                "%s was saved when another update rule trained %s: the weights are loaded, and the"
                " optimizer states of these parameters begin at zero",
                info.path,
                ", ".join(anew),
            )

    def _read(self, shards: dict[str, Shard], planner: BoxLoadPlanner, reader: SafeReader) -> None:
        """Read the data of `shards` from the files by torch's `load`, a collective."""
        with torch.no_grad(), quietly():
            load(
                dict(shards),
                storage_reader=reader,
                planner=planner,
                process_group=self._channel.group,
                no_dist=self._channel.group is None,
            )


class _Staging:
    """CPU memory for a copy of the shards, reused by every save; pinned for shards on CUDA.

    It takes as many bytes as the shards. torch's `DefaultStager` would take as many as the whole
    tensors of which the shards are views, and in torch 2.11 it copies only the first time.
    """

    def __init__(self) -> None:
        self._copies: dict[str, list[Tensor]] = {}

    def copy(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return a copy of the shards in CPU memory, which training does not change.

        Waits until the copies from the device have arrived. Overwrites the copy of the last call.
        """
        copied, devices = {}, set()
        for key, shard in shards.items():
            data = [piece.data for piece in shard.pieces]
            copies = self._copies.get(key, [])
            # Allocate in the first save, and again for local values, whose size may change.
            if [(c.shape, c.dtype) for c in copies] != [(x.shape, x.dtype) for x in data]:
                copies = [zeros(x.numel(), x.dtype, x.device).view(x.shape) for x in data]
                self._copies[key] = copies
            for target, x in zip(copies, data, strict=True):
                target.copy_(x, non_blocking=True)  # do not wait for each copy
                devices.add(x.device)
            copied[key] = shard.with_data(copies)
        for device in devices:  # one wait for all copies, after the last has been queued
            if (arrived := streams.mark(device)) is not None:
                arrived.synchronize()
        return copied


class _Flight:
    """A save in flight: a thread that calls `write`. If it fails, `error` has the exception."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self.error: Exception | None = None
        self._write = write
        # A daemon thread: else the process could not exit while it waits for a rank that is gone.
        self._thread = threading.Thread(target=self._run, name=f"save step {step}", daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float | None = None) -> float:
        """Wait until the thread has ended, or for `timeout_seconds`; return the seconds waited."""
        begin = time.perf_counter()
        self._thread.join(timeout_seconds)
        return time.perf_counter() - begin

    @property
    def over(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error


def _own_channel(world: Channel, timeout_seconds: float) -> Channel:
    """Return a channel over the ranks of `world` with a gloo group that only checkpoints use."""
    if world.group is None:
        return Channel.solo("checkpoint")
    group = dist.new_group(
        dist.get_process_group_ranks(world.group),
        backend="gloo",
        timeout=timedelta(seconds=timeout_seconds),
        use_local_synchronization=True,
        group_desc="checkpoint",
    )
    return Channel(group, name="checkpoint")
