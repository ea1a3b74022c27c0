"""`isp profile` measures what communication costs in each mode."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from isp.cli.options import Run, add_nproc, add_option, not_negative, positive
from isp.cli.output import compute_on_one_thread, say, say_progress
from isp.utils.text import counted

if TYPE_CHECKING:
    from isp.core.mesh import Mode

__all__ = ["add_options"]

_WITHOUT_VALIDATION = (
    "--validation.freq=0",
    "--data.valid_source=null",
    "--data.valid_fraction=0",
)
"""Overrides that switch evaluation off, so that held-out text need not exist."""


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add the command's options besides CONFIG and overrides."""
    from isp.core.mesh.config import Mode

    add_nproc(parser)
    modes = f"modes to compare (default: {','.join(Mode)}; with model.hf: isp)"
    add_option(parser, "modes", "LIST", str, modes)
    add_option(parser, "warmup", "N", not_negative, "steps before the measured ones", 2)
    add_option(parser, "steps", "N", positive, "measured steps", 5)
    parser.add_argument(
        "--no-torch", action="store_true", help="leave torch.profiler's events out of the trace"
    )
    parser.add_argument("--html", action="store_true", help="also make a page, profile.html")
    return _run


def _run(args: argparse.Namespace) -> int:
    """Profile each mode, and print the table."""
    if args.nproc is not None:
        say_progress(f"checking {args.config} before {counted(args.nproc, 'rank')} are started")
        # This process only starts ranks, which compute in other processes.
        compute_on_one_thread()
    from isp.cli.launch import speaks, start_ranks, without_nproc, world_size
    from isp.config import ConfigError, load_config
    from isp.core.mesh.config import Mode

    config = load_config(args.config, [*args.overrides, *_WITHOUT_VALIDATION])
    ranks = world_size(args.nproc, least=config.parallel.least_ranks)
    from isp.profile.table import describe
    from isp.step.host_memory import check_host_memory
    from isp.step.job_models import check_models
    from isp.step.setup import check_devices
    from isp.train.data import check_data
    from isp.train.folder.run_folder import check_can_create
    from isp.train.profiling.profile_run import ProfileOptions, config_for, profile_ranks

    modes = []
    for mode in tuple(Mode) if args.modes is None else _modes(args.modes):
        # Check every mode here, so that errors are raised before any rank is started.
        try:
            own = config_for(config, mode, ranks)
            check_models(own)
            if args.nproc is not None:
                check_host_memory(own, own.topology(ranks), args.nproc)
            modes.append(mode)
        except ValueError as error:
            if args.modes is None and config.model.hf is not None and mode is not Mode.ISP:
                if speaks():
                    say(f"without {mode}: {error}")
                continue
            raise ConfigError(f"in {mode} mode: {error}, or leave it out of --modes") from error
    if args.nproc is not None:
        check_data(config)
        check_devices(config, args.nproc)
        check_can_create(config.job)
        return start_ranks(ranks, args.words)
    options = ProfileOptions(
        modes=tuple(modes),
        warmup_steps=args.warmup,
        steps=args.steps,
        with_torch=not args.no_torch,
        command=shlex.join(["isp", *without_nproc(args.words), f"--nproc={ranks}"]),
    )
    done = profile_ranks(config, options, note=say_progress)
    if done is not None:
        profile, folder = done
        written = f"wrote profile.json and trace.json.gz to {folder}"
        if args.html:
            from isp.profile.page import profile_page, write_page

            written += f", and {write_page(profile_page(profile), folder / 'profile.html')}"
        say(f"{describe(profile)}\n\n{written}")
    return 0


def _modes(text: str) -> tuple[Mode, ...]:
    """Parse the list of --modes.  Raises ConfigError for an unknown or repeated mode."""
    from isp.config import ConfigError
    from isp.core.mesh import Mode

    names = [name.strip() for name in text.split(",")]
    known = [mode.value for mode in Mode]
    for name in names:
        if name not in known or names.count(name) > 1:
            raise ConfigError(f"--modes {text}: write one or more of {','.join(known)}, each once")
    return tuple(Mode(name) for name in names)
