"""The report of an evaluation: loss by position, and passkeys over lengths and depths."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from isp.metrics.evaluation import BUCKET_COLUMNS, Evaluation, Passkeys, TextLosses
from isp.profile.table import Table
from isp.report.page import Page, Section
from isp.report.style import (
    FONT,
    WIDTH,
    Color,
    Look,
    Picture,
    add_bar,
    key,
    legend_above,
    new_axes,
    new_lanes,
)

__all__ = ["evaluation_page"]

_RATES = LinearSegmentedColormap.from_list("rates", ["#f7f7f5", Color.GREEN])
_GRID = "#d9d9d9"
_WITHIN, _BEYOND = Look(Color.BLUE), Look(Color.VERMILLION, "////")


def evaluation_page(evaluation: Evaluation) -> Page:
    """The page of an evaluation."""
    text, passkeys, trained = evaluation.text, evaluation.passkeys, evaluation.trained_length
    facts = (
        ("weights", evaluation.model),
        ("read by", f"{evaluation.layout}, in {evaluation.dtype}"),
        ("trained on sequences of", "not known" if trained is None else f"{trained:,} tokens"),
    )
    sections, lead = [Section(title="The model", facts=facts)], []
    if passkeys is not None:
        for where in ("within", "beyond"):
            beyond = where == "beyond"
            lengths = [
                n for n in passkeys.lengths if (trained is not None and n > trained) is beyond
            ]
            if lengths:
                rate = sum(map(passkeys.rate, lengths)) / len(lengths)
                of = "at all lengths" if trained is None else f"{where} {trained:,} tokens"
                lead.append(f"{rate:.0%} of the passkeys found {of}.")
    if text is not None:
        loss = text.loss_within(text.length)
        shown = "not finite" if loss is None else f"{loss:.4f}"
        lead.append(f"Loss {shown} over sequences of {text.length:,} tokens.")
        sections.append(_text_section(text, trained))
    if passkeys is not None:
        sections.append(_passkey_section(passkeys, trained))
    return Page(
        name="evaluation",
        title=f"{evaluation.model}: evaluated at length",
        lead=" ".join(lead) or "Nothing was asked for.",
        command=evaluation.command,
        sections=tuple(sections),
    )


def _text_section(text: TextLosses, trained: int | None) -> Section:
    rows = (text.shown(bucket) for bucket in text.buckets if bucket.tokens)
    return Section(
        title="Loss by position",
        texts=(
            f"{text.rows} sequences of {text.length:,} tokens, {text.source}. The position of a"
            f" token is the number of tokens before it in its sequence.",
        ),
        table=Table([BUCKET_COLUMNS, *rows]),
        pictures=(
            Picture(
                name="loss_by_position",
                caption="Loss of the tokens at ranges of positions. It rises where the model no"
                " longer understands positions.",
                alt="Bars of loss over positions",
                draw=partial(_draw_text, text, trained),
            ),
        ),
    )


def _draw_text(text: TextLosses, trained: int | None) -> Figure:
    figure, axes = new_axes(xlabel="position in the sequence", ylabel="loss (nats a token)")
    shown = [bucket for bucket in text.buckets if bucket.tokens]
    top = max((bucket.loss or 0.0 for bucket in shown), default=0.0) or 1.0
    for index, bucket in enumerate(shown):
        loss = bucket.loss or 0.0
        name = "not finite" if bucket.loss is None else f"{loss:.2f}"
        look = _BEYOND if trained is not None and bucket.begin >= trained else _WITHIN
        hover = f"{bucket.places}: loss {name}, {bucket.tokens:,} tokens"
        begin, end = index - 0.4, index + 0.4
        add_bar(axes, begin, end, top=0, height=loss, look=look, hover=hover)
        axes.text(index, loss + 0.01 * top, name, ha="center", va="bottom")
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylim(0, 1.12 * top)
    _name_columns(axes, [bucket.places for bucket in shown])
    axes.grid(visible=False, axis="x")
    if trained is not None:
        legend_above(axes, [key(f"within {trained:,} tokens", _WITHIN), key("beyond", _BEYOND)])
    return figure


def _name_columns(axes: Axes, names: list[str]) -> None:
    """Name the columns 0, 1, ..; slanted where they would touch."""
    axes.set_xticks(range(len(names)), names)
    if sum(map(len, names)) * FONT * 0.75 > WIDTH:
        axes.tick_params(axis="x", labelrotation=40)


def _passkey_section(passkeys: Passkeys, trained: int | None) -> Section:
    return Section(
        title="Passkeys",
        texts=(
            f"A number of {passkeys.digits} digits is hidden once in text that says nothing,"
            f" and asked for at the end. {passkeys.keys} of them at each length and depth;"
            f" a key counts if the model, always writing the likeliest token, writes all of it.",
        ),
        pictures=(
            Picture(
                name="passkeys",
                caption="Passkeys found, in percent, by the length of the prompt and the depth of"
                " the key: 0% is the beginning.",
                alt="Heat map of passkeys found over lengths and depths",
                draw=partial(_draw_passkeys, passkeys, trained),
            ),
        ),
    )


def _draw_passkeys(passkeys: Passkeys, trained: int | None) -> Figure:
    depths = [f"{depth:.0%}" for depth in passkeys.depths]
    top = 0.5 if trained is None else 1.0
    figure, axes = new_lanes(
        depths, xlabel="tokens of the prompt", top=top, height=150 + 44 * len(depths)
    )
    axes.set_ylabel("depth of the key")
    for column, (length, row) in enumerate(zip(passkeys.lengths, passkeys.found, strict=True)):
        for lane, found in enumerate(row):
            place, of = f"{length:,} tokens, depth {depths[lane]}", f"{found} of {passkeys.keys}"
            add_bar(
                axes,
                column - 0.5,
                column + 0.5,
                top=lane - 0.5,
                height=1,
                look=Look(to_hex(_RATES(found / passkeys.keys))),
                hover=f"{place}: {of} keys found",
                edge=_GRID,
            )
            percent = f"{100 * found / passkeys.keys:.0f}"
            axes.text(column, lane, percent, ha="center", va="center", color=Color.BLACK)
    columns = len(passkeys.lengths)
    axes.set_xlim(-0.5, columns - 0.5)
    _name_columns(axes, [f"{length:,}" for length in passkeys.lengths])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    if trained is not None:
        edge = sum(length <= trained for length in passkeys.lengths) - 0.5
        if 0 <= edge <= columns - 1:
            axes.plot([edge, edge], [-1, len(depths) - 0.5], color=Color.BLACK, linewidth=2.5)
            axes.text(edge - 0.05, -0.75, "trained on", ha="right", va="center")
            axes.text(edge + 0.05, -0.75, "beyond", ha="left", va="center")
    return figure
