"""Entries of a checkpoint: their names, what each is loaded from, and whole tensors in one process.

    model.NAME             a parameter
    optimizer.NAME.master  its master weights, if they have another dtype than the parameter
    optimizer.NAME.KIND    an optimizer state of it, such as a moment of AdamW
    local.RANK             plain values of one rank, as JSON in a uint8 tensor

NAME is the name of the parameter in the whole model, so entries do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from isp.checkpoint.agreement import CheckpointError, attempt
from isp.checkpoint.boxes import BoxLoadPlanner, Shard
from isp.checkpoint.folder import CheckpointInfo, candidates_at, choose
from isp.checkpoint.manifest import Damaged
from isp.checkpoint.storage import SafeReader, quietly, read_metadata
from isp.core.comm import Channel
from isp.core.layers.module import RowsOf
from isp.core.mesh import Topology
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "CheckpointWeights",
    "Resumed",
    "Targets",
    "TrainState",
    "check_shapes",
    "kinds_by_name",
    "local_key",
    "saved_rows",
    "saved_shards",
    "saved_weights",
    "targets_for",
]

MODEL = "model."
OPTIMIZER = "optimizer."
MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The tensors of a run on this rank, to save them or to load into them."""

    parameters: Sequence[ShardedParameter]
    """All parameters of this rank, with their names in the whole model."""
    optimizer: Zero1Optimizer | None
    """The optimizer; None to save or load only the weights."""
    topology: Topology
    earlier_names: Mapping[str, RowsOf] = field(default_factory=dict)
    """For parameters that earlier versions of ISP saved under another name or inside a larger
    tensor: that tensor's name and the rows of the parameter in it, by the present name."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Plain values of a checkpoint that was loaded; its tensors are in the `TrainState` by then."""

    step: int
    """Number of steps done when the checkpoint was saved."""
    tokens: int
    """Number of tokens that these steps trained on, over all ranks."""
    shared: Mapping[str, Any]
    """The plain values that all ranks saved equally."""
    local: Mapping[str, Any] | None
    """This rank's plain values; None if the run that saved them had another layout."""


class Targets(NamedTuple):
    """Tensors that this rank loads from a checkpoint, and the shards that they are loaded into."""

    shards: dict[str, Shard]
    """Shards to fill, by key."""
    sources: dict[str, RowsOf]
    """For each key of `shards`: the saved tensor to read, and which of its rows (dim 0)."""
    required: dict[str, list[str]]
    """For each weight in the checkpoint: the keys of `shards` that have to be read from it, each
    on at least one rank; otherwise the checkpoint is of another model."""
    anew: dict[str, list[Shard]]
    """Optimizer states to be set to zero, because another update rule saved those in the
    checkpoint; by name of the weight."""


def model_key(name: str) -> str:
    """Return the key of a parameter in a checkpoint."""
    return MODEL + name


def optimizer_key(name: str, kind: str) -> str:
    """Return the key of the master weights or an optimizer state (`kind`) of a parameter."""
    return f"{OPTIMIZER}{name}.{kind}"


def saved_weights(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of the parameters in a checkpoint, by name."""
    return {
        key.removeprefix(MODEL): tensor
        for key, tensor in metadata.state_dict_metadata.items()
        if key.startswith(MODEL) and isinstance(tensor, TensorStorageMetadata)
    }


def state_kinds(keys: Iterable[str]) -> list[str]:
    """Return the kinds of optimizer states that `keys` name, sorted, without master weights."""
    kinds = {key.rpartition(".")[2] for key in keys if key.startswith(OPTIMIZER)}
    return sorted(kinds - {MASTER})


def kinds_by_name(metadata: Metadata) -> dict[str, list[str]]:
    """Return, by name of a parameter, the kinds of optimizer states that a checkpoint has of it."""
    found: dict[str, list[str]] = {}
    for key in metadata.state_dict_metadata:
        name, _, kind = key.removeprefix(OPTIMIZER).rpartition(".")
        if key.startswith(OPTIMIZER) and kind != MASTER:
            found.setdefault(name, []).append(kind)
    return found


def local_key(rank: int) -> str:
    """Return the key of the plain values of rank `rank` in a checkpoint."""
    return f"local.{rank}"


def saved_shards(state: TrainState) -> dict[str, Shard]:
    """Return views of the parameters and optimizer states of this rank, by key, to be saved."""
    if state.optimizer is not None:
        # Wait for the updated weights: after a step, the ranks that updated them may still be
        # sending them, and the views below would have old values.
        for item in state.parameters:
            state.optimizer.published(item.parameter)
    return {shard.key: shard for _, _, shard in _shards(state)}


def saved_rows(
    names: Iterable[str], saved: Collection[str], earlier: Mapping[str, RowsOf]
) -> dict[str, RowsOf]:
    """Return the name and rows of each parameter in a checkpoint with the parameters `saved`.

    A parameter that the checkpoint lacks under its present name is looked up in `earlier`: its
    name and rows in checkpoints of earlier versions.
    """
    by_earlier = (n for n in names if n not in saved and n in earlier and earlier[n].name in saved)
    return {name: RowsOf(name) for name in names} | {name: earlier[name] for name in by_earlier}


def other_rule(state: TrainState, metadata: Metadata) -> str | None:
    """Return an error if a checkpoint has optimizer states of another update rule; else None."""
    there = kinds_by_name(metadata)
    # Leave out the stacked biases of experts, [E, ..]: with muon, earlier versions updated them as
    # matrices, so their states do not show which rule the run had.
    biases = {
        item.name
        for item in state.parameters
        if item.layout.matrices is None and len(item.layout.global_shape) > 1
    }
    own = {name for name, _, shard in _shards(state) if shard.key.startswith(OPTIMIZER)}
    same = [there[name] for name in own - biases if name in there]
    found = sorted(set().union(*(same or there.values())))
    needed = state_kinds(shard.key for _, _, shard in _shards(state))
    if state.optimizer is None or found == needed:
        return None
    name = state.optimizer.config.name
    return (
        f"has the optimizer states {' and '.join(found) or 'of a rule without any'},"
        f" optimizer.name={name} needs {' and '.join(needed) or 'none'}:"
        f" use the rule that saved it, or checkpoint.initial_load_path to begin another run"
        f" (job.name or checkpoint.folder) from its weights"
        f" (checkpoint.initial_load_model_only=true)"
    )


def targets_for(state: TrainState, metadata: Metadata, *, weights_only: bool = False) -> Targets:
    """Return what to load into `state`; with `weights_only` only weights and master weights.

    A weight whose dtype differs from the saved one is loaded from the saved master weights, if
    there are any. Master weights that were not saved, since they were the parameter itself, are
    loaded from the parameter. Optimizer states of a weight that another update rule has saved begin
    at zero. Raises ValueError, with the names, for tensors that the checkpoint lacks.
    """
    saved = metadata.state_dict_metadata
    names = saved_weights(metadata).keys()
    rows = saved_rows([item.name for item in state.parameters], names, state.earlier_names)
    shards, sources = dict[str, Shard](), dict[str, RowsOf]()
    every, kinds = list(_shards(state, weights_only=weights_only)), kinds_by_name(metadata)
    # First find the weights that another update rule trained: the checkpoint has optimizer states
    # of the weight, but lacks one that the present rule needs.
    anew: dict[str, list[Shard]] = {}
    for name, kind, _ in every:
        there = kinds.get(rows[name].name, [])
        if there and kind not in (None, MASTER, *there):
            anew[name] = []
    for name, kind, shard in every:
        if name in anew and kind not in (None, MASTER):
            anew[name].append(shard)
            continue
        weights, master = model_key(rows[name].name), optimizer_key(rows[name].name, MASTER)
        best = master if master in saved else weights
        key = weights if kind is None else optimizer_key(rows[name].name, kind)
        other = kind is None and key in saved and _dtype(saved[key]) != shard.dtype
        source = best if other or kind == MASTER else key
        shards[shard.key], sources[shard.key] = shard, rows[name]._replace(name=source)
    if missing := sorted({found.name for found in sources.values()} - saved.keys()):
        raise ValueError(
            f"the checkpoint lacks {_shortened(missing)}, so it is of another model or optimizer"
        )
    # Each saved weight has to be loaded on some rank: one that the run does not have means that the
    # checkpoint is of another model. A weight is loaded under its own name. If an earlier version
    # saved several present parameters as one weight, it is loaded under the names of all of them.
    required: dict[str, list[str]] = {}
    for name, found in saved_rows(state.earlier_names, names, state.earlier_names).items():
        required.setdefault(model_key(found.name), []).append(model_key(name))
    required = {key: required.get(key, [key]) for key in map(model_key, names)}
    return Targets(shards, sources, required, anew)


def _shards(
    state: TrainState, *, weights_only: bool = False
) -> Iterator[tuple[str, str | None, Shard]]:
    """Yield (name, kind, shard) for each parameter (kind None), its master weights and its states.

    `weights_only` leaves out optimizer states.
    """
    for item in state.parameters:
        yield item.name, None, Shard.of_rows(model_key(item.name), item.parameter, item.layout)
    if state.optimizer is None:
        return
    own = state.optimizer.state_dict()["parameters"]
    for item in state.parameters:
        if (name := item.name) not in own:  # frozen, so the optimizer does not have it
            continue
        part = own[name]
        start, stop = part["rows"]
        for kind, tensor in part["tensors"].items():
            # Master weights in the parameter's own dtype are the parameter itself: do not save it
            # twice.
            is_kept = tensor.dtype != item.parameter.dtype if kind == MASTER else not weights_only
            if is_kept:
                key, rows = optimizer_key(name, kind), (start, stop)
                yield name, kind, Shard.of_rows(key, tensor, item.layout, rows)


def _dtype(saved: object) -> torch.dtype:
    """Return the dtype of an entry in a checkpoint's table of contents, which must be a tensor."""
    assert isinstance(saved, TensorStorageMetadata)
    return saved.properties.dtype


def _shortened(names: list[str]) -> str:
    """Return a list of the first five names, and the number of the others, as text."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def num_elements(metadata: Metadata, key: str, *, most: int) -> int:
    """Return the number of elements of the saved uint8 tensor `key`.

    Raises ValueError if the checkpoint lacks it, or if it has more elements than `most`. The caller
    allocates that many bytes: without the limit, damaged metadata could make it allocate any
    amount.
    """
    saved = metadata.state_dict_metadata.get(key)
    count = -1 if not isinstance(saved, TensorStorageMetadata) else math.prod(saved.size)
    if not 0 <= count <= most:
        raise ValueError(f"the checkpoint lacks {key}, or gives it a size larger than all files")
    return count


def check_shapes(
    info: CheckpointInfo,
    shapes: Mapping[str, tuple[int, ...]],
    earlier_names: Mapping[str, RowsOf],
) -> None:
    """Raise ValueError if the parameters of a checkpoint have other names or shapes than `shapes`.

    Also raises it if the checkpoint is damaged. `earlier_names`: see `TrainState`.
    """
    try:
        saved = saved_weights(read_metadata(info.path, info.manifest.files))
    except Damaged as fault:
        raise ValueError(f"{info.path} is damaged: {fault}") from None
    there = {name: tuple(weight.size) for name, weight in saved.items()}
    rows = saved_rows(shapes, there, earlier_names)
    own = {rows[name].name: rows[name].whole_shape(shape) for name, shape in shapes.items()}
    odd = [name for name in sorted({*there, *own}) if there.get(name) != own.get(name)]
    if odd:
        lines = [f"\n  {n}: {there.get(n, 'none')} there, {own.get(n, 'none')} now" for n in odd]
        more = f"\n  and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise ValueError(
            f"{info.path} belongs to another model, judging by the shapes of its"
            f" parameters:{''.join(lines[:5])}{more}"
        )


class CheckpointWeights:
    """Reads the weights of a checkpoint in one process, as whole tensors, one after the other.

    `path` is a checkpoint, or a folder of checkpoints or of a run, whose newest undamaged one is
    read. The constructor verifies every byte. It raises ValueError if there is no checkpoint, and
    CheckpointError if all are damaged.
    """

    def __init__(self, path: Path) -> None:
        # Call this outside of `choose`, which would turn its ValueError into a CheckpointError.
        found = candidates_at(path)
        info = choose(lambda: found, Channel.solo("checkpoint"))
        assert info is not None
        self.info: CheckpointInfo = info
        try:
            self._metadata = read_metadata(info.path, info.manifest.files)
        except Damaged as fault:
            raise CheckpointError(f"{info.path} is damaged: {fault}") from None
        self._saved = saved_weights(self._metadata)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name."""
        return {name: tuple(saved.size) for name, saved in self._saved.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole parameter on CPU, in the dtype in which it was saved.

        Raises CheckpointError if the files do not contain it as the metadata says.
        """
        saved, key = self._saved[name], model_key(name)
        whole = torch.empty(saved.size, dtype=saved.properties.dtype)

        def read() -> None:
            load(
                {key: Shard.whole(key, whole)},
                storage_reader=SafeReader(self.info.path, self._metadata),
                planner=BoxLoadPlanner({key: RowsOf(key)}),
                no_dist=True,
            )

        with quietly():
            attempt(
                Channel.solo("checkpoint"), f"{self.info.path} is damaged: reading {name}", read
            )
        return whole
