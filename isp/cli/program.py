"""The command `isp`: its subcommands, their options, and the code that runs them.

Imports are inside the functions that need them, since most commands answer without loading torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from isp import __version__
from isp.cli.check_command import add_options as add_check
from isp.cli.checkpoint_command import add_export, add_inspect, add_verify
from isp.cli.data_command import add_inspect_data, add_prepare
from isp.cli.evaluate_command import add_options as add_evaluate
from isp.cli.failures import report, report_broken_pipe, report_end, report_interrupt
from isp.cli.generate_command import add_options as add_generate
from isp.cli.launch import follow_launcher
from isp.cli.options import Run, add_nproc
from isp.cli.output import compute_on_one_thread, say, say_progress
from isp.cli.plan_command import add_calibrate, add_layouts, add_plan
from isp.cli.profile_command import add_options as add_profile
from isp.cli.topology_command import add_options as add_topology
from isp.utils.text import counted

if TYPE_CHECKING:
    from isp.config import JobConfig

__all__ = ["main"]

_OVERRIDES_HELP = (
    "Every key of the file can be given as --section.key value, after CONFIG; "
    "`isp config CONFIG` prints them all, `isp config --help-keys [SECTION]` explains them."
)

_ASSIGNED = re.compile(r"\+{0,2}(\w[\w.]*=.*)", re.DOTALL)
"""An override in the syntax of Hydra, `key=value` or `+key=value`, which isp does not accept."""


_REMOVED_COMMANDS: Mapping[str, str] = {
    "checkpoint import": "use model.hf=FOLDER, which trains it in any layout without a copy",
    "report": "use a tracker (metrics.report_to) for the curves of a run, isp profile --html for"
    " the timeline of a step, and isp evaluate --png",
}
"""Replacements of removed commands, in words."""

_HARNESS = (
    "use lm-eval itself: isp checkpoint export RUN --hf FOLDER, then"
    " lm_eval --model hf --model_args pretrained=FOLDER --tasks ..."
)
_ONE_PROCESS = "one process generates: use --device-map auto where a model needs several GPUs"

_REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {
    ("evaluate", "--apply-chat-template"): _HARNESS,
    ("evaluate", "--html"): "use --png FILE for a picture, and evaluation.json",
    ("evaluate", "--include-path"): _HARNESS,
    ("evaluate", "--limit"): _HARNESS,
    ("evaluate", "--max-length"): _HARNESS,
    ("evaluate", "--num-fewshot"): _HARNESS,
    ("evaluate", "--tasks"): _HARNESS,
    ("generate", "--nproc"): _ONE_PROCESS,
    ("generate", "--parallel.tensor.mode"): _ONE_PROCESS,
    ("generate", "--parallel.tensor.size"): _ONE_PROCESS,
    ("generate", "--parallel.weight.size"): _ONE_PROCESS,
    ("generate", "--stop"): "use --max-new-tokens, or stop_strings of transformers' generate",
    ("layouts", "--html"): "use the printed table, or --json",
    ("plan", "--html"): "use the printed text, or --json",
}
"""Replacements of removed options, by command and option."""


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the right name of an unknown option.

    Options are checked before argparse parses them: if a required option is missing as well,
    argparse would report only that.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # The main parser skips this check: the parser of each command knows that command's options.
        if not self._subparsers:
            known = [option[2:] for option in self._option_string_actions if option[:2] == "--"]
            for word in takewhile(lambda word: word != "--", args):
                name = word.partition("=")[0][2:]
                # argparse takes a word with a space for a value, also if it begins with `--`.
                if word[:2] != "--" or " " in name or name in known:
                    continue
                from isp.utils.text import nearest

                if near := nearest(name, known):
                    self.error(f"--{name}: no such option; did you mean --{near[0]}?")
        return super().parse_known_args(args, namespace)


class _Words(NamedTuple):
    """Words of a command line, split into argparse's own and overrides of the configuration."""

    options: list[str]
    overrides: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns 0 if done, 2 for an error of the user, 1 for a bug."""
    follow_launcher()
    # `isp.core.comm.cuda.use_more_connections` sets the same, but too late for commands that
    # initialize CUDA before they import it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        _check_removed(words)
        args = _parse(_split(words))
        args.words = words
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        return report_interrupt(error)
    except BrokenPipeError as error:
        # The reader of stdout ended first, as in `isp topology ... | head`. Python flushes stdout
        # at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return report_broken_pipe(error)
    except Exception as error:
        return report(error)


def _check_removed(words: Sequence[str]) -> None:
    """Raise ValueError if the words of a command line name a removed command or option."""
    for command, instead in _REMOVED_COMMANDS.items():
        if list(words[: len(command.split())]) == command.split():
            raise ValueError(f"isp {command} was removed: {instead}")
    # Options can be spelled with `_` or with `-`.
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    for (command, option), instead in _REMOVED_OPTIONS.items():
        if list(words[: len(command.split())]) == command.split() and option in given:
            raise ValueError(f"isp {command} {option} was removed: {instead}")


def _split(words: Sequence[str]) -> _Words:
    """Split `--section.key value` and `--section.key=value` from the other words."""
    options, overrides = [], []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        name, equals, _ = word.partition("=")
        # A word with a space is a value, such as a prompt that begins with `--`, not an override.
        if not (name.startswith("--") and "." in name) or " " in name:
            options.append(word)
            continue
        overrides.append(word)
        if not equals and pending and not pending[-1].startswith("--"):
            overrides.append(pending.pop())
    return _Words(options, overrides)


def _parse(words: _Words) -> argparse.Namespace:
    """Parse the words, and add the overrides of the configuration."""
    parser = _build_parser()
    args, rest = parser.parse_known_args(words.options)
    if rest and args.takes_overrides and (found := _ASSIGNED.fullmatch(rest[0])):
        parser.error(f"{rest[0]}: a key is given as --{found[1]}")
    if not args.takes_overrides:
        rest = [*words.overrides, *rest]
    if rest and not (args.takes_overrides and rest[0].startswith("--")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    # Words that no option matches, such as `--lr 1`, are taken as overrides: loading the
    # configuration then reports the unknown key and suggests one.
    args.overrides = [*words.overrides, *rest]
    return args


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="isp",
        description="Train long-context language models on many ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isp {__version__}")
    commands = {"": _add_commands(parser)}
    for command in _COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group not in commands:
            of_group = commands[""].add_parser(group, help=_GROUPS[group], allow_abbrev=False)
            commands[group] = _add_commands(of_group)
        added = commands[group].add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        command.set_up(added)
    return parser


def _add_commands(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add subcommands to `parser`."""
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add_train(parser: argparse.ArgumentParser) -> Run:
    """Add the options of `isp train`."""
    add_nproc(parser)
    parser.add_argument(
        "--parallel",
        choices=["auto"],
        help="train in the layout that isp layouts ranks first for this machine",
    )
    parser.add_argument(
        "--fabric",
        metavar="FILE",
        help="the machine of --parallel auto, as in isp layouts (default: this machine)",
    )
    return _train


def _train(args: argparse.Namespace) -> int:
    """Train in this process, or check everything and start ranks that train."""
    from isp.cli.launch import speaks, start_ranks, without_nproc, world_size
    from isp.config import load_config

    config, store = load_config(args.config, args.overrides), None
    if args.fabric is not None and args.parallel is None:
        raise ValueError(f"--fabric {args.fabric} is for --parallel auto: give both, or neither")
    least = 1 if args.parallel else config.parallel.least_ranks
    ranks = world_size(args.nproc, least=least)
    if args.nproc is not None:
        # This process only starts ranks, which compute in other processes.
        compute_on_one_thread()
    if args.parallel:
        # Rank 0 chooses the layout and sends it to the other ranks through a torch store; the
        # run's process group is made from the same store.
        from isp.cli.auto_layout import LAYOUT_OPTIONS, choose_layout
        from isp.core.comm import decided_by_rank_0

        chosen, store = decided_by_rank_0(
            partial(choose_layout, config, ranks, args.overrides, args.fabric),
            config.comm.init_timeout_seconds,
        )
        config = load_config(args.config, [*args.overrides, *chosen])
        args.words = [*without_nproc(args.words, *LAYOUT_OPTIONS), *chosen]
    if args.nproc is not None:
        # Raise every error of the user here, once, before any rank is started.
        say_progress(f"checking {args.config} before {counted(ranks, 'rank')} are started")
        from isp.step.host_memory import check_host_memory
        from isp.step.job_models import check_models
        from isp.step.setup import check_devices
        from isp.train.data import check_data
        from isp.train.state.resume import check_start

        sized, topology = config.for_ranks(ranks), config.topology(ranks)
        config.require_packages()
        check_models(sized)
        check_devices(config, args.nproc)
        check_host_memory(sized, topology, args.nproc)
        check_data(config)
        # This check of an earlier run in the same folder comes last, so that faults of this command
        # are reported first.
        check_start(sized, topology)
    if speaks():
        _note_unused(config)
    if args.nproc is not None:
        say_progress(f"starting {counted(ranks, 'rank')}")
        code = start_ranks(args.nproc, args.words)
        if code:
            # A rank may have failed after rank 0 marked the run as finished: remove the mark, so
            # that the same command resumes the run.
            from isp.train.state.resume import reopen_finished

            # The run's folder may be gone; the user learns of the failure from `code` anyway.
            with suppress(OSError, ValueError):
                reopen_finished(config.job)
        return code
    from isp.train.run import main as train

    return report_end(train(config, store=store, choose_exchange=_choose_exchange))


def _choose_exchange(
    config: JobConfig, world_size: int, memory_bytes: int | None, *, on_cpu: bool
) -> tuple[JobConfig, str]:
    """Return `config` with the exchange that the planner chooses, and why: `ChooseExchange`.

    The planner is imported only here: runs without context ranks do not need it.
    """
    from isp.planner.exchange import choose_exchange
    from isp.planner.fabric import DeviceSpec

    usable = None if memory_bytes is None else int(memory_bytes * DeviceSpec.usable)
    return choose_exchange(config, world_size, usable, on_cpu=on_cpu)


def _note_unused(config: JobConfig) -> None:
    """Show warnings about keys without effect."""
    for sentence in config.unused():
        say(f"note: {sentence}", error=True)


class _Print(argparse.Action):
    """Option that prints a text and exits, as --help does."""

    def __init__(self, *args: Any, text: Callable[[str | None], str], **options: Any) -> None:
        """`text` returns the text for the option's value."""
        super().__init__(*args, **options)
        self._text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            say(self._text(values))
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        parser.exit()


def _reference(section: str | None) -> str:
    """Return the reference of all keys, or of those in a section."""
    from isp.config import JobConfig
    from isp.config.keys import KeyTable

    return KeyTable.of(JobConfig).reference(section)


def _schema(_: object) -> str:
    """Return the JSON schema of a configuration."""
    from isp.config import json_schema

    return json.dumps(json_schema(), indent=1)


def _add_config(parser: argparse.ArgumentParser) -> Run:
    """Add the options of `isp config`."""
    parser.add_argument(
        "--help-keys",
        nargs="?",
        action=_Print,
        text=_reference,
        metavar="SECTION",
        help="explain the keys (of SECTION), with their types and defaults",
    )
    parser.add_argument(
        "--json-schema",
        nargs=0,
        action=_Print,
        text=_schema,
        help="print the JSON schema of a configuration, from which editors complete keys",
    )
    return _config


def _add_prefetch(_: argparse.ArgumentParser) -> Run:
    """Add no options: `isp prefetch` takes CONFIG and overrides only."""
    return _prefetch


def _prefetch(args: argparse.Namespace) -> int:
    """Print the prefetch plan, and the balance of pipeline stages."""
    say_progress(f"planning {args.config}: tracing its model")
    compute_on_one_thread()
    from isp.config import load_config
    from isp.models.rank_plans import schedule_text
    from isp.step.job_models import trained_model
    from isp.train.monitor.balance import balance_text

    config = load_config(args.config, args.overrides)
    config = config.for_ranks(config.parallel.least_ranks)
    say(schedule_text(trained_model(config), config.parallel, config.data.num_micro_batches))
    if balance := balance_text(config):
        say(f"\n{balance}")
    return 0


def _config(args: argparse.Namespace) -> int:
    """Print the full configuration."""
    from isp.config import load_config, to_yaml

    config = load_config(args.config, args.overrides)
    say(to_yaml(config, of_decoder=False), end="")
    _note_unused(config)
    return 0


class _Command(NamedTuple):
    """A subcommand of isp; a name of two words, as `data prepare`, is a group and a command."""

    name: str
    summary: str
    add: Callable[[argparse.ArgumentParser], Run]
    """Function that adds its options and returns the function that runs it."""
    takes: str = ""
    """`keys`: it takes overrides; `file`: CONFIG and overrides; empty: neither."""

    def set_up(self, parser: argparse.ArgumentParser) -> None:
        """Add the options and overrides of the command."""
        if self.takes == "file":
            parser.epilog = _OVERRIDES_HELP
            help_text = "a YAML file, such as those in configs/"
            parser.add_argument("config", metavar="CONFIG", help=help_text)
        parser.set_defaults(run=self.add(parser), takes_overrides=bool(self.takes))
        if self.takes:
            usage = parser.format_usage().removeprefix("usage: ").rstrip()
            parser.usage = f"{usage} [--section.key value ...]"


_GROUPS = {
    "data": "prepare and inspect data",
    "checkpoint": "inspect, verify and export checkpoints",
}
_CHECK = "verify that layouts match the plain model: loss, every gradient, an update"
_COMMANDS = (
    _Command("train", "train a model as configured in a YAML file", _add_train, "file"),
    _Command("config", "print the full configuration", _add_config, "file"),
    _Command("prefetch", "print when each weight is gathered and freed", _add_prefetch, "file"),
    _Command("profile", "measure what communication costs in each mode", add_profile, "file"),
    _Command("check", _CHECK, add_check, "file"),
    _Command("generate", "generate text with a trained model", add_generate),
    _Command("evaluate", "measure loss by position and passkeys", add_evaluate, "keys"),
    _Command("plan", "show the memory of a layout, and the longest sequences", add_plan, "file"),
    _Command("layouts", "rank the layouts that fit by predicted step time", add_layouts, "file"),
    _Command("calibrate", "measure this machine for isp layouts", add_calibrate),
    _Command("topology", "print the groups of ranks", add_topology),
    _Command("data prepare", "turn text or chats into the .bin/.idx format", add_prepare),
    _Command(
        "data inspect", "show the documents, lengths and labels of a source", add_inspect_data
    ),
    _Command("checkpoint inspect", "show what checkpoints contain", add_inspect),
    _Command("checkpoint verify", "compare checkpoints with their checksums", add_verify),
    _Command("checkpoint export", "write a checkpoint as a Hugging Face folder", add_export),
)
