"""`warploom build`: compile the named set of kernels into the cache, ahead of time and without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.table import table


def run(options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}")
    if options.out:
        os.environ["WARPLOOM_CACHE"] = options.out
    specs = [spec for spec in named_set(options.arch) if fnmatch.fnmatch(spec.name, options.only)]
    if not specs:
        raise ValueError(f"--only {options.only!r} matches none of the {len(named_set(options.arch))} names of --list")
    refused = modules.unusable()
    if refused is not None:
        raise ValueError(refused)
    if options.list:
        states = [(spec.name, modules.refusal(spec)) for spec in specs]
        found = [{"name": name, "refused": refused} for name, refused in states]
        print(json.dumps(found, indent=1) if options.json else table([(name, refused or "built") for name, refused in states]))
        return 0
    reason = modules.cannot_build()
    if reason is not None:
        raise ValueError(f"nothing can be built here: {reason}")
    start = time.perf_counter()
    rows = build_all(specs, options.jobs, quiet=options.json)
    failed = sum("error" in row for row in rows)
    if options.json:
        print(json.dumps({"folder": str(modules.cache_folder()), "modules": rows}, indent=1))
    else:
        print(table([(str(row["name"]), _words(row)) for row in rows]))
        print(f"{len(rows) - failed} of {len(rows)} modules in {modules.cache_folder()}, {time.perf_counter() - start:.0f} s")
    return int(failed > 0)


def named_set(arch: str) -> list[ModuleSpec]:
    """Every module that warploom can ask for on an architecture."""
    from warploom.attention.ampere.plan import ARCHS
    from warploom.attention.ampere.plan import named_set as ampere
    from warploom.attention.hopper.plan import backward_set
    from warploom.attention.hopper.plan import named_set as forward_set
    from warploom.linear.hopper.plan import named_set as linear_set

    if arch == "sm_90a":
        return [config.spec for found in (forward_set(), backward_set(), linear_set()) for config in found]
    found = [config.spec for capability, compiled in ARCHS.items() if compiled == arch for config in ampere(capability)]
    return list(dict.fromkeys(found))


def build_all(specs: Iterable[ModuleSpec], jobs: int, quiet: bool) -> list[dict[str, Any]]:
    """Build what the cache lacks with ``jobs`` compilers; a row a module, in order: its facts, or its error."""
    from warploom.runtime.module_worker import Worker

    specs = list(specs)
    waiting: SimpleQueue[ModuleSpec] = SimpleQueue()
    for spec in specs:
        waiting.put(spec)
    rows: dict[str, dict[str, Any]] = {}

    def work() -> None:
        worker: Worker | None = None
        while True:
            try:
                spec = waiting.get_nowait()
            except Empty:
                break
            try:
                with modules.build_lock(spec):
                    if modules.built(spec):
                        row = {**modules.facts(spec), "cached": True}
                    else:
                        worker = worker or Worker(spec.arch)
                        row = worker.build(spec)
            except RuntimeError as error:
                row = {"error": str(error)}
                if worker is not None:  # it may have died
                    worker.close()
                    worker = None
            rows[spec.name] = {"name": spec.name, **row}
            if not quiet:
                _progress(len(rows), len(specs), spec.name)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(specs)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        with contextlib.suppress(Empty):
            while True:  # what is being compiled ends, or was interrupted too, and nothing more begins
                waiting.get_nowait()
        raise
    if not quiet:
        _progress(len(specs), len(specs), "")
        print(file=sys.stderr)
    return [rows[spec.name] for spec in specs]


def _progress(done: int, total: int, name: str) -> None:
    bar = "#" * (30 * done // max(total, 1))
    print(f"\r[{bar:<30}] {done}/{total} {name:<70}", end="", file=sys.stderr, flush=True)


def _words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    facts = f"{row.get('registers')} registers, stack {row.get('stack')} B, shared {row.get('shared', 0) / 1024:.0f} KiB"
    return f"{facts}, {'was there' if row.get('cached') else str(row.get('seconds')) + ' s'}"
