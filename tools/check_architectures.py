"""Check the architectures of transformers in every layout, or write which are supported.

python tools/check_architectures.py [NAME ...]    # all layouts, packed or not, recomputed or not
python tools/check_architectures.py --write [NAME ...]    # their rows of isp/models/README.md
python tools/check_architectures.py --lost [NAME ...]    # rows that this transformers loses
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from architectures import ARCHITECTURES, config_of
from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isp.models.model import TracedModel
from isp.models.own_attention import ALIBI_FEATURES
from isp.models.roles import ParameterRole
from isp.models.tiny import tiny_model
from isp.models.trace import AttentionSizes, Kind, ModelTrace
from isp.models.versions import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from isp.parallel import Mode, ParallelConfig
from isp.parallel.config import SequenceScan
from isp.run.forked import RankError, run_ranks
from isp.train.check import Check, Verdict
from isp.train.check_layouts import Layout, fault_of, most_stages
from isp.train.check_layouts import layouts_of as listed_layouts
from isp.train.check_subjects import Subject

README = Path(__file__).parents[1] / "isp" / "models" / "README.md"

LAYOUTS = (
    *(Layout(tensor, weight) for tensor in (1, 2, 4) for weight in (1, 2, 4)),
    Layout(2, 2, context=2),
    Layout(4, 2, context=2),
)

OF_MIXERS = (Layout(1, 3), Layout(3, 1), Layout(3, 3), Layout(3, 1, context=3))
"""Besides, of models that convolve or scan: heads that do not divide by the ranks."""

SPLIT = tuple(Layout(t, 1, m) for m in (Mode.MTP, Mode.MSP, Mode.FSP) for t in (2, 4))
"""Of models whose tensor-parallel plan does."""

SPREAD = (
    Layout(2, 4, expert=2),
    Layout(4, 4, expert=4),
    *(Layout(2, 1, m, expert=2) for m in (Mode.MTP, Mode.MSP, Mode.FSP)),
)
"""Of models with experts."""

_DRAFTS = "it drafts for another model, and is called with that model's keys"

_DECODERS = "transformers makes it of its decoder's configuration, which no folder has by itself"

_UNTRIED = {
    "blt": "it cuts bytes into patches by the entropy of a second model",
    "gemma3n": "its towers need the package timm; gemma3n_text is its text part",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _DECODERS,
    "musicgen_melody": _DECODERS,
}
"""Why no small model can be made by the configuration alone."""


_REFUSED = {
    "rwkv": "the numerator and the denominator of its recurrence are scaled by a running maximum of"
    " the keys, for which isp has no scan, and a token is mixed with the one before",
    "xlstm": "the exponential gates of its recurrence (mLSTM) are scaled by a running maximum, for"
    " which isp has no scan",
}
"""More precise reasons than the error's, of what is refused."""


class Fact(NamedTuple):
    """One row of the table."""

    architecture: str
    model: str
    layers: str
    """The kinds of layers, in the order of their first."""
    refused: str
    """Why it is not supported, or was not tried; empty if it is supported."""
    not_split: str = ""
    """Why its features are not split; empty if they are."""


def fact(architecture: str) -> Fact:
    """What the trace of its small model says."""
    model_type = architecture.split()[0]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    try:
        model = tiny_model(config_of(architecture))
    except ValueError as error:
        said = str(error).partition(f"type {model_type}: ")[2] or str(error)
        reason = _UNTRIED.get(architecture) or _in_line(said)
        return Fact(architecture, name, "", f"not tried: {reason}")
    name = type(model).__name__
    try:
        traced = TracedModel(model)
    except ValueError as error:
        if architecture in _UNTRIED:  # built by some versions of transformers, and not called
            return Fact(architecture, name, "", f"not tried: {_UNTRIED[architecture]}")
        reason = _REFUSED.get(architecture) or _in_line(str(error))
        return Fact(architecture, name, "", f"not supported: {reason}")
    kinds, reason = ", ".join(dict.fromkeys(_kinds(traced.trace))), ""
    try:
        traced.check_layout(SPLIT[0].of(ParallelConfig()), SPLIT[0].tensor)
    except ValueError as error:
        reason = str(error).partition("mode needs: ")[2].partition("; use mode isp")[0]
    return Fact(architecture, name, kinds, "", reason)


def _in_line(reason: str) -> str:
    """What fits into a table: the first part of a message, without a line of the model's code."""
    first = re.split(r"\. | \(\w+\.py:", reason)[0]
    return " ".join(first.split())[:300].replace("|", "/")


def _kinds(trace: ModelTrace) -> list[str]:
    """The kind of each block, in words."""
    kinds = []
    for block in trace.blocks:
        mixing = [c for c in trace.calls if c.block == block and c.kind.mixes]
        words = dict.fromkeys(_attention(c.sizes) if c.sizes else str(c.kind) for c in mixing)
        experts = (n for n, r in trace.roles.items() if r is ParameterRole.EXPERT)
        inside = any(name.startswith(f"{block}.") for name in experts)
        kinds.append((" and ".join(words) or "no mixing") + " with experts" * inside)
    return kinds


def _attention(sizes: AttentionSizes) -> str:
    reach = "sliding window" if sizes.window else "chunked" if sizes.chunk else "full"
    reach = "sparse" if sizes.chosen else reach
    if sizes.head_size - sizes.value_size == ALIBI_FEATURES:
        return f"{reach} with ALiBi"
    if sizes.relative:
        return f"{reach} with a bias by distance"
    return f"{reach} latent" if sizes.value_size != sizes.head_size else reach


def table(names: list[str]) -> str:
    """The text of isp/models/README.md, with the rows of these as they are now."""
    before = rows_before()
    new = {*names, *(ARCHITECTURES.keys() - before.keys())}
    rows = [row(fact(name)) if name in new else before[name] for name in sorted(ARCHITECTURES)]
    supported = sum(_SUPPORTED in line for line in rows)
    untried = sum("| not tried: " in line for line in rows)
    split = sum(line.endswith(f"{_SUPPORTED} yes |") for line in rows)
    rest = len(rows) - supported - untried
    versions = {
        "version": __version__,
        "oldest": OLDEST_TRANSFORMERS,
        "newest": NEWEST_TRANSFORMERS,
    }
    counts = {"supported": supported, "untried": untried, "rest": rest, "split": split}
    return "\n".join([_HEAD.format(**versions, **counts), *rows, ""])


_SUPPORTED = "| supported |"


def rows_before() -> dict[str, str]:
    """The rows of isp/models/README.md, by architecture."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def version_before() -> str:
    """The version of transformers with which isp/models/README.md was written."""
    (found,) = re.findall(r"--write` with\stransformers ([\d.]+[a-z\d])", README.read_text())
    return str(found)


def lost(names: Iterable[str]) -> list[str]:
    """The rows of isp/models/README.md that are no longer so, as they are now.

    Under another version of transformers than the table's: those that are refused now, since types,
    plans and reasons differ.
    """
    before, found = rows_before(), {name: row(fact(name)) for name in names}
    changed = [name for name, line in found.items() if line != before[name]]
    if __version__ != version_before():
        changed = [
            name
            for name in changed
            if _SUPPORTED in before[name] and "| not supported: " in found[name]
        ]
    return [found[name] for name in changed]


def row(found: Fact) -> str:
    """A line of the table."""
    split = "" if found.refused else found.not_split or "yes"
    return (
        f"| {found.architecture} | `{found.model}` | {found.layers} |"
        f" {found.refused or 'supported'} | {split} |"
    )


_HEAD = """# Architectures

Written by `python tools/check_architectures.py --write` with transformers {version}; a test checks
a sample.

ISP traces a model of transformers and does not know models by name, so this is a list of what was
tried: the default configuration of each causal model type, shrunk, with a layer of every kind.
Entries in brackets are further configurations, or the text part of a vision-language model.
{supported} are supported. {rest} are refused before any process starts; the table says why.
{untried} have no small model to try.

**Versions.** ISP supports transformers {oldest} to {newest}; any other version gives a warning.
Every type was traced with each of them. `python tools/check_architectures.py --lost` lists the rows
that the installed version loses: with 5.24, `llama4` as a vision-language model, because its own
forward fails there (`llama4_text` works); with 5.17, `aria_text`.

**Supported** means that the loss, every gradient and the weights after a step of AdamW match those
of the unmodified model within 1e-9 in float64. Every entry was compared with tensor x weight groups
of 2 x 2 and 4 x 1, with 2 context ranks where possible, packed, and with all blocks recomputed.
Models with convolutions or scans were also compared on 3 ranks, by heads and by state. The test
suite has one or more models for each mechanism, in all combinations of groups of 1, 2 and 4. For
packed sequences, the unmodified model gets one document at a time. Dropout is 0, because ISP does
not support it. `python tools/check_architectures.py NAME` compares an entry in every layout, and
`isp check FOLDER` compares any model.

**mtp, msp and fsp** need a tensor-parallel plan (`base_model_tp_plan`), which {split} entries have;
for the others, the last column says what is missing. The tensor size must divide the heads. What
the plan does not shard is whole on every rank, as are experts, unless `parallel.expert.size` equals
the tensor size. In mtp, every rank computes convolutions and scans for all tokens; msp and fsp
split them over ranks, as isp does. If a model's code takes a mean or a norm without weights over
all features between a column and a row linear, the shapes fit but the result is wrong. Only
`isp check` finds this.

**Experts.** 51 of 52 types with experts were compared with `parallel.expert.size` 2 and 4 on 4
ranks, and 2 in mtp, msp and fsp: gradients match within 5e-13. longcat_flash is refused, because
some of its experts have no weights. Mixtral, Qwen3-MoE, GLM4-MoE, OLMoE, gpt-oss, DeepSeek-V2 and
V3 were compared in 15 layouts on up to 8 ranks, including heads x context and all four pipeline
schedules (11 layouts without a plan). Gradients match within 4e-15:
`python tools/check_architectures.py --layouts "2x4 ep2 1F1B 2,1x8 ep4,2x2x4 ep2,.." NAME`.

**Layers** may use attention, convolutions and scans (linear attention, state spaces), in any number
and order, if they call the functions that transformers' own modules call. For modules with other
code, ISP has forwards that call these functions (`own_attention.py`, `own_mixers.py`); add yours
with `isp.register_mixer`. A probe looks for other code that mixes tokens, in forward, in backward
and at the length of a row, and refuses the model by name
([what it finds](../README.md#what-is-checked-before-a-run)). Chunked attention is not split over
context ranks. The weight of Mamba's `dt_proj` is
multiplied outside of its linear, so it is gathered there, and its bias is whole on every rank.

**Sparse attention** is supported for the indexers of DeepSeek-V3.2, of the models derived from it,
and of MiniMax-M3, in isp mode. The indexer's small keys are gathered, each token chooses keys in
its own document, and the chosen keys are gathered with its query. The choice has no gradient, so an
indexer's weights do not change, as in the unmodified model. Text is generated on one rank, or on
several with `--parallel.tensor.mode=isp`.

| type | class | kinds of layers | isp | mtp, msp, fsp |
|---|---|---|---|---|"""


def layouts_of(subject: Subject) -> list[Layout]:
    """The layouts that a model can be split in, of `LAYOUTS`, `SPLIT` and `SPREAD`.

    Chunks of attention are not split by tokens, and features only where a plan says how.
    """
    every = (*LAYOUTS, *SPLIT, *SPREAD)
    return [x for x in every if not fault_of(subject, x, ParallelConfig())]


def jobs_of(subject: Subject, names: str) -> Iterator[tuple[Check, list[Layout]]]:
    """The comparisons of a model; one that scans is split by heads and by state.

    `names`: those layouts alone, of which what the model cannot be split in is left out. Raises
    ValueError, with the reason against the first, if none is left.
    """
    if names:
        listed, _ = listed_layouts(names, subject, ParallelConfig())
        faults = {x: fault_of(subject, x, ParallelConfig()) for x in listed}
        layouts = [x for x, fault in faults.items() if not fault]
        if not layouts:
            raise ValueError(faults[listed[0]])
        yield Check(subject, layouts, parallel=ParallelConfig()), layouts
        return
    kinds = {call.kind for call in subject.language_model(0.0).trace.calls}
    more = OF_MIXERS if kinds & {Kind.CONVOLUTION, Kind.SCAN} else ()
    ways = (SequenceScan.HEADS, SequenceScan.STATE) if Kind.SCAN in kinds else (SequenceScan.AUTO,)
    for layouts in filter(None, (layouts_of(subject), more)):
        first = Check(subject, layouts, parallel=ParallelConfig(sequence_scan=ways[0]))
        yield first, layouts
        for way in ways[1:]:
            other = copy.copy(first)  # and what the plain model gives
            other.parallel = ParallelConfig(sequence_scan=way)
            yield other, layouts


def check(architecture: str, names: str = "") -> str:
    """A line on an architecture in all layouts, or those in `names`; `ok` if nothing differs."""
    began, verdicts = time.monotonic(), list[Verdict]()
    try:
        jobs = list(
            jobs_of(Subject.of_config(config_of(architecture), most_stages(names or "all")), names)
        )
    except ValueError as error:
        return f"refused  {architecture}: {_in_line(str(error))}"
    for job, layouts in jobs:
        try:
            of_ranks = run_ranks(job.num_ranks, _on_rank, job, layouts, timeout_seconds=1200)
        except RankError as error:
            return f"FAILED   {architecture}: {error}"
        of_layouts = zip(layouts, zip(*of_ranks, strict=True), strict=True)
        verdicts += [job.verdict(layout, found) for layout, found in of_layouts]
    count = f"{len(verdicts)} layouts"
    return f"{_summary(architecture, verdicts)}, {count}, {time.monotonic() - began:.1f} s"


def _on_rank(rank: int, job: Check, layouts: list[Layout]) -> Any:
    return [job.on_rank(rank, layout) for layout in layouts]


def _summary(architecture: str, verdicts: list[Verdict]) -> str:
    cases = [found for verdict in verdicts for found in verdict.cases.values()]
    wrong = [str(verdict.layout) for verdict in verdicts if not verdict.agrees]
    name, gradient = max((c.worst_gradient for c in cases), key=lambda found: found[1])
    weight = max(max(c.weights.values()) for c in cases)
    loss = max(c.loss for c in cases)
    result = f"DIFFERS  {architecture}, {', '.join(wrong)}" if wrong else f"ok       {architecture}"
    return f"{result}: loss {loss:.1e}, gradient {gradient:.1e} ({name}), step {weight:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--write", action="store_true", help=f"write {README.name} instead")
    parser.add_argument("--lost", action="store_true", help="list rows that are no longer so")
    parser.add_argument("--layouts", default="", metavar="LIST", help="as of isp check")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.write:
        README.write_text(table(args.names or [*ARCHITECTURES]))
        return 0
    if args.lost:
        lines = lost(args.names or [name for name in rows_before() if name in ARCHITECTURES])
        print("\n".join(lines) or f"transformers {__version__} loses none")
        return 1 if lines else 0
    bad = 0
    for name in args.names or ARCHITECTURES:
        line = check(name, args.layouts)
        bad += not line.startswith(("ok", "refused"))
        print(line, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
