"""`isp generate`: continues prompts by a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isp.cli.options import Run, add_option, not_negative, positive
from isp.cli.output import say
from isp.cli.reading import Reading, add_reading

if TYPE_CHECKING:
    from isp.data.documents import JsonLine
    from isp.evaluation.generate import Generation
    from isp.evaluation.sampling import SamplingConfig
    from isp.evaluation.source import Source

__all__ = ["add_options"]


_OPTIONS: tuple[tuple[str, str, Callable[[str], object], float | None, str], ...] = (
    ("chat-template", "FILE", str, None, "a Jinja file to use instead of the model's, with --chat"),
    ("max-new-tokens", "N", positive, 128, "most tokens to generate for each prompt"),
    (
        "temperature",
        "T",
        float,
        0.0,
        "divide the logits by T and sample; 0: take the likeliest token, as transformers does"
        " without do_sample",
    ),
    ("top-k", "K", not_negative, 0, "sample from the K likeliest tokens; 0: from all"),
    ("top-p", "P", float, 1.0, "sample from the fewest tokens whose probabilities sum to P"),
    (
        "seed",
        "N",
        not_negative,
        0,
        "seed of sampling: gives the same tokens on any number of ranks",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add what is read, how tokens are drawn, and the ranks."""
    add_reading(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT|FILE",
        help="text to continue, or a file that contains it; can be repeated. In a .jsonl file"
        " with lines of `messages`, the assistant continues each conversation",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="make each prompt a user message, rendered with the model's chat template",
    )
    for name, metavar, kind, default, meaning in _OPTIONS:
        add_option(parser, name, metavar, kind, meaning, default)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; can be repeated. The end of a document always stops",
    )
    parser.epilog = (
        "A checkpoint of any layout can be read. N ranks read it in mtp mode, or in that of"
        " --parallel.tensor.mode: mtp, msp, fsp or isp, which shards prompts over the ranks."
        " Text goes to stdout, everything else to stderr."
    )
    return _run


def _run(args: argparse.Namespace) -> int:
    """Print what follows the prompts, as it comes."""
    from isp.cli.launch import start_ranks
    from isp.evaluation.sampling import SamplingConfig

    sampling = SamplingConfig(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    given = [_text_of(prompt) for prompt in args.prompt]
    reading = Reading.of(args)
    prompts = _prompts(args, given, reading.source)
    reading.describe(reading.source.check_lengths(prompts.tokens, args.max_new_tokens))
    if args.nproc is not None and reading.layout.ranks > 1:
        return start_ranks(reading.layout.ranks, args.words)
    _generate(args, reading, prompts, sampling)
    return 0


class _Prompts(NamedTuple):
    texts: list[str]
    tokens: list[list[int]]
    turn_end: int | None
    """The token that ends a turn of the assistant, for conversations."""


def _prompts(args: argparse.Namespace, texts: list[str], source: Source) -> _Prompts:
    """The prompts: texts, and conversations by the chat template."""
    from isp.data.documents import JsonLine
    from isp.data.turns import read_talk

    found, template = list[tuple[str, list[int]]](), None
    for given, text in zip(args.prompt, texts, strict=True):
        talks = _conversations(given)
        if talks is None and not args.chat:
            found.append((text, source.encode_prompt(text)))
            continue
        template = template or source.chat_template(args.chat_template)
        if talks is None:
            turns = [{"role": "user", "content": text}]
            talks = [JsonLine({"messages": turns}, "--prompt", len(text))]
        for talk in talks:
            turns, beside = read_talk(talk)
            rendered = template.prompt(turns, talk.where, **beside._asdict())
            found.append((rendered, source.encode_chat(rendered)))
    if template is None and args.chat_template is not None:
        raise ValueError("--chat-template needs --chat")
    turn_end = None if template is None else template.turn_end()
    return _Prompts([text for text, _ in found], [tokens for _, tokens in found], turn_end)


def _conversations(prompt: str) -> list[JsonLine] | None:
    """The lines of a file of `messages`; None for anything else."""
    from isp.data.documents import read_jsonl

    if not prompt.endswith(".jsonl") or not Path(prompt).is_file():
        return None
    lines = list(read_jsonl(Path(prompt)))
    is_talk = lines and lines[0].record.keys() & {"messages", "conversations"}
    return lines if is_talk else None


def _text_of(prompt: str) -> str:
    """A text, or that of a file."""
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):  # too long for a name, or with characters that no name has
        is_file = False
    if not is_file:
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt {prompt} is not a text file: {error}") from None


def _generate(
    args: argparse.Namespace,
    reading: Reading,
    prompts: _Prompts,
    sampling: SamplingConfig,
) -> None:
    """On each rank."""
    from isp.evaluation.generate import Ends, Generation

    source = reading.source
    with reading.engine() as (engine, rank):
        turn_end = frozenset() if prompts.turn_end is None else {prompts.turn_end}
        ends = Ends(args.max_new_tokens, source.ends | turn_end, tuple(args.stop))
        generation = Generation(engine, source.tokenizer, prompts.tokens, sampling, ends)
        if rank == 0:
            _print_all(generation, prompts.texts)
            say(generation.speed.describe(), error=True)
        else:
            for _ in generation:
                pass


def _print_all(generation: Generation, texts: list[str]) -> None:
    """In order; what comes of the first that has not ended is shown as it comes."""
    waiting, ended, shown = [""] * len(texts), [False] * len(texts), 0
    _print_head(shown, texts)
    for piece in generation:
        waiting[piece.document] += piece.text
        ended[piece.document] = piece.finish is not None
        while shown < len(texts):
            say(waiting[shown], end="", generated=True)
            waiting[shown] = ""
            if not ended[shown]:
                break
            say()
            shown += 1
            if shown < len(texts):
                _print_head(shown, texts)


_HEAD_CHARACTERS = 60


def _print_head(number: int, texts: list[str]) -> None:
    """The number of one of several prompts, and its end, where the text continues."""
    if len(texts) == 1:
        return
    text = " ".join(texts[number].split())
    cut = text if len(text) <= _HEAD_CHARACTERS else f"...{text[-_HEAD_CHARACTERS:]}"
    say(f"--- {number + 1} of {len(texts)}: {cut}")
