"""Folders of vision-language models: the text part trains, and the vision tower stays unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import isp
from isp.checkpoint.state import CheckpointWeights
from isp.cli import main
from isp.core.comm import Channel, Mesh
from isp.core.mesh import Axis, ParallelConfig
from isp.core.optim.main_grads import MainGradients
from isp.models.build import build_model
from isp.models.huggingface.config_json import with_sizes
from isp.models.huggingface.tiny import kept_in_float64
from isp.models.loading import folder_model
from tests.models.folders import TEXT_SIZES, write_job
from tests.models.models import OF_ITS_OWN, job
from tests.toolkit import topology
from tests.train.jobs import run_folders, run_forked

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
_FULL = ["full_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **TEXT_SIZES,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 272,  # beyond the table, as the model allows
    },
    "qwen3_vl": {
        "text_config": {**TEXT_SIZES, "rope_scaling": _ROPE},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        "image_token_id": 270,
        "video_token_id": 269,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT_SIZES},
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16},
        "image_token_index": 270,
    },
    "llama4": {
        "text_config": {
            **TEXT_SIZES,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "layer_types": _FULL,
            "no_rope_layers": [1, 0],
            "moe_layers": [0],
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 270,
    },
    "nemotron_h_omni": {  # hears and sees; its files and modules have other names
        "text_config": {
            "model_type": "nemotron_h",
            **TEXT_SIZES,
            **OF_ITS_OWN["nemotron_h"],
            "num_hidden_layers": 3,
        },
        "vision_config": {
            "model_type": "radio",
            **_VISION,
            "max_img_size": 56,
            "video_temporal_patch_size": 2,
        },
    },
}

LLAMA4 = pytest.param(
    "llama4",
    marks=pytest.mark.skipif(
        transformers.__version__.startswith("5.24."),
        reason="its own forward fails in transformers 5.24: outputs without image_outputs",
    ),
)


def _write(folder: Path, kind: str) -> Path:
    """Write and return a folder of this model type, its tower in another dtype than the
    training.
    """
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # llama4 begins some of them without values
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def _loaded(folder: Path) -> Any:
    """Return the model that transformers makes of a folder, in float64."""
    kind = transformers.AutoModelForImageTextToText
    return kept_in_float64(kind.from_pretrained(folder, dtype=torch.float64))


@pytest.mark.parametrize(
    "kind",
    [LLAMA4 if kind == "llama4" else kind for kind in KINDS if kind in CONFIG_MAPPING_NAMES],
)
def test_the_text_part_computes_as_the_whole_model(tmp_path: Path, kind: str) -> None:
    """Catches a text part that is another model, by its loss and every gradient."""
    folder = _write(tmp_path / "model", kind)
    built = build_model(
        folder_model(str(folder), "float64"),
        ParallelConfig(),
        Mesh(topology(), 0),
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    (chunk,) = built.chunks
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(20).expand(2, 20)
    main = MainGradients(built.trained, {axis: Channel.solo(axis) for axis in Axis})
    plain = _loaded(folder).train()
    plain.set_attn_implementation("eager")
    logits = plain(input_ids=tokens, position_ids=positions, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    expected.backward()
    loss = chunk.loss(chunk(tokens, positions, None), tokens) / tokens.numel()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {item.name: main.grad(item.parameter) for item in built.parameters}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        _assert_close(found[name], gradient)


@pytest.mark.parametrize("kind", ["gemma3", LLAMA4])
def test_a_trained_folder_contains_the_unchanged_tower(tmp_path: Path, kind: str) -> None:
    """Catches a tower that is lost or changed, and text weights under names that are not loaded."""
    source = _write(tmp_path / "model", kind)
    (source / "preprocessor_config.json").write_text("{}")
    config = write_job(tmp_path, source)
    run_forked(config, "--training.steps=2", "--parallel.tensor.size=2", "--parallel.weight.size=2")
    (run,) = run_folders(config)
    assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    whole, weights = _loaded(tmp_path / "hf"), CheckpointWeights(run)
    trained = dict(whole.named_parameters())
    assert 10 < len(weights.shapes) < len(trained)
    for name in weights.shapes:
        assert torch.equal(trained[name], weights.read(name)), name
    untrained = [name for name in before if after[name].dtype is torch.bfloat16]
    assert len(untrained) == len(trained) - len(weights.shapes)
    for name in untrained:
        assert torch.equal(after[name], before[name]), name
    read = _loaded(source).state_dict()
    text = [name for name in weights.shapes if not torch.equal(trained[name], read[name])]
    assert len(text) > 10, "it was trained"


def test_isp_check_accepts_a_vision_language_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that builds the tower, or that checks nothing."""
    transformers.AutoConfig.for_model("qwen3_vl", **KINDS["qwen3_vl"]).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--layouts", "2x2"]) == 0
    assert "the layout agrees" in capsys.readouterr().out


def _assert_close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    assert (found - expected).abs().max() <= 1e-9 * max(1e-6, expected.abs().max().item())


def test_a_size_missing_in_a_folder_is_the_default_of_its_type(tmp_path: Path) -> None:
    """Catches the default vocabulary of ISP's model section; Gemma 3's folders do not name
    theirs.
    """
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found = with_sizes({"hf": str(tmp_path)}, {"vocab_size": 32000})
    assert found["vocab_size"] == transformers.Gemma3TextConfig().vocab_size
    assert found["hidden_size"] == 64


def test_the_tower_of_a_model_in_memory_is_not_trained() -> None:
    """Catches weight decay of weights that no forward of tokens reads."""
    config = transformers.AutoConfig.for_model("gemma3", **KINDS["gemma3"])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    run = isp.parallelize(model, job(dtype="float32", lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.step(run.loss(torch.arange(32)[None] % 160))
    run.train_step.drain()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved
    assert all("language_model" in name for name in moved)
    assert any("vision" in name for name in before)
