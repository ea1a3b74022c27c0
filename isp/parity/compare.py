"""`isp check`: layouts of a small model against the plain one, in float64 on CPU.

Compared are the loss, every gradient, their norm, the weights after a step, and how often each
weight is gathered and its gradient reduced, with what the plan says.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.comm.tag import Purpose
from isp.core.comm.transfer_log import TimedTransfer
from isp.core.mesh import Axis, ParallelConfig
from isp.core.mesh.topology import Topology
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import StepResult, Zero1Optimizer
from isp.core.weights.declare import WeightHolder, declared_uses, weight_names
from isp.core.weights.prefetch_plan import PrefetchPlan, WeightOpKind
from isp.models.build import BuiltModel, build_model, trained_layouts
from isp.parity.forked import RankError, run_ranks
from isp.parity.layouts import TOKENS, Layout
from isp.parity.reference import (
    Outputs,
    Reference,
    make_reference,
    make_rows,
    modules_of,
)
from isp.parity.subjects import Subject
from isp.step.train_step import StepOutcome, TrainStep

__all__ = [
    "CASES",
    "TOLERANCE",
    "Check",
    "CheckCase",
    "Differences",
    "Verdict",
    "worst_of",
]

TOLERANCE = 1e-9
"""Largest difference that is none, of float64 sums in other orders."""

_Counts = Counter[tuple[Purpose, str]]

_WORDS = {Purpose.WEIGHT: "gathered", Purpose.WEIGHT_GRADIENT: "reduced"}

_LEAST_SCALE = 1e-6
"""Tensors smaller than this part of the largest one are held against that part of it: a gradient
that is zero in exact arithmetic is the noise of larger ones."""


class CheckCase(NamedTuple):
    """One way to train in a layout."""

    packed: bool
    """Rows of several documents, joined, in up to two micro-batches; else rows apart in one."""
    recomputed: bool
    """All blocks, or as many as a run asks for; else none."""

    def __str__(self) -> str:
        return (
            f"{'packed' if self.packed else 'not packed'}"
            f", {'recomputed' if self.recomputed else 'not recomputed'}"
        )


CASES = tuple(
    CheckCase(packed, recomputed) for packed in (True, False) for recomputed in (False, True)
)


class Differences(NamedTuple):
    """Differences from the plain model, each a part of the tensor's largest element."""

    loss: float
    grad_norm: float
    gradients: dict[str, float]
    """By name, in the order of declaration."""
    weights: dict[str, float]
    """After the step."""
    outputs: dict[str, float]
    """Of modules, in the order of the forward."""
    gathers: int
    """Gathers of weights and reductions of their gradients that a rank took part in."""
    miscounted: tuple[str, ...]
    """Weights that were gathered or reduced more or less often than planned, as sentences."""

    @property
    def agree(self) -> bool:
        """Whether there are none."""
        numbers = self.loss, self.grad_norm, *self.gradients.values(), *self.weights.values()
        return not self.miscounted and all(number <= TOLERANCE for number in numbers)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Its name and its difference."""
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def first_output(self) -> str | None:
        """The first module in the forward whose output differs."""
        return next((n for n, found in self.outputs.items() if found > TOLERANCE), None)


class Verdict(NamedTuple):
    """What came of a layout."""

    layout: Layout
    cases: dict[CheckCase, Differences]
    failure: str = ""
    """The error of a rank, if one failed."""

    @property
    def agrees(self) -> bool:
        """Whether the layout computes what the plain model does."""
        return not self.failure and all(found.agree for found in self.cases.values())


class Check:
    """A subject, and the plain model's steps that its layouts are compared with.

    All layouts run on as many ranks, the least common multiple of their sizes, so that those that
    use fewer have replicas. Raises ValueError for a layout that the model cannot be split in.
    """

    def __init__(
        self,
        subject: Subject,
        layouts: Sequence[Layout],
        *,
        cases: Sequence[CheckCase] = CASES,
        parallel: ParallelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        max_norm: float = 1.0,
    ) -> None:
        self.subject = subject
        self.cases = tuple(cases)
        self.parallel = parallel or ParallelConfig()
        asked = optimizer or OptimizerConfig()
        self.replaced = sorted(asked.rules - {"adamw", "muon"})
        """Rules that adamw takes the place of."""
        groups = tuple(
            replace(group, rule="adamw") if group.rule in self.replaced else group
            for group in asked.param_groups
        )
        name = "adamw" if asked.name in self.replaced else asked.name
        self.optimizer = replace(asked, name=name, param_groups=groups)
        self.max_norm = max_norm
        self.num_ranks = math.lcm(*(layout.num_ranks for layout in layouts))
        width = math.lcm(*(layout.tensor for layout in layouts))
        self.row_tokens = -(-TOKENS // width) * width
        model = subject.language_model(float(any(case.recomputed for case in self.cases)))
        for layout in layouts:
            model.check_layout(layout.of(self.parallel), self.row_tokens)
        self._layouts = trained_layouts(model)
        self.references = {
            packed: self._reference(packed)
            for packed in dict.fromkeys(c.packed for c in self.cases)
        }

    def run(self, layout: Layout, *, timeout_seconds: float = 300.0) -> Verdict:
        """Compare one layout, on ranks of its own."""
        try:
            found = run_ranks(self.num_ranks, self.on_rank, layout, timeout_seconds=timeout_seconds)
        except RankError as error:
            return Verdict(layout, {}, str(error))
        return self.verdict(layout, found)

    def verdict(self, layout: Layout, of_ranks: Sequence[Sequence[Differences]]) -> Verdict:
        """The verdict on a layout, from what `on_rank` gave on each rank."""
        of_cases = zip(*of_ranks, strict=True)
        found = [worst_of(of_case) for of_case in of_cases]
        return Verdict(layout, dict(zip(self.cases, found, strict=True)))

    def on_rank(
        self, rank: int, layout: Layout, cases: Sequence[CheckCase] | None = None
    ) -> list[Differences]:
        """The differences that one of `num_ranks` ranks sees, case by case (None: all)."""
        mesh = Mesh(Topology.create(self.num_ranks, layout.of(self.parallel)), rank)
        chosen = self.cases if cases is None else cases
        logging.disable(logging.WARNING)  # a run logs it once, this once a case and rank
        try:
            return [self._compare(mesh, layout, case) for case in chosen]
        finally:
            logging.disable(logging.NOTSET)

    def _reference(self, packed: bool) -> Reference:
        rows = make_rows(self.num_ranks, self.row_tokens, self.subject.vocab_size, packed=packed)
        return make_reference(self.subject, rows, self.optimizer, self.max_norm, self._layouts)

    def _compare(self, mesh: Mesh, layout: Layout, case: CheckCase) -> Differences:
        """One step on this rank, next to the plain model's."""
        reference = self.references[case.packed]
        count = len(reference.rows.tokens) // mesh[Axis.DATA].size
        first = mesh[Axis.DATA].rank * count
        staged = mesh[Axis.PIPELINE].size > 1
        parts = range(first, first + count) if staged else [first]
        size = 1 if staged else count
        batches = [
            batch
            for at in parts
            for batch in reference.rows.micro_batches(at, size, packed=case.packed)
        ]
        mesh.log.collect()
        built = build_model(
            self.subject.language_model(float(case.recomputed)),
            layout.of(self.parallel),
            mesh,
            seed=None,
            device=torch.device("cpu"),
            dtype=torch.float64,
        )
        with torch.no_grad():
            for item in built.parameters:
                item.parameter.copy_(item.layout.shard(reference.start[item.name]))
        gradients = MainGradients(built.trained, mesh, rows_of=mesh[Axis.ZERO1])
        optimizer = _WatchedOptimizer(
            gradients,
            mesh,
            self.optimizer,
            max_norm=self.max_norm,
            names=built.model.trained_names,
            counted_elsewhere=built.counted_elsewhere,
        )
        step = TrainStep(built, gradients, optimizer, mesh, micro_num=len(batches))
        noted: dict[str, float] = {}
        if staged:
            outcome = step(batches, self.optimizer.lr)
        else:
            outcome = self._stepped(step, batches, first, noted)
        step.drain()
        parameters = {item.name: item.parameter.detach() for item in built.trained}
        transfers = mesh.log.take()
        counts = _counted(built, transfers)
        return Differences(
            loss=_relative(outcome.loss, reference.loss),
            grad_norm=_relative(outcome.grad_norm, reference.grad_norm),
            gradients=_apart(built, optimizer.reduced, reference.gradients),
            weights=_apart(built, parameters, reference.weights),
            outputs={name: noted[name] for name in reference.outputs if name in noted},
            gathers=sum(counts.values()),
            miscounted=tuple(_miscounted(built, counts, mesh[Axis.PIPELINE].rank, len(batches))),
        )

    def _stepped(
        self, step: TrainStep, batches: Sequence[MicroBatch], first: int, noted: dict[str, float]
    ) -> StepOutcome:
        """A step of rows from number `first` on; outputs of modules are compared into `noted`."""
        reference = self.references[batches[0].cu_seqlens is not None]
        work, outputs, watched = step.start(batches), Outputs(), modules_of(step.chunks)
        for index, batch in enumerate(batches):
            with outputs.of(watched):
                loss = step.forward(work, index)
            stop = first + batch.tokens.numel() // self.row_tokens
            expected = [
                whole[first:stop].reshape(len(batch.tokens), -1, *whole.shape[2:])
                for whole in reference.outputs.values()
            ]
            expected = step.built.sequence.arranged(expected, batch.cu_seqlens)
            named = dict(zip(reference.outputs, expected, strict=True))
            _note(noted, outputs.take(), named, step.mesh)
            first = stop
            step.backward(loss, last=index == len(batches) - 1)
        return step.finish(work, self.optimizer.lr)


class _WatchedOptimizer(Zero1Optimizer):
    """Keeps a copy of the reduced gradients, which a step uses up."""

    reduced: dict[str, Tensor]
    """This rank's shards, by name."""

    def step(self, lr: float, **how: Any) -> StepResult:
        items = self._gradients.parameters
        self.reduced = {i.name: self._gradients.whole(i.parameter).clone() for i in items}
        return super().step(lr, **how)


def _note(
    noted: dict[str, float],
    found: Mapping[str, list[Tensor]],
    expected: Mapping[str, Tensor],
    mesh: Mesh,
) -> None:
    """Add to `noted` how far outputs are from those expected, [B, S, ..], at this rank's tokens.

    Those of each rank lie together.

    What a mode has in other shapes than [B, S', ..] is left out.
    """
    tensor = mesh[Axis.TENSOR]
    for name, parts in found.items():
        if name in expected and len(parts) == 1:
            whole = expected[name]
            scale = max(whole.abs().max().item(), 1e-300)
            if mesh.topology.mode.slices_batch:
                whole = whole.chunk(tensor.size, 1)[tensor.rank]
            if whole.shape == parts[0].shape:
                noted[name] = max(noted.get(name, 0.0), _largest(parts[0] - whole) / scale)


def _apart(
    built: BuiltModel, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far this rank's shards are from their parts of the expected tensors, by name."""
    least = _LEAST_SCALE * max(tensor.abs().max().item() for tensor in expected.values())
    return {
        item.name: _largest(found[item.name] - item.layout.shard(expected[item.name]))
        / max(expected[item.name].abs().max().item(), least)
        for item in built.trained
    }


def _largest(difference: Tensor) -> float:
    """The largest element; infinite if one is no number."""
    if not difference.numel():
        return 0.0
    largest = difference.detach().abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def _relative(found: float, expected: float) -> float:
    apart = abs(found - expected) / abs(expected)
    return apart if math.isfinite(apart) else math.inf


def _counted(built: BuiltModel, transfers: Iterable[TimedTransfer]) -> _Counts:
    """The transfers of weights and of their gradients, by what they carried."""
    counts: _Counts = Counter()
    names = {f"{layer.name}.{local}": name for layer, local, name in _uses(built)}
    for transfer in transfers:
        if transfer.tag.purpose in _WORDS:
            name = names[transfer.label.removesuffix(".grad")]  # a shared one has several labels
            counts[transfer.tag.purpose, name] += 1
    return counts


def _miscounted(built: BuiltModel, counts: _Counts, rank: int, micro_num: int) -> Iterator[str]:
    """Sentences about transfers of the pipeline's `rank`-th that differ from the plan's."""
    planned = _planned(built, rank, micro_num)
    for key in sorted(planned.keys() | counts.keys()):
        if counts[key] != planned[key]:
            yield f"{key[1]} was {_WORDS[key[0]]} {counts[key]} times, not {planned[key]}"


def _planned(built: BuiltModel, rank: int, micro_num: int) -> _Counts:
    """The transfers of a step and of what it launches for the next one, from the plan.

    A weight is gathered once for each of its lifetimes, which are at most one a pass; a gradient is
    reduced once for each use.
    """
    planned: _Counts = Counter()
    if built.communicator is None:
        return planned
    plan: PrefetchPlan = built.communicator.plan(built.order.actions(rank, micro_num))
    acts = [*plan.start, *plan.start]
    acts += [act for step in plan.entries for act in (*step.before, *step.after)]
    for act in acts:
        if act.kind is WeightOpKind.GATHER:
            planned.update((Purpose.WEIGHT, parameter) for parameter in act.parameters)
    for layer, local, name in _uses(built):
        parameter = layer.weight if local == layer.weight_name else layer.bias
        if parameter is not None and parameter.requires_grad:
            planned[Purpose.WEIGHT_GRADIENT, name] += micro_num
    return planned


def _uses(built: BuiltModel) -> Iterator[tuple[WeightHolder, str, str]]:
    """Each use of a sharded weight or bias: the layer, which of the two, its name in the plan."""
    declared = tuple(chunk.weight_blocks() for chunk in built.chunks)
    names = weight_names(declared)
    for _, _, use in declared_uses(declared):
        if use.layer is not None:
            yield use.layer, use.layer.weight_name, names[id(use.layer.weight)]
            if use.layer.bias is not None:
                yield use.layer, "bias", f"{use.layer.name}.bias"


def worst_of(of_ranks: Iterable[Differences]) -> Differences:
    """The largest differences of all ranks."""
    found = list(of_ranks)

    def largest(of: Callable[[Differences], dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for one in found for name in of(one))
        return {name: max(of(one).get(name, 0.0) for one in found) for name in names}

    return Differences(
        loss=max(one.loss for one in found),
        grad_norm=max(one.grad_norm for one in found),
        gradients=largest(lambda one: one.gradients),
        weights=largest(lambda one: one.weights),
        outputs=largest(lambda one: one.outputs),
        gathers=found[0].gathers,
        miscounted=tuple(dict.fromkeys(line for one in found for line in one.miscounted)),
    )
