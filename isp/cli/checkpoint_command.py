"""`isp checkpoint inspect`, `verify` and `export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from isp.cli.options import Run
from isp.cli.output import say

__all__ = ["add_export", "add_inspect", "add_verify"]


def _add_path(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint or folder to read."""
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint, a folder of them, or the folder of a run"
    )


def add_inspect(parser: argparse.ArgumentParser) -> Run:
    """Add the checkpoints to show."""
    _add_path(parser)
    return _run_inspect


def add_verify(parser: argparse.ArgumentParser) -> Run:
    """Add the checkpoints to verify."""
    _add_path(parser)
    return _run_verify


def _run_inspect(args: argparse.Namespace) -> int:
    """Print the contents of checkpoints."""
    from isp.checkpoint import inspect

    say(inspect(args.path))
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    """Compare checkpoints with their checksums; returns 1 if one is damaged."""
    from isp.checkpoint import verify

    verdict = verify(args.path)
    say(verdict.text)
    return 0 if verdict.good else 1


def add_export(parser: argparse.ArgumentParser) -> Run:
    """Add the checkpoint, and the folder to write."""
    _add_path(parser)
    parser.add_argument(
        "--hf", required=True, metavar="FOLDER", help="where to write it: a new or an empty folder"
    )
    choices = ["float32", "float64", "bfloat16", "float16"]
    help_text = "dtype of the weights (default: training.dtype of the run)"
    parser.add_argument("--dtype", choices=choices, help=help_text)
    return _run_export


def _run_export(args: argparse.Namespace) -> int:
    """Write a Hugging Face folder, and print its contents."""
    from isp.train.state.export import export

    done = export(Path(args.path), Path(args.hf), dtype=args.dtype)
    loads = "PeftModel" if done.model_type == "adapter" else "from_pretrained of transformers"
    say(
        f"{args.hf}: {done.model_type}, {done.num_tensors} tensors in {done.dtype}, of"
        f" {done.source}; {loads} loads it"
    )
    for note in done.notes:
        say(f"note: {note}", error=True)
    return 0
