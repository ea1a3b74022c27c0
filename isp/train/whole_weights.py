"""Whole weights of a model that is spread over ranks, block by block, and folders of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.checkpoint.agreement import attempt_first
from isp.comm import Mesh
from isp.comm.tag import Tag
from isp.models.build import BuiltModel
from isp.models.folder import WeightWriter
from isp.models.model import TracedModel
from isp.parallel import Axis
from isp.weights.parameter import ShardedParameter

__all__ = ["WholeWeights"]


class WholeWeights:
    """The whole weights of a model of which each rank has its part."""

    def __init__(self, traced: TracedModel, built: BuiltModel, mesh: Mesh, dtype: str) -> None:
        self._traced, self._built, self._mesh, self._dtype = traced, built, mesh, dtype

    def save_pretrained(self, folder: Path) -> None:
        """As `ParallelRun.save_pretrained`."""
        host, what = self._mesh.host, f"writing {folder}"
        model: Any = self._traced.model
        if hasattr(model, "peft_config"):
            trained = {p.name: self.whole(p) for p in self._built.trained}
            attempt_first(host, what, lambda: model.save_pretrained(folder, state_dict=trained))
            return
        writers: list[WeightWriter] = []
        with ExitStack() as opened:

            def begin() -> None:
                writers.append(opened.enter_context(WeightWriter(folder)))

            def write(weights: dict[str, Tensor]) -> None:
                for name, weight in self._traced.host.published(model, weights).items():
                    writers[0].add(name, weight)

            def finish() -> None:
                opened.close()
                _save_config(model, folder, self._dtype)

            attempt_first(host, what, begin)
            for weights in self._by_blocks(self._built.parameters):
                attempt_first(host, what, partial(write, weights))
            attempt_first(host, what, finish)

    def _by_blocks(self, parameters: Iterable[ShardedParameter]) -> Iterator[dict[str, Tensor]]:
        """All that is saved, in CPU memory: block by block, as some are saved in other pieces.

        A collective; ranks other than the first keep nothing.
        """
        blocks = tuple(f"{block}." for block in self._traced.trace.blocks)

        def block(item: ShardedParameter) -> str | None:
            return next((b for b in blocks if item.name.startswith(b)), None)

        for _, group in groupby(parameters, key=block):
            found = {}
            for item in group:
                whole = self.whole(item)
                if self._mesh.rank == 0:
                    found[item.name] = whole
            yield found
        yield {name: buffer.cpu() for name, buffer in _kept_buffers(self._traced.model)}

    def whole(self, item: ShardedParameter) -> Tensor:
        """The whole of a parameter, in CPU memory."""
        shard, layout = item.parameter.detach(), item.layout
        if layout.parts == 1:
            return shard.cpu()
        dim, shape = layout.dim, list(shard.shape)
        lengths = [sum(b - a for a, b in layout.intervals(i)) for i in range(layout.parts)]
        shape[dim] = max(lengths)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        channel = self._mesh[Axis.WEIGHT]
        whole = channel.all_gather(padded, dim=dim, tag=Tag(tensor=item.name)).wait()
        pieces = zip(whole.split(max(lengths), dim), lengths, strict=True)
        return torch.cat([piece.narrow(dim, 0, length) for piece, length in pieces], dim).cpu()


def _save_config(model: Any, folder: Path, dtype: str) -> None:
    """Write what belongs to a model of transformers beside its weights; nothing for another."""
    if not hasattr(model, "config"):
        return
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _kept_buffers(model: nn.Module) -> Sequence[tuple[str, Tensor]]:
    """The buffers that belong to a model's weights."""
    kept = model.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
