"""The command as a user meets it: help, version, exit statuses."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import warploom
from warploom.cli import COMMANDS, main


def test_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "warploom", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, f"warploom {warploom.__version__}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_examples_and_json(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert f"examples:\n  warploom {command}" in shown


def test_help_names_every_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["explain", "--seqlen", "-1", "--heads", "1"]])
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["80", "60"])
def test_a_terminal_broke_lines_within_words(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["explain", "--seqlen", "4096", "--heads", "32", "--device", "h100", "--window", "4095", "--backward"]
    plain, shown = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stdout", plain)
    assert main(call) == 0
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(call) == 0
    lines = shown.getvalue().splitlines()
    assert max(map(len, plain.getvalue().splitlines())) > 80
    assert all(len(line) <= int(columns) or " " not in line.strip() for line in lines)
    assert " ".join(shown.getvalue().split()) == " ".join(plain.getvalue().split())
    assert all(line[:9].strip() or line == "" or line.startswith(" " * 10) for line in lines)


def test_reader_that_leaves_ends_it_quietly() -> None:
    """As in `warploom build --list | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "warploom", "build", "--list"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")
