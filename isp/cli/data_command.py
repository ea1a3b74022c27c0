"""`isp data prepare` writes the .bin/.idx format; `isp data inspect` shows a source."""

from __future__ import annotations

import argparse
from typing import Any

from isp.cli.options import Run
from isp.cli.output import say

__all__ = ["add_inspect_data", "add_prepare"]


def add_prepare(parser: argparse.ArgumentParser) -> Run:
    """Add the input files, and the options for reading and writing."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders, globs or URLs",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that exist (default: refuse)"
    )
    _add_reading(parser)
    return _run_prepare


def add_inspect_data(parser: argparse.ArgumentParser) -> Run:
    """Add the source, and the options for reading and packing."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="SOURCE",
        help="files, folders, globs, URLs, hub names, as in data.source",
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="data.seq_len (default: 2048)")
    _add_reading(parser)
    return _run_inspect


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options on how to read a source, which both `isp data` commands have."""
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default) or a Hugging Face tokenizer.json"
    )
    parser.add_argument(
        "--eos-token",
        metavar="TOKEN",
        help="the token that ends a document (default: the tokenizer's)",
    )
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="begin texts with the tokens that the tokenizer puts first, as data.add_bos (default)",
    )
    parser.add_argument(
        "--text-key", default="text", help="key of the text in JSON objects and tables"
    )
    parser.add_argument(
        "--format",
        choices=("auto", "text", "messages", "tokens", "completions"),
        default="auto",
        help="what objects or rows contain; auto (default): decide by the keys of the first one",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that renders messages (default: the tokenizer's template)",
    )
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last", "all"),
        default="assistant",
        help="the messages that the loss is computed on, as in data.train_on (default: assistant)",
    )


def _reading(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `_add_reading` by their keys in `data`."""
    from isp.config.data import TrainOn

    keys = ("tokenizer", "eos_token", "add_bos", "text_key", "chat_template")
    return {key: getattr(args, key) for key in keys} | {"train_on": TrainOn(args.train_on)}


def _run_inspect(args: argparse.Namespace) -> int:
    """Print the size of a source, its lengths, its padding, and an example."""
    from isp.config.data import DataConfig, Format
    from isp.data.sources import describe_source

    form, reading = Format(args.format), _reading(args)
    config = DataConfig(source=args.inputs, format=form, seq_len=args.seq_len, **reading)
    say(describe_source(config))
    return 0


def _run_prepare(args: argparse.Namespace) -> int:
    """Tokenize the source into .bin and .idx files, and print how many tokens they have."""
    from isp.config.data import Format
    from isp.data.prepare import prepare
    from isp.utils.text import counted

    how = {**_reading(args), "overwrite": args.overwrite}
    done = prepare(args.inputs, args.output, form=Format(args.format), **how)
    files, kind, trained = f"{done.prefix}.bin and .idx", "document", ""
    if done.num_trained is not None:
        files, kind = f"{files}, and .labels of both", "example"
        trained = (
            f", {done.num_trained:,} of them trained; {done.num_dropped:,} without a trained token"
            " left out"
        )
    say(
        f"{files}: {counted(done.num_tokens, 'token')} in {counted(done.num_documents, kind)}"
        f"{trained}, from {counted(done.num_bytes, 'byte')}{done.note}; by the tokenizer"
        f" {done.tokenizer} ({done.vocab_size:,} entries); train with --data.source {done.prefix}"
        f" --data.tokenizer {done.tokenizer}"
    )
    return 0
