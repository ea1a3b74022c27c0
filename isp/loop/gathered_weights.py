"""Whole weights of a model that is spread over ranks, block by block, and folders of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.checkpoint.agreement import attempt_first
from isp.core.comm import Mesh
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.loop.peft_adapters import merged
from isp.models.build import BuiltModel
from isp.models.huggingface.weight_files import WeightWriter
from isp.models.loading import kept_buffers
from isp.models.traced_model import TracedModel

__all__ = ["GatheredWeights"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class GatheredWeights:
    """The whole weights of a model of which each rank has its part; all methods are collectives."""

    def __init__(self, traced: TracedModel, built: BuiltModel, mesh: Mesh, dtype: str) -> None:
        self._traced, self._built, self._mesh, self._dtype = traced, built, mesh, dtype
        self._own = {item.name: item for item in built.parameters}
        assert self._own.keys() <= dict(traced.shape.named_parameters()).keys()

    def save_pretrained(self, folder: Path) -> None:
        """As `ParallelRun.save_pretrained`."""
        host, what, first = self._mesh.host, f"writing {folder}", self._mesh.rank == 0
        model: Any = self._traced.model
        if hasattr(model, "peft_config"):
            wholes = self._wholes(lambda shape: shape.requires_grad)
            trained = {name: whole.cpu() for name, whole in wholes if first}
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
            for weights in self._by_blocks(wanted=first):
                on_host = {name: weight.cpu() for name, weight in weights.items()}
                attempt_first(host, what, partial(write, on_host))
            attempt_first(host, what, finish)

    def named(
        self, dtype: torch.dtype | None, *, wanted: bool, merge_adapters: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """As `ParallelRun.named_weights`; nothing where they are not `wanted`."""
        traced = self._traced
        model: Any = traced.model
        adapted = hasattr(model, "peft_config")
        merges = merge_adapters and adapted
        inner = model.get_base_model() if merges else model
        for weights in self._by_blocks(wanted=wanted):
            own = merged(model, traced.shape, weights) if merges else weights
            # Names of folders (experts one by one) know no adapters: a PeftModel keeps its own.
            published = own if adapted and not merges else traced.host.published(inner, own)
            del weights, own  # with the next block there is none of this one
            while published:
                name = next(iter(published))
                weight = published.pop(name)
                converts = dtype is not None and weight.is_floating_point()
                yield name, weight.to(dtype) if converts else weight
                del weight

    def _by_blocks(self, *, wanted: bool) -> Iterator[dict[str, Tensor]]:
        """All that is saved: block by block, as some are saved in other pieces.

        Ranks where they are not `wanted` keep nothing.
        """
        blocks = tuple(f"{block}." for block in self._traced.trace.blocks)

        def block(of: tuple[str, Tensor]) -> str | None:
            return next((b for b in blocks if of[0].startswith(b)), None)

        for _, group in groupby(self._wholes(), key=block):
            yield {name: whole for name, whole in group if wanted}
        buffers = kept_buffers(self._traced.model) if wanted else ()
        yield {name: buffer.clone() for name, buffer in buffers}

    def _wholes(
        self, chosen: Callable[[nn.Parameter], bool] = lambda _: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Parameters of all pipeline stages, whole, in the order of the model.

        Those that are `chosen`, by what they are in the model without memory.
        """
        shapes, stages = dict(self._traced.shape.named_parameters()), self._mesh[Axis.PIPELINE]
        names = [name for name, shape in shapes.items() if chosen(shape)]
        kinds = torch.full((1, len(names)), -1, device=self._built.parameters[0].parameter.device)
        for place, name in enumerate(names):
            if name in self._own:
                kinds[0, place] = _DTYPES.index(self._own[name].parameter.dtype)
        of_stages = stages.all_gather(kinds, tag=Tag(tensor="dtypes")).wait().cpu()  # [p, n]
        for name, kind, source in zip(names, *map(Tensor.tolist, of_stages.max(0)), strict=True):
            if stages.rank == source:
                whole = self.whole(self._own[name])
            else:
                whole = torch.empty(shapes[name].shape, dtype=_DTYPES[kind], device=kinds.device)
            yield name, stages.broadcast_(whole, source=source, tag=Tag(tensor=name)).wait()

    def whole(self, item: ShardedParameter) -> Tensor:
        """The whole of a parameter of this rank, in memory of its own."""
        shard, layout = item.parameter.detach(), item.layout
        if layout.parts == 1:
            return shard.clone()
        dim, shape = layout.dim, list(shard.shape)
        lengths = [sum(b - a for a, b in layout.intervals(i)) for i in range(layout.parts)]
        shape[dim] = max(lengths)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        channel = self._mesh[Axis.WEIGHT]
        whole = channel.all_gather(padded, dim=dim, tag=Tag(tensor=item.name)).wait()
        found = shard.new_empty(layout.global_shape)
        for index, piece in enumerate(whole.split(max(lengths), dim)):
            begin = 0
            for start, stop in layout.intervals(index):
                own = piece.narrow(dim, begin, stop - start)
                found.narrow(dim, start, stop - start).copy_(own)
                begin += stop - start
        return found


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
