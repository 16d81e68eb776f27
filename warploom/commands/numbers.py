"""Whole numbers of a command line, within their limits."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole(least: int = 0, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"takes a whole number from {least}, got {text!r}")
        if number > most:
            raise ArgumentTypeError(f"takes a whole number up to {most}, got {text!r}")
        return number

    return read
