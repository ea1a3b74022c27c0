"""Draw a step and its transfers, by `fully_shard` and by ISP, over the same modelled link.

    PYTHONPATH=. python tools/overlap_picture.py docs/overlap.png

The step and the paced compute are those of `bench_overlap.py --paced 40` with 2 ranks; the
transfers of a step take as long as compute alone. The picture has rank 0 in the step of median
length.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from bench_overlap import Bench, options_parser, run_ranks
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from isp.core.comm import TimedTransfer

ROUNDS = 5
FONT = 13
EDGE = "#333333"
ROWS = {
    "fully_shard, default": "fully_shard, default settings",
    "fully_shard, async prefetch, reduce deferred": "fully_shard, explicit prefetch, best settings",
    "ours, per layer, wo": "ISP",
}
FORWARD, BACKWARD, WAIT = ("#dcdcdc", ""), ("#b4b4b4", ""), ("#d55e00", "")
"""Color and hatch of a bar; as in the page of a profile."""
KINDS = {"all_gather": ("#56b4e9", ""), "reduce_scatter": ("#009e73", "///")}
NAMES = {"all_gather": "all-gather of weights", "reduce_scatter": "reduce-scatter of gradients"}


class Step(NamedTuple):
    """The times of one step, in seconds."""

    forward: float
    """Seconds from the beginning of the step to the end of its forward."""
    end: float
    """Seconds from the beginning of the step to its end."""
    transfers: list[TimedTransfer]
    began: float
    """When the step began, by `time.perf_counter`, which also the times of `transfers` are of."""


class Drawing(Bench):
    """Times the three ways to train in `ROWS` (two of fully_shard, and ISP).

    Rank 0 draws the median step of each.
    """

    def run(self) -> None:
        rows = {row.name: row for row in self.rows if row.name in ROWS}
        self.rows = [self.alone, *rows.values()]
        self._check()
        self._timed(rows["ours, per layer, wo"])
        moves = self.log.take()
        alone = sorted(self._timed(self.alone).step for _ in range(ROUNDS))[ROUNDS // 2]
        self._calibrate([t for t in moves if t.kind in KINDS], alone)
        steps: dict[str, list[Step]] = {name: [] for name in ROWS}
        for _ in range(ROUNDS):
            for name, taken in steps.items():
                self._undisturbed(rows[name])
                began, forward, end, transfers = self.traces[name]
                taken.append(Step(forward - began, end - began, transfers, began))
        if self.rank == 0:
            medians = [sorted(taken, key=lambda s: s.end)[ROUNDS // 2] for taken in steps.values()]
            draw(dict(zip(ROWS.values(), medians, strict=True)), alone, self.options.trace)


def draw(steps: dict[str, Step], alone: float, path: str) -> None:
    """Draw a panel for each of `steps`, with a common time axis, to `path`.

    `alone` is the time of compute alone: a dashed line.
    """

    figure = Figure(figsize=(15, 6.6), layout="constrained")
    panels = figure.subplots(len(steps), sharex=True)
    for axes, (name, step) in zip(panels, steps.items(), strict=True):
        _panel(axes, name, step, alone)
    panels[-1].set_xlabel("ms since the step began", fontsize=FONT)
    panels[-1].set_xlim(0, max(step.end for step in steps.values()) * 1e3)
    looks = {"forward": FORWARD, "backward": BACKWARD, "compute waits": WAIT}
    looks |= {NAMES[kind]: look for kind, look in KINDS.items()}
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=EDGE, label=name)
        for name, (color, hatch) in looks.items()
    ]
    place = {"loc": "outside upper center", "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=FONT, **place)
    figure.savefig(path, dpi=144)


def _panel(axes: Axes, name: str, step: Step, alone: float) -> None:
    """Draw one step: a lane for compute and its waits, and a lane for the link."""
    axes.set_yticks([0, 1], ["compute", "link"])
    axes.set_ylim(1.5, -0.5)
    axes.tick_params(axis="both", labelsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#dddddd")
    axes.spines[["right", "top"]].set_visible(False)
    axes.axvline(alone * 1e3, color="black", linestyle="--", linewidth=1.5)
    blocked = sum(t.exposed for t in step.transfers)
    text = f"{name}: {step.end / alone:.2f} x compute alone, blocked for {blocked * 1e3:.0f} ms"
    axes.set_title(text, loc="left", fontsize=FONT + 1)
    spans = (0.0, step.forward, FORWARD), (step.forward, step.end, BACKWARD)
    for begin, end, look in spans:
        _bar(axes, 0, begin, end, look)
    # The link runs one transfer at a time: one begins when it is launched and the link is free.
    free = 0.0
    moved = [t for t in step.transfers if t.kind in KINDS]
    for t in sorted(moved, key=lambda t: t.ended):
        began = max(t.launched - step.began, free)
        free = t.ended - step.began
        _bar(axes, 1, began, free, KINDS[t.kind])
        if t.exposed > 1e-3:
            waited = t.wait_began - step.began
            _bar(axes, 0, waited, waited + t.exposed, WAIT)


def _bar(axes: Axes, lane: int, begin: float, end: float, look: tuple[str, str]) -> None:
    """Draw a bar from `begin` to `end` (seconds) in a lane, with color and hatch `look`."""
    color, hatch = look
    style = {"facecolor": color, "hatch": hatch, "edgecolor": EDGE, "linewidth": 0.4}
    place = (begin * 1e3, lane - 0.38), max(0.0, end - begin) * 1e3, 0.76
    axes.add_patch(Rectangle(*place, **style))


def main() -> None:
    options = options_parser().parse_args(["--paced", "40", "--tries", "1"])
    options.trace = sys.argv[1]
    run_ranks(2, options, bench=Drawing)


if __name__ == "__main__":
    main()
