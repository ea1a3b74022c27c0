"""`isp evaluate` measures a run, a checkpoint or a Hugging Face folder on long text."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from isp.cli.options import (
    Run,
    add_nproc,
    add_option,
    add_reading,
    not_negative,
    positive,
)
from isp.cli.output import say, show_progress
from isp.utils.files import write_whole

if TYPE_CHECKING:
    from isp.evaluation.engine import EvaluationLayout
    from isp.evaluation.evaluate import TextRows
    from isp.evaluation.passkey import PasskeyPrompts
    from isp.evaluation.source import Source

__all__ = ["add_options"]

_NUMBERS = {
    "rows": (not_negative, 16, "sequences of text to read, at most; 0: no text"),
    "keys": (not_negative, 10, "passkeys at each length and depth; 0: no passkeys"),
    "digits": (positive, 5, "digits of a passkey"),
    "depths": (positive, 5, "number of depths, from the beginning to the end"),
    "seed": (not_negative, 0, "seed of the passkeys"),
    "batch-tokens": (positive, 16_384, "tokens per forward; at least one prompt"),
}


def add_options(parser: argparse.ArgumentParser) -> Run:
    """Add the model, the data and its amount, and the ranks."""
    add_reading(parser)
    add_nproc(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text, as in data.source (default: the run's held-out text)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help="where the buckets of positions end, and the lengths of passkey prompts, in tokens"
        " (default: training length / 8, doubled up to 4 times the training length)",
    )
    for name, (kind, default, meaning) in _NUMBERS.items():
        add_option(parser, name, "N", kind, meaning, default)
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where to write evaluation.json (default: RUN/evaluation; nowhere if there is no run)",
    )
    parser.add_argument(
        "--png", metavar="FILE", type=Path, help="also draw the loss by position, or the passkeys"
    )
    parser.epilog = (
        "A checkpoint of any layout can be read. N ranks read it in mtp mode. With"
        " --parallel.tensor.mode isp, each sequence is sharded over the ranks, so long ones fit."
    )
    return _run


def _lengths(text: str) -> list[int]:
    """Parse increasing lengths; for argparse."""
    found = [positive(word) for word in text.split(",")]
    if found != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text} must increase")
    return found


def _run(args: argparse.Namespace) -> int:
    """Check all options, then evaluate here or on ranks that are started for it."""
    from isp.cli.launch import speaks, start_ranks, world_size
    from isp.evaluation.engine import choose_layout
    from isp.evaluation.evaluate import open_rows
    from isp.evaluation.passkey import PasskeyPrompts
    from isp.evaluation.source import open_source
    from isp.step.setup import check_device
    from isp.utils.text import counted

    if args.png is not None:
        from isp.utils.environment import require

        require("--png", "matplotlib", extra="report")
    ranks, path = world_size(args.nproc), Path(args.path)
    source = open_source(path, dtype=args.dtype, tokenizer=args.tokenizer)
    layout = choose_layout(source.model, ranks, args.overrides)
    if layout.ranks < ranks and args.nproc is None:
        raise ValueError(f"torchrun has set {counted(ranks, 'rank')}; {layout.note}")
    check_device(args.device, 1 if args.nproc is None else layout.ranks)
    if not (args.rows or args.keys):
        raise ValueError("--rows 0 --keys 0 leaves nothing to evaluate: leave out one of them")
    args.lengths = _checked(args.lengths, source)
    args.output = _output(args, path)
    notes, rows = [layout.note], None
    if args.rows:
        rows = open_rows(source, files=args.data, length=args.lengths[-1])
        if rows is None:
            notes.append("no text was held out for evaluation: name files with --data")
    prompts = PasskeyPrompts(source.encode, digits=args.digits)
    if rows is None and not (args.keys and args.lengths[-1] >= prompts.shortest):
        raise ValueError(
            f"nothing to evaluate: name text with --data, or lengths of {prompts.shortest} tokens"
            f" and more, which passkeys need"
        )
    if args.keys and args.lengths[0] < prompts.shortest:
        notes.append(f"a passkey prompt has {prompts.shortest} tokens and more: none are shorter")
    if args.output is not None:
        # A folder that cannot be made is an error now, not after the evaluation.
        Path(args.output).mkdir(parents=True, exist_ok=True)
    if args.png is not None:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        if args.png.is_dir():
            raise ValueError(f"--png {args.png} is a folder: name a file in it")
    if speaks():
        for note in filter(None, notes):
            say(f"note: {note}", error=True)
        say(f"{source.title}, {source.dtype}, {layout.describe()}", error=True)
    if args.nproc is not None and layout.ranks > 1:
        return start_ranks(layout.ranks, args.words)
    _evaluate(args, source, layout, rows, prompts)
    return 0


def _checked(lengths: list[int] | None, source: Source) -> list[int]:
    """Return the given `lengths`, or multiples of the length in training if none are given.

    Raises ValueError if a given length is longer than the model's table of positions.
    """
    trained, limit = source.trained_length, source.position_limit
    if lengths is not None:
        if limit is not None and lengths[-1] > limit:
            raise ValueError(
                f"--lengths {lengths[-1]}: the model has a table of {limit:,} positions: use"
                f" shorter ones"
            )
        return lengths
    if trained is None:
        raise ValueError("the length of the training sequences is not known: give --lengths")
    found = sorted({max(1, trained * times // 8) for times in (1, 2, 4, 8, 16, 32)})
    return [length for length in found if limit is None or length <= limit]


def _output(args: argparse.Namespace, path: Path) -> str | None:
    """Return the folder to write to: --output, or RUN/evaluation if `path` is a run, or None."""
    from isp.train.folder.run_folder import RunFolder

    if args.output is None and RunFolder(path).config_file.is_file():
        return str(path / "evaluation")
    output: str | None = args.output
    return output


def _evaluate(
    args: argparse.Namespace,
    source: Source,
    layout: EvaluationLayout,
    rows: TextRows | None,
    prompts: PasskeyPrompts,
) -> None:
    """Evaluate on this rank; rank 0 prints and writes the result."""
    from isp.cli.launch import without_nproc
    from isp.core.comm import Mesh, World
    from isp.core.mesh import Topology
    from isp.evaluation.evaluate import Track, describe, find_passkeys, text_losses, untracked
    from isp.metrics.evaluation import EVALUATION_FILE, Evaluation
    from isp.step.setup import device_of

    device, text, passkeys = device_of(args.device), None, None
    words = without_nproc(args.words[1:])
    with World(device) as world:
        mesh = Mesh(Topology.create(layout.ranks, layout.parallel), world.rank)
        engine = source.engine(layout.parallel, mesh, device)
        # All ranks run the same loops; one of them shows how far they are.
        track: Track = show_progress if world.rank == 0 else untracked
        if rows is not None:
            text = text_losses(
                engine,
                rows.dataset,
                lengths=args.lengths,
                rows=args.rows,
                batch_tokens=args.batch_tokens,
                source=rows.name,
                track=track,
            )
        lengths = [length for length in args.lengths if length >= prompts.shortest]
        if args.keys and lengths:
            passkeys = find_passkeys(
                engine,
                source,
                prompts,
                lengths=lengths,
                depths=[i / max(1, args.depths - 1) for i in range(args.depths)],
                keys=args.keys,
                seed=args.seed,
                batch_tokens=args.batch_tokens,
                track=track,
            )
        if world.rank != 0:
            return
    evaluation = Evaluation(
        model=source.title,
        dtype=source.dtype,
        layout=layout.describe(),
        trained_length=source.trained_length,
        command=shlex.join(["isp", "evaluate", f"--nproc={layout.ranks}", *words]),
        text=text,
        passkeys=passkeys,
    )
    say(describe(evaluation))
    if args.output is not None:
        file = Path(args.output) / EVALUATION_FILE
        write_whole(file, evaluation.to_json(indent=1))
        say(f"\nwrote {file}")
    if args.png is not None:
        from isp.cli.evaluation_picture import draw_evaluation

        draw_evaluation(evaluation, args.png)
        say(f"\nwrote {args.png}")
