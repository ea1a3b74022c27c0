"""Memory over one step, in each mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from isp.profile import ModeProfile, Profile, RankProfile
from isp.report.compare import mode_color
from isp.report.page import Section
from isp.report.style import Picture, Size, legend_above, new_axes

__all__ = ["memory_section"]

_STYLES = {"mtp": ("o", "-"), "msp": ("s", "--"), "fsp": ("^", "-."), "isp": ("D", "-")}


def memory_section(profile: Profile) -> Section:
    """Memory over the time of a step, of the rank that has most in each mode."""
    picture = Picture(
        name="memory",
        caption="Memory over the step, on the rank that had most: of tensors on CUDA, of the whole"
        " process on CPU. A mark is a place where the phase changes.",
        alt="Memory in GiB over the time of a step, a line for each mode",
        draw=partial(_draw, profile.modes),
    )
    return Section(title="Memory over one step", pictures=(picture,))


def _largest(mode: ModeProfile) -> RankProfile:
    return max(mode.ranks, key=lambda rank: rank.peak_memory_gib)


def _draw(modes: Sequence[ModeProfile], size: Size) -> Figure:
    figure, axes = new_axes(size, xlabel="time since the step began (ms)", ylabel="memory (GiB)")
    for mode in modes:
        rank = _largest(mode)
        samples = rank.timeline.memory
        marker, linestyle = _STYLES.get(mode.mode, ("o", "-"))
        axes.plot(
            [sample.at_ms - rank.timeline.begin_ms for sample in samples],
            [sample.gib for sample in samples],
            color=mode_color(mode.mode),
            marker=marker,
            markersize=5,
            linestyle=linestyle,
            linewidth=1.8,
            label=f"{mode.mode} (rank {rank.rank})",
        )
    axes.update_datalim([(0, 0)])
    axes.margins(x=0.01, y=0.08)  # for the whole of the marks at the edges
    axes.set_ylim(bottom=0)
    legend_above(axes, columns=4 if size.width > size.height * 2 else 2)
    return figure
