"""Damaged checkpoints are skipped with a reason, and foreign checkpoints run no code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from isp.checkpoint import Checkpointer, CheckpointError, CheckpointInfo, inspect, verify
from isp.checkpoint.folder import LAUNCH
from isp.checkpoint.manifest import MANIFEST, Damaged, FileRecord, Manifest
from isp.checkpoint.state import CheckpointWeights
from isp.checkpoint.storage import METADATA, read_metadata
from isp.config.sections import CheckpointConfig
from isp.core.comm import Channel
from isp.train.state.export import export
from tests.checkpoint.runs import chosen, fill, make_run
from tests.ranks import run_ranks
from tests.toolkit import topology

CONFIG = CheckpointConfig(async_mode="disabled")
DATA = "__0_0.distcp"
FILES = {name: FileRecord(1 << 20, 64 * "0") for name in (METADATA, DATA)}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints of steps 10, 20 and 30."""
    folder = tmp_path_factory.mktemp("three")
    run = make_run(0, topology(), torch.float32)
    fill(run)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    for step in (10, 20, 30):
        checkpointer.save(step, run.state, tokens=step * 32, shared={"config": "a: 1"})
    return folder


@pytest.fixture
def folder(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "run" / "checkpoint")


def _choose(folder: Path, *load_step: int) -> CheckpointInfo:
    return chosen(Checkpointer(folder, CONFIG, world=Channel.solo()), *load_step)


def _flip_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def _copy_onto(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_20"), path)


def _empty_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("{}")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda path: _flip_bit(path / DATA), f"{DATA} has a wrong checksum"),
    "last bit": (lambda path: _flip_bit(path / DATA, 1.0), f"{DATA} has a wrong checksum"),
    "contents": (lambda path: _flip_bit(path / METADATA), f"{METADATA} has a wrong checksum"),
    "cut off": (lambda path: os.truncate(path / DATA, 100), f"{DATA} has 100 bytes instead of"),
    "missing": (lambda path: (path / DATA).unlink(), f"{DATA} is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "cut manifest": (lambda path: os.truncate(path / MANIFEST, 200), "is not readable"),
    "other manifest": (_empty_manifest, "is not readable"),
    "a copy of step 20": (_copy_onto, "it is of step 20, so the folder was renamed or copied"),
    "bit of manifest": (lambda path: _flip_bit(path / MANIFEST), f"{MANIFEST} "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(folder: Path, damage: str) -> None:
    """Catches damage that is loaded, and damage that ends a run which has an older good
    checkpoint.
    """
    act, reason = DAMAGES[damage]
    act(folder / "step_30")
    info = _choose(folder)
    assert (info.step, info.manifest.tokens) == (20, 640)
    assert len(info.passed_over) == 1
    assert info.passed_over[0].startswith("step_30: verifying failed on rank 0: ")
    assert reason in info.describe()


def test_the_newest_good_checkpoint_is_chosen(folder: Path) -> None:
    """Catches a preference for an older checkpoint, and an empty folder not treated as a fresh
    start.
    """
    info = _choose(folder)
    assert (info.step, info.passed_over) == (30, ())
    elsewhere = Checkpointer(folder / "elsewhere", CONFIG, world=Channel.solo())
    assert elsewhere.choose() is None


def test_a_run_does_not_start_anew_if_all_checkpoints_are_damaged(folder: Path) -> None:
    """Catches a month of training that silently starts again from step 0."""
    for step in (10, 20, 30):
        (folder / f"step_{step}" / DATA).unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)no usable checkpoint.*step_30.*step_20.*step_10"
    ):
        _choose(folder)


def test_load_step_selects_a_checkpoint(folder: Path) -> None:
    """Catches load_step ignored, or silently replaced by another step if it is absent or
    damaged.
    """
    info = _choose(folder, 10)
    assert info.step == 10
    assert "as load_step=10 says" in info.describe()
    with pytest.raises(CheckpointError, match=r"load_step=15: .* there are: 30, 20, 10"):
        _choose(folder, 15)
    (folder / "step_10" / DATA).unlink()
    with pytest.raises(CheckpointError, match=r"step_10: .*is missing"):
        _choose(folder, 10)


def test_a_restart_after_load_step_resumes_from_its_own_checkpoints(folder: Path) -> None:
    """Catches a restart that goes back to load_step again, or resumes from the run it branched
    from.
    """
    checkpointer = Checkpointer(folder, CONFIG, world=Channel.solo())
    first, second, third = 3.0, 2.0, 1.0  # ids of launches, whose order has no meaning
    for step, launch in ((20, first), (30, second)):
        # The clock was set back in the meantime: the save after step 10 looks older than step 10.
        _change(folder / f"step_{step}", shared={LAUNCH: launch}, saved_at=1.0 / step)

    def resumed(launch: float | None) -> tuple[int, str]:
        info = chosen(checkpointer, 10, launch=launch)
        return info.step, info.reason

    since = "the newest good one since the run went back to load_step=10"
    for launch in (third, None):
        assert resumed(launch) == (10, "as load_step=10 says")
    assert resumed(second) == (30, since)
    assert resumed(first) == (20, since), "step 30 was not saved by it"
    (folder / "step_30" / DATA).unlink()
    assert resumed(second)[0] == 10
    info = chosen(checkpointer, launch=second)
    assert info.step == 20


def _choose_on(rank: int, folder: Path) -> tuple[int, tuple[str, ...]]:
    run = make_run(rank, topology(2, weight=2), torch.float32)
    info = Checkpointer(folder, CONFIG, world=run.world).choose()
    assert info is not None
    return info.step, info.passed_over


@pytest.mark.parametrize("name", [DATA, METADATA])
def test_ranks_agree_on_the_checkpoint_to_load(folder: Path, name: str) -> None:
    """Catches ranks that choose different checkpoints, since each verifies only its own share."""
    _flip_bit(folder / "step_30" / name)
    answers = run_ranks(2, _choose_on, folder)
    assert answers[0] == answers[1]
    assert answers[0][0] == 20
    assert f"{name} has a wrong checksum" in answers[0][1][0]


def _change(path: Path, **changes: object) -> None:
    """Rewrite the manifest of a checkpoint with `changes` of its keys; None removes a key."""
    whole = json.loads((path / MANIFEST).read_text())
    content = {**json.loads(whole["content"]), **changes}
    text = json.dumps({key: value for key, value in content.items() if value is not None})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps({"sha256": digest, "content": text}))


def _add_file(path: Path, name: str, num_bytes: int = 0) -> None:
    files = Manifest.read(path).files
    record = [num_bytes, hashlib.sha256(b"").hexdigest()]
    _change(path, files={**{k: list(v) for k, v in files.items()}, name: record})


def _nested(levels: int) -> object:
    return {"a": _nested(levels - 1)} if levels else 1


def _add_link(path: Path) -> None:
    (path / "link").symlink_to("/dev/zero")
    _add_file(path, "link")


def _add_pipe(path: Path) -> None:
    os.mkfifo(path / "pipe")
    _add_file(path, "pipe")


def _lead_away(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).symlink_to("/dev/zero")


def _grow_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 2**40)  # without a block on the disk


CRAFTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (lambda path: _add_file(path, "/dev/zero"), "does not name a file"),
    "outside": (lambda path: _add_file(path, "../secret"), "does not name a file"),
    "link": (_add_link, "link cannot be read"),
    "pipe": (_add_pipe, "pipe cannot be read: it is a pipe"),
    "folder": (lambda path: _add_file(path, ".."), "does not name a file"),
    "endless manifest": (_lead_away, f"{MANIFEST} cannot be read"),
    "large manifest": (_grow_manifest, f"{MANIFEST} has {2**40} bytes"),
    "no files": (lambda path: _change(path, files=None), "files: Field required"),
    "odd record": (lambda path: _change(path, files={"a": 3}), "files.a"),
    "negative size": (lambda path: _add_file(path, "a", -1), "files.a.0: Input should be greater"),
    "odd step": (lambda path: _change(path, step="30"), "step: Input should be a valid integer"),
    "no mode": (lambda path: _change(path, topology={"tensor": 1}), "topology.world_size"),
    "odd value": (lambda path: _change(path, shared={"$tensor": ["load", [2], ""]}), "load [2]"),
    "endless tensor": (
        lambda path: _change(path, shared={"$tensor": ["float32", [2**70, 0], ""]}),
        f"float32 [{2**70}, 0] is not a tensor of 0 bytes",
    ),
    "other values": (lambda path: _change(path, shared=[1]), "shared: Input should be"),
    "odd time": (lambda path: _change(path, saved_at=1e300), "saved_at: Input should be less"),
    "a list": (lambda path: _change(path, format=[]), "has format []"),
    "endless step": (lambda path: _change(path, step=2**70), "step: Input should be less than"),
    "endless updates": (lambda path: _change(path, num_updates=2**70), "num_updates: Input should"),
    "endless tokens": (lambda path: _change(path, tokens=2**70), "tokens: Input should be less"),
    "deep values": (lambda path: _change(path, shared={"a": _nested(600)}), "in more than 100"),
}


@pytest.mark.timeout(60)  # otherwise the read would never end
@pytest.mark.parametrize("craft", CRAFTED)
def test_a_crafted_manifest_is_skipped(folder: Path, craft: str) -> None:
    """Catches files outside of the folder that are read, endless reads, and tracebacks."""
    act, reason = CRAFTED[craft]
    (folder / "secret").write_bytes(b"")
    act(folder / "step_30")
    info = _choose(folder)
    assert info.step == 20
    assert reason in info.passed_over[0]
    assert "Error" not in info.passed_over[0]
    assert not verify(folder / "step_30").good
    assert reason in inspect(folder / "step_30")


def _write_table(path: Path, metadata: Metadata) -> None:
    """Write another table of contents into a checkpoint, with the right checksum."""
    data = pickle.dumps(metadata)
    (path / METADATA).write_bytes(data)
    files = {key: list(record) for key, record in Manifest.read(path).files.items()}
    files[METADATA] = [len(data), hashlib.sha256(data).hexdigest()]
    _change(path, files=files)


def _crafted(craft: str, metadata: Metadata) -> None:
    key = next(iter(metadata.state_dict_metadata))
    tensor: Any = metadata.state_dict_metadata[key]
    place = metadata.storage_data[MetadataIndex(key, tensor.chunks[0].offsets)]
    match craft:
        case "no chunks":
            tensor.chunks.clear()
        case "a chunk of another rank of dims":
            tensor.chunks[0].sizes = torch.Size([*tensor.size, 1])
        case "a chunk outside":
            tensor.chunks[0].offsets = torch.Size(tensor.size)
        case "chunks that are none":
            tensor.chunks = [1]
        case "no list of chunks":
            tensor.chunks = None
        case "a negative size":
            tensor.size = torch.Size([-n for n in tensor.size])
        case "too large":
            tensor.size = torch.Size([2**40, *tensor.size[1:]])
        case "no place":
            metadata.storage_data.clear()
        case "another key":
            metadata.storage_data["key"] = place
        case "beyond the file":
            place.offset = 2**40
        case "no number":
            place.length = "1"
        case "transforms":
            place.transform_descriptors = ["zstd"]


CRAFTS = """no chunks;a chunk of another rank of dims;a chunk outside;chunks that are none
no list of chunks;a negative size;too large;no place;another key;beyond the file;no number
transforms"""


@pytest.mark.parametrize("craft", re.split("[;\n]", CRAFTS))
def test_a_crafted_table_of_contents_is_reported_as_damage(folder: Path, craft: str) -> None:
    """Catches a traceback of torch, an empty read, and memory allocated for data that do not
    exist.
    """
    path = folder / "step_30"
    metadata = read_metadata(path, Manifest.read(path).files)
    _crafted(craft, metadata)
    _write_table(path, metadata)
    assert f"\ndamaged: {METADATA} " in inspect(path)
    with pytest.raises(CheckpointError, match=rf"is damaged: {METADATA} "):
        CheckpointWeights(path)


def test_tensors_that_differ_from_the_table_are_reported_as_damage(folder: Path) -> None:
    """Catches a traceback where the bytes of a shard are not the tensor that the table
    describes.
    """
    path = folder / "step_30"
    metadata = read_metadata(path, Manifest.read(path).files)
    for info in metadata.storage_data.values():
        info.offset += 1
        info.length -= 1
    _write_table(path, metadata)
    weights = CheckpointWeights(path)
    with pytest.raises(CheckpointError, match="is damaged: "):
        weights.read(next(iter(weights.shapes)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.dtype", "load"),
        ("training.dtype", None),
        ("data.seq_len", "8"),
        ("data.tokenizer", 5),
        ("model.hf", 5),
        ("model.hf_overrides", []),
    ],
)
def test_a_crafted_configuration_is_reported_as_damage(
    folder: Path, key: str, value: object
) -> None:
    """Catches a traceback when such a checkpoint is exported or generates text."""
    config: dict[str, dict[str, object]] = {
        "model": {"hf": None},
        "training": {"dtype": "float32"},
        "data": {"seq_len": 8, "tokenizer": "bytes"},
    }
    section, _, name = key.partition(".")
    config[section][name] = value
    _change(folder / "step_30", shared={"config": config})
    with pytest.raises(ValueError, match=rf"is damaged: its configuration has {key}="):
        export(folder / "step_30", folder.parent / "hf")


@pytest.mark.parametrize("name", ["/dev/zero", "../step_20/__0_0.distcp"])
def test_a_table_may_not_name_files_outside_of_its_folder(folder: Path, name: str) -> None:
    """Catches a foreign table of contents that makes the run read another file as weights."""
    path = folder / "step_30"
    metadata = read_metadata(path, Manifest.read(path).files)
    for info in metadata.storage_data.values():
        info.relative_path = name
    _write_table(path, metadata)
    run = make_run(0, topology(), torch.float32)
    checkpointer = Checkpointer(folder, CONFIG, world=run.world)
    info = chosen(checkpointer)
    assert info.step == 30, "every byte is as its manifest says"
    with pytest.raises(CheckpointError, match="which is not in the manifest"):
        checkpointer.load(info, run.state)
    assert f"damaged: {METADATA} names" in inspect(path)


@pytest.mark.parametrize("value", [b"", b"nothing", pickle.dumps(torch.Size([1]))])
def test_a_file_that_is_no_table_of_contents_is_reported_as_damage(
    folder: Path, value: bytes
) -> None:
    """Catches a traceback for an empty file, for text, and for a pickle of another type."""
    (folder / "step_30" / METADATA).write_bytes(value)
    with pytest.raises(Damaged, match=METADATA):
        read_metadata(folder / "step_30", FILES)


class _Harmful:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("exit 1",)


def test_a_harmful_file_runs_no_code(folder: Path) -> None:
    """Catches a foreign checkpoint that runs commands when it is read."""
    (folder / "step_30" / METADATA).write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(Damaged, match=r"must not contain posix\.system"):
        read_metadata(folder / "step_30", FILES)


def test_inspect_describes_the_contents(folder: Path) -> None:
    """Catches a wrong shape, dtype, step or count, and a damaged checkpoint described as sound."""
    text = inspect(folder / "step_30")
    assert "step 30, 960 tokens, 7 updates" in text
    assert "written by isp: world_size 1, pipeline 1, tensor 1, weight 1, zero1 1" in text
    assert "wqkv.weight       [16, 6]  float32  -               float32" in text
    assert "7 parameters, 424 elements" in text
    assert "config" in text
    lines = inspect(folder.parent).splitlines()
    assert [line.split()[0] for line in lines] == ["step_30", "step_20", "step_10"]
    (folder / "step_20" / MANIFEST).unlink()
    assert "step_20  damaged: manifest.json is missing" in inspect(folder)
    assert inspect(folder / "step_20").endswith("damaged: manifest.json is missing")


def test_verify_reads_every_byte(folder: Path) -> None:
    """Catches a verdict that looks at sizes only, and success for a folder without checkpoints."""
    assert verify(folder).good
    _flip_bit(folder / "step_20" / DATA)
    verdict = verify(folder)
    assert not verdict.good
    assert [line.rsplit(": ", 1)[1] for line in verdict.text.splitlines()] == [
        "good",
        f"{DATA} has a wrong checksum",
        "good",
    ]
    assert verify(folder / "step_30").good
    with pytest.raises(ValueError, match="is not a checkpoint and contains none"):
        verify(folder.parent / "elsewhere")
