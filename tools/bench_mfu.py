"""Measure the MFU of a training step on one GPU, compared with the model in plain transformers.

    python tools/bench_mfu.py --presets qwen3-0.6b --lengths 2048 8192 32768
    python tools/bench_mfu.py --presets llama3.1-8b --layers 4 --lengths 8192 32768 131072

All start from the weights of one folder, and train on the same row of one document. A step is
forward, backward, clipping and AdamW, computed in bfloat16. ISP has float32 gradients, master
weights and loss. `transformers` has everything in bfloat16, as in a minimal script. Under torch's
fully_shard (on one rank) it has float32 gradients and master weights, as ISP does. The attention of
transformers is flash_attention_2 if it is installed, else sdpa. From `--recompute-from` tokens on,
all recompute all blocks.

Each way has the device alone: it is built, makes two steps, is timed for `--rounds` steps and at
least two seconds, and is freed before the next one. If one fails, its line shows the error. Since
they do not take turns, ISP is measured again at the end on a GPU, to show drift of the clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_hf import Step, ours, plain
from bench_parts import OUT_OF_MEMORY, fault_of, free_memory, prepare, save
from table_parser import table_parser
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isp.config import JobConfig, load_config
from isp.core.comm import Mesh
from isp.core.micro_batch import MicroBatch
from isp.metrics import device_name, peak_tflops
from isp.step.job_models import trained_model
from model.config import ModelConfig
from model.huggingface import config_json
from model.presets import PRESETS

COLUMNS = """\
recompute   whether all blocks are recomputed in backward
who         `isp`; `isp, KEY=VALUE` (--also); transformers with the named attention, also under
            fully_shard; `isp, again`: `isp` timed once more
ms a step   median
MFU         FLOPs of the model / (time x peak FLOP/s of the device). FLOPs are 6 x matmul parameters
            x tokens, and attention with half the square of the row; recomputation does not count
peak GiB    most memory of torch's allocator
"""
OURS, PLAIN, SHARDED = "isp", "transformers", "transformers, fully_shard"
TOLERANCE = 0.02
"""The largest relative difference of first losses: bfloat16 has 8 bits."""
DENSE = [name for name, sizes in PRESETS.items() if "num_experts" not in sizes]
LEAST_SECONDS = 2.0
"""The least time for which a way is timed: the clock of a GPU needs a while to settle."""


def sizes_of(preset: str, layers: int | None) -> dict[str, Any]:
    """Return the model keys of a preset, with `layers` layers unless that is None.

    The key rope_scaling is left out.
    """
    sizes = {**PRESETS[preset], "num_layers": layers or PRESETS[preset]["num_layers"]}
    sizes.pop("rope_scaling", None)
    return sizes


def write_folder(folder: Path, sizes: dict[str, Any], device: torch.device) -> None:
    """Write a model with random weights into `folder`, by transformers' `save_pretrained`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    written = config_json(ModelConfig(**sizes), dtype="bfloat16", context=2**20)
    (folder / "config.json").write_text(json.dumps(written))
    with device:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def job(
    folder: Path,
    sizes: dict[str, Any],
    tokens: int,
    device: torch.device,
    again: bool,
    *keys: str,
) -> JobConfig:
    """Return the configuration that trains ISP's decoder on rows of `tokens`.

    `again`: recompute all blocks. `keys` are further settings, such as "model.compile=false".
    """
    path = folder / "job.json"
    path.write_text(
        json.dumps(
            {
                "model": {**sizes, "checkpoint": float(again)},
                "data": {"source": str(folder), "seq_len": tokens},
                "training": {"device": device.type, "dtype": "bfloat16"},
                "optimizer": {"lr": 1e-4},
            }
        )
    )
    return load_config(path, [f"--{key}" for key in keys])


def row(config: JobConfig, device: torch.device) -> MicroBatch:
    """Return a row of one document of random tokens, on `device`."""
    torch.manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (1, config.data.seq_len + 1))
    positions = torch.arange(config.data.seq_len)[None]
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
    return batch.to(device)


def shard(model: nn.Module, device: torch.device) -> None:
    """Apply fully_shard on one rank, with float32 weights and gradients and bfloat16 compute.

    The bfloat16 weights stay between forward and backward, as in ISP on one rank.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    blocks: Any = model.model.layers
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def timed(make: Callable[[], Step], rounds: int, device: torch.device) -> dict[str, Any]:
    """Build a training step and time it; return loss, times and memory, by name."""
    step = make()
    loss = step()
    step()  # a second step to warm up, since the first allocates buffers and compiles
    taken: list[float] = []
    while len(taken) < rounds or (device.type == "cuda" and sum(taken) < LEAST_SECONDS):
        begin = time.perf_counter()
        step()  # waits for the device, since it returns the loss as a number
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    ms = statistics.median(taken) * 1e3
    return {"ms": ms, "loss": loss, "peak_gib": peak, "seconds": taken}


def measure(
    folder: Path, sizes: dict[str, Any], tokens: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Time each way to train at one length; yield a line of the table for each."""
    device = torch.device(options.device)
    again = tokens >= options.recompute_from
    config = job(folder, sizes, tokens, device, again)
    batch = row(config, device)
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn")
    kernel = "flash_attention_2" if flash else "sdpa"

    def of(*keys: str) -> Step:
        own = job(folder, sizes, tokens, device, again, *keys)
        return ours(own, batch, Mesh(own.topology(1), 0), folder)

    makers: dict[str, Callable[[], Step]] = {OURS: of}
    makers |= {f"{OURS}, {key}": partial(of, key) for key in options.also}
    makers[f"{PLAIN}, {kernel}"] = partial(plain, folder, config, batch, kernel)
    makers[f"{SHARDED}, {kernel}"] = partial(
        plain, folder, config, batch, kernel, shard=lambda model: shard(model, device)
    )
    if device.type == "cuda":
        makers[f"{OURS}, again"] = of
    flops = trained_model(config).flops([tokens])
    peak, first = peak_tflops(device_name(device)), None
    for name, make in makers.items():
        one: dict[str, Any] = {"who": name, "tokens": tokens, "recompute": again, "fault": ""}
        free_memory()
        try:
            one |= timed(make, options.rounds, device)
        except Exception as error:
            one["fault"] = fault_of(error)
        else:
            one["tflops"] = flops / one["ms"] / 1e9
            one["mfu"] = one["tflops"] / peak if peak else None
            first = one["loss"] if first is None else first
            if abs(one["loss"] / first - 1) > TOLERANCE:
                one["fault"] = f"the first loss is {one['loss']:.4f}, not {first:.4f}"
        yield one


def show(one: dict[str, Any]) -> None:
    """Print a line of the table."""
    again = "yes" if one["recompute"] else "no"
    begin = f"| {one['model']} | {one['tokens']:,} | {again} | {one['who']}"
    if "ms" not in one:
        print(f"{begin} | {one['fault']} | | | |", flush=True)
        return
    mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
    rate = one["tokens"] / one["ms"] * 1e3
    numbers = f"{one['ms']:.1f} | {rate:,.0f} | {mfu} | {one['peak_gib']:.1f}"
    print(f"{begin} | {numbers} | {one['fault']}", flush=True)


def main() -> int:
    """Measure every preset at every length; return 1 if losses differ or a way failed."""
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--presets", nargs="+", choices=DENSE, default=["qwen3-0.6b"])
    parser.add_argument("--layers", type=int, help="number of layers, instead of the preset's")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of the row"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="measure ISP with this setting, too",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way")
    parser.add_argument(
        "--recompute-from",
        type=int,
        default=65536,
        metavar="TOKENS",
        help="length from which all blocks are recomputed",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    prepare(device)
    print(f"{device_name(device)}, torch {torch.__version__}, bfloat16, one row of one document\n")
    print(COLUMNS)
    print("| model | tokens | recompute | who | ms a step | tokens/s | MFU | peak GiB |")
    print("|---|---:|---|---|---:|---:|---:|---:|")
    found: list[dict[str, Any]] = []
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as name:
            sizes = sizes_of(preset, options.layers)
            write_folder(Path(name), sizes, device)
            for tokens in options.lengths:
                for one in measure(Path(name), sizes, tokens, options):
                    found.append({"model": f"{preset}, {sizes['num_layers']} layers", **one})
                    show(found[-1])
                    save(found, options.json)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(one["fault"] not in ("", OUT_OF_MEMORY) for one in found))


if __name__ == "__main__":
    sys.exit(main())
