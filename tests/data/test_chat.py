"""Tokens and labels of conversations, against rows written by hand."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isp.config.data import TrainOn
from isp.data import chat
from isp.data.chat import ChatTemplate, Example
from isp.data.dataset import IGNORE_INDEX
from isp.data.tokenizer import ByteTokenizer, HFTokenizer
from tests.data.chat_folder import CHATML, CHATML_MARKED, LLAMA3, chat_folder, load, trained_texts

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "Là-bas, 日本"},
    {"role": "user", "content": "  and\nthen?\n"},
    {"role": "assistant", "content": "No idea é"},
]

Parts = list[tuple[str, bool]]
"""Pieces of a text, each with True if it is trained."""


def chatml(messages: list[dict[str, Any]], *, line_feed: bool = True) -> Parts:
    """Return a ChatML template; `line_feed`: the one after a turn is trained, as without generation
    blocks.
    """
    parts = []
    for message in messages:
        is_turn = message["role"] == "assistant"
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", is_turn),
            ("\n", is_turn and line_feed),
        ]
    return parts


marked_chatml = partial(chatml, line_feed=False)


def llama3(messages: list[dict[str, Any]]) -> Parts:
    parts = [("<|begin_of_text|>", False)]
    for message in messages:
        parts += [
            (f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False),
            (message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"),
        ]
    return parts


def check(example: Example, folder: Path, parts: Parts) -> None:
    """Check that `example` has the tokens of these pieces, and labels only for the trained ones."""
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
    ("template", "by_hand"), [(CHATML, chatml), (CHATML_MARKED, marked_chatml), (LLAMA3, llama3)]
)
def test_only_the_assistants_tokens_are_trained(
    tmp_path: Path, template: str, by_hand: Any
) -> None:
    """Catches an end of turn without a label, and a header with one, also in the first message."""
    folder = chat_folder(tmp_path, template)
    check(load(folder).example(TALK, "here"), folder, by_hand(TALK))
    check(load(folder).example(TALK[:3], "here"), folder, by_hand(TALK[:3]))
    check(load(folder).example(TALK[2:], "here"), folder, by_hand(TALK[2:]))
    assert set(load(folder).example(TALK[:2], "here").labels.tolist()) == {IGNORE_INDEX}


PHI3_ON_HUB = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""The template on the hub, character by character."""


def test_trained_turns_equal_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line feed after a turn, an end of text or a header that only TRL trains."""
    folder = chat_folder(tmp_path / "phi3", PHI3_ON_HUB)
    parts: Parts = []
    for message in TALK:
        turn = message["role"] == "assistant"
        parts += [(f"<|{message['role']}|>\n", False), (message["content"] + "<|end|>\n", turn)]
    check(load(folder).example(TALK, "here"), folder, [*parts, ("<|im_end|>", True)])
    assert load(folder).turn_end() == HFTokenizer(folder).token_id("<|end|>")
    folder = chat_folder(tmp_path / "chatml", CHATML)
    digest = hashlib.sha256(CHATML.strip().encode()).hexdigest()[:8]
    header = "<|im_start|>assistant\n"
    for part, trained in ((str.rstrip, "\n"), (chat._none_of, header)):
        monkeypatch.setitem(chat._HEADERS, digest, part)
        parts = [*chatml(TALK[1:2]), (header.removesuffix(trained), False), (trained, True)]
        parts += [(TALK[2]["content"] + "<|im_end|>\n", True)]
        check(load(folder).example(TALK[1:3], "here"), folder, parts)


def test_a_generation_prompt_is_not_trained(tmp_path: Path) -> None:
    """Catches a trained header of a turn that has no message."""
    end = "{%- if not add_generation_prompt %}{{- '<|im_start|>user\\n' }}{%- endif %}"
    folder = chat_folder(tmp_path, CHATML + end)
    parts = [*chatml(TALK), ("<|im_start|>user\n", False)]
    check(load(folder).example(TALK, "here"), folder, parts)


@pytest.mark.parametrize(
    ("template", "by_hand"), [(CHATML, chatml), (CHATML_MARKED, marked_chatml)]
)
def test_only_the_last_turn_or_all_tokens_can_be_trained(
    tmp_path: Path, template: str, by_hand: Any
) -> None:
    """Catches an earlier turn that is trained, and tokens that are not where all should be."""
    folder = chat_folder(tmp_path, template)
    tokenizer, talk = HFTokenizer(folder), [*TALK, {"role": "user", "content": "so?"}]
    last = ChatTemplate(tokenizer, train_on=TrainOn.LAST).example(talk, "here")
    parts = enumerate(by_hand(talk))
    check(last, folder, [(text, trained and i > 8) for i, (text, trained) in parts])
    whole = ChatTemplate(tokenizer, train_on=TrainOn.ALL)
    assert whole.example(talk, "here").labels.tolist() == last.tokens.tolist()
    with pytest.raises(ValueError, match=r"message 1 has the weight 0, and data.train_on=all"):
        whole.example([{**TALK[2], "weight": 0}], "here")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3])
def test_tokens_and_masks_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    """Catches another rendering, or other special tokens, than those of apply_chat_template."""
    from transformers import PreTrainedTokenizerFast

    folder = chat_folder(tmp_path, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    marked = template == CHATML_MARKED
    expected = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=marked)
    found = load(folder).example(TALK, "here")
    assert found.tokens.tolist() == expected["input_ids"]
    if marked:
        assert (found.labels != IGNORE_INDEX).tolist() == [
            x == 1 for x in expected["assistant_masks"]
        ]


def test_a_character_of_several_tokens_is_trained_whole(tmp_path: Path) -> None:
    """Catches the mask of transformers, which only has the first token of the last character."""
    template = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}" + (
        "{% endgeneration %}<|im_end|>{% endfor %}"
    )
    folder = chat_folder(tmp_path, template)
    parts = [("user", False), ("é", True), ("<|im_end|>", False)]
    check(load(folder).example([{"role": "user", "content": "é"}], "here"), folder, parts)


def test_offsets_without_white_space_lose_no_token(tmp_path: Path) -> None:
    """Catches a turn without its last token where offsets are trimmed, as with GPT-2's
    tokenizer.
    """
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
    """Catches a turn that loses its end if the template has no token for the end of a turn."""
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = chat_folder(tmp_path, template)
    parts = [(f"user:{TALK[1]['content']}\nassistant:", False), ("a\n", True)]
    check(
        load(folder).example([TALK[1], {"role": "assistant", "content": "a"}], "x"), folder, parts
    )


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    """Catches a tool call, which has no content, and other template variables that are dropped."""
    template = "{{ tools[0].name ~ mode }}{% for m in messages %}{{ m.content is defined }}" + (
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
    )
    call: dict[str, Any] = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    folder = chat_folder(tmp_path, template)
    example = load(folder).example(
        [TALK[1], call], "here", tools=[{"name": "f"}], variables={"mode": "slow"}
    )
    parts = [("fslowTrue<|im_end|>", False), ('False[{"name": "f"}]<|im_end|>', True)]
    check(example, folder, parts)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_messages_of_weight_0_are_not_trained(tmp_path: Path, template: str) -> None:
    """Catches a message of weight 0 that is trained, and a `weight` key that reaches the
    template.
    """
    folder = chat_folder(
        tmp_path, template.replace("message.role +", "message.role ~ message.weight ~")
    )
    talk = [{**TALK[1], "weight": 0}, {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    end = "<|im_end|>\n" if template is CHATML else "<|im_end|>"
    assert trained_texts(folder, talk) == [f"No idea é{end}"]
    assert trained_texts(folder, [{**m, "weight": None} for m in talk]) == [
        f"Là-bas, 日本{end}",
        f"No idea é{end}",
    ]
    assert not trained_texts(folder, talk[:2])
    for message, fault in (
        ({**TALK[2], "weight": 0.5}, "message 2 .assistant. has the weight 0.5: write 0"),
        ({**TALK[2], "weight": True}, "message 2 .assistant. has the weight True"),
        (
            {**TALK[1], "weight": 1},
            "message 2 .user. has the weight 1, but the loss is computed on",
        ),
    ):
        with pytest.raises(ValueError, match=fault):
            load(folder).example([TALK[1], message], "here")


@pytest.mark.parametrize(
    ("template", "place"),
    [
        (
            "{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}",
            "5",
        ),
        ("{% for i in range(5) %}{{ messages[i].content }}{% endfor %}", "3"),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", "4"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "3",
        ),
    ],
)
def test_messages_not_rendered_once_in_order_are_refused(
    tmp_path: Path, template: str, place: str
) -> None:
    """Catches a turn that is dropped, and text of another turn that is silently trained."""
    folder = chat_folder(tmp_path, template)
    with pytest.raises(
        ValueError, match=rf"talks, line 3, message {place} does not appear .*template"
    ):
        load(folder).example(TALK, "talks, line 3")
    other = tmp_path / "marked.jinja"
    other.write_text(CHATML_MARKED)
    check(load(folder, other).example(TALK, "here"), folder, marked_chatml(TALK))


def test_a_turn_with_another_header_than_the_prompt_is_refused(tmp_path: Path) -> None:
    """Catches a trained header of a turn, which does not match the generation prompt."""
    folder = chat_folder(tmp_path, CHATML.replace("<|im_start|>assistant", "<|im_start|>bot"))
    with pytest.raises(ValueError, match="line 3, message 3: the chat template renders it"):
        load(folder).example(TALK, "talks, line 3")


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["hello"], "message 1 is a JSON str"),
        ([{"content": "x"}], "message 1 has no 'role'"),
        ([TALK[1], {"role": "assistant"}], r"message 2 \(assistant\) has no 'content'"),
        ([{"role": "tool", "content": "x"}] * 2, "cannot render the conversation: No tools twice"),
        ([{"role": "user", "content": "\ud83d"}], r"it contains U\+D83D, which is not a character"),
        (
            [{"role": "user", "content": "\ufdd0x"}],
            r"it contains U\+FDD0, which is not a character",
        ),
    ],
)
def test_invalid_conversations_are_refused_with_their_place(
    tmp_path: Path, messages: Any, fault: str
) -> None:
    """Catches a traceback, or a message without file and line."""
    refuses = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('No tools twice') }}{% endif %}"
    )
    template = refuses + CHATML
    with pytest.raises(ValueError, match=f"a.jsonl, line 7.*{fault}") as refused:
        load(chat_folder(tmp_path, template)).example(messages, "a.jsonl, line 7")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"tools": {"name": "f"}}, "'tools' is not a list of objects"),
        ({"tools": ["f"]}, "'tools' is not a list of objects"),
        ({"variables": ["f"]}, "'chat_template_kwargs' is not an object"),
    ],
)
def test_tools_and_variables_of_a_template_are_checked(
    tmp_path: Path, keys: dict[str, Any], fault: str
) -> None:
    """Catches a traceback in training or generation, and tools that a template writes as text."""
    template = load(chat_folder(tmp_path))
    for given in (template.example, template.prompt):
        with pytest.raises(ValueError, match=f"^a.jsonl, line 7: .*{fault}"):
            given(TALK[:2], "a.jsonl, line 7", **keys)


def test_a_missing_template_is_refused_with_the_key(tmp_path: Path) -> None:
    """Catches transformers' own message, which is about the arguments of a call."""
    with pytest.raises(ValueError, match=r"no chat template .*data\.chat_template"):
        load(chat_folder(tmp_path, None))
    with pytest.raises(ValueError, match=r"data\.chat_template=.*gone.jinja cannot be read"):
        load(tmp_path, tmp_path / "gone.jinja")
    from isp.data.chat import ChatTemplate

    with pytest.raises(ValueError, match=r"data\.tokenizer=bytes has no chat template"):
        ChatTemplate(ByteTokenizer())
