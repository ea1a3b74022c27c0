"""Folders of byte-level Hugging Face tokenizers with a chat template, and files of examples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from isp.data.chat import ChatTemplate
from isp.data.dataset import IGNORE_INDEX
from isp.data.tokenizer import HFTokenizer
from tools.make_tiny_chat_model import CHAT_TEMPLATE as CHATML_MARKED

__all__ = [
    "CHATML",
    "CHATML_MARKED",
    "LLAMA3",
    "chat_folder",
    "load",
    "trained_texts",
    "write_lines",
]

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|return|>",
    "<|call|>",
)

CHATML = """{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def chat_folder(folder: Path, template: str | None = CHATML, *, adds_bos: bool = False) -> Path:
    """Save a tokenizer with a token for each byte and each of `SPECIAL` in `folder`.

    `adds_bos`: texts begin with <|begin_of_text|>, as with Llama 3.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    if adds_bos:
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def load(folder: Path, path: Path | None = None) -> ChatTemplate:
    """Return the chat template of `folder`, or of the file `path`."""
    return ChatTemplate(HFTokenizer(folder), None if path is None else str(path))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write a .jsonl file and return its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trained_texts(folder: Path, messages: list[dict[str, Any]], **keys: Any) -> list[str]:
    """Return the texts of the tokens that have a label."""
    tokenizer = HFTokenizer(folder)
    example = load(folder).example(messages, "talk", **keys)
    runs = itertools.groupby(zip(*example, strict=True), key=lambda pair: pair[1] != IGNORE_INDEX)
    decode = tokenizer._tokenizer.decode
    return [
        decode([int(token) for token, _ in run], skip_special_tokens=False)
        for has_loss, run in runs
        if has_loss
    ]
