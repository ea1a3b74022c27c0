"""Values that the configuration refuses, and the messages."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest
import torch

from isp.config import ConfigError, JobConfig, load_config
from isp.config.keys import KeyTable
from isp.config.sections import MetricsConfig, TrainingConfig
from isp.config.yaml_file import read_yaml
from isp.core.optim.config import OptimizerConfig
from isp.step.setup import make_world
from tests.config.test_job import MINIMAL, faults_of


def test_faults_of_the_command_line_are_not_blamed_on_the_file(write):
    """Catches a misspelled override that the message locates in the file."""
    path, known = write(MINIMAL), "training.stps: no such key; did you mean 'steps'?"
    assert faults_of(path, "--training.stps", "1") == f"--training.stps: {known}"
    two = faults_of(path, "--training.stps", "1", "--data.seq_len", "0").splitlines()
    assert two[0] == "the command line: 2 faults"
    assert f"  --training.stps: {known}" in two
    assert faults_of(write(f"{MINIMAL}  sed: 1\n")).startswith(f"{path}: line 5: data.sed: no such")


def test_all_faults_are_reported_at_once_with_their_places(write):
    """Catches a reader that stops at the first fault, or does not say where the fault is."""
    path = write(
        "model:\n  preset: tiny\n  num_head: 3\n"
        "data: {source: python-stdlib}\n"
        "parallel:\n  tensor:\n    sise: 2\n    mode: isq\n"
        "training:\n  dtype: fp16\n"
        "optimizer:\n  lr: -1\n  beta1: 2\n"
    )
    lines = faults_of(path, "--metrics.log_freq", "0").splitlines()
    assert lines[0] == f"{path}: 7 faults"
    assert {line.strip() for line in lines[1:]} == {
        "line 3: model.num_head: no such key; did you mean 'num_heads'?",
        "line 7: parallel.tensor.sise: no such key; did you mean 'size'?",
        "line 8: parallel.tensor.mode=\"isq\" must be 'mtp', 'msp', 'fsp' or 'isp'",
        "line 10: training.dtype=\"fp16\" must be 'float64', 'float32', 'bfloat16' or 'float16'",
        "line 12: optimizer.lr=-1 must be above 0 (default: 0.0003)",
        "line 13: optimizer.beta1=2 must be below 1 (default: 0.9)",
        "--metrics.log_freq: metrics.log_freq=0 must be at least 1 (default: 1)",
    }


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("training.step", "'steps'"),
        ("training.lr", "'optimizer.lr' or 'optimizer.muon.lr'"),
        ("lr", "'optimizer.lr' or 'optimizer.muon.lr'"),
        ("parallel.tensor_size", "'parallel.tensor.size'"),
        ("optimiser.lr", "'optimizer'"),
        ("metrics.nothing_like_it", None),
    ],
)
def test_an_unknown_key_suggests_a_known_one(write, key, suggestion):
    """Catches a misspelled key whose correct name the message does not suggest."""
    message = faults_of(write(MINIMAL), f"--{key}", "1")
    assert "no such key" in message
    expected = f"did you mean {suggestion}?" if suggestion else "metrics has log_freq"
    assert expected in message


def test_an_unknown_section_of_an_override_is_blamed_on_the_command_line(write):
    """Catches a misspelled section on the command line that the message locates in the file."""
    path = write(f"{MINIMAL}parallel:\n  weight: {{size: 1}}\n")
    message = faults_of(path, "--parallel.tenser.size", "2")
    assert message == (
        "--parallel.tenser.size: parallel.tenser: no such key; did you mean 'tensor'?"
    )


FLASH, VARLEN, CUDNN = (f"--model.attention_backend={x}" for x in ("flash2", "varlen", "cudnn"))
BF16, EXACT = "--training.dtype=bfloat16", "--training.deterministic=true"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--training.steps"], "--training.steps has no value: it takes a whole number"),
        (["--training.steps", "ten"], 'training.steps="ten" must be a whole number'),
        (["--optimizer.lr", "true"], "optimizer.lr=true must be a number"),
        (["--training.deterministic", "1"], "training.deterministic=1 must be true or false"),
        (["--parallel.tensor", "2"], "parallel.tensor=2 must be a section: set keys in it"),
        (["--parallel", "2"], "in it, such as parallel.tensor.size"),
        (["--model", "x" * 99], f'model="{"x" * 59}... must be a section: set keys in it, such as'),
        (["--model.zz", "2"], "`isp config --help-keys model` lists the keys of model"),
        (["--data.source", "[1]"], "data.source must be text or a list of texts"),
        (["--optimizer.lr", "[1"], "'[1' is not a YAML value"),
        (["--optimizer.lr", "nan"], 'optimizer.lr="nan" must be a number'),
        (["--optimizer.lr", ".nan"], "optimizer.lr=NaN must be finite"),
        (["training.steps", "1"], "'training.steps' is not an override"),
        (["--data.source.x", "1"], "--data.source.x: data.source is a key, not a section"),
        (["--training.seed", str(2**64)], f"seed={2**64} must be at most {2**63 - 1} (default: 0)"),
        (["--training.steps", "2024-13-45"], "'2024-13-45' is not a YAML value: month must be in"),
        (["--job.name", "a/b"], 'job.name="a/b" must be usable as the name of a folder'),
        (["--lr_scheduler.decay_ratio", "1.5"], "lr_scheduler.decay_ratio=1.5 must be at most 1"),
        (["--checkpoint.folder", "s3://b/c"], 'checkpoint.folder="s3://b/c" must be a folder, not'),
        (["--checkpoint.upload_to", "zz://b/c"], "cannot be opened: Protocol not known: zz"),
        (["--checkpoint.upload_to", "://b/c"], 'upload_to="://b/c" must be a URL, such as s3:'),
        (["--job.name", "é" * 128], "no slash, at most 255 bytes"),
        (["--checkpoint.load_step", "-1"], "checkpoint.load_step=-1 must be at least 0"),
        (["--optimizer.muon.qk_clip", "1"], "muon.qk_clip: clipping of query and key weights is"),
        (["--parallel.pipeline.size=2"], "data.micro_num=2 or more"),
        (["--parallel.pipeline.num_chunks=2"], "needs parallel.pipeline.size=2 or more"),
        (["--profiler.profile_freq=1"], "profile_freq=1 must be at least 2 (default: 10)"),
        (["--profiler.save_traces_folder=../x"], "must be a relative path, such as tb"),
        ([FLASH, "--training.dtype=float32"], f"{FLASH[2:]} needs bfloat16 or float16"),
        ([VARLEN, BF16, "--training.device=cpu"], "not bfloat16 on cpu: use model.attention_back"),
        ([CUDNN, BF16, "--training.device=cuda", EXACT], "cudnn is not deterministic"),
    ],
)
def test_impossible_values_are_refused(write, words, fault):
    """Catches a wrong value used as another (true for 1), a value that is silently ignored or that
    only ranks find impossible, and an unclear message.
    """
    assert fault in faults_of(write(MINIMAL), *words)


def test_numbers_that_exclude_each_other_are_refused(write):
    """Catches a warm-up and a decay that overlap, and heads that a mode cannot split."""
    path = write(MINIMAL)
    words = ["--training.steps=10", "--lr_scheduler.warmup_steps=6"]
    assert load_config(path, [*words, "--lr_scheduler.decay_ratio=0.4"]).training.steps == 10
    assert "use warmup_steps up to 5" in faults_of(path, *words, "--lr_scheduler.decay_ratio=0.5")
    split = ["--parallel.tensor.size=3", "--data.seq_len=2049"]
    assert load_config(path, split).parallel.tensor.size == 3
    assert "model.num_heads=4" in faults_of(path, *split, "--parallel.tensor.mode=mtp")


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "micro_num", "fault"),
    [
        ("1F1B", 2, 4, "use num_chunks=1, or schedule=Interleaved1F1B or InterleavedZeroBubble"),
        ("Interleaved1F1B", 1, 4, "use num_chunks=2 or more, or schedule=1F1B"),
        ("Interleaved1F1B", 2, 5, "in 2 equal rounds: use a multiple of parallel.pipeline.size=2"),
        ("InterleavedZeroBubble", 1, 5, "in 2 equal rounds"),
        ("ZBVZeroBubble", 1, 4, "two chunks on each rank, not parallel.pipeline.num_chunks=1"),
        ("ZBVZeroBubble", 2, 1, "data.micro_num=2 or more"),
        ("Interleaved1F1B", 4, 4, "parallel.pipeline.size=2 x num_chunks=4 is more than"),
    ],
)
def test_impossible_pipelines_are_refused(write, schedule, num_chunks, micro_num, fault):
    """Catches a schedule that fails only once its ranks run."""
    words = [
        "--parallel.pipeline.size=2",
        f"--parallel.pipeline.schedule={schedule}",
        f"--parallel.pipeline.num_chunks={num_chunks}",
        f"--data.micro_num={micro_num}",
        "--model.num_layers=7",
    ]
    assert fault in faults_of(write(MINIMAL), *words)


def test_sizes_that_do_not_fit_the_world_are_refused(write):
    """Catches an impossible split found only once processes have started."""
    config = load_config(write(MINIMAL), ["--parallel.tensor.size=3", "--data.seq_len=2049"])
    assert config.topology(6).data == 2
    with pytest.raises(ConfigError, match=r"parallel\.tensor\.size=3 must divide .* use 1, 2 or 4"):
        config.topology(4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ": the file is empty"),
        ("# nothing\n", ": the file is empty"),
        ("- a\n- b\n", ": holds no sections"),
        ("text", ": holds no sections"),
        ("model:\n  preset: [\n", ", line 3, column 1: not YAML"),
        ("model:\n\tpreset: tiny\n", ", line 2, column 1: not YAML"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: not YAML: but found another document"),
        ("a: \x07", ": not YAML"),
        ("model:\n  preset: 2024-13-45\n", ", line 2, column 11: not YAML: month must be in 1..12"),
        (
            f"{MINIMAL}training:\n  seed: 1\n  seed: 2\n",
            ", line 7: training.seed is given twice, first on line 6: keep one",
        ),
        ("data: !!python/object/apply:os.getcwd []\n", ", line 1, column 7: not YAML: could not"),
        ("training: {steps: 1}\n", ": 2 faults\n  model is missing"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(write, text, fault):
    """Catches a traceback, or a message without the line, for a file that is no configuration."""
    path = write(text)
    assert f"{path}{fault}" in faults_of(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    """Catches a missing file, a folder and a binary file that end in a traceback."""
    assert "cannot read it: No such file" in faults_of(tmp_path / "absent.yaml")
    assert "cannot read it: Is a directory" in faults_of(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in faults_of(tmp_path / "binary")


def test_an_unknown_preset_is_refused(write):
    """Catches a misspelled preset that falls back to the default sizes."""
    faults = faults_of(write(MINIMAL), "--model.preset", "tiney", "--optimizer.lr=-1")
    assert ": 2 faults" in faults
    assert "--model.preset: model.preset=tiney is unknown: use one of tiny, " in faults


def test_an_attention_whose_package_is_missing_is_refused(write):
    """Catches a configured backend that is not installed and that only the ranks notice."""
    config = load_config(write(MINIMAL), ["--model.attention_backend=flash3", BF16])
    with pytest.raises(
        ConfigError,
        match=r"flash3 needs the package flash_attn_interface, .*: build it .*, or use auto",
    ):
        config.require_packages()


def test_a_gpu_attention_without_a_gpu_is_refused(write, monkeypatch):
    """Catches training.device=auto that becomes cpu after the configuration has been checked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="not bfloat16 on cpu"):
        make_world(load_config(write(MINIMAL), [VARLEN, BF16]))


@pytest.mark.parametrize("value", ["-2", "1" + "0" * 31, ".nan", ".inf"])
def test_every_number_has_a_range(write, value):
    """Catches a number without a range, which would fail on the ranks with a traceback or a
    hang.
    """
    numbers = [
        ".".join(path)
        for path, hint in KeyTable.of(JobConfig).hints.items()
        if {int, float} & {hint, *typing.get_args(hint)} and "*" not in path
    ]
    assert len(numbers) > 50
    faults = faults_of(write(MINIMAL), *(f"--{key}={value}" for key in numbers)).splitlines()
    refused = {line.strip().removeprefix("--").split(":")[0] for line in faults[1:]}
    assert refused == set(numbers)


def test_sections_built_in_python_are_checked_as_in_a_file():
    """Catches checks of types, ranges and combinations that only run for files."""
    with pytest.raises(ValueError, match=r"^optimizer\.lr=-1 must be .*\noptimizer\.beta1="):
        OptimizerConfig(lr=-1, beta1=1.0)
    with pytest.raises(ValueError, match=r'^training\.steps="1" must be a whole number$'):
        TrainingConfig(steps="1")
    with pytest.raises(ValueError, match=r"^training\.steps=0 "):
        dataclasses.replace(TrainingConfig(), steps=0)


def _billion_laughs(begin: str, repeat: str) -> str:
    """Return YAML with ten levels of aliases, each of which repeats the level before ten times."""
    lines = [f"a0: &a0 {begin}"]
    lines += [f"a{n}: &a{n} {repeat.format(f'*a{n - 1}')}" for n in range(1, 11)]
    return "\n".join(lines)


DEEP_BY_ALIASES = (("a: &a", "1"), ("b: &b", "*a"), ("c:", "*b"))
TEN = "[" + ", ".join(["{0}"] * 10) + "]"
ENDLESS = {
    "lists": (_billion_laughs("[x]", TEN), "aliases repeat values up to more than"),
    "text": (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]", "aliases repeat values"),
    "merged keys": (_billion_laughs("{x: 1}", "{{<<: " + TEN + "}}"), "aliases repeat values"),
    "mappings": (
        _billion_laughs("{x: 1}", "{{" + ", ".join(f"k{i}: {{0}}" for i in range(10)) + "}}"),
        "aliases repeat values",
    ),
    "circle": ("a: &a [*a]", "an alias is inside of the value that it repeats"),
    "circle of keys": ("a: &a\n  b: *a", "an alias is inside of the value that it repeats"),
    "too long": ("a: 1\n" + "#" * 2**20, "has more than 1,048,576 bytes"),
    "too deep": ("a: " + "[" * 5000, "nested too deeply"),
    "too deep for pydantic": ("a: " + "[" * 250 + "]" * 250, "nested too deeply"),
    "too deep by aliases": (
        "\n".join(f"{key} {'[' * 90}{value}{']' * 90}" for key, value in DEEP_BY_ALIASES),
        "nested too deeply",
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.timeout(30)
def test_aliases_that_expand_without_bound_are_refused(tmp_path: Path, kind: str) -> None:
    """Catches a small file whose aliases take all memory, or never end."""
    text, message = ENDLESS[kind]
    file = tmp_path / "job.yaml"
    file.write_text(text)
    said = faults_of(file)
    assert message in said
    assert str(file) in said
    assert len(said.splitlines()) == 1


def test_ordinary_aliases_are_read(tmp_path: Path) -> None:
    """Catches anchors of ordinary use refused."""
    file = tmp_path / "job.yaml"
    file.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]")
    values = read_yaml(file).values
    assert values == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        (TrainingConfig, "step", "training.step: no such key; did you mean 'steps'?"),
        (MetricsConfig, "nothing_like_it", "no such key; metrics has log_freq"),
        (JobConfig, "trainng", "trainng: no such key; did you mean 'training'?"),
        (JobConfig, "trainng", "data is missing: it has no default"),
    ],
)
def test_an_unknown_key_in_python_suggests_a_known_one(kind, name, fault):
    """Catches `Unexpected keyword argument`, which does not suggest the key that was meant."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        kind(**{name: 1})
