"""Check the architectures of transformers in every layout, or write what is driven of them.

python tools/check_architectures.py [NAME ...]    # all layouts, packed or not, recomputed or not
python tools/check_architectures.py --write       # isp/traced/README.md
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isp.parallel import Mode, ParallelConfig
from isp.run.forked import RankError, run_ranks
from isp.traced.model import TracedModel
from isp.traced.roles import Role
from isp.traced.tiny import tiny_config, tiny_model
from isp.traced.trace import AttentionSizes, ModelTrace
from isp.train.check import Check, Layout, Verdict, fault_of
from isp.train.check_subjects import HuggingFaceSubject

README = Path(__file__).parents[1] / "isp" / "traced" / "README.md"

LAYOUTS = (
    *(Layout(tensor, weight) for tensor in (1, 2, 4) for weight in (1, 2, 4)),
    Layout(2, 2, context=2),
    Layout(4, 2, context=2),
)

SPLIT = tuple(Layout(t, 1, m) for m in (Mode.MTP, Mode.MSP, Mode.FSP) for t in (2, 4))
"""Of models whose tensor-parallel plan does."""

_EXPERTS = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}

_BY_DEFAULT = """llama mistral qwen2 qwen3 phi phi3 gemma gemma2 gemma3_text olmo olmo2 olmo3
granite smollm3 cohere cohere2 glm glm4 starcoder2 stablelm gpt_neox gpt2 mixtral qwen2_moe
qwen3_moe olmoe gpt_oss deepseek_v3 glm4_moe lfm2 ernie4_5 exaone4 helium arcee seed_oss apertus
granite_swa qwen3_next qwen3_5_text minimax"""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _BY_DEFAULT.split()},
    # what transformers' own defaults leave out
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "dots1": {"first_k_dense_replace": 1, **_EXPERTS},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    # a table of positions that takes more than they
    "opt": {},
    # as published, where the defaults have less
    "lfm2 (conv)": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen2 (window)": {"use_sliding_window": True, "max_window_layers": 16},
    "deepseek_v2 (groups)": {
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
}
"""Model types, and where the defaults do not do, the keys that are given."""


class Fact(NamedTuple):
    """One row of the table."""

    architecture: str
    model: str
    layers: str
    """The kinds of layers, in the order of their first."""
    refused: str
    """Why it is not driven; empty if it is."""
    not_split: str = ""
    """Why its features are not split; empty if they are."""


def config_of(architecture: str) -> Any:
    """The configuration of an architecture of `ARCHITECTURES`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(architecture.split()[0], **ARCHITECTURES[architecture])


def fact(architecture: str) -> Fact:
    """What the trace of its small model says."""
    config = config_of(architecture)
    model = tiny_model(config)
    name = type(model).__name__
    try:
        traced = TracedModel(model)
    except ValueError as error:
        kinds = dict.fromkeys(getattr(tiny_config(config), "layer_types", ()))
        reason = str(error).partition(": ")[0]
        return Fact(architecture, name, ", ".join(k.replace("_", " ") for k in kinds), reason)
    kinds, reason = ", ".join(dict.fromkeys(_kinds(traced.trace))), ""
    try:
        traced.check_layout(SPLIT[0].of(ParallelConfig()), SPLIT[0].tensor)
    except ValueError as error:
        reason = str(error).partition("not do: ")[2].partition("; use mode isp")[0]
    return Fact(architecture, name, kinds, "", reason)


def _kinds(trace: ModelTrace) -> list[str]:
    """The kind of each block, in words."""
    kinds = []
    for call in trace.calls:
        if call.sizes is not None:
            experts = [n for n, r in trace.roles.items() if r is Role.EXPERT]
            inside = any(name.startswith(f"{call.block}.") for name in experts)
            kinds.append(_attention(call.sizes) + " with experts" * inside)
    return kinds


def _attention(sizes: AttentionSizes) -> str:
    reach = "sliding window" if sizes.window else "full"
    return f"{reach} latent" if sizes.value_size != sizes.head_size else reach


def table() -> str:
    """The text of isp/traced/README.md."""
    facts = sorted(map(fact, ARCHITECTURES))
    driven = sum(not f.refused for f in facts)
    rows = [
        f"| {f.architecture} | `{f.model}` | {f.layers} |"
        f" {f'refused: {f.refused}' if f.refused else 'driven'} |"
        f" {'' if f.refused else f.not_split or 'yes'} |"
        for f in facts
    ]
    split = sum(not f.refused and not f.not_split for f in facts)
    head = _HEAD.format(driven=driven, refused=len(facts) - driven, split=split)
    return "\n".join([head, *rows, ""])


_HEAD = """# Architectures

Written by `python tools/check_architectures.py --write`; a test checks that it is up to date.

A model of transformers is traced, not known by name, so this is a list of what was tried: the
default configuration of each type, shrunk with a layer of every kind, and in brackets others.
{driven} are driven, {refused} are refused before any process starts.

What is driven gives the loss, every gradient and the weights after a step of AdamW of the
unmodified model within 1e-9, in float64, with tensor and weight groups of 1, 2 and 4 in every
combination, packed or not, recomputed or not. Of packed rows the unmodified model is given each
document by itself. Dropout, which isp does not have, is 0.
`python tools/check_architectures.py` compares them all, the test suite a part of them, and
`isp check FOLDER` any model.

{split} have a tensor-parallel plan (`base_model_tp_plan`) that mtp, msp and fsp follow, and are the
same there with tensor groups of 2 and 4 that divide their heads; experts, and what the plan leaves
alone, stay whole on every rank. Of the others the last column says why not. Code that takes a mean
or a norm without weights of all features between a column and its row has the right shapes and is
wrong: `isp check` finds it, nothing else does.

A layer is refused that calls attention other than once: what mixes tokens in another way (linear
attention, state spaces, convolutions) would need the tokens of other ranks.

| type | class | kinds of layers | isp | mtp, msp, fsp |
|---|---|---|---|---|"""


def check(architecture: str) -> str:
    """A line on an architecture in all layouts; begins with `ok` if nothing differs."""
    began = time.monotonic()
    try:
        subject = HuggingFaceSubject(config_of(architecture))
        split = [layout for layout in SPLIT if not fault_of(subject, layout, ParallelConfig())]
        layouts = [*LAYOUTS, *split]
        job = Check(subject, layouts)
    except ValueError as error:
        return f"refused  {architecture}: {error}"

    def on_rank(rank: int) -> Any:
        return [job.on_rank(rank, layout) for layout in layouts]

    try:
        of_ranks = run_ranks(job.num_ranks, on_rank, timeout_seconds=1200)
    except RankError as error:
        return f"FAILED   {architecture}: {error}"
    of_layouts = zip(layouts, zip(*of_ranks, strict=True), strict=True)
    verdicts = [job.verdict(layout, found) for layout, found in of_layouts]
    return f"{_summary(architecture, verdicts)}, {time.monotonic() - began:.1f} s"


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
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.write:
        README.write_text(table())
        return 0
    bad = 0
    for name in args.names or ARCHITECTURES:
        line = check(name)
        bad += not line.startswith(("ok", "refused"))
        print(line, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
