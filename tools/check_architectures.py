"""Check the architectures of transformers in every layout, or write which are supported.

The page is docs/reference/architectures.md.

python tools/check_architectures.py [NAME ...]    # all layouts, packed or not, recomputed or not
python tools/check_architectures.py --write [NAME ...]    # their rows of the page
python tools/check_architectures.py --compare [NAME ...]    # up to three layouts, noted in the rows
python tools/check_architectures.py --changes [NAME ...]    # rows that differ from the table
python tools/check_architectures.py --newest    # these, and a comparison for each mechanism
python tools/check_architectures.py --sources [PACKAGE ...]    # add their code to known_code.txt
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
import transformers
from architectures import ARCHITECTURES, MECHANISMS, config_of
from packaging.version import Version
from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isp.core.mesh import Mode, ParallelConfig
from isp.core.mesh.config import SequenceScan
from isp.models.huggingface.patches.attention import ALIBI_FEATURES
from isp.models.huggingface.patches.calls import FREE_FUNCTIONS, REPLACED
from isp.models.huggingface.tiny import tiny_model
from isp.models.huggingface.versions import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from isp.models.known_code import KNOWN, known_code, source_hash, unknown_code
from isp.models.roles import ParameterRole
from isp.models.traced_model import TracedModel
from isp.models.tracing.trace import AttentionSizes, Kind, ModelTrace
from isp.parity.compare import Check, CheckCase, Verdict
from isp.parity.forked import RankError, run_ranks
from isp.parity.layouts import Layout, fault_of, most_stages
from isp.parity.layouts import layouts_of as listed_layouts
from isp.parity.subjects import Subject

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"

LAYOUTS = (
    *(Layout(tensor, weight) for tensor in (1, 2, 4) for weight in (1, 2, 4)),
    Layout(2, 2, context=2),
    Layout(4, 2, context=2),
)

OF_MIXERS = (Layout(1, 3), Layout(3, 1), Layout(3, 3), Layout(3, 1, context=3))
"""More layouts for models with convolutions or scans: their heads do not divide by 3 ranks."""

SPLIT = tuple(Layout(t, 1, m) for m in (Mode.MTP, Mode.MSP, Mode.FSP) for t in (2, 4))
"""Layouts for models that have a tensor-parallel plan."""

SPREAD = (
    Layout(2, 4, expert=2),
    Layout(4, 4, expert=4),
    *(Layout(2, 1, m, expert=2) for m in (Mode.MTP, Mode.MSP, Mode.FSP)),
)
"""The layouts in which models with experts are compared with one process."""

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
"""For each type that is not tried, why its configuration alone gives no small model."""


_REFUSED = {
    "inkling2_loop_text": "12 of its blocks are called 3 times in one forward, but isp gathers a"
    " block's weights for one call",
    "rwkv": "the numerator and the denominator of its recurrence are scaled by a running maximum of"
    " the keys, for which isp has no scan, and a token is mixed with the one before",
    "xlstm": "the exponential gates of its recurrence (mLSTM) are scaled by a running maximum, for"
    " which isp has no scan",
}
"""Reasons for refused types that say more than the error that refuses them."""


class Fact(NamedTuple):
    """Row of the table of architectures."""

    architecture: str
    model: str
    layers: str
    """The kinds of layers, in the order in which the model has the first layer of each."""
    refused: str
    """Why the architecture is not supported, or was not tried; empty if it is supported."""
    not_split: str = ""
    """Why mtp, msp and fsp do not split the model's features; empty if they do."""
    compared: str = ""
    """Minor versions of transformers with which ISP gave the same results as the plain model."""

    @classmethod
    def read(cls, line: str) -> Fact:
        """Return what a line of the table, as text, says."""
        cells = [cell.strip() for cell in line.strip("|\n").split("|")]
        name, model, layers, state, split, compared = cells
        refused = "" if state == "supported" else state
        not_split = "" if split == "yes" else split
        return cls(name, model.strip("`"), layers, refused, not_split, compared)

    def __str__(self) -> str:
        """Return the line of the table."""
        state = self.refused or "supported"
        split = self.not_split if self.not_split or self.refused else "yes"
        cells = self.architecture, f"`{self.model}`", self.layers, state, split, self.compared
        return f"| {' | '.join(cells)} |"


def fact(architecture: str) -> Fact:
    """Trace a small model of the architecture, and return what the table shall say of it.

    `compared` is left empty.
    """
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
        # Some versions of transformers can build this small model, but it cannot be called.
        if architecture in _UNTRIED:
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
    """Return what fits into a table: the first sentence of a message.

    The line of the model's code that the message names is left out.
    """
    first = re.split(r"\. | \(\w+\.py:", reason)[0]
    return " ".join(first.split())[:300].replace("|", "/")


def _kinds(trace: ModelTrace) -> list[str]:
    """Return the kind of each block in words: how it mixes tokens, and whether it has experts."""
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


def table(facts: Iterable[Fact], version: str) -> str:
    """Return the text of the page docs/reference/architectures.md with a row for each of `facts`.

    `version` is the version of transformers that traced them.
    """
    rows = sorted(facts, key=lambda fact: fact.architecture)
    supported = [fact for fact in rows if not fact.refused]
    counts = {
        "supported": len(supported),
        "untried": sum(fact.refused.startswith("not tried") for fact in rows),
        "refused": sum(fact.refused.startswith("not supported") for fact in rows),
        "split": sum(not fact.not_split for fact in supported),
    }
    versions = {"oldest": OLDEST_TRANSFORMERS, "newest": NEWEST_TRANSFORMERS}
    head = _HEAD.format(version=version, **versions, **counts)
    return "\n".join([head, *map(str, rows), ""])


def facts_before() -> dict[str, Fact]:
    """Return the rows of the page, by architecture."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    facts = map(Fact.read, lines)
    return {fact.architecture: fact for fact in facts}


def version_before() -> str:
    """Return the version of transformers with which the page was written."""
    (found,) = re.findall(r"--write` with\stransformers ([\d.]+[a-z\d])", PAGE.read_text())
    return str(found)


class Change(NamedTuple):
    """A row of the table that the installed transformers changes."""

    name: str
    before: Fact | None
    now: Fact | None

    @property
    def lost(self) -> bool:
        """True if a supported architecture is refused now, or gone from transformers."""
        if self.before is None or self.before.refused:
            return False
        return self.now is None or bool(self.now.refused)

    def __str__(self) -> str:
        if self.now is None:
            return f"gone     {self.name}"
        if self.before is None:
            return f"new      {self.name}: {self.now.refused or self.now.layers}"
        pairs = zip(self.before[1:5], self.now[1:5], strict=True)
        cells = [f"{was or '-'} -> {now or '-'}" for was, now in pairs if was != now]
        return f"{'LOST' if self.lost else 'changed':<8} {self.name}: {'; '.join(cells)}"


def changes(names: Iterable[str] = ()) -> list[Change]:
    """Return how rows of the page differ from what a trace says now.

    Architectures that are no longer supported come first. `names` are the architectures to look at;
    if there are none, all are, also types that are new in transformers or gone from it.
    """
    before = facts_before()
    listed = [*names] or sorted({*before, *ARCHITECTURES})
    found = []
    for name in listed:
        now = fact(name) if name in ARCHITECTURES else None
        was = before.get(name)
        if now is None or was is None or now[:5] != was[:5]:
            found.append(Change(name, was, now))
    return sorted(found, key=lambda change: not change.lost)


def has_unknown_code(architecture: str) -> bool:
    """Return whether ISP replaces code of this model type whose source it does not know.

    Known sources have their hash in isp/models/known_code.txt.
    """
    try:
        return bool(unknown_code(tiny_model(config_of(architecture))))
    except ValueError:
        # Without a small model there is nothing to compare.
        return False


def sources(packages: Iterable[str | Path]) -> str:
    """Return the text of isp/models/known_code.txt, with the hashes of more code added.

    `packages` are folders of versions of transformers whose code is added. Write the text only when
    with these versions all tests pass, and `--compare` of all architectures.
    """
    folders = [Path(package) for package in packages]
    inits = "".join((folder / "__init__.py").read_text() for folder in folders)
    before = KNOWN.read_text().partition(" of transformers ")[2].partition("\n")[0]
    versions = {*before.split(), *re.findall(r'^__version__ = "(.*)"', inits, re.MULTILINE)}
    found = {name: {*hashes} for name, hashes in known_code().items()}
    for file in (file for folder in folders for file in folder.glob("models/*/modeling_*.py")):
        place, text = f"{file.parent.name}.{file.stem}.", file.read_text()
        own = [name.removeprefix(place) for name in REPLACED if name.startswith(place)]
        bases = "|".join(own) or "no class"
        own += re.findall(rf"^class (\w+)\((?:{bases})\)", text, re.MULTILINE)
        names = {place + name: name for name in own}
        names |= {name: name for name in FREE_FUNCTIONS if f"\ndef {name}(" in text}
        for full, name in names.items():
            found.setdefault(full, set()).add(source_hash(text, name) or "")
    lines = [" ".join((name, *sorted(found[name] - {""}))) for name in sorted(found)]
    return "\n".join([_SOURCES.format(" ".join(sorted(versions))), *lines, ""])


_SOURCES = """# Hashes of code that isp replaces: see isp/models/known_code.py.
# Written by tools/check_architectures.py --sources, of transformers {}"""


_HEAD = """# Architectures

Which models of transformers ISP trains, in which modes, and why others are refused. ISP traces a
model and does not know models by name, so this is a list of what was tried: the default
configuration of each causal model type, shrunk, with a layer of every kind. Entries in brackets are
further configurations, or the text part of a vision-language model.

{supported} are supported. {refused} are refused before any process starts; the table says why.
{untried} have no small model to try. [`isp check FOLDER`](../guides/check.md) compares your model.

Written by `python tools/check_architectures.py --write` with transformers {version}; a test checks
a sample.

## Versions

ISP supports transformers {oldest} to {newest}; any other version gives a warning.
`bash tools/check_newest.sh` tries the newest releases of transformers, peft, datasets and
accelerate and prints what they change in this table; `tools/newest.txt` has its last result.
With 5.17, `aria_text` is lost; with 5.24, `llama4` as a vision-language model, whose own forward
fails there (`llama4_text` works).

## What "supported" means

The loss, every gradient and the weights after a step of AdamW match those of the unmodified model
within 1e-9. The last column names the versions of transformers with which `--compare` found this,
with the torch that `constraints.txt` pins:

* *dtype*: float64 on CPU, casts to float32 inside of the model included;
* *experts*: the unmodified model computes them one by one, ISP by grouped products, as in a run;
  these are products of float64 here, since torch's kernel has no float64;
* *attention*: eager in the unmodified model, which gets one document of a packed row at a time;
* *layouts*: tensor x weight groups of 2 x 2; 4 x 1, as 2 heads x 2 context ranks where possible;
  msp on 2 ranks where there is a plan; packed, all blocks recomputed, scans by state.

The test suite has one or more models for each mechanism, in all combinations of groups of 1, 2 and
4, packed and not, recomputed and not. Dropout is 0, because ISP does not support it.
`python tools/check_architectures.py NAME` compares an entry in every layout. bfloat16 and CUDA are
not compared here.

## mtp, msp and fsp

These modes need a tensor-parallel plan (`base_model_tp_plan`), which {split} entries have; for the
others, the column says what is missing. The tensor size must divide the heads. What the plan does
not shard is whole on every rank, as are experts, unless `parallel.expert.size` equals the tensor
size. In mtp, every rank computes convolutions and scans for all tokens; msp and fsp split them over
ranks, as isp does. If a model's code takes a mean or a norm without weights over all features
between a column and a row linear, the shapes fit but the result would be wrong: the probe compares
each rank's features with those of the whole model, and refuses the model by name.

## Experts

51 of 52 types with experts were compared with `parallel.expert.size` 2 and 4 on 4 ranks, and 2 in
mtp, msp and fsp: gradients match within 5e-13. longcat_flash is refused, because some of its
experts have no weights: it gathers all experts of a layer at once. Mixtral, Qwen3-MoE, GLM4-MoE,
OLMoE, gpt-oss, DeepSeek-V2 and V3 were compared in 15 layouts on up to 8 ranks, including heads x
context and all four pipeline schedules (11 layouts without a plan). Gradients match within 4e-15:
`python tools/check_architectures.py --layouts "2x4 ep2 1F1B 2,1x8 ep4,2x2x4 ep2,.." NAME`.

## Layers

Layers may use attention, convolutions and scans (linear attention, state spaces), in any number and
order, if they call the functions that transformers' own modules call. For modules with other code,
ISP has forwards that call these functions (`isp/models/huggingface/patches/`); add yours with
`isp.register_mixer`. A probe looks for other code that mixes tokens, in forward, in backward and at
the length of a row, and refuses the model by name
([what it finds](../guides/check.md#what-is-checked-before-a-run)). Chunked attention is not split
over context ranks. The weight of Mamba's `dt_proj` is multiplied outside of its linear, so it is
gathered there, and its bias is whole on every rank.

Sparse attention is supported for the indexers of DeepSeek-V3.2, of the models derived from it, and
of MiniMax-M3, in isp mode. The indexer's small keys are gathered, each token chooses keys in its
own document, and the chosen keys are gathered with its query. The choice has no gradient, so an
indexer's weights do not change, as in the unmodified model.

## The table

| type | class | kinds of layers | isp | mtp, msp, fsp | compared with |
|---|---|---|---|---|---|"""


def layouts_of(subject: Subject) -> list[Layout]:
    """Return those of `LAYOUTS`, `SPLIT` and `SPREAD` in which a model can be split.

    For example, a model with chunked attention has no context groups, and only a model with a
    tensor-parallel plan has the modes mtp, msp and fsp.
    """
    every = (*LAYOUTS, *SPLIT, *SPREAD)
    return [x for x in every if not fault_of(subject, x, ParallelConfig())]


def jobs_of(subject: Subject, names: str) -> Iterator[tuple[Check, list[Layout]]]:
    """Yield the comparisons of a model, each with its layouts.

    `names` lists the layouts to compare. Those in which the model cannot be split are left out;
    raises ValueError if none is left, with the reason against the first one. If `names` is empty,
    all layouts are compared, for a model with scans twice: split by heads, and by state.
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
            # The copy keeps the results of the plain model, so they are computed once.
            other = copy.copy(first)
            other.parallel = ParallelConfig(sequence_scan=way)
            yield other, layouts


def quick_jobs_of(subject: Subject) -> Iterator[tuple[Check, list[Layout]]]:
    """Yield the comparison of `--compare`: packed documents, with all blocks recomputed.

    Its layouts are 2 x 2, a tensor group of 4 (with context groups of 2 if the model can be split
    so), and msp if the model has a tensor-parallel plan. Scans are split by state.
    """

    def fits(layout: Layout) -> bool:
        return not fault_of(subject, layout, ParallelConfig())

    wide = next((x for x in (Layout(4, 1, context=2), Layout(4, 1)) if fits(x)), Layout(1, 4))
    layouts = [x for x in (Layout(2, 2), wide, Layout(2, 1, Mode.MSP)) if fits(x)]
    scans = Kind.SCAN in {call.kind for call in subject.language_model(0.0).trace.calls}
    way = ParallelConfig(sequence_scan=SequenceScan.STATE if scans else SequenceScan.AUTO)
    yield Check(subject, layouts, cases=[CheckCase(True, True)], parallel=way), layouts


def check(architecture: str, names: str = "", *, quick: bool = False) -> str:
    """Compare an architecture with the plain model, and return a line that begins with `ok` if the
    results agree.

    `names` lists the layouts to compare; empty: all. `quick`: compare in the few layouts of
    `--compare` only.
    """
    began, verdicts = time.monotonic(), list[Verdict]()
    try:
        subject = Subject.of_config(config_of(architecture), most_stages(names or "all"))
        jobs = list(quick_jobs_of(subject) if quick else jobs_of(subject, names))
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


def compare(names: Iterable[str]) -> Iterator[str]:
    """Yield a line of `check` for each architecture.

    If it is `ok`, the version of transformers is added to the architecture's row of the page. The
    page is written after each architecture, so an interrupted comparison loses nothing.
    """
    minor = ".".join(__version__.split(".")[:2])
    for name in names:
        line, facts = check(name, quick=True), facts_before()
        if name in facts:
            versions = {v for v in facts[name].compared.split(", ") if v} - {minor}
            versions |= {minor} if line.startswith("ok") else set()
            facts[name] = facts[name]._replace(compared=", ".join(sorted(versions, key=Version)))
            PAGE.write_text(table(facts.values(), version_before()))
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--write", action="store_true", help=f"trace, and write {PAGE.name}")
    ways.add_argument("--compare", action="store_true", help="compare three layouts, and write it")
    ways.add_argument("--changes", action="store_true", help=f"list what differs from {PAGE.name}")
    ways.add_argument("--newest", action="store_true", help="--changes; compare each mechanism")
    ways.add_argument("--sources", action="store_true", help=f"write {KNOWN.name}")
    ways.add_argument("--layouts", default="", metavar="LIST", help="as of isp check")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.write:
        before = facts_before()
        # If types are named, keep the rows of all others. If not, begin with none, so that types
        # which transformers no longer has lose their rows.
        facts = {n: f for n, f in before.items() if args.names}
        for name in args.names or ARCHITECTURES:
            found = fact(name)
            if name in before and before[name][:5] == found[:5]:
                # Nothing changed, so keep the old row with the versions in `compared`.
                found = before[name]
            facts[name] = found
        PAGE.write_text(table(facts.values(), __version__))
        return 0
    if args.sources:
        KNOWN.write_text(sources(args.names or [Path(transformers.__file__).parent]))
        return 0
    bad = 0
    if args.changes or args.newest:
        found = changes(args.names)
        bad += sum(change.lost for change in found)
        print("\n".join(map(str, found)) or "every row is as in the table", flush=True)
        if args.changes:
            return 1 if bad else 0
    names, quick = args.names or [*ARCHITECTURES], args.newest
    # Compare one type for each mechanism, and the types for which ISP replaces code that is new.
    if args.newest and not args.names:
        names = [n for n in names if n in MECHANISMS or has_unknown_code(n)]
    lines = compare(names) if args.compare else (check(n, args.layouts, quick=quick) for n in names)
    for line in lines:
        bad += not line.startswith(("ok", "refused"))
        print(line, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
