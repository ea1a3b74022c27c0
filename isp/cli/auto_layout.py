"""`isp train --parallel auto` trains in the layout that `isp layouts` ranks first.

Under torchrun, rank 0 chooses for all ranks. Its inputs may differ on other machines: the file of a
fabric, the checkpoint of a restarted run, or the size of the memory.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from isp.cli.options import check_planned
from isp.cli.output import say, say_progress, show_progress
from isp.utils.text import counted

if TYPE_CHECKING:
    from isp.config import JobConfig
    from isp.planner import Candidate, Fabric, Found

__all__ = ["LAYOUT_OPTIONS", "choose_layout", "command_line", "layout_words"]

LAYOUT_OPTIONS = ("--parallel", "--fabric")
"""Options that only the launcher gets; ranks get the chosen keys instead."""
_CHOSEN = (
    *("parallel.tensor.mode", "parallel.tensor.size"),
    *("parallel.weight.size", "parallel.weight.reshard_after_forward"),
    *("parallel.pipeline.size", "parallel.pipeline.schedule", "parallel.pipeline.num_chunks"),
    *("parallel.zero1.size", "parallel.expert.size", "parallel.expert_weight.size"),
    *("parallel.sequence_2D.", "model.checkpoint"),
    *("data.micro_bsz", "data.micro_num", "training.global_batch_size"),
)
"""Prefixes of the keys that a search may change."""


class _Machine(NamedTuple):
    fabric: Fabric
    origin: str
    """How the machine's description was found, for the log."""


def layout_words(config: JobConfig, chosen: Mapping[str, Any]) -> list[str]:
    """Return the overrides, as command-line words, that give `config` the layout of `chosen`.

    `chosen` is a whole configuration as a dict of plain values, such as one read from YAML.
    """
    from isp.config import JobConfig, to_plain
    from isp.config.keys import KeyTable

    # A global batch size determines the number of micro-batches: a configuration with both keys is
    # refused if they disagree, so `data.micro_num` is left out.
    follows = config.training.global_batch_size is not None and config.data.micro_num is None
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, _, value in KeyTable.of(JobConfig).differences(to_plain(config), chosen)
        if key.startswith(_CHOSEN) and not (follows and key == "data.micro_num")
    ]


def command_line(path: str, ranks: int, fabric: Fabric, words: Sequence[str]) -> str:
    """Return the command that trains with `words` on `ranks` ranks of `fabric`."""
    train = ["isp", "train", path]
    if ranks <= fabric.devices_per_node:
        return shlex.join([*train, f"--nproc={ranks}", *words])
    here = fabric.devices_per_node
    nodes = [f"--nnodes={-(-ranks // here)}", f"--nproc-per-node={here}"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    return shlex.join(["torchrun", *nodes, *meet, "-m", *train, *words])


def choose_layout(
    config: JobConfig, ranks: int, overrides: Sequence[str], fabric: str | None
) -> list[str]:
    """Return the words that change `config` to the layout to train in, and log it with reasons.

    A run that is resumed on the same number of ranks keeps its layout. Layout keys in `overrides`
    are kept. Raises ValueError, in one line, if no layout can be chosen.
    """
    from isp.config import to_plain
    from isp.planner import search
    from isp.planner.search import rows_of
    from isp.train.state.resume import resumed
    from isp.train.state.saved_run import saved_config, saved_sequences

    check_planned(config)
    given = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}

    def contradicts(words: Sequence[str]) -> bool:
        return any(word[2:].partition("=")[0] in given for word in words)

    def note(name: str, text: str) -> None:
        say(f"{name:<11} {text}", error=True)

    # A resumed run keeps its layout only if ranks, batch and overrides still agree with it.
    there, rows = resumed(config), rows_of(config, ranks)
    there_ranks = None if there is None else there.manifest.topology.world_size
    if there is not None and there_ranks == ranks and saved_sequences(there) == rows:
        words = layout_words(config, saved_config(there) or {})
        if saved_config(there) and not contradicts(words):
            keys = shlex.join(words) or "those of the configuration"
            note(
                "layout",
                f"that of {there.path}, which is resumed on {counted(ranks, 'rank')} as before",
            )
            note("keys", keys)
            return words
    if there is not None and there_ranks != ranks and not config.training.global_batch_size:
        # A run resumed on another number of ranks keeps the number of sequences that its steps had.
        rows = saved_sequences(there) or rows
    say_progress("choosing a layout: tracing the model")
    machine = _find_machine(config, ranks, fabric)
    machine.fabric.check(ranks)
    found = search(config, ranks, machine.fabric, rows=rows, progress=show_progress)
    fitting = [
        c for c in found.fitting if not contradicts(layout_words(config, to_plain(c.config)))
    ]
    _check(found, fitting, given)
    words = layout_words(config, to_plain(fitting[0].config))
    for name, line in _reasons(found, fitting, machine.origin).items():
        note(name, line)
    note("keys", shlex.join(words) or "none to change: it is the configuration's own layout")
    return words


def _check(found: Found, fitting: Sequence[Candidate], given: set[str]) -> None:
    """Raise ValueError if no layout fits, or none agrees with the overrides."""
    from isp.planner.report import remedy_of

    if not found.fitting:
        raise ValueError(f"--parallel auto: {remedy_of(found)}")
    if not fitting:
        keys = ", ".join(f"--{key}" for key in sorted(given) if key.startswith(_CHOSEN))
        raise ValueError(
            f"--parallel auto: none of the {len(found.fitting)} fastest layouts has {keys} as"
            f" given: leave these overrides out, or leave out --parallel auto (isp layouts lists"
            f" layouts)"
        )


def _reasons(found: Found, fitting: Sequence[Candidate], origin: str) -> dict[str, str]:
    """Return the log lines that explain the choice: a dict from a line's title to its text."""
    from isp.planner.report import size_of, table_of, time_of

    best = fitting[0]
    header, *rows = table_of(fitting[:2], [""] * len(fitting[:2]), found.world_size)
    names = [
        ", ".join(f"{key} {value}" for key, value in zip(header, row, strict=True) if value)
        for row in rows
    ]
    names = [name.split(", memory")[0] for name in names]
    exposed = best.prediction.exposed / best.seconds if best.prediction is not None else 0.0
    why = [f"a step of {time_of(best.seconds)} is predicted, {exposed:.0%} of it exposed"]
    why += [f"the next best takes {time_of(other.seconds)} ({names[1]})" for other in fitting[1:2]]
    if not isinstance(found.own, str):
        fits = "" if found.fits(found.own) else " and does not fit"
        why.append(f"the configuration as it is takes {time_of(found.own.seconds)}{fits}")
    room = size_of(found.fabric.device.usable_bytes)
    length = best.config.data.seq_len
    return {
        "layout": names[0],
        "for": f"{counted(found.world_size, 'rank')},"
        f" {counted(found.rows, 'sequence')} of {length:,} tokens a step,"
        f" {size_of(best.memory.total)} of {room} of a rank; first of {found.num_fitting} that fit",
        "machine": f"{found.fabric.title}; {origin}",
        "why": "; ".join(why),
    }


def _find_machine(config: JobConfig, ranks: int, name: str | None) -> _Machine:
    """Return the fabric called `name`, or one for this machine. Raises ValueError if unknown."""
    import torch

    from isp.core.comm.pinned_memory import total_bytes
    from isp.planner import load_fabric
    from isp.planner.fabric import known_fabrics

    if name is not None:
        return _Machine(load_fabric(name), f"--fabric {name}")
    measure = "run `isp calibrate --out FILE` and give --fabric FILE"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here < ranks:
        raise ValueError(
            f"--parallel auto: {here} of {ranks} ranks are on this machine, and the links between"
            f" machines are not known: {measure} (calibrate under torchrun on all machines), or"
            f" give --fabric one of {', '.join(known_fabrics())}"
        )
    if config.training.device == "cpu" or not torch.cuda.is_available():
        fabric, memory = load_fabric("cpu"), total_bytes()
        if memory is not None:
            device = replace(fabric.device, memory_gib=memory / ranks / 2**30)
            fabric = replace(fabric, device=device)
        return _Machine(fabric, f"its memory is shared by the ranks; {measure} to know its speed")
    device_name = torch.cuda.get_device_name(0)
    for known in known_fabrics():
        fabric = load_fabric(known)
        if device_name in fabric.device.cuda_names:
            return _Machine(fabric, f"fabric {known}, for {device_name}; --fabric gives another")
    raise ValueError(
        f"--parallel auto: no fabric is known for {device_name}: {measure}, or give --fabric one of"
        f" {', '.join(known_fabrics())}"
    )
