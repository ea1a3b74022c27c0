"""The subcommands of `isp`: what they take, and which part of the project does the work.

Imports stand in the functions that need them: most commands answer without loading torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from isp import __version__
from isp.cli import check_command, plan_command, profile_command
from isp.cli.failures import report
from isp.cli.launch import follow_launcher
from isp.cli.options import add_nproc, positive

if TYPE_CHECKING:
    from isp.config import JobConfig

__all__ = ["main"]

_OVERRIDES_HELP = (
    "Every key of the file can be given as --section.key value, after CONFIG; "
    "`isp config CONFIG` prints them all, `isp config --help-keys [SECTION]` says what they mean."
)


class _Words(NamedTuple):
    """The words of a command line: argparse's own, and those that change the configuration."""

    options: list[str]
    overrides: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code: 0 done, 2 the user can put it right, 1 a fault."""
    follow_launcher()
    words = _split(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args, rest = parser.parse_known_args(words.options)
    if rest and not (args.takes_overrides and rest[0].startswith("--")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = [*words.overrides, *rest]  # `--lr 1` is a key too: an unknown one
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `isp topology ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return report(error)


def _split(words: Sequence[str]) -> _Words:
    """Take `--section.key value` and `--section.key=value` out of `words`."""
    options, overrides = [], []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            options.append(word)
            continue
        overrides.append(word)
        if not equals and pending and not pending[-1].startswith("--"):
            overrides.append(pending.pop())
    return _Words(options, overrides)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isp",
        description="Trains long-context language models on many ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_nproc(_command(commands, "train", _train, "train as a YAML file says", overrides=True))
    _add_config(
        _command(commands, "config", _config, "print the full configuration", overrides=True)
    )
    _command(
        commands,
        "prefetch",
        _prefetch,
        "print when each weight of a step is gathered, waited for and freed",
        once="schedule",
        overrides=True,
    )
    profile_command.add_options(
        _command(
            commands,
            "profile",
            profile_command.run,
            "measure what communication costs in each mode",
            overrides=True,
        )
    )
    check_command.add_options(
        _command(
            commands,
            "check",
            check_command.run,
            "compare layouts of a model with the plain model: loss, every gradient, a step",
            overrides=True,
        )
    )
    plan_command.add_plan_options(
        _command(
            commands,
            "layouts",
            plan_command.run_plan,
            "say which layouts fit on so many ranks, and how fast each would be",
            once="plan",
            overrides=True,
        )
    )
    plan_command.add_calibrate_options(
        _command(
            commands,
            "calibrate",
            plan_command.run_calibrate,
            "measure this machine for isp layouts",
        )
    )
    _add_topology(_command(commands, "topology", _topology, "print the groups of ranks"))
    _add_report(
        _command(commands, "report", _report, "make an HTML page and pictures from a run's folder")
    )
    data = commands.add_parser("data", help="work on data", allow_abbrev=False)
    actions = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(
        _command(actions, "prepare", _prepare, "turn text or chats into the .bin/.idx format")
    )
    saved = commands.add_parser(
        "checkpoint", help="look at or export checkpoints", allow_abbrev=False
    )
    actions = saved.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, run, summary in (
        ("inspect", _inspect, "show what checkpoints hold"),
        ("verify", _verify, "read checkpoints and compare their checksums"),
    ):
        _add_checkpoint(_command(actions, name, run, summary))
    _add_export(_command(actions, "export", _export, "write a checkpoint as a Hugging Face folder"))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    once: str | None = None,
    overrides: bool = False,
) -> argparse.ArgumentParser:
    """A subcommand; `once` is what it was called before, which still works."""
    parser = commands.add_parser(
        name,
        aliases=[once] if once else [],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_OVERRIDES_HELP if overrides else None,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_overrides=overrides)
    if overrides:
        parser.add_argument(
            "config", metavar="CONFIG", help="a YAML file, such as those in configs/"
        )
        parser.usage = (
            f"isp {name} CONFIG {'[--nproc N] ' * (name == 'train')}[--section.key value ...]"
        )
    return parser


def _train(args: argparse.Namespace) -> int:
    from isp.cli.launch import launch, reports_for_ranks, world_size
    from isp.config import load_config

    config = load_config(args.config, args.overrides)
    # Every error before any process starts.
    topology = config.topology(world_size(args.nproc, least=config.parallel.least_ranks))
    config.require_packages()
    if config.model.hf is not None:
        _ = config.language_model  # made, or refused, now
    if config.optimizer.param_groups:
        from isp.train.run import check_param_groups

        check_param_groups(config)
    if "RANK" not in os.environ:
        from isp.train.resume import check_start

        check_start(config, topology)
    if os.environ.get("RANK", "0") == "0" and not reports_for_ranks():
        _note_unused(config)
    if args.nproc is not None:
        from isp.train.data import check_data
        from isp.train.run import check_devices

        check_devices(config, args.nproc)
        check_data(config)
        return launch(args.nproc, ["-m", "isp", "train", args.config, *args.overrides])
    from isp.train import main as train

    train(config)
    return 0


def _note_unused(config: JobConfig) -> None:
    for sentence in config.unused():
        print(f"note: {sentence}", file=sys.stderr)


class _HelpKeys(argparse.Action):
    """Prints the reference of the keys and ends, as --help does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from isp.config import JobConfig
        from isp.config.keys import KeyTable

        try:
            print(KeyTable.of(JobConfig).reference(None if values is None else str(values)))
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        parser.exit()


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--help-keys",
        nargs="?",
        action=_HelpKeys,
        metavar="SECTION",
        help="say what the keys (of SECTION) mean, with their types and defaults",
    )


def _prefetch(args: argparse.Namespace) -> int:
    from isp.config import load_config
    from isp.models.schedule import schedule_text

    config = load_config(args.config, args.overrides)
    print(schedule_text(config.language_model, config.parallel, config.data.micro_num))
    return 0


def _config(args: argparse.Namespace) -> int:
    from isp.config import load_config, to_yaml

    config = load_config(args.config, args.overrides)
    print(to_yaml(config), end="")
    _note_unused(config)
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN_FOLDER", help="such as outputs/<job>/latest")
    parser.add_argument(
        "--output", metavar="FOLDER", help="where to write it; default: RUN_FOLDER/report"
    )


def _report(args: argparse.Namespace) -> int:
    from isp.report import write_report

    done = write_report(args.folder, args.output)
    print(f"{done.html}: open it in a browser; beside it {len(done.pictures)} pictures")
    return 0


def _shape(text: str) -> tuple[int, int]:
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdecimal() and inputs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write e.g. 16x8")
    return positive(outputs), positive(inputs)


def _add_topology(parser: argparse.ArgumentParser) -> None:
    from isp.parallel.config import Mode

    sizes = {
        "--world": "ranks in all",
        "--tensor": "ranks that share one sequence",
        "--pipeline": "pipeline stages",
        "--weight": "isp: ranks that share one copy of the weights",
    }
    for name, meaning in sizes.items():
        required = name == "--world"
        parser.add_argument(
            name, type=positive, default=1, required=required, metavar="N", help=meaning
        )
    parser.add_argument(
        "--zero1",
        type=int,
        default=-1,
        metavar="N",
        help="ranks that share optimizer states; -1: all",
    )
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default=Mode.ISP.value, help="default: isp"
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="OUTxIN",
        help="draw how a weight of this shape is cut, rank by rank",
    )


def _topology(args: argparse.Namespace) -> int:
    from isp.parallel.config import (
        Mode,
        ParallelConfig,
        PipelineConfig,
        TensorConfig,
        WeightConfig,
        Zero1Config,
    )
    from isp.parallel.picture import describe_cuts
    from isp.parallel.topology import Topology

    parallel = ParallelConfig(
        tensor=TensorConfig(size=args.tensor, mode=Mode(args.mode)),
        weight=WeightConfig(size=args.weight),
        pipeline=PipelineConfig(size=args.pipeline),
        zero1=Zero1Config(size=args.zero1),
    )
    topology = Topology.create(args.world, parallel)
    picture = "" if args.shape is None else describe_cuts(topology, args.shape)
    print(topology.describe())
    if picture:
        print(f"\n{picture}")
    return 0


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="text or .jsonl files, folders, globs"
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default) or a Hugging Face tokenizer.json"
    )
    parser.add_argument(
        "--eos-token",
        metavar="TOKEN",
        help="the token that ends a document; without it, the one the tokenizer declares",
    )
    parser.add_argument("--text-key", default="text", help="key of the text in .jsonl lines")
    parser.add_argument(
        "--format",
        choices=("auto", "text", "messages", "tokens"),
        default="auto",
        help="what .jsonl lines hold; auto (default): as the keys of a file's first line say",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that renders messages, in place of the tokenizer's own template",
    )


def _prepare(args: argparse.Namespace) -> int:
    from isp.data.config import Format
    from isp.data.prepare import prepare

    done = prepare(
        args.inputs,
        args.output,
        tokenizer=args.tokenizer,
        text_key=args.text_key,
        eos_token=args.eos_token,
        form=Format(args.format),
        chat_template=args.chat_template,
    )
    files, kind, trained = f"{done.prefix}.bin and .idx", "documents", ""
    if done.num_trained is not None:
        files, kind = f"{files}, and .labels of both", "examples"
        trained = (
            f", {done.num_trained:,} of them trained; {done.num_dropped:,} without a trained token"
            " left out"
        )
    print(
        f"{files}: {done.num_tokens:,} tokens in {done.num_documents:,} {kind}{trained}, from"
        f" {done.num_bytes:,} bytes; train with --data.source {done.prefix}"
    )
    return 0


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint, a folder of them, or the folder of a run"
    )


def _inspect(args: argparse.Namespace) -> int:
    from isp.checkpoint import inspect

    print(inspect(args.path))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from isp.checkpoint import verify

    verdict = verify(args.path)
    print(verdict.text)
    return 0 if verdict.good else 1


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument(
        "--hf", required=True, metavar="FOLDER", help="write it there: an empty folder, or none yet"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16", "float16"],
        help="of the weights; default: training.dtype of the run",
    )


def _export(args: argparse.Namespace) -> int:
    from pathlib import Path

    from isp.train.export import export

    done = export(Path(args.path), Path(args.hf), dtype=args.dtype)
    print(
        f"{args.hf}: {done.model_type}, {done.num_tensors} tensors in {done.dtype}, of"
        f" {done.source}; from_pretrained of transformers loads it"
    )
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
