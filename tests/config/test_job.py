"""The configuration: which values are read, which are refused, and with which messages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from isp.config import ConfigError, JobConfig, json_schema, load_config, to_yaml
from isp.config.keys import KeyTable
from isp.core.attention.backend import AttentionBackend
from isp.core.mesh import Mode
from isp.core.section import KeyRole, defaults_of, docs_of
from isp.evaluation.source import _to_read
from isp.planner.declared import bare
from model.config import ModelConfig

MINIMAL = "model:\n  preset: tiny\ndata:\n  source: python-stdlib\n"


def faults_of(path: Path, *overrides: str) -> str:
    """Return the message with which `load_config` refuses `path`."""
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value)


def test_values_come_from_file_preset_and_defaults(write):
    """Catches a source of values that is not read, or that overrides one of higher priority."""
    config = load_config(write(f"{MINIMAL}optimizer:\n  lr: 1e-4\n"))
    assert config.optimizer.lr == 1e-4  # YAML 1.1 reads 1e-4 as text
    assert config.model.num_layers == 4  # of the preset
    assert config.training.steps == 100  # a default
    assert config.parallel.tensor.mode is Mode.ISP


def test_overrides_take_precedence_over_the_file(write):
    """Catches an override that is dropped, parsed wrongly, or that takes the next word as its
    value.
    """
    path = write(f"{MINIMAL}training:\n  steps: 7\n  seed: 3\n")
    words = ["--training.steps", "9", "--training.deterministic", "--parallel.tensor.mode=msp"]
    config = load_config(path, [*words, "--optimizer.lr=1e-3", "--training.max_norm", "0.5"])
    assert (config.training.steps, config.training.seed) == (9, 3)
    assert config.training.deterministic is True
    assert config.parallel.tensor.mode is Mode.MSP
    assert (config.optimizer.lr, config.training.max_norm) == (1e-3, 0.5)


@pytest.mark.parametrize(
    "text", ["2024", "yes", "1e-4", "a: b", "-1", "run #1", "null", "[a]", "'a'", "@a"]
)
def test_an_override_of_a_text_key_is_taken_literally(write, text):
    """Catches `--job.name 2024` refused as a number, and a name shortened by YAML's syntax."""
    words = ["--job.name", text, "--data.source", f"[ab].txt {text}"]
    config = load_config(write(MINIMAL), words)
    assert (config.job.name, config.data.source) == (text, f"[ab].txt {text}")


@pytest.mark.parametrize("null", ["", " ", "~", "null", " Null", "NULL"])
def test_an_override_of_a_text_key_may_be_null_or_a_list_as_in_yaml(write, null):
    """Catches YAML's null or a list read as text where the key allows more than text."""
    words = ["--data.eos_token", null, "--data.source", " [a.txt, b.txt]"]
    config = load_config(write(MINIMAL), [*words, "--job.name", "~"])
    assert config.data.eos_token is None
    assert config.data.source == ["a.txt", "b.txt"]
    assert config.job.name == "~", "which cannot be null"


def test_overrides_reach_lists_null_and_optional_sections(write):
    """Catches override values that are not parsed as YAML."""
    words = ["--data.source", "[a.txt, b.txt]", "--checkpoint.load_step", "null"]
    words += ["--job.log_folder", "null", "--data.eos_token="]
    words += ["--model.rope_scaling.type", "linear", "--model.rope_scaling.factor", "2.0"]
    config = load_config(write(f"{MINIMAL}checkpoint: {{load_step: 3}}\n"), words)
    assert config.data.source == ["a.txt", "b.txt"]
    assert (config.job.log_folder, config.data.eos_token) == (None, None)
    assert config.checkpoint.load_step is None
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.factor == 2.0


def test_one_number_of_a_presets_rope_scaling_can_be_changed(write):
    """Catches a changed factor that drops the type of the preset's scaling."""
    words = ["--model.preset=llama3.1-8b", "--model.rope_scaling.factor=16"]
    scaling = load_config(write("model: {}\ndata: {source: a.txt}\n"), words).model.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.low_freq_factor) == ("llama3", 16.0, 1.0)


def test_whole_numbers_may_have_an_exponent(write):
    """Catches 1e3 steps refused, and half a step accepted."""
    path = write(f"{MINIMAL}training: {{steps: 2e3}}\ncheckpoint: {{load_step: 1.0}}\n")
    config = load_config(path, ["--data.seq_len", "1e3", "--data.micro_num=2.0"])
    numbers = config.training.steps, config.checkpoint.load_step, config.data.seq_len
    assert numbers == (2000, 1, 1000)
    assert all(type(number) is int for number in (*numbers, config.data.micro_num))
    assert load_config(path, ["--job.name", "1e3"]).job.name == "1e3"
    fault = "--training.steps: training.steps=1000.5 must be a whole number"
    assert fault in faults_of(path, "--training.steps", "1000.5")


def test_a_section_without_keys_has_its_defaults(write):
    """Catches `optimizer:` with every key commented out read as null."""
    assert load_config(write(f"{MINIMAL}optimizer:\n  # lr: 1\n")).optimizer.lr == 3e-4


@pytest.mark.parametrize(
    "overrides", [[], ["--parallel.tensor.mode", "mtp", "--optimizer.eps=1e-9"]]
)
def test_printed_config_loads_back_equal(write, overrides):
    """Catches a value lost or changed between `to_yaml` and `load_config`."""
    config = load_config(write(MINIMAL), overrides)
    assert load_config(write(to_yaml(config))) == config


def test_every_key_is_documented():
    """Catches a key without its documentation line."""
    keys = KeyTable.of(JobConfig)
    for path, names in keys.sections.items():
        docs = docs_of(keys.classes[path])
        assert [name for name in names if not docs[name]] == [], path
    assert sum(map(len, keys.sections.values())) > 100


def test_the_schema_for_editors_is_up_to_date():
    """Catches a schema in configs/ whose keys are not those of the configuration."""
    folder = Path(__file__).parents[2] / "configs"
    written = json.loads((folder / "schema.json").read_text())
    assert written == json_schema(), "isp config --json-schema > configs/schema.json"
    for path in folder.rglob("*.yaml"):
        line = path.read_text().splitlines()[0]
        assert (path.parent / line.removeprefix("# yaml-language-server: $schema=")).samefile(
            folder / "schema.json"
        ), path


def test_every_key_has_a_role():
    """Catches a new key without a role, which says whether a resumed run may change it."""
    keys = KeyTable.of(JobConfig)
    assert [path for path in keys.hints if keys.role(path) is None] == []
    assert keys.role(("model", "rope_scaling", "factor")) is KeyRole.MODEL
    assert keys.role(("optimizer", "param_groups", "0", "lr_scale")) is KeyRole.METHOD
    assert keys.role(("model",)) is keys.role(("training", "step")) is None


def test_keys_that_do_not_change_the_model_are_ignored_by_role():
    """Catches a key that only saves memory but counts as another model in a plan or a
    checkpoint.
    """
    plain = ModelConfig(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=3)
    others = {
        "attention_backend": AttentionBackend.SDPA,
        "compile": False,
        "loss_chunk_tokens": 0,
        "router_aux_loss_coef": 0.01,
        "router_z_loss_coef": 0.001,
        "moe_router_bias_update_rate": 0.001,
        "checkpoint": 0.5,
        "checkpoint_distribute_activations": True,
        "checkpoint_offload": True,
        "checkpoint_segment": 2,
        "checkpoint_norm_outputs": True,
        "checkpoint_mlp_activation": True,
        "mlp_tile_tokens": 8192,
    }
    excluding, kept = {"checkpoint_keeps_attention": True}, {"allow_unchecked": True}
    names = {*others, *excluding, *kept}
    assert names == defaults_of(ModelConfig, KeyRole.METHOD).keys()
    for changed in (others, excluding):
        model = dataclasses.replace(plain, preset="tiny", **changed)
        assert bare(model) == dataclasses.replace(plain, preset="tiny")
        assert _to_read(model) == plain
    assert bare(dataclasses.replace(plain, **kept)) == dataclasses.replace(plain, **kept)


def test_micro_batches_follow_from_a_global_batch(write):
    """Catches a global batch that changes with the ranks, and an ignored micro_num."""
    path, whole = write(MINIMAL), "--training.global_batch_size=24"
    config = load_config(path, [whole, "--data.micro_bsz=2", "--parallel.tensor.size=2"])
    assert [config.for_ranks(n).data.num_micro_batches for n in (2, 4, 8, 24)] == [12, 6, 3, 1]
    assert config.for_ranks(4).for_ranks(4) == config.for_ranks(4)
    assert load_config(path).for_ranks(7).data.num_micro_batches == 1
    with pytest.raises(ConfigError, match=r"=24 must be a multiple of the 10 .*: use 20 or 30$"):
        config.for_ranks(10)
    both = load_config(path, [whole, "--data.micro_num=6"])
    assert both.for_ranks(4).data.micro_num == 6
    with pytest.raises(
        ConfigError, match=r"micro_num=6 disagree: .* takes data.micro_num=3; leave"
    ):
        both.for_ranks(8)
    stages = load_config(path, [whole, "--parallel.pipeline.size=2"])
    assert stages.for_ranks(4).data.num_micro_batches == 12
    with pytest.raises(
        ConfigError, match=r"^training.global_batch_size=24: .*pipeline.size=2 needs"
    ):
        stages.for_ranks(48)
    assert load_config(write(to_yaml(config))).for_ranks(4) == config.for_ranks(4)


def test_a_section_that_the_mode_ignores_is_reported(write):
    """Catches `parallel.weight` silently ignored outside isp."""
    weight = "--parallel.weight.size=2"
    assert load_config(write(MINIMAL), [weight]).unused() == []
    assert load_config(write(MINIMAL), ["--parallel.tensor.mode=mtp"]).unused() == []
    (note,) = load_config(write(MINIMAL), ["--parallel.tensor.mode=mtp", weight]).unused()
    assert "parallel.weight is not used in mtp mode" in note


def test_keys_of_gathered_weights_are_reported_where_none_is_gathered(write):
    """Catches `nccl_ub`, which registers gather buffers with NCCL, accepted where there are
    none.
    """
    keys = "nccl_ub", "vocab_parallel_loss", "overlap=false"
    words = [f"--parallel.weight.{key}" for key in keys]
    found = load_config(write(MINIMAL), words).unused()
    assert [note.split()[0] for note in found] == [
        "parallel.weight.overlap",
        "parallel.weight.nccl_ub",
    ]
    assert load_config(write(MINIMAL), [*words, "--parallel.weight.size=2"]).unused() == []


def test_keys_of_another_update_rule_are_reported(write):
    """Catches a key that the update rule silently ignores."""
    words = ["--optimizer.eps=1e-6", "--optimizer.beta2=0.99"]
    assert load_config(write(MINIMAL), words).unused() == []
    found = load_config(write(MINIMAL), [*words, "--optimizer.name=lion"]).unused()
    assert found == ["optimizer.eps is not used by lion"]


def test_a_warm_up_that_outlasts_the_run_is_reported(write):
    """Catches a shortened run whose learning rate never reaches the configured value."""
    words = ["--lr_scheduler.warmup_steps=10", "--training.steps"]
    assert load_config(write(MINIMAL), [*words, "10"]).unused() == []
    (note,) = load_config(write(MINIMAL), [*words, "5"]).unused()
    assert "training.steps=5: the learning rate ends at 50% of optimizer.lr" in note


CONFIGS = {
    "quickstart.yaml": 4,
    "quickstart_pipeline.yaml": 4,
    "one_gpu.yaml": 1,
    "llama3.1-8b_128k.yaml": 8,
    "llama3.1-8b_128k_2d.yaml": 16,
    "nemotron-h-8b_256k.yaml": 8,
    "internlm2-7b_256k.yaml": 64,
    "llama2-7b_interleaved.yaml": 32,
}
"""The number of ranks of each configuration."""


def test_every_shipped_config_is_accepted_on_its_ranks():
    """Catches a configuration of configs/ that is refused."""
    folder = Path(__file__).parents[2] / "configs"
    needs_a_model = {"dpo.yaml", "chat.yaml"}  # see tests/tools/test_tiny_chat_model.py
    assert {path.name for path in folder.glob("*.yaml")} == set(CONFIGS) | needs_a_model
    for name, world in CONFIGS.items():
        config = load_config(folder / name)
        assert config.topology(world).world_size == world
        assert config.unused() == []


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("off", False), ("on", True)])
def test_compile_accepts_yaml_booleans_and_auto(write, word, value):
    """Catches `on` or `off` refused as a value of model.compile."""
    config = load_config(write(MINIMAL), ["--model.compile", word])
    assert config.model.compile is value or config.model.compile == value == "auto"
    fault = faults_of(write(MINIMAL), "--model.compile", "fast")
    assert fault.endswith("model.compile must be true or false or auto")


TENSOR_SIZE = "Number of ranks in a tensor group, which share a sequence in isp, msp and fsp mode."


def test_the_reference_names_every_key_and_what_it_means():
    """Catches a key, a type, a default or a meaning that `isp config --help-keys` leaves out."""
    text = KeyTable.of(JobConfig).reference(None)
    for path in KeyTable.of(JobConfig).hints:
        assert f"\n  {path[-1]}: " in text, path
    part = KeyTable.of(JobConfig).reference("parallel.tensor").splitlines()
    assert part[:3] == [
        "`parallel.tensor`: the ranks that share one sequence.",
        "  size: a whole number; default: 1",
        f"      {TENSOR_SIZE}",
    ]
    assert part[3] == "  mode: mtp or msp or fsp or isp; default: isp"
    with pytest.raises(ValueError, match=r"^tensor is not a section: use one of job, model, "):
        KeyTable.of(JobConfig).reference("tensor")
