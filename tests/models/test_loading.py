"""Initial weights of a folder's model, loaded from its files or random, on every rank."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.mesh import Axis, Mode, ParallelConfig, TensorConfig, WeightConfig
from isp.core.recompute.config import Recomputation
from isp.models.build import BuiltModel, build_model
from isp.models.huggingface.weight_files import WeightFiles
from isp.models.loading import folder_model, parameters_on_meta
from tests.core.layers.test_initial_weights import Drawn
from tests.models.folders import small_config, write_folder
from tests.ranks import run_ranks
from tests.toolkit import weight_mesh

WEIGHT = 4
Parts = dict[str, tuple[int, int, Tensor]]
"""A rank's shards by name: index, number of parts, values."""


def built(folder: Path, mesh: Mesh, *, seed: int = 0) -> BuiltModel:
    parallel = ParallelConfig(
        tensor=TensorConfig(mode=Mode.ISP), weight=WeightConfig(size=mesh[Axis.WEIGHT].size)
    )
    model = folder_model(str(folder), "float32")
    device = torch.device("cpu")
    return build_model(model, parallel, mesh, seed=seed, device=device, dtype=torch.float32)


def parts_of(rank: int, folder: Path, size: int, seed: int = 0) -> Parts:
    model = built(folder, weight_mesh(rank, size), seed=seed)
    found = {
        p.name: (p.layout.index, p.layout.parts, p.parameter.detach()) for p in model.parameters
    }
    (chunk,) = model.chunks
    kept = chunk.model.state_dict().keys() - found.keys()
    return found | {
        name: (0, 1, buffer) for name, buffer in chunk.model.named_buffers() if name in kept
    }


def whole(of_ranks: list[Parts]) -> dict[str, Tensor]:
    return {
        name: torch.cat([of_rank[name][2] for of_rank in of_ranks]) if parts > 1 else value
        for name, (_, parts, value) in of_ranks[0].items()
    }


def state(folder: Path) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers that transformers loads from a folder."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shared = {name for name, _ in model.named_parameters()}
    kept = dict(model.named_buffers()).keys() & model.state_dict().keys()
    return {name: x for name, x in model.state_dict().items() if name in shared | kept}


@pytest.mark.parametrize(
    ("kind", "own_names"),
    [("gpt2", False), ("deepseek_v3", True), ("deepseek_v3", False), ("apertus", False)],
)
def test_ranks_load_the_weights_that_transformers_loads(
    tmp_path: Path, kind: str, own_names: bool
) -> None:
    """Catches rows of another rank, transposed rows, and a buffer that is not loaded or is a
    scalar.
    """
    torch.manual_seed(5)
    folder = write_folder(tmp_path, kind, own_names=own_names)
    _change_buffers(folder)
    expected = state(folder)
    found = whole(run_ranks(WEIGHT, parts_of, folder, WEIGHT))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def _change_buffers(folder: Path) -> None:
    """Change the buffers in the file, so that they differ from those of a new model."""
    tensors = load_file(folder / "model.safetensors")
    changed = {n: x + 0.5 if n.endswith("correction_bias") else x for n, x in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_found_under_either_name(tmp_path: Path, name: str) -> None:
    """Catches a tied weight that is only found under its first name, and two copies of it."""
    folder = write_folder(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    table = next(tensors.pop(n) for n in list(tensors) if n.startswith(("lm_head", "model.embed")))
    save_file({**tensors, name: table}, folder / "model.safetensors")
    (parts,) = run_ranks(1, parts_of, folder, 1)
    assert "lm_head.weight" not in parts
    torch.testing.assert_close(parts["model.embed_tokens.weight"][2], table, rtol=0, atol=0)


def test_rotary_buffers_of_old_folders_are_ignored(tmp_path: Path) -> None:
    """Catches a folder of the first Llamas that is refused as another model's."""
    folder = write_folder(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **old}, folder / "model.safetensors", metadata={"format": "pt"})
    assert folder_model(str(folder), "float32").num_parameters > 0


def test_a_folder_is_traced_once_for_all_recomputation_keys(tmp_path: Path) -> None:
    """Catches a plan that probes a large model again for each key, and keys that affect another
    plan.
    """
    folder = str(write_folder(tmp_path, "llama", weights=False))
    plain = folder_model(folder, "float32")
    again = folder_model(folder, "float32", recomputation=Recomputation(checkpoint=1.0))
    assert again.trace is plain.trace
    assert (plain.recomputation.checkpoint, again.recomputation.checkpoint) == (0.0, 1.0)


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Catches quantized values read as weights, and a list of names without the reason."""
    folder = write_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights are quantized .*=awq in"):
        folder_model(str(folder), "float32")


def test_names_of_the_hub_are_known_in_float64(tmp_path: Path) -> None:
    """Catches a class that transformers no longer recognizes, so that it does not convert names."""
    folder = write_folder(tmp_path, "gpt_neox")
    assert "embed_out.weight" in load_file(folder / "model.safetensors")
    assert folder_model(str(folder), "float64").num_parameters > 0


def test_files_are_closed_once_read(tmp_path: Path) -> None:
    """Catches weight files that stay mapped, and occupy the disk if deleted, while a process
    lives.
    """
    folder = write_folder(tmp_path, "llama")
    built(folder, weight_mesh(0, 1))
    assert str(folder) not in Path("/proc/self/maps").read_text()


class _Counting:
    """A view of a tensor in a file that counts the elements read."""

    def __init__(self, view: Any, taken: list[int]) -> None:
        self._view, self._taken = view, taken

    def get_shape(self) -> list[int]:
        shape: list[int] = self._view.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._view.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._view[index]
        self._taken.append(part.numel())
        return part


def _taken(rank: int, folder: Path) -> tuple[list[int], Counter[bool]]:
    """Return the elements of each read, and those of sharded and of replicated parameters."""
    taken: list[int] = []
    handle = WeightFiles._handle

    class Handle:
        def __init__(self, opened: Any) -> None:
            self._opened = opened

        def get_slice(self, name: str) -> _Counting:
            return _Counting(self._opened.get_slice(name), taken)

    WeightFiles._handle = lambda self, file: Handle(handle(self, file))
    parameters = built(folder, weight_mesh(rank, WEIGHT)).parameters
    own: Counter[bool] = Counter()
    for item in parameters:
        own[item.layout.sharded] += item.parameter.numel()
    return taken, own


def test_a_rank_reads_only_its_own_rows(tmp_path: Path) -> None:
    """Catches a rank that reads a tensor whole or twice, for which it has no memory."""
    folder = write_folder(tmp_path, "llama")
    total = sum(x.numel() for x in load_file(folder / "model.safetensors").values())
    for taken, own in run_ranks(WEIGHT, _taken, folder):
        assert sum(taken) == own.total()
        assert own[True] == (total - own[False]) // WEIGHT
        assert max(taken) == 272 * 32 // WEIGHT, "the largest is a table's rows"


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3"])
def test_random_weights_have_the_models_distribution_in_every_layout(
    tmp_path: Path, kind: str
) -> None:
    """Catches weights that depend on ranks or order, and another distribution than the model's."""
    folder = write_folder(tmp_path, kind, weights=False)
    before = torch.get_rng_state()
    (alone,) = run_ranks(1, parts_of, folder, 1)
    spread = whole(run_ranks(WEIGHT, parts_of, folder, WEIGHT))
    (other,) = run_ranks(1, parts_of, folder, 1, 1)
    assert torch.equal(before, torch.get_rng_state())
    plain = transformers.AutoModelForCausalLM.from_config(small_config(kind)).state_dict()
    for name, (_, _, value) in alone.items():
        torch.testing.assert_close(spread[name], value, rtol=0, atol=0)
        expected = plain[name].float()
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=0.01)
        assert value.std().item() == pytest.approx(expected.std().item(), rel=0.2), name
        if expected.std() > 0:
            assert not torch.equal(value, other[name][2]), f"{name} does not hear the seed"


def _numbers_drawn(rank: int, folder: Path) -> int:
    with Drawn() as drawn:
        built(folder, weight_mesh(rank, WEIGHT))
    return drawn.total


def test_a_rank_draws_only_its_own_rows(tmp_path: Path) -> None:
    """Catches ranks that each draw the whole model, and a padding row with random values."""
    sizes = {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 1, "pad_token_id": 700}
    folder = write_folder(tmp_path, "llama", weights=False, **sizes)
    of_ranks = run_ranks(WEIGHT, _numbers_drawn, folder)
    total = 2 * 2048 * 128
    assert total < sum(of_ranks) < 1.5 * total
    parts = whole(run_ranks(WEIGHT, parts_of, folder, WEIGHT))
    empty = parts["model.embed_tokens.weight"].abs().sum(1) == 0
    assert empty.nonzero().flatten().tolist() == [700]


def test_a_model_is_built_without_memory_for_its_parameters() -> None:
    """Catches parameters with memory, tied ones that are separated, and buffers that lose
    theirs.
    """
    config = small_config("llama", tie_word_embeddings=True)
    register = torch.nn.Module.register_parameter
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert torch.nn.Module.register_parameter is register
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.max() == 1


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("layers.0.mlp.gate.weight", "missing: model.layers.0.mlp.gate.weight"),
        ("layers.1.mlp.experts.2.up_proj.weight", "from 4 mlp.experts.*.gate_proj.weight, 3 mlp"),
        ("layers.1.mlp.experts.2.down_proj.weight", "down_proj is [3, 32, 16], not [4, 32, 16]"),
    ],
)
def test_a_tensor_missing_in_a_folder_is_named(tmp_path: Path, gone: str, message: str) -> None:
    """Catches a router or an expert that stays random, and experts loaded under other numbers."""
    folder = write_folder(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.{gone}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights in .* do not fit this model") as refused:
        folder_model(str(folder), "float32")
    assert message in str(refused.value)
