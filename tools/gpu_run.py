"""Runs the steps of `gpu_steps` one after the other, each with a time limit of its own.

Started by `bash tools/gpu.sh`. A step that fails or outlasts its limit is noted, and the next one
begins. In the folder of the report each step has a log and a JSON file; the page,
report/index.html, is made again after each of them. A step whose JSON says `passed` is not run
again, unless it is named. With `--minutes` the first step takes what there is, and others begin
where their limits fit into the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpu_steps import STEPS, Step, words

ROOT = Path(__file__).parents[1]
SHOWN_LINES = 60
"""Of the end of a log, on the page."""


class Machine(NamedTuple):
    """What the steps run on."""

    device: str
    """cuda or cpu."""
    gpus: int
    facts: dict[str, str]
    """Devices and versions, for people."""


def look(device: str) -> Machine:
    """The machine, looked at by another process: CUDA would keep memory of this one's."""
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(device), capture_output=True
    )
    if done.returncode:
        why = done.stderr.decode().strip().rpartition("\n")[2]
        sys.exit(f"error: {sys.executable} cannot load isp ({why}): pip install -e '.[report,hf]'")
    gpus, facts = json.loads(done.stdout.splitlines()[-1])
    return Machine(device, gpus, facts)


def environment(device: str) -> dict[str, str]:
    """That of a step."""
    added = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def run(step: Step, machine: Machine, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a step for so long at most; what its JSON file says."""
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
        "numbers": json.loads(numbers.read_text()) if numbers.exists() else None,
    }
    numbers.unlink(missing_ok=True)
    (folder / f"{step.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def end_group(process: subprocess.Popen[Any]) -> None:
    """End the step's ranks too: it has a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_page(machine: Machine, found: Sequence[dict[str, Any]], folder: Path) -> Path | None:
    """The report of the steps run so far; None where the packages for it are missing."""
    try:
        from isp.profile.table import Table
        from isp.report.page import Page, Section
    except ImportError:
        return None
    passed = sum(one["exit"] == 0 for one in found)
    rows = [(o["step"], f"{o['seconds']:.0f}", o["result"], o["asks"]) for o in found]
    table = Table([("step", "seconds", "result", "what it shows"), *rows], text_from=2)
    sections = [Section(title="Machine", facts=tuple(machine.facts.items()))]
    sections.append(Section(title="Steps", table=table))
    for one in found:
        log = (folder / f"{one['step']}.log").read_text(errors="replace").splitlines()
        facts = (("result", one["result"]), ("command", one["command"]))
        shown = "\n".join(log[-SHOWN_LINES:])
        title = f"{one['step']}: {one['asks']}"
        sections.append(Section(title=title, facts=facts, listing=shown))
    toy = "" if machine.device == "cuda" else ", at toy size on a CPU: no number means anything"
    page = Page(
        title=f"isp on {machine.facts['GPUs'] if machine.device == 'cuda' else 'a CPU'}",
        name="index",
        lead=f"{passed} of {len(found)} steps passed{toy}",
        sections=tuple(sections),
        command="bash tools/gpu.sh",
    )
    path = folder / "report" / "index.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page.to_html(), encoding="utf-8")
    return path


def chosen(names: Sequence[str], machine: Machine) -> list[Step]:
    """The steps to run, in order; what cannot run on the machine is reported and left out."""
    picked = []
    for step in STEPS:
        expected = step.name in names if names else step.default
        if expected and machine.device == "cuda" and machine.gpus < step.gpus:
            print(f"{step.name}: left out, needs {step.gpus} GPUs and there is {machine.gpus}")
        elif expected and machine.device == "cpu" and not step.toy:
            print(f"{step.name}: left out, reads what only a GPU leaves")
        elif expected:
            picked.append(step)
    return picked


def in_turn(steps: Sequence[Step], found: dict[str, dict[str, Any]], *, named: bool) -> list[Step]:
    """The steps that are to be run: unless they are `named`, those that have not passed, and first
    of them those that have not been tried.
    """
    if named:
        return list(steps)
    for step in steps:
        if step.name in found and found[step.name]["exit"] == 0:
            print(f"{step.name}: passed before")
    left = [step for step in steps if step.name not in found or found[step.name]["exit"]]
    return sorted(left, key=lambda step: step.name in found)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        prog="bash tools/gpu.sh", description="Tests, checks and benchmarks on GPUs; one report."
    )
    parser.add_argument("names", nargs="*", metavar="STEP", help="these alone, done or not")
    parser.add_argument("--out", type=Path, help="folder of the report (outputs/gpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry", dest="device", action="store_const", const="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="in all")
    parser.add_argument("--list", action="store_true", help="name the steps")
    options = parser.parse_args()
    if options.list:
        for step in STEPS:
            on = f", {step.gpus} GPUs" if step.gpus > 1 else ""
            only = "" if step.default else ", by name alone"
            print(f"{step.name:<14} {step.asks} (at most {step.minutes:g} min{on}{only})")
        return 0
    if odd := set(options.names) - {step.name for step in STEPS}:
        parser.error(f"no such step: {', '.join(sorted(odd))}; --list names them")
    machine = look(options.device)
    if options.device == "cuda" and not machine.gpus:
        print("no GPU here: `bash tools/gpu.sh --device cpu` runs every step at toy size")
        return 1
    folder = options.out or ROOT / "outputs" / ("gpu" if options.device == "cuda" else "gpu_dry")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return run_all(options, machine, folder)


def run_all(options: argparse.Namespace, machine: Machine, folder: Path) -> int:
    """Run the chosen steps; 1 if one of them did not pass."""
    end = time.monotonic() + 60 * options.minutes
    found: dict[str, dict[str, Any]] = {}
    for step in STEPS:
        file = folder / f"{step.name}.json"
        if file.exists():
            found[step.name] = json.loads(file.read_text())
    page, begun = None, False
    for step in in_turn(chosen(options.names, machine), found, named=bool(options.names)):
        left = end - time.monotonic()
        if begun and left < 60 * step.minutes:
            print(f"{step.name}: left for the next time")
            continue
        begun = True
        print(f"{step.name}: {step.asks} ...", flush=True)
        found[step.name] = run(step, machine, folder, min(60 * step.minutes, left))
        print(f"    {found[step.name]['result']}, {found[step.name]['seconds']} s", flush=True)
        ordered = [found[s.name] for s in STEPS if s.name in found]
        page = write_page(machine, ordered, folder)
    print(f"report: {page or f'{folder}; for a page: pip install -e .[report]'}")
    return int(any(one["exit"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
