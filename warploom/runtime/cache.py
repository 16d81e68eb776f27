"""Where compiled modules lie: the cache's folder, files put there in one step, locks and folders for unfinished work.

All of it goes through ``warploom.runtime.trust``: nothing is read, run, locked or written where others can write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

from warploom.runtime.trust import ELSEWHERE, CacheError, Folder, open_folder

_SCRATCH = ".scratch-"
_TICK = 3.0  # seconds, past what any file system rounds its times to
_LOCK = "lock"  # in a scratch folder: held while its owner lives
_HELP = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EFBIG: "raise the limit on sizes of files (ulimit -f)"}


def cache_root() -> Path:
    """WARPLOOM_CACHE, or ~/.cache/warploom, as an absolute path; CacheError where that needs a home and none is known."""
    given = os.environ.get("WARPLOOM_CACHE") or "~/.cache/warploom"
    expanded = os.path.expanduser(given)
    if expanded.startswith("~"):
        asked = f"WARPLOOM_CACHE={given}" if os.environ.get("WARPLOOM_CACHE") else "the module cache"
        raise CacheError(f"{asked} needs a home folder, and none is known: set HOME, {ELSEWHERE}")
    try:
        return Path(expanded).absolute()
    except OSError as error:
        raise CacheError(f"WARPLOOM_CACHE={given} is relative to the current folder, which is gone") from error


def cache_folder() -> Path:
    """The folder of modules in ``cache_root()``."""
    return cache_root() / "modules"


def open_cache(make: bool = False) -> Folder:
    """``cache_folder()``, judged and open; FileNotFoundError or, where it must not or cannot be used, CacheError."""
    return open_folder(cache_folder(), make)


def state() -> Hashable | None:
    """What differs once a file has been put into ``cache_folder()`` or taken from it; None where a time of change cannot tell.

    It cannot while a further change may fall into the same tick of a file system's clock.
    """
    path = cache_folder()
    try:
        found = os.stat(path)
    except OSError:
        return str(path), None
    if time.time() - found.st_mtime < _TICK:
        return None
    return str(path), (found.st_dev, found.st_ino, found.st_mtime)


def put(folder: Folder, name: str, content: bytes) -> None:
    """Write a file in one step: whole or, after a CacheError, not at all."""
    with written(folder, name), scratch(folder) as unfinished:
        path = f"{unfinished}/file"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder.descriptor)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(path, name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)


def remove(folder: Folder, name: str) -> None:
    """Remove a file if it is there."""
    with written(folder, name), contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder.descriptor)


@contextlib.contextmanager
def written(folder: Folder, name: str) -> Iterator[None]:
    """Turn an OSError inside into a CacheError about the file of that name."""
    try:
        yield
    except OSError as error:
        helps = _HELP.get(error.errno or 0, "let its owner build")
        raise CacheError(f"{folder.path / name} cannot be written ({error.strerror}): {helps}, {ELSEWHERE}") from error


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the cache's lock of that name, one process and thread at a time; a holder that dies lets it go.

    The file is neither truncated nor written, and nobody else can open it, which is all that holding it takes.
    """
    with contextlib.ExitStack() as open_now:
        while True:
            folder = open_now.enter_context(open_cache(make=True))
            with written(folder, name):
                descriptor = folder.open(name, os.O_RDWR | os.O_CREAT, 0o600)
                open_now.callback(os.close, descriptor)
                _flock(descriptor)
                if _is(folder, name, descriptor):
                    break
            open_now.close()  # whoever held it has removed the cache
        yield


def _is(folder: Folder, name: str, descriptor: int) -> bool:
    """Whether the file of that name is the one that is open."""
    try:
        found = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _flock(descriptor: int, wait: bool = True) -> bool:
    """Take the lock and return True; BlockingIOError where another has it and we do not wait.

    False in a file system without locks, where builders that meet do the same work twice.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


class Scratch:
    """A folder of unfinished work in the cache: private, on the cache's own disk, removed by ``close``.

    Its ``lock`` is a descriptor, held; processes that inherit it hold it too. What a killed process leaves is removed by
    ``sweep``, which the next builder calls.
    """

    def __init__(self, folder: Folder) -> None:
        """Raises OSError."""
        import secrets  # with hmac, which `import warploom` goes without

        self._folder = folder
        while True:
            self.name = _SCRATCH + secrets.token_hex(8)
            os.mkdir(self.name, 0o700, dir_fd=folder.descriptor)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self.lock = os.open(f"{self.name}/{_LOCK}", flags, 0o600, dir_fd=folder.descriptor)
            except FileNotFoundError:
                continue  # swept before it was locked
            except BaseException:
                os.rmdir(self.name, dir_fd=folder.descriptor)
                raise
            with contextlib.suppress(BlockingIOError):
                _flock(self.lock, wait=False)
                if os.fstat(self.lock).st_nlink:
                    return
            os.close(self.lock)  # swept too

    @property
    def path(self) -> Path:
        return self._folder.path / self.name

    def close(self) -> None:
        shutil.rmtree(self.name, ignore_errors=True, dir_fd=self._folder.descriptor)
        os.close(self.lock)


@contextlib.contextmanager
def scratch(folder: Folder) -> Iterator[str]:
    """The name of a ``Scratch`` in ``folder``, for as long as it is used."""
    made = Scratch(folder)
    try:
        yield made.name
    finally:
        made.close()


def sweep(folder: Folder) -> None:
    """Remove what killed builders left: scratch folders whose lock nobody holds."""
    for name in folder.names():
        if not name.startswith(_SCRATCH):
            continue
        with contextlib.suppress(OSError):
            try:
                descriptor = os.open(f"{name}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor)
            except FileNotFoundError:
                os.rmdir(name, dir_fd=folder.descriptor)  # its maker was killed right away, or is about to try again
                continue
            try:
                if _flock(descriptor, wait=False):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=folder.descriptor)
            finally:
                os.close(descriptor)
