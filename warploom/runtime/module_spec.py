"""What a compiled kernel module is made from, where it lies in the cache, and how it gets there.

The description of a module (`ModuleSpec`), the versions and the machine that its manifest names, and `store`. A process that
compiles modules needs no more than this; finding, checking and loading them is `warploom.runtime.modules`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from warploom.runtime import cache as files
from warploom.runtime.cache import cache_folder, open_cache

FORMAT = 1  # of the manifest
DIGITS = 12  # of the digest in a file name
_PACKAGE = Path(__file__).parents[1]
# Instruction sets that a compiler uses unasked. Others (sse4a, xop, adx, amx) need intrinsics, and the remaining flags of
# /proc/cpuinfo say nothing about what a library runs on.
INSTRUCTIONS = re.compile(r"^(avx|sse(?!4a)|ssse|pni$|cx16|fma$|f16c|bmi|popcnt|lzcnt|abm|movbe|asimd|sve|fp)")


@dataclass(frozen=True)
class ModuleSpec:
    """One kernel variant: ``builder`` ("package.module:function") turns ``config`` into a library that exports ``name``."""

    name: str
    arch: str  # "sm_90a"
    builder: str
    config: tuple[tuple[str, Any], ...]
    sources: tuple[str, ...]  # files of the package that the kernel is made from

    def described(self) -> dict[str, Any]:
        """What a manifest must agree with for the module to be run."""
        return {
            "format": FORMAT,
            "sources": sources_digest(self.sources),
            "config": json.dumps([self.arch, self.builder, self.config]),
            "dsl": dsl_version() or "any",
            "tvm_ffi": ffi_version() or "any",
        }

    def stem(self) -> str:
        """The file name, without its suffix, of a module built here and now."""
        return f"{self.name}-{digest(json.dumps([self.described(), cpu_features()]).encode())[:DIGITS]}"

    def library(self) -> Path:
        """Where such a module lies in the cache."""
        return cache_folder() / f"{self.stem()}.so"


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


@cache
def sources_digest(sources: tuple[str, ...]) -> str:
    """SHA-256 of the files' contents, in order."""
    content = hashlib.sha256()
    for source in sources:
        content.update((_PACKAGE / source).read_bytes())
    return content.hexdigest()


@cache
def dsl_version() -> str | None:
    """The installed CuTe DSL's version, from metadata."""
    return _version("nvidia-cutlass-dsl")


@cache
def ffi_version() -> str | None:
    """The installed apache-tvm-ffi's major and minor version: its binary interface may change between those."""
    found = _version("apache-tvm-ffi")
    return ".".join(found.split(".")[:2]) if found else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def cpu_features() -> tuple[str, ...]:
    """The machine's architecture and instruction sets; a module's host code may use those of the machine that built it."""
    description = Path("/proc/cpuinfo")
    return (platform.machine(), *instruction_sets(description.read_text() if description.exists() else ""))


def instruction_sets(description: str) -> list[str]:
    """Of the first processor of /proc/cpuinfo."""
    for line in description.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return sorted({flag for flag in value.split() if INSTRUCTIONS.match(flag)})
    return []


def store(spec: ModuleSpec, library: Path, facts: dict[str, Any]) -> None:
    """Put a built library and its manifest into the cache, each in one step, the manifest last; CacheError if it cannot be."""
    content = library.read_bytes()
    manifest = {**spec.described(), "sha256": digest(content), "cpu": list(cpu_features()), "facts": facts}
    with open_cache(make=True) as folder:
        stem = spec.stem()
        files.remove(folder, f"{stem}.json")
        files.put(folder, f"{stem}.so", content)
        files.put(folder, f"{stem}.json", json.dumps(manifest, indent=1).encode())


def to_json(spec: ModuleSpec) -> str:
    """A spec as the worker process reads it."""
    return json.dumps(asdict(spec))


def from_json(text: str) -> ModuleSpec:
    """The inverse of ``to_json``."""
    fields = json.loads(text)
    fields["config"] = tuple((key, value) for key, value in fields["config"])
    return ModuleSpec(**{**fields, "sources": tuple(fields["sources"])})
