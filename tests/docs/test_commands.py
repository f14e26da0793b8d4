"""Commands and exit codes stand in the README and in --help."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from nereus_core.cli import app
from nereus_core.cli.outcome import EXIT_CODES, ExitCode

README = (Path(__file__).parents[2] / "nereus_core" / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(get_command(app).commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name):
    assert re.search(rf"^\| `nereus {name}\b", README, re.M)


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_is_documented(code):
    assert re.search(rf"^\| {code} \|", README, re.M)
    assert re.search(rf"\b{code} ", EXIT_CODES)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example_and_the_exit_codes(name):
    ran = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert ran.exit_code == 0
    assert re.search(rf"^ +nereus {name}\b", ran.output, re.M)
    assert "Exit codes: 0 ok" in ran.output


def test_the_bare_command_shows_help():
    ran = CliRunner().invoke(app, ["--help"])
    assert ran.exit_code == 0
    assert set(COMMANDS) <= set(re.findall(r"\w+", ran.output))
