"""Print facts about a machine with a GPU: memory, versions, programs, and how long imports take.

    python tools/gpu_facts.py --device cuda

What could hang is looked up in a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_steps import write_whole

PACKAGES = (
    *("torch", "triton", "transformers", "numpy", "pydantic", "einops", "peft", "accelerate"),
    *("safetensors", "tokenizers", "flash-attn", "fla-core"),
    *("pytest", "pytest-timeout", "pytest-xdist"),
)
PROGRAMS = ("gcc", "nvcc", "nvidia-cuda-mps-control", "ip")
GPU = (
    "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current,power.limit,"
    "clocks.sm,clocks.max.sm,clocks.max.mem"
)
FIRST_KERNEL = (
    "import torch; x = torch.ones(1, device='cuda') + 1; print(x.item(), 'NCCL',"
    " torch.cuda.nccl.version(), 'cuDNN', torch.backends.cudnn.version())"
)


def timed(command: list[str], limit: float = 20.0) -> str:
    """Run a command for at most `limit` seconds; return the seconds it took and its output.

    If the command fails, the end of its error output replaces the output. If it cannot be started,
    or is stopped at the limit, the name of the exception does.
    """
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        found = type(error).__name__
    else:
        found = (done.stdout if done.returncode == 0 else done.stderr[-300:]).strip()
    return f"{time.perf_counter() - begin:.1f} s {found}".rstrip()


def versions() -> str:
    """Return the installed version of each of `PACKAGES`; - if it is not installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} -")
    return ", ".join(found)


def main() -> None:
    """Print each fact as soon as it is known, and write those known so far to the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the facts")
    options = parser.parse_args()
    python = [sys.executable, "-c"]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts = {
        "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "ulimit -l": lambda: "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} B",
        "programs": lambda: ", ".join(name for name in PROGRAMS if shutil.which(name)),
        "packages": versions,
        "host name": lambda: timed([*python, "import socket; print(socket.getfqdn())"], 10),
        "free -g": lambda: timed(["free", "-g"]),
        "import torch": lambda: timed([*python, "import torch"]),
    }
    if options.device == "cuda":
        facts["nvidia-smi"] = lambda: timed(["nvidia-smi", f"--query-gpu={GPU}", "--format=csv"])
        facts["first kernel"] = lambda: timed([*python, FIRST_KERNEL])
        facts["import isp"] = lambda: timed([*python, "import isp.config, isp.train.run"])
        facts["import transformers"] = lambda: timed([*python, "import transformers"])
    found: dict[str, str] = {}
    for name, look in facts.items():
        found[name] = look()
        print(f"{name}: {found[name]}", flush=True)
        if options.json:
            write_whole(options.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
