"""`model.hf_overrides`, which changes values of a folder's config.json, in each command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from isp.checkpoint.folder import newest_at
from isp.cli import main
from isp.config import ConfigError, JobConfig, load_config
from isp.models.huggingface.config_json import beyond_positions
from isp.models.huggingface.overrides import OverrideError, overridden_config, overridden_json
from isp.step.job_models import trained_model
from isp.train.state.export import saved_model
from isp.train.state.saved_run import check_changes
from model.build import language_model
from model.config import ModelConfig
from tests.models.folders import load_folder, write_folder, write_job
from tests.toolkit import topology
from tests.train.jobs import numbers, run_folders, run_forked

YARN = {"rope_type": "yarn", "factor": 4.0}
LONGER = {"rope_parameters": YARN | {"original_max_position_embeddings": 128}}
LONGER |= {"max_position_embeddings": 512}


def _described(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


EARLIER = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("file", "overrides", "rope"),
    [
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": YARN},
            {**YARN, "rope_theta": 5e5, "original_max_position_embeddings": 2048},
        ),
        (
            {"model_type": "qwen3", "rope_theta": 1e6, **EARLIER},
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6},
        ),
        (
            {"model_type": "qwen3", "rope_theta": 1e6, **EARLIER},
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 256},
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "max_position_embeddings": 64,
            },
            {"max_position_embeddings": 256},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            {"model_type": "qwen3", "rope_theta": 1e6, **EARLIER},
            {"rope_parameters": {"rope_type": "default"}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 7e4}},
            {"rope_theta": 7e4, "rope_type": "default"},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_theta": 2e6,
                "rope_local_base_freq": 3e4,
                **EARLIER,
            },
            {"rope_parameters": {"full_attention": {"factor": 16.0}}},
            {
                "full_attention": {"rope_type": "linear", "factor": 16.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **EARLIER}},
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5e4}}, "sliding_window": 77},
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            },
        ),
    ],
)
def test_overrides_are_merged_into_files_of_old_and_new_forms(
    file: dict[str, Any], overrides: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    """Catches a lost rope base or positions of one layer type, and an export that does not say what
    was trained.
    """
    folder = _described(tmp_path / "model", **file)
    config = overridden_config(folder, overrides)
    written = _described(tmp_path / "written", **overridden_json(folder, overrides))
    for of_one in (config, transformers.AutoConfig.from_pretrained(written)):
        text = of_one.get_text_config(decoder=True)
        assert _plain(text.rope_parameters) == rope
        for key, value in overrides.items():
            assert key.startswith("rope_") or getattr(text, key) == value
    assert type(config) is type(transformers.AutoConfig.from_pretrained(folder))
    assert json.loads((folder / "config.json").read_text()) == file, "the folder stays as it is"


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in rope.items()
        if name != "type"
    }


def test_a_run_with_overrides_equals_one_of_a_changed_folder(tmp_path: Path) -> None:
    """Catches overrides that a command ignores, in any digit, and a resume without them."""
    folder = write_folder(tmp_path / "model", "llama")
    changed = write_folder(tmp_path / "changed", "llama")
    file = json.loads((folder / "config.json").read_text())
    values = {**file, "max_position_embeddings": 512}
    values["rope_parameters"] = {**file["rope_parameters"], **LONGER["rope_parameters"]}
    _described(changed, **values)
    (changed / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    found = {}
    for name, source, overrides in (
        ("plain", folder, None),
        ("given", folder, LONGER),
        ("edited", changed, None),
    ):
        job = write_job(tmp_path, source, name)
        if overrides is not None:
            _change(job, overrides)
        run_forked(job, "--training.steps=2", num_ranks=1)
        (run,) = run_folders(job, name)
        found[name] = numbers(run)
        assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / f"{name} hf")]) == 0
    assert found["given"] == found["edited"]
    assert found["given"][0][1] != found["plain"][0][1]
    tokens = torch.arange(40)[None]
    ours, theirs = (load_folder(tmp_path / f"{name} hf") for name in ("given", "edited"))
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    assert ours.config.max_position_embeddings == 512
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)

    job = tmp_path / "given.yaml"
    run_forked(job, "--training.steps=3", num_ranks=1)  # the same overrides: resumed
    (run,) = run_folders(job, "given")
    assert len(numbers(run)) == 3
    read = language_model(saved_model(newest_at(run)), "float64").model.config
    assert read.rope_parameters == theirs.config.rope_parameters
    for other in ({**LONGER, "attention_bias": False}, {"max_position_embeddings": 512}, None):
        _change(job, other)
        with pytest.raises(ValueError, match=r"another model[\s\S]*model.hf_overrides: "):
            check_changes(newest_at(run), load_config(job), topology())


def _change(job: Path, overrides: dict[str, Any] | None) -> None:
    values = yaml.safe_load(job.read_text())
    values["model"]["hf_overrides"] = overrides
    job.write_text(yaml.safe_dump(values))


def test_commands_apply_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that reads config.json unchanged, and a form of the key that is refused."""
    folder = write_folder(tmp_path / "model", "llama")
    job = write_job(tmp_path, folder)
    words = ["--model.hf_overrides.max_position_embeddings", "512"]
    words += ["--model.hf_overrides.rope_parameters.rope_theta", "7.0e+4"]
    config = load_config(job, words)
    whole = load_config(job, ["--model.hf_overrides", json.dumps(config.model.hf_overrides)])
    assert whole == config
    expected = {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 7e4}}
    assert config.model.hf_overrides == expected
    assert trained_model(config).model.config.rope_parameters["rope_theta"] == 7e4
    assert main(["config", str(job), *words]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert load_config(again) == config
    for command in ("check", "plan"):
        odd = ["--model.hf_overrides.max_positions=512"]
        more = ["--layouts", "1x1"] if command == "check" else []
        assert main([command, str(job), *more, *words]) == 0
        assert main([command, str(job), *more, *odd]) == 2
        said = capsys.readouterr().err
        assert "model.hf_overrides.max_positions=512: LlamaConfig" in said
        assert "did you mean max_position_embeddings?" in said
    odd = ["--model.hf_overrides.hidden_size=48"]
    for path in (job, folder):
        assert main(["check", str(path), "--layouts", "1x1", *words]) == 0
        assert main(["check", str(path), "--layouts", "1x1", *odd]) == 2
        assert "model.hf_overrides.hidden_size=48: model.embed_tokens" in capsys.readouterr().err


def test_an_exported_adapter_records_the_overrides_of_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an adapter that PEFT silently adds to a model with other positions."""
    job = write_job(tmp_path, write_folder(tmp_path / "model", "llama"))
    words = ["--training.steps=1", "--model.adapter.r=2"]
    run_forked(job, *words, "--model.hf_overrides.rope_parameters.rope_theta=7", num_ranks=1)
    (run,) = run_folders(job)
    assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().err
    assert 'note: the adapter was trained with model.hf_overrides={"rope_parameters":' in said


@pytest.mark.parametrize(
    ("rope", "trained"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": None}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}}, 512),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0]}}, 64),
    ],
)
def test_rows_beyond_the_positions_of_a_folder_give_a_warning(
    rope: dict[str, Any], trained: int, tmp_path: Path
) -> None:
    """Catches silent training at positions that the model has not seen, and a needless warning."""
    values = {"model_type": "llama", "max_position_embeddings": 64, **rope}
    folder = str(_described(tmp_path / "model", **values))
    assert beyond_positions(folder, None, trained) == ""
    assert f"beyond the {trained} that" in beyond_positions(folder, None, trained + 1)


def test_the_warning_for_long_rows_respects_overrides(tmp_path: Path) -> None:
    """Catches a warning about positions that the user has extended."""
    folder = str(_described(tmp_path / "model", model_type="llama", max_position_embeddings=64))
    longer = {"rope_scaling": YARN}
    assert "beyond the 256" in beyond_positions(folder, longer, 300)
    assert beyond_positions(folder, longer, 256) == ""
    assert beyond_positions(None, None, 300) == ""


REFUSED = {
    '{"rope_theta": 1e5}': "belongs in rope_parameters: use model.hf_overrides.rope_parameters",
    '{"rope_parameter": {"factor": 2}}': "no such key: did you mean rope_parameters?",
    '{"zzz": 1}': "model.hf_overrides.zzz=1: LlamaConfig of transformers has no such key: leave",
    '{"model_type": "qwen3"}': "describes the files of the folder",
    '{"rope_parameters": {"facter": 2}}': "rope_parameters.facter=2: rotary .* mean factor?",
    '{"rope_parameters": null}': "must be a mapping",
    '{"rope_parameters": {}, "rope_scaling": {}}': "is given as rope_scaling, too",
    '{"rope_parameters": {"rope_type": "yarn"}}': "refuses it: .*Missing required keys",
    '{"max_position_embeddings": "many"}': "refuses it: .*expected int",
    '{"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "max_position_embeddings": 256}': (
        "scaled from the 128 on that the folder has"
    ),
    '{"rope_parameters": {"rope_theta": null}}': "rope_theta=null has no value",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_overrides_that_do_not_fit_are_refused(overrides: str, tmp_path: Path) -> None:
    """Catches overrides that transformers silently ignores."""
    folder = write_folder(tmp_path / "model", "llama", weights=False)
    job = write_job(tmp_path, folder)
    with pytest.raises(ConfigError, match=f"model.hf_overrides.*{REFUSED[overrides]}") as caught:
        load_config(job, ["--model.hf_overrides", overrides])
    assert "\n" not in str(caught.value)


def test_an_override_without_effect_is_refused(tmp_path: Path) -> None:
    """Catches a window that the transformers class drops because another key is false."""
    folder = _described(tmp_path / "model", model_type="qwen2_moe")
    with pytest.raises(OverrideError, match=r"sliding_window=5 has no effect: .* give"):
        overridden_config(folder, {"sliding_window": 5})
    config = overridden_config(folder, {"sliding_window": 5, "use_sliding_window": True})
    assert config.sliding_window == 5
    phi = _described(tmp_path / "phi", model_type="phi3", max_position_embeddings=64)
    with pytest.raises(OverrideError, match=r"refuses it: .*longrope"):
        overridden_config(phi, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})


def test_windows_and_layer_types_must_agree(tmp_path: Path) -> None:
    """Catches a window that no layer has, and layers that lose their window."""
    kinds = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    full = _described(tmp_path / "full", model_type="qwen2", **kinds)
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    with pytest.raises(OverrideError, match=r"would be 16, and layer_types of .* has no layers"):
        overridden_config(full, window)
    slides = {"layer_types": ["sliding_attention"] * 2}
    assert overridden_config(full, {**window, **slides}).layer_types == slides["layer_types"]


def test_overrides_of_a_file_without_a_text_section_apply(tmp_path: Path) -> None:
    """Catches keys lost because the text model has no section of its own in config.json."""
    values = {"hidden_size": 64, "rms_norm_eps": 1e-3, "rope_theta": 7e5}
    values["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    folder = _described(tmp_path / "model", model_type="qwen2_vl", **values)
    before = transformers.AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    longer = {"max_position_embeddings": 9999}
    written = _described(tmp_path / "written", **overridden_json(folder, longer))
    after = transformers.AutoConfig.from_pretrained(written).get_text_config(decoder=True)
    changed = {k for k, v in before.to_dict().items() if after.to_dict().get(k) != v}
    assert changed == {*longer, "rope_parameters"}  # without the older key `type`
    assert _plain(after.rope_parameters) == _plain(before.rope_parameters)
    assert (after.rms_norm_eps, after.rope_parameters["rope_theta"]) == (1e-3, 7e5)
    of_parts = _described(tmp_path / "parts", model_type="gemma3")
    with pytest.raises(OverrideError, match="tie_word_embeddings is a key of the whole model"):
        overridden_config(of_parts, {"tie_word_embeddings": False})


def test_overrides_by_layer_type_must_name_an_existing_type(tmp_path: Path) -> None:
    """Catches positions for a layer type that the model lacks, which nothing would read."""
    folder = _described(tmp_path / "model", model_type="gemma3_text")
    for rope in ({"factor": 2.0}, {"all": {"factor": 2.0}}):
        with pytest.raises(OverrideError, match=r"each kind .*: give a mapping for .*tion or .*"):
            overridden_config(folder, {"rope_parameters": rope})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 48}, r"hidden_size=48: model.embed_tokens.weight is \(272, 32\)"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings=true: lm_head.weight is .* absent"),
        ({"num_hidden_layers": 1}, r"num_hidden_layers=1: model.layers.1.*would be absent"),
    ],
)
def test_overrides_may_not_change_the_shapes_of_weights(
    overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Catches a model that the folder's weights do not fit, or only some of them."""
    folder = write_folder(tmp_path / "model", "llama", weights=False)
    model = ModelConfig(hf=str(folder), hf_overrides={"max_position_embeddings": 9, **overrides})
    with pytest.raises(ValueError, match=rf"^model.hf_overrides.{words}"):
        language_model(model, "float32")


def test_overrides_without_a_folder_are_refused() -> None:
    """Catches overrides without effect."""
    with pytest.raises(ValueError, match=r"model.hf_overrides=\{.*\} .* model.hf, which is not"):
        ModelConfig(hf_overrides={"max_position_embeddings": 9})


def test_a_teacher_is_not_overridden(tmp_path: Path) -> None:
    """Catches a teacher with the positions of the student."""
    folder = write_folder(tmp_path / "model", "llama", weights=False)
    job = write_job(tmp_path, folder)
    values = yaml.safe_load(job.read_text())
    values["training"] |= {"objective": "distill", "distill": {"teacher": str(folder)}}
    values["model"]["hf_overrides"] = LONGER
    job.write_text(yaml.safe_dump(values))
    from isp.step.job_models import second_model

    config: JobConfig = load_config(job)
    teacher = second_model(config)
    assert teacher is not None
    rope = [m.model.config.rope_parameters["rope_type"] for m in (teacher, trained_model(config))]
    assert rope == ["default", "yarn"]
