"""Rows of conversations in the formats of public datasets: text and trained parts, or refused
keys.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from isp.config.data import Format
from isp.data.examples import SourceReader
from isp.data.packing import ExampleDataset
from isp.data.prepare import prepare
from isp.data.tokenizer import HFTokenizer
from tests.data.chat_folder import CHATML, chat_folder, write_lines
from tests.data.test_examples import opened

TEMPLATE = (
    "{%- if tools %}{{ '<tools>' ~ tools | map(attribute='name') | join(',') }}{% endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name }}"
    "{%- for key, value in c.function.arguments.items() %}{{- ' ' ~ key ~ '=' ~ value }}"
    "{%- endfor %}{% endfor %}{{- '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template with tools and tool calls whose arguments must be objects."""

JOINS = TEMPLATE.replace(
    "{%- for key, value in c.function.arguments.items() %}{{- ' ' ~ key ~ '=' ~ value }}"
    "{%- endfor %}",
    "{{- ' ' + c.function.arguments }}",
)
"""A template with arguments that must be text, like DeepSeek's."""


def shown(folder: Path, path: Path) -> list[str]:
    """Return the examples of a file as text, with trained parts in [[ ]]."""
    tokenizer = HFTokenizer(folder)
    reader = SourceReader(
        str(path), tokenizer, asked=Format.AUTO, text_key="text", template=None, key="data.source"
    )
    found = []
    for examples, _ in reader.read(path):
        for example in examples:
            text = ""
            pairs = zip(example.tokens.tolist(), example.labels.tolist(), strict=True)
            for is_trained, part in groupby(pairs, key=lambda pair: pair[1] != -100):
                piece = tokenizer._tokenizer.decode(
                    [token for token, _ in part], skip_special_tokens=False
                )
                text += f"[[{piece}]]" if is_trained else piece
            found.append(text)
    return found


def written(*turns: tuple[str, str]) -> str:
    """Return the text of the template; the assistant's turns are trained."""
    return "".join(
        f"<|im_start|>{role}\n[[{content}<|im_end|>]]"
        if role == "assistant"
        else f"<|im_start|>{role}\n{content}<|im_end|>"
        for role, content in turns
    )


USER, ANSWER = ("user", "Q"), ("assistant", "A")
TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
GPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
CALLED = {"name": "add", "arguments": {"a": 1, "b": 2}}
CALL = ("assistant", "<call>add a=1 b=2")


def call(arguments: Any, **keys: Any) -> dict[str, Any]:
    """Return a conversation with one tool call."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"messages": [TURNS[0], {"role": "assistant", "tool_calls": calls, **keys}]}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        # A system message in a key of the row.
        ({"system": "S", "conversations": GPT}, written(("system", "S"), USER, ANSWER)),
        ({"system": "S", "messages": TURNS}, written(("system", "S"), USER, ANSWER)),
        ({"system": "", "messages": TURNS}, written(USER, ANSWER)),
        (
            {"system": "S", "messages": [{"role": "system", "content": "S"}, *TURNS]},
            written(("system", "S"), USER, ANSWER),
        ),
        ({"system_prompt": "", "messages": TURNS, "images": []}, written(USER, ANSWER)),
        *(
            ({"messages": TURNS, "tools": x, "functions": x, "images": x}, written(USER, ANSWER))
            for x in ("[]", "", [], [None], "null")
        ),
        *(
            ({"system": "S", "conversations": [own, *GPT]}, written(("system", "S"), USER, ANSWER))
            for own in ({"from": "system", "value": ""}, {"role": "system", "content": None})
        ),
        # Weights.
        (
            {"conversations": [*GPT, GPT[0], {**GPT[1], "weight": 0}]},
            written(USER, ANSWER) + written(USER) + "<|im_start|>assistant\nA<|im_end|>",
        ),
        (
            {"messages": [{**TURNS[0], "weight": 0.0}, {**TURNS[1], "weight": 1.0}]},
            written(USER, ANSWER),
        ),
        # Roles.
        (
            {"messages": [{"role": "developer", "content": "S"}, *TURNS]},
            written(("system", "S"), USER, ANSWER),
        ),
        *(
            ({"conversations": [GPT[0], {"from": role, "value": "A"}]}, written(USER, ANSWER))
            for role in ("chatgpt", "bing", "bard", "model", "assistant")
        ),
        *(
            (
                {"messages": [*TURNS, {"role": role, "content": "R"}, TURNS[1]]},
                written(USER, ANSWER, ("tool", "R"), ANSWER),
            )
            for role in ("tool", "observation", "function_response", "tool_response", "function")
        ),
        *(
            ({"conversations": [GPT[0], {"from": "function_call", "value": value}]}, text)
            for value, text in (
                (json.dumps(CALLED), written(USER, CALL)),
                (
                    json.dumps([CALLED, {**CALLED, "arguments": '{"c": 3}'}]),
                    written(USER, ("assistant", CALL[1] + "<call>add c=3")),
                ),
            )
        ),
        ({"messages": [{"from": "user", "content": "Q"}, TURNS[1]]}, written(USER, ANSWER)),
        # Tool calls and tools.
        (call({"a": 1, "b": 2}), written(USER, CALL)),
        (call('{"a":1,"b":2}'), written(USER, CALL)),
        (call('{"a": null}'), written(USER, ("assistant", "<call>add a=None"))),
        (call(""), written(USER, ("assistant", "<call>add"))),
        (
            {"messages": [TURNS[0], {"role": "assistant", "function_call": CALLED}]},
            written(USER, CALL),
        ),
        ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": []}]}, written(USER, ANSWER)),
        (
            {
                "messages": [
                    TURNS[0],
                    {"role": "assistant", "function_call": CALLED, "tool_calls": []},
                    {**TURNS[1], "function_call": {}},
                ]
            },
            written(USER, CALL, ANSWER),
        ),
        ({"messages": TURNS, "tools": ""}, written(USER, ANSWER)),
        ({"messages": TURNS, "tools": '[{"name": "f"}]'}, "<tools>f" + written(USER, ANSWER)),
        # Answers.
        (
            {"system": "S", "prompt": TURNS[:1], "completion": [GPT[1]]},
            written(("system", "S"), USER, ANSWER),
        ),
    ],
)
def test_every_key_of_a_row_is_used(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    """Catches a system message, a weight, a role or a tool call that is lost."""
    folder = chat_folder(tmp_path / "model", TEMPLATE)
    assert shown(folder, write_lines(tmp_path / "a.jsonl", [row])) == [text]


def test_both_answers_of_a_pair_begin_with_the_system_message(tmp_path: Path) -> None:
    """Catches a system message that is only used if the row has a prompt."""
    folder = chat_folder(tmp_path / "model", TEMPLATE)
    row = {"system": "S", "chosen": TURNS, "rejected": [GPT[0], {"from": "gpt", "value": "B"}]}
    row["rejected"][0] = TURNS[0]
    expected = [written(("system", "S"), USER, ("assistant", answer)) for answer in "AB"]
    assert shown(folder, write_lines(tmp_path / "a.jsonl", [row])) == expected


def test_roles_that_a_template_has_are_kept(tmp_path: Path) -> None:
    """Catches a role of the template that is renamed."""
    own = TEMPLATE.replace(
        "m.content or ''", "m.content or ('?' if m['role'] in ['bot', 'developer'] else '')"
    )
    talk = {"messages": [{"role": role, "content": "R"} for role in ("developer", "bot")] + TURNS}
    path = write_lines(tmp_path / "a.jsonl", [talk])
    assert shown(chat_folder(tmp_path / "own", own), path) == [
        written(("developer", "R"), ("bot", "R"), USER, ANSWER)
    ]


def test_the_role_model_is_the_assistant_if_a_template_renames_it(tmp_path: Path) -> None:
    """Catches turns of the role `model` without loss because the template also compares with
    `model`.
    """
    renames = TEMPLATE.replace(
        "{{- '<|im_start|>' + m.role",
        "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{- '<|im_start|>' + ('assistant' if role == 'model' else role)",
    )
    path = write_lines(
        tmp_path / "a.jsonl", [{"messages": [TURNS[0], {**TURNS[1], "role": "model"}]}]
    )
    assert shown(chat_folder(tmp_path / "model", renames), path) == [written(USER, ANSWER)]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{{- ' ' + ARGUMENTS }}", '{"a":"é"}'),
        ("{{- ' ' ~ ARGUMENTS }}", '{"a":"é"}'),
        ("{{- ' ' }}{{ ARGUMENTS }}", '{"a":"é"}'),
        ("{{- ' ' }}{{ ARGUMENTS | string | trim }}", '{"a":"é"}'),
        ("{{- ' ' }}{{ c.function }}", "{'name': 'add', 'arguments': '{\"a\":\"é\"}'}"),
        ("{{- ' ' ~ ARGUMENTS | tojson }}", '{"a": "é"}'),
        ("{{- ' ' ~ (ARGUMENTS is mapping) ~ ARGUMENTS.a ~ ARGUMENTS['a'] }}", "Trueéé"),
        ("{{- ' ' ~ ARGUMENTS | dictsort ~ ARGUMENTS | length }}", "[('a', 'é')]1"),
    ],
)
def test_tool_arguments_may_be_json_text_or_objects(
    tmp_path: Path, expression: str, text: str
) -> None:
    """Catches arguments that a template cannot write, or writes as a Python dict."""
    template = JOINS.replace(
        "{{- ' ' + c.function.arguments }}", expression.replace("ARGUMENTS", "c.function.arguments")
    )
    path = write_lines(tmp_path / "b.jsonl", [call('{"a":"é"}', content="")])
    assert shown(chat_folder(tmp_path / "joins", template), path) == [
        written(USER, ("assistant", f"<call>add {text}"))
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            {"system": "S", "messages": [{"role": "system", "content": "T"}, *TURNS]},
            "has a 'system', and its messages begin with another system message",
        ),
        (
            {"system": "S", "messages": [{"role": "developer", "content": "T"}, *TURNS]},
            "has a 'system', and its messages begin with another system message",
        ),
        ({"system": ["S"], "messages": TURNS}, "has a 'system' that is not text"),
        ({"system_prompt": "S", "messages": TURNS}, "'system_prompt', which is not read: name it"),
        ({"messages": TURNS, "conversations": GPT}, "has 'messages' and 'conversations'"),
        ({"messages": TURNS, "functions": [{"name": "f"}]}, "'functions', .*: write 'tools'"),
        ({"messages": TURNS, "functions": '[{"name": "f"}]'}, "'functions', .*: write 'tools'"),
        ({"messages": TURNS, "images": ["a.png"]}, "'images', which is not read: only text"),
        ({"messages": TURNS, "weight": 0}, "'weight', which is not read: rows have no weight"),
        ({"messages": TURNS, "assistant_masks": [0]}, "'assistant_masks', which is not read"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, "'seq_lengths', .*'position_ids'"),
        (
            {"messages": [{"role": "critic", "content": "x"}, *TURNS]},
            r"message 1 \(critic\) has a role that is not known: use system, user,",
        ),
        ({"conversations": [{**GPT[0], "role": "user"}]}, "message 1 has 'role' and 'from'"),
        (
            {"conversations": [GPT[0], {**GPT[1], "weight": 2}]},
            r"message 2 \(gpt\) has the weight 2: write 0",
        ),
        ({"conversations": [{**GPT[0], "weight": 1}]}, r"message 1 \(human\) has the weight 1"),
        (
            {"messages": [{**TURNS[1], "train": False}]},
            "'train', which is not read: write 'weight'",
        ),
        (
            {"messages": [{**TURNS[0], "content": [{"type": "text", "text": "x", "weight": 0}]}]},
            "a part of its content with 'weight'",
        ),
        (
            {"messages": [{**TURNS[0], "content": [{"type": "image"}]}]},
            "a part of its content of the type 'image': only text",
        ),
        (call('{"a": '), r"message 2 \(assistant\) has 'arguments' that are not JSON .*'{\"a\": '"),
        (call("[1]"), "a tool call whose 'arguments' are not a JSON object: '\\[1\\]'"),
        (call(json.dumps(["x" * 999])), "are not a JSON object: '.{,199}$"),
        (call('{"a": ' + "x" * 999), "'arguments' that are not JSON .*: '.{,199}$"),
        (
            {"messages": [{**TURNS[1], "tool_calls": [CALLED], "function_call": CALLED}]},
            r"message 1 \(assistant\) has tool calls in 'tool_calls' and in 'function_call'",
        ),
        (
            {
                "conversations": [
                    GPT[0],
                    {"from": "function_call", "value": json.dumps(CALLED), "tool_calls": [CALLED]},
                ]
            },
            r"message 2 \(function_call\) has tool calls in 'tool_calls' and in 'content'",
        ),
        ({"messages": [{**TURNS[1], "tool_calls": ["f"]}]}, "'tool_calls' that are not a list of"),
        (
            {"conversations": [GPT[0], {"from": "function_call", "value": "add(1)"}]},
            r"message 2 \(function_call\) has 'content' that are not JSON",
        ),
        (
            {"prompt": TURNS[:1], "completion": [{**TURNS[1], "weight": 0}]},
            "message 2 has the weight 0, but the loss is computed on the answer",
        ),
        (
            {"prompt": [{**TURNS[1], "weight": 1}, TURNS[0]], "completion": TURNS[1:]},
            "message 1 has the weight 1, but",
        ),
        ({"prompt": "a", "completion": "b", "system": "S"}, "'system', which is for messages"),
        ({"prompt": "a", "completion": "b", "label": False}, "'label', which is not read"),
    ],
)
def test_unknown_keys_are_refused_with_row_and_key(
    tmp_path: Path, row: dict[str, Any], fault: str
) -> None:
    """Catches a key that would change the text or the loss but is silently dropped."""
    folder = chat_folder(tmp_path / "model", TEMPLATE)
    path = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(ValueError, match=f"a.jsonl, line 1.* {fault}") as refused:
        shown(folder, path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "template", "fault"),
    [
        (call({"a": 1}, content=""), CHATML, "message 2: tool call 1 does not appear in"),
        (  # the result of a call has its id, too
            {
                "messages": [
                    *call('{"a": "x"}')["messages"],
                    {"role": "tool", "tool_call_id": "1", "content": ""},
                ]
            },
            TEMPLATE.replace("m.tool_calls or []", "[]").replace(
                "m.content or ''", "m.content or m.tool_call_id or ''"
            ),
            "message 2: tool call 1 does not appear in",
        ),
        (
            {"messages": [{"role": "system", "content": "S"}, *TURNS]},
            TEMPLATE.replace("for m in messages", "for m in messages if m.role != 'system'"),
            r"message 1 \(system\) does not appear in the rendered conversation",
        ),
    ],
)
def test_messages_that_a_template_leaves_out_are_refused(
    tmp_path: Path, row: dict[str, Any], template: str, fault: str
) -> None:
    """Catches an empty turn that is trained in place of a tool call, and a lost system message."""
    folder = chat_folder(tmp_path / "model", template)
    with pytest.raises(ValueError, match=f"a.jsonl, line 1: {fault}"):
        shown(folder, write_lines(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("c['id'] ~ ' ' ~ c.function.arguments", 'functions.add:0 {"a":"x"}'),
        ("c['id']", "functions.add:0"),
        ("c.function.arguments", '{"a":"x"}'),
        ("c.function.arguments | tojson", '{"a": "x"}'),
        ("c.function.arguments.a", "x"),
        ("'' + c.function.arguments", '{"a":"x"}'),
    ],
)
def test_a_tool_call_may_be_written_without_its_name(tmp_path: Path, part: str, text: str) -> None:
    """Catches the refusal of a template that writes only the id or the arguments of a call."""
    template = JOINS.replace("+ c.function.name", "").replace("' ' + c.function.arguments", part)
    row = call('{"a":"x"}', content="")
    row["messages"][1]["tool_calls"][0]["id"] = "functions.add:0"
    row["messages"].append({"role": "tool", "tool_call_id": "functions.add:0", "content": "R"})
    path = write_lines(tmp_path / "a.jsonl", [row])
    assert shown(chat_folder(tmp_path / "model", template), path) == [
        written(USER, ("assistant", f"<call>{text}"), ("tool", "R"))
    ]


def test_unused_keys_are_logged_once(tmp_path: Path) -> None:
    """Catches metadata that are refused, or logged for every row."""
    folder = str(chat_folder(tmp_path / "model", TEMPLATE))
    rows: list[dict[str, Any]] = [
        {"id": 1, "messages": TURNS, "source": "x", "tools": [{"name": "f"}]},
        {"id": 2, "messages": [{**TURNS[0], "lang": "en"}, TURNS[1]], "source": None},
        {"id": 3, "messages": TURNS, "chat_template_kwargs": {"mode": "slow"}},
    ]
    path = str(write_lines(tmp_path / "a.jsonl", rows))
    note = "not used, by rows: id (3), lang of messages (1), mode (1), source (1)"
    train = opened(path, tokenizer=folder, seq_len=64).train
    assert isinstance(train, ExampleDataset)
    assert train.summary.endswith(f"padding; {note}")
    assert prepare(path, tmp_path / "p", tokenizer=folder).note == f"; {note}"
