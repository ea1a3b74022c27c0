"""Keys, commands and options of earlier versions: refused in a command, accepted in old runs."""

from __future__ import annotations

from typing import Any

import pytest

from isp.cli import main
from isp.cli.program import _REMOVED_COMMANDS, _REMOVED_OPTIONS
from isp.config import ConfigError, JobConfig, load_config
from isp.config.keys import KeyTable
from isp.config.removed import REMOVED_KEYS

CONFIG = "model:\n  preset: tiny\ndata:\n  source: python-stdlib\n"


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_removed_key_is_refused_in_a_file_and_dropped_from_a_saved_run(key: str, write) -> None:
    """Catches a refusal that does not name the replacement, and an old run that cannot be
    resumed.
    """
    *sections, name = key.split(".")
    with pytest.raises(ConfigError, match=f"{key} was removed: ") as refused:
        load_config(write(CONFIG), [f"--{key}=1"])
    assert len(str(refused.value).splitlines()) == 1
    for value in (None, "other"):
        kept = {name: value}
        for section in reversed(sections):
            kept = {section: kept}
        found: Any = KeyTable.of(JobConfig).upgraded(kept)
        for section in sections:
            found = found[section]
        assert (name in found) == (value is not None and key != "model.init_from")


@pytest.mark.parametrize("command", _REMOVED_COMMANDS)
def test_a_removed_command_is_refused_with_its_replacement(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches argparse's list of all commands in place of the replacement."""
    assert main([*command.split(), "folder"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: isp {command} was removed: ")


@pytest.mark.parametrize(("command", "option"), _REMOVED_OPTIONS)
def test_a_removed_option_is_refused_with_its_replacement(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `unrecognized arguments` in place of the replacement, also for `--option=value`."""
    assert main([*command.split(), "folder", f"{option}=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: isp {command} {option} was removed: ")
