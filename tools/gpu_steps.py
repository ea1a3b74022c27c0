"""The steps of `bash tools/gpu.sh`: tests, checks and benchmarks, the most informative ones first.

The parts `first` and `second` take a quarter of an hour on one GPU. Steps that need several GPUs
are left out if there is one.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["PARTS", "QUESTIONS", "ROOT", "STEPS", "Step", "words", "write_whole"]

ROOT = Path(__file__).parents[1]
PARTS = {"first": 530.0, "second": 290.0}
"""The most seconds that each part may take."""
CHECK = "{python} tools/gpu_checks.py"
QWEN = "configs/one_gpu.yaml --training.device cuda"
SMALL = "configs/quickstart.yaml --model.num_layers 1 --model.sliding_window null --data.seq_len 64"
RANKS = (
    "{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {ranks}"
)
LLAMA = "--model.preset llama3.1-8b"
TOY = "--lengths 64 --model.num_layers 2 --model.hidden_size 64 --model.vocab_size 512"
LAST_RUNGS = f"{TOY} --only 'inputs on the host,every 4th of them'"


class Step(NamedTuple):
    """A program that `gpu_run` starts; `words` fills in the `{..}` of its commands."""

    name: str
    asks: str
    """The question that the step answers."""
    seconds: float
    """The time limit of the step."""
    command: str
    """The command line on GPUs."""
    toy: str
    """The command line on a CPU, at toy size; empty: the step is left out there."""
    part: str = ""
    """The part of `PARTS` to which the step belongs.

    A step without a part runs after the steps of the last part, if there is time for all of it."""
    gpus: int = 1
    """The fewest GPUs that the step needs."""
    default: bool = True
    """Whether the step runs when no step is named; if not, it runs only by its name."""
    shown: int = 12
    """How many lines at the end of the step's log the terminal shows."""

    @property
    def least(self) -> float:
        """The step begins only if at least this many seconds are left.

        For a step of a part it is a third of the limit: benchmarks save each row, so the rows
        measured until then are kept.
        """
        return self.seconds / 3 if self.part else self.seconds


def check(name: str, asks: str, seconds: float, part: str = "") -> Step:
    """Return the step that runs the check `name` of `gpu_checks.py`."""
    both = f"{CHECK} {name} --json {{json}} --device"
    return Step(name, asks, seconds, f"{both} cuda", f"{both} cpu", part, shown=24)


# With -v and faulthandler the log of a test that hangs has its name and stack, even if the step is
# stopped.
PYTEST = (
    "{python} -m pytest -v -rfE --tb=short --durations=8 -p no:cacheprovider"
    " --continue-on-collection-errors --timeout 60 -o faulthandler_timeout=45"
)
COLLECTED = "{python} -m pytest -q --collect-only -p no:cacheprovider"
KERNELS = ("tests/core/attention/", "tests/core/mixers/")
"""Folders of the tests of kernels. They run in parallel: their references are slow on the host."""
WITHOUT_NCCL, WITH_NCCL = "-m 'gpu and not nccl'", "-m 'gpu and nccl'"
HF = "{python} tools/bench_mfu.py --json {json}"
MEMORY = "{python} tools/bench_memory.py --json {json}"

STEPS = (
    Step(
        "facts",
        "what does this machine have: memory, compilers, packages, and how long do imports take",
        45,
        "{python} tools/gpu_facts.py --json {json} --device cuda",
        "{python} tools/gpu_facts.py --json {json} --device cpu",
        "first",
        shown=20,
    ),
    Step(
        "tests",
        "do the tests pass that need a GPU, without NCCL and without tests of kernels",
        70,
        f"{PYTEST} {WITHOUT_NCCL} {{gpu_tests}}",
        f"{COLLECTED} {WITHOUT_NCCL} {{gpu_tests}}",
        "first",
    ),
    Step(
        "tests_kernels",
        "do the tests of attention and mixer kernels pass",
        90,
        f"{PYTEST} -n 8 {WITHOUT_NCCL} {{kernel_tests}}",
        f"{COLLECTED} -n 2 {WITHOUT_NCCL} {{kernel_tests}}",
        "first",
    ),
    Step(
        "tests_nccl",
        "do the tests pass that start NCCL with one rank",
        90,
        f"{PYTEST} {WITH_NCCL} -k 'not two_ranks' {{nccl_tests}}",
        f"{COLLECTED} {WITH_NCCL} -k 'not two_ranks' tests/train/test_gpu.py",
        "first",
    ),
    check("parity", "are 20 float32 losses the same as on a CPU", 45, "first"),
    Step(
        "mfu",
        "how fast is a step of qwen3-0.6b, compared with transformers and fully_shard: the MFU",
        130,
        f"{HF} --device cuda --presets qwen3-0.6b --lengths 8192 32768 --recompute-from 32768"
        " --rounds 3 --also model.attention_backend=cudnn",
        f"{HF} --device cpu --presets tiny --layers 1 --lengths 64 --rounds 1 --recompute-from 64"
        " --also model.compile=false",
        "first",
        shown=28,
    ),
    Step(
        "two_ranks",
        "do two NCCL ranks (on one GPU if there is only one) train as one CPU does, in 8 layouts",
        120,
        f"{PYTEST} -s -m gpu -k two_ranks tests/train/test_gpu.py",
        f"{COLLECTED} -m gpu -k two_ranks tests/train/test_gpu.py",
        "first",
    ),
    check("attention", "how fast is each attention backend at 131,072 tokens", 40, "first"),
    Step(
        "memory",
        "does a step take the planned memory: 131,072 tokens, four layers of llama3.1-8b",
        100,
        f"{MEMORY} --device cuda --lengths 131072 {LLAMA} --model.num_layers 4"
        " --only 'recompute all blocks,inputs on the host,MLP in tiles'",
        f"{MEMORY} {LAST_RUNGS}",
        "second",
    ),
    Step(
        "link",
        "how much of a modelled link of 100, 200 and 400 GB/s is exposed, ours and fully_shard's",
        75,
        "{python} tools/bench_link.py --json {json} --device cuda",
        "{python} tools/bench_link.py --json {json} --device cpu --quick --layers 1 --rounds 1"
        " --gb-per-second 100",
        "second",
        shown=36,
    ),
    check("kernels", "which kernels run in a step, and is the device ever idle", 40, "second"),
    check("syncs", "what makes the host wait for the device", 40, "second"),
    Step(
        "host",
        "how much host time does a layer take, compared with plain torch",
        35,
        "{python} tools/bench_host.py --quick --rounds 10",
        "{python} tools/bench_host.py --quick --rounds 1",
        "second",
    ),
    Step(
        "offload_states",
        "does a step run with optimizer states on the host",
        40,
        f"{MEMORY} --device cuda --lengths 65536 {LLAMA} --model.num_layers 4"
        " --optimizer.offload_states --only 'MLP in tiles'",
        f"{MEMORY} {TOY} --optimizer.offload_states --only 'MLP in tiles'",
        "second",
    ),
    Step(
        "mfu_8b",
        "what is the MFU of four of the 32 layers of llama3.1-8b",
        60,
        f"{HF} --device cuda --presets llama3.1-8b --layers 4 --lengths 32768 --rounds 3"
        " --recompute-from 32768",
        f"{HF} --device cpu --presets tiny --layers 1 --lengths 64 --rounds 1",
    ),
    Step(
        "modes",
        "what does communication cost in the four modes",
        360,
        f"{{python}} -m isp profile {QWEN} --parallel.tensor.size {{ranks}} --nproc {{ranks}}"
        " --parallel.weight.size {ranks} --job.dump_folder {folder}/modes --html",
        f"{{python}} -m isp profile {SMALL} --nproc 2 --parallel.weight.size 2 --steps 1"
        " --job.dump_folder {folder}/modes",
        gpus=2,
    ),
    Step(
        "exposed",
        "is the exposed time of a profile the same as in torch.profiler's trace",
        240,
        "{python} tools/check_with_torch.py {folder}/modes",
        "",
        gpus=2,
    ),
    Step(
        "fully_shard",
        "is a step with weights sharded over the GPUs faster than torch's fully_shard",
        240,
        f"{RANKS} tools/bench_fully_shard.py --json {{json}}",
        f"{RANKS} tools/bench_fully_shard.py --json {{json}} --device cpu --quick",
        gpus=2,
    ),
    check("deterministic", "do two deterministic runs give the same bits", 60),
    check("loss", "how much memory does the loss take", 60),
    Step(
        "ladder",
        "does each rung of the memory ladder take the memory that isp plan predicts",
        240,
        f"{MEMORY} --device cuda --lengths 32768,65536 {LLAMA} --model.num_layers 4",
        f"{MEMORY} {LAST_RUNGS}",
    ),
    Step(
        "mfu_short",
        "how fast are rows of 2,048 tokens, also without model.compile",
        60,
        f"{HF} --device cuda --presets qwen3-0.6b --lengths 2048 --also model.compile=false",
        f"{HF} --device cpu --presets tiny --layers 1 --lengths 64 --rounds 1",
    ),
    Step(
        "collective_2",
        "what does a channel add to a collective between GPUs",
        120,
        f"{RANKS} tools/gpu_checks.py collective --device cuda",
        f"{RANKS} tools/gpu_checks.py collective --device cpu",
        gpus=2,
    ),
    Step(
        "calibrate_2",
        "how fast are the links between GPUs, for isp plan",
        180,
        "{python} -m isp calibrate --nproc {ranks}",
        "{python} -m isp calibrate --nproc 2 --quick",
        gpus=2,
    ),
    check("efficiencies", "what shares of its peaks does the device reach, for isp plan", 60),
    Step(
        "calibrate",
        "what does isp calibrate find",
        120,
        "{python} -m isp calibrate",
        "{python} -m isp calibrate --quick",
    ),
    Step(
        "slices",
        "how much slower are attention kernels on the slices of context ranks",
        120,
        "{python} tools/bench_slices.py --device cuda --tokens 32768",
        "{python} tools/bench_slices.py --tokens 64 --rounds 1 --heads 2",
    ),
    check("collective", "what does a channel add to a collective on the host", 60),
    Step(
        "profile",
        "what does isp profile say of one rank",
        120,
        f"{{python}} -m isp profile {QWEN} --modes isp --steps 3"
        " --job.dump_folder {folder}/profile",
        f"{{python}} -m isp profile {SMALL} --steps 1 --job.dump_folder {{folder}}/profile"
        " --parallel.tensor.size 1 --parallel.weight.size 1 --modes isp --no-torch",
    ),
    Step(
        "memory_300k",
        "do 300,000 tokens of eight layers of llama3.1-8b fit as planned",
        600,
        f"{MEMORY} --device cuda --lengths 300032 {LLAMA} --optimizer.offload_states"
        " --model.num_layers 8 --only 'inputs on the host'",
        f"{MEMORY} {TOY} --only 'every 4th of them'",
        default=False,
    ),
    Step(
        "nccl_ub",
        "how much do buffers registered with NCCL gain (needs NVLink SHARP)",
        180,
        f"{{python}} -m isp profile {QWEN} --parallel.tensor.size {{ranks}} --nproc {{ranks}}"
        " --modes isp --parallel.weight.size {ranks} --parallel.weight.nccl_ub"
        " --job.dump_folder {folder}/nccl_ub",
        "",
        gpus=2,
        default=False,
    ),
)

QUESTIONS = (
    ("does attention_backend=auto take the fastest kernel for one long document", "mfu, attention"),
    ("do streams that share a hardware queue delay each other", "kernels, link"),
    ("is the host's free memory read correctly, for states on the host", "facts, offload_states"),
    ("how long does collecting and running the tests take", "tests, tests_nccl"),
    ("what share of a step is the loss, element by element over the vocabulary", "kernels"),
    ("what does compiling cost the first process", "mfu_short"),
    ("does page-locking many small pieces of memory fail", "tests"),
    ("how long does page-locking 23 GB take", "offload_states"),
    ("do expandable segments work on this machine", "tests_nccl, memory"),
    ("do kernels of fla accept float32", "tests, if fla-core is installed"),
    ("do waiting receives of NCCL occupy the whole device", "two_ranks, not its speed"),
    ("what do deterministic runs cost, and do they run", "deterministic"),
    ("how long do the first import and a name look-up take", "facts"),
    ("does registering buffers with NCCL work without NVLink SHARP", "tests_nccl"),
    ("do grouped products that are not in bfloat16 make the host wait", "none: models are dense"),
    ("is memory of gathered weights reused too early", "tests, two_ranks"),
    ("how much memory does a communicator of NCCL take", "several GPUs only"),
)
"""Questions that only a GPU can answer, each with the steps that answer it."""


def write_whole(path: Path, text: str) -> None:
    """Write a file by renaming a complete one, so that a kill never leaves half of it."""
    half = path.with_suffix(".part")
    half.write_text(text)
    half.replace(path)


def tests_of(kind: str) -> list[str]:
    """Return the test files of a kind: nccl (with this mark), kernel (in `KERNELS`), gpu (others).

    Naming them saves time: collecting all tests takes longer than running these.
    """
    marker = "mark.nccl" if kind == "nccl" else "mark.gpu"
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if marker in path.read_text())
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    return [n for n in names if kind == "nccl" or n.startswith(KERNELS) == (kind == "kernel")]


def words(step: Step, device: str, gpus: int, numbers: Path, folder: Path) -> list[str]:
    """Return the command line of a step, with the `{..}` in it filled in.

    It runs on `gpus` GPUs. Steps with several ranks have two on a CPU, and at least two on GPUs.
    """
    filled = {
        "{python}": sys.executable,
        "{json}": str(numbers),
        "{folder}": str(folder),
        "{ranks}": str(max(2, gpus) if device == "cuda" else 2),
    }

    found = shlex.split(step.command if device == "cuda" else step.toy)
    for name, value in filled.items():
        found = [word.replace(name, value) for word in found]
    for kind in ("gpu", "kernel", "nccl"):
        if (word := f"{{{kind}_tests}}") in found:
            place = found.index(word)
            found[place : place + 1] = tests_of(kind)
    return found
