"""The folder a run writes to and the checkpoint it starts from, determined before ranks start."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from multiprocessing.synchronize import Event
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from isp.checkpoint import CheckpointError
from isp.checkpoint.folder import folder_lock, newest_at
from isp.cli import main
from isp.config import JobConfig, load_config, to_plain, to_yaml
from isp.config.keys import KeyTable
from isp.config.sections import JobSection
from isp.core.section import KeyRole
from isp.data.prepare import prepare
from isp.train.folder.run_folder import RunFolder
from isp.train.state import resume
from isp.train.state.resume import Start, check_start, earlier_runs, open_run
from isp.train.state.saved_run import check_changes
from tests.data.chat_folder import chat_folder
from tests.train.jobs import run_folders, run_forked, write_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job of 8 steps on 2 ranks, with a run called trained that has ended after one
    step.
    """
    job = write_job(tmp_path_factory.mktemp("job"))
    run_forked(job, "--training.steps", "1", "--job.name", "trained")
    return job


@pytest.fixture
def trained(job: Path) -> Path:
    """Return a checkpoint of that run."""
    return run_folders(job, "trained")[0] / "checkpoint" / "step_1"


@pytest.fixture
def load(job: Path, tmp_path: Path) -> Callable[..., JobConfig]:
    """Return the job with other keys, and a folder of its own for its runs."""
    return lambda *words: load_config(job, ["--job.dump_folder", str(tmp_path / "out"), *words])


@pytest.fixture
def config(load: Callable[..., JobConfig]) -> JobConfig:
    return load()


def _open(config: JobConfig) -> Start:
    """Open and close a run, like one that has ended or died."""
    with open_run(config, config.topology(2)) as start:
        return start


def _check(config: JobConfig) -> None:
    check_start(config, config.topology(2))


def _launch(monkeypatch: pytest.MonkeyPatch, name: str, restarts: int) -> None:
    """Set the variables that torchrun sets for its ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def test_a_checkpoint_that_was_being_replaced_counts(config: JobConfig, trained: Path) -> None:
    """Catches a run started anew because it died between the two renames of its only checkpoint."""
    first = _open(config)
    shutil.copytree(trained, first.checkpoints / "step_1.old")
    again = _open(config)
    assert (again.folder, again.resumes) == (first.folder, True)
    assert [path.name for path in first.checkpoints.glob("step_*")] == ["step_1"]


def test_a_restart_continues_the_run_of_its_launch(
    config: JobConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches restarts that continue the last, finished run, or do not recognize their own."""
    _launch(monkeypatch, "first", 0)
    finished = _open(config)
    finished.folder.write_finished(8)
    _launch(monkeypatch, "second", 1)  # the ranks before died before they had opened a folder
    own = _open(config)
    assert own.folder != finished.folder
    assert not own.resumes
    _launch(monkeypatch, "second", 2)
    again = _open(config)
    assert again == replace(own, is_new=False, resumes=True, note=""), (
        "also the time at which it was launched"
    )
    shutil.copytree(trained, own.checkpoints / "step_1")
    _launch(monkeypatch, "third", 0)
    later = _open(config)
    assert (later.folder, later.resumes) == (own.folder, True)
    assert later.launched_at is not None
    assert own.launched_at is not None
    assert later.launched_at > own.launched_at


@pytest.mark.parametrize("restarts", [0, 1], ids=["another machine's rank died", "a rank died"])
@pytest.mark.parametrize("saved", [False, True], ids=["nothing saved", "finished"])
@pytest.mark.parametrize(
    "words",
    [[], ["--checkpoint.auto_resume", "false"], ["--checkpoint.load_step", "1"]],
    ids=["auto_resume", "auto_resume=false", "load_step"],
)
def test_a_restart_starts_no_other_run(
    load: Callable[..., JobConfig],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    saved: bool,
    words: list[str],
) -> None:
    """Catches a whole run trained again because a rank died after the run had finished, and a key
    with which each restart is a new run or goes back another step.
    """
    if "--checkpoint.load_step" in words:
        shutil.copytree(trained, _open(load()).checkpoints / "step_1")
    config = load("--training.steps", "1", *words)
    _launch(monkeypatch, "train", 0)
    run = _open(config)
    if saved:
        shutil.copytree(trained, run.checkpoints / "step_1", dirs_exist_ok=True)
        run.folder.write_finished(1)
    (run.folder.path.parent / "latest").unlink()  # as where there are no links
    _launch(monkeypatch, "train", restarts)
    again = _open(config)
    assert again == replace(run, is_new=False, resumes=True, note="")
    if not restarts and "false" in words:  # one process that launches twice, on one machine
        monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
        assert _open(config).folder != run.folder
        monkeypatch.delenv("GROUP_WORLD_SIZE")
    if not restarts and "--checkpoint.load_step" not in words:
        monkeypatch.setattr(resume, "launcher", lambda: "another torchrun with the same --rdzv-id")
        assert _open(config).folder != run.folder


def test_a_truncated_launch_file_is_ignored(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches restarts that fail forever because of a file truncated by a full disk."""
    _launch(monkeypatch, "one", 0)
    first = _open(config)
    first.folder.launch_file.write_text('{"id')
    _launch(monkeypatch, "one", 1)
    assert _open(config).folder != first.folder


def _finished(config: JobConfig, trained: Path) -> Start:
    """Return a finished run of the job whose checkpoint is of step 1."""
    run = _open(config)
    shutil.copytree(trained, run.checkpoints / "step_1")
    run.folder.write_finished(1)
    return run


def test_the_run_folder_says_whether_it_finished(
    load: Callable[..., JobConfig], trained: Path
) -> None:
    """Catches a run taken for finished because of the name of a checkpoint folder, good or not."""
    run = _open(load())
    shutil.copytree(trained, run.checkpoints / "step_1")
    (run.checkpoints / "step_99").mkdir()
    for steps in ("1", "2"):  # with step 1 it was killed before it had finished
        again = _open(load("--training.steps", steps))
        assert (again.folder, again.resumes, again.note) == (run.folder, True, "")
    run.folder.write_finished(1)
    new = _open(load("--training.steps", "1"))
    assert new.folder != run.folder
    assert new.note.startswith(f"not resumed: {run.folder.path} finished at step 1; this is a new")
    shutil.rmtree(new.folder.path)
    assert _open(load("--training.steps", "2")).folder == run.folder


def test_a_finished_run_with_a_damaged_last_checkpoint_is_resumed(
    load: Callable[..., JobConfig], trained: Path
) -> None:
    """Catches a run started anew although an older checkpoint is good, or silently if none is."""
    run = _finished(load(), trained)
    (run.checkpoints / "step_2").mkdir()
    run.folder.write_finished(2)
    assert _open(load("--training.steps", "2")).folder == run.folder
    run.folder.write_finished(2)
    shutil.rmtree(run.checkpoints)
    assert "finished at step 2" in _open(load("--training.steps", "2")).note


def test_a_finished_run_of_another_model_does_not_block_a_new_run(
    load: Callable[..., JobConfig], trained: Path
) -> None:
    """Catches a finished run that prevents another with more steps, or is silently ignored."""
    run = _finished(load(), trained)
    other = ["--training.steps", "9", "--data.seq_len", "128"]
    _check(load(*other))
    new = _open(load(*other))
    assert new.folder != run.folder
    assert "not resumed" in new.note
    assert "with another model or other data (data.seq_len: 64 there, 128 now)" in new.note
    shutil.rmtree(new.folder.path)
    allowed = _open(load(*other, "--checkpoint.allow_changes", "true"))
    assert (allowed.folder, allowed.note) == (run.folder, "")
    with pytest.raises(ValueError, match="of a run with another model"):  # not finished any more
        _check(load(*other))


def test_data_are_checked_before_an_earlier_run(
    load: Callable[..., JobConfig],
    job: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a mistake in the command hidden by a message about an earlier run."""
    shutil.copytree(trained, _open(load()).checkpoints / "step_1")
    words = ["train", str(job), "--nproc", "2", "--job.dump_folder", str(tmp_path / "out")]
    assert main([*words, "--data.seq_len", "128"]) == 2
    assert "of a run with another model, or other data" in capsys.readouterr().err
    assert main([*words, "--data.seq_len", "128", "--data.source", str(tmp_path / "absent")]) == 2
    assert "data.source" in capsys.readouterr().err


def _hold(folder: Path, held: Event) -> None:
    with folder_lock(folder):
        held.set()
        time.sleep(60)


def test_only_one_run_at_a_time_uses_a_folder(config: JobConfig, trained: Path) -> None:
    """Catches two runs in one folder, and a lock, or files of the second, that remain."""
    first = _open(config)
    shutil.copytree(trained, first.checkpoints / "step_1")
    before = sorted(path for path in first.folder.path.parent.rglob("*"))
    context = mp.get_context("fork")
    held = context.Event()
    other = context.Process(target=_hold, args=(first.checkpoints, held), daemon=True)
    other.start()
    assert held.wait(60)
    for begin in (_check, _open):
        with pytest.raises(ValueError, match=f"whose lock names process {other.pid} on"):
            begin(config)
    other.kill()
    other.join()
    assert sorted(path for path in first.folder.path.parent.rglob("*")) == before
    assert _open(config).folder == first.folder
    with folder_lock(first.checkpoints):
        pass


def test_a_run_that_has_just_started_holds_its_job(load: Callable[..., JobConfig]) -> None:
    """Catches a command entered twice, whose second run trains the same in a folder of its own."""
    config = load()
    with open_run(config, config.topology(2)) as first:
        for begin in (_check, _open):
            with pytest.raises(ValueError, match=rf"another run is saving to {first.checkpoints}"):
                begin(config)
        apart = _open(load("--checkpoint.auto_resume", "false"))
        assert apart.folder != first.folder
    _check(config)


def _hugging_face(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")


def _strangers(path: Path) -> None:
    path.mkdir()
    for name in "abcde":
        (path / name).touch()


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda path: path.write_text(""), "is not a folder"),
    "device": (lambda path: path.symlink_to("/dev/null"), "is not a folder"),
    "Hugging Face": (_hugging_face, r"holds a Hugging Face model \(config.json, model.safetens"),
    "other files": (_strangers, "holds a, b, c and 2 more"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_of_other_things_is_refused(
    load: Callable[..., JobConfig], tmp_path: Path, other: str
) -> None:
    """Catches random weights trained and saved where other weights were meant to be loaded."""
    make, found = OTHERS[other]
    make(tmp_path / "there")
    for name in ("there", "there/below") if other in ("file", "device") else ("there",):
        with pytest.raises(ValueError, match=f"checkpoint.folder=.*{found}"):
            _check(load("--checkpoint.folder", str(tmp_path / name)))
    with pytest.raises(ValueError, match=f"initial_load_path: .*{found}"):
        _check(load("--checkpoint.initial_load_path", str(tmp_path / "there")))


def test_a_checkpoint_or_run_as_checkpoint_folder_is_refused(
    load: Callable[..., JobConfig], trained: Path
) -> None:
    """Catches a run that saves into another run's checkpoint, or next to it, and does not resume
    it.
    """
    with pytest.raises(ValueError, match=r"is a checkpoint itself: .*initial_load_path for"):
        _check(load("--checkpoint.folder", str(trained)))
    with pytest.raises(ValueError, match="is the folder of a run"):
        _check(load("--checkpoint.folder", str(trained.parent.parent)))


def test_an_absent_or_empty_folder_starts_a_run(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    """Catches a first run that is refused, and a check that creates what it looks for."""
    folder = tmp_path / "a" / "b"
    config = load("--checkpoint.folder", str(folder))
    _check(config)
    assert list(tmp_path.iterdir()) == []
    assert _open(config).checkpoints == folder
    assert folder.is_dir()
    _check(config)
    with pytest.raises(ValueError, match=r"load_step=3: .* no such .* there are: none at all"):
        _check(load("--checkpoint.folder", str(folder), "--checkpoint.load_step", "3"))
    with pytest.raises(ValueError, match=r"load_step=3: no run of job.name=job"):
        _check(load("--checkpoint.load_step", "3"))


def test_a_folder_that_cannot_be_written_to_is_refused(load: Callable[..., JobConfig]) -> None:
    """Catches a run trained to its end that then cannot save."""
    with pytest.raises(
        ValueError,
        match=r"^checkpoint\.folder=/proc/a/b: cannot write to .*: name a writable folder",
    ):
        _open(load("--checkpoint.folder", "/proc/a/b"))


def test_a_dump_folder_that_cannot_be_created_is_refused_before_ranks_start(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    """Catches ranks that are started only to find that the run has no folder."""
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ValueError, match=r"^job\.dump_folder=.*file: cannot write to .*directory"):
        _check(load("--job.dump_folder", str(file)))
    before = sorted(tmp_path.iterdir())
    _check(load("--job.dump_folder", str(tmp_path / "new" / "below")))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("folder", ["both", "out/job"])
def test_a_new_folder_is_locked_from_the_start(
    folder: str, load: Callable[..., JobConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two runs started at once in a folder that neither saw when it checked, and a run that
    blocks itself if it saves to the folder of its job.
    """
    looked, locks = [], [(tmp_path / folder, ".lock"), (tmp_path / "out" / "job", ".start.lock")]
    create = RunFolder.create

    def created(job: JobSection, name: str) -> RunFolder:
        for lock in locks:
            with pytest.raises(ValueError, match="another run is saving to"), folder_lock(*lock):
                pass
            looked.append(lock)
        return create(job, name)

    monkeypatch.setattr(RunFolder, "create", created)
    _open(load("--checkpoint.folder", str(tmp_path / folder)))
    assert looked == locks


@pytest.mark.parametrize("named", [True, False])
def test_a_start_that_waits_for_another_logs_it(
    config: JobConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    """Catches a start that seems to hang while another start of its job copies a checkpoint."""
    (tmp_path / "out" / "job").mkdir(parents=True, exist_ok=True)
    with ExitStack() as other:
        other.enter_context(folder_lock(tmp_path / "out" / "job", ".start.lock"))
        if not named:  # by one that could not write, or has not yet
            os.truncate(tmp_path / "out" / "job" / ".start.lock", 0)
        caplog.handler.addFilter(lambda _: other.close() is None)  # it ends once this one waits
        _open(config)
    (said,) = caplog.messages
    assert "another start of this job, which may be copying from checkpoint.upload_to" in said
    names = f"names process {os.getpid()} on " if named else "names no process"
    assert f"upload_to: it holds the lock {tmp_path}/out/job/.start.lock, which {names}" in said


def test_auto_resume_false_does_not_overwrite_checkpoints(
    load: Callable[..., JobConfig], trained: Path
) -> None:
    """Catches auto_resume=false that resumes all the same, or mixes checkpoints of two runs."""
    folder = str(trained.parent)
    with pytest.raises(ValueError, match=r"auto_resume=false, but .* up to step 1: name another"):
        _check(load("--checkpoint.folder", folder, "--checkpoint.auto_resume", "false"))
    _check(load("--checkpoint.folder", folder))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--data.seq_len", "128"], "data.seq_len: 64 there, 128 now"),
        (["--training.seed", "1"], "training.seed: 0 there, 1 now"),
        (["--data.pack", "false"], "data.pack: True there, False now"),
        (["--data.micro_num", "2"], "sequences in a step, over all ranks: 1 there, 2 now"),
        (["--model.rope_theta", "5e5"], "model.rope_theta: 10000.0 there, 500000.0 now"),
        (["--model.hidden_size", "32"], "model.hidden_size: 16 there, 32 now"),
    ],
)
def test_a_resume_with_another_model_or_other_data_is_refused(
    load: Callable[..., JobConfig], trained: Path, words: list[str], refused: str
) -> None:
    """Catches a resumed run that silently trains something else."""
    words = ["--checkpoint.folder", str(trained.parent), *words]
    with pytest.raises(ValueError, match=r"of a run with another model, or other") as caught:
        _check(load(*words))
    assert str(caught.value).splitlines()[1] == f"  {refused}"
    assert "checkpoint.allow_changes=true" in str(caught.value)
    words += ["--checkpoint.allow_changes", "true"]
    if "model.hidden_size" in refused:
        with pytest.raises(ValueError, match=r"by the shapes .*\n  lm_head.weight: \(272, 16\)"):
            _check(load(*words))
    else:
        _check(load(*words))


def test_other_changes_on_resume_are_logged(load: Callable[..., JobConfig], trained: Path) -> None:
    """Catches a change of layout or schedule that is refused, or not logged."""
    words = ["--parallel.tensor.mode", "msp", "--optimizer.lr", "0.5", "--model.checkpoint", "1"]
    config = load(*words, "--model.attention_backend", "sdpa")
    info = newest_at(trained)
    lines = check_changes(info, config, config.topology(2))
    assert {
        "parallel.tensor.mode: isp there, msp now",
        "optimizer.lr: 0.01 there, 0.5 now",
        "model.checkpoint: 0.0 there, 1.0 now",
        "model.attention_backend: auto there, sdpa now",
    } <= set(lines)


def test_only_keys_that_change_the_model_or_data_are_refused_on_resume(
    config: JobConfig, trained: Path
) -> None:
    """Catches a key that `isp plan` advises for lack of memory and that a resume refuses."""
    info = newest_at(trained)
    keys, seen = KeyTable.of(JobConfig), set()
    for *section, name in _keys(to_plain(config)):
        saved = to_plain(config)
        reduce(getitem, section, saved)[name] = "another"
        shared = {**info.manifest.shared, "config": saved}
        other = replace(info, manifest=info.manifest.model_copy(update={"shared": shared}))
        role = keys.role((*section, name))
        if name == "add_bos":  # has no effect on bytes
            assert check_changes(other, config, config.topology(2)) == []
        elif role in (KeyRole.MODEL, KeyRole.DATA):
            with pytest.raises(ValueError, match=f"{name}: another there"):
                check_changes(other, config, config.topology(2))
        else:
            (line,) = check_changes(other, config, config.topology(2))
            assert line.startswith(f"{'.'.join(section)}.{name}: another there")
        seen.add(role)
    assert seen == set(KeyRole)


def test_a_run_saved_before_texts_had_a_bos_resumes_without_it(
    load: Callable[..., JobConfig], trained: Path, tmp_path: Path
) -> None:
    """Catches a run that resumes with other tokens, or is refused although its tokens are the
    same.
    """
    tokenizer = str(chat_folder(tmp_path / "tokenizer", adds_bos=True))
    plain = str(chat_folder(tmp_path / "plain"))
    pair = str(prepare(load().data.source, tmp_path / "pair", tokenizer=tokenizer).prefix)
    info = newest_at(trained)

    def changes(*words: str) -> list[str]:
        config = load(*words)
        saved = to_plain(config)
        del saved["data"]["add_bos"]
        shared = {**info.manifest.shared, "config": saved}
        other = replace(info, manifest=info.manifest.model_copy(update={"shared": shared}))
        return check_changes(other, config, config.topology(2))

    words = ["--data.tokenizer", tokenizer]
    with pytest.raises(ValueError, match=r"data\.add_bos: False there, True now"):
        changes(*words)
    assert changes(*words, "--data.add_bos=false") == changes("--data.tokenizer", plain) == []
    assert changes() == changes(*words, "--data.source", pair) == []
    kept = tmp_path / "run" / "config.yaml"
    kept.parent.mkdir()
    kept.write_text(
        "".join(x for x in to_yaml(load(*words)).splitlines(True) if "add_bos" not in x)
    )
    assert load_config(kept).data.add_bos  # a configuration like any other
    (kept.parent / "env.json").write_text("{}")
    assert not load_config(kept).data.add_bos
    assert load_config(kept, ["--data.add_bos=true"]).data.add_bos


def _keys(plain: dict[str, Any], *section: str) -> Iterator[tuple[str, ...]]:
    for name, value in plain.items():
        yield from _keys(value, *section, name) if isinstance(value, dict) else [(*section, name)]


def test_a_foreign_saved_configuration_is_refused_without_a_traceback(
    config: JobConfig, trained: Path
) -> None:
    """Catches an internal error for keys of unexpected types."""
    info = newest_at(trained)
    shared = {"config": {"model": 3, "data": None, "training": {"seed": []}}}
    odd = replace(info, manifest=info.manifest.model_copy(update={"shared": shared}))
    with pytest.raises(ValueError, match=r"another model, or other data:\n  model: 3 there"):
        check_changes(odd, config, config.topology(2))


def test_missing_initial_weights_are_refused(
    load: Callable[..., JobConfig], trained: Path, tmp_path: Path
) -> None:
    """Catches random weights, or those of another model, in place of the requested ones."""
    key = "--checkpoint.initial_load_path"
    for path in (trained, trained.parent, trained.parent.parent):
        _check(load(key, str(path), "--data.seq_len", "128"))  # only weights: data may change
    with pytest.raises(ValueError, match="does not exist"):
        _check(load(key, str(tmp_path / "absent")))
    with pytest.raises(ValueError, match="belongs to another model"):
        _check(load(key, str(trained), "--model.num_layers", "2"))
    all_of_it = [key, str(trained), "--checkpoint.initial_load_model_only", "false"]
    _check(load(*all_of_it))
    with pytest.raises(ValueError, match="with another model, or other data"):
        _check(load(*all_of_it, "--data.seq_len", "128"))
    shutil.copytree(trained, tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*damaged"):
        _check(load(key, str(tmp_path / "damaged")))


class _DeathAtWrite:
    """An audit hook of Python that kills the process before its change number `number` on disk."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.rmdir")
        if event == "open":
            writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR)) and str(args[0]) != os.devnull
        if writes:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _killed_at_write(number: int, config: JobConfig) -> bool:
    """Open the run in a process that is killed at this write; return False if it has fewer
    writes.
    """

    def start() -> None:
        sys.addaudithook(_DeathAtWrite(number))
        _open(config)

    process = mp.get_context("fork").Process(target=start)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _run_of_launch(config: JobConfig, name: str) -> RunFolder | None:
    """Return the run whose `launch.json` names that launch."""
    launches = [(run, run.launch()) for run in earlier_runs(config.job)]
    return next((run for run, launch in launches if launch and launch.id == name), None)


@pytest.mark.parametrize("begins", ["new", "resumed", "copied"])
def test_a_start_killed_at_any_write_can_be_repeated(
    load: Callable[..., JobConfig],
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begins: str,
) -> None:
    """Catches a start that leaves files which block the next one or hide a run from it, and a
    restart that leaves the run recorded for its launch.
    """
    config, first, folder = load(), None, tmp_path / "checkpoints"
    if begins == "copied":
        shutil.copytree(trained, tmp_path / "store" / "step_1")
        words = [f"--checkpoint.folder={folder}", f"--checkpoint.upload_to=file://{tmp_path}/store"]
        config = load(*words)
    elif begins == "resumed":
        first = _open(config)
        shutil.copytree(trained, first.checkpoints / "step_1")
    number, recorded = 1, 0
    while True:
        name = f"launch {number}"
        _launch(monkeypatch, name, 0)
        if not _killed_at_write(number, config):
            break
        # A restart by torchrun: in the run that this launch has written down, if it came so far.
        written = _run_of_launch(config, name)
        _launch(monkeypatch, name, 1)
        again = _open(config)
        if written is not None:
            assert (again.folder.path, again.is_new) == (written.path, False)
            recorded += 1
        if first is not None:
            assert (again.folder, again.resumes) == (first.folder, True)
        else:  # runs of one second have numbers, which are writes more
            shutil.rmtree(tmp_path / "out")
        if begins == "copied":
            assert [path.name for path in folder.glob("step_*")] == ["step_1"]
            assert newest_at(folder).step == 1
            shutil.rmtree(folder)
        number += 1
    assert number > 10, "it makes folders, locks them, and writes launch.json"
    assert recorded > 0, "it was killed once it had written launch.json, too"
