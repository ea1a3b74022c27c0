"""Chat templates of the main model families, without generation blocks: what is trained in a
turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_folder import chat_folder, trained_texts

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


@pytest.mark.parametrize(
    ("template", "short", "thoughts", "calls"),
    [
        (
            QWEN3,
            ["A<|im_end|>\n", "<think></think>\n B <|im_end|>\n"],
            ["A<|im_end|>\n", "<think>y</think>\nB<|im_end|>\n"],
            [
                "<think></think>\n<tool_call>f</tool_call><|im_end|>\n",
                "<think></think>\nB<|im_end|>\n",
            ],
        ),
        (
            NEMOTRON,
            ["<think></think>\nA<|im_end|>\n", "<think></think>\n B <|im_end|>\n"],
            ["<think>x</think>\nA<|im_end|>\n", "<think>y</think>\nB<|im_end|>\n"],
            [
                "<think></think>\n<tool_call>f</tool_call><|im_end|>\n",
                "<think></think>\nB<|im_end|>\n",
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
        (PHI3, ["A<|end|>\n", " B <|end|>\n<|im_end|>"], None, None),
        (GRANITE, ["A<|end|>\n", " B <|end|>\n"], None, None),
        (MISTRAL, [" A<|endoftext|>", "  B <|endoftext|>"], None, None),
        (GEMMA, ["A<|end|>\n", "B<|end|>\n"], None, None),
    ],
)
def test_templates_of_the_main_families_train_the_assistant(
    tmp_path: Path,
    template: str,
    short: list[str],
    thoughts: list[str] | None,
    calls: list[str] | None,
) -> None:
    """Catches templates without generation blocks that rewrite turns, refused or trained wrongly.

    The templates have the form of those published with the models and treat conversations in the
    same way.
    """
    folder = chat_folder(tmp_path, template)
    for messages, expected in ((SHORT, short), (THOUGHTS, thoughts), (CALLS, calls)):
        if expected is not None:
            assert trained_texts(folder, messages) == expected
    assert trained_texts(folder, SHORT[:3]) == [short[0]] or template is QWEN3
    weighted = [SHORT[0], {**SHORT[1], "weight": 0}, SHORT[2], {**SHORT[3], "weight": 1}]
    assert trained_texts(folder, weighted) == short[1:]


def test_reasoning_in_a_separate_key_is_trained(tmp_path: Path) -> None:
    """Catches reasoning that is not trained, and a second header that is.

    The model itself writes the header of the second part of a turn of gpt-oss.
    """
    talk = [USER, {"role": "assistant", "content": "B", "reasoning": "why"}]
    assert trained_texts(chat_folder(tmp_path / "a", GPT_OSS), talk) == [
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>B"
        "<|return|>"
    ]
    folder = chat_folder(tmp_path / "b", QWEN3)
    assert trained_texts(folder, talk) == ["<think>why</think>\nB<|im_end|>\n"]
    found = trained_texts(folder, SHORT[:2], variables={"enable_thinking": False})
    assert found == ["<think></think>\nA<|im_end|>\n"]
