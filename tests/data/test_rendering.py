"""Chat templates rendered with limits, as transformers renders them without."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from isp.data.rendering import Renderer, TemplateFailure
from tests.data.test_chat import GEMMA, GPT_OSS, QWEN3

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "é\x1b[31m"},
    {"role": "assistant", "content": "A", "name": None},
]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """One process for all."""
    return Renderer(seconds=1)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for i in range(10**12) %}{% endfor %}", "OverflowError: Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 seconds of CPU time",
        ),
        ("{{ lipsum(n=10**9) }}", "more than 1 seconds of CPU time"),
        ("{% set x = 3**(10**8) %}", "more than 1 seconds of CPU time"),
        ("{{ 'a' * 10**12 }}", "needs too much memory"),
        ("{{ messages | tojson(indent=10**10) }}", "needs too much memory"),
        (
            "{% set n = namespace(x='ab') %}"
            "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "needs too much memory",
        ),
        ("{{ 'a' * 2**25 }}", "writes 33,554,432 characters, more than 16,777,216"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too often"),
        ("{{ " + "(" * 10**5 + ")" * 10**5 + " }}", "nested too deeply"),
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
        ("{% set n = namespace(__init__=1) %}", "a namespace cannot have the name __init__"),
    ],
)
def test_any_fault_of_a_template_is_a_line(renderer: Renderer, template: str, told: str) -> None:
    """Catches a template that never ends, fills the memory, raises, or writes to the terminal."""
    with pytest.raises(TemplateFailure, match=told) as refused:
        renderer.render(template, TALK, variables={})
    assert str(refused.value).isprintable()
    assert renderer.render("{{ messages[1].content }}", TALK, variables={}).text == "A"


def test_the_process_ends_with_its_owner() -> None:
    """Catches a process that stays, a crash without a word, and a nest that cannot be sent."""
    renderer = Renderer()
    renderer.render("", TALK, variables={})
    process = renderer._process
    assert process is not None
    process.send_signal(signal.SIGSEGV)
    process.wait()
    with pytest.raises(TemplateFailure, match="ended with SIGSEGV"):
        renderer.render("", TALK, variables={})
    nested: Any = []
    for _ in range(10**5):
        nested = [nested]
    with pytest.raises(TemplateFailure, match="nested too deeply"):
        renderer.render("", [{"role": "user", "content": nested}], variables={})
    renderer.render("", TALK, variables={})
    process = renderer._process
    assert process is not None
    del renderer
    assert process.returncode == -signal.SIGKILL


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
def test_text_is_that_of_transformers(renderer: Renderer, template: str, prompt: bool) -> None:
    """Catches other scopes, white space, names of reasoning or functions than theirs."""
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [TALK[0], {**TALK[1], "reasoning": "R"}]
    talk[1].pop("name")
    variables = {"bos_token": "<s>", "tools": None, "documents": None}
    theirs = render_jinja_template(
        [talk], chat_template=template, add_generation_prompt=prompt, bos_token="<s>"
    )[0][0]
    asked: dict[str, Any] = {**variables, "add_generation_prompt": prompt}
    assert renderer.render(template, talk, variables=asked).text == theirs
    assert renderer.render(template, talk, variables=asked, marks=True).text == theirs
