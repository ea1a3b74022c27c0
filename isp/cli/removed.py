"""Commands and options that earlier versions had, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["check_command"]

_REMOVED_COMMANDS: Mapping[str, str] = {
    "checkpoint import": "use model.hf=FOLDER, which trains it in any layout without a copy",
    "report": "use a tracker (metrics.report_to) for the curves of a run, isp profile --html for"
    " the timeline of a step, and isp evaluate --png",
}
"""Replacements in words, by command (`checkpoint import`)."""

_REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {
    ("evaluate", "--html"): "use --png FILE for a picture, and evaluation.json",
    ("layouts", "--html"): "use the printed table, or --json",
    ("plan", "--html"): "use the printed text, or --json",
}
"""Replacements in words, by command and option (`evaluate`, `--tasks`)."""


def check_command(words: Sequence[str]) -> None:
    """Raise ValueError if the words of a command line name a removed command or option."""
    for command, instead in _REMOVED_COMMANDS.items():
        if list(words[: len(command.split())]) == command.split():
            raise ValueError(f"isp {command} was removed: {instead}")
    given = {word.partition("=")[0] for word in words}
    for (command, option), instead in _REMOVED_OPTIONS.items():
        if list(words[: len(command.split())]) == command.split() and option in given:
            raise ValueError(f"isp {command} {option} was removed: {instead}")
