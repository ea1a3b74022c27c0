"""`isp.check`: layouts of a model that is given against the model alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from isp.parallel import ParallelConfig
from isp.train.check import Check, Verdict
from isp.train.check_layouts import TOKENS, layouts_of, most_stages
from isp.train.check_reference import Subject
from isp.train.check_subjects import HuggingFaceSubject, OwnSubject
from isp.train.check_table import HEAD, heading, line, summary

__all__ = ["CheckResult", "check"]


class CheckResult(NamedTuple):
    """What `check` found; printed, it is the table of `isp check`."""

    heading: str
    verdicts: tuple[Verdict, ...]
    """Of each layout, with the differences of each case."""

    @property
    def agrees(self) -> bool:
        """Whether all layouts compute what the model alone does."""
        return all(verdict.agrees for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join([self.heading, HEAD, *map(line, self.verdicts), summary(self.verdicts)])

    def __repr__(self) -> str:
        return str(self)


def check(model: nn.Module, layouts: str = "all") -> CheckResult:
    """Compare layouts with the model alone, in float64 on CPU ranks of this machine.

    Each layout trains one step, packed or not, recomputed or not. The loss, every gradient, the
    updated weights and the number of gathers are compared; the model itself stays as it is.
    `layouts` as of `isp check --layouts`: "all", or a list such as "2x2,4x1,mtp2".

    A module of one's own is run as it is given, with its weights and without dropout, on sequences
    of 48 tokens or a few more: give one with few and small layers. Of a model of transformers a
    small one is made by its configuration; a class derived from transformers' is run as given.

    Raises RuntimeError, with the table and what differs first, if a layout differs; ValueError for
    a model that is not supported, and where torch finds a GPU (its backward starts threads, which
    ranks that are forked lack): set CUDA_VISIBLE_DEVICES= for the process.
    """
    if torch.cuda.is_available():
        raise ValueError(
            "isp.check computes on CPU ranks that are forked, which fails beside a GPU: run it with"
            " CUDA_VISIBLE_DEVICES= (empty) in the environment"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks share the cores
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = _check(model, layouts)
    finally:
        torch.set_num_threads(threads)
    if not result.agrees:
        raise RuntimeError(str(result))
    return result


def _check(model: nn.Module, layouts: str) -> CheckResult:
    subject: Subject = _subject_of(model, most_stages(layouts))
    chosen, _ = layouts_of(layouts, subject, parallel := ParallelConfig())
    try:
        comparison = Check(subject, chosen, parallel=parallel)
    except (IndexError, RuntimeError) as error:  # of the model alone
        raise ValueError(
            f"{subject.name} alone fails on sequences of {TOKENS} tokens: {error}"
        ) from error
    return CheckResult(heading(comparison), tuple(comparison.run(layout) for layout in chosen))


def _subject_of(model: nn.Module, layers: int = 2) -> OwnSubject | HuggingFaceSubject:
    if hasattr(model, "peft_config"):
        raise ValueError("isp.check makes a small model without adapters: give it the base model")
    if hasattr(model, "set_attn_implementation"):
        whole: Any = model
        small = HuggingFaceSubject(whole.config, layers)
        if isinstance(small.model, type(model)):
            return small
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("isp.check runs a module with its weights: make it on the CPU")
    return OwnSubject(model)
