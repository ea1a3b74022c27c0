"""Folders of `model.hf`, and keys that do not go with them, refused before any rank starts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from isp.cli import main
from isp.config import ConfigError, JobConfig, load_config, to_yaml
from isp.models.huggingface.make import folder_config, new_model
from isp.step.job_models import check_models, trained_model
from isp.train.data import check_data
from tests.config.test_job import faults_of
from tests.models.folders import write_folder, write_job
from tests.models.huggingface.test_vision_language import KINDS as VISION_LANGUAGE
from tests.ranks import run_isp

WEIGHTS = "model.safetensors"
ISP_2 = "--parallel.tensor.size=2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small Llama and its weights."""
    return write_folder(tmp_path / "model", "llama")


def config_of(folder: Path, *overrides: str) -> JobConfig:
    return load_config(write_job(folder.parent, folder), overrides)


def change(folder: Path, **values: Any) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add or replace tensors, or remove those that are None; names have _ in place of dots."""
    found = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        full = name.replace("__", ".")
        found.pop(full, None)
        if tensor is not None:
            found[full] = tensor
    save_file(found, folder / WEIGHTS)


@pytest.mark.parametrize("of_decoder", [True, False])
def test_sizes_come_from_the_folder_and_are_printed(folder: Path, of_decoder: bool) -> None:
    """Catches default sizes, and a printed configuration that is refused when it is read."""
    config = config_of(folder)
    model = config.model
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (272, 32, 2)
    assert (model.num_heads, model.kv_heads, model.head_size) == (4, 2, 8)
    again = folder.parent / "again.yaml"
    again.write_text(to_yaml(config, of_decoder=of_decoder))
    assert ("rope_theta" in again.read_text()) == of_decoder, "which is not the folder's"
    assert "vocab_size: 272" in again.read_text()
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.hidden_size=64"], "--model.hidden_size: model.hidden_size=64 contradicts"),
        (["--model.preset=tiny"], 'model.preset="tiny" contradicts model.hf='),
        (["--model.init_std=0.1"], "model.init_std=0.1 contradicts model.hf="),
        (["--model.checkpoint_mlp_activation"], "set both, or none"),
        (
            ["--parallel.tensor.size=5"],
            "parallel.tensor.size=5 must divide the sequence of 64 tokens",
        ),
    ],
)
def test_keys_that_do_not_go_with_a_folder_are_named(
    folder: Path, words: list[str], message: str
) -> None:
    """Catches a key that is silently ignored, or that makes a rank fail."""
    assert message in faults_of(write_job(folder.parent, folder), *words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 in config.json sets attention"),
        ({"attention_chunk_size": 16}, "attention_chunk_size=16 in config.json needs layer_types"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling of type dynamic in config.json",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            "rope_parameters of type longrope in config.json",
        ),
    ],
)
def test_unsupported_options_of_a_folder_are_named(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    """Catches a model that is trained as another model."""
    change(folder, **values)
    assert message in faults_of(write_job(folder.parent, folder), ISP_2)
    if "dynamic" in message:  # one rank has the whole row
        assert trained_model(config_of(folder)).num_parameters > 0


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    """Catches a traceback about a file where the folder is not a model."""
    for text, message in (
        (None, "has no config.json"),
        ("{", "is damaged"),
        ("[]", "is not a JSON object"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message) as refused:
            load_config(write_job(tmp_path, tmp_path))
        assert str(refused.value).count("model.hf=") == 1
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        load_config(write_job(tmp_path, tmp_path / "nowhere"))


FAULTS = {
    "missing: model.norm.weight": {"model__norm__weight": None},
    "not of the model: model.more": {"model__more": torch.zeros(2)},
    "model.norm.weight is [31], not [32]": {"model__norm__weight": torch.zeros(31)},
}


@pytest.mark.parametrize("message", FAULTS)
def test_weights_of_another_model_are_named(folder: Path, message: str) -> None:
    """Catches a tensor that is left random, ignored, or cut to fit."""
    change_weights(folder, **FAULTS[message])
    config = config_of(folder)
    with pytest.raises(ValueError, match=r"the weights in .* do not fit this model") as refused:
        _ = trained_model(config)
    assert message in str(refused.value)


def test_damaged_and_foreign_files_are_named(folder: Path) -> None:
    """Catches random weights where a file is truncated or has an unsupported format."""
    config, file = config_of(folder), folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        _ = trained_model(config)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights are in pytorch_model\.bin, but isp reads"):
        _ = trained_model(config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_an_integer_dtype_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """Catches integers, whose scales are missing or in another file, trained as weights."""
    change_weights(folder, model__norm__weight=torch.ones(32).to(dtype))
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* as quantized weights do"):
        _ = trained_model(config_of(folder))


INDEXES = {
    "gives 5 for model.norm.weight": '{"weight_map": {"model.norm.weight": 5}}',
    "gives '../w.safetensors'": '{"weight_map": {"model.norm.weight": "../w.safetensors"}}',
    "gives '/w.safetensors'": '{"weight_map": {"model.norm.weight": "/w.safetensors"}}',
    "has no weight_map": '{"weight_map": 5}',
    "Exceeds the limit": '{"weight_map": ' + 5000 * "1" + "}",
}


@pytest.mark.parametrize("message", INDEXES)
def test_damaged_indexes_are_named(folder: Path, message: str) -> None:
    """Catches a traceback, and an index that names a file outside of the folder."""
    config = config_of(folder)
    (folder / f"{WEIGHTS}.index.json").write_text(INDEXES[message])
    with pytest.raises(ValueError, match=r"index\.json is damaged: ") as refused:
        _ = trained_model(config)
    assert message in str(refused.value)


def test_models_that_cannot_be_built_or_trained_are_named(folder: Path) -> None:
    """Catches transformers' traceback, its question whether to run remote code, and dropout."""
    change(folder, model_type="unheard_of")
    with pytest.raises(
        ValueError, match=r"model\.hf=.*cannot build a causal language model from it"
    ):
        _ = trained_model(config_of(folder))
    change(folder, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ValueError, match=r"isp runs no code that a folder brings"):
        _ = trained_model(config_of(folder))
    drops = write_folder(folder.parent / "drops", "gpt2", weights=False, resid_pdrop=0.1)
    with pytest.raises(
        ValueError, match=r"transformer\.h\.0\.attn\.resid_dropout applies dropout 0\.1"
    ):
        _ = trained_model(config_of(drops))


KERNEL = "somebody/kernel@0123abc"
NAMES_A_KERNEL = {
    "attention": {"_attn_implementation": KERNEL},
    "attention, as saved": {"attn_implementation": KERNEL},
    "attention by part": {"_attn_implementation": {"": KERNEL, "text_config": KERNEL}},
    "attention of a package": {"_attn_implementation": "flash_attention_2"},
    "experts": {"_experts_implementation": KERNEL},
    "experts, as saved": {"experts_implementation": KERNEL},
    "internal": {"_attn_implementation_internal": KERNEL},
}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("named", NAMES_A_KERNEL)
def test_a_folder_cannot_select_kernels_of_the_hub(tmp_path: Path, kind: str, named: str) -> None:
    """Catches a kernel that is downloaded from the hub, and run, because config.json names it."""
    changes = NAMES_A_KERNEL[named]
    if kind == "llama":
        folder = write_folder(tmp_path / "model", kind, weights=False)
    else:
        folder = tmp_path / "model"
        transformers.AutoConfig.for_model(kind, **VISION_LANGUAGE[kind]).save_pretrained(folder)
        text = json.loads((folder / "config.json").read_text())
        for part in ("text_config", "vision_config"):
            text[part] |= changes
        change(folder, **text)
    change(folder, **changes)
    assert trained_model(config_of(folder)).num_parameters > 0
    # transformers' own choices: one of a package would be used by a model without the interface.
    whole = new_model(folder_config(folder))
    for config in (whole.config, whole.config.get_text_config(decoder=True)):
        assert config._attn_implementation in ("sdpa", "eager")
        assert config._experts_implementation in ("grouped_mm", "eager", None)


def test_a_vocabulary_that_is_too_small_is_named(folder: Path) -> None:
    """Catches a check against the default vocabulary instead of the folder's."""
    change(folder, vocab_size=200)
    with pytest.raises(ValueError, match=r"model\.vocab_size=200 is smaller than the 257 entries"):
        check_data(config_of(folder))


def test_missing_packages_are_named_with_how_to_install_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError on every rank."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    config = config_of(folder)
    with pytest.raises(ValueError, match=r"needs the transformers package: bash tools/setup_env"):
        _ = trained_model(config)


def test_the_command_line_reports_a_fault_in_one_line(folder: Path) -> None:
    """Catches a traceback, and a process group that starts in vain."""
    change_weights(folder, model__norm__weight=None)
    (said,) = run_isp(1, "train", str(write_job(folder.parent, folder)))
    assert said.code != 0
    assert "missing: model.norm.weight" in said.err
    assert "Traceback" not in said.err
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
        (
            "bert",
            {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
    ],
)
def test_rows_beyond_a_table_of_positions_are_refused(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """Catches an IndexError on a rank, and a table of token types taken for one of positions."""
    folder = write_folder(tmp_path / "model", kind, weights=False, **sizes)
    check_models(config_of(folder, "--data.seq_len=128"))
    with pytest.raises(ValueError, match=r"data\.seq_len=129 is longer .* use at most 128"):
        check_models(config_of(folder, "--data.seq_len=129"))


def test_rows_at_whose_length_a_model_computes_differently_are_refused(tmp_path: Path) -> None:
    """Catches a table sized by a rank's tokens but indexed by positions in the row."""
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4}
    off = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    folder = write_folder(tmp_path / "model", "xglm", weights=False, **sizes, **off)
    check_models(config_of(folder, "--data.seq_len=64"))
    long, said = "--data.seq_len=256", r"embed_positions .* row of 512 tokens: it calls `arange`"
    with pytest.raises(ValueError, match=said):
        check_models(config_of(folder, long))
    check_models(config_of(folder, long, "--model.allow_unchecked"))


@pytest.mark.parametrize("command", ["generate", "evaluate", "check"])
def test_commands_say_which_packages_a_folder_needs(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an import traceback where the extra for folders is not installed."""
    folder, found = write_folder(tmp_path / "llama", "llama"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    words = ["--prompt=x"] if command == "generate" else []
    assert main([command, str(folder), *words]) == 2
    said = capsys.readouterr().err
    assert "needs the transformers package: bash tools/setup_env.sh hf" in said
