"""`isp evaluate --png`: the loss by position as a curve, and the passkeys found as a grid."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isp.utils.files import written_whole
from isp.utils.text import counted, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from isp.metrics.evaluation import Evaluation, Passkeys, TextLosses

__all__ = ["draw_evaluation"]


def draw_evaluation(evaluation: Evaluation, file: Path) -> None:
    """Write a PNG with a panel for each part of `evaluation`; needs matplotlib."""
    from matplotlib.figure import Figure

    text, passkeys, trained = evaluation.text, evaluation.passkeys, evaluation.trained_length
    columns = max(len(text.buckets) if text else 0, len(passkeys.lengths) if passkeys else 0)
    heights = [3.6] if text else []
    heights += [1.6 + 0.45 * len(passkeys.depths)] if passkeys else []
    size = max(7.0, 1.5 + 0.8 * columns), 0.6 + sum(heights)
    figure = Figure(figsize=size, layout="constrained")
    title = textwrap.fill(shown(evaluation.model), 60).replace(
        "$", r"\$"
    )  # matplotlib reads $..$ as math
    if trained is not None:
        title += f"\ntrained on sequences of {trained:,} tokens (dashed line)"
    figure.suptitle(title)
    panels = iter(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if text:
        _draw_losses(next(panels), text, trained)
    if passkeys:
        _draw_passkeys(next(panels), passkeys, trained)
    written_whole(file, lambda new: figure.savefig(new, format="png", dpi=150))


def _draw_losses(axes: Axes, text: TextLosses, trained: int | None) -> None:
    """Draw the loss of each bucket; buckets without tokens are left out."""
    buckets = [bucket for bucket in text.buckets if bucket.tokens]
    losses = [math.nan if bucket.loss is None else bucket.loss for bucket in buckets]
    axes.plot(range(len(losses)), losses, marker="o")
    lowest = min((loss for loss in losses if math.isfinite(loss)), default=0.0)
    style: dict[str, Any] = {"ha": "center", "xytext": (0, 8), "textcoords": "offset points"}
    # A white box behind each number hides the curve there, so that the number can be read.
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for at, loss in enumerate(losses):
        name, y = (f"{loss:.2f}", loss) if math.isfinite(loss) else ("not finite", lowest)
        axes.annotate(name, (at, y), **style)
    axes.set_xlim(-0.5, len(buckets) - 0.5)
    axes.margins(y=0.2)
    axes.grid(axis="y", color="#dddddd")
    axes.set_title("Loss by position")
    axes.set_ylabel("loss (nats per token)")
    _name_columns(axes, [bucket.places for bucket in buckets], "position in the sequence (tokens)")
    if trained is not None:
        _mark_trained(axes, sum(bucket.begin < trained for bucket in buckets))


def _draw_passkeys(axes: Axes, passkeys: Passkeys, trained: int | None) -> None:
    """Draw the share of keys found by length and depth."""
    rates = [[100 * found / passkeys.keys for found in row] for row in passkeys.found]
    by_depth = list(zip(*rates, strict=True))
    axes.imshow(by_depth, cmap="Greens", vmin=0, vmax=100, aspect="auto")
    for lane, row in enumerate(by_depth):
        for column, rate in enumerate(row):
            color = "white" if rate > 60 else "black"
            axes.text(column, lane, f"{rate:.0f}", ha="center", va="center", color=color)
    keys = f"{counted(passkeys.keys, 'key')} of {counted(passkeys.digits, 'digit')}"
    axes.set_title(f"Passkeys found (%): {keys} at each length and depth")
    axes.set_yticks(range(len(by_depth)), [f"{100 * depth:.0f}" for depth in passkeys.depths])
    axes.set_ylabel("depth of the key (%)")
    _name_columns(axes, [f"{n:,}" for n in passkeys.lengths], "length of the prompt (tokens)")
    if trained is not None:
        _mark_trained(axes, sum(length <= trained for length in passkeys.lengths))


def _name_columns(axes: Axes, names: list[str], label: str) -> None:
    """Label the columns 0, 1, ..; long labels are slanted, since they would touch."""
    axes.set_xticks(range(len(names)), names)
    if max(map(len, names), default=0) > 8:
        for text in axes.get_xticklabels():
            text.set(rotation=25, ha="right", rotation_mode="anchor")
    axes.set_xlabel(label)


def _mark_trained(axes: Axes, inside: int) -> None:
    """Draw a line after the first `inside` columns, those within the trained length."""
    axes.axvline(inside - 0.5, color="#d55e00", linestyle="--", linewidth=2)
