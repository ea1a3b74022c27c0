"""A folder of InternLM2 converted to Llama, against InternLM2 in plain tensor operations."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.model.folders import loaded

TOOL = Path(__file__).parents[2] / "tools" / "internlm2_to_llama.py"
HEADS, GROUPS, SIZE, HIDDEN, INNER, VOCAB, LAYERS, CONTEXT = 6, 2, 4, 24, 20, 40, 2, 16
EPS, BASE, FACTOR = 1e-5, 1000.0, 3.0


def _internlm2(folder: Path, *, bias: bool, scaling: str | None) -> dict[str, Tensor]:
    """Write a model in two files, in the format of InternLM2's; return its tensors."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3

    tensors = {
        "model.tok_embeddings.weight": draw(VOCAB, HIDDEN),
        "output.weight": draw(VOCAB, HIDDEN),
    }
    tensors["model.norm.weight"] = 1 + draw(HIDDEN)
    for index in range(LAYERS):
        block = f"model.layers.{index}"
        tensors |= {
            f"{block}.attention.wqkv.weight": draw((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
            f"{block}.attention.wo.weight": draw(HIDDEN, HEADS * SIZE),
            f"{block}.attention_norm.weight": 1 + draw(HIDDEN),
            f"{block}.ffn_norm.weight": 1 + draw(HIDDEN),
            f"{block}.feed_forward.w1.weight": draw(INNER, HIDDEN),
            f"{block}.feed_forward.w2.weight": draw(HIDDEN, INNER),
            f"{block}.feed_forward.w3.weight": draw(INNER, HIDDEN),
        }
        if bias:
            tensors[f"{block}.attention.wqkv.bias"] = draw((HEADS + 2 * GROUPS) * SIZE)
            tensors[f"{block}.attention.wo.bias"] = draw(HIDDEN)
    folder.mkdir()
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    of_names = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({n: x for n, x in tensors.items() if of_names[n] == file}, folder / file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": of_names}))
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "model_type": "internlm2",
        "bias": bias,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": GROUPS,
        "rms_norm_eps": EPS,
        "rope_scaling": scaling and {"type": scaling, "factor": FACTOR},
        "rope_theta": BASE,
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return tensors


def _rotated(x: Tensor, scaling: str | None) -> Tensor:
    """Return x [S, H, d] rotated; the second half of the features is the imaginary part."""
    length, base = x.shape[0], BASE
    positions = torch.arange(length, dtype=torch.float64)
    if scaling == "linear":
        positions = positions / FACTOR
    elif scaling == "dynamic" and length > CONTEXT:
        base *= (FACTOR * length / CONTEXT - (FACTOR - 1)) ** (SIZE / (SIZE - 2))
    frequencies = base ** -(torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    turn = torch.polar(torch.ones(()).double(), positions[:, None] * frequencies)  # [S, d/2]
    turned = torch.complex(*x.chunk(2, -1)) * turn[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def _plainly(found: dict[str, Tensor], tokens: Tensor, scaling: str | None) -> Tensor:
    """Return the logits [S, V] of InternLM2 for tokens [S]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * found[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ found[f"{name}.weight"].T + found.get(f"{name}.bias", torch.zeros(()).double())

    hidden, length = found["model.tok_embeddings.weight"][tokens], len(tokens)
    later = torch.ones(length, length).triu(1).bool()
    for index in range(LAYERS):
        block = f"model.layers.{index}"
        fused = linear(norm(hidden, f"{block}.attention_norm"), f"{block}.attention.wqkv")
        groups = fused.view(length, GROUPS, HEADS // GROUPS + 2, SIZE)  # q of the group, k, v
        out = []
        for group in range(GROUPS):
            *queries, key, value = _rotated_but_last(groups[:, group], scaling).unbind(1)
            for query in queries:
                scores = (query @ key.T / SIZE**0.5).masked_fill(later, -torch.inf)
                out.append(scores.softmax(-1) @ value)
        hidden = hidden + linear(torch.cat(out, -1), f"{block}.attention.wo")
        x, mlp = norm(hidden, f"{block}.ffn_norm"), f"{block}.feed_forward"
        gated = F.silu(linear(x, f"{mlp}.w1")) * linear(x, f"{mlp}.w3")
        hidden = hidden + linear(gated, f"{mlp}.w2")
    return linear(norm(hidden, "model.norm"), "output")


def _rotated_but_last(heads: Tensor, scaling: str | None) -> Tensor:
    """Return a group's heads [S, H/G + 2, d] with q and k rotated."""
    return torch.cat([_rotated(heads[:, :-1], scaling), heads[:, -1:]], 1)


def _run(monkeypatch: pytest.MonkeyPatch, *words: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, words)])
    runpy.run_path(str(TOOL), run_name="__main__")


@pytest.mark.parametrize(
    ("bias", "scaling", "tokens"),
    [(False, None, 12), (True, "linear", 12), (False, "dynamic", 12), (False, "dynamic", 21)],
)
def test_the_converted_llama_equals_internlm2(
    bias: bool, scaling: str | None, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of another group or head, a lost bias, and other positions."""
    tensors = _internlm2(tmp_path / "internlm2", bias=bias, scaling=scaling)
    _run(monkeypatch, tmp_path / "internlm2", tmp_path / "llama")
    ids = torch.arange(tokens) * 7 % VOCAB
    expected = _plainly(tensors, ids, scaling)
    llama: Any = loaded(tmp_path / "llama")
    assert llama.model.config.model_type == "llama"
    torch.testing.assert_close(llama(ids[None])[0], expected, rtol=1e-11, atol=1e-11)
    assert (tmp_path / "llama" / "tokenizer_config.json").exists()


def test_another_model_and_a_full_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a Llama made of another model's weights, and a model that is overwritten."""
    _internlm2(tmp_path / "internlm2", bias=False, scaling=None)
    with pytest.raises(ValueError, match=r"internlm2 holds .*: name a new or an empty folder"):
        _run(monkeypatch, tmp_path / "internlm2", tmp_path / "internlm2")
    (tmp_path / "internlm2" / "config.json").write_text('{"model_type": "internlm3"}')
    with pytest.raises(ValueError, match=r"has internlm3 .*, not internlm2"):
        _run(monkeypatch, tmp_path / "internlm2", tmp_path / "llama")
    assert not (tmp_path / "llama").exists()
