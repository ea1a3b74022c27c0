"""The report of a run: loss, learning rate and gradient norm, then time and memory, by step."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isp.config import JobConfig, load_config
from isp.metrics import StepRecord, read_metrics
from isp.report.page import Page, Section
from isp.report.style import Color, Picture, legend_above, new_axes
from isp.run.environment import Environment
from isp.run.folder import RunFolder

__all__ = ["Means", "means", "run_page"]

_GAP = math.nan
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

    @property
    def exposed_of_step(self) -> float:
        """Share of the step."""
        return self.exposed_ms / self.step_ms


def means(records: Sequence[StepRecord]) -> Means:
    """The means over `records`, each weighted by the number of steps that it stands for."""
    steps = [0, *(record.step for record in records)]
    weights = [after - before for before, after in pairwise(steps)]
    if len(records) > 1:
        records, weights, steps = records[1:], weights[1:], steps[1:]
    total = sum(weights)

    def mean(values: Iterable[float]) -> float:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / total

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
        raise ValueError(f"{folder.metrics_file} holds no step yet: let the run do one first")
    config = load_config(folder.config_file)
    environment = _environment(folder)
    average = means(records)
    return Page(
        name="report",
        title=f"{config.job.name}: {config.parallel.tensor.mode} on {_ranks(environment)}",
        lead=_lead(records),
        command=run_command(environment),
        sections=(
            Section(title="Training", pictures=_training_pictures(records)),
            Section(
                title="Time",
                texts=(*_times(average), _profile_hint(folder, environment)),
                pictures=_time_pictures(records),
            ),
            Section(title="Memory", pictures=(_memory_picture(records),)),
            Section(title="The run", facts=_facts(config, environment, records, average)),
        ),
    )


def _environment(folder: RunFolder) -> Environment:
    file = folder.environment_file
    try:
        return Environment.from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def run_command(environment: Environment) -> str:
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
    last = records[-1]
    loss = f"Loss {_shown(last.loss)} at step {last.step:,}"
    evaluated = [record for record in records if record.val_loss is not None]
    if not evaluated:
        return f"{loss}."
    held_out = evaluated[-1]
    where = "" if held_out is last else f" at step {held_out.step:,}"
    return f"{loss}, {_shown(held_out.val_loss)} on held-out text{where}."


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _times(average: Means) -> tuple[str, ...]:
    if not average.comm_ms:
        return ("Nothing is exposed: there are no transfers, as each rank works for itself.",)
    return (
        f"{average.exposed_of_step:.0%} of each step is exposed: compute waited for transfers for"
        f" {average.exposed_ms:.1f} of {average.step_ms:.1f} ms. Transfers were under way for"
        f" {average.comm_ms:.1f} ms of it. Times are those of rank 0, means over steps"
        f" {average.first} to {average.last}.",
    )


def _facts(
    config: JobConfig, environment: Environment, records: Sequence[StepRecord], average: Means
) -> tuple[tuple[str, str], ...]:
    first, last = records[0], records[-1]
    model, data = config.model, config.data
    evaluated = [record for record in records if record.val_loss is not None]
    skipped = sum(record.skipped for record in records)
    devices = ", ".join(f"{count} x {name}" for name, count in environment.devices.items())
    facts = {
        "groups": "\n".join(config.topology(environment.world_size).sizes()),
        "model": f"{model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}",
        "a step": f"{last.tokens // last.step:,} tokens in sequences of {data.seq_len:,}",
        "numbers": f"{config.training.dtype}, on {devices}, torch {environment.torch}",
        "loss": ", ".join(f"{_shown(r.loss)} at step {r.step}" for r in (first, last)),
        **({"loss on held-out text": _val_loss(evaluated[-1])} if evaluated else {}),
        **({"steps with a skipped update": str(skipped)} if skipped else {}),
        "throughput": f"{average.tgs:,.0f} tokens a second and rank",
        "peak memory": f"{last.mem_gib:.2f} GiB on the rank that has most",
    }
    return tuple(facts.items())


def _val_loss(record: StepRecord) -> str:
    return f"{_shown(record.val_loss)} at step {record.step}"


def _ranks(environment: Environment) -> str:
    return "1 rank" if environment.world_size == 1 else f"{environment.world_size} ranks"


def _training_pictures(records: Sequence[StepRecord]) -> tuple[Picture, ...]:
    loss = Picture(
        name="loss",
        caption="Loss: the mean over the valid tokens of a step, before its update.",
        alt="Loss over the steps, of training and of held-out text",
        draw=partial(_draw_loss, records),
    )
    rate = _Curve("lr", "learning rate", Color.GREEN)
    norm = _Curve("grad_norm", "gradient norm", Color.PURPLE)
    return (
        loss,
        _picture(records, "lr", "Learning rate: of the update.", rate),
        _picture(records, "grad_norm", "Gradient norm: of all parameters, before clipping.", norm),
    )


def _time_pictures(records: Sequence[StepRecord]) -> tuple[Picture, ...]:
    text = "Throughput: tokens that each rank trains on in a second."
    times = (
        _Curve("step_ms", "ms a step", Color.BLACK, "-", "step"),
        _Curve("comm_ms", "ms a step", Color.BLUE, "--", "transfers"),
        _Curve("exposed_ms", "ms a step", Color.VERMILLION, "-.", "exposed"),
    )
    return (
        _picture(records, "throughput", text, _Curve("tgs", "tokens / s / rank", Color.GREEN)),
        _picture(
            records,
            "exposed",
            "Time of a step on rank 0: the whole of it, the part in which transfers were under way,"
            " and the part for which compute was blocked on one.",
            *times,
        ),
    )


def _memory_picture(records: Sequence[StepRecord]) -> Picture:
    text = (
        "Memory: the most that was in use at once up to a step, on the rank that has most; of"
        " tensors on CUDA, of the whole process on CPU."
    )
    return _picture(records, "memory", text, _Curve("mem_gib", "peak memory (GiB)", Color.PURPLE))


class _Curve(NamedTuple):
    """A field of records over the steps."""

    field: str
    ylabel: str
    color: str
    linestyle: str = "-"
    label: str | None = None


def _picture(records: Sequence[StepRecord], name: str, caption: str, *curves: _Curve) -> Picture:
    alt = f"{caption.partition('.')[0].partition(':')[0]} over the steps"
    return Picture(name, caption, alt, partial(_draw, records, curves))


def _draw_loss(records: Sequence[StepRecord]) -> Figure:
    figure, axes = new_axes(xlabel="step", ylabel="loss (nats a token)")
    kept = [_GAP if record.skipped else record.loss for record in records]
    _line(axes, records, kept, color=Color.BLUE, label="training")
    evaluated = [record for record in records if record.val_loss is not None]
    if evaluated:
        values = [_GAP if record.val_loss is None else record.val_loss for record in evaluated]
        style = {"color": Color.VERMILLION, "linestyle": "--", "marker": "D"}
        _line(axes, evaluated, values, label="held-out text", **style)
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        bottom = axes.get_xaxis_transform()
        axes.plot(
            skipped,
            [0.04] * len(skipped),
            transform=bottom,
            color=Color.BLACK,
            marker="x",
            linestyle="none",
            label="update skipped",
        )
    _finish(axes, records)
    legend_above(axes)
    return figure


def _draw(records: Sequence[StepRecord], curves: Sequence[_Curve]) -> Figure:
    figure, axes = new_axes(xlabel="step", ylabel=curves[0].ylabel)
    for field, _, color, linestyle, label in curves:
        values = [getattr(record, field) for record in records]
        _line(axes, records, values, color=color, linestyle=linestyle, label=label)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 5))
    _finish(axes, records)
    if len(curves) > 1:
        legend_above(axes)
    return figure


def _line(
    axes: Axes,
    records: Sequence[StepRecord],
    values: Sequence[float],
    *,
    color: str,
    linestyle: str = "-",
    marker: str = "o",
    label: str | None = None,
) -> None:
    """Draw `values` over the steps of `records`; NaN is a gap, and a value between two has a mark.

    Infinite values are gaps too.
    """
    shown = [value if math.isfinite(value) else _GAP for value in values]
    padded = [_GAP, *shown, _GAP]
    alone = [i for i in range(len(shown)) if math.isnan(padded[i]) and math.isnan(padded[i + 2])]
    axes.plot(
        [record.step for record in records],
        shown,
        color=color,
        linestyle=linestyle,
        linewidth=1.8,
        marker=marker,
        markersize=4,
        markevery=range(len(shown)) if len(shown) <= _FEW else alone,
        label=label,
    )


def _finish(axes: Axes, records: Sequence[StepRecord]) -> None:
    first, last = records[0].step, records[-1].step
    margin = max(1.0, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins="auto", steps=[1, 2, 5, 10]))
