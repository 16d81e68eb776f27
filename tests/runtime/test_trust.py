"""What the module cache trusts: nothing that another user but root owns, can write or could put in another's place."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warploom.runtime import cache, module_spec, modules, trust
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.trust import CacheError

SPEC = ModuleSpec("some_kernel", "sm_90a", "tests.runtime.builders:build", (("width", 3),), ("runtime/cubin.py",))
STRANGER = 54321


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Whatever that of the machine is."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache's root, three folders down."""
    found = tmp_path / "data" / "kernels" / "cache"
    monkeypatch.setenv("WARPLOOM_CACHE", str(found))
    return found


@pytest.fixture
def stored(root: Path, tmp_path: Path) -> Path:
    (tmp_path / "built.so").write_bytes(b"machine code")
    module_spec.store(SPEC, tmp_path / "built.so", {"registers": 168})
    assert modules.refusal(SPEC) is None
    return SPEC.library()


def give(path: Path, owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file look like another user's to whoever asks, which takes no privileges."""
    taken = os.lstat(path)

    def asked(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def ask(*arguments: Any, **options: Any) -> os.stat_result:
            found = real(*arguments, **options)
            if not os.path.samestat(found, taken):
                return found
            fields = list(found)
            fields[stat.ST_UID] = owner
            return os.stat_result(fields)

        return ask

    for name in ("fstat", "stat"):
        monkeypatch.setattr(trust.os, name, asked(getattr(os, name)))


def held() -> set[str]:
    """The files of the cache but for locks, which a builder takes before it looks."""
    folder = cache.cache_folder()
    return {name for name in os.listdir(folder) if not name.endswith(".lock")} if folder.exists() else set()


def refused_everywhere(*words: str) -> None:
    """At a look, at a load and before a build, each time in these words; nothing is built or removed."""
    before = held()
    found = [modules.refusal(SPEC) or "taken"]
    with pytest.raises(CacheError) as load:
        modules.load(SPEC)
    with pytest.raises(CacheError) as build:
        modules.build(SPEC, "not built")
    for text in [*found, str(load.value), str(build.value)]:
        assert all(word in text for word in words), text
    assert held() == before


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cannot_load", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr("warploom.runtime.module_worker.Worker", lambda arch: pytest.fail("it compiles"))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o2775])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_folder_that_others_can_write_was_trusted(stored: Path, mode: int, level: int) -> None:
    """The folder of modules, the cache's root, and what leads there."""
    folder = stored.parents[level]
    os.chmod(folder, mode)
    refused_everywhere(f"{folder} can be written by others (mode {stat.S_IMODE(os.stat(folder).st_mode):04o})", "chmod go-w")
    os.chmod(folder, 0o755)
    assert modules.refusal(SPEC) is None


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_folder_of_another_user_was_trusted(stored: Path, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    give(stored.parents[level], STRANGER, monkeypatch)
    refused_everywhere(f"{stored.parents[level]} belongs to user {STRANGER}", f"chown {os.geteuid()}", "WARPLOOM_CACHE")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_roots_folders_serve_all(stored: Path, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    give(stored.parents[level], 0, monkeypatch)
    assert modules.refusal(SPEC) is None


def test_a_namespace_that_does_not_know_root_may_lead_to_the_cache(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There / belongs to nobody; what holds modules must be ours all the same."""
    maps, nobody = tmp_path / "uid_map", tmp_path / "overflowuid"
    nobody.write_text(f"{STRANGER}\n")
    monkeypatch.setattr(trust, "_UID_MAP", maps)
    monkeypatch.setattr(trust, "_OVERFLOW_UID", nobody)
    with monkeypatch.context() as there:
        give(stored.parents[3], STRANGER, there)
        maps.write_text("         0          0 4294967295\n")
        refused_everywhere(f"{stored.parents[3]} belongs to user {STRANGER}")
        maps.write_text("         0       1000          1\n         1     100000      65536\n")
        assert modules.refusal(SPEC) is None
        nobody.write_text("7\n")
        refused_everywhere(f"{stored.parents[3]} belongs to user {STRANGER}")
    nobody.write_text(f"{STRANGER}\n")
    for path in (stored.parent, stored):
        with monkeypatch.context() as there:
            give(path, STRANGER, there)
            refused_everywhere(f"{path} belongs to user {STRANGER}")


def test_a_folder_as_tmp_may_lead_to_the_cache_and_not_hold_modules(stored: Path) -> None:
    """With the sticky bit nobody can replace what is ours, but anybody can add something."""
    for folder in stored.parents[1:4]:
        os.chmod(folder, 0o1777)
        assert modules.refusal(SPEC) is None
    os.chmod(stored.parent, 0o1777)
    refused_everywhere(f"{stored.parent} can be written by others (mode 1777)")


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_module_that_others_can_write_was_run(stored: Path, suffix: str, mode: int) -> None:
    file = stored.with_suffix(suffix)
    file.chmod(mode)
    refused_everywhere(f"{file} can be written by others (mode 0{mode:o})", "chmod go-w", "or remove it")
    file.chmod(0o644)
    assert modules.refusal(SPEC) is None


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_module_of_another_user_was_run(stored: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    give(stored.with_suffix(suffix), STRANGER, monkeypatch)
    refused_everywhere(f"{stored.with_suffix(suffix)} belongs to user {STRANGER}", "chown", "or remove it")


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_link_in_place_of_a_module_was_followed(stored: Path, tmp_path: Path, suffix: str) -> None:
    file = stored.with_suffix(suffix)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused_everywhere(f"{file} is a symbolic link, which is not followed: rm {file}")


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_in_place_of_a_module_kept_us_waiting(stored: Path, suffix: str, make: Callable[[Path], None]) -> None:
    file = stored.with_suffix(suffix)
    file.unlink()
    make(file)
    refused_everywhere(f"{file} is not a file: remove it")


def test_a_link_in_place_of_the_lock_was_followed_and_its_target_emptied(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache.open_cache(make=True).close()
    (root / "modules" / f"{SPEC.stem()}.lock").symlink_to(victim)
    with pytest.raises(CacheError, match=r"\.lock is a symbolic link, which is not followed"):
        modules.build(SPEC, "not built")
    assert victim.read_text() == "precious"


def test_a_lock_was_emptied(root: Path) -> None:
    cache.open_cache(make=True).close()
    lock = root / "modules" / f"{SPEC.stem()}.lock"
    lock.write_text("precious")
    with modules.build_lock(SPEC):
        assert lock.read_text() == "precious"


def test_nobody_else_can_hold_a_lock(root: Path) -> None:
    """To hold it, reading it would do."""
    with modules.build_lock(SPEC):
        assert stat.S_IMODE(os.stat(root / "modules" / f"{SPEC.stem()}.lock").st_mode) == 0o600


@pytest.mark.parametrize("attack", ["mode", "owner", "pipe", "folder"])
def test_a_lock_that_is_not_ours_alone_was_taken(root: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    cache.open_cache(make=True).close()
    lock = root / "modules" / f"{SPEC.stem()}.lock"
    {"pipe": os.mkfifo, "folder": os.mkdir}.get(attack, Path.touch)(lock)
    if attack == "mode":
        lock.chmod(0o666)
    if attack == "owner":
        give(lock, STRANGER, monkeypatch)
    words = {"mode": r"mode 0666", "owner": f"belongs to user {STRANGER}"}.get(attack, "is not a file")
    with pytest.raises(CacheError, match=words):
        modules.build(SPEC, "not built")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_folders_of_a_loose_umask_were_open_to_others(root: Path, tmp_path: Path, umask: int) -> None:
    os.umask(umask)
    (tmp_path / "built.so").write_bytes(b"machine code")
    module_spec.store(SPEC, tmp_path / "built.so", {})
    with modules.build_lock(SPEC):
        pass
    made = [root.parents[1], root.parents[0], root, root / "modules", *(root / "modules").iterdir()]
    assert len(made) == 7 and not any(os.stat(path).st_mode & 0o022 for path in made)
    assert modules.refusal(SPEC) is None


def test_a_link_to_the_cache_is_followed_where_all_on_its_way_is_ours(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = tmp_path / "links"
    holds.mkdir()
    (holds / "there").symlink_to(Path("..") / "data")
    (holds / "whole").symlink_to(tmp_path / "links" / "there" / "kernels" / "cache")
    monkeypatch.setenv("WARPLOOM_CACHE", str(holds / "whole"))
    assert modules.refusal(SPEC) is None
    assert modules.find(SPEC)[0] == stored, "what is loaded lies at a path without links"
    os.chmod(holds, 0o777)
    refused_everywhere(f"{holds} can be written by others")
    os.chmod(holds, 0o1777)
    assert modules.refusal(SPEC) is None, "a link of ours in a folder as /tmp"
    give(holds / "whole", STRANGER, monkeypatch)
    refused_everywhere(f"{holds / 'whole'} is a symbolic link of user {STRANGER}")


def test_a_link_to_where_others_can_write_was_followed(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(stored.parents[1])
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "link"))
    os.chmod(stored.parents[2], 0o777)
    refused_everywhere(f"{stored.parents[2]} can be written by others")


def test_links_that_go_round_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "a"))
    refused_everywhere("too many symbolic links")


def test_no_descriptor_is_lost(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempts() -> None:
        modules.refusal(SPEC)
        with modules.build_lock(SPEC):
            pass
        cache.put(folder, "file", b"content")
        for mode in (0o777, 0o755):
            os.chmod(stored.parents[1], mode)
            modules.refusal(SPEC)
        for path in (tmp_path / "absent", stored, tmp_path / "round"):
            monkeypatch.setenv("WARPLOOM_CACHE", str(path))
            modules.refusal(SPEC)
        monkeypatch.setenv("WARPLOOM_CACHE", str(stored.parents[1]))

    (tmp_path / "round").symlink_to("round")
    with cache.open_cache() as folder:
        attempts()
        before = os.listdir("/proc/self/fd")
        attempts()
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(root: Path) -> None:
    """Who waits for a builder under whom the cache is removed gets the lock of the next cache."""
    held, others = threading.Event(), []

    def second() -> None:
        with modules.build_lock(SPEC):
            others.append((root / "modules" / f"{SPEC.stem()}.lock").exists())

    waiting = threading.Thread(target=second)
    with modules.build_lock(SPEC):
        real = cache._flock
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "_flock", lambda descriptor: (held.set(), real(descriptor))[1])
            waiting.start()
            held.wait()
        (root / "modules" / f"{SPEC.stem()}.lock").unlink()
        (root / "modules").rmdir()
    waiting.join()
    assert others == [True]


def test_a_file_system_without_locks_is_built_in(stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fcntl

    def none(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with modules.build_lock(SPEC), cache.open_cache() as folder, cache.scratch(folder) as unfinished:
        module_spec.store(SPEC, tmp_path / "built.so", {})
        cache.sweep(folder)
        assert unfinished in folder.names(), "whose it is cannot be known"
    assert modules.refusal(SPEC) is None


def test_only_what_nobody_works_in_is_swept(root: Path) -> None:
    with cache.open_cache(make=True) as folder, cache.scratch(folder) as used:
        left = root / "modules" / ".scratch-0123"
        left.mkdir()
        (left / "lock").touch()
        (left / "part.so").touch()
        (root / "modules" / ".scratch-4567").mkdir()
        cache.sweep(folder)
        assert folder.names() == [used]
    assert os.listdir(root / "modules") == []
