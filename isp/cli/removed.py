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
"""Replacements in words, by command and option (`evaluate`, `--tasks`)."""


def check_command(words: Sequence[str]) -> None:
    """Raise ValueError if the words of a command line name a removed command or option."""
    for command, instead in _REMOVED_COMMANDS.items():
        if list(words[: len(command.split())]) == command.split():
            raise ValueError(f"isp {command} was removed: {instead}")
    given = {word.partition("=")[0].replace("_", "-") for word in words}  # as options have both
    for (command, option), instead in _REMOVED_OPTIONS.items():
        if list(words[: len(command.split())]) == command.split() and option in given:
            raise ValueError(f"isp {command} {option} was removed: {instead}")
