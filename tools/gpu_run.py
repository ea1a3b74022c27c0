"""Run the steps of `gpu_steps` one after the other, each with a time limit, and write a report.

Started by `bash tools/gpu.sh`. If a step fails or exceeds its limit, the next one begins. In the
report's folder each step has a log and a JSON file. After each step the page report/index.html and
the archive results.tgz (page, logs and JSON files) are written again, and copied to the folder that
the environment variable OUT names, if it is set. A step whose JSON file says `passed` is not run
again unless it is named. The second part begins with steps of the first part that have not run.

A part, or `--seconds`, limits the whole run. A step's limit is an upper bound and reserves no time:
a step of a part begins if a third of its limit is left, and is stopped at the end of the run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gpu_steps import PARTS, QUESTIONS, ROOT, STEPS, Step, words, write_whole

BEGUN = time.monotonic()
"""The time from which limits count: the first import on a new machine can take a minute."""
SHOWN_LINES = 60
"""Lines at the end of a step's log that the page shows."""
WHEELS = ROOT / ".whl"
"""Folder of wheels for a machine without a network."""
NEEDED = {
    "numpy": "numpy",
    "einops": "einops",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "safetensors": "safetensors",
    "tqdm": "tqdm",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
}
"""Packages that ISP and its tests need in addition to torch, by the module that is imported."""
ALONG = {
    "pydantic": ("pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
}
"""Packages that a package itself needs, by package: `pip download --no-deps` leaves them out."""


class Machine(NamedTuple):
    """The devices and versions that the steps run with."""

    device: str
    """cuda or cpu."""
    gpus: int
    """Number of GPUs."""
    facts: dict[str, str]
    """Names of devices and versions of packages, for the report."""


def install_wheels(folder: Path) -> None:
    """Install all wheels in the folder `.whl` into `folder`, and put that first on the path.

    Nothing is installed if this Python already has the packages of all wheels.
    A wheel that cannot be installed is printed and left out: `look` checks for needed packages.
    """
    wheels = sorted(WHEELS.glob("*.whl"))
    if not any(is_new(wheel) for wheel in wheels):
        return
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(folder))

    def fault(*chosen: Path) -> str:
        command = [sys.executable, "-m", "pip", "install", "-q", *options, *map(str, chosen)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr.strip()[-300:] or "pip failed" if done.returncode else ""

    # If one wheel is bad, pip installs none: install them one by one.
    if fault(*wheels):
        for wheel in wheels:
            if why := fault(wheel):
                print(f"{wheel.name} is not installed: {why}")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def is_new(wheel: Path) -> bool:
    """Return whether this Python lacks the package of a wheel."""
    try:
        distribution(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return True
    return False


def recipe(packages: Sequence[str]) -> str:
    """Return an error that says how to bring `packages` to a machine without a network."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line and line[0] != "#")
    # Name the packages that come along: `pip download` runs with --no-deps, as torch would be among
    # the dependencies.
    named = [one for package in packages for one in (package, *ALONG.get(package, ()))]
    pinned = " ".join(f"{one}=={pins[one]}" if one in pins else one for one in named)
    kinds = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    platforms = " ".join(f"--platform {kind}_{platform.machine()}" for kind in kinds)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"error: {sys.executable} lacks {', '.join(packages)}. Install them. If this machine has"
        " no network, run this where there is one, and bring the folder .whl here, to the root of"
        " the repository:\n\n"
        f"pip download --no-deps --only-binary=:all: --python-version {version} \\\n"
        f"  --implementation cp {platforms} \\\n  -d .whl {pinned}\n\n"
        "Git ignores .whl: where only a checkout is copied, name .whl as well, for each command."
    )


def look(device: str) -> Machine:
    """Return the devices and versions of this machine; exit with an error if packages are missing.

    Another process looks them up: CUDA would hold memory in this one while the steps run.
    """
    code = (
        "import json, platform, torch; from importlib.metadata import version\n"
        "def found(name):\n"
        "    try: return version(name)\n"
        "    except Exception: return 'not installed'\n"
        "n = torch.cuda.device_count()\n"
        "names = [torch.cuda.get_device_name(i) for i in range(n)]\n"
        "facts = {'GPUs': ', '.join(names) or 'none', 'python': platform.python_version(),\n"
        " 'torch': torch.__version__, 'CUDA': torch.version.cuda or torch.version.hip or 'none',\n"
        " 'NCCL': '.'.join(map(str, torch.cuda.nccl.version())) if n else 'none'}\n"
        "facts |= {name: found(name) for name in ('transformers', 'flash-attn', 'triton')}\n"
        "import isp.config\n"
        "print(json.dumps([n, facts]))"
    )
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        sys.exit(recipe(missing))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(device), capture_output=True
    )
    if done.returncode:
        why = done.stderr.decode().strip().rpartition("\n")[2]
        if named := re.search(r"No module named '(\w+)", why):
            sys.exit(recipe([named[1]]))
        sys.exit(f"error: {sys.executable} cannot load isp ({why}): pip install -e '.[hf]'")
    gpus, facts = json.loads(done.stdout.splitlines()[-1])
    return Machine(device, gpus, facts)


def environment(device: str) -> dict[str, str]:
    """Return the environment variables of a step."""
    added = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    added["TQDM_DISABLE"] = "1"  # progress bars would push numbers out of what is shown of a log
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def run(step: Step, machine: Machine, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a step for at most `seconds`, and return the result that its JSON file has."""
    numbers = folder / f"{step.name}.numbers.json"
    numbers.unlink(missing_ok=True)
    command = words(step, machine.device, machine.gpus, numbers, folder)
    log, begin = folder / f"{step.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(machine.device),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, result = process.wait(timeout=seconds), ""
        except subprocess.TimeoutExpired:
            code, result = -1, f"stopped after its {seconds:.0f} s"
        finally:
            end_group(process)
    found = {
        "step": step.name,
        "asks": step.asks,
        "result": result or ("passed" if code == 0 else f"failed with {code}"),
        "exit": code,
        "seconds": round(time.monotonic() - begin, 1),
        "command": " ".join(command),
        "device": machine.device,
        "machine": machine.facts,
        "numbers": read(numbers),
    }
    numbers.unlink(missing_ok=True)
    write_whole(folder / f"{step.name}.json", json.dumps(found, indent=1) + "\n")
    return found


def read(path: Path) -> Any:
    """Return the contents of a JSON file; None if it does not exist or cannot be parsed."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def end_group(process: subprocess.Popen[Any]) -> None:
    """End the processes of a step, which have a session of their own.

    SIGINT comes first, as from Ctrl-C: Python then logs where it was, and pytest what has failed.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        os.killpg(process.pid, signal.SIGKILL)
    # Do not wait longer: even a killed process can hang in the driver.
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def log_of(step: str, folder: Path) -> list[str]:
    """Return the lines of a step's log."""
    return (folder / f"{step}.log").read_text(errors="replace").splitlines()


def pack(folder: Path) -> None:
    """Write all logs, JSON files and the page into results.tgz, replacing it at once.

    If the environment variable OUT names a folder, only the archive and the page are copied there,
    as a service that copies files from there may take only a few.
    """
    half = folder / "results.part"
    with tarfile.open(half, "w:gz") as archive:
        for path in sorted((*folder.glob("*.log"), *folder.glob("*.json"), *folder.glob("report"))):
            archive.add(path, f"results/{path.name}")
    half.replace(folder / "results.tgz")
    if out := os.environ.get("OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        for path in (folder / "results.tgz", folder / "report" / "index.html"):
            if path.exists():
                os.replace(shutil.copy(path, Path(out, "part")), Path(out, path.name))


def show_failures(found: Sequence[dict[str, Any]], folder: Path) -> None:
    """Print the failed steps, each with its failed tests, or else the last line of its log."""
    for one in found:
        if one["exit"]:
            log = log_of(one["step"], folder)
            short = [line for line in log if line.startswith(("FAILED ", "ERROR "))]
            short = short or [line for line in log if re.search(r" (FAILED|ERROR)\b", line)]
            print(f"{one['step']}: {one['result']}")
            for line in (short or [line for line in log if line.strip()][-1:])[:20]:
                print(f"    {line[:160]}")


def write_page(machine: Machine, found: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write report/index.html about the steps run so far, and return its path."""
    from isp.profile.page import facts, listing, page, section, table
    from isp.profile.table import Table

    passed = sum(one["exit"] == 0 for one in found)
    rows = [(o["step"], f"{o['seconds']:.0f}", o["result"], o["asks"]) for o in found]
    steps = Table([("step", "seconds", "result", "what it shows"), *rows], text_from=2)
    sections = [section("Machine", facts(machine.facts.items())), section("Steps", table(steps))]
    for one in found:
        named = (("result", one["result"]), ("command", one["command"]))
        shown = listing("\n".join(log_of(one["step"], folder)[-SHOWN_LINES:]))
        sections.append(section(f"{one['step']}: {one['asks']}", facts(named), shown))
    answers = Table([("question that no CPU answers", "steps"), *QUESTIONS], text_from=0)
    sections.append(section("Questions", table(answers)))
    toy = "" if machine.device == "cuda" else ", at toy size on a CPU: no number means anything"
    text = page(
        title=f"isp on {machine.facts['GPUs'] if machine.device == 'cuda' else 'a CPU'}",
        lead=f"{passed} of {len(found)} steps passed{toy}",
        body="".join(sections),
        command="bash tools/gpu.sh",
    )
    path = folder / "report" / "index.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def chosen(names: Sequence[str], machine: Machine, found: dict[str, dict[str, Any]]) -> list[Step]:
    """Return the steps that `names` choose; print and leave out those that cannot run here.

    If the last part is chosen, so are the steps of earlier parts that have not run yet, and the
    default steps that belong to no part.
    """
    picked, last = [], list(PARTS)[-1] in names
    for step in STEPS:
        left = last and (step.name not in found if step.part else step.default)
        expected = {step.name, step.part} & set(names) or left if names else step.default
        if expected and machine.device == "cuda" and machine.gpus < step.gpus:
            print(f"{step.name}: left out: it needs {step.gpus} GPUs, and there is {machine.gpus}")
        elif expected and machine.device == "cpu" and not step.toy:
            print(f"{step.name}: left out: it reads a trace that only a run on GPUs writes")
        elif expected:
            picked.append(step)
    return picked


def in_turn(
    steps: Sequence[Step], found: dict[str, dict[str, Any]], names: Sequence[str]
) -> list[Step]:
    """Return the steps to run, in order: those in `names`, and others that have not passed.

    Steps that have failed before come last, unless they are in `names`.
    """
    tried = {step.name for step in steps if step.name in found and step.name not in names}
    passed = {name for name in tried if found[name]["exit"] == 0}
    for name in (step.name for step in steps if step.name in passed):
        print(f"{name}: passed before")
    left = [step for step in steps if step.name not in passed]
    return sorted(left, key=lambda step: step.name in tried)


def main() -> int:
    """Run the parts and steps that the command line names; return 1 if one did not pass."""
    parser = argparse.ArgumentParser(
        prog="bash tools/gpu.sh",
        description="Run tests, checks and benchmarks that need a GPU, and write one report.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="PART or STEP",
        help="run only these; a step that is named runs even if it has passed",
    )
    parser.add_argument("--out", type=Path, help="folder of the report (outputs/gpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy sizes")
    parser.add_argument(
        "--dry", dest="device", action="store_const", const="cpu", help="the same as --device cpu"
    )
    told = ", ".join(f"{name} {seconds:g}" for name, seconds in PARTS.items())
    parser.add_argument(
        "--seconds", type=float, help=f"limit of the whole run (default: {told}, else none)"
    )
    parser.add_argument("--list", action="store_true", help="list the steps, and exit")
    options = parser.parse_args()
    if options.list:
        for step in STEPS:
            on = f", {step.gpus} GPUs" if step.gpus > 1 else ""
            only = "" if step.default else ", by name alone"
            print(f"{step.part:<7} {step.name:<15} {step.asks} (", end="")
            print(f"at most {step.seconds:g} s{on}{only})")
        return 0
    if odd := set(options.names) - {step.name for step in STEPS} - set(PARTS):
        parser.error(f"no such step: {', '.join(sorted(odd))}; --list names them")
    if options.seconds is None:
        limits = [PARTS[name] for name in options.names if name in PARTS]
        options.seconds = sum(limits) if limits else float("inf")
    # By default SIGTERM ends this process at once, and the step, in a session of its own, goes on.
    # An exit runs the `finally` that ends the step.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as wheels:
        install_wheels(Path(wheels))
        return run_on_machine(options)


def run_on_machine(options: argparse.Namespace) -> int:
    """Look up this machine, and run the chosen steps on it; return 1 if one did not pass."""
    machine = look(options.device)
    if options.device == "cuda" and not machine.gpus:
        print("no GPU here: `bash tools/gpu.sh --device cpu` runs every step at toy size")
        return 1
    print(f"GPUs: {machine.facts['GPUs']}, loaded in {time.monotonic() - BEGUN:.0f} s", flush=True)
    folder = options.out or ROOT / "outputs" / ("gpu" if options.device == "cuda" else "gpu_dry")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return run_all(options, machine, folder)


def run_all(options: argparse.Namespace, machine: Machine, folder: Path) -> int:
    """Run the chosen steps, updating the report after each; return 1 if one did not pass."""
    end = BEGUN + options.seconds
    before = {step.name: read(folder / f"{step.name}.json") for step in STEPS}
    found = {name: one for name, one in before.items() if one}
    page, ordered = None, list(found.values())
    for step in in_turn(chosen(options.names, machine, found), found, options.names):
        left = end - time.monotonic()
        if left < step.least:
            print(f"{step.name}: not begun, as {max(0, left):.0f} s are left: run this again")
            continue
        print(f"{step.name}: {step.asks} ...", flush=True)
        # On a CPU double the limit, as imports alone can take most of it.
        limit = step.seconds * (1 if machine.device == "cuda" else 2)
        found[step.name] = one = run(step, machine, folder, min(limit, left))
        for line in log_of(step.name, folder)[-step.shown :]:
            print(f"    {line[:160]}")
        at = time.monotonic() - BEGUN
        print(f"  {one['result']}, {one['seconds']:.0f} s (at {at:.0f} s)", flush=True)
        ordered = [found[s.name] for s in STEPS if s.name in found]
        pack(folder)
        try:
            page = write_page(machine, ordered, folder)
        except Exception as error:  # for example, packages that the page needs are missing
            print(f"no page: {type(error).__name__}: {error}")
        else:
            pack(folder)
    show_failures(ordered, folder)
    print(f"report: {page or folder}")
    return int(any(one["exit"] for one in ordered))


if __name__ == "__main__":
    sys.exit(main())
