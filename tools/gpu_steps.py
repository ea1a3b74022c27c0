"""The steps of `bash tools/gpu.sh`, in the order of what they tell.

A step prints what it finds. Those that want several GPUs are left out on one.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["STEPS", "Step", "words"]

CHECK = "{python} tools/gpu_checks.py"
QWEN = "configs/one_gpu.yaml --training.device cuda"
SMALL = "configs/quickstart.yaml --model.num_layers 1 --model.sliding_window null --data.seq_len 64"
RANKS = (
    "{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {ranks}"
)
LLAMA = "--model.preset llama3.1-8b --optimizer.offload_states"


class Step(NamedTuple):
    """A program, on GPUs and, much smaller, on a CPU; `{..}` are filled in by `words`."""

    name: str
    asks: str
    """The question that it answers."""
    minutes: float
    """The most it may take."""
    command: str
    toy: str
    """What it is on a CPU; empty: nothing."""
    gpus: int = 1
    """The least it needs."""
    default: bool = True
    """Whether it is run unless it is named."""


def check(name: str, asks: str, minutes: float) -> Step:
    """One of `gpu_checks.py`."""
    both = f"{CHECK} {name} --json {{json}} --device"
    return Step(name, asks, minutes, f"{both} cuda", f"{both} cpu")


PYTEST = "{python} -m pytest -m gpu -q -p no:cacheprovider --continue-on-collection-errors"
HF = "{python} tools/bench_mfu.py --json {json}"
MEMORY = "{python} tools/bench_memory.py --json {json}"

STEPS = (
    Step(
        "tests",
        "do the tests pass that need a GPU",
        6,
        PYTEST,
        f"{PYTEST} --collect-only tests/test_rng.py tests/train/test_gpu.py",
    ),
    check("parity", "are 20 losses in float32 those of a CPU", 2),
    Step(
        "mfu",
        "how fast is a step of qwen3-0.6b, beside transformers: the MFU",
        5,
        f"{HF} --device cuda --presets qwen3-0.6b --lengths 2048 8192 32768"
        " --also model.compile=false",
        f"{HF} --device cpu --presets tiny --lengths 64 --rounds 1",
    ),
    Step(
        "host",
        "what does the host of this machine need for a layer, beside plain torch",
        2,
        "{python} tools/bench_host.py --rounds 10",
        "{python} tools/bench_host.py --rounds 1",
    ),
    Step(
        "modes",
        "what does communication cost in the four modes",
        6,
        f"{{python}} -m isp profile {QWEN} --parallel.tensor.size {{ranks}} --nproc {{ranks}}"
        " --parallel.weight.size {ranks} --job.dump_folder {folder}/modes --html",
        f"{{python}} -m isp profile {SMALL} --nproc 2 --parallel.weight.size 2 --steps 1"
        " --job.dump_folder {folder}/modes",
        gpus=2,
    ),
    Step(
        "exposed",
        "is the exposed time of a profile that of torch.profiler's trace",
        4,
        "{python} tools/check_with_torch.py {folder}/modes",
        "",
        gpus=2,
    ),
    Step(
        "fully_shard",
        "is a step with weights split over the GPUs ahead of torch's fully_shard",
        4,
        f"{RANKS} tools/bench_fully_shard.py --json {{json}}",
        f"{RANKS} tools/bench_fully_shard.py --json {{json}} --device cpu --quick",
        gpus=2,
    ),
    Step(
        "mfu_8b",
        "what is the MFU of four of the 32 layers of llama3.1-8b",
        6,
        f"{HF} --device cuda --presets llama3.1-8b --layers 4 --lengths 8192 32768 131072",
        f"{HF} --device cpu --presets tiny --layers 1 --lengths 64 --rounds 1",
    ),
    check("syncs", "what makes the host wait for the device", 2),
    check("attention", "how fast is each attention backend at 131,072 tokens", 3),
    check("kernels", "which kernels is a step made of, and is the device ever idle", 2),
    check("deterministic", "do two deterministic runs give the same bits", 2),
    Step(
        "memory",
        "does a rung of the memory ladder take what isp plan says, of four layers of llama3.1-8b",
        6,
        f"{MEMORY} --device cuda --lengths 65536,131072 {LLAMA} --model.num_layers 4",
        f"{MEMORY} --lengths 64,128 --model.num_layers 2 --rungs 3",
    ),
    check("loss", "what memory does the loss take", 2),
    Step(
        "collective_2",
        "what does a channel add to a collective between GPUs",
        2,
        f"{RANKS} tools/gpu_checks.py collective --device cuda",
        f"{RANKS} tools/gpu_checks.py collective --device cpu",
        gpus=2,
    ),
    Step(
        "calibrate_2",
        "how fast are the links between GPUs, for isp plan",
        3,
        "{python} -m isp calibrate --nproc {ranks}",
        "{python} -m isp calibrate --nproc 2 --quick",
        gpus=2,
    ),
    check("efficiencies", "what shares of its peaks does the device reach, for isp plan", 2),
    Step(
        "calibrate",
        "what does isp calibrate find",
        2,
        "{python} -m isp calibrate",
        "{python} -m isp calibrate --quick",
    ),
    Step(
        "slices",
        "what do kernels lose by the slices of context ranks",
        2,
        "{python} tools/bench_slices.py --device cuda --tokens 32768",
        "{python} tools/bench_slices.py --tokens 64 --rounds 1 --heads 2",
    ),
    check("collective", "what does a channel add to a collective on the host", 1),
    Step(
        "profile",
        "what does isp profile say of one rank",
        2,
        f"{{python}} -m isp profile {QWEN} --modes isp --steps 3"
        " --job.dump_folder {folder}/profile",
        f"{{python}} -m isp profile {SMALL} --steps 1 --job.dump_folder {{folder}}/profile"
        " --parallel.tensor.size 1 --parallel.weight.size 1 --modes isp --no-torch",
    ),
    Step(
        "memory_300k",
        "do 300,000 tokens of eight layers of llama3.1-8b fit as planned",
        10,
        f"{MEMORY} --device cuda --lengths 300032 {LLAMA} --model.num_layers 8"
        " --only 'inputs on the host'",
        f"{MEMORY} --lengths 256 --model.num_layers 2 --only 'recompute all blocks'",
        default=False,
    ),
    Step(
        "nccl_ub",
        "what do buffers that are registered with NCCL win (needs NVLink SHARP)",
        3,
        f"{{python}} -m isp profile {QWEN} --parallel.tensor.size {{ranks}} --nproc {{ranks}}"
        " --modes isp --parallel.weight.size {ranks} --parallel.weight.nccl_ub"
        " --job.dump_folder {folder}/nccl_ub",
        "",
        gpus=2,
        default=False,
    ),
)


def words(step: Step, device: str, gpus: int, numbers: Path, folder: Path) -> list[str]:
    """The command line of a step on so many GPUs (two ranks on a CPU)."""
    filled = {
        "{python}": sys.executable,
        "{json}": str(numbers),
        "{folder}": str(folder),
        "{ranks}": str(max(2, gpus) if device == "cuda" else 2),
    }

    found = shlex.split(step.command if device == "cuda" else step.toy)
    for name, value in filled.items():
        found = [word.replace(name, value) for word in found]
    return found
