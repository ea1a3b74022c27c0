"""The folder of checkpoints after complete saves, and after runs that died during one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    Manifest,
    SavedTopology,
    fault_of,
)
from isp.checkpoint.remote import RemoteCheckpoints, Uploads
from tests.toolkit import topology


def _write(folder: Path, step: int, content: str = "weights") -> None:
    """Write a sound checkpoint of one file."""
    (folder / "data").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    manifest = Manifest(
        step=step,
        tokens=0,
        num_updates=step,
        topology=SavedTopology.of(topology()),
        shared={},
        saved_at=0.0,
        files={"data": FileRecord(len(content), digest)},
    )
    manifest.write(folder)


def _publish(folder: CheckpointFolder, step: int, content: str = "weights") -> None:
    folder.begin(step)
    _write(folder.temporary(step), step, content)
    folder.publish(step)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoint")


def test_an_absent_folder_has_no_checkpoints(folder: CheckpointFolder) -> None:
    """Catches a first run that fails because nothing is there yet."""
    folder.restore()
    assert folder.steps() == []
    assert folder.leftovers() == []


def test_steps_are_ordered_by_number(folder: CheckpointFolder) -> None:
    """Catches step_9 sorted as newer than step_10."""
    for step in (9, 10, 100, 11):
        _publish(folder, step)
    assert folder.steps() == [100, 11, 10, 9]


def test_an_unfinished_save_is_no_checkpoint(folder: CheckpointFolder) -> None:
    """Catches an incomplete folder that is chosen, or that prevents the next save."""
    folder.begin(10)
    (folder.temporary(10) / "data").write_text("half")
    assert folder.steps() == []
    folder.begin(10)
    assert list(folder.temporary(10).iterdir()) == []
    folder.abandon(10)
    assert folder.leftovers() == []


def test_a_save_of_the_same_step_replaces_the_old_one(folder: CheckpointFolder) -> None:
    """Catches a rename onto an existing folder, which the file system refuses."""
    _publish(folder, 10, "old")
    _publish(folder, 10, "new")
    assert (folder.published(10) / "data").read_text() == "new"
    assert folder.leftovers() == []


def test_a_death_between_the_two_renames_loses_nothing(folder: CheckpointFolder) -> None:
    """Catches the only good checkpoint deleted as a leftover because it had been moved aside."""
    _publish(folder, 10, "old")
    folder.begin(10)
    folder.published(10).rename(folder.path / "step_10.old")
    folder.begin(20)
    assert folder.steps() == [10]
    assert (folder.published(10) / "data").read_text() == "old"


def test_a_death_after_the_second_rename_keeps_the_new_checkpoint(folder: CheckpointFolder) -> None:
    """Catches the replaced checkpoint restored over the new one."""
    _publish(folder, 10, "old")
    folder.published(10).rename(folder.path / "step_10.old")
    _write_new = folder.temporary(10)
    _write_new.mkdir()
    _write(_write_new, 10, "new")
    _write_new.rename(folder.published(10))
    folder.restore()
    assert (folder.published(10) / "data").read_text() == "new"
    folder.begin(20)
    assert [path.name for path in folder.leftovers()] == ["step_20.tmp"]


@pytest.mark.parametrize(("keep", "left"), [(0, [40, 30, 20, 10]), (1, [40]), (3, [40, 30, 20])])
def test_old_checkpoints_are_deleted(folder: CheckpointFolder, keep: int, left: list[int]) -> None:
    """Catches one checkpoint too many or too few kept, and keep=0 read as "keep none"."""
    for step in (10, 20, 30, 40):
        _publish(folder, step)
    folder.prune(keep, newest=40)
    assert folder.steps() == left
    assert folder.leftovers() == []


def test_damaged_checkpoints_do_not_count_as_kept(folder: CheckpointFolder) -> None:
    """Catches the last good checkpoints deleted because newer, damaged ones fill the quota."""
    for step in (10, 20, 30, 40):
        _publish(folder, step)
    (folder.published(30) / MANIFEST).unlink()
    (folder.published(20) / "data").write_text("short")
    folder.prune(2, newest=40)
    assert folder.steps() == [40, 10]


def test_the_checkpoint_just_written_is_kept_after_load_step(folder: CheckpointFolder) -> None:
    """Catches the newest save deleted because the abandoned run had reached later steps."""
    for step in (10, 20, 30, 15):
        _publish(folder, step)
    folder.prune(1, newest=15)
    assert 15 in folder.steps()
    assert 10 not in folder.steps()


def test_checkpoints_of_later_steps_are_not_deleted(folder: CheckpointFolder) -> None:
    """Catches a damaged later checkpoint that is deleted although it may still be repaired."""
    for step in (10, 20, 30):
        _publish(folder, step)
    (folder.published(30) / "data").unlink()
    _publish(folder, 25)
    folder.prune(1, newest=25)
    assert folder.steps() == [30, 25]


def test_an_unfinished_deletion_leaves_no_checkpoint(folder: CheckpointFolder) -> None:
    """Catches a run that dies during a deletion and leaves a checkpoint without its files."""
    _publish(folder, 10)
    folder.published(10).rename(folder.path / "step_10.deleted")
    assert folder.steps() == []
    folder.begin(20)
    assert [path.name for path in folder.leftovers()] == ["step_20.tmp"]


PLACED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a folder for the manifest": (MANIFEST, Path.mkdir),
    "a folder for weights": ("data", Path.mkdir),
    "no weights": ("data", lambda path: path.symlink_to("/nowhere")),
    "one of another step": (
        MANIFEST,
        lambda path: path.write_bytes((path.parents[1] / "step_10" / MANIFEST).read_bytes()),
    ),
}


@pytest.mark.parametrize("kind", PLACED)
def test_a_damaged_copy_in_the_store_is_skipped_and_replaced(
    folder: CheckpointFolder, tmp_path: Path, kind: str
) -> None:
    """Catches an older good copy that is not tried, a damaged copy that cannot be replaced, and a
    damaged copy left in the local folder, where later starts would use it instead of the store.
    """
    store, (name, place) = RemoteCheckpoints(f"file://{tmp_path}/store"), PLACED[kind]
    for step in (10, 20):
        _publish(folder, step)
        store.upload(folder.published(step), keep=0)
    (path := tmp_path / "store/step_20" / name).unlink()
    place(path)
    copies = CheckpointFolder(tmp_path / "copies")
    with pytest.raises(Damaged, match="no copy is good: step 20 is damaged: "):
        store.fill(copies, 20)
    assert copies.steps() == []
    copied, (fault,) = store.fill(copies)
    assert copied == 10
    assert fault.startswith("step 20 is damaged: ")
    assert copies.steps() == [10]
    assert not fault_of(copies.published(10))
    assert store.has(folder.published(10))
    uploads = Uploads(f"file://{tmp_path}/store", keep=1)
    uploads.put(folder.published(20), only_missing=True)
    uploads.wait()
    assert uploads.fault is None
    assert store.steps() == [20]
    assert not fault_of(tmp_path / "store/step_20", contents=True)


@pytest.mark.parametrize("error", [PermissionError, ConnectionError])
def test_a_store_that_refuses_access_ends_the_start(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Catches refused credentials reported as damage, and a partial copy that blocks later
    starts.
    """
    store = RemoteCheckpoints(f"file://{tmp_path}/store")
    _publish(folder, 10)
    store.upload(folder.published(10), keep=0)
    copies = CheckpointFolder(tmp_path / "copies")

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as context:
        context.setattr(LocalFileSystem, "get_file", refuse)
        with pytest.raises(error):
            store.fill(copies)
    assert copies.steps() == []
    assert store.fill(copies) == (10, [])
