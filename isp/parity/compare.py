"""`Check`: compares layouts of a small model with the plain model, in float64 on CPU ranks.

It compares the loss, every gradient and their norm, and the weights after a step. It also compares
how often each weight was gathered, and its gradient reduced, with the prefetch plan.

B batch, S sequence
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
from isp.utils.text import counted

__all__ = [
    "CASES",
    "HEAD",
    "TOLERANCE",
    "Check",
    "CheckCase",
    "Differences",
    "Verdict",
    "heading",
    "line",
    "summary",
    "worst_of",
]

TOLERANCE = 1e-9
"""Relative difference up to which results agree. Sums in other orders differ much less in float64,
and mistakes differ much more."""

_Counts = Counter[tuple[Purpose, str]]
"""Number of transfers, by their purpose and the name of the weight."""

_WORDS = {Purpose.WEIGHT: "gathered", Purpose.WEIGHT_GRADIENT: "reduced"}

_LEAST_SCALE = 1e-6
"""A tensor's differences are divided by its largest element, but at least by this share of the
largest element of all tensors. A gradient that is zero in exact arithmetic is only rounding noise
of larger ones, and relative to itself any noise would be a large difference."""


class CheckCase(NamedTuple):
    """Batch of a step, and whether it recomputes; each layout trains all of `CASES`."""

    packed: bool
    """True: rows of several documents, joined into at most two micro-batches. False: one batch."""
    recomputed: bool
    """True: recompute all blocks, or as many as the keys say. False: recompute none."""

    def __str__(self) -> str:
        return (
            f"{'packed' if self.packed else 'not packed'}"
            f", {'recomputed' if self.recomputed else 'not recomputed'}"
        )


CASES = tuple(
    CheckCase(packed, recomputed) for packed in (True, False) for recomputed in (False, True)
)


class Differences(NamedTuple):
    """Differences of a layout from the plain model, relative to each tensor's largest element."""

    loss: float
    grad_norm: float
    gradients: dict[str, float]
    """Differences of gradients by name, in order of declaration."""
    weights: dict[str, float]
    """Differences of the weights after the step, by name."""
    outputs: dict[str, float]
    """Differences of module outputs by name of the module, in the order of the forward."""
    gathers: int
    """Number of weight gathers and gradient reductions on a rank in the step."""
    miscounted: tuple[str, ...]
    """Sentences about weights that were gathered or reduced more or less often than planned."""

    @property
    def agree(self) -> bool:
        """Return True if all differences are within `TOLERANCE`, and the transfers as planned.

        Differences of outputs do not count: they only help to find the cause.
        """
        numbers = self.loss, self.grad_norm, *self.gradients.values(), *self.weights.values()
        return not self.miscounted and all(number <= TOLERANCE for number in numbers)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Return the name of the gradient that differs most, and its difference."""
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def first_output(self) -> str | None:
        """Return the first module of the forward whose output differs; None if none does."""
        return next((n for n, found in self.outputs.items() if found > TOLERANCE), None)


class Verdict(NamedTuple):
    """Result of checking one layout: its differences in each case, or the failure of a rank."""

    layout: Layout
    cases: dict[CheckCase, Differences]
    failure: str = ""
    """The error text of the rank that failed; empty if no rank failed."""

    @property
    def agrees(self) -> bool:
        """Return True if no rank failed and the layout agrees with the plain model in all cases."""
        return not self.failure and all(found.agree for found in self.cases.values())


class Check:
    """Compares layouts of a small model with the plain model.

    The constructor trains a step of the plain model for each kind of batch, as the reference. `run`
    then trains the same step in a layout and returns the differences.

    All layouts run on the same number of ranks, the least common multiple of what they need, so
    smaller layouts have replicas. Raises ValueError for a layout that the model cannot be split in.
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
        """Update rules of the configuration for which the check uses adamw instead."""
        # Only for AdamW and Muon does torch have an independent formula to compare with.
        groups = tuple(
            replace(group, rule="adamw") if group.rule in self.replaced else group
            for group in asked.param_groups
        )
        name = "adamw" if asked.name in self.replaced else asked.name
        self.optimizer = replace(asked, name=name, param_groups=groups)
        self.max_norm = max_norm
        self.num_ranks = math.lcm(*(layout.num_ranks for layout in layouts))
        # All layouts train the same batch, so the length of its rows must be divisible by the size
        # of every tensor group.
        width = math.lcm(*(layout.tensor for layout in layouts))
        self.row_tokens = -(-TOKENS // width) * width
        model = subject.language_model(float(any(case.recomputed for case in self.cases)))
        for layout in layouts:
            model.check_layout(layout.of(self.parallel), self.row_tokens)
        # Packed and unpacked cases have different batches, so each kind has its own reference.
        self._layouts = trained_layouts(model)
        self.references = {
            packed: self._reference(packed)
            for packed in dict.fromkeys(c.packed for c in self.cases)
        }

    def run(self, layout: Layout, *, timeout_seconds: float = 300.0) -> Verdict:
        """Compare one layout with the reference, on newly forked ranks."""
        try:
            found = run_ranks(self.num_ranks, self.on_rank, layout, timeout_seconds=timeout_seconds)
        except RankError as error:
            return Verdict(layout, {}, str(error))
        return self.verdict(layout, found)

    def verdict(self, layout: Layout, of_ranks: Sequence[Sequence[Differences]]) -> Verdict:
        """Return the verdict on a layout, given the results of `on_rank` of all ranks."""
        of_cases = zip(*of_ranks, strict=True)
        found = [worst_of(of_case) for of_case in of_cases]
        return Verdict(layout, dict(zip(self.cases, found, strict=True)))

    def on_rank(
        self, rank: int, layout: Layout, cases: Sequence[CheckCase] | None = None
    ) -> list[Differences]:
        """Train a step of each case (None: all) on rank `rank`, and return its differences.

        A collective over `num_ranks` ranks.
        """
        mesh = Mesh(Topology.create(self.num_ranks, layout.of(self.parallel)), rank)
        chosen = self.cases if cases is None else cases
        # Hide warnings of the run: each rank would repeat them for each case.
        logging.disable(logging.WARNING)
        try:
            return [self._compare(mesh, layout, case) for case in chosen]
        finally:
            logging.disable(logging.NOTSET)

    def _reference(self, packed: bool) -> Reference:
        """Train a step of the plain model, on packed rows or on rows of one document each."""
        rows = make_rows(self.num_ranks, self.row_tokens, self.subject.vocab_size, packed=packed)
        return make_reference(self.subject, rows, self.optimizer, self.max_norm, self._layouts)

    def _compare(self, mesh: Mesh, layout: Layout, case: CheckCase) -> Differences:
        """Train one step on this rank and return its differences from the plain model."""
        reference = self.references[case.packed]
        # Each data rank trains its own rows of the global batch.
        count = len(reference.rows.tokens) // mesh[Axis.DATA].size
        first = mesh[Axis.DATA].rank * count
        # A pipeline needs several micro-batches: each row is one. Else all rows are one batch.
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
            seed=None,  # no initial weights: they are copied below
            device=torch.device("cpu"),
            dtype=torch.float64,
        )
        # Copy the plain model's weights: then only the layout can make a difference.
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
        # A pipeline runs its own order of forwards and backwards: outputs are not compared then.
        if staged:
            outcome = step(batches, self.optimizer.lr)
        else:
            outcome = self._stepped(step, batches, first, noted)
        step.drain()  # updated weights, and gathers for a next step, may be in flight
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
        """Train a step on `batches`, whose first row is row `first` of the reference.

        Adds the differences of module outputs to `noted`.
        """
        reference = self.references[batches[0].cu_seqlens is not None]
        work, outputs, watched = step.start(batches), Outputs(), modules_of(step.chunks)
        for index, batch in enumerate(batches):
            with outputs.of(watched):
                loss = step.forward(work, index)
            stop = first + batch.tokens.numel() // self.row_tokens
            # Arrange the tokens of the plain outputs as context ranks have them.
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
    """Optimizer that keeps a copy of the reduced gradients, which a step overwrites."""

    reduced: dict[str, Tensor]
    """Gradients of this rank's shards, by name."""

    def step(self, lr: float, **how: Any) -> StepResult:
        """Keep the reduced gradients, then clip and update as usual."""
        items = self._gradients.parameters
        self.reduced = {i.name: self._gradients.whole(i.parameter).clone() for i in items}
        return super().step(lr, **how)


def _note(
    noted: dict[str, float],
    found: Mapping[str, list[Tensor]],
    expected: Mapping[str, Tensor],
    mesh: Mesh,
) -> None:
    """Add to `noted` how module outputs `found` differ from `expected` [B, S, ..].

    Only this rank's tokens are compared; in `expected` the tokens of each rank are contiguous.
    Outputs of other shapes are left out: in some modes a rank has only some of the features.
    """
    tensor = mesh[Axis.TENSOR]
    for name, parts in found.items():
        if name in expected and len(parts) == 1:
            whole = expected[name]
            scale = max(whole.abs().max().item(), 1e-300)  # avoid a division by 0
            if mesh.topology.mode.slices_batch:
                whole = whole.chunk(tensor.size, 1)[tensor.rank]
            if whole.shape == parts[0].shape:
                noted[name] = max(noted.get(name, 0.0), _largest(parts[0] - whole) / scale)


def _apart(
    built: BuiltModel, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return, by name, how this rank's shards `found` differ from the whole tensors `expected`."""
    # See `_LEAST_SCALE`: tensors of rounding noise must not be compared relative to themselves.
    least = _LEAST_SCALE * max(tensor.abs().max().item() for tensor in expected.values())
    return {
        item.name: _largest(found[item.name] - item.layout.shard(expected[item.name]))
        / max(expected[item.name].abs().max().item(), least)
        for item in built.trained
    }


def _largest(difference: Tensor) -> float:
    """Return the largest absolute element of `difference`; infinite if any is NaN."""
    if not difference.numel():
        return 0.0
    largest = difference.detach().abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def _relative(found: float, expected: float) -> float:
    """Return the relative difference of two numbers; infinite if it is NaN."""
    apart = abs(found - expected) / abs(expected)
    return apart if math.isfinite(apart) else math.inf


def _counted(built: BuiltModel, transfers: Iterable[TimedTransfer]) -> _Counts:
    """Return how often each weight was gathered, and its gradient reduced, in `transfers`."""
    counts: _Counts = Counter()
    names = {f"{layer.name}.{local}": name for layer, local, name in _uses(built)}
    for transfer in transfers:
        if transfer.tag.purpose in _WORDS:
            # A weight that several layers share has a label for each of them, but one name.
            name = names[transfer.label.removesuffix(".grad")]
            counts[transfer.tag.purpose, name] += 1
    return counts


def _miscounted(built: BuiltModel, counts: _Counts, rank: int, micro_num: int) -> Iterator[str]:
    """Yield a sentence for each of `counts` that differs from the plan of pipeline rank `rank`."""
    planned = _planned(built, rank, micro_num)
    for key in sorted(planned.keys() | counts.keys()):
        if counts[key] != planned[key]:
            yield f"{key[1]} was {_WORDS[key[0]]} {counts[key]} times, not {planned[key]}"


def _planned(built: BuiltModel, rank: int, micro_num: int) -> _Counts:
    """Return how often the plan gathers each weight, and reduces its gradient, in a step.

    Gathers that the step launches for the next step are included. A gradient is reduced once for
    each use of its weight and each micro-batch.
    """
    planned: _Counts = Counter()
    if built.communicator is None:
        return planned
    plan: PrefetchPlan = built.communicator.plan(built.order.actions(rank, micro_num))
    # Count `start` twice: before this step, and at its end for the next one.
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
    """Yield each use of a sharded weight or bias: its holder, attribute, and name in the plan."""
    declared = tuple(chunk.weight_blocks() for chunk in built.chunks)
    names = weight_names(declared)
    for _, _, use in declared_uses(declared):
        if use.layer is not None:
            yield use.layer, use.layer.weight_name, names[id(use.layer.weight)]
            if use.layer.bias is not None:
                yield use.layer, "bias", f"{use.layer.name}.bias"


def worst_of(of_ranks: Iterable[Differences]) -> Differences:
    """Return the differences of all ranks as one: the largest of each kind."""
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
        # One rank's number is enough: the table only shows whether there are gathers at all.
        gathers=found[0].gathers,
        miscounted=tuple(dict.fromkeys(line for one in found for line in one.miscounted)),
    )


# -- the table ------------------------------------------------------------------------------


_SHOWN = 3
"""Number of names that a list of differences shows; it gives the number of the others."""

HEAD = f"{'layout':<12}{'loss':>9}{'norm':>9}{'update':>9}  gathers     result   worst gradient"


def heading(check: Check) -> str:
    """Return the lines above the table: what is compared, how, and on how many ranks."""
    rules, replaced = " and ".join(sorted(check.optimizer.rules)), ", ".join(check.replaced)
    step = f"\nthe update is that of {rules}" if rules != "adamw" or replaced else ""
    if replaced:
        step += (
            f", not of {replaced}, which may make a large update from a gradient that is only"
            f" rounding noise"
        )
    return (
        f"{check.subject.name}, on {check.num_ranks} ranks, each difference relative to its tensor"
        f"\nin float64 on CPU, {check.subject.ways}{step}"
    )


def line(verdict: Verdict) -> str:
    """Return the line of a layout in the table: its largest differences over all cases."""
    name = f"{verdict.layout!s:<12}"
    if verdict.failure:
        return f"{name}{'-':>9}{'-':>9}{'-':>9}  {'-':<12}FAILED"
    cases = list(verdict.cases.values())
    loss, norm = max(c.loss for c in cases), max(c.grad_norm for c in cases)
    update = max(max(c.weights.values()) for c in cases)
    gathers = "as planned" if any(c.gathers for c in cases) else "none"
    gathers = "OTHERS" if any(c.miscounted for c in cases) else gathers
    worst, apart = max((c.worst_gradient for c in cases), key=lambda found: found[1])
    result = "ok" if verdict.agrees else "DIFFERS"
    return f"{name}{loss:9.1e}{norm:9.1e}{update:9.1e}  {gathers:<12}{result:<9}{apart:.1e} {worst}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the lines below the table: how each layout differs that does, and how many do."""
    different = [verdict for verdict in verdicts if not verdict.agrees]
    if not different:
        agree = f"all {len(verdicts)} layouts agree" if len(verdicts) > 1 else "the layout agrees"
        return f"{agree} with the plain model within {TOLERANCE:g}"
    parts = [f"\n{_explanation(verdict)}\n" for verdict in different]
    count = f"{len(different)} of {counted(len(verdicts), 'layout')}"
    differ = "differs" if len(different) == 1 else "differ"
    return "".join([*parts, f"\n{count} {differ} by more than {TOLERANCE:g}"])


def _explanation(verdict: Verdict) -> str:
    """Return lines that say where a layout differs, in the first of its cases that does."""
    if verdict.failure:
        return f"{verdict.layout}: {verdict.failure}"
    wrong = {case: found for case, found in verdict.cases.items() if not found.agree}
    case, found = next(iter(wrong.items()))
    where = f"in {len(wrong)} of {len(verdict.cases)} cases, such as rows {case}"
    return "\n  ".join([f"{verdict.layout}, {where}:", *_faults(found)])


def _faults(found: Differences) -> list[str]:
    """Return a line for each kind of difference that exceeds the tolerance.

    First the earliest module in the forward, or the loss; then gradients, weights and transfers.
    """
    first = found.first_output
    faults = []
    if first is not None:
        faults.append(f"first in the forward, the output of {first} ({found.outputs[first]:.1e})")
    elif found.loss > TOLERANCE:
        faults.append("the loss, and no output of a module before it")
    for what, apart in (("gradient", found.gradients), ("new weight", found.weights)):
        names = [name for name, number in apart.items() if number > TOLERANCE]
        if names:
            shown = ", ".join(f"{name} ({apart[name]:.1e})" for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
            faults.append(f"{len(names)} of {len(apart)} {what}s: {shown}{more}")
    if found.grad_norm > TOLERANCE:
        faults.append(f"the gradient norm ({found.grad_norm:.1e})")
    if found.miscounted:
        more = f" and {len(found.miscounted) - _SHOWN} more" * (len(found.miscounted) > _SHOWN)
        faults.append(f"transfers: {', '.join(found.miscounted[:_SHOWN])}{more}")
    return faults
