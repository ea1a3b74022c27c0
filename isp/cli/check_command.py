"""`isp check`: compares layouts of a model with the plain model, and says where they differ."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isp.parallel import ParallelConfig
    from isp.train.check import Check, Differences, Layout, Verdict
    from isp.train.check_reference import Subject

__all__ = ["add_options", "run"]

_SIZES = (1, 2, 4)
"""Of tensor and weight groups, unless others are asked for."""

_SHOWN = 3
"""Names in a list of what differs."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options beside CONFIG and overrides."""
    parser.add_argument(
        "--layouts",
        default="all",
        metavar="LIST",
        help="such as 2x4,2x2x4,mtp2: sizes of the tensor and the weight group in isp mode, or of"
        " head, context and weight group, another mode and its size (default: all, with 1, 2 and 4"
        " of each, that the model can be split in, and some with a context group)",
    )
    parser.usage = (
        "isp check CONFIG|FOLDER [--layouts all|TxW|HxCxW|modeT,...] [--section.key value ...]"
    )
    parser.epilog = (
        "The model is shrunk to a small one of the same structure, with random weights, and trains"
        " one step in float64 on CPU ranks of this machine: packed or not, recomputed or not."
        " FOLDER is one of Hugging Face, of which config.json is read."
    )


def run(args: argparse.Namespace) -> int:
    """Check, and print a line a layout; 1 if any differs."""
    from tqdm import tqdm

    from isp.train.check import TOLERANCE

    # Where torch finds a GPU, a backward starts threads, and ranks that are forked then have none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    check, layouts = _prepare(args)
    print(
        f"{check.subject.name}, on {check.num_ranks} ranks, each difference relative to its tensor"
    )
    print(_HEAD)
    different: list[Verdict] = []
    with tqdm(layouts, file=sys.stderr, disable=None, leave=False) as bar:
        for layout in bar:
            bar.set_postfix_str(str(layout))
            verdict = check.run(layout)
            bar.write(_line(verdict), file=sys.stdout)
            if not verdict.agrees:
                different.append(verdict)
    for verdict in different:
        print(f"\n{_explanation(verdict)}")
    if different:
        print(f"\n{len(different)} of {len(layouts)} layouts differ by more than {TOLERANCE:g}")
    else:
        print(f"all {len(layouts)} layouts agree with the plain model within {TOLERANCE:g}")
    return 1 if different else 0


def _prepare(args: argparse.Namespace) -> tuple[Check, list[Layout]]:
    """The check that was asked for; every error before any process starts."""
    import torch

    from isp.config import ConfigError, load_config
    from isp.parallel import ParallelConfig
    from isp.settings import OptimizerConfig, TrainingConfig
    from isp.train.check import Check
    from isp.train.check_subjects import DecoderSubject, HuggingFaceSubject, read_folder

    torch.set_num_threads(1)  # the ranks share the cores, and the plain model is small
    torch.manual_seed(0)
    path = Path(args.config)
    parallel, optimizer, training = ParallelConfig(), OptimizerConfig(), TrainingConfig()
    if path.is_dir():
        if args.overrides:
            raise ConfigError(f"{args.overrides[0]} changes a configuration, and {path} is none")
        subject: Subject = HuggingFaceSubject(read_folder(path))
    else:
        config = load_config(path, args.overrides)
        parallel, optimizer, training = config.parallel, config.optimizer, config.training
        folder = config.model.hf
        subject = (
            DecoderSubject(config.model)
            if folder is None
            else HuggingFaceSubject(read_folder(Path(folder)))
        )
    if args.layouts == "all":
        layouts = _all_layouts(subject, parallel)
    else:
        layouts = [_layout(name.strip(), args.layouts) for name in args.layouts.split(",")]
        layouts = list(dict.fromkeys(layouts))
    check = Check(
        subject, layouts, parallel=parallel, optimizer=optimizer, max_norm=training.max_norm
    )
    return check, layouts


def _all_layouts(subject: Subject, parallel: ParallelConfig) -> list[Layout]:
    """All that the model can be split in; others are said."""
    from isp.parallel import Mode
    from isp.train.check import Layout, fault_of

    found = [Layout(tensor, weight) for tensor in _SIZES for weight in _SIZES]
    found += [_with_context(*sizes) for sizes in ((1, 2, 1), (2, 2, 4), (1, 4, 2))]
    left_out: dict[str, list[str]] = {}
    for mode in (mode for mode in Mode if not mode.facts.gathers_weights):
        for layout in (Layout(tensor, 1, mode) for tensor in _SIZES[1:]):
            if fault := fault_of(subject, layout, parallel):
                left_out.setdefault(fault, []).append(str(layout))
            else:
                found.append(layout)
    for fault, names in left_out.items():
        print(f"without {', '.join(names)}: {fault}")
    return found


def _with_context(head: int, context: int, weight: int) -> Layout:
    from isp.train.check import Layout

    return Layout(head * context, weight, context=context)


def _layout(name: str, text: str) -> Layout:
    """The layout that a word of `--layouts` names."""
    from isp.config import ConfigError
    from isp.parallel import Mode
    from isp.train.check import Layout

    if cut := re.fullmatch(r"([1-9]\d?)x([1-9]\d?)x([1-9]\d?)", name):
        return _with_context(*map(int, cut.groups()))
    if sizes := re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", name):
        return Layout(int(sizes[1]), int(sizes[2]))
    if split := re.fullmatch(r"(mtp|msp|fsp) ?([1-9]\d?)", name):
        return Layout(int(split[2]), 1, Mode(split[1]))
    raise ConfigError(
        f"--layouts {text}: {name!r} is no layout: write all, sizes of the tensor and the weight"
        f" group such as 2x4,4x1, of head, context and weight group such as 2x2x4, or another mode"
        f" and its size such as mtp2"
    )


_HEAD = f"{'layout':<10}{'loss':>9}{'norm':>9}{'update':>9}  gathers     result   worst gradient"


def _line(verdict: Verdict) -> str:
    """A line of the table."""
    name = f"{verdict.layout!s:<10}"
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


def _explanation(verdict: Verdict) -> str:
    """What differs in a layout, and where first, in the first case that has it."""
    if verdict.failure:
        return f"{verdict.layout}: {verdict.failure}"
    wrong = {case: found for case, found in verdict.cases.items() if not found.agree}
    case, found = next(iter(wrong.items()))
    where = f"in {len(wrong)} of {len(verdict.cases)} cases, such as rows {case}"
    return "\n  ".join([f"{verdict.layout}, {where}:", *_faults(found)])


def _faults(found: Differences) -> list[str]:
    from isp.train.check import TOLERANCE

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
