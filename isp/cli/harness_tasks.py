"""`isp evaluate --tasks`: tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isp.cli.options import add_option, not_negative, positive
from isp.cli.output import say
from isp.foreign.files import write_whole
from isp.foreign.shown import redacted

if TYPE_CHECKING:
    from isp.evaluation.engine import Engine
    from isp.evaluation.source import Source

__all__ = ["add_task_options", "check_tasks", "run_tasks"]

_FILE = "tasks.json"
_MAX_LENGTH = 2048
"""Tokens that are read, where a model does not say; as of the harness's own `hf` model."""


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the tasks and, under the harness's names, how they are asked."""
    group = parser.add_argument_group(
        "tasks of lm-evaluation-harness, instead of text and passkeys"
    )
    group.add_argument(
        "--tasks", type=lambda text: text.split(","), metavar="NAME,NAME,...", help="tasks to run"
    )
    for name, metavar, kind, meaning in (
        ("include-path", "FOLDER", str, "YAML files of the tasks (default: the harness's)"),
        ("num-fewshot", "N", not_negative, "examples before each question (default: the task's)"),
        ("limit", "N", positive, "most questions of each task (default: all)"),
        ("max-length", "N", positive, "most tokens of a request (default: the training length)"),
    ):
        add_option(group, name, metavar, kind, meaning)
    group.add_argument(
        "--apply-chat-template",
        "--apply_chat_template",
        action="store_true",
        help="ask each question as a user message, rendered with the model's chat template",
    )


def check_tasks(args: argparse.Namespace, source: Source) -> None:
    """Raise ValueError, in a line, for what cannot be; sets `max_length`."""
    if args.png or args.data or args.lengths:
        raise ValueError(
            "--tasks: leave out --png, --data and --lengths, which do not apply to tasks"
        )
    from isp.settings.packages import require

    require("--tasks", "lm_eval", extra="lm-eval")
    if args.apply_chat_template:
        source.chat_template()
    limit = source.position_limit
    args.max_length = args.max_length or source.trained_length or _MAX_LENGTH
    if limit is not None and args.max_length > limit:
        raise ValueError(
            f"--max-length {args.max_length}: the model has a table of {limit:,} positions"
        )
    from isp.evaluation import harness

    harness.check_tasks(args.tasks, args.include_path)


def run_tasks(
    args: argparse.Namespace, engine: Engine, source: Source, *, rank: int, about: dict[str, str]
) -> None:
    """Print what was found, and write it, `about` the model, too; on each rank."""
    from isp.evaluation.harness import HarnessModel, evaluate_tasks

    results = evaluate_tasks(
        HarnessModel(
            engine,
            source,
            max_length=args.max_length,
            batch_tokens=args.batch_tokens,
            chat=source.chat_template() if args.apply_chat_template else None,
        ),
        args.tasks,
        args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        quiet=rank != 0,
    )
    if rank != 0:
        return
    assert results is not None, "the first rank of all is the first of its machine"
    from lm_eval.utils import handle_non_serializable

    from isp.profile.table import aligned

    say(aligned(list(_table(results["results"]))))
    if args.output is not None:
        results["config"].update(about, model=source.title)
        file = Path(args.output) / _FILE
        text = json.dumps(results, indent=1, default=handle_non_serializable)
        write_whole(file, redacted(f"{text}\n"))
        say(f"\nwrote {file}")


def _table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line for each metric; its key is `name,filter`."""
    yield "task", "questions", "metric", "value", "stderr"
    for task, found in results.items():
        for key, value in found.items():
            metric, _, through = key.partition(",")
            if through and not metric.endswith("_stderr"):
                error = found.get(f"{metric}_stderr,{through}", "N/A")
                name = metric if through == "none" else f"{metric} ({through})"
                yield task, str(found.get("sample_len", "")), name, *map(_number, (value, error))


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
