"""Compiled kernel modules: found in the cache, verified, loaded without their compiler, or built once under a lock.

A module is a shared library with the host launcher and the GPU code of one kernel variant, next to a manifest that says
what it was made from. The manifest is written last, so a builder that dies leaves nothing that looks whole. File names
end with a digest of what the manifest says: versions and machines that share a cache keep a module each. Loading
needs apache-tvm-ffi and the CuTe DSL's runtime library, not the DSL itself.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from warploom.runtime import cache as files
from warploom.runtime import machine, module_spec
from warploom.runtime.cache import cache_folder, open_cache
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.trust import CacheError, Folder

_OLDEST_DRIVER = 13000  # CUDA 13.0, as the driver counts
_MEANINGS = {
    "format": "written by another version of warploom",
    "sources": "built from other kernel sources",
    "config": "built for another configuration",
    "dsl": "built by another version of nvidia-cutlass-dsl",
    "tvm_ffi": "built for another version of apache-tvm-ffi",
}


@cache
def runtime_library() -> Path | None:
    """The CuTe DSL's runtime for CUDA 13, which modules are linked against; found without importing the DSL."""
    spec = find_spec("nvidia_cutlass_dsl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / "cu13" / "lib" / "libcute_dsl_runtime.so"
        if library.exists():
            return library
    return None


@cache
def driver_version() -> int | None:
    """The CUDA version that the installed driver serves, 13000 for 13.0; None without a driver."""
    version = ctypes.c_int(0)
    try:
        status: int = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 else None


def driver_refusal() -> str | None:
    """Why the driver is too old for the CUDA 13 libraries that modules are linked with, or None."""
    if machine.assumed is not None:
        return None
    driver = driver_version()
    if driver is None or driver >= _OLDEST_DRIVER:
        return None
    return f"needs a driver for CUDA 13 (580 or newer), this one is for {driver // 1000}.{driver % 1000 // 10}"


@machine.examined
def cannot_load() -> str | None:
    """Why no module can be loaded here, or None."""
    if machine.assumed is not None and machine.assumed.extras:
        return None
    if find_spec("tvm_ffi") is None:
        return "the apache-tvm-ffi package is not installed (pip install 'warploom[hopper]')"
    if runtime_library() is None:
        return "nvidia-cutlass-dsl with its CUDA 13 libraries is not installed (pip install 'warploom[hopper]')"
    return None


@machine.examined
def cannot_run() -> str | None:
    """Why no Hopper module runs on this machine, or None."""
    found = machine.capabilities()
    if not found:
        return "no CUDA device is visible"
    if (9, 0) not in found:
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(found)))
        return f"needs compute capability 9.0 (H100, H200), this machine has {names}"
    return driver_refusal() or cannot_load()


@machine.examined
def cannot_build() -> str | None:
    """Why no module can be built here, or None."""
    if machine.assumed is not None and machine.assumed.extras:
        return None
    spec = find_spec("cutlass")
    if spec is None:
        return "the CuTe DSL is not installed (pip install 'warploom[hopper]')"
    folders = [Path(folder) / "_mlir" / "_mlir_libs" for folder in spec.submodule_search_locations or []]
    tagged = [suffix for suffix in EXTENSION_SUFFIXES if suffix != ".so"]  # which any interpreter's would match
    if not any(any(folder.glob(f"_cutlass_ir*{suffix}")) for folder in folders for suffix in tagged):
        return "the CuTe DSL is installed without its compiler for this Python (pip install 'warploom[hopper]')"
    if find_spec("tvm_ffi") is None:
        return "the apache-tvm-ffi package is not installed (pip install 'warploom[hopper]')"
    return None


class Missing(RuntimeError):
    """The cache has no module that may be run, and building one would help.

    ``rank`` is higher the nearer one has come, 0 where none is there.
    """

    def __init__(self, words: str, rank: int = 0) -> None:
        super().__init__(words)
        self.rank = rank


def find(spec: ModuleSpec) -> tuple[Path, dict[str, Any]]:
    """The library and manifest of a module in the cache that may be run.

    What was built here is looked for first, then what another machine or version of the DSL has built and may do here.

    Raises:
        Missing: there is none.
        CacheError: the cache must not or cannot be used.
    """
    try:
        folder = open_cache()
    except FileNotFoundError:
        raise Missing("not built") from None
    with folder:
        own = spec.stem()
        try:
            return _examine(spec, folder, own)
        except Missing as missing:
            nearest = missing
        ours = nearest.rank > 0
        others = re.compile(rf"({re.escape(spec.name)}-[0-9a-f]{{{module_spec.DIGITS}}})\.json")
        stems = {found[1] for name in folder.names() if (found := others.fullmatch(name))}
        for stem in sorted(stems - {own}):
            try:
                return _examine(spec, folder, stem)
            except Missing as missing:
                if not ours and missing.rank > nearest.rank:
                    nearest = missing
        raise nearest


def _examine(spec: ModuleSpec, folder: Folder, stem: str) -> tuple[Path, dict[str, Any]]:
    """The files of that name if they are whole and fit; raises as ``find``."""
    try:
        manifest = json.loads(folder.read(f"{stem}.json"))
        content = folder.read(f"{stem}.so")
    except FileNotFoundError:
        raise Missing("not built") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Missing(f"unreadable ({error})", 1) from error
    if not isinstance(manifest, dict) or manifest.get("sha256") != module_spec.digest(content):
        raise Missing("truncated or corrupted", 1)
    for rank, (key, value) in enumerate(spec.described().items(), 2):
        if manifest.get(key) != value and not (key == "dsl" and value == "any"):
            raise Missing(_MEANINGS[key], rank)
    cpu = manifest.get("cpu")
    if not (isinstance(cpu, list) and cpu and all(isinstance(flag, str) for flag in cpu)):
        raise Missing("truncated or corrupted", 1)
    machine, *used = cpu
    lacking = [] if machine == platform.machine() else [machine]
    lacking += [flag for flag in used if module_spec.INSTRUCTIONS.match(flag) and flag not in module_spec.cpu_features()]
    if lacking:
        words = f"built on a machine whose processor has {', '.join(lacking)}, which this one lacks"
        raise Missing(words, len(_MEANINGS) + 2)
    return folder.path / f"{stem}.so", manifest


_absent: dict[ModuleSpec, tuple[Hashable, str]] = {}


def _missing(spec: ModuleSpec) -> str | None:
    """Why the cache has no module that may be run, or None; CacheError as ``find``.

    A module that is not there is looked for again when a file has come into the cache's folder.
    """
    state = files.state()
    kept = _absent.get(spec)
    if state is not None and kept is not None and kept[0] == state:
        return kept[1]
    try:
        find(spec)
    except Missing as missing:
        if state is not None and missing.rank == 0:
            _absent[spec] = state, str(missing)
        return str(missing)
    return None


def built(spec: ModuleSpec) -> bool:
    """Whether the cache has the module; CacheError where building it would not help."""
    try:
        find(spec)
    except Missing:
        return False
    return True


def refusal(spec: ModuleSpec) -> str | None:
    """Why the cache's module of ``spec`` is missing or must not be run, or None."""
    try:
        return _missing(spec)
    except CacheError as error:
        return str(error)


def absence(spec: ModuleSpec) -> str | None:
    """Why the module can be neither loaded nor built here, for the user, or None."""
    reason = cannot_build()
    if reason is None:
        return None
    try:
        missing = _missing(spec)
    except CacheError as error:
        return f"its module {spec.name} is refused: {error}"
    return None if missing is None else f"its module {spec.name} is {missing} in {cache_folder()}, and {reason}"


def outlook(spec: ModuleSpec) -> str:
    """Whether the module is ready, or what happens at the first call, for explain()."""
    if loaded(spec) is not None:
        return "ready"
    try:
        find(spec)
    except Missing as missing:
        return f"{missing}, compiled at first use"
    except CacheError as error:
        return f"refused: {error}"
    return "ready"


def unusable() -> str | None:
    """Why the cache must not or cannot be used, whatever lies in it, or None."""
    try:
        open_cache().close()
    except FileNotFoundError:
        return None
    except CacheError as error:
        return str(error)
    return None


def size(spec: ModuleSpec) -> int:
    """Bytes of the cache's module; 0 where there is none that may be run."""
    try:
        return find(spec)[0].stat().st_size
    except (Missing, CacheError, FileNotFoundError):
        return 0


def facts(spec: ModuleSpec) -> dict[str, Any]:
    """What the builder measured: registers, stack, shared, seconds; empty for a module that is not there."""
    try:
        found = find(spec)[1].get("facts")
    except (Missing, CacheError):
        return {}
    return found if isinstance(found, dict) else {}


def build_lock(spec: ModuleSpec) -> AbstractContextManager[None]:
    """One builder of a module at a time, across processes; a builder that dies lets go."""
    return files.lock(f"{spec.stem()}.lock")


_loaded: dict[ModuleSpec, Callable[..., None]] = {}
_loading = threading.Lock()


def cannot_come(spec: ModuleSpec) -> bool:
    """Whether the module can be neither loaded nor built here."""
    return cannot_build() is not None and refusal(spec) is not None


def loaded(spec: ModuleSpec) -> Callable[..., None] | None:
    """The module's function if this process has it already."""
    return _loaded.get(spec)


def load(spec: ModuleSpec) -> Callable[..., None]:
    """The module's function: from the cache in about a millisecond, else built first, which is said on stderr.

    Raises:
        RuntimeError: it can be neither loaded nor built here; the message says why. A CacheError where others could change
            what is in the cache, or nothing can be written there.
    """
    function = _loaded.get(spec)
    if function is not None:
        return function
    with _loading:
        function = _loaded.get(spec)
        if function is None:
            function = _loaded[spec] = _load(spec)
    return function


def at_hand(spec: ModuleSpec) -> bool:
    """Whether ``fetch`` gives the module to a call made now."""
    return loaded(spec) is not None or not (torch.cuda.is_current_stream_capturing() or cannot_come(spec))


def fetch(spec: ModuleSpec) -> Callable[..., None]:
    """``load`` for a call, which may be captured: RuntimeError then, where the module is not loaded already."""
    if loaded(spec) is None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{spec.name} is not loaded, which a capturing stream cannot do: make such a call before")
    return load(spec)


def _load(spec: ModuleSpec) -> Callable[..., None]:
    reason = cannot_load()
    if reason is not None:
        raise RuntimeError(f"{spec.name} cannot be loaded: {reason}")
    try:
        library, _ = find(spec)
    except Missing as missing:
        build(spec, str(missing))
        try:
            library, _ = find(spec)
        except Missing as still:
            raise RuntimeError(f"{spec.name} is {still} in {cache_folder()} right after it was compiled") from still
    _load_runtime()
    import tvm_ffi

    try:
        # By its path: nobody else can put another file there, and only this user and root can change it.
        function: Callable[..., None] = getattr(tvm_ffi.load_module(str(library)), spec.name)
    except (RuntimeError, OSError, AttributeError) as error:
        raise RuntimeError(f"{library} cannot be loaded: {error}") from error
    return function


@cache
def _load_runtime() -> None:
    ctypes.CDLL(str(runtime_library()), ctypes.RTLD_GLOBAL)


def build(spec: ModuleSpec, why: str) -> None:
    """Compile a module into the cache in a process of its own; another builder's result is taken instead of waiting twice."""
    reason = cannot_build()
    if reason is not None:
        raise RuntimeError(f"{spec.name} is {why} in {cache_folder()} and cannot be built: {reason}")
    from warploom.runtime.module_worker import Worker

    try:
        with build_lock(spec):
            if built(spec):
                return
            print(f"warploom: compiling {spec.name} ({why}; once, about 10 s)", file=sys.stderr, flush=True)
            start = time.perf_counter()
            with Worker(spec.arch) as worker:
                worker.build(spec)
    except CacheError as error:
        raise CacheError(f"{spec.name} is {why}, and cannot be built: {error}") from error
    print(f"warploom: compiled {spec.name} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
