"""The weights of a checkpoint in one process, one whole tensor after another."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from isp.checkpoint.agreement import CheckpointError, attempt
from isp.checkpoint.boxes import BoxLoadPlanner, Shard
from isp.checkpoint.choice import CheckpointInfo, candidates_at, choose
from isp.checkpoint.manifest import Damaged
from isp.checkpoint.state import model_key, saved_weights
from isp.checkpoint.storage import SafeReader, quietly, read_metadata
from isp.core.comm import Channel
from isp.core.layers.module import RowsOf

__all__ = ["WholeWeights"]


class WholeWeights:
    """The weights of the checkpoint at `path`, of the newest good one if there are several.

    Every byte is verified first. Raises ValueError if there is none, CheckpointError if none is
    good.
    """

    def __init__(self, path: Path) -> None:
        found = candidates_at(path)  # no checkpoint is a ValueError, all damaged a CheckpointError
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
        """The shape of each parameter, by name."""
        return {name: tuple(saved.size) for name, saved in self._saved.items()}

    def read(self, name: str) -> Tensor:
        """A parameter, whole, in CPU memory, in the dtype that it was trained in.

        Raises CheckpointError if what lies in the files is no such tensor.
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
