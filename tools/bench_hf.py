"""Compare a model of transformers in ISP by `model.hf`, in ISP's decoder, and in transformers.

    python tools/bench_hf.py --rounds 7

All start from the weights of one folder, and train on the same batch. They take turns, a step each,
and each round another one begins. A step is forward, backward, clipping and AdamW, in float32 on
CPU with one thread a rank. On two ranks (isp mode, tensor 2 and weight 2) plain transformers is
left out, and no transfer is in flight when a step begins or ends. ISP's decoder cannot compute a
model with experts: there, two ranks compare `model.hf` with itself at weight 1. Before anything is
timed, the losses of three steps have to agree.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from table_parser import table_parser
from torch import nn

from isp.config import JobConfig, load_config
from isp.core.comm import Mesh
from isp.core.micro_batch import MicroBatch
from isp.models.huggingface.weight_files import WeightFiles
from isp.parity.forked import run_ranks
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep, make_train_step
from isp.utils.files import read_json

SIZES = {
    "quickstart": {
        "vocab_size": 272,
        "hidden_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 432,
    },
    "hidden 512": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
    },
    "16 experts": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
}
COLUMNS = """\
losses differ by    the largest difference of the losses of three steps
pair                `model.hf`: ISP runs the modules of transformers; `own decoder`: ISP's decoder;
                    `weight 1`: model.hf with whole weights on each rank
ms                  median time of a step, of both
wall ratio          median over rounds of the pair's first time / its second time, slowest rank
processor ratio     the same of processor time, which other programs disturb less
"""
PLAIN, HF, OWN, WHOLE = "transformers", "model.hf", "own decoder", "weight 1"
TOLERANCE = 1e-5
"""The largest difference of float32 losses: sums are in another order."""
Step = Callable[[], float]
"""Makes a training step and returns its loss."""
Times = dict[str, list[tuple[float, float]]]
"""By name, for each round: seconds of wall time and of processor time."""


def write_folder(folder: Path, size: str, seq_len: int) -> None:
    """Write a Llama, or a Qwen3 with experts, with random weights, into `folder`."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    kind = Qwen3MoeConfig if "num_experts" in SIZES[size] else LlamaConfig
    config = kind(**SIZES[size], max_position_embeddings=seq_len)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def decoder_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of ISP's decoder for the Llama in `folder`."""
    found = read_json(folder / "config.json")
    same = ("vocab_size", "hidden_size", "intermediate_size")
    return {
        **{name: found[name] for name in same},
        "num_layers": found["num_hidden_layers"],
        "num_heads": found["num_attention_heads"],
        "num_kv_heads": found["num_key_value_heads"],
        "norm_eps": found["rms_norm_eps"],
        "rope_theta": found["rope_parameters"]["rope_theta"],
    }


def job(folder: Path, name: str, ranks: int, seq_len: int) -> JobConfig:
    """Return the configuration that trains the model in `folder` in the way called `name`.

    `OWN` trains ISP's decoder, `WHOLE` keeps whole weights on each rank.
    """
    weight = 1 if name == WHOLE else ranks
    values = {
        "model": decoder_keys(folder) if name == OWN else {"hf": str(folder)},
        "data": {"source": str(folder), "seq_len": seq_len},
        "parallel": {"tensor": {"size": ranks, "mode": "isp"}, "weight": {"size": weight}},
        "optimizer": {"lr": 1e-3},
        "training": {"device": "cpu", "dtype": "float32"},
    }
    path = folder / f"{name}-{ranks}-{dist.get_rank()}.yaml"
    path.write_text(json.dumps(values))
    return load_config(path)


@torch.no_grad()
def fill(train_step: TrainStep, folder: Path) -> None:
    """Copy the weights in `folder` into ISP's decoder, which names its weights as Llama does.

    The decoder must have no experts.
    """
    files = WeightFiles(folder)
    for item in train_step.built.parameters:
        item.parameter.copy_(files.read(item.name, item.layout))
    train_step.optimizer.take_up_weights()


def ours(config: JobConfig, batch: MicroBatch, mesh: Mesh, folder: Path) -> Step:
    """Build ISP's training step, as the trainer does, on the device of `batch`.

    The weights are those of `folder`.
    """
    own = config.model.hf is None
    train_step = make_train_step(
        trained_model(config),
        config,
        mesh,
        batch.tokens.device,
        initial_weights=not own,
    )
    train_step.drain()
    if own:
        fill(train_step, folder)

    def step() -> float:
        # Launch again the gathers of the first weights, which `drain` dropped after the last step.
        train_step.weights_changed()
        outcome = train_step([batch], config.optimizer.lr)
        train_step.drain()
        return outcome.loss

    return step


def plain(
    folder: Path,
    config: JobConfig,
    batch: MicroBatch,
    kernel: str | None = None,
    *,
    shard: Callable[[nn.Module], None] | None = None,
) -> Step:
    """Build a training step of the unchanged transformers model, in plain torch.

    `kernel` is its `attn_implementation`. `shard` is applied to the model first, which is then in
    float32.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, config.training.dtype) if shard is None else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=kernel
    )
    model.to(batch.tokens.device).train()
    if shard is not None:
        shard(model)
    if config.model.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    values, parameters = config.optimizer, list(model.parameters())
    # Weight decay applies to matrices only, as in ISP.
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=values.lr,
        betas=(values.beta1, values.beta2),
        eps=values.eps,
        weight_decay=values.weight_decay,
        fused=True,
    )

    def step() -> float:
        adamw.zero_grad()
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        adamw.step()
        return loss.item()

    return step


def steps_of(folder: Path, ranks: int, seq_len: int) -> dict[str, Step]:
    """Build the training step of each way, on the same batch, by name."""
    is_llama = json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    other = [OWN] if is_llama else [WHOLE] * (ranks > 1)
    jobs = {name: job(folder, name, ranks, seq_len) for name in (HF, *other)}
    torch.manual_seed(0)
    tokens = torch.randint(jobs[HF].model.vocab_size, (1, seq_len + 1))
    positions = torch.arange(seq_len).unsqueeze(0)
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
    mesh = Mesh(jobs[HF].topology(ranks), dist.get_rank())
    found = {name: ours(config, batch, mesh, folder) for name, config in jobs.items()}
    if ranks == 1:
        found[PLAIN] = plain(folder, jobs[HF], batch)
    return found


def timed(step: Step) -> tuple[float, float]:
    """Make a step on all ranks; return its seconds of wall time and of processor time."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    rank: int, folder: Path, ranks: int, options: argparse.Namespace
) -> tuple[float, Times]:
    """Return the largest difference of losses, and the times of this rank."""
    steps = steps_of(folder, ranks, options.seq_len)
    names, off = list(steps), 0.0
    for _ in range(3):
        losses = [step() for step in steps.values()]
        off = max(off, max(losses) - min(losses))
    assert off <= TOLERANCE, f"the losses differ by {off}"
    times: Times = {name: [] for name in names}
    for index in range(options.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(steps[name]))
    for name in names if options.profile else ():
        with cProfile.Profile() as profile:
            steps[name]()
        if rank == 0:
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    return off, times


def slowest(of_ranks: list[Times]) -> Times:
    """Return, for each training step compared and each round, the times of the slowest rank."""
    return {
        name: [
            (max(wall for wall, _ in of_round), max(cpu for _, cpu in of_round))
            for of_round in zip(*(times[name] for times in of_ranks), strict=True)
        ]
        for name in of_ranks[0]
    }


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of the batch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="CPU ranks")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--profile", action="store_true", help="show where a step spends its time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(COLUMNS)
    print("| model | ranks | losses differ by | pair | ms | wall ratio | processor ratio |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), size, options.seq_len)
            for ranks in options.ranks:
                of_ranks = run_ranks(
                    ranks, measure, Path(folder), ranks, options, timeout_seconds=3600.0
                )
                times = slowest([found for _, found in of_ranks])
                for a, b in combinations(times, 2):
                    show(f"| {size} | {ranks} | {of_ranks[0][0]:.0e}", (a, b), times)


def show(before: str, pair: tuple[str, str], times: Times) -> None:
    """Print the line of the table that compares `pair`; `before` are its first cells."""
    a, b = (times[name] for name in pair)
    wall, cpu = (statistics.median(x[i] / y[i] for x, y in zip(a, b, strict=True)) for i in (0, 1))
    ms = " / ".join(f"{1e3 * statistics.median(x for x, _ in of_one):.0f}" for of_one in (a, b))
    print(f"{before} | {' / '.join(pair)} | {ms} | {wall:.3f} | {cpu:.3f} |", flush=True)


if __name__ == "__main__":
    main()
