"""The .bin/.idx format, against bytes written by hand and against damaged files."""

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from isp.data.indexed import (
    _DTYPES,
    IndexedDataset,
    IndexedDatasetWriter,
    indexed_prefix,
    token_dtype,
)

# Three documents in three sequences, as Megatron-LM writes them: [5 6 7][8], none, [9 10].
GOLDEN_BIN = bytes.fromhex("0500 0600 0700 0800 0900 0a00")
GOLDEN_IDX = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX and two zeros
    "0100000000000000"  # version
    "08"  # uint16
    "0300000000000000"  # sequences
    "0400000000000000"  # document indices: one more than documents
    "03000000 01000000 02000000"  # tokens of each sequence
    "0000000000000000 0600000000000000 0800000000000000"  # where each begins, in bytes
    "0000000000000000 0200000000000000 0200000000000000 0300000000000000"
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Write a pair with the bytes above and return its prefix."""
    (tmp_path / "g.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "g.idx").write_bytes(GOLDEN_IDX)
    return tmp_path / "g"


def documents(prefix: Path) -> list[list[int]]:
    return [tokens.tolist() for tokens in IndexedDataset(prefix)]


def test_files_of_megatron_are_read(golden: Path) -> None:
    """Catches a misread layout, which a round trip through ISP's writer would not show."""
    dataset = IndexedDataset(golden)
    assert documents(golden) == [[5, 6, 7, 8], [], [9, 10]]
    assert dataset.lengths.tolist() == [4, 0, 2]
    assert (len(dataset), dataset.num_tokens) == (3, 6)
    assert dataset.read(0, 2, 4).tolist() == [7, 8]  # across two sequences


def test_files_have_the_bytes_of_megatron(tmp_path: Path) -> None:
    """Catches any difference in what Megatron-LM's tools would read."""
    with IndexedDatasetWriter(tmp_path / "g", dtype=token_dtype(257)) as writer:
        writer.add_document(np.array([5, 6, 7]), np.array([8]))
        writer.add_document()
        writer.add_document(np.array([9, 10]))
    assert (tmp_path / "g.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "g.idx").read_bytes() == GOLDEN_IDX
    assert sorted(os.listdir(tmp_path)) == ["g.bin", "g.idx"]


def test_modes_of_multimodal_datasets_are_skipped(golden: Path) -> None:
    """Catches a valid file, with one more byte for each sequence, reported as damaged."""
    golden.with_suffix(".idx").write_bytes(GOLDEN_IDX + b"\0\1\0")
    assert documents(golden) == [[5, 6, 7, 8], [], [9, 10]]


@pytest.mark.parametrize("code", _DTYPES)
def test_every_integer_type_round_trips(tmp_path: Path, code: int) -> None:
    """Catches a wrong code or size of one of the types."""
    tokens = np.array([0, 1, np.iinfo(_DTYPES[code]).max], dtype=np.int64)
    with IndexedDatasetWriter(tmp_path / "x", dtype=_DTYPES[code]) as writer:
        writer.add_document(tokens)
    assert documents(tmp_path / "x") == [tokens.tolist()]
    assert (tmp_path / "x.idx").read_bytes()[17] == code


@pytest.mark.parametrize("token", [-1, 65536])
def test_ids_that_do_not_fit_the_dtype_are_refused(tmp_path: Path, token: int) -> None:
    """Catches ids that silently wrap around, by one at either end."""
    with IndexedDatasetWriter(tmp_path / "x", dtype=_DTYPES[8]) as writer:
        with pytest.raises(ValueError, match=rf"{token} do not fit uint16"):
            writer.add_document(np.array([token]))
        writer.add_document(np.array([0, 65535]))
    assert documents(tmp_path / "x") == [[0, 65535]]


def test_token_dtype_follows_megatron() -> None:
    """Catches a vocabulary at the limit that gets the wrong dtype."""
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_random_datasets_round_trip(tmp_path: Path) -> None:
    """Catches errors at empty documents and sequences at any position."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sets = [
            [rng.integers(0, 256, rng.integers(0, 4)) for _ in range(rng.integers(0, 4))]
            for _ in range(rng.integers(1, 8))
        ]
        sets.append([np.array([1])])
        with IndexedDatasetWriter(tmp_path / "x", dtype=token_dtype(256)) as writer:
            for sequences in sets:
                writer.add_document(*sequences)
        flat = [[int(t) for sequence in sequences for t in sequence] for sequences in sets]
        assert documents(tmp_path / "x") == flat


def patched(at: int, data: bytes) -> bytes:
    return GOLDEN_IDX[:at] + data + GOLDEN_IDX[at + len(data) :]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "is not a Megatron index, it begins with b''"),
        (b"PK", "is not a Megatron index"),
        (patched(0, b"PK"), "is not a Megatron index, it begins with b'PKIDIDX"),
        (GOLDEN_IDX[:33], "is cut short: it has 33 bytes where its header"),
        (GOLDEN_IDX[:-1], "is cut short: it has 101 bytes where its header"),
        (GOLDEN_IDX + b"\0", "is too long"),
        (patched(18, struct.pack("<Q", 2**62)), "is cut short"),
        (patched(9, b"\2"), "has version 2 and type code 8, known are version 1"),
        (patched(17, b"\0"), "and type code 0, known are version 1 and the codes of token ids (1"),
        (patched(17, b"\x07"), "and type code 7"),
        (patched(18, bytes(8))[:66], "holds no documents"),
        (patched(34, struct.pack("<i", -3)), "is damaged"),
        (patched(46, b"\2"), "is damaged"),
        (patched(70, b"\1"), "is damaged"),
        (patched(94, b"\2"), "is damaged"),
        (patched(78, b"\3"), "is damaged"),
        (patched(78, b"\xff" * 8), "is damaged"),
    ],
)
def test_a_damaged_index_is_refused(golden: Path, index: bytes, message: str) -> None:
    """Catches damage that would be read as tokens, and an error without the file or what to do."""
    golden.with_suffix(".idx").write_bytes(index)
    with pytest.raises(ValueError, match=r"g\.idx ") as refused:
        IndexedDataset(golden)
    assert message in str(refused.value)
    assert "isp data prepare" in str(refused.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short"),
        (GOLDEN_BIN[:-1], "has 11 bytes where g.idx says 12 (6 tokens of 2): it is cut short"),
        (GOLDEN_BIN + b"\0\0", "not the one this index was written for"),
    ],
)
def test_a_bin_of_another_length_is_refused(golden: Path, data: bytes, message: str) -> None:
    """Catches tokens read beyond the end of the file, and a pair whose files are of different
    runs.
    """
    golden.with_suffix(".bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"g\.bin has") as refused:
        IndexedDataset(golden)
    assert message in str(refused.value)


def test_a_dataset_of_empty_documents_is_read(tmp_path: Path) -> None:
    """Catches numpy's error for mapping an empty file."""
    index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 0, 0, 0, 1)
    (tmp_path / "g.idx").write_bytes(index)
    (tmp_path / "g.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no tokens"):
        IndexedDataset(tmp_path / "g")


def test_a_missing_file_of_a_pair_is_named(golden: Path) -> None:
    """Catches a message that names the prefix instead of the missing file."""
    golden.with_suffix(".idx").rename(golden.with_suffix(".kept"))
    with pytest.raises(FileNotFoundError, match=r"g\.bin is there, but .*g\.idx is missing"):
        IndexedDataset(golden)
    golden.with_suffix(".kept").rename(golden.with_suffix(".idx"))
    golden.with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"g\.idx is there, but .*g\.bin is missing"):
        IndexedDataset(golden)
    golden.with_suffix(".idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"g\.bin and .*g\.idx is missing"):
        IndexedDataset(golden)


def test_all_forms_of_a_prefix_are_understood(golden: Path, tmp_path: Path) -> None:
    """Catches a form of the name that is not understood, and a text file read as a pair."""
    for form in ("g", "g.bin", "g.idx"):
        assert indexed_prefix(str(tmp_path / form)) == golden
    assert indexed_prefix(str(tmp_path)) is None
    assert indexed_prefix(str(tmp_path / "other")) is None
    dotted = tmp_path / "corpus.v1"
    with IndexedDatasetWriter(dotted, dtype=token_dtype(256)) as writer:
        writer.add_document(np.array([1]))
    assert indexed_prefix(str(dotted)) == dotted
    assert documents(dotted) == [[1]]


def test_an_interrupted_writer_keeps_the_old_pair(golden: Path) -> None:
    """Catches a partial file under its final name, and temporary files left, after an interrupt."""
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        IndexedDatasetWriter(golden, dtype=_DTYPES[8]) as writer,
    ):
        writer.add_document(np.array([1, 2, 3]))
        raise KeyboardInterrupt
    assert documents(golden) == [[5, 6, 7, 8], [], [9, 10]]
    assert sorted(os.listdir(golden.parent)) == ["g.bin", "g.idx"]


def test_a_killed_writer_leaves_no_file_under_a_final_name(tmp_path: Path) -> None:
    """Catches a partial file under its final name after SIGKILL, and leftovers that stop the next
    run.
    """
    killed = IndexedDatasetWriter(tmp_path / "x", dtype=_DTYPES[8])
    killed.__enter__().add_document(np.arange(100))
    assert os.listdir(tmp_path) == ["x.bin.partial"]
    with IndexedDatasetWriter(tmp_path / "x", dtype=_DTYPES[8]) as writer:
        writer.add_document(np.array([1]))
    assert documents(tmp_path / "x") == [[1]]
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_a_writer_without_tokens_is_an_error(tmp_path: Path) -> None:
    """Catches a pair that cannot be opened."""
    with (
        pytest.raises(ValueError, match="no tokens to write"),
        IndexedDatasetWriter(tmp_path / "x", dtype=_DTYPES[8]) as writer,
    ):
        writer.add_document()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_keeps_the_old_pair(golden: Path) -> None:
    """Catches leftovers, or a lost old pair, if the disk is full when the buffer is flushed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with (
            pytest.raises(OSError, match="File too large"),
            IndexedDatasetWriter(golden, dtype=_DTYPES[8]) as writer,
        ):
            writer.add_document(np.arange(900))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert documents(golden) == [[5, 6, 7, 8], [], [9, 10]]
    assert sorted(os.listdir(golden.parent)) == ["g.bin", "g.idx"]
