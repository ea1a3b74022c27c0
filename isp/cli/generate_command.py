"""`isp generate`: goes on with prompts, by a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isp.cli.options import not_negative, positive
from isp.cli.reading import Reading, add_reading, option_words

if TYPE_CHECKING:
    from isp.inference.generate import Generation
    from isp.inference.sampling import SamplingConfig

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is read, how it goes on, and the ranks."""
    add_reading(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT|FILE",
        help="what to go on with: a text, or a file of it; several times: a batch of prompts",
    )
    _option(
        parser, "max-new-tokens", "N", positive, 128, "tokens to write for each prompt, at most"
    )
    _option(
        parser,
        "temperature",
        "T",
        float,
        0.0,
        "divides the logits before a token is drawn; 0: always the likeliest token, which is what"
        " transformers does without do_sample",
    )
    _option(parser, "top-k", "K", not_negative, 0, "draw among the K likeliest tokens; 0: all")
    _option(
        parser,
        "top-p",
        "P",
        float,
        1.0,
        "draw among the fewest tokens whose probabilities sum up to P",
    )
    _option(
        parser, "seed", "N", not_negative, 0, "of the draws: the same tokens on any number of ranks"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times. The end of a document ends, too",
    )
    parser.usage = (
        "isp generate RUN|STEP|HF_FOLDER --prompt TEXT|FILE [--nproc N] [--max-new-tokens N]"
        " [--temperature T] [--top-k K] [--top-p P] [--seed N] [--stop TEXT] [--dtype DTYPE]"
        " [--device DEVICE] [--tokenizer PATH] [--parallel.key value ...]"
    )
    parser.epilog = (
        "Checkpoints of any layout are read, by N ranks in mtp, or as"
        " --parallel.tensor.mode says: mtp, msp, fsp or isp, which splits the prompts over the"
        " ranks. Text goes to stdout, all else to stderr."
    )


def _option(
    parser: argparse.ArgumentParser,
    name: str,
    metavar: str,
    kind: Callable[[str], float],
    default: float,
    told: str,
) -> None:
    """An option under its name here and, with `_`, that of transformers and vLLM."""
    names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
    parser.add_argument(
        *names, metavar=metavar, type=kind, default=default, help=f"{told} (default: {default})"
    )


def run(args: argparse.Namespace) -> int:
    """Print what follows the prompts, as it comes."""
    from isp.cli.launch import launch
    from isp.inference.sampling import SamplingConfig

    sampling = SamplingConfig(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    texts = [_text_of(prompt) for prompt in args.prompt]
    reading = Reading.of(args)
    prompts = [reading.source.encode_prompt(text) for text in texts]
    reading.describe(reading.source.check_lengths(prompts, args.max_new_tokens))
    if args.nproc is not None and reading.layout.ranks > 1:
        return launch(reading.layout.ranks, ["-m", "isp", "generate", *_words(args)])
    _generate(args, reading, prompts, texts, sampling)
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command line of each rank."""
    words = [args.path, *(f"--prompt={prompt}" for prompt in args.prompt)]
    words += [f"--stop={stop}" for stop in args.stop]
    words += option_words(args, ("max-new-tokens", "temperature", "top-k", "top-p", "seed"))
    return [*words, *args.overrides]


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
        raise ValueError(f"--prompt {prompt} is a file that is no text: {error}") from None


def _generate(
    args: argparse.Namespace,
    reading: Reading,
    prompts: list[list[int]],
    texts: list[str],
    sampling: SamplingConfig,
) -> None:
    """On each rank."""
    from isp.inference.generate import Ends, Generation

    source = reading.source
    with reading.engine() as (engine, rank):
        ends = Ends(args.max_new_tokens, source.ends, tuple(args.stop))
        generation = Generation(engine, source.tokenizer, prompts, sampling, ends)
        if rank == 0:
            _print_one(generation) if len(prompts) == 1 else _print_all(generation, texts)
            print(generation.speed.describe(), file=sys.stderr)
        else:
            for _ in generation:
                pass


def _print_one(generation: Generation) -> None:
    """Text as it comes."""
    for piece in generation:
        print(piece.text, end="", flush=True)
    print()


def _print_all(generation: Generation, texts: list[str]) -> None:
    """In order; what comes of the first that has not ended is shown as it comes."""
    waiting, ended, shown = [""] * len(texts), [False] * len(texts), 0
    _print_head(shown, texts)
    for piece in generation:
        waiting[piece.document] += piece.text
        ended[piece.document] = piece.finish is not None
        while shown < len(texts):
            print(waiting[shown], end="", flush=True)
            waiting[shown] = ""
            if not ended[shown]:
                break
            print()
            shown += 1
            if shown < len(texts):
                _print_head(shown, texts)


_HEAD_CHARACTERS = 60


def _print_head(number: int, texts: list[str]) -> None:
    """The number of a prompt, and how it ends: that is where the text goes on."""
    text = " ".join(texts[number].split())
    cut = text if len(text) <= _HEAD_CHARACTERS else f"...{text[-_HEAD_CHARACTERS:]}"
    print(f"--- {number + 1} of {len(texts)}: {cut}", flush=True)
