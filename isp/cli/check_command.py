"""`isp check` compares layouts of a model with the plain model and shows where they differ."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isp.config import JobConfig
    from isp.parity.api import CheckKeys
    from isp.parity.compare import Check, Verdict
    from isp.parity.layouts import Layout

from isp.cli.options import Run
from isp.cli.output import compute_on_one_thread, say, say_progress

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add the command's options besides CONFIG and overrides."""
    parser.add_argument(
        "--layouts",
        default="all",
        metavar="LIST",
        help="layouts such as 2x4,2x2x4,mtp2. 2x4 is tensor x weight in isp mode, 2x2x4 head x"
        " context x weight, mtp2 another mode and its tensor size. A pipeline follows as schedule,"
        " stages and chunks per rank: '2x2 1F1B 2', '1x1 ZBVZeroBubble 2x2' (default: all that fit"
        " the model with sizes 1, 2 and 4, and some with a context group)",
    )
    parser.epilog = (
        "The check uses a small model with the same structure and random weights. It trains one"
        " step in float64 on CPU ranks of this machine: packed or not, recomputed or not."
        " CONFIG may also be a Hugging Face folder; only its config.json is read, which"
        " model.hf_overrides may change. These overrides apply to every layout: model.checkpoint"
        " and the keys that begin with it,"
        " model.mlp_tile_tokens and model.loss_chunk_tokens (both shrunk with the model),"
        " parallel.weight, optimizer."
    )
    return _run


def _run(args: argparse.Namespace) -> int:
    """Run the check and print a line for each layout; returns 1 if any layout differs."""
    from tqdm import tqdm

    from isp.parity.compare import HEAD, heading, line, summary

    # Hide all GPUs: where torch finds one, backward runs on threads that exist only in this
    # process, and ranks are forked from it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    check, layouts = _prepare(args)
    say(heading(check))
    say(HEAD)
    verdicts: list[Verdict] = []
    with tqdm(layouts, file=sys.stderr, disable=None, leave=False) as bar:
        for layout in bar:
            bar.set_postfix_str(str(layout))
            verdict = check.run(layout)
            bar.write(line(verdict), file=sys.stdout)
            verdicts.append(verdict)
    say(summary(verdicts))
    return 0 if all(verdict.agrees for verdict in verdicts) else 1


def _prepare(args: argparse.Namespace) -> tuple[Check, list[Layout]]:
    """Return the check and its layouts. Raises ValueError before any rank is started."""
    import torch

    from isp.config import load_config
    from isp.config.sections import TrainingConfig
    from isp.parity.api import keys_from
    from isp.parity.compare import Check
    from isp.parity.layouts import layouts_of, most_stages
    from isp.parity.subjects import Subject, num_blocks, read_folder
    from isp.utils.files import download_hint

    # The ranks share the cores, and each model is too small for several threads.
    compute_on_one_thread()
    torch.manual_seed(0)
    path, training = Path(args.config), TrainingConfig()
    folder: Path | None = path
    keys: CheckKeys | JobConfig
    # The name of a model of the hub is treated as a folder here: `read_folder` below then raises an
    # error that says how to download it, and it is not read as the path of a YAML file.
    if path.is_dir() or download_hint(path):
        keys = keys_from(args.overrides, str(path), folder=str(path))
    else:
        keys = load_config(path, args.overrides)
        training = keys.training
        folder = None if keys.model.hf is None else Path(keys.model.hf)
    if keys.model.adapter is not None:
        raise ValueError(
            "model.adapter: isp check verifies model.hf without adapters: leave it out"
        )
    blocks = num_blocks(most_stages(args.layouts), keys.model)
    say_progress(f"checking {args.config}: making a small copy of its model")
    subject = (
        Subject.of_decoder(keys.model, blocks)
        if folder is None
        else Subject.of_config(read_folder(folder, keys.model.hf_overrides), blocks, keys.model)
    )
    layouts, left_out = layouts_of(args.layouts, subject, keys.parallel)
    for reason in left_out:
        say(reason)
    check = Check(
        subject,
        layouts,
        parallel=keys.parallel,
        optimizer=keys.optimizer,
        max_norm=training.max_norm,
    )
    return check, layouts
