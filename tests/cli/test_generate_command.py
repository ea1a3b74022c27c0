"""`isp generate` writes the text that `generate` of transformers writes for the exported
weights.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from isp.cli import main
from isp.cli.generate_command import _chosen, _Streamer
from isp.config.job import load_config
from isp.data.tokenizer import ByteTokenizer, HFTokenizer
from isp.models.huggingface.tiny import kept_in_float64
from isp.train.run import main as train
from tests.evaluation.models import saved
from tests.models.folders import write_folder
from tests.models.huggingface.test_vision_language import _write as write_vision

NEW, VOCAB, END = 12, 272, 271
PROMPTS = "t5 t3 t9 t100", "t7"
JOB = """
job: {{name: {name}, dump_folder: {folder}/out}}
model: {model}
data: {{source: {folder}/text.txt, tokenizer: {folder}/tokenizer.json, seq_len: 32, micro_bsz: 2}}
optimizer: {{lr: 1.0e-2}}
training: {{steps: 4, device: cpu, dtype: float64, seed: 3}}
"""
DECODER = (
    "{vocab_size: 272, hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2,"
    " intermediate_size: 48, init_std: 0.3, NAMED}"
)
RUNS = {
    "decoder": DECODER.replace("NAMED", "tie_embeddings: true"),
    "experts": DECODER.replace("NAMED", "num_experts: 4, experts_per_token: 2"),
    "qwen3_next": "{hf: HF, adapter: {r: 4, target_modules: [q_proj, in_proj_qkvz, out_proj]}}",
    "qwen3_moe": "{hf: HF}",
    "gemma3": "{hf: HF}",
}
"""Runs of the decoder, one of an adapter on a hybrid, and of folders: with experts, with vision."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer of one word per token and a text of these words."""
    found = tmp_path_factory.mktemp("runs")
    words = {f"t{i}": i for i in range(VOCAB - 1)} | {"</s>": END}
    tokenizer = Tokenizer(WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(found / "tokenizer.json"))
    drawn = random.Random(0)
    (found / "text.txt").write_text(" ".join(f"t{drawn.randrange(250)}" for _ in range(2000)))
    return found


def run_of(kind: str, folder: Path) -> Path:
    """Return the folder of a run of `kind`, made once."""
    run = folder / "out" / kind / "latest"
    if not run.exists():
        model = RUNS[kind]
        if "HF" in model:
            base = folder / f"{kind}_base"
            if kind == "gemma3":
                write_vision(base, kind)
            else:
                write_folder(base, kind, eos_token_id=END)
            model = model.replace("HF", str(base))
        job = folder / f"{kind}.yaml"
        job.write_text(JOB.format(name=kind, folder=folder, model=model))
        train(load_config(job))
    return run


def exported(kind: str, folder: Path) -> Path:
    """Return the same model as a Hugging Face folder, made once."""
    found = folder / f"{kind}_exported"
    if not found.exists():
        assert main(["checkpoint", "export", str(run_of(kind, folder)), "--hf", str(found)]) == 0
    return found


def words_of(model: Any, prompt: str, **options: Any) -> str:
    """Return the text that `generate` of transformers writes."""
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    found = model.generate(input_ids=ids, attention_mask=mask, **{**settings, **options})
    return " ".join(f"t{token}" for token in found[0, ids.shape[1] :].tolist() if token != END)


def loaded(folder: Path) -> Any:
    """Return the model that transformers loads from an export; an adapter is loaded with its
    base.
    """
    from transformers import AutoModelForCausalLM

    return kept_in_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["generate", *words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("kind", RUNS)
def test_runs_and_folders_generate_the_text_of_transformers(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a weight in the wrong place, a weight left as in the base model, and a wrong
    cache.
    """
    run, there = run_of(kind, folder), exported(kind, folder)
    model = loaded(there)
    expected = [words_of(model, prompt) for prompt in PROMPTS]
    assert len({word for text in expected for word in text.split()}) > 1, expected
    if (base := folder / f"{kind}_base").exists():
        assert expected != [words_of(loaded(base), prompt) for prompt in PROMPTS], "it was trained"
    pairs = enumerate(zip(PROMPTS, expected, strict=True), 1)
    shown = [f"--- {number} of 2: {prompt}\n{text}\n" for number, (prompt, text) in pairs]
    words = ["--dtype=float64", f"--max-new-tokens={NEW}", f"--tokenizer={folder}/tokenizer.json"]
    for path in (run, there):
        code, out, err = said(capsys, str(path), *words, *(f"--prompt={p}" for p in PROMPTS))
        assert (code, out) == (0, "".join(shown)), err
        assert "float64, cpu" in err


def test_the_decoder_generates_without_optional_packages(folder: Path) -> None:
    """Catches an import that fails in the quickstart, which does not install the extra `hf`."""
    words = ["generate", str(run_of("decoder", folder)), "--prompt=a", "--tokenizer=bytes"]
    code = (
        "import sys\n"
        "for name in ('transformers', 'tokenizers', 'peft', 'accelerate'):\n"
        "    sys.modules[name] = None\n"
        "from isp.cli import main\n"
        f"sys.exit(main({[*words, '--max-new-tokens=3']}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_a_device_map_changes_no_text(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches weights of a run, or of its adapter, that do not follow the device map."""
    pytest.importorskip("accelerate")
    words = [str(run_of(kind, folder)), f"--prompt={PROMPTS[0]}", f"--max-new-tokens={NEW}"]
    _, expected, _ = said(capsys, *words)
    code, out, err = said(capsys, *words, "--device-map=auto")
    assert (code, out) == (0, expected), err


def test_eos_tokens_of_generation_config_end_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an ignored eos_token_id of generation_config.json, and sampling settings that are
    used.
    """
    there = exported("qwen3_moe", folder)
    whole = words_of(loaded(there), PROMPTS[0]).split()
    end = next(i for i, word in enumerate(whole) if i and word not in whole[:i])
    settings = {"eos_token_id": [END, int(whole[end][1:])], "do_sample": True, "temperature": 9.0}
    (there / "generation_config.json").write_text(json.dumps(settings))
    words = ["--dtype=float64", f"--max-new-tokens={NEW}", f"--prompt={PROMPTS[0]}"]
    code, out, err = said(capsys, str(there), *words)
    (there / "generation_config.json").unlink()
    assert (code, out) == (0, " ".join(whole[:end]) + "\n"), err


@pytest.mark.parametrize("kind", ["decoder", "qwen3_moe"])
def test_sampling_follows_the_seed(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a seed without effect, and --top-k 1 or a tiny --top-p that is not greedy
    decoding.
    """
    run = str(run_of(kind, folder))
    words = [run, "--prompt=t5 t3", f"--max-new-tokens={NEW}", "--temperature=1.5", "--top-k=50"]
    _, first, _ = said(capsys, *words, "--seed=5")
    assert said(capsys, *words, "--seed=5")[1] == first
    assert said(capsys, *words, "--seed=6")[1] != first
    _, greedy, _ = said(capsys, run, "--prompt=t5 t3", f"--max-new-tokens={NEW}")
    for few in ("--top-k=1", "--top-p=1e-9"):
        assert said(capsys, *words[:4], few)[1] == greedy


def test_the_decoder_samples_as_transformers_does() -> None:
    """Catches options applied in another order, and a top-p share that is counted differently."""
    from argparse import Namespace

    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    assert GenerationConfig(top_k=0).top_k == 0
    logits = torch.randn(1, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    warped = TopKLogitsWarper(9)(None, TemperatureLogitsWarper(1.7)(None, logits))  # type: ignore[arg-type]
    warped = TopPLogitsWarper(0.8)(None, warped)  # type: ignore[arg-type]
    possible = {*warped.isfinite()[0].nonzero().flatten().tolist()}
    assert 1 < len(possible) < 9
    args = Namespace(temperature=1.7, top_k=9, top_p=0.8)
    torch.manual_seed(0)
    drawn = torch.tensor([_chosen(logits, args).item() for _ in range(4000)])
    assert {*drawn.tolist()} == possible
    shares = torch.bincount(drawn.long(), minlength=20) / len(drawn)
    # Six standard errors of a share near one half.
    assert (shares - warped.softmax(-1)[0]).abs().max() < 6 * 0.5 / 4000**0.5


def test_text_is_printed_while_generated_and_stays_printable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches half of a character, control codes that reach the terminal, and changed words."""
    streamer = _Streamer(ByteTokenizer(), {256})
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    expected = ""
    for piece in ("ä", "\x1b", "]0;title\x07", " https://a:b@c"):
        for byte in piece.encode():
            assert capsys.readouterr().out == expected
            streamer.put(torch.tensor([byte]))
            expected = {0xC3: "", 0xA4: "ä", 0x1B: "\\x1b", 7: "\\x07"}.get(byte, chr(byte))
    streamer.put(torch.tensor([256]))
    streamer.end()
    assert capsys.readouterr().out == f"{expected}\n"


def test_words_keep_their_spaces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches spaces lost because each token is decoded alone."""
    streamer = _Streamer(HFTokenizer(folder / "tokenizer.json"), {END})
    streamer.put(torch.tensor([[1]]))
    for token in (4, 5, END):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert capsys.readouterr().out == "t4 t5\n"


def test_faults_are_reported_in_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a traceback, or an error without the cause, for wrong options, files and models."""
    run = str(run_of("decoder", folder))
    gpt2, llama = saved("gpt2", tmp_path / "gpt2"), saved("llama", tmp_path / "llama")
    no_text, wide = tmp_path / "no_text", tmp_path / "wide.json"
    no_text.write_bytes(b"\xff")
    tokenizer = Tokenizer(WordLevel({"x": 258, "</s>": 0, "<s>": 1}, "x"))
    tokenizer.save(str(wide))
    tokenizer.post_processor = TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    tokenizer.save(str(llama / "tokenizer.json"))
    bytes_, few = ("--tokenizer", "bytes"), "--max-new-tokens=5"
    cut_off, other, broken, adapter = (tmp_path / name for name in ("cut", "other", "odd", "lora"))
    for copied in (cut_off, other, broken):
        shutil.copytree(gpt2, copied)
    weights = cut_off / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    described = json.loads((gpt2 / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**described, "n_layer": 1}))
    (broken / "config.json").write_text(json.dumps({**described, "n_layer": "two"}))
    adapter.mkdir()
    targets = {"peft_type": "LORA", "target_modules": ["none"], "r": 2}
    base = {"base_model_name_or_path": str(gpt2), "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(targets | base))
    (adapter / "adapter_model.safetensors").write_bytes(save({}))
    for words, fault in (
        ((str(tmp_path / "none"), "--prompt", "x"), "does not exist"),
        ((str(tmp_path), "--prompt", "x"), "is not a checkpoint"),
        ((str(llama), "--prompt", ""), "the prompt '' is empty"),
        ((str(llama), "--prompt", "x"), "token 258 for the prompt, but the model has only 258"),
        ((run, "--prompt", str(no_text)), "no_text is not a text file"),
        ((str(gpt2), "--prompt", "x", f"--tokenizer={wide}"), "has 259 entries, and the model 258"),
        ((run, "--prompt", "x", "--top-p", "2"), "--top-p 2.0"),
        ((run, "--prompt", "x", "--temperature", "-1"), "--temperature -1.0"),
        ((run, "--prompt", "x", "--nproc", "2"), "use --device-map auto"),
        ((run, "--prompt", "x", "--device-map", "auto"), "isp checkpoint export"),
        ((run, "--prompt", "x", "--device-map", "auto", "--device", "cpu"), "leave out --device"),
        ((str(gpt2), "--prompt", "x"), "--tokenizer"),
        ((str(cut_off), "--prompt", "x", *bytes_, few), "is damaged or cut short"),
        ((str(other), "--prompt", "x", *bytes_, few), "not of the model: transformer.h.1."),
        ((str(broken), "--prompt", "x", *bytes_), f"{broken}: "),
        ((str(adapter), "--prompt", "x", *bytes_, few), "The model's linear layers: c_attn, c_fc"),
        ((str(gpt2), "--prompt", "x" * 60, *bytes_, "--max-new-tokens", "6"), "--max-new-tokens 5"),
    ):
        code, out, err = said(capsys, *words)
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert fault in err
    code, out, err = said(capsys, str(gpt2), "--prompt", "x" * 60, *bytes_, "--max-new-tokens", "5")
    assert code == 0, err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in said(capsys, run, "--prompt", "x")[2]
