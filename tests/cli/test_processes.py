"""Calls in processes of their own: each answers, one that dies is named, all end with the caller."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from warploom.commands.processes import in_processes


def answer(word: str) -> str:
    if word == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "fails":
        raise SystemExit(3)
    return f"{word} by {os.getpid()}"


def appear_or_end(place: str) -> str:
    if place == "first":
        return "ended"
    Path(place).write_text(str(os.getpid()))
    while True:
        signal.pause()


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_every_call_answers_from_its_own_process(jobs: int) -> None:
    found = dict(in_processes(answer, ["a", "b", "c"], jobs))
    assert sorted(found) == ["a", "b", "c"]
    processes = {found[word].removeprefix(f"{word} by ") for word in found}
    assert len(processes) == 3 and str(os.getpid()) not in processes


def test_nothing_to_do() -> None:
    assert list(in_processes(answer, [], 2)) == []


def test_a_process_that_ends_without_an_answer_is_named() -> None:
    found = dict(in_processes(answer, ["dies", "a", "fails"], 2))
    assert found.pop("a").startswith("a by ")
    assert found == {"dies": f"its process ended with status {-signal.SIGKILL}", "fails": "its process ended with status 3"}


def test_closing_ends_those_at_work(tmp_path: Path) -> None:
    place = tmp_path / "process"
    os.mkfifo(place)
    found = in_processes(appear_or_end, [str(place), "first"], 2)
    assert next(found) == ("first", "ended")
    process = int(place.read_text())
    os.kill(process, 0)
    found.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_ctrl_c_is_blocked_in_what_is_started() -> None:
    assert list(in_processes(blocked, [""], 1)) == [("", str({signal.SIGINT}))]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def blocked(_: str) -> str:
    return str({number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if number == signal.SIGINT})
