"""`warploom build`: compile the named set of kernels into the cache, ahead of time and without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from warploom.runtime import modules
from warploom.runtime.cache import open_cache
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.table import table
from warploom.runtime.trust import CacheError

_LOOK = 0.2  # seconds after which a wait looks for Ctrl-C: one that comes just before the wait does not end it
_PATIENCE = 5.0  # seconds for a thread to end once its compiler is killed


def run(options: argparse.Namespace) -> int:
    if options.all and not options.list:
        raise ValueError("--all is of --list; without it every module is built that --only does not leave out")
    if options.out is not None:
        if not options.out:
            raise ValueError("--out takes a folder, got an empty name")
        os.environ["WARPLOOM_CACHE"] = options.out
    kinds = {
        kind: [spec for spec in specs if fnmatch.fnmatch(spec.name, options.only)]
        for kind, specs in named_kinds(options.arch).items()
    }
    specs = [spec for found in kinds.values() for spec in found]
    if not specs:
        raise ValueError(f"--only {options.only!r} matches none of the {len(named_set(options.arch))} names of --list --all")
    refused = modules.unusable()
    if refused is not None:
        raise ValueError(refused)
    if options.list:
        found = [state(spec, kind) for kind, held in kinds.items() for spec in held]
        if options.json:
            print(json.dumps(found, indent=1))
        else:
            print(table([(row["name"], row["refused"] or "built") for row in found]) if options.all else summary(found))
        return 0
    reason = modules.cannot_build()
    if reason is not None:
        raise ValueError(f"nothing can be built here: {reason}")
    try:
        open_cache(make=True).close()
    except CacheError as error:
        raise ValueError(str(error)) from None
    start = time.perf_counter()
    rows = build_all(specs, options.jobs, quiet=options.json and not sys.stderr.isatty())
    failed = sum("error" in row for row in rows)
    if options.json:
        print(json.dumps({"folder": str(modules.cache_folder()), "modules": rows}, indent=1))
    else:
        print(table([(str(row["name"]), _words(row)) for row in rows]))
        print(f"{len(rows) - failed} of {len(rows)} modules in {modules.cache_folder()}, {time.perf_counter() - start:.0f} s")
    return int(failed > 0)


def named_set(arch: str) -> list[ModuleSpec]:
    """Every module that `warploom build` prepares for an architecture."""
    return [spec for specs in named_kinds(arch).values() for spec in specs]


def named_kinds(arch: str) -> dict[str, list[ModuleSpec]]:
    """The named set by what its modules compute."""
    from warploom.attention.ampere.plan import ARCHS
    from warploom.attention.ampere.plan import named_set as ampere
    from warploom.attention.hopper.fp8_plan import fp8_set
    from warploom.attention.hopper.plan import backward_set
    from warploom.attention.hopper.plan import named_set as forward_set
    from warploom.attention.hopper.sums_plan import sums_set
    from warploom.decode.hopper.latent_plan import named_set as latent_set
    from warploom.decode.hopper.plan import named_set as decode_set
    from warploom.delta.hopper.plan import named_set as delta_set
    from warploom.linear.hopper.plan import named_set as linear_set

    if arch == "sm_90a":
        return {
            "attention forward": [config.spec for config in forward_set()],
            "attention backward": [config.spec for config in backward_set()],
            "attention in FP8": [config.spec for config in fp8_set()],
            "column sums": [config.spec for config in sums_set()],
            "linear attention": [config.spec for config in linear_set()],
            "decode": [config.spec for config in decode_set()] + [config.spec for config in latent_set()],
            "gated delta rule": [config.spec for config in delta_set()],
        }
    found = [config.spec for capability, compiled in ARCHS.items() if compiled == arch for config in ampere(capability)]
    return {"attention forward": list(dict.fromkeys(found))}


def state(spec: ModuleSpec, kind: str) -> dict[str, Any]:
    """Name and kind of a module, why the cache's must not be run or None, and the size of what may."""
    refused = modules.refusal(spec)
    return {"name": spec.name, "kind": kind, "refused": refused, "bytes": modules.size(spec) if refused is None else 0}


def summary(found: Sequence[dict[str, Any]]) -> str:
    """The kinds, how many of each are built, their size, and what keeps others that are there from being run."""
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in found):
        own = [row for row in found if row["kind"] == kind]
        rows.append((kind, *_sums(own)))
    rows.append(("all", *_sums(found)))
    refusals = Counter(row["refused"] for row in found if row["refused"] not in (None, "not built"))
    lines = [table(rows, heading=("kind", "modules", "built", "MiB")), *(f"  {count} {why}" for why, count in refusals.items())]
    return "\n".join([*lines, f"in {modules.cache_folder()}; --list --all names each module"])


def _sums(rows: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    built = sum(row["refused"] is None for row in rows)
    return str(len(rows)), str(built), f"{sum(row['bytes'] for row in rows) / 2**20:.1f}"


def build_all(specs: Iterable[ModuleSpec], jobs: int, quiet: bool) -> list[dict[str, Any]]:
    """Build what the cache lacks with ``jobs`` compilers; a row a module, in order: its facts, or its error."""
    from warploom.runtime.module_worker import Worker

    specs = list(specs)
    waiting: SimpleQueue[ModuleSpec] = SimpleQueue()
    for spec in specs:
        waiting.put(spec)
    rows: dict[str, dict[str, Any]] = {}
    finished = itertools.count(1)
    compilers: set[Worker] = set()
    stopped = threading.Event()
    ended: SimpleQueue[None] = SimpleQueue()  # of threads, which an interrupted join() would take for ended

    def work() -> None:
        try:
            compile_all()
        finally:
            ended.put(None)

    def compile_all() -> None:
        worker: Worker | None = None
        while not stopped.is_set():
            try:
                spec = waiting.get_nowait()
            except Empty:
                break
            try:
                with modules.build_lock(spec):
                    if modules.built(spec):
                        row = {**modules.facts(spec), "cached": True}
                    else:
                        if worker is None:
                            worker = Worker(spec.arch)
                            compilers.add(worker)
                        if stopped.is_set():
                            worker.kill()
                        row = worker.build(spec)
            except RuntimeError as error:
                row = {"error": str(error)}
                if worker is not None:  # it may have died
                    compilers.discard(worker)
                    worker.close()
                    worker = None
            rows[spec.name] = {"name": spec.name, **row}
            if not (quiet or stopped.is_set()):
                _progress(next(finished), len(specs), spec.name)
        if worker is not None:
            worker.close()

    # They do not keep the process from ending: one may be waiting for what another process compiles.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(specs)))]
    running = len(threads)
    try:
        for thread in threads:
            thread.start()
        while running:
            with contextlib.suppress(Empty):
                ended.get(timeout=_LOOK)
                running -= 1
    except KeyboardInterrupt:
        stopped.set()
        for worker in tuple(compilers):
            worker.kill()
        with contextlib.suppress(Empty):
            for _ in range(running):  # each removes what its compiler wrote
                ended.get(timeout=_PATIENCE)
        raise
    finally:
        if not quiet and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return [rows[spec.name] for spec in specs]


def _progress(done: int, total: int, name: str) -> None:
    """A bar on a terminal; elsewhere, as where an image is built, a line for each tenth of the modules."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        print(f"\r\x1b[K[{bar:<30}] {done}/{total} {name}", end="", file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        print(f"{done}/{total} modules", file=sys.stderr, flush=True)


def _words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    facts = f"{row.get('registers')} registers, stack {row.get('stack')} B, shared {row.get('shared', 0) / 1024:.0f} KiB"
    return f"{facts}, {'was there' if row.get('cached') else str(row.get('seconds')) + ' s'}"
