"""Tasks of lm-evaluation-harness, over an engine.

Source: its own `hf` model (lm_eval/models/huggingface.py), whose results these are.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from isp.data.chat import ChatTemplate
from isp.evaluation.engine import Engine
from isp.evaluation.generate import Ends, Generation
from isp.evaluation.sampling import SamplingConfig
from isp.evaluation.scoring import Continuation, batches, log_likelihoods, scores
from isp.evaluation.source import Source

__all__ = ["HarnessModel", "check_tasks", "evaluate_tasks"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def check_tasks(names: Sequence[str], include_path: str | None) -> None:
    """Raise ValueError, in a line, for a task, or data of it, that cannot be read."""
    manager = _tasks(include_path)
    for name in names:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # it will be said again
                manager.load(name)
        except Exception as error:  # YAML, templates, data: each library raises its own
            fault = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"--tasks {name}: {fault} (--include-path {include_path} has"
                f" {len(manager.all_tasks):,} tasks and groups)"
            ) from error


def evaluate_tasks(
    model: HarnessModel,
    names: Sequence[str],
    include_path: str | None,
    *,
    num_fewshot: int | None,
    limit: int | None,
    quiet: bool,
) -> dict[str, Any] | None:
    """What the harness's `simple_evaluate` gives, on the first rank of a machine; a collective.

    `include_path`: a folder of YAML files; None: the tasks that come with the harness. `quiet`:
    without progress, and without errors of metrics, which only one rank need compute.
    """
    with contextlib.redirect_stderr(io.StringIO() if quiet else sys.stderr):
        found: dict[str, Any] | None = simple_evaluate(
            model,
            tasks=list(names),
            task_manager=_tasks(include_path),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=model.chat is not None,
            log_samples=False,
            bootstrap_iters=0 if quiet else 100_000,
        )
    return found


def _tasks(include_path: str | None) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=include_path is None)


class HarnessModel(TemplateLM):
    """A model as the harness asks it; to the harness the ranks of `engine` are one.

    Each of its methods is a collective over them.
    """

    max_gen_toks = 256
    """New tokens, where a task does not say how many."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        *,
        max_length: int,
        batch_tokens: int,
        chat: ChatTemplate | None = None,
    ) -> None:
        """`max_length`: the most tokens that are read for a request; of longer ones, the last.

        `chat`: the template of conversations, for tasks that are asked as such.
        """
        super().__init__()
        self.chat = chat
        self._ends = source.ends
        if chat is not None and (turn_end := chat.turn_end()) is not None:
            self._ends |= {turn_end}
        self.engine = engine
        self.source = source
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self._has_cut = False

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self.source.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text without context: what a prompt begins with, if anything."""
        return next(iter(self.source.encode("")), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """What a cache of requests is kept by."""
        return self.source.title.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The text of the template, for the results."""
        return "" if self.chat is None else self.chat.text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, with the generation prompt or up to its last words."""
        assert self.chat is not None
        if add_generation_prompt:
            return self.chat.prompt(chat_history, "a task")
        return self.chat.unfinished(chat_history, "a task")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a prompt, or those of its text alone; a template may write the first."""
        first = None if self.chat is None else self.chat.bos_token
        if add_special_tokens is False or (first and string.startswith(first)):
            found: list[int] = self.source.tokenizer.encode(string).tolist()
            return found
        return self.source.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [self._continuation(context, tokens) for _, context, tokens in requests]
        found = scores(self.engine, asked, batch_tokens=self.batch_tokens)
        return _shown(found, len(asked), "continuations")

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihoods of whole texts, read in windows of `max_length`."""
        windows = [list(self._windows(*request.args)) for request in requests]
        asked = list(itertools.chain.from_iterable(windows))
        found = log_likelihoods(self.engine, asked, batch_tokens=self.batch_tokens)
        shown = iter(_shown(found, len(asked), "windows"))
        return [sum(itertools.islice(shown, len(of_one))) for of_one in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a stop text."""
        return _shown(self._texts(requests), len(requests), "texts")

    def _continuation(self, context: list[int], tokens: list[int]) -> Continuation:
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(
                f"a task has a continuation of {len(tokens)} tokens: between 1 and"
                f" {self.max_length} are supported (--max-length)"
            )
        context = context or [self.prefix_token_id]
        return Continuation(self._last(context, self.max_length + 1 - len(tokens)), tokens)

    def _windows(self, text: str) -> Iterator[Continuation]:
        for window in get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
        ):
            yield Continuation(*make_disjoint_window(window))

    def _texts(self, requests: list[Instance]) -> Iterator[str]:
        num_texts = 0
        for options, group in itertools.groupby(requests, key=lambda request: request.args[1]):
            sampling, ends = self._generation(options)
            prompts = [self._prompt(request.args[0], ends.max_new_tokens) for request in group]
            lengths = [len(prompt) + ends.max_new_tokens for prompt in prompts]
            for batch in batches(prompts, lengths, self.batch_tokens):
                own = replace(sampling, seed=num_texts)  # other draws for each text
                num_texts += len(batch)
                yield from Generation(self.engine, self.source.tokenizer, batch, own, ends).texts()

    def _generation(self, options: Mapping[str, Any]) -> tuple[SamplingConfig, Ends]:
        """How to continue, from a task's `generation_kwargs`."""
        asked: dict[str, Any] = normalize_gen_kwargs(dict(options), self.max_gen_toks)
        ends = Ends(asked.pop("max_gen_toks"), self._ends, tuple(asked.pop("until")))
        del asked["do_sample"]  # now a temperature of 0, or another
        if unknown := asked.keys() - {"temperature", "top_k", "top_p"}:
            raise ValueError(
                f"a task has generation_kwargs {', '.join(sorted(unknown))}: until, max_gen_toks,"
                f" do_sample, temperature, top_k and top_p can be"
            )
        return SamplingConfig(**asked), ends

    def _prompt(self, text: str, max_new_tokens: int) -> list[int]:
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"a task asks for up to {max_new_tokens} new tokens, which leaves none of"
                f" {self.max_length} for a prompt: use a larger --max-length, or max_gen_toks in"
                f" its generation_kwargs"
            )
        return self._last(self.tok_encode(text) or [self.prefix_token_id], room)

    def _last(self, tokens: list[int], room: int) -> list[int]:
        if len(tokens) > room and not self._has_cut:
            self._has_cut = True
            logger.warning(
                "requests are truncated at the beginning to %d tokens (--max-length): %d tokens"
                " are dropped",
                self.max_length,
                len(tokens) - room,
            )
        return tokens[-room:]


def _shown(found: Iterable[T], total: int, what: str) -> list[T]:
    """All of `found`, with the progress to there."""
    return list(tqdm(found, total=total, desc=what))
