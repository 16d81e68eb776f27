"""Where a command is to write: tried before its work begins. And lines that fit the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path


def fitted(text: str, indent: int = 10) -> str:
    """Lines that are too long for the terminal, broken between words and continued at a column; elsewhere the text as it is."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= width else wrap.fill(line) for line in text.split("\n"))


def writable_file(option: str, path: Path | str) -> None:
    """Make the file's folder, and see that the file can be written; it is not changed, and one that was not there is not now.

    Raises:
        ValueError: it cannot; the message names the option and the path.
    """
    path = Path(path)
    writable_folder(option, path.parent)
    try:
        new = not path.exists()
        with open(path, "a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def writable_folder(option: str, path: Path) -> None:
    """Make the folder if it is missing; ValueError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file stands in its way" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
        raise ValueError(f"{option}: the folder {path} cannot be made: {reason}") from None
