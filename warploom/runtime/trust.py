"""Folders and files that nobody else can have changed, judged as sshd's StrictModes judges those of a user's keys.

What lies in the module cache is run, so whoever can write there, or put another folder in its place, runs code as us.
A path is walked from / by descriptors, each folder judged before the next is opened in it, those that hold symbolic links
too. What was judged stays as it is: only its owner and root could change it. So the path may be used afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType

_MOST_LINKS = 40  # as Linux has it
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY)  # asks for no permission to read
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
ELSEWHERE = "or set WARPLOOM_CACHE to a folder of your own"


class CacheError(RuntimeError):
    """The module cache must not or cannot be used: which path, what is wrong, and what helps."""


class Folder:
    """An open folder that was judged: ``descriptor``, and the ``path`` at which it lies, free of links."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    def open(self, name: str, flags: int, mode: int = 0o644) -> int:
        """A descriptor of a regular file that only its owner, this user or root, can write.

        Raises:
            CacheError: it is something else, or others can write it.
            OSError: it cannot be opened.
        """
        path = self.path / name
        try:
            # Without O_NONBLOCK a pipe in the file's place would keep us waiting.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CacheError(f"{path} is a symbolic link, which is not followed: rm {_quoted(path)}") from error
            if error.errno in (errno.EISDIR, errno.ENXIO):
                raise CacheError(f"{path} is not a file: remove it") from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CacheError(f"{path} is not a file: remove it")
            fault = _fault(found, path)
            if fault is not None:
                raise CacheError(f"{fault}, or remove it")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str) -> bytes:
        """A file's content; raises as ``open``."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def open_folder(path: Path, make: bool = False) -> Folder:
    """Open the folder at an absolute path, each one on the way judged; symbolic links are followed, and judged.

    Args:
        make: create what is missing, writable by nobody else whatever the umask.

    Raises:
        FileNotFoundError: it is not there.
        CacheError: others could change what is in it or put another in its place, or it cannot be opened or made.
    """
    if not hasattr(os, "geteuid"):
        raise CacheError("the module cache needs Linux, whose owners and modes of files it relies on")
    ahead = list(reversed(path.parts[1:]))
    folder = _root()
    links = 0
    try:
        _judge(folder, path, last=not ahead)
        while ahead:
            name = ahead.pop()
            target = _step(folder, name, last=not ahead, make=make)
            if isinstance(target, str):
                links += 1
                if links > _MOST_LINKS:
                    raise CacheError(f"{path} leads through too many symbolic links, {ELSEWHERE}")
                parts = Path(target).parts
                if target.startswith("/"):
                    root = _root()
                    folder.close()
                    folder, parts = root, parts[1:]
                ahead += reversed(parts)
            else:
                folder.close()
                folder = target
            _judge(folder, path, last=not ahead)
    except BaseException:
        folder.close()
        raise
    return folder


def _root() -> Folder:
    try:
        return Folder(os.open("/", _ON_THE_WAY | os.O_CLOEXEC), Path("/"))
    except OSError as error:
        raise CacheError(f"/ cannot be opened ({error.strerror})") from error


def _step(folder: Folder, name: str, last: bool, make: bool) -> Folder | str:
    """The folder of that name in ``folder``, or where the link of that name points."""
    path = folder.path.parent if name == ".." else folder.path / name
    flags = (os.O_RDONLY if last else _ON_THE_WAY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return Folder(os.open(name, flags, dir_fd=folder.descriptor), path)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        return _target(folder, name, path, error)
    try:
        os.mkdir(name, 0o755, dir_fd=folder.descriptor)
    except FileExistsError:
        pass  # made by another process meanwhile
    except OSError as error:
        raise CacheError(f"{path} cannot be made ({error.strerror}): make it yourself, {ELSEWHERE}") from error
    try:
        return Folder(os.open(name, flags, dir_fd=folder.descriptor), path)
    except OSError as error:
        return _target(folder, name, path, error)


def _target(folder: Folder, name: str, path: Path, refused: OSError) -> str:
    """Where a link points that could not be opened as a folder.

    It must not be another user's, who in /tmp, say, could make it point elsewhere at any time.
    """
    if refused.errno not in (errno.ENOTDIR, errno.ELOOP):
        raise CacheError(f"{path} cannot be opened ({refused.strerror}): make it yours, {ELSEWHERE}") from refused
    try:
        owner = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False).st_uid
        target = os.readlink(name, dir_fd=folder.descriptor)
    except OSError as error:
        raise CacheError(f"{path} is not a folder: remove it, {ELSEWHERE}") from error
    if owner not in (0, os.geteuid()):
        raise CacheError(f"{path} is a symbolic link of {_user(owner)}: remove it, {ELSEWHERE}")
    return target


def _judge(folder: Folder, whole: Path, last: bool) -> None:
    """Raise CacheError where somebody else could change what is in a folder on the way to ``whole``.

    Of a folder with the sticky bit, as /tmp, others can write, but neither remove nor replace what is not theirs.
    """
    fault = _fault(os.fstat(folder.descriptor), folder.path, on_the_way=not last)
    if fault is not None:
        raise CacheError(f"{fault}, {ELSEWHERE}" if last else f"{fault}, {ELSEWHERE}; it leads to {whole}")


def _fault(found: os.stat_result, path: Path, on_the_way: bool = False) -> str | None:
    """What is wrong with the owner or mode of a file or folder and how to mend it, or None."""
    user = os.geteuid()
    if found.st_uid not in (0, user) and not (on_the_way and found.st_uid == _root_unseen()):
        ours = "root" if user == 0 else f"{_user(user)} or root"
        return f"{path} belongs to {_user(found.st_uid)}, not to {ours}, and holds code to be run: chown {user} {_quoted(path)}"
    if found.st_mode & _OTHERS_WRITE and not (on_the_way and found.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(found.st_mode)
        return f"{path} can be written by others (mode {mode:04o}) and holds code to be run: chmod go-w {_quoted(path)}"
    return None


def _root_unseen() -> int | None:
    """As whom a user namespace without the machine's root shows what is root's, / for one; None where root is seen.

    It shows every user so that it does not know. One of those could put another folder in the place of one on the way,
    but neither a folder nor a file that we would take for ours.
    """
    try:
        rows = [[int(number) for number in row.split()] for row in _UID_MAP.read_text().splitlines()]
        if any(outer == 0 and count for _, outer, count in rows):
            return None
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return None


def _user(number: int) -> str:
    import pwd

    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except (KeyError, OSError):
        return f"user {number}"


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
