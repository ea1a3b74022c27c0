"""MFU of a training step on one GPU, beside the same model in plain transformers.

    python tools/bench_mfu.py --presets qwen3-0.6b --lengths 2048 8192 32768
    python tools/bench_mfu.py --presets llama3.1-8b --layers 4 --lengths 8192 32768 131072

All begin with the weights of one folder and train on the same row, one document, in turn, a step
each, the first one rotating. A step is forward, backward, clipping and AdamW in bfloat16. Ours has
float32 gradients and master weights and its loss in float32; that of transformers is the least that
people write: all in bfloat16, attention by flash_attention_2 where it is installed, else sdpa. From
`--recompute-from` tokens on both recompute all blocks.

MFU is `metrics.peak_tflops`' share of the model's FLOPs: 6 x matmul parameters x tokens, attention
by half the square of the row, recomputation not counted. Who runs out of memory drops out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_hf import Step, ours, plain

from isp.comm import Mesh
from isp.comm.cuda import expand_segments
from isp.config import JobConfig, load_config
from isp.data.batch import MicroBatch
from isp.metrics import device_name, peak_tflops
from model.config import ModelConfig
from model.huggingface import config_json
from model.presets import PRESETS

OURS, PLAIN = "isp", "transformers"
TOLERANCE = 0.02
"""Relative, of the losses: bfloat16 keeps 8 bits."""


def write_folder(folder: Path, preset: str, layers: int | None, device: torch.device) -> int:
    """A folder of random weights for transformers; the number of its layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(PRESETS[preset])
    sizes["num_layers"] = layers or sizes["num_layers"]
    sizes.pop("rope_scaling", None)  # of rows longer than the model was made for
    written = config_json(ModelConfig(**sizes), dtype="bfloat16", context=2**20)
    (folder / "config.json").write_text(json.dumps(written))
    with device:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(sizes["num_layers"])


def job(folder: Path, tokens: int, device: torch.device, again: bool, *keys: str) -> JobConfig:
    """A run of the weights in `folder` on rows of so many tokens."""
    path = folder / "job.json"
    path.write_text(
        json.dumps(
            {
                "model": {"init_from": str(folder), "checkpoint": float(again)},
                "data": {"source": str(folder), "seq_len": tokens},
                "training": {"device": device.type, "dtype": "bfloat16"},
                "optimizer": {"lr": 1e-4},
            }
        )
    )
    return load_config(path, [f"--{key}" for key in keys])


def row(config: JobConfig, device: torch.device) -> MicroBatch:
    """One document."""
    torch.manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (1, config.data.seq_len + 1))
    positions = torch.arange(config.data.seq_len)[None]
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
    return batch.to(device)


class Bench:
    """Steps of the same model on the same row, by name, and how long they took."""

    def __init__(self, makers: dict[str, Callable[[], Step]], device: torch.device) -> None:
        self.device = device
        self.steps: dict[str, Step] = {}
        self.losses: dict[str, float] = {}
        self.faults: list[str] = []
        self.seconds: dict[str, list[float]] = {name: [] for name in makers}
        for name, make in makers.items():
            self._try(name, lambda name=name, make=make: self._begin(name, make))

    def _begin(self, name: str, make: Callable[[], Step]) -> None:
        self.steps[name] = make()
        self.losses[name] = self.steps[name]()
        self.steps[name]()

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
            return
        except torch.OutOfMemoryError:
            self.steps.pop(name, None)
            self.seconds[name] = []
        gc.collect()
        torch.cuda.empty_cache()

    def measure(self, rounds: int) -> None:
        """Time each so many times; their first losses have to agree."""
        if len(self.losses) > 1:
            first, *others = self.losses.values()
            if max(abs(other / first - 1) for other in others) > TOLERANCE:
                self.faults.append(f"the losses differ: {self.losses}")
        for index in range(rounds):
            names = list(self.steps)
            turn = index % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                self._try(name, lambda name=name: self._time(name))

    def _time(self, name: str) -> None:
        begin = time.perf_counter()
        self.steps[name]()  # it gives its loss, so it has waited for the device
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name].append(time.perf_counter() - begin)


def measure(folder: Path, tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for each, at one length."""
    device = torch.device(options.device)
    again = tokens >= options.recompute_from
    config = job(folder, tokens, device, again)
    batch = row(config, device)
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn")
    kernel = "flash_attention_2" if flash else "sdpa"

    def of(*keys: str) -> Callable[[], Step]:
        own = job(folder, tokens, device, again, *keys)
        return lambda: ours(own, batch, Mesh(own.topology(1), 0))

    makers = {OURS: of(), **{f"{OURS}, {key}": of(key) for key in options.also}}
    makers[f"{PLAIN}, {kernel}"] = lambda: plain(folder, config, batch, kernel)
    bench = Bench(makers, device)
    bench.measure(options.rounds)
    options.faults += bench.faults
    flops = config.language_model.flops([tokens])
    peak = peak_tflops(device_name(device))
    found = []
    for name, seconds in bench.seconds.items():
        one = {"who": name, "tokens": tokens, "recompute": again, "ms": None, "mfu": None}
        if seconds:
            taken = statistics.median(seconds)
            one |= {"ms": taken * 1e3, "tflops": flops / taken / 1e12}
            one["mfu"] = flops / taken / 1e12 / peak if peak else None
        found.append(one)
    return found


def show(model: str, one: dict[str, Any]) -> None:
    """A line of the table."""
    begin = f"| {model} | {one['tokens']:,} | {'yes' if one['recompute'] else 'no'} | {one['who']}"
    if one["ms"] is None:
        print(f"{begin} | out of memory | | |", flush=True)
        return
    mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
    rate = one["tokens"] / one["ms"] * 1e3
    print(f"{begin} | {one['ms']:.1f} | {rate:,.0f} | {mfu} |", flush=True)


def main() -> int:
    """Measure every preset at every length; 1 if losses differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["qwen3-0.6b"])
    parser.add_argument("--layers", type=int, help="of the presets, in place of all")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--also", nargs="+", default=[], metavar="KEY=VALUE", help="ours so, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute-from", type=int, default=65536, metavar="TOKENS")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    options.faults = []
    device = torch.device(options.device)
    if device.type == "cuda":
        expand_segments()
    print(f"{device_name(device)}, torch {torch.__version__}, bfloat16, one row of one document\n")
    print("| model | tokens | recompute | who | ms a step | tokens/s | MFU |")
    print("|---|---:|---|---|---:|---:|---:|")
    found = []
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as name:
            layers = write_folder(Path(name), preset, options.layers, device)
            for tokens in options.lengths:
                gc.collect()
                for one in measure(Path(name), tokens, options):
                    model = f"{preset}, {layers} layers"
                    show(model, one)
                    found.append({"model": model, **one})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print("\n".join(options.faults))
    return int(bool(options.faults))


if __name__ == "__main__":
    sys.exit(main())
