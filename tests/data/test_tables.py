"""Tables, saved datasets and remote files give the same samples as the same lines of JSON."""

from __future__ import annotations

import csv
import importlib.util
import shutil
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from isp.data.dataset import Dataset
from isp.data.prepare import prepare
from tests.data.chat_folder import CHATML, chat_folder, write_lines
from tests.data.test_examples import TALK, opened
from tests.ranks import run_ranks

MORE = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "ef", "name": "x"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]


def samples(dataset: Dataset) -> list[list[Any]]:
    found = (dataset.sample(i) for i in range(2 * dataset.samples_per_epoch))
    return [[x.tolist() for x in sample[:3]] for sample in found]


def _writers(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Callable[[], str]]:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(lines)

    def parquet() -> str:
        pq.write_table(table, folder / "a.parquet", row_group_size=2)
        return str(folder / "a.parquet")

    def arrow(kind: str) -> str:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(str(folder / f"{kind}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        return str(folder / f"{kind}.arrow")

    def saved() -> str:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(lines).save_to_disk(folder / "saved", num_shards=2)
        return str(folder / "saved")

    return {
        "parquet": parquet,
        "arrow file": lambda: arrow("file"),
        "arrow stream": lambda: arrow("stream"),
        "saved": saved,
    }


def test_tables_give_the_samples_of_json_lines(tmp_path: Path) -> None:
    """Catches rows that are lost or reordered, and null keys taken as given, also in lines of JSON
    and inside messages.
    """
    pa = pytest.importorskip("pyarrow")
    template = CHATML.replace("message.content", "message | tojson")
    keys = {"tokenizer": str(chat_folder(tmp_path / "model", template)), "seq_len": 512}
    calls = [
        {**TALK[1], "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ({"x": 1}, {"y": [{"z": "a"}, {"w": "b"}]})
    ]
    lines: list[dict[str, Any]] = [
        {"messages": [TALK[0], calls[0]]},
        {"messages": MORE, "chat_template_kwargs": {"mode": "slow"}},
        {"messages": [TALK[0], calls[1], *TALK]},
    ]
    expected = samples(opened(write_lines(tmp_path / "a.jsonl", lines), **keys).train)
    writers = _writers(tmp_path, lines)
    # As `datasets` writes lines of JSON, too: with every key in every row.
    with pa.ipc.open_stream(writers["arrow stream"]()) as reader:
        rows = reader.read_all().to_pylist()
    assert rows[1]["messages"][0]["tool_calls"] is None
    writers["jsonl"] = lambda: str(write_lines(tmp_path / "nulls.jsonl", rows))
    for name, write in writers.items():
        assert samples(opened(write(), **keys).train) == expected, name
    texts: list[dict[str, Any]] = [{"text": "abcdefgh", "id": 1}, {"text": "i, j\nk", "id": 2}]
    expected = samples(opened(write_lines(tmp_path / "b.jsonl", texts)).train)
    path = _writers(tmp_path, texts)["parquet"]()
    odd = shutil.copy(path, tmp_path / "a[1].parquet")
    for name, separator in (("a.CSV", ","), ("b.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            rows_of = csv.DictWriter(file, texts[0], delimiter=separator)
            rows_of.writeheader()
            rows_of.writerows(texts)
    for source in (path, odd, tmp_path / "a.CSV", tmp_path / "b.tsv"):
        assert samples(opened(source).train) == expected, source
    assert samples(opened(str(prepare(path, tmp_path / "pair").prefix)).train) == expected


def test_folders_of_several_splits_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """Catches splits that are concatenated, a traceback for a damaged file, and a folder of files
    taken for a saved dataset.
    """
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list([{"text": "abcdefgh"}] * 4)
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"data.source=.*both holds the splits train, test: name"):
        opened(tmp_path / "both")
    assert opened(tmp_path / "both" / "test").train.samples_per_epoch == 4
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read"):
        opened(tmp_path / "bad.parquet")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/state.json").write_text('{"epoch": 1}')
    write_lines(tmp_path / "other/a.jsonl", [{"text": "abcdefgh"}])
    assert opened(tmp_path / "other").train.samples_per_epoch == 1


def test_rows_without_text_are_refused(tmp_path: Path) -> None:
    """Catches a null key reported as missing, and a traceback for bytes that are no text, or for
    values that Python cannot represent.
    """
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    no_text = pa.array([b"\xff"], pa.binary()).view(pa.string())
    for column, fault in (
        (["a", None], r"a.parquet, row 2 \(null: text\) has no key 'text', only 'id': set data"),
        (no_text, "a.parquet, column 'text', cannot be read: 'utf-8' codec can't decode"),
        (pa.array([2**62], pa.timestamp("us")), "column 'text', cannot be read: date value out of"),
        (pa.array([2**62], pa.duration("s")), "column 'text', cannot be read: Python int too"),
        (pa.array([2**31 - 1], pa.date32()), "column 'text', cannot be read: days=2147483647"),
    ):
        table = pa.table({"text": column, "id": list(range(len(column)))})
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=fault):
            opened(tmp_path / "a.parquet")


def test_a_missing_package_or_network_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback in place of the extra to install, or of what is wrong with a URL."""
    for url in ("foo://a/b", "zip://a::foo://b"):
        with pytest.raises(ValueError, match=f"^data.source={url} cannot be .*: foo\\)$") as e:
            opened(url)
        assert e.traceback[-1].path.name == "documents.py", "else it is shown as a traceback"
    with pytest.raises(ValueError, match=r"cannot be read .*: without a network, copy it to"):
        opened(f"file://{tmp_path}/absent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for source, package in ((tmp_path / "a.parquet", "pyarrow"), ("hf://a/b", "datasets")):
        with pytest.raises(ValueError, match=f"needs the {package} package: bash .* data "):
            opened(source)


def test_remote_files_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an old copy of a changed file, a .bin without its .idx, two files of one name of
    which one is kept, and other files of a saved dataset read as text.
    """
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("ISP_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    lines = [{"text": "abcdefgh"}, {"text": "ijk"}]
    local = write_lines(tmp_path / "a.jsonl", lines)
    memory.put(str(local), "/bucket/a.jsonl")
    expected = samples(opened(local).train)
    for source in ("memory://bucket/a.jsonl", "memory://bucket/*.jsonl", "memory://bucket"):
        assert samples(opened(source).train) == expected
    for folder in "cd":  # files of the same name
        memory.put(str(local), f"/several/{folder}/a.jsonl")
    for source in ("memory://several", "memory://several/*/a.jsonl"):
        assert opened(source).train.samples_per_epoch == 3
    memory.put(str(write_lines(tmp_path / "a.jsonl", lines * 2)), "/bucket/a.jsonl")
    assert opened("memory://bucket/a.jsonl").train.samples_per_epoch == 3
    if importlib.util.find_spec("datasets"):
        saved = _writers(tmp_path, lines)["saved"]()
        memory.put(saved, "/saved", recursive=True)
        assert samples(opened("memory://saved").train) == expected
    prefix = prepare(str(tmp_path / "a.jsonl"), tmp_path / "pair").prefix
    for suffix in (".bin", ".idx"):
        memory.put(f"{prefix}{suffix}", f"/pairs/p{suffix}")
    pair = opened("memory://pairs/p.bin").train
    assert samples(pair) == samples(opened(str(prefix)).train)
    memory.pipe("/bucket/inner/a.txt", b"not matched by bucket/*")
    assert opened("memory://bucket/*").train.samples_per_epoch == 3
    path = write_lines(tmp_path / "b.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}])
    prefix = prepare(str(path), tmp_path / "labelled").prefix
    for suffix in (".bin", ".idx", ".labels.bin", ".labels.idx"):
        memory.put(f"{prefix}{suffix}", f"/pairs/q{suffix}")
    labelled = opened("memory://pairs/q.bin").train
    assert samples(labelled) == samples(opened(str(prefix)).train)
    with pytest.raises(ValueError, match=r"memory://none/a.txt cannot be read \(FileNotFound"):
        opened("memory://none/a.txt")


def test_one_rank_of_a_machine_downloads_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file that every rank of a machine downloads."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("ISP_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "a.jsonl", [{"text": "abcdefgh"}])

    class Counted(fsspec.get_filesystem_class("file")):  # type: ignore[misc]
        protocol = "counted"
        root_marker = ""

        def get_file(self, source: str, target: str, **_: object) -> None:
            with (tmp_path / "copies").open("a") as file:
                file.write("x")
            time.sleep(0.2)
            shutil.copy(source, target)

    fsspec.register_implementation("counted", Counted, clobber=True)
    url = f"counted://{tmp_path}/a.jsonl"
    run_ranks(3, _open_source, url)
    assert (tmp_path / "copies").read_text() == "x"


def _open_source(rank: int, source: str) -> None:
    assert opened(source).train.samples_per_epoch


def test_the_query_of_a_url_is_not_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches file.jsonl?download=true read as plain text."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("ISP_CACHE", str(tmp_path / "cache"))
    local = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefgh"}])
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl?download=true&key=a/b"
        remote = opened(url).train
        server.shutdown()
    assert samples(remote) == samples(opened(local).train)


def test_other_formats_of_conversations_are_read(tmp_path: Path) -> None:
    """Catches a prompt that is trained, an answer without its end, and other names of roles."""
    keys = {"tokenizer": str(chat_folder(tmp_path / "model")), "seq_len": 128}
    chat = samples(opened(write_lines(tmp_path / "a.jsonl", [{"messages": TALK}]), **keys).train)
    path = write_lines(tmp_path / "b.jsonl", [{"conversations": SHAREGPT}])
    assert samples(opened(path, **keys).train) == chat
    lines: list[dict[str, Any]] = [{"prompt": TALK[:1], "completion": TALK[1:]}]
    of_turns = opened(write_lines(tmp_path / "c.jsonl", lines), **keys).train.sample(0)
    assert of_turns.tokens.tolist() == chat[0][0]
    assert np.count_nonzero(of_turns.labels != -100) in (3, 4)  # b, c, the turn's end, line feed
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "ab", "completion": "cd"}])
    of_text = opened(path, seq_len=6).train.sample(0)
    assert of_text.tokens.tolist() == [97, 98, 99, 100, 256, 256]
    assert of_text.labels.tolist() == [-100, 99, 100, 256, -100, -100]
    path = write_lines(tmp_path / "e.jsonl", [{"prompt": "ab", "completion": TALK}])
    with pytest.raises(ValueError, match=r"line 1: 'prompt' must be text that is not empty, or a"):
        opened(path, tokenizer=keys["tokenizer"])
