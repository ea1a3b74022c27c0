"""Conversations as tokens, and which of them are trained, against rows that are written by hand."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from isp.data import chat_turns
from isp.data.chat import ChatTemplate, Example
from isp.data.config import TrainOn
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
    """Catches an end of turn that is not trained, a header that is, also of the first message."""
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
"""Character by character; TRL has a variant of it."""


def test_turns_of_known_templates_are_those_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a line feed behind a turn, or an end of text, that TRL alone trains on."""
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
    for begin, trained in {"turn": "", "line feed": "\n", "role": header}.items():
        monkeypatch.setitem(chat_turns._KNOWN, digest, begin)
        parts = [*chatml(TALK[1:2]), (header.removesuffix(trained), False), (trained, True)]
        parts += [(TALK[2]["content"] + "<|im_end|>\n", True)]
        check(load(folder).example(TALK[1:3], "here"), folder, parts)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_the_last_turn_or_all_tokens_are_trained(tmp_path: Path, template: str) -> None:
    """Catches an earlier turn that is trained, and a part of the whole that is not."""
    folder = chat_folder(tmp_path, template)
    tokenizer, talk = HFTokenizer(folder), [*TALK, {"role": "user", "content": "so?"}]
    last = ChatTemplate(tokenizer, train_on=TrainOn.LAST).example(talk, "here")
    parts = enumerate(chatml(talk))
    check(last, folder, [(text, trained and i > 8) for i, (text, trained) in parts])
    whole = ChatTemplate(tokenizer, train_on=TrainOn.ALL)
    assert whole.example(talk, "here").labels.tolist() == last.tokens.tolist()
    with pytest.raises(ValueError, match=r"message 1 has the weight 0, and data.train_on=all"):
        whole.example([{**TALK[2], "weight": 0}], "here")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3])
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    """Catches another rendering, or other special tokens, than apply_chat_template's."""
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


THINK = (
    "{%- set content = m.content -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}"
    "{%- set content = content.split('</think>')[-1].lstrip() -%}{%- endif -%}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages[::-1] -%}{%- if m.role == 'user' and ns.last < 0 -%}"
    "{%- set ns.last = messages|length - 1 - loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}" + THINK + "{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}"
    "{{- '<think>' + thought + '</think>\\n' -}}{%- endif -%}"
    "{{- content -}}{%- for call in m.tool_calls -%}"
    "{{- '<tool_call>' + call.name + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined -%}{{- '<think></think>\\n' -}}{%- endif -%}{%- endif -%}"
)
NEMOTRON = QWEN3.replace("and loop.index0 > ns.last", "").replace(
    "<|im_start|>assistant\\n' -}}", "<|im_start|>assistant\\n<think>\\n' -}}"
)
DEEPSEEK = (
    "{%- set ns = namespace(tool=false) -%}{{- bos_token -}}{%- for m in messages -%}"
    + THINK
    + "{%- if m.role == 'user' -%}{{- '<|user|>' + content -}}"
    "{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}{{- '<result>' + content -}}"
    "{%- elif ns.tool -%}{{- '</result>' + content + '<|endoftext|>' -}}{%- set ns.tool = false -%}"
    "{%- else -%}{{- '<|assistant|>' + content -}}{%- for call in m.tool_calls -%}"
    "{{- '<tool_call>' + call.name + '</tool_call>' -}}{%- endfor -%}{{- '<|endoftext|>' -}}"
    "{%- endif -%}{%- endfor -%}{%- if ns.tool -%}{{- '</result>' -}}"
    "{%- elif add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"
)
GPT_OSS = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- set later = namespace(final=false) -%}{%- for other in messages[loop.index:] -%}"
    "{%- if other.role == 'assistant' -%}{%- set later.final = true -%}{%- endif -%}{%- endfor -%}"
    "{%- if m.thinking and not later.final -%}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}"
    "{%- endif -%}{%- if m.tool_calls -%}{{- '<|start|>assistant to=' + m.tool_calls[0].name"
    " + '<|message|>{}<|call|>' -}}{%- else -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}{%- endif -%}"
    "{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GLM = (
    "{%- for m in messages -%}"
    + THINK
    + "{{- '<|' + m.role + '|>' -}}{%- if m.role == 'assistant' -%}"
    "{{- '\\n<think>' + (thought if loop.last else '') + '</think>' -}}{%- endif -%}"
    "{{- '\\n' + content.strip() -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
GRANITE = (
    "{%- for m in messages -%}"
    "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>\\n' -}}"
    "{%- if loop.last and add_generation_prompt -%}{{- '<|start|>assistant<|message|>' -}}"
    "{%- endif -%}{%- endfor -%}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' -%}{%- set first = messages[0].content -%}"
    "{%- set messages = messages[1:] -%}{%- endif -%}{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '[INST] ' -}}{%- if loop.last -%}{{- first -}}{%- endif -%}"
    "{{- m.content + ' [/INST]' -}}{%- else -%}{{- ' ' + m.content + '<|endoftext|>' -}}"
    "{%- endif -%}{%- endfor -%}"
)
GEMMA = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('alternate') -}}"
    "{%- endif -%}{%- set role = 'model' if m.role == 'assistant' else m.role -%}"
    "{{- '<|start|>' + role + '\\n' + m.content | trim + '<|end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>model\\n' -}}{%- endif -%}"
)
USER = {"role": "user", "content": "Q"}
SHORT = [USER, {"role": "assistant", "content": "A"}, USER, {"role": "assistant", "content": " B "}]
THOUGHTS = [
    USER,
    {"role": "assistant", "content": "<think>x</think>\nA"},
    USER,
    {"role": "assistant", "content": "<think>y</think>\nB"},
]
CALLS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    {"role": "tool", "content": "R"},
    {"role": "assistant", "content": "B"},
]


def trained(folder: Path, messages: list[dict[str, Any]], **keys: Any) -> list[str]:
    """The texts that the loss is computed on."""
    tokenizer = HFTokenizer(folder)
    example = load(folder).example(messages, "talk", **keys)
    runs = itertools.groupby(zip(*example, strict=True), key=lambda pair: pair[1] != IGNORE_INDEX)
    decode = tokenizer._tokenizer.decode
    return [
        decode([int(token) for token, _ in run], skip_special_tokens=False)
        for has_loss, run in runs
        if has_loss
    ]


@pytest.mark.parametrize(
    ("template", "short", "thoughts", "calls"),
    [
        (
            QWEN3,
            ["A<|im_end|>", "<think></think>\n B <|im_end|>"],
            ["A<|im_end|>", "<think>y</think>\nB<|im_end|>"],
            [
                "<think></think>\n<tool_call>f</tool_call><|im_end|>",
                "<think></think>\nB<|im_end|>",
            ],
        ),
        (
            NEMOTRON,
            ["<think></think>\nA<|im_end|>", "<think></think>\n B <|im_end|>"],
            ["<think>x</think>\nA<|im_end|>", "<think>y</think>\nB<|im_end|>"],
            [
                "<think></think>\n<tool_call>f</tool_call><|im_end|>",
                "<think></think>\nB<|im_end|>",
            ],
        ),
        (
            DEEPSEEK,
            ["A<|endoftext|>", " B <|endoftext|>"],
            ["A<|endoftext|>", "B<|endoftext|>"],
            ["<tool_call>f</tool_call><|endoftext|>", "</result>B<|endoftext|>"],
        ),
        (
            GPT_OSS,
            ["<|channel|>final<|message|>A<|end|>", "<|channel|>final<|message|> B <|return|>"],
            [
                "<|channel|>final<|message|><think>x</think>\nA<|end|>",
                "<|channel|>final<|message|><think>y</think>\nB<|return|>",
            ],
            [" to=f<|message|>{}<|call|>", "<|channel|>final<|message|>B<|return|>"],
        ),
        (
            GLM,
            ["\n<think></think>\nA<|user|>", "\n<think></think>\nB"],
            ["\n<think></think>\nA<|user|>", "\n<think>y</think>\nB"],
            None,
        ),
        (PHI3, ["A<|end|>", " B <|end|>"], None, None),
        (GRANITE, ["A<|end|>", " B <|end|>"], None, None),
        (MISTRAL, [" A<|endoftext|>", "  B <|endoftext|>"], None, None),
        (GEMMA, ["A<|end|>", "B<|end|>"], None, None),
    ],
)
def test_templates_of_the_main_families(
    tmp_path: Path,
    template: str,
    short: list[str],
    thoughts: list[str] | None,
    calls: list[str] | None,
) -> None:
    """Catches templates without generation blocks that rewrite turns, refused or mistrained.

    In form and in what they do to a conversation they are those that the models come with.
    """
    folder = chat_folder(tmp_path, template)
    for messages, expected in ((SHORT, short), (THOUGHTS, thoughts), (CALLS, calls)):
        if expected is not None:
            assert trained(folder, messages) == expected
    assert trained(folder, SHORT[:3]) == [short[0]] or template is QWEN3
    weighted = [SHORT[0], {**SHORT[1], "weight": 0}, SHORT[2], {**SHORT[3], "weight": 1}]
    assert trained(folder, weighted) == short[1:]


def test_reasoning_of_its_own(tmp_path: Path) -> None:
    """Catches reasoning beside the content that is not the assistant's, or a second header that is.

    The model itself writes the header of the second part of a turn of gpt-oss.
    """
    talk = [USER, {"role": "assistant", "content": "B", "reasoning": "why"}]
    assert trained(chat_folder(tmp_path / "a", GPT_OSS), talk) == [
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>B"
        "<|return|>"
    ]
    folder = chat_folder(tmp_path / "b", QWEN3)
    assert trained(folder, talk) == ["<think>why</think>\nB<|im_end|>"]
    assert trained(folder, SHORT[:2], variables={"enable_thinking": False}) == ["A<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_weights_leave_messages_out(tmp_path: Path, template: str) -> None:
    """Catches a message of weight 0 that is trained, or seen by the template."""
    folder = chat_folder(
        tmp_path, template.replace("message.role +", "message.role ~ message.weight ~")
    )
    talk = [{**TALK[1], "weight": 0}, {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    assert trained(folder, talk) == ["No idea é<|im_end|>"]
    assert trained(folder, [{**m, "weight": None} for m in talk]) == [
        "Là-bas, 日本<|im_end|>",
        "No idea é<|im_end|>",
    ]
    assert not trained(folder, talk[:2])
    for message, fault in (
        ({**TALK[2], "weight": 0.5}, "message 2 has the weight 0.5: 0 leaves"),
        ({**TALK[2], "weight": True}, "message 2 has the weight True"),
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
def test_a_turn_without_a_place_of_its_own(tmp_path: Path, template: str, place: str) -> None:
    """Catches a turn that is dropped, or others' words in it, trained without a word."""
    folder = chat_folder(tmp_path, template)
    with pytest.raises(
        ValueError, match=rf"talks, line 3, message {place} has no place .*template"
    ):
        load(folder).example(TALK, "talks, line 3")
    other = tmp_path / "marked.jinja"
    other.write_text(CHATML_MARKED)
    check(load(folder, other).example(TALK, "here"), folder, chatml(TALK))


def test_a_turn_that_begins_otherwise_than_the_prompt(tmp_path: Path) -> None:
    """Catches a header that is trained because it is not that of the prompt."""
    folder = chat_folder(tmp_path, CHATML.replace("<|im_start|>assistant", "<|im_start|>bot"))
    with pytest.raises(ValueError, match="line 3, message 3: the chat template does not begin it"):
        load(folder).example(TALK, "talks, line 3")


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["hello"], "message 1 is a JSON str"),
        ([{"content": "x"}], "message 1 has no 'role'"),
        ([TALK[1], {"role": "assistant"}], r"message 2 \(assistant\) has no 'content'"),
        ([{"role": "wizard", "content": "x"}], "cannot render the conversation: Unknown role: wiz"),
        ([{"role": "user", "content": "\ud83d"}], r"it contains U\+D83D, which is no character"),
        ([{"role": "user", "content": "\ufdd0x"}], r"it contains U\+FDD0, which is no character"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(
    tmp_path: Path, messages: Any, fault: str
) -> None:
    """Catches a traceback, or a message without the place."""
    with pytest.raises(ValueError, match=f"a.jsonl, line 7.*{fault}") as refused:
        load(chat_folder(tmp_path)).example(messages, "a.jsonl, line 7")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"tools": {"name": "f"}}, "'tools' is not a list of objects"),
        ({"tools": ["f"]}, "'tools' is not a list of objects"),
        ({"variables": ["f"]}, "'chat_template_kwargs' is not an object"),
    ],
)
def test_what_else_a_template_sees_is_checked(
    tmp_path: Path, keys: dict[str, Any], fault: str
) -> None:
    """Catches a traceback in training or in generating, or tools that a template writes as text."""
    template = load(chat_folder(tmp_path))
    for given in (template.example, template.prompt):
        with pytest.raises(ValueError, match=f"^a.jsonl, line 7: .*{fault}"):
            given(TALK[:2], "a.jsonl, line 7", **keys)


def test_a_template_that_is_missing(tmp_path: Path) -> None:
    """Catches transformers' own message, which speaks of arguments of a call."""
    with pytest.raises(ValueError, match=r"no chat template .*data\.chat_template"):
        load(chat_folder(tmp_path, None))
    with pytest.raises(ValueError, match=r"data\.chat_template=.*gone.jinja cannot be read"):
        load(tmp_path, tmp_path / "gone.jinja")
    from isp.data.chat import ChatTemplate

    with pytest.raises(ValueError, match=r"data\.tokenizer=bytes has no chat template"):
        ChatTemplate(ByteTokenizer())
