"""`parallelize`: somebody else's model, trained from somebody else's loop.

B batch, S sequence
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isp.checkpoint.agreement import attempt_first
from isp.comm import Mesh
from isp.comm.cuda import compute_deterministically
from isp.comm.tag import Tag
from isp.config import JobConfig, load_config
from isp.data.batch import MicroBatch, document_bounds
from isp.data.config import DataConfig
from isp.layers.loss import IGNORED
from isp.models.folder import WeightWriter
from isp.models.model import TracedModel
from isp.models.pretrained import begun_by_the_model
from isp.parallel import Axis, Topology
from isp.settings.section import section
from isp.train.callers_graphs import CallersGraphs, TokenScores, padded
from isp.train.host_memory import check_memory_of_states
from isp.train.parameter_guard import ParameterGuard
from isp.train.run import make_world
from isp.train.step import StepOutcome, StepWork, make_train_step
from isp.weights.parameter import ShardedParameter
from model.config import ModelConfig

__all__ = ["ParallelRun", "parallelize"]


def parallelize(model: nn.Module, config: JobConfig | str | Path) -> ParallelRun:
    """Spread `model` over the ranks, in place; its modules and the names of parameters stay.

    A causal language model of transformers (adapters of PEFT put on or not), or a module of
    `nn.Linear`, `nn.Embedding` and norms that is called with tokens and positions and calls
    `isp.attention`. `config` is a configuration or its file; of it count `parallel`, `training`,
    `optimizer`, `comm`, and of `model` how to compute (`checkpoint`, `checkpoint_offload`,
    `checkpoint_segment`, `loss_chunk_tokens`, `attention_backend`); other sections of the file are
    not read. Ranks are torchrun's. A model on the meta device gets the weights that it would begin
    with, by `training.seed`, each rank its part alone. Weights that are frozen
    (`requires_grad=False`) stay so; a model whose weights all are, such as a reference beside the
    trained one, gives `loss` and `log_probs` without gradients. Raises ValueError, before any
    process group starts, for a model or sizes that are not supported.
    """
    if not isinstance(config, JobConfig):
        config = load_config(config, kind=_LoopConfig, unread=_UNREAD)
    if config.training.global_batch_size is not None:
        raise ValueError(
            f"training.global_batch_size={config.training.global_batch_size}: the batch"
            f" of isp.parallelize is the sequences that ranks give to loss: leave the key out"
        )
    given = f"the {type(model).__name__} that isp.parallelize is given"
    config.model.check_beside(given)
    _check_parameters(model)
    config = replace(config, data=replace(config.data, micro_num=1))  # of each call of `loss`
    traced = TracedModel(
        model,
        recomputation=config.model.recomputation,
        attention_backend=config.model.attention_backend,
        loss_chunk_tokens=config.model.loss_chunk_tokens,
        gives_scores=True,
        weights=begun_by_the_model(model),
    )
    traced.check_layout(config.parallel, config.parallel.tensor.size)  # rows: as they come
    world = make_world(config)
    topology = Topology.create(world.size, traced.with_head_size(config.parallel))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    check_memory_of_states(config, topology, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), trained)
    backend = world.backend if dist.is_initialized() else None
    if backend is None:
        world.__enter__()
    if config.training.deterministic:
        compute_deterministically()
    mesh = Mesh(topology, world.rank, backend=backend)
    return ParallelRun(traced, config, mesh, world.device)


_UNREAD = ("job", "data", "lr_scheduler", "validation", "metrics", "checkpoint", "profiler")
"""Sections of a run that the caller's loop takes the place of."""


@section("")
class _LoopConfig(JobConfig):
    """A configuration whose model and data are the caller's."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """How to compute; its sizes are nobody's."""
    data: DataConfig = field(default_factory=lambda: DataConfig(source="the caller's own"))

    def _check_model(self) -> None:
        """The trace of the caller's model says what fits."""


def _check_parameters(model: nn.Module) -> None:
    """Raise ValueError for a model without weights, or with others than numbers."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} is of {parameter.dtype}: isp trains models of floating-point weights, not"
                f" quantised ones"
            )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters")


class ParallelRun:
    """A model under way: its loss, its steps, its weights.

        run = isp.parallelize(model, "config.yaml")
        for input_ids, labels in data:  # e.g. by DistributedSampler(.., run.dp_size, run.dp_rank)
            loss = run.loss(input_ids, labels)
            run.step(loss)
        run.save_pretrained(folder)

    The ranks of a tensor group are given the same rows, the data ranks each their own. Between
    steps nothing is under way: parameters (this rank's shards) may be read, and what is written
    into them, on all ranks that have them, counts.
    """

    def __init__(
        self, traced: TracedModel, config: JobConfig, mesh: Mesh, device: torch.device
    ) -> None:
        self.model = traced.model
        self._traced = traced
        self.config = config
        self.mesh = mesh
        self.device = device
        self.train_step = make_train_step(
            config, mesh, device, model=traced, weights_may_change=True
        )
        mesh.set_timeout(config.comm.init_timeout_seconds)
        self._has_stepped = False
        self._guard = ParameterGuard(self.model, self.train_step.built.parameters)
        self._graphs = CallersGraphs(self.train_step, mesh)
        self._pending: tuple[Tensor, StepWork, RemovableHandle] | None = None
        """The loss to go backward from, what it was found of, and what keeps others from it."""

    @property
    def dp_rank(self) -> int:
        """The data rank, of `dp_size`; those of one rank share their rows."""
        return self.mesh[Axis.DATA].rank

    @property
    def dp_size(self) -> int:
        """Data ranks, each with rows of its own."""
        return self.mesh[Axis.DATA].size

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the labels of all ranks, to be given to `step`; [].

        `input_ids`, `labels` and `position_ids` [B, S] are whole rows. As in transformers, `labels`
        are the tokens themselves, -100 where there is nothing to predict, and are shifted here;
        None: every token but the first of each document. Documents that are packed in a row begin
        where `position_ids` restart. The host waits for none of them that are in its own memory, so
        page-locked ones are not to be filled again before the step is over. Its gradient
        is this rank's part; without gradients it is an evaluation. Raises ValueError for shapes
        that do not fit, RuntimeError for weights that since `parallelize` were frozen, thawed,
        replaced or converted; so does its backward outside of `step`.
        """
        self._graphs.refuse("loss")
        self._pending = None  # what the last call began is dropped
        batch = self._batch(input_ids, labels, position_ids)
        self._guard.check(trains=torch.is_grad_enabled())
        if torch.is_grad_enabled() and not self.train_step.built.trained:
            raise RuntimeError("all weights are frozen: call run.loss under torch.no_grad()")
        if not torch.is_grad_enabled():
            found = self.train_step.evaluate([[batch]])
            return torch.tensor(math.nan if found is None else found, dtype=torch.float64)
        step = self.train_step
        work = step.start([batch])
        loss = step.forward(work, 0)
        loss = loss + (step.over_ranks(work.total) - loss.detach())
        self._pending = loss, work, loss.register_hook(_refuse_backward)
        return loss

    def log_probs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> TokenScores:
        """The log-probability of each label, with its entropy and log-sum-exp, each [B, S].

        Of place t of a row that is log p(labels[t]) by the tokens before it, of logits divided by
        `temperature`; 0, without a gradient, at the first token of a document and where a label is
        -100. The same on all ranks of a sequence, in the caller's order, float32 at least; logits
        never exist as a whole. `input_ids`, `labels` and `position_ids` are as in `loss`; None: the
        tokens. Rows may be of any length; what `attention_mask` [B, S] leaves out, on whichever
        side, is neither seen nor scored. Compute any scalar of it and give that to `backward`;
        several may be alive until then. Under `torch.no_grad()` nothing is kept. Raises ValueError
        for shapes that do not fit, and with pipeline stages.
        """
        if self.mesh[Axis.PIPELINE].size > 1:
            raise ValueError(
                f"log_probs with parallel.pipeline.size={self.mesh[Axis.PIPELINE].size}: only the"
                f" last stage has logits. Use tensor and weight ranks instead, or run.loss"
            )
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be above 0")
        self._pending = None
        length = input_ids.shape[-1]
        if attention_mask is not None or length % self.mesh[Axis.TENSOR].size:
            input_ids, labels, position_ids = padded(
                self.mesh[Axis.TENSOR].size, input_ids, labels, position_ids, attention_mask
            )
        batch = self._batch(input_ids, labels, position_ids, skip_first=True)
        self._guard.check(trains=torch.is_grad_enabled())
        scores = self._graphs.scores(batch, len(input_ids), temperature)
        return TokenScores(*scores[:, :, :length])

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a scalar that the caller made of `log_probs`.

        Any number of times before a `step`: gradients add up, those of data ranks, too; the ranks
        of a sequence compute the same scalar, which counts once. Nothing is divided by anything:
        see `count`. Raises RuntimeError where no graph of `log_probs` is alive.
        """
        self._guard.check(trains=True)
        self._graphs.backward(loss)

    def count(self, mask: Tensor) -> Tensor:
        """The sum of `mask`, the same on the ranks of a sequence, over data ranks; [], float64."""
        total = mask.to(self.device).sum().double()
        return self.mesh[Axis.DATA].all_reduce(total, tag=Tag(tensor="count")).wait()

    def zero_grad(self) -> None:
        """Drop the graphs of `log_probs`, and the gradients since the last step."""
        self._graphs.drop()

    def step(self, loss: Tensor | None = None, lr: float | None = None) -> StepOutcome:
        """Reduction, clipping and update, after the backward of `loss`; `lr` None: `optimizer.lr`.

        Without a loss, behind `backward`; the outcome's loss is the sum of what that was given,
        over data ranks. Raises RuntimeError for any loss but the one that the last call of `loss`
        gave, as it is, and where there was no `backward`.
        """
        lr = self.config.optimizer.lr if lr is None else lr
        if loss is None:
            outcome = self._graphs.update(lr)
        else:
            if self._pending is None or self._pending[0] is not loss:
                raise RuntimeError(
                    "step takes the loss that the last call of loss gave, as it is, once; what was"
                    " made of log_probs goes to backward, and step() is called without it"
                )
            (_, work, refusal), self._pending = self._pending, None
            refusal.remove()
            self._guard.check(trains=True)
            self.train_step.backward(loss, last=True)
            outcome = self.train_step.finish(work, lr)
        if not self._has_stepped:
            self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
            self._has_stepped = True
        return outcome

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as transformers does, so that `from_pretrained` loads them.

        All ranks call it; rank 0 writes, block by block, in the dtype of training. Adapters
        of PEFT are written as PEFT writes them, alone. Raises CheckpointError on all ranks if rank
        0 cannot write.
        """
        self._guard.check(trains=False)
        folder, host, what = Path(folder), self.mesh.host, f"writing {folder}"
        model: Any = self.model
        if hasattr(model, "peft_config"):
            trained = {p.name: self._whole(p) for p in self.train_step.built.trained}
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
                _save_config(model, folder, self.config.training.dtype)

            attempt_first(host, what, begin)
            for weights in self._by_blocks(self.train_step.built.parameters):
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
                whole = self._whole(item)
                if self.mesh.rank == 0:
                    found[item.name] = whole
            yield found
        yield {name: buffer.cpu() for name, buffer in _kept_buffers(self.model)}

    def _whole(self, item: ShardedParameter) -> Tensor:
        """The whole of a parameter, in CPU memory."""
        shard, layout = item.parameter.detach(), item.layout
        if layout.parts == 1:
            return shard.cpu()
        dim, shape = layout.dim, list(shard.shape)
        lengths = [sum(b - a for a, b in layout.intervals(i)) for i in range(layout.parts)]
        shape[dim] = max(lengths)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        channel = self.mesh[Axis.WEIGHT]
        whole = channel.all_gather(padded, dim=dim, tag=Tag(tensor=item.name)).wait()
        pieces = zip(whole.split(max(lengths), dim), lengths, strict=True)
        return torch.cat([piece.narrow(dim, 0, length) for piece, length in pieces], dim).cpu()

    def _batch(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        *,
        skip_first: bool = False,
    ) -> MicroBatch:
        """`skip_first`: labels of documents' first tokens are ignored."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [batch, sequence], got {list(input_ids.shape)}")
        rows, length = input_ids.shape
        if not input_ids.numel():
            raise ValueError(f"input_ids of shape {list(input_ids.shape)} have no tokens")
        ranks = self.mesh[Axis.TENSOR].size
        if length % ranks:
            raise ValueError(
                f"rows of {length} tokens do not divide by parallel.tensor.size={ranks}: pad them"
                f" to {-(-length // ranks) * ranks}, with labels of {IGNORED}"
            )
        if position_ids is None:
            position_ids = torch.arange(length).expand(rows, length)
        for name, given in (("labels", labels), ("position_ids", position_ids)):
            if given is not None and given.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must be of the shape of input_ids, {list(input_ids.shape)}, got"
                    f" {list(given.shape)}"
                )
        begins = torch.ones_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = position_ids.diff(dim=1) != 1
        if labels is None:
            labels, skip_first = input_ids, True
        if skip_first:
            labels = labels.masked_fill(begins.to(labels.device), IGNORED)
        self._check_labels(labels)
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        cu_seqlens = document_bounds(begins.flatten().cpu())
        return MicroBatch(input_ids, targets, position_ids, cu_seqlens).to(self.device)

    def _check_labels(self, labels: Tensor) -> None:
        """Raise ValueError for one that is no token: its loss would be of nothing."""
        size = self._traced.trace.vocab_size
        foreign = labels[(labels != IGNORED) & ((labels < 0) | (labels >= size))]
        if foreign.numel():
            raise ValueError(
                f"labels has {foreign[0].item()}: give tokens below {size}, or {IGNORED} where"
                f" there is nothing to predict"
            )


def _refuse_backward(_: Tensor) -> None:
    """Raise RuntimeError where a loss goes backward by itself: no gradient would be used."""
    raise RuntimeError(
        "the loss went backward outside of step: leave out loss.backward(), clipping and an"
        " optimizer of your own, all of which run.step(loss, lr=..) does"
    )


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
