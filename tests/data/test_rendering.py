"""Chat templates rendered as in transformers, and their errors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from isp.data.rendering import TemplateFailure, render
from tests.data.test_chat_families import GEMMA, GPT_OSS, QWEN3

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "é\x1b[31m"},
    {"role": "assistant", "content": "A", "name": None},
]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**12) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
        ("{{ " + "(" * 10**5 + ")" * 10**5 + " }}", "recurses too deeply"),
        ("\n{% if %}", "line 2: Expected an expression"),
        ("{{ foo.bar }}", "'foo' is undefined"),
        ("{{ messages[7].role }}", "has no element 7"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages | nothing }}", "line 1: No filter named 'nothing'"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        (
            "{{ raise_exception(messages[0].content ~ '\nno\r' * 500) }}",
            r"^é \[31m no no .*\.\.\.$",
        ),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ],
)
def test_any_error_of_a_template_is_one_line(template: str, message: str) -> None:
    """Catches a template that reaches Python, and an error with a traceback or control codes."""
    with pytest.raises(TemplateFailure, match=message) as refused:
        render(template, TALK, variables={})
    assert str(refused.value).isprintable()


SCOPES = (
    "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}"
    "{% endgeneration %}{{ x }}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}"
    "{% endfor %}{{ dict(a=1) | tojson(indent=1) }}{{ strftime_now('%Y') }}"
    "{% for k, v in {'a': 1}.items() recursive %}{{ k ~ v }}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [SCOPES, QWEN3, GPT_OSS, GEMMA, "  {% if 1 %}\n a\n  {% endif %}"]
)
@pytest.mark.parametrize("prompt", [False, True])
def test_rendered_text_equals_that_of_transformers(template: str, prompt: bool) -> None:
    """Catches other variable scopes, white space, or names of reasoning and functions."""
    from transformers.utils import chat_template_utils
    from transformers.utils.chat_template_utils import render_jinja_template

    # Releases before 5.22 pass `reasoning` to a template unchanged.
    renamed = "reasoning" in inspect.getsource(chat_template_utils)
    talk = [TALK[0], {**TALK[1], **({"reasoning": "R"} if renamed else {})}]
    talk[1].pop("name")
    variables = {"bos_token": "<s>", "tools": None, "documents": None}
    theirs = render_jinja_template(
        [talk], chat_template=template, add_generation_prompt=prompt, bos_token="<s>"
    )[0][0]
    asked: dict[str, Any] = {**variables, "add_generation_prompt": prompt}
    assert render(template, talk, variables=asked).text == theirs
    assert render(template, talk, variables=asked, marks=True).text == theirs
