"""Tasks of lm-evaluation-harness give what its own model of transformers gives: a prompt with other
tokens, a window that scores a token twice, an end that is no end.

These run where the harness is: bash tools/setup_env.sh dev lm-eval.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isp.cli import launch as launch_module
from isp.cli import main
from isp.comm import Mesh
from isp.evaluation.layout import choose_layout
from isp.evaluation.source import Source, open_source
from isp.parallel import Topology
from tests.evaluation.models import made, saved
from tests.ranks import launch_forked, run_each

pytest.importorskip("lm_eval")

TEXT = "the grass is green, the sky is blue and the sun is yellow; here we go, there and back. "
QUESTIONS = [
    {"question": "one and one is", "choices": ["two", "three", "four or five"], "answer": 0},
    {"question": "", "choices": ["grass", "sky", "the sun that shines"], "answer": 1},
    {"question": TEXT * 2, "choices": ["longer than it was trained", "not"], "answer": 1},
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}} "
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question}}?"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["t", "\\n"], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 2}} and {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a byte-level tokenizer that begins texts with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = saved("llama", tmp_path_factory.mktemp("llama"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=(
            "{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        ),
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of local files."""
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in QUESTIONS))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {file}}}\ntest_split: train\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    return folder


def of_transformers(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return HFLM(pretrained=made("llama"), tokenizer=tokenizer, batch_size=2)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def answers(model: Any) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    """What a model says to requests of all kinds, of texts below and beyond its 128 tokens."""
    pairs = [("", "a word"), ("two ", "words"), (TEXT * 2, "too long"), ("x", TEXT), (" ", "y")]
    options: list[dict[str, Any]] = [
        {"until": ["e", "\n\n"], "max_gen_toks": 30},
        {"until": [], "max_gen_toks": 40, "do_sample": False},
    ]
    texts = [(text, kwargs) for kwargs in options for text in ("one and", TEXT, TEXT * 2, "?")]
    return (
        model.loglikelihood(asked("loglikelihood", *pairs)),
        model.loglikelihood_rolling(
            asked("loglikelihood_rolling", ("short",), (TEXT * 4,), (TEXT[:128],), ("",))
        ),
        model.generate_until(asked("generate_until", *texts)),
    )


def of_engine(rank: int, case: tuple[Source, int, str]) -> Any:
    from isp.evaluation.harness import HarnessModel

    source, ranks, mode = case
    layout = choose_layout(source.model, ranks, [f"--parallel.tensor.mode={mode}"])
    mesh = Mesh(Topology.create(ranks, layout.parallel), rank)
    engine = source.engine(layout.parallel, mesh, torch.device("cpu"))
    return answers(HarnessModel(engine, source, max_length=128, batch_tokens=300))


def test_answers_are_those_of_transformers_in_every_layout(folder: Path) -> None:
    source = open_source(folder, dtype="float64")
    (likely, rolling, texts) = answers(of_transformers(folder))
    assert any(texts)
    found = [of_engine(0, (source, 1, "isp"))]
    cases = {mode: (source, 2, mode) for mode in ("mtp", "isp")}
    for of_ranks in run_each(2, of_engine, cases, timeout_seconds=100).values():
        found += of_ranks
    for mine in found:
        assert [x for x, _ in mine[0]] == pytest.approx([x for x, _ in likely], rel=1e-9)
        assert [same for _, same in mine[0]] == [same for _, same in likely]
        assert mine[1] == pytest.approx(rolling, rel=1e-9)
        assert mine[2] == texts


def numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{task} {metric}": value
        for task, of_task in results.items()
        for metric, value in of_task.items()
        if isinstance(value, float)
    }


@pytest.mark.parametrize("chat", [False, True])
def test_the_command_finds_what_the_harness_finds(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """Of data that are local files; with examples before each question, on two ranks, too."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = simple_evaluate(
        of_transformers(folder),
        tasks=list(TASKS),
        task_manager=manager,
        num_fewshot=1,
        apply_chat_template=chat,
    )
    assert expected is not None
    words = ["evaluate", str(folder), "--dtype=float64", f"--tasks={','.join(TASKS)}"]
    words += [f"--include-path={tasks}", f"--output={tmp_path}", "--num_fewshot=1"]
    words += ["--apply_chat_template"] * chat
    monkeypatch.setattr(launch_module, "launch", launch_forked)
    for more in ([], ["--nproc=2", "--parallel.tensor.mode=isp"]):
        assert main([*words, *more]) == 0
        found = json.loads((tmp_path / "tasks.json").read_text())
        assert numbers(found["results"]) == pytest.approx(numbers(expected["results"]), rel=1e-9)
        assert found["config"]["model"] == str(folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks=chess"], "--tasks chess: KeyError"),
        (["--tasks=choice", "--png=a.png"], "leave out --png"),
        (["--tasks=choice", "--max-length=3"], "between 1 and 3 are supported"),
        (["--tasks=writing", "--max-length=20"], "leaves none of 20 for a prompt"),
    ],
)
def test_faults_are_told_in_a_line(
    folder: Path, tasks: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder), f"--include-path={tasks}", *words]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ")
    assert told in last
