"""Keys, commands and options that earlier versions had: refused where given, not where kept."""

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
def test_a_removed_key_is_refused_where_given_and_dropped_where_kept(key: str, write) -> None:
    """Catches a removed key without what replaces it, and an earlier run that cannot be resumed."""
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
def test_a_removed_command_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches argparse's list of all commands in place of what replaces it."""
    assert main([*command.split(), "folder"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: isp {command} was removed: ")


@pytest.mark.parametrize(("command", "option"), _REMOVED_OPTIONS)
def test_a_removed_option_is_refused(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `unrecognized arguments` in place of what replaces it, also for `--option=value`."""
    assert main([*command.split(), "folder", f"{option}=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: isp {command} {option} was removed: ")
