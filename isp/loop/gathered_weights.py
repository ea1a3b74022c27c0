"""`GatheredWeights`: gathers full weights of a sharded model block by block, and writes them."""

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
"""The dtypes of weights; ranks send each other an index into this tuple."""


class GatheredWeights:
    """Gathers the full weights of a model from the shards of ranks; all methods are collectives."""

    def __init__(self, traced: TracedModel, built: BuiltModel, mesh: Mesh, dtype: str) -> None:
        self._traced, self._built, self._mesh, self._dtype = traced, built, mesh, dtype
        self._own = {item.name: item for item in built.parameters}
        """Parameters of this rank's pipeline stage, by name."""
        assert self._own.keys() <= dict(traced.shape.named_parameters()).keys()

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights to `folder` on rank 0; see `ParallelRun.save_pretrained`."""
        host, what, first = self._mesh.host, f"writing {folder}", self._mesh.rank == 0
        model: Any = self._traced.model
        if hasattr(model, "peft_config"):
            # All at once, because adapters are small enough for the host.
            wholes = self._wholes(lambda shape: shape.requires_grad)
            trained = {name: whole.cpu() for name, whole in wholes if first}
            attempt_first(host, what, lambda: model.save_pretrained(folder, state_dict=trained))
            return
        writers: list[WeightWriter] = []
        with ExitStack() as opened:

            def begin() -> None:
                writers.append(opened.enter_context(WeightWriter(folder)))

            def write(weights: dict[str, Tensor]) -> None:
                for name, weight in self._traced.interface.published(model, weights).items():
                    writers[0].add(name, weight)

            def finish() -> None:
                opened.close()
                _save_config(model, folder, self._dtype)

            # `attempt_first` runs each step on rank 0 and raises its error on all ranks: otherwise
            # the others would wait for rank 0 in the next gather.
            attempt_first(host, what, begin)
            for weights in self._by_blocks(wanted=first):
                on_host = {name: weight.cpu() for name, weight in weights.items()}
                attempt_first(host, what, partial(write, on_host))
            attempt_first(host, what, finish)

    def named(
        self, dtype: torch.dtype | None, *, wanted: bool, merge_adapters: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full weights if they are `wanted`; see `ParallelRun.named_weights`.

        A rank that does not want them takes part in the gathers and yields nothing.
        """
        traced = self._traced
        model: Any = traced.model
        adapted = hasattr(model, "peft_config")
        merges = merge_adapters and adapted
        inner = model.get_base_model() if merges else model
        for weights in self._by_blocks(wanted=wanted):
            own = merged(model, traced.shape, weights) if merges else weights
            # `published` renames weights to the names in a saved base model. There are no such
            # names for adapters, so if these stay separate, all weights keep their names.
            published = own if adapted and not merges else traced.interface.published(inner, own)
            del weights, own  # frees this block before the next one is gathered
            while published:
                name = next(iter(published))
                weight = published.pop(name)
                converts = dtype is not None and weight.is_floating_point()
                yield name, weight.to(dtype) if converts else weight
                del weight  # so that the caller can free it

    def _by_blocks(self, *, wanted: bool) -> Iterator[dict[str, Tensor]]:
        """Yield all saved weights and buffers by name, a dict for each block.

        A block is complete, because some of its weights are saved joined or split. On a rank where
        they are not `wanted`, the dicts are empty.
        """
        blocks = tuple(f"{block}." for block in self._traced.trace.blocks)

        def block(of: tuple[str, Tensor]) -> str | None:
            """Return the prefix of the block that a weight belongs to; None outside of blocks."""
            return next((b for b in blocks if of[0].startswith(b)), None)

        for _, group in groupby(self._wholes(), key=block):
            yield {name: whole for name, whole in group if wanted}
        buffers = kept_buffers(self._traced.model) if wanted else ()
        yield {name: buffer.clone() for name, buffer in buffers}

    def _wholes(
        self, chosen: Callable[[nn.Parameter], bool] = lambda _: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full parameters of all pipeline stages, in the model's order.

        `chosen` returns True for each parameter to yield, given the parameter on the meta device.
        """
        # A rank does not know the dtypes of other stages' weights, but must allocate them.
        shapes, stages = dict(self._traced.shape.named_parameters()), self._mesh[Axis.PIPELINE]
        names = [name for name, shape in shapes.items() if chosen(shape)]
        kinds = torch.full((1, len(names)), -1, device=self._built.parameters[0].parameter.device)
        for place, name in enumerate(names):
            if name in self._own:
                kinds[0, place] = _DTYPES.index(self._own[name].parameter.dtype)
        of_stages = stages.all_gather(kinds, tag=Tag(tensor="dtypes")).wait().cpu()  # [p, n]
        # The maximum over stages finds, for each weight, its dtype and a stage that holds it.
        for name, kind, source in zip(names, *map(Tensor.tolist, of_stages.max(0)), strict=True):
            if stages.rank == source:
                whole = self.whole(self._own[name])
            else:
                whole = torch.empty(shapes[name].shape, dtype=_DTYPES[kind], device=kinds.device)
            yield name, stages.broadcast_(whole, source=source, tag=Tag(tensor=name)).wait()

    def whole(self, item: ShardedParameter) -> Tensor:
        """Return the full tensor of a parameter of this rank's stage, in new memory."""
        shard, layout = item.parameter.detach(), item.layout
        if layout.parts == 1:
            return shard.clone()
        dim, shape = layout.dim, list(shard.shape)
        # Pad to the longest shard, because an all-gather needs equal lengths.
        lengths = [sum(b - a for a, b in layout.intervals(i)) for i in range(layout.parts)]
        shape[dim] = max(lengths)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        channel = self._mesh[Axis.WEIGHT]
        whole = channel.all_gather(padded, dim=dim, tag=Tag(tensor=item.name)).wait()
        found = shard.new_empty(layout.global_shape)
        # A shard may be several intervals of the full tensor: copy each to its place.
        for index, piece in enumerate(whole.split(max(lengths), dim)):
            begin = 0
            for start, stop in layout.intervals(index):
                own = piece.narrow(dim, begin, stop - start)
                found.narrow(dim, start, stop - start).copy_(own)
                begin += stop - start
        return found


def _save_config(model: Any, folder: Path, dtype: str) -> None:
    """Write config.json, and generation_config.json if the model has one; transformers only."""
    if not hasattr(model, "config"):
        return
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
