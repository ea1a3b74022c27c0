"""Conversations as tokens, and which of them are trained, against rows that are written by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from isp.data.chat import Example
from isp.data.dataset import IGNORE_INDEX
from isp.data.tokenizer import ByteTokenizer, HFTokenizer
from tests.data.chat_folder import CHATML, CHATML_MARKED, LLAMA3, chat_folder, load

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "Là-bas, 日本"},
    {"role": "user", "content": "  and\nthen?\n"},
    {"role": "assistant", "content": "No idea é"},
]

Parts = list[tuple[str, bool]]
"""Pieces of a text, and whether they are trained."""


def chatml(messages: list[dict[str, Any]]) -> Parts:
    parts = []
    for message in messages:
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return parts


def llama3(messages: list[dict[str, Any]]) -> Parts:
    parts = [("<|begin_of_text|>", False)]
    for message in messages:
        parts += [
            (f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False),
            (message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"),
        ]
    return parts


def check(example: Example, folder: Path, parts: Parts) -> None:
    """The tokens are those of the pieces; labels those of the trained ones."""
    tokenizer = HFTokenizer(folder)
    tokens: list[int] = []
    labels: list[int] = []
    for text, trained in parts:
        ids = tokenizer.encode(text).tolist()
        tokens += ids
        labels += ids if trained else [IGNORE_INDEX] * len(ids)
    assert example.tokens.tolist() == tokens
    assert example.labels.tolist() == labels


@pytest.mark.parametrize(
    ("template", "by_hand"), [(CHATML, chatml), (CHATML_MARKED, chatml), (LLAMA3, llama3)]
)
def test_the_assistants_tokens_are_trained(tmp_path: Path, template: str, by_hand: Any) -> None:
    """Catches an end of turn that is not trained, a header that is, and bytes of one character."""
    folder = chat_folder(tmp_path, template)
    check(load(folder).example(TALK, "here"), folder, by_hand(TALK))
    check(load(folder).example(TALK[:3], "here"), folder, by_hand(TALK[:3]))
    assert set(load(folder).example(TALK[:2], "here").labels.tolist()) == {IGNORE_INDEX}


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3])
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    """Catches another rendering, or other special tokens, than apply_chat_template's."""
    from transformers import PreTrainedTokenizerFast

    folder = chat_folder(tmp_path, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    marked = template == CHATML_MARKED
    wanted = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=marked)
    found = load(folder).example(TALK, "here")
    assert found.tokens.tolist() == wanted["input_ids"]
    if marked:
        assert (found.labels != IGNORE_INDEX).tolist() == [
            x == 1 for x in wanted["assistant_masks"]
        ]


def test_a_character_of_several_tokens_at_the_end_of_a_block(tmp_path: Path) -> None:
    """Catches what transformers' mask does: all but the first of its tokens are left out."""
    template = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}" + (
        "{% endgeneration %}<|im_end|>{% endfor %}"
    )
    folder = chat_folder(tmp_path, template)
    parts = [("user", False), ("é", True), ("<|im_end|>", False)]
    check(load(folder).example([{"role": "user", "content": "é"}], "here"), folder, parts)


def test_white_space_that_a_tokenizer_leaves_out_of_places(tmp_path: Path) -> None:
    """Catches a turn that loses its last token where offsets are trimmed, as GPT-2's are."""
    from tokenizers import Tokenizer, processors

    template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = chat_folder(tmp_path, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = [
        ("user: assistant:", False),
        (" a  b ", True),
        ("user: assistant:", False),
        ("c ", True),
    ]
    talk = [
        {"role": "user", "content": " "},
        {"role": "assistant", "content": " a  b "},
        {"role": "user", "content": " "},
        {"role": "assistant", "content": "c "},
    ]
    check(load(folder).example(talk, "here"), folder, parts)


def test_a_line_feed_that_ends_a_turn_is_trained(tmp_path: Path) -> None:
    """Catches a template without a token for the end of a turn, which must not lose its end."""
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = chat_folder(tmp_path, template)
    parts = [(f"user:{TALK[1]['content']}\nassistant:", False), ("a\n", True)]
    check(
        load(folder).example([TALK[1], {"role": "assistant", "content": "a"}], "x"), folder, parts
    )


def test_tools_variables_and_null_reach_the_template(tmp_path: Path) -> None:
    """Catches a tool call, whose content is null, and what stands beside the messages."""
    template = "{{ tools[0].name ~ mode }}{% for m in messages %}{{ m.content is defined }}" + (
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
    )
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    folder = chat_folder(tmp_path, template)
    example = load(folder).example(
        [TALK[1], call], "here", tools=[{"name": "f"}], variables={"mode": "slow"}
    )
    parts = [("fslowTrue<|im_end|>", False), ('False[{"name": "f"}]<|im_end|>', True)]
    check(example, folder, parts)


def test_a_template_whose_prefixes_do_not_nest(tmp_path: Path) -> None:
    """Catches labels on the wrong tokens, for a template that shortens earlier turns."""
    template = "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }}{% endfor %}"
    folder = chat_folder(tmp_path, template)
    with pytest.raises(ValueError, match=r"talks, line 3: .* up to message 3 .*chat_template"):
        load(folder).example(TALK, "talks, line 3")
    other = tmp_path / "marked.jinja"
    other.write_text(CHATML_MARKED)
    check(load(folder, other).example(TALK, "here"), folder, chatml(TALK))


def test_an_assistant_that_speaks_first(tmp_path: Path) -> None:
    """Catches a header that is trained because no message comes before it."""
    folder = chat_folder(tmp_path / "chatml")
    check(load(folder).example(TALK[2:], "here"), folder, chatml(TALK[2:]))
    folder = chat_folder(tmp_path / "llama3", LLAMA3)  # which renders no message without its first
    with pytest.raises(ValueError, match="up to message 1 otherwise"):
        load(folder).example(TALK[2:], "here")


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["hello"], "message 1 is a JSON str"),
        ([{"content": "x"}], "message 1 has no 'role'"),
        ([TALK[1], {"role": "assistant"}], r"message 2 \(assistant\) has no 'content'"),
        ([{"role": "wizard", "content": "x"}], "cannot render the conversation: Unknown role: wiz"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_place(
    tmp_path: Path, messages: Any, told: str
) -> None:
    """Catches a traceback, or a message without the place."""
    with pytest.raises(ValueError, match=f"a.jsonl, line 7.*{told}") as refused:
        load(chat_folder(tmp_path)).example(messages, "a.jsonl, line 7")
    assert "\n" not in str(refused.value)


def test_a_template_that_is_missing(tmp_path: Path) -> None:
    """Catches transformers' own message, which speaks of arguments of a call."""
    with pytest.raises(ValueError, match=r"no chat template .*data\.chat_template"):
        load(chat_folder(tmp_path, None))
    with pytest.raises(ValueError, match=r"data\.chat_template=.*gone.jinja cannot be read"):
        load(tmp_path, tmp_path / "gone.jinja")
    from isp.data.chat import ChatTemplate

    with pytest.raises(ValueError, match=r"data\.tokenizer=bytes has no chat template"):
        ChatTemplate(ByteTokenizer())


def test_nothing_is_said_by_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches warnings of a library about a mask that it was not asked for."""
    with caplog.at_level(logging.WARNING):
        load(chat_folder(tmp_path)).example(TALK, "here")
    assert not caplog.records
