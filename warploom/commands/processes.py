"""Calls in processes of their own, a few at a time, which end with the caller however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TypeVar

Argument = TypeVar("Argument")

# Seconds after which a wait looks for Ctrl-C: a signal that another thread received does not end it.
LOOK = 0.2


def in_processes(
    function: Callable[[Argument], str], arguments: Iterable[Argument], jobs: int
) -> Generator[tuple[Argument, str], None, None]:
    """Each argument with its result, as they come; a process that ended without one gives words that say so.

    The processes share nothing: with a lock between them, as in a multiprocessing.Pool, one that is killed while it holds
    the lock would leave the others and the caller waiting. They are masked from Ctrl-C, whose traceback nobody wants to see
    twice, and are killed when the iterator is closed.
    """
    resource_tracker.ensure_running()  # whoever starts it has no signal blocked afterwards
    waiting = list(arguments)[::-1]
    running: dict[Connection, tuple[Argument, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                with _uninterrupted():
                    ours, process = _start(function, waiting[-1])
                    running[ours] = waiting.pop(), process
            for ready in connection.wait(list(running), LOOK):
                assert isinstance(ready, Connection)
                argument, process = running[ready]
                try:
                    result = ready.recv()
                except EOFError:
                    process.join()
                    result = f"its process ended with status {process.exitcode}"
                with _uninterrupted():
                    del running[ready]
                    ready.close()
                process.join()
                yield argument, result
    finally:
        for _, process in running.values():
            process.kill()
        for ours, (_, process) in running.items():
            process.join()
            ours.close()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Without Ctrl-C, which comes afterwards; processes started here are masked from it, and so are theirs."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _start(function: Callable[[Argument], str], argument: Argument) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, argument), daemon=False)
    process.start()
    theirs.close()
    return ours, process


def _answer(answers: Connection, function: Callable[[Argument], str], argument: Argument) -> None:
    answers.send(function(argument))
