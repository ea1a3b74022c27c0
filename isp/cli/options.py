"""Command-line options and types that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isp.config import JobConfig

__all__ = [
    "Run",
    "add_nproc",
    "add_option",
    "add_planning",
    "add_reading",
    "check_planned",
    "not_negative",
    "positive",
]

Run = Callable[[argparse.Namespace], int]
"""Function that runs a command and returns its exit code."""
_LARGEST = 2**20
"""Upper limit for numbers of ranks, layouts and steps; more would take minutes to list."""


def add_nproc(parser: argparse.ArgumentParser) -> None:
    """Add `--nproc`, the number of ranks to start."""
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="start N ranks on this machine (without it: one process, or what torchrun started)",
    )


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the path of a trained model, and its dtype, device and tokenizer."""
    parser.add_argument(
        "path",
        metavar="RUN|STEP|HF_FOLDER",
        help="the folder of a run (its newest checkpoint), a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16", "float16"],
        help="dtype of weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH|bytes", help="use another tokenizer than in training"
    )


def add_option(
    parser: argparse.ArgumentParser,
    name: str,
    metavar: str,
    kind: Callable[[str], object],
    meaning: str,
    default: float | None = None,
) -> None:
    """Add an option by its name, also with `_` for `-`, as transformers and vLLM spell it."""
    names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
    shown = meaning if default is None else f"{meaning} (default: {default})"
    parser.add_argument(*names, metavar=metavar, type=kind, default=default, help=shown)


def check_planned(config: JobConfig) -> None:
    """Raise ValueError for a training objective that plans do not cover."""
    if config.training.objective != "sft":
        raise ValueError(
            f"training.objective={config.training.objective}: plans cover one model with the loss"
            f" of tokens: plan with --training.objective=sft, and add the memory of a second"
            f" model's weights"
        )


def add_planning(parser: argparse.ArgumentParser, unit: str) -> None:
    """Add the options --fabric, the machine to plan for, and --json.

    `unit` is the unit of the JSON's numbers other than bytes, for the help text.
    """
    parser.add_argument(
        "--fabric",
        default="h100x8_ib400",
        metavar="FILE",
        help="the machine: a YAML file, or the name of one that ships with isp"
        " (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON, in bytes and {unit}")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _from(1, text)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    """Parse a whole number from `least` to `_LARGEST`; for argparse."""
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text} must be a whole number from {least} to {_LARGEST}"
        )
    return int(text)
