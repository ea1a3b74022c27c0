"""`isp train --parallel auto` and `isp layouts --write` use the layout that is ranked first."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isp.cli import main
from isp.cli.auto_layout import layout_words
from isp.config import JobConfig, load_config, to_plain
from isp.config.keys import KeyTable
from isp.planner import load_fabric, search
from isp.planner.experts import with_spread_experts
from tests.ranks import run_programs
from tests.train.jobs import run_folders, run_forked, write_job

Choose = Callable[..., list[str]]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def choose(job: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Return a function that returns the words `isp train --parallel auto` adds after CONFIG."""
    started: list[list[str]] = []

    def launch(_: int, command: list[str]) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr("isp.cli.launch.launch", launch)

    def words(ranks: int, *more: str) -> list[str]:
        assert main(["train", str(job), f"--nproc={ranks}", "--parallel", "auto", *more]) == 0
        assert started[-1][:4] == ["-m", "isp", "train", str(job)]
        assert not {"auto", "--parallel", "--fabric"} & set(started[-1])
        return started[-1][4:]

    return words


def test_a_run_keeps_its_layout_until_the_number_of_ranks_changes(
    job: Path, choose: Choose, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a layout other than the first, one missing in the run's files, and one that
    changes.
    """
    words = choose(2, "--fabric", "cpu")
    said = capsys.readouterr().err.splitlines()
    choice = ["layout", "for", "machine", "why", "keys"]
    assert [line.split()[0] for line in said[-7:]] == [*choice, "checking", "starting"]
    config = load_config(job, words)
    (best, *_) = search(load_config(job), 2, load_fabric("cpu")).fitting
    assert to_plain(config)["parallel"] == to_plain(best.config)["parallel"]
    assert config.parallel != load_config(job).parallel, "something is chosen"

    run_forked(job, *words, "--training.steps=2")
    (run,) = run_folders(job)
    assert load_config(run / "config.yaml").parallel == config.parallel
    slow = replace(load_fabric("cpu"), inside=replace(load_fabric("cpu").inside, latency_us=0))
    (job.parent / "slow.yaml").write_text(slow.to_yaml())
    again = choose(2, "--training.steps=3", "--fabric", str(job.parent / "slow.yaml"))
    assert again == ["--training.steps=3", *words]
    assert f"that of {run}/checkpoint/step_2" in capsys.readouterr().err

    alone = choose(1, "--training.steps=3")
    assert "--parallel.tensor.size=1" in alone
    run_forked(job, *alone, num_ranks=1)
    assert run_folders(job) == [run]
    assert load_config(run / "config.yaml").parallel.tensor.size == 1


def test_rank_0_chooses_the_layout_for_all_ranks(job: Path) -> None:
    """Catches ranks that choose by the files of their own machine and then wait for each other."""
    small = replace(load_fabric("cpu").device, memory_gib=1e-5)
    (job.parent / "tiny.yaml").write_text(replace(load_fabric("cpu"), device=small).to_yaml())
    fabrics = ["cpu", str(job.parent / "tiny.yaml")]

    def train(rank: int, fabrics: list[str]) -> tuple[int, bool]:
        auto = ["--parallel=auto", "--fabric", fabrics[rank], "--training.steps=1"]
        with redirect_stderr(io.StringIO()) as said:
            code = main(["train", str(job), *auto])
        return code, "error: --parallel auto: nothing fits" in said.getvalue()

    assert run_programs(2, train, fabrics) == [(0, False)] * 2
    (run,) = run_folders(job)
    (best, *_) = search(load_config(job), 2, load_fabric("cpu")).fitting
    assert load_config(run / "config.yaml").parallel == best.config.parallel
    assert run_programs(2, train, fabrics[::-1]) == [(2, True)] * 2, "the fault of rank 0, on all"


def test_keys_given_on_the_command_line_are_kept(choose: Choose, job: Path) -> None:
    """Catches a key of the command line that the choice silently overrides."""
    words = choose(2, "--parallel.tensor.mode", "msp")
    assert load_config(job, words).parallel.tensor.mode == "msp"


def test_experts_are_spread_as_chosen(job: Path) -> None:
    """Catches a key that the search changes but that is missing in the launched command."""
    config = load_config(job)
    assert layout_words(config, to_plain(with_spread_experts(config, 2))) == [
        "--parallel.expert.size=2"
    ]
    spread = load_config(job, ["--parallel.expert.size=2", "--parallel.expert_weight.size=1"])
    assert layout_words(spread, to_plain(with_spread_experts(spread, 1))) == [
        "--parallel.expert.size=1",
        "--parallel.expert_weight.size=null",
    ]


def test_a_layout_is_refused_where_the_machine_is_not_known(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a layout that is guessed although the machine or its memory is not known."""
    small = replace(load_fabric("cpu").device, memory_gib=1e-5)
    tiny = job.parent / "tiny.yaml"
    tiny.write_text(replace(load_fabric("cpu"), device=small).to_yaml())

    def refused(*words: str) -> str:
        assert main(["train", str(job), *words]) == 2
        (line,) = [w for w in capsys.readouterr().err.splitlines() if w.startswith("error: ")]
        return line

    auto = ["--parallel=auto", "--nproc=2"]
    assert "nothing fits" in refused(*auto, "--fabric", str(tiny))
    assert "has --parallel.weight.size as given" in refused(*auto, "--parallel.weight.size=64")
    assert "--fabric cpu is for --parallel auto" in refused("--nproc=2", "--fabric=cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Unheard Of")
    on_gpu = [*auto, "--training.device=auto"]
    assert "no fabric is known for NVIDIA Unheard Of" in refused(*on_gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "the links between machines are not known" in refused(*on_gpu)


def test_layouts_prints_a_command_and_writes_a_file(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches printed keys, or a file, of another layout than the first, and an overwritten
    file.
    """
    out = job.parent / "best.yaml"
    many = "--data.micro_num=8"
    layouts = ["layouts", str(job), "--world=2", "--fabric=cpu", "--write", str(out), many]
    assert main(layouts) == 0
    command = capsys.readouterr().out.split("train with it:\n")[1].strip()
    assert command.startswith(f"isp train {job} --nproc=2 {many} ")
    (best, *_) = search(load_config(job, [many]), 2, load_fabric("cpu")).fitting
    for config in (load_config(out), load_config(job, shlex.split(command)[4:])):
        assert not list(KeyTable.of(JobConfig).differences(to_plain(best.config), to_plain(config)))
    assert main(layouts) == 2
    assert f"--write {out} exists" in capsys.readouterr().err
