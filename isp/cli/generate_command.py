"""`isp generate` continues prompts with the plain model of a run, a checkpoint or a folder."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isp.cli.options import Run, add_option, add_reading, not_negative, positive
from isp.cli.output import say

if TYPE_CHECKING:
    from torch import Tensor

    from isp.data.documents import JsonLine
    from isp.data.tokenizer import Tokenizer
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
    ("seed", "N", not_negative, 0, "seed of sampling"),
)


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add the model, the prompts, and the options for sampling."""
    add_reading(parser)
    parser.add_argument(
        "--device-map",
        "--device_map",
        choices=["auto"],
        help="let transformers spread the model over all GPUs (needs accelerate)",
    )
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
    parser.epilog = (
        "One process generates, by `generate` of transformers. The decoder of a run without"
        " model.hf reads the whole text again for each token: isp checkpoint export makes it a"
        " folder that transformers reads. Text goes to stdout, everything else to stderr."
    )
    return _run


def _run(args: argparse.Namespace) -> int:
    """Print the continuation of each prompt while it is generated."""
    import torch

    from isp.evaluation.source import open_source
    from isp.step.setup import device_of

    _check(args)
    given = [_text_of(prompt) for prompt in args.prompt]
    source = open_source(Path(args.path), dtype=args.dtype, tokenizer=args.tokenizer)
    if args.device_map is not None and source.section.hf is None:
        raise ValueError(
            "--device-map is for models of transformers, and the decoder runs on one device: write"
            " a folder with isp checkpoint export, and generate from that"
        )
    prompts = _prompts(args, given, source)
    if warning := source.check_lengths(prompts.tokens, args.max_new_tokens):
        say(f"note: {warning}", error=True)
    device = device_of(args.device)
    model = source.plain(device, args.device_map)
    say(f"{source.title}, {source.dtype}, {args.device_map or device}", error=True)
    ends = source.ends | (set() if prompts.turn_end is None else {prompts.turn_end})
    write = _by_decoder if source.section.hf is None else _by_transformers
    torch.manual_seed(args.seed)
    for number, (text, tokens) in enumerate(zip(prompts.texts, prompts.tokens, strict=True)):
        _print_head(number, prompts.texts, text)
        write(model, tokens, args, ends, _Streamer(source.tokenizer, ends))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for impossible options, before any file is read."""
    from isp.utils.environment import launched, require

    if launched():
        raise ValueError(
            "isp generate runs in one process: start it without torchrun, and use --device-map auto"
            " where a model needs several GPUs"
        )
    if not 0 <= args.temperature < math.inf:
        raise ValueError(
            f"--temperature {args.temperature} must be 0 (the likeliest token) or more"
        )
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p} must be above 0 and at most 1 (all tokens)")
    if args.device_map is not None:
        require("--device-map", "accelerate", extra="trainer")
        if args.device != "auto":
            raise ValueError(f"--device-map chooses devices: leave out --device {args.device}")


class _Streamer:
    """Streamer for `generate` of transformers that prints tokens as text, without the prompt.

    The bytes of a character may be several tokens: it is printed once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Set[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._tokens: list[int] | None = None
        self._begin = self._shown = 0

    def put(self, tokens: Tensor) -> None:
        """Print the text of the tokens so far, unless its last character is incomplete."""
        # The first call of transformers has the tokens of the prompt, which is not printed.
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += [token for token in tokens.flatten().tolist() if token not in self._ends]
        if not (new := self._new()).endswith("\ufffd"):
            say(new, end="", generated=True)
            # Later text is decoded together with these tokens: whether a word has a leading space,
            # for instance, depends on them.
            self._begin, self._shown = self._shown, len(self._tokens)

    def end(self) -> None:
        """Print the remaining text."""
        say(self._new(), generated=True)

    def _new(self) -> str:
        """Return the text of the tokens that were not printed yet."""
        before, whole = self._text(self._begin, self._shown), self._text(self._begin, None)
        return whole[len(before) :]

    def _text(self, begin: int, end: int | None) -> str:
        """Return the decoded text of a range of tokens."""
        import numpy as np

        return self._tokenizer.decode(np.array((self._tokens or [])[begin:end], dtype=np.int64))


def _by_transformers(
    model: Any,
    prompt: list[int],
    args: argparse.Namespace,
    ends: Set[int],
    streamer: _Streamer,
) -> None:
    """Generate with transformers; of generation_config.json only the end tokens are used."""
    import torch
    from transformers import GenerationConfig

    drawn = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    model.generation_config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends),  # one prompt needs no padding, but transformers warns without it
        **(drawn if args.temperature > 0 else {}),
    )
    ids = torch.tensor([prompt], device=model.device)
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer)


def _by_decoder(
    model: Any,
    prompt: list[int],
    args: argparse.Namespace,
    ends: Set[int],
    streamer: _Streamer,
) -> None:
    """Generate with the decoder: a forward over the whole text for each token, without a cache."""
    import torch

    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    streamer.put(tokens)
    with torch.inference_mode():
        for _ in range(args.max_new_tokens):
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            chosen = _chosen(model.lm_head(model.model(tokens, positions)[:, -1]), args)
            streamer.put(chosen)
            if int(chosen) in ends:
                break
            tokens = torch.cat([tokens, chosen], dim=1)
    streamer.end()


def _chosen(logits: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the next token [1, 1] of logits [1, V]; options apply in the order of transformers."""
    import torch

    if args.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    ordered, order = (logits.double() / args.temperature).sort(-1, descending=True)
    probabilities = ordered[:, : args.top_k or None].softmax(-1)
    # A token is kept if all more likely ones sum to less than top_p: the likeliest one always is.
    kept = probabilities.cumsum(-1) - probabilities < args.top_p
    chosen: Tensor = order.gather(-1, torch.multinomial(probabilities * kept, 1))
    return chosen


class _Prompts(NamedTuple):
    """The prompts of a command line, as text and as tokens."""

    texts: list[str]
    tokens: list[list[int]]
    turn_end: int | None
    """Token that ends a turn of the assistant; None without conversations."""


def _prompts(args: argparse.Namespace, texts: list[str], source: Source) -> _Prompts:
    """Return the prompts: texts unchanged, conversations rendered by the chat template."""
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
            turns, others = read_talk(talk)
            rendered = template.prompt(turns, talk.where, **others._asdict())
            found.append((rendered, source.encode_chat(rendered)))
    if template is None and args.chat_template is not None:
        raise ValueError("--chat-template is only used with --chat: give both, or neither")
    turn_end = None if template is None else template.turn_end()
    return _Prompts([text for text, _ in found], [tokens for _, tokens in found], turn_end)


def _conversations(prompt: str) -> list[JsonLine] | None:
    """Return the lines of a file of `messages`; None for any other prompt."""
    from isp.data.documents import read_jsonl

    if not prompt.endswith(".jsonl") or not Path(prompt).is_file():
        return None
    lines = list(read_jsonl(Path(prompt)))
    is_talk = lines and lines[0].record.keys() & {"messages", "conversations"}
    return lines if is_talk else None


def _text_of(prompt: str) -> str:
    """Return the content of the file `prompt`, or `prompt` if there is no such file."""
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):
        # A prompt that is too long for a file name, or has invalid characters, is a text.
        is_file = False
    if not is_file:
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt {prompt} is not a text file: {error}") from None


_HEAD_CHARACTERS = 60
"""Characters of a prompt that are printed before its continuation."""


def _print_head(number: int, texts: list[str], text: str) -> None:
    """Print the number and the end of one of several prompts, before its continuation."""
    if len(texts) == 1:
        return
    text = " ".join(text.split())
    cut = text if len(text) <= _HEAD_CHARACTERS else f"...{text[-_HEAD_CHARACTERS:]}"
    say(f"--- {number + 1} of {len(texts)}: {cut}")
