"""`isp check`: its output, the errors it finds, and the input it refuses."""

from __future__ import annotations

import copy
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isp
from isp.cli import main
from isp.core.mesh import Mode, ParallelConfig
from isp.core.optim.buckets import BucketManager
from isp.core.recompute.config import Recomputation
from isp.core.weights.prefetch_plan import PlanCursor
from isp.models.huggingface import tiny
from isp.models.huggingface.tiny import tiny_config
from isp.models.runtime import sharded_modules
from isp.models.runtime.tiles import TiledModule
from isp.models.tracing import position
from isp.parity.api import _subject_of, keys_from
from isp.parity.compare import CASES, TOLERANCE, Check
from isp.parity.forked import RankError, run_ranks
from isp.parity.layouts import Layout, layouts_of
from isp.parity.subjects import Subject
from model.config import ModelConfig
from tests.models.own import Own

transformers = pytest.importorskip("transformers")
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder of Gemma 3, with windows, norms of q and k, and tied embeddings."""
    transformers.AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    return str(tmp_path)


def _rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the table by layout, without the explanations below it."""
    table = text.partition("\n\n")[0]
    return {
        " ".join(line.split()[:2]): line.split()
        for line in table.splitlines()
        if line.startswith("isp ")
    }


def test_ranks_log_nothing_except_the_table(folder: str, tmp_path: Path) -> None:
    """Catches log lines of a run, such as that of whole logits, once for each case and rank."""
    handler = logging.FileHandler(tmp_path / "log")  # forked ranks write to it too
    logging.getLogger("isp").addHandler(handler)
    try:
        assert main(["check", folder, "--layouts", "mtp2"]) == 0
    finally:
        logging.getLogger("isp").removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text() == ""


def test_a_folder_agrees_in_three_layouts(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a difference reported for a correct model, and a layout that is left out."""
    assert main(["check", folder, "--layouts", "2x2,2x1,1x2x2"]) == 0
    said = capsys.readouterr()
    rows = _rows(said.out)
    assert list(rows) == ["isp 2x2", "isp 2x1", "isp 1x2x2"]
    assert all("ok" in row for row in rows.values())
    assert "planned" in rows["isp 2x2"]
    assert "none" in rows["isp 2x1"]  # where nothing is gathered
    assert "all 3 layouts agree" in said.out


def test_a_configuration_agrees_in_all_modes() -> None:
    """Catches a decoder that differs in a mode, with the options of its configuration."""
    from isp.config import load_config

    changes = ["--model.qk_norm", "--model.qkv_bias", "--model.sliding_window=7"]
    changes += ["--model.mlp_tile_tokens=64"]
    config = load_config(QUICKSTART, changes)
    layouts = [Layout(2, 1, Mode.MSP), Layout(2, 1, Mode.MTP), Layout(2, 2)]
    subject = Subject.of_decoder(config.model)
    check = Check(subject, layouts, cases=CASES[1:3], parallel=config.parallel)
    verdicts = [check.run(layout) for layout in layouts]
    assert [str(v.layout) for v in verdicts if not v.agrees] == []
    assert [max(found.gathers for found in v.cases.values()) > 0 for v in verdicts] == [0, 0, 1]


def test_grouped_products_are_compared_with_experts_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a check that computes experts differently from a run, and one with equal code on both
    sides.
    """
    from transformers import MixtralConfig

    check = Check(Subject.of_config(MixtralConfig()), [Layout(2, 1)], cases=CASES[:1])
    assert check.run(Layout(2, 1)).agrees
    right = tiny._grouped_product
    monkeypatch.setattr(tiny, "_grouped_product", lambda *given: right(*given) * (1 + 1e-6))
    assert not check.run(Layout(2, 1)).agrees


def test_the_folder_and_optimizer_of_a_configuration_are_checked(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a model.hf, an update rule or other keys of the configuration that the check
    ignores.
    """
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{hf: {folder}}}\ndata: {{source: python-stdlib, seq_len: 64}}\n"
        "parallel: {weight: {overlap: false}}\noptimizer: {name: muon, weight_decay: 0.5}\n"
    )
    assert main(["check", str(config), "--layouts", "2x2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gemma3_text, on 2 ranks")
    assert "the update is that of adamw and muon\n" in said
    assert "ok" in _rows(said)["isp 2x2"]


def test_an_ignored_window_is_found(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that misses wrong masks: the first layer of Gemma 3 has a window."""
    right = position.AttentionMask
    monkeypatch.setattr(position, "AttentionMask", lambda **keys: right(**{**keys, "window": None}))
    assert main(["check", folder, "--layouts", "2x1"]) == 1
    said = capsys.readouterr().out
    assert "DIFFERS" in _rows(said)["isp 2x1"]
    assert "first in the forward, the output of model.layers.0.self_attn.o_proj" in said
    assert "1 of 1 layout differs" in said


def test_ignored_packing_is_found(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches packing that lets a document attend to earlier ones."""
    right = position.AttentionMask
    monkeypatch.setattr(
        position, "AttentionMask", lambda **keys: right(**{**keys, "cu_seqlens": None})
    )
    assert main(["check", folder, "--layouts", "2x1"]) == 1
    assert "in 2 of 4 cases, such as rows packed" in capsys.readouterr().out


def test_decayed_norms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that asks the run which weights are decayed: norms [H, d] must not be."""
    config = transformers.CohereConfig(use_qk_norm=True)
    check = Check(Subject.of_config(config), [Layout(1, 1)], cases=CASES[1:2])
    assert check.run(Layout(1, 1)).agrees
    monkeypatch.setattr(
        sharded_modules, "is_decayed", lambda model, name: model.get_parameter(name).dim() > 1
    )
    (found,) = check.run(Layout(1, 1)).cases.values()
    wrong = {name.split(".")[-2] for name, away in found.weights.items() if away > TOLERANCE}
    assert wrong == {"q_norm", "k_norm"}


def test_gradients_that_are_not_summed_are_found(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that only compares losses."""

    def launch_nothing(self: BucketManager) -> None:
        self._launched += 1

    monkeypatch.setattr(BucketManager, "_launch_next", launch_nothing)
    assert main(["check", folder, "--layouts", "1x2"]) == 1
    said = capsys.readouterr().out
    assert float(_rows(said)["isp 1x2"][2]) < 1e-9  # the loss
    assert "gradients: model.layers.0.self_attn.q_norm.weight" in said  # whole on every rank
    assert "first in the forward" not in said


def test_weights_gathered_too_often_are_found(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an ignored plan, where all values are right but the traffic doubles."""
    monkeypatch.setattr(PlanCursor, "arrive", lambda *_: None)
    assert main(["check", folder, "--layouts", "1x2"]) == 1
    said = capsys.readouterr().out
    assert {"OTHERS", "DIFFERS"} <= {*_rows(said)["isp 1x2"]}
    assert "transfers: " in said


def _kill_oneself(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _hang(rank)


def _hang(rank: int) -> None:
    time.sleep(60)


def test_a_rank_that_dies_or_hangs_is_named() -> None:
    """Catches a check that waits forever, or does not say why it ended."""
    with pytest.raises(RankError, match="rank 1 died without an answer, by SIGKILL"):
        run_ranks(2, _kill_oneself)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not answer within 1 s"):
        run_ranks(2, _hang, timeout_seconds=1)


def test_a_failing_rank_fails_only_its_layout(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an error in one layout that ends the check of the others."""
    real = Check.on_rank

    def fail(self: Check, rank: int, layout: Layout) -> object:
        if layout.weight == 2:
            raise RuntimeError("out of luck")
        return real(self, rank, layout)

    monkeypatch.setattr(Check, "on_rank", fail)
    assert main(["check", folder, "--layouts", "1x2,1x1"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in _rows(said)["isp 1x2"]
    assert "ok" in _rows(said)["isp 1x1"]
    assert "RuntimeError: out of luck" in said


_KEYS = ["--model.checkpoint=1", "--model.checkpoint_offload", "--model.checkpoint_segment=4"]
_KEYS += ["--model.mlp_tile_tokens=64", "--model.loss_chunk_tokens=64"]
_DISTRIBUTED = ["--model.checkpoint=1", "--model.checkpoint_distribute_activations"]


def test_a_check_applies_the_keys_of_a_run() -> None:
    """Catches a key that the check loses, and tiles of which a small model has only one."""
    how = keys_from([*_KEYS, "--model.checkpoint=0.5"], "it").model
    subject = Subject.of_config(transformers.AutoConfig.for_model("llama"), how=how)
    made = subject.language_model(1.0)
    assert made.loss_chunk_tokens == 7
    kept = {"offload": True, "segment": 2}
    assert made.recomputation == Recomputation(checkpoint=0.5, mlp_tile_tokens=5, **kept)
    assert subject.language_model(0.0).recomputation == Recomputation(mlp_tile_tokens=5)


def test_keys_are_checked_in_a_pipeline_too(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches keys that a pipeline ignores, and a check that passes whatever they do."""
    words = ["check", folder, "--layouts", "2x1 ZBVZeroBubble 2x2", *_KEYS]
    assert main(words) == 0
    every = TiledModule.tiles
    monkeypatch.setattr(TiledModule, "tiles", lambda *of: [*every(*of)][:1])
    assert main(["check", folder, "--layouts", "1x1", *_KEYS]) == 1
    assert "in 4 of 4 cases" in capsys.readouterr().out


def test_impossible_layouts_are_left_out() -> None:
    """Catches `all` that stops at a layout to which a key does not apply."""
    keys = keys_from(_DISTRIBUTED, "it")
    subject = Subject.of_config(transformers.AutoConfig.for_model("gemma3_text"), 2, keys.model)
    found, left_out = layouts_of("all", subject, keys.parallel)
    assert [str(layout) for layout in found] == ["mtp 2", "mtp 4"]
    assert any("is for mtp mode" in reason for reason in left_out)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["{folder}", "--layouts", "2by4"], "'2by4' is no layout"),
        (["{folder}", "--data.seq_len", "8"], "data: no such key"),
        (["{folder}", "--model.num_layers", "3"], "model.num_layers is decided by the check"),
        (["{folder}", "--parallel.tensor.size", "2"], "the checked layouts set sizes"),
        (["{folder}", "--model.checkpoint_offload"], "set model.checkpoint above 0"),
        (
            ["{folder}", "--layouts", "2x1", *_DISTRIBUTED],
            "model.checkpoint_distribute_activations is for mtp mode",
        ),
        (["{folder}/empty"], "has no config.json"),
        (["{folder}/unknown"], "model_type 'unheard_of'"),
        (["{folder}/own"], "XLNetLMHeadModel computes attention in its own code"),
        (["{folder}/foreign"], "transformers cannot build a small model of type blt"),
        ([QUICKSTART, "--layouts", "1x2", "--optimizer.lr", "0"], "optimizer.lr"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    words: list[str], reason: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, and an error that comes only after ranks have started."""
    (Path(folder) / "empty").mkdir()
    (Path(folder) / "unknown").mkdir()
    (Path(folder) / "unknown" / "config.json").write_text('{"model_type": "unheard_of"}')
    transformers.XLNetConfig().save_pretrained(Path(folder) / "own")
    transformers.BltConfig().save_pretrained(Path(folder) / "foreign")
    assert main(["check", *(word.format(folder=folder) for word in words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (error,) = (line for line in said.err.splitlines() if not line.startswith("checking "))
    assert error.startswith("error: ")
    assert reason in error


def test_small_models_keep_a_layer_of_each_kind() -> None:
    """Catches a small model without the difficult layers: rotary or not, dense or experts."""

    def small(kind: str, **keys: object) -> object:
        return tiny_config(transformers.AutoConfig.for_model(kind, **keys))

    assert small("smollm3").no_rope_layers == [1, 0]
    assert small("gemma3_text").layer_types == ["sliding_attention", "full_attention"]
    deep = small("deepseek_v3")
    assert (deep.num_hidden_layers, deep.first_k_dense_replace) == (2, 1)
    mixed = small("qwen3_moe", mlp_only_layers=[5], decoder_sparse_step=1)
    assert (mixed.num_hidden_layers, mixed.mlp_only_layers) == (2, [1])
    shared = small("mistral")
    assert shared.num_attention_heads // shared.num_key_value_heads == 4
    assert small("gpt2").resid_pdrop == 0


@pytest.mark.parametrize(("kv_heads", "is_checked"), [(8, True), (4, True), (6, False), (2, False)])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_small_model_has_heads_for_the_layouts_of_the_large_one(
    kv_heads: int, is_checked: bool, is_decoder: bool
) -> None:
    """Catches layouts that a run refuses, and layouts left out because the copy has fewer heads."""
    heads = {"num_attention_heads": 24, "num_key_value_heads": kv_heads}
    subject = (
        Subject.of_decoder(ModelConfig(num_heads=24, num_kv_heads=kv_heads, head_dim=8))
        if is_decoder
        else Subject.of_config(transformers.AutoConfig.for_model("mistral", head_dim=8, **heads))
    )
    found, left_out = layouts_of("all", subject, ParallelConfig())
    assert {f"{mode} 4" in map(str, found) for mode in ("mtp", "msp", "fsp")} == {is_checked}
    assert ["and 2 KV heads" in text for text in left_out] == [True] * (not is_checked)


def test_no_gradient_of_a_small_model_is_zero(folder: str) -> None:
    """Catches initial weights with which a lost gradient would not show."""
    from isp.parity.subjects import read_folder

    torch.manual_seed(0)
    check = Check(Subject.of_config(read_folder(Path(folder))), [Layout(1, 1)])
    largest = {n: g.abs().max().item() for n, g in check.references[True].gradients.items()}
    assert min(largest.values()) > 1e-3 * max(largest.values())


class _Ranked(Own):
    """A model with different results on each rank."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().forward(ids, positions) * (1 + rank)


def test_a_users_module_can_be_checked() -> None:
    """Catches a module that the check changes, and a wrong module that passes."""
    model = Own(dropout=0.3)
    before = copy.deepcopy(model.state_dict())
    found = isp.check(model, "2x1,2x2")
    assert found.agrees
    assert "all 2 layouts agree" in str(found)
    assert [str(verdict.layout) for verdict in found.verdicts] == ["isp 2x1", "isp 2x2"]
    assert type(model) is Own
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"(?s)isp 2x1 .*DIFFERS.*1 of 1 layout differs"):
        isp.check(_Ranked(), "2x1")


def test_a_transformers_model_is_checked_as_a_small_copy_unless_subclassed() -> None:
    """Catches a large model that is run whole, and a user's subclass of which only the base is
    checked.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shrunk, given = _subject_of(model), _subject_of(_derived(model))
    assert shrunk.name == "llama"
    assert sum(p.numel() for p in shrunk.model.parameters()) < 50_000
    assert given.name == "Derived"


def _derived(model: Any) -> Any:
    model.__class__ = type("Derived", (type(model),), {})
    return model


def _few_positions() -> nn.Module:
    model = Own()
    model.positions = nn.Embedding(8, 32)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Own().to("meta"), "make it on the CPU"),
        (
            _few_positions,
            "Own alone, without a layout, fails on sequences of 48 tokens: pass a model",
        ),
    ],
)
def test_modules_that_cannot_be_checked_are_refused(
    make: Callable[[], nn.Module], said: str
) -> None:
    """Catches an error that does not say what to pass instead."""
    with pytest.raises(ValueError, match=said):
        isp.check(make(), "2x1")
