"""The report of a run: loss, learning rate and gradient norm, then time and memory, by step."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isp.config import JobConfig, load_config
from isp.foreign.files import read_limited
from isp.metrics import StepRecord, read_metrics
from isp.report.page import Page, Section
from isp.report.style import Color, Picture, legend_above, new_axes
from isp.run.environment import Environment
from isp.run.folder import RunFolder
from isp.settings.counts import counted

__all__ = ["Means", "means", "run_page"]

_FEW = 60  # records for which each has a mark of its own


class Means(NamedTuple):
    """Means over the steps of a run after its first record, which has the warm-up in it."""

    first: int
    last: int
    """The steps they are taken over, both included."""
    step_ms: float
    comm_ms: float
    exposed_ms: float
    tgs: float


def means(records: Sequence[StepRecord]) -> Means:
    """The means over `records`, each weighted by the number of steps that it stands for."""
    steps = [0, *(record.step for record in records)]
    weights = [after - before for before, after in pairwise(steps)]
    if len(records) > 1:
        records, weights, steps = records[1:], weights[1:], steps[1:]

    def mean(values: Iterable[float]) -> float:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

    step_ms = mean(r.step_ms for r in records)
    return Means(
        first=steps[0] + 1,
        last=steps[-1],
        step_ms=step_ms,
        comm_ms=mean(r.comm_ms for r in records),
        exposed_ms=mean(r.exposed_ms for r in records),
        tgs=mean(r.tgs * r.step_ms for r in records) / step_ms,
    )


def run_page(folder: RunFolder) -> Page:
    """The page of the run in `folder`.

    Raises ValueError if it holds no step, or a file that cannot be read, and OSError if one of
    config.yaml, env.json and metrics.jsonl is not there.
    """
    records = read_metrics(folder.metrics_file)
    if not records:
        raise ValueError(
            f"{folder.metrics_file} contains no step yet: wait until the run has finished a step"
        )
    config = load_config(folder.config_file)
    environment, average = _environment(folder), means(records)
    ranks = counted(environment.world_size, "rank")
    return Page(
        name="report",
        title=f"{config.job.name}: {config.parallel.tensor.mode} on {ranks}",
        lead=_lead(records),
        command=_command(environment),
        sections=(
            Section(title="Training", pictures=_training_pictures(records)),
            Section(
                title="Time",
                texts=(_times(average), _profile_hint(folder, environment)),
                pictures=_time_pictures(records),
            ),
            *_expert_sections(records),
            Section(title="Memory", pictures=(_memory_picture(records),)),
            Section(title="The run", facts=_facts(config, environment, records, average)),
        ),
    )


def _environment(folder: RunFolder) -> Environment:
    file = folder.environment_file
    try:
        return Environment.from_json(read_limited(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _command(environment: Environment) -> str:
    """The command line that started the run; under torchrun, the part behind `-m isp`."""
    words = environment.command
    if "train" not in words:  # started from somebody's own program
        return shlex.join(words)
    own = ["isp", *words[words.index("train") :]]
    if len(environment.hostnames) > 1:
        return f"{shlex.join(own)}    # by torchrun, on {len(environment.hostnames)} machines"
    return shlex.join([*own[:3], "--nproc", str(environment.world_size), *own[3:]])


def _profile_hint(folder: RunFolder, environment: Environment) -> str:
    words = ["isp", "profile", str(folder.config_file), "--nproc", str(environment.world_size)]
    return (
        f"To see which transfers are waited for, and why: `{shlex.join([*words, '--html'])}`"
        f" measures a few steps of this configuration in each mode and makes a page of them."
    )


def _lead(records: Sequence[StepRecord]) -> str:
    last, evaluated = records[-1], _evaluated(records)
    loss = f"Loss {_shown(last.loss)} at step {last.step:,}"
    if not evaluated:
        return f"{loss}."
    where = "" if evaluated[-1] is last else f" at step {evaluated[-1].step:,}"
    return f"{loss}, {_shown(evaluated[-1].val_loss)} on held-out text{where}."


def _evaluated(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Those with a loss on held-out text."""
    return [record for record in records if record.val_loss is not None]


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _times(average: Means) -> str:
    if not average.comm_ms:
        return "Nothing is exposed: there are no transfers, as each rank works for itself."
    return (
        f"{average.exposed_ms / average.step_ms:.0%} of each step is exposed: compute waited for"
        f" transfers for {average.exposed_ms:.1f} of {average.step_ms:.1f} ms. Transfers were under"
        f" way for {average.comm_ms:.1f} ms of it. Times are those of rank 0, means over steps"
        f" {average.first} to {average.last}."
    )


def _facts(
    config: JobConfig, environment: Environment, records: Sequence[StepRecord], average: Means
) -> tuple[tuple[str, str], ...]:
    first, last = records[0], records[-1]
    model, data, evaluated = config.model, config.data, _evaluated(records)
    skipped = sum(record.skipped for record in records)
    devices = ", ".join(f"{count} x {name}" for name, count in environment.devices.items())
    facts = {
        "groups": "\n".join(config.topology(environment.world_size).sizes()),
        "model": f"{model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}",
        "a step": f"{last.tokens // last.step:,} tokens in sequences of {data.seq_len:,}",
        "dtype": f"{config.training.dtype}, on {devices}, torch {environment.torch}",
        "loss": ", ".join(f"{_shown(r.loss)} at step {r.step}" for r in (first, last)),
        "loss on held-out text": ", ".join(
            f"{_shown(r.val_loss)} at step {r.step}" for r in evaluated[-1:]
        ),
        "steps with a skipped update": str(skipped or ""),
        "throughput": f"{average.tgs:,.0f} tokens a second and rank",
        "peak memory": f"{last.mem_gib:.2f} GiB on the rank that has most",
    }
    return tuple((name, text) for name, text in facts.items() if text)


# -- pictures --------------------------------------------------------------------------------


class _Line(NamedTuple):
    """Values over steps; what is not finite is a gap."""

    points: list[tuple[int, float | None]]
    color: str
    linestyle: str = "-"
    label: str | None = None
    marker: str = "o"


def _points(records: Sequence[StepRecord], field: str) -> list[tuple[int, float | None]]:
    return [(record.step, getattr(record, field)) for record in records]


def _picture(name: str, ylabel: str, caption: str, *lines: _Line) -> Picture:
    alt = f"{caption.partition(':')[0]} over the steps"
    return Picture(name, caption, alt, partial(_draw, lines, ylabel))


def _training_pictures(records: Sequence[StepRecord]) -> tuple[Picture, ...]:
    kept = [(record.step, None if record.skipped else record.loss) for record in records]
    lines = [_Line(kept, Color.BLUE, "-", "training")]
    if evaluated := _points(_evaluated(records), "val_loss"):
        lines.append(_Line(evaluated, Color.VERMILLION, "--", "held-out text", "D"))
    skipped = [record.step for record in records if record.skipped]
    return (
        Picture(
            "loss",
            "Loss: the mean over the valid tokens of a step, before its update.",
            "Loss over the steps, of training and of held-out text",
            partial(_draw, lines, "loss (nats a token)", from_zero=False, skipped=skipped),
        ),
        _picture(
            "lr",
            "learning rate",
            "Learning rate: of the update.",
            _Line(_points(records, "lr"), Color.GREEN),
        ),
        _picture(
            "grad_norm",
            "gradient norm",
            "Gradient norm: of all parameters, before clipping.",
            _Line(_points(records, "grad_norm"), Color.PURPLE),
        ),
    )


def _time_pictures(records: Sequence[StepRecord]) -> tuple[Picture, ...]:
    return (
        _picture(
            "throughput",
            "tokens / s / rank",
            "Throughput: tokens that each rank trains on in a second.",
            _Line(_points(records, "tgs"), Color.GREEN),
        ),
        _picture(
            "exposed",
            "ms a step",
            "Time of a step on rank 0: the whole of it, the part in which transfers were under way,"
            " and the part for which compute was blocked on one.",
            _Line(_points(records, "step_ms"), Color.BLACK, "-", "step"),
            _Line(_points(records, "comm_ms"), Color.BLUE, "--", "transfers"),
            _Line(_points(records, "exposed_ms"), Color.VERMILLION, "-.", "exposed"),
        ),
    )


def _expert_sections(records: Sequence[StepRecord]) -> tuple[Section, ...]:
    """Of a model with experts."""
    if records[-1].expert_load is None:
        return ()
    load = _picture(
        "expert_load",
        "tokens / mean",
        "Load of experts: the most tokens of one as a multiple of the mean of its layer, over all"
        " layers; 1 is an even load.",
        _Line(_points(records, "expert_load"), Color.BLUE),
    )
    unused = _picture(
        "unused_experts",
        "experts",
        "Unused experts: those of all layers that no token of a step went to.",
        _Line(_points(records, "unused_experts"), Color.VERMILLION),
    )
    return (Section(title="Experts", pictures=(load, unused)),)


def _memory_picture(records: Sequence[StepRecord]) -> Picture:
    return _picture(
        "memory",
        "peak memory (GiB)",
        "Memory: the most that was in use at once up to a step, on the rank that has most; of"
        " tensors on CUDA, of the whole process on CPU.",
        _Line(_points(records, "mem_gib"), Color.PURPLE),
    )


def _draw(
    lines: Sequence[_Line], ylabel: str, *, from_zero: bool = True, skipped: Sequence[int] = ()
) -> Figure:
    """Lines over the steps, the first of which has all; a cross for each `skipped` update.

    A value between two gaps has a mark.
    """
    figure, axes = new_axes(xlabel="step", ylabel=ylabel)
    for points, color, linestyle, label, marker in lines:
        values = [v if v is not None and math.isfinite(v) else math.nan for _, v in points]
        gaps = [True, *map(math.isnan, values), True]
        alone = [i for i in range(len(values)) if gaps[i] and gaps[i + 2]]
        axes.plot(
            [step for step, _ in points],
            values,
            color=color,
            linestyle=linestyle,
            marker=marker,
            markersize=4,
            markevery=range(len(values)) if len(values) <= _FEW else alone,
            label=label,
        )
    if skipped:
        style = {"color": Color.BLACK, "marker": "x", "linestyle": "none"}
        place, at = axes.get_xaxis_transform(), [0.04] * len(skipped)
        axes.plot(skipped, at, transform=place, label="update skipped", **style)  # type: ignore[arg-type]
    if from_zero:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 5))
    first, last = lines[0].points[0][0], lines[0].points[-1][0]
    margin = max(1.0, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins="auto", steps=[1, 2, 5, 10]))
    if lines[0].label is not None:
        legend_above(axes)
    return figure
