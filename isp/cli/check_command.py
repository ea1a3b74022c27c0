"""`isp check`: compares layouts of a model with the plain model, and says where they differ."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isp.train.check import Check, Differences, Layout, Verdict

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
        help="such as 2x4,4x1: sizes of the tensor and the weight group in isp mode"
        " (default: all, with 1, 2 and 4 of each; of isp's own decoder also the other modes)",
    )
    parser.usage = "isp check CONFIG|FOLDER [--layouts all|TxW,...] [--section.key value ...]"
    parser.epilog = (
        "The model is shrunk to a small one of the same structure, with random weights, and trains"
        " one step in float64 on CPU ranks of this machine: packed or not, recomputed or not."
        " FOLDER is one of Hugging Face, of which config.json is read."
    )


def run(args: argparse.Namespace) -> int:
    """Check, and print a line a layout; 1 if any differs."""
    from tqdm import tqdm

    from isp.train.check import TOLERANCE

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
    from isp.train.check import Check
    from isp.train.check_subjects import DecoderSubject, HuggingFaceSubject, read_folder

    torch.set_num_threads(1)  # the ranks share the cores, and the plain model is small
    torch.manual_seed(0)
    path = Path(args.config)
    if path.is_dir():
        if args.overrides:
            raise ConfigError(f"{args.overrides[0]} changes a configuration, and {path} is none")
        layouts = _layouts(args.layouts, own=False)
        return Check(HuggingFaceSubject(read_folder(path)), layouts), layouts
    config = load_config(path, args.overrides)
    folder = config.model.hf
    layouts = _layouts(args.layouts, own=folder is None)
    check = Check(
        DecoderSubject(config.model)
        if folder is None
        else HuggingFaceSubject(read_folder(Path(folder))),
        layouts,
        parallel=config.parallel,
        optimizer=config.optimizer,
        max_norm=config.training.max_norm,
    )
    return check, layouts


def _layouts(text: str, *, own: bool) -> list[Layout]:
    """The layouts that `text` names; `own`: of isp's own decoder, which has all modes."""
    from isp.config import ConfigError
    from isp.parallel import Mode
    from isp.train.check import Layout

    if text == "all":
        found = [Layout(tensor, weight) for tensor in _SIZES for weight in _SIZES]
        others = [mode for mode in Mode if own and not mode.facts.gathers_weights]
        return found + [Layout(tensor, 1, mode) for mode in others for tensor in _SIZES[1:]]
    found = []
    for name in text.split(","):
        sizes = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", name.strip())
        if sizes is None:
            raise ConfigError(
                f"--layouts {text}: {name.strip()!r} is no layout: write all, or sizes of the"
                f" tensor and the weight group such as 2x4,4x1"
            )
        found.append(Layout(int(sizes[1]), int(sizes[2])))
    return list(dict.fromkeys(found))


_HEAD = f"{'layout':<9}{'loss':>9}{'norm':>9}{'update':>9}  gathers     result   worst gradient"


def _line(verdict: Verdict) -> str:
    """A line of the table."""
    name = f"{verdict.layout!s:<9}"
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
