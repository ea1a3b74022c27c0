"""Streams: every document once an epoch, and positions from which any number of ranks resume."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isp.checkpoint.folder import newest_at
from isp.config import load_config, to_plain
from isp.data import stream
from isp.data.mixture import MixedDataset
from isp.data.sources import check_sources, open_datasets
from isp.data.stream import StreamDataset
from isp.data.tokenizer import ByteTokenizer
from isp.metrics import read_metrics
from isp.train.state.resume import check_start
from isp.train.state.saved_run import stream_place
from tests.data.chat_folder import write_lines
from tests.train.jobs import numbers, run_folders, run_forked, write_job


def _files(folder: Path) -> list[Path]:
    """Write files of 7, 1 and 4 distinct documents, and return their paths."""
    folder.mkdir()
    return [
        write_lines(folder / f"{x}.jsonl", [{"text": f"{x}{i}" * (3 + i)} for i in range(count)])
        for x, count in (("a", 7), ("b", 1), ("c", 4))
    ]


def test_an_epoch_has_every_document_once_from_any_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a document lost at the end of a block, file or epoch, and a position off by one."""
    monkeypatch.setattr(stream, "BLOCK", 3)
    files = _files(tmp_path / "text")

    def opened(*, seq_len: int = 5, seed: int = 1) -> StreamDataset:
        return StreamDataset(
            "text",
            files,
            ByteTokenizer().encode,
            eos_id=ByteTokenizer.eos_id,
            text_key="text",
            seq_len=seq_len,
            pack=True,
            seed=seed,
        )

    texts = [json.loads(line)["text"] for file in files for line in file.open()]
    epoch = sum(len(text) + 1 for text in texts)
    whole, dataset = opened(seq_len=epoch), opened()
    orders = []
    for number in range(2):
        sample = whole.sample(number)
        pieces = np.split(sample.tokens, np.flatnonzero(sample.tokens == 256) + 1)
        orders.append([ByteTokenizer().decode(piece[:-1]) for piece in pieces[:-1]])
        assert sorted(orders[-1]) == sorted(texts)
        assert np.array_equal(sample.labels[:-1] == -100, sample.tokens[:-1] == 256)
    assert orders[0] != orders[1] != texts
    both = np.concatenate([whole.sample(i).tokens for i in range(2)])
    samples = [dataset.sample(i) for i in range(2 * epoch // 5)]
    assert np.array_equal(np.concatenate([s.tokens for s in samples]), both[: len(samples) * 5])
    for index in range(len(samples)):
        place, other = opened().tell(index), opened()
        other.seek(index, place)
        assert np.array_equal(other.sample(index)[:3], samples[index][:3]), (index, place)
        assert other.tell(index + 1) == dataset.tell(index + 1)
    assert not np.array_equal(opened(seed=2).sample(0)[:3], samples[0][:3])


def test_a_stream_resumes_on_other_ranks_from_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches batches that depend on ranks, and a run that restarts the stream."""
    job = write_job(tmp_path)
    for name in ("x", "y"):
        _files(tmp_path / name)
    mixture = f"[{{path: {tmp_path}/x, weight: 2, name: x}}, {{path: {tmp_path}/y, name: y}}]"
    words = [f"--data.source={mixture}", "--data.streaming", "--data.seq_len=16"]
    words += ["--training.global_batch_size=4", "--training.dtype=float64"]
    one = ["--parallel.tensor.size=1", "--parallel.weight.size=1"]
    run_forked(job, *words, "--job.name=whole", *one, "--training.steps=6", num_ranks=1)
    run_forked(job, *words, "--checkpoint.interval=2", "--training.steps=4", num_ranks=2)
    sought, seek = tmp_path / "sought", StreamDataset.seek

    def noted(self: StreamDataset, index: int, place: Sequence[int]) -> None:
        with sought.open("a") as file:
            file.write(f"{list(place)}\n")
        seek(self, index, place)

    monkeypatch.setattr(StreamDataset, "seek", noted)
    run_forked(job, *words, *one, "--training.steps=6", num_ranks=2)
    monkeypatch.undo()
    (whole,), (parts,) = run_folders(job, "whole"), run_folders(job)
    assert len(read_metrics(parts / "metrics.jsonl")) == 6
    for there, here in zip(numbers(whole), numbers(parts), strict=True):
        assert here == pytest.approx(there, rel=1e-9)
    config = load_config(job, words).data
    train = open_datasets(config, seed=0).train
    assert isinstance(train, MixedDataset)
    manifest = json.loads((parts / "checkpoint/step_4/manifest.json").read_text())
    places = train.tell(16)
    assert json.loads(manifest["content"])["shared"]["stream"] == places
    assert {f"{place}" for place in places} <= {*sought.read_text().split("\n")}

    words += ["--checkpoint.allow_changes", f"--data.source={tmp_path}/x"]
    words += ["--data.streaming_restart"]
    run_forked(job, *words, *one, "--training.steps=7", num_ranks=1)
    assert len(read_metrics(parts / "metrics.jsonl")) == 7
    assert (
        "step 7 begins at the beginning of data.source" in (parts / "logs/rank_0.log").read_text()
    )


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Train one step on a streamed mixture; return the job and its arguments."""
    job = write_job(tmp_path_factory.mktemp("streamed"))
    for name in ("x", "y"):
        _files(job.parent / name)
    mixture = f"[{{path: {job.parent}/x, weight: 2}}, {{path: {job.parent}/y}}]"
    words = ["--parallel.tensor.size=1", "--parallel.weight.size=1", "--data.streaming"]
    words += [f"--data.source={mixture}", "--checkpoint.allow_changes"]
    run_forked(job, *words, "--training.steps=1", num_ranks=1)
    return job, words


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--data.source={0}/x", "it was saved without one"),
        ("--data.source=[{{path: {0}/x, weight: 2}}, {{path: {0}/z}}]", "data.source.1.path: "),
        ("--training.seed=1", "training.seed: 0 there, 1 now"),
        ("--data.text_key=body", "data.text_key: text there, body now"),
        ("--data.source=[{{path: {0}/x, weight: 3}}, {{path: {0}/y, name: y}}]", ""),
        ("--data.micro_num=2", ""),
        ("--data.streaming=false", ""),
    ],
    ids=["no mixture", "a source", "a seed", "a column", "a weight", "a batch", "no stream"],
)
def test_a_checkpoint_without_a_stream_position_is_refused(
    streamed: tuple[Path, list[str]], words: str, why: str
) -> None:
    """Catches a source read again from its start, or from the position of another source, where
    `checkpoint.allow_changes` was set for another change.
    """
    job, before = streamed
    now = [*before, "--training.steps=2", words.format(job.parent)]

    def check(*more: str) -> None:
        config = load_config(job, [*now, *more])
        check_start(config, config.topology(1))

    if why:
        with pytest.raises(ValueError, match=r"no place in the stream of data\.source") as refused:
            check()
        (line,) = str(refused.value).splitlines()
        assert f"({why}" in line
        assert line.endswith("from its beginning, data.streaming_restart=true")
    check("--data.streaming_restart")
    if not why:
        check()


@pytest.mark.parametrize("place", [None, [0], [[0] * 5], [[0] * 5, [0, 0, 0, 0, -1]], "place"])
def test_a_malformed_stream_position_is_refused(
    streamed: tuple[Path, list[str]], place: object
) -> None:
    """Catches a traceback, or a source read again, for a value that is no position."""
    job, words = streamed
    config, info = load_config(job, words), newest_at(run_folders(job)[0])
    shared = {**info.manifest.shared, "stream": place}
    other = replace(info, manifest=info.manifest.model_copy(update={"shared": shared}))
    assert stream_place(info, config) == info.manifest.shared["stream"]
    with pytest.raises(ValueError, match=r"no place .* \(it was saved without one\)"):
        stream_place(other, config)


def test_a_position_stays_valid_when_a_url_is_signed_anew(streamed: tuple[Path, list[str]]) -> None:
    """Catches a source read again from its start because its URL has a new signature, or was saved
    without its credentials.
    """
    job, _ = streamed
    info, alone = newest_at(run_folders(job)[0]), ["--data.streaming", "--data.source"]
    urls = [f"https://me:word@a.org/x.jsonl?X-Amz-Signature={number}" for number in range(2)]
    first, second = (load_config(job, [*alone, url]) for url in urls)
    shared = {"config": to_plain(first, redact=True), "stream": [0] * 5}
    kept = replace(info, manifest=info.manifest.model_copy(update={"shared": shared}))
    assert stream_place(kept, first) == stream_place(kept, second) == [0] * 5


def test_sources_that_cannot_be_streamed_are_refused(tmp_path: Path) -> None:
    """Catches conversations read as text, and held-out text that is trained on."""
    job = write_job(tmp_path)
    lines = write_lines(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "b"}])
    config = load_config(job, [f"--data.source={lines}", "--data.streaming"]).data
    with pytest.raises(ValueError, match=r"data.streaming is for text, but .*chat.jsonl holds"):
        check_sources(config, ByteTokenizer())
    with pytest.raises(ValueError, match=r"give data.valid_source in place of data.valid_fraction"):
        load_config(job, ["--data.streaming", "--data.valid_fraction=0.1"])
    (tmp_path / "empty.jsonl").write_text("\n")
    config = load_config(job, [f"--data.source={tmp_path}/empty.jsonl", "--data.streaming"]).data
    with pytest.raises(ValueError, match=r"empty.jsonl holds no documents"):
        open_datasets(config, seed=0).train.sample(0)
