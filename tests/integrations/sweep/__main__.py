"""python -m tests.integrations.sweep [--only NAME ... | --core] [--jobs 1|2] [--json PATH] [--heads] [--fresh]"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .compare import BODIES
from .core import CORE_EQUAL, CORE_REFUSED

SECONDS, GIBIBYTES = 900, 8
RESULTS = Path("benchmarks/results/transformers.json")


def model_classes() -> dict[str, type]:
    """Every concrete model class that transformers exports, by name."""
    import transformers

    found: dict[str, type] = {}
    for name in sorted(dir(transformers)):
        try:
            thing = getattr(transformers, name, None)
        except ImportError:  # needs a package that is not here
            continue
        concrete = (
            isinstance(thing, type) and issubclass(thing, transformers.PreTrainedModel) and not name.endswith("PreTrainedModel")
        )
        if concrete and getattr(thing, "config_class", None) is not None and thing.__name__ == name:
            found[name] = thing
    return found


def in_child(model_class: type) -> dict[str, Any]:
    """`compare.sweep` in a forked process with limits of time and memory."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            record = guarded(model_class)
        except BaseException as error:
            record = {"outcome": "crashed", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
        with os.fdopen(write, "w") as pipe:
            json.dump(record, pipe)
        os._exit(0)
    os.close(write)
    return {"pid": child, "pipe": read, "text": b"", "start": time.monotonic()}


def guarded(model_class: type) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 0
    resource.setrlimit(resource.RLIMIT_AS, (used + GIBIBYTES * 2**30,) * 2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    from .compare import sweep

    return sweep(model_class)


def finish(job: dict[str, Any]) -> dict[str, Any]:
    _, status = os.waitpid(job["pid"], 0)
    os.close(job["pipe"])
    try:
        return json.loads(job["text"])
    except ValueError:
        return {"outcome": "crashed", "reason": f"the process ended with status {status}"}


def sweep_all(classes: dict[str, type], jobs: int, save) -> None:
    waiting, running = list(classes), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[name] = in_child(classes[name])
        ready, _, _ = select.select([job["pipe"] for job in running.values()], [], [], 1.0)
        for name, job in list(running.items()):
            over = time.monotonic() - job["start"] > SECONDS
            if over:
                os.kill(job["pid"], signal.SIGKILL)
            elif job["pipe"] in ready and (chunk := os.read(job["pipe"], 1 << 16)):
                job["text"] += chunk
                continue
            elif job["pipe"] not in ready:
                continue
            del running[name]
            record = finish(job)
            if over:
                record = {"outcome": "cannot be built", "reason": f"took more than {SECONDS} seconds"}
            save(name, record | {"seconds": round(time.monotonic() - job["start"], 1)})


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """Without what a stage repeats: its class's reason, and the time, which is this machine's."""
    stages = {
        name: {key: value for key, value in stage.items() if key != "reason" or value != record["reason"]}
        for name, stage in record.get("stages", {}).items()
    }
    kept = {key: value for key, value in record.items() if key not in ("stages", "seconds")}
    return kept | ({"stages": stages} if stages else {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these classes or model types, fresh")
    parser.add_argument("--core", action="store_true", help="only the classes that hold the version floor, fresh")
    parser.add_argument("--outcome", nargs="+", help="repeat classes that had this outcome")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    parser.add_argument(
        "--json", type=Path, default=Path("transformers-sweep.json"), help="results; a run goes on where it ended"
    )
    parser.add_argument("--heads", action="store_true", help="also classifiers and other heads, which stand on the same layers")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args()

    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import transformers

    from warploom.integrations.transformers import register

    from . import compare, judges

    register()
    judges.register()
    classes = model_classes()
    table: dict[str, Any] = {} if args.fresh or not args.json.exists() else json.loads(args.json.read_text())["classes"]
    if args.only:
        classes = {n: c for n, c in classes.items() if n in args.only or c.config_class.model_type in args.only}
    elif args.core:
        classes = {n: c for n, c in classes.items() if n in (*CORE_EQUAL, *CORE_REFUSED)}
    elif args.outcome:
        classes = {n: c for n, c in classes.items() if table.get(n, {}).get("outcome") in args.outcome}
    else:
        classes = {n: c for n, c in classes.items() if n not in table and (args.heads or n.endswith(BODIES))}

    def save(name: str, record: dict[str, Any]) -> None:
        table[name] = compact(record)
        print(f"{len(table):5} {name}: {record['outcome']} {record.get('reason', '')} ({record['seconds']} s)", flush=True)
        document = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "classes": dict(sorted(table.items())),
        }
        unfinished = args.json.with_suffix(".partial")
        text = json.dumps(document, separators=(",", ":")).replace('},"', '},\n"')
        unfinished.write_text(re.sub(r"https?://[^\s\"\\\\]+", "(link)", text) + "\n")
        unfinished.replace(args.json)  # in one step: a run that is stopped leaves the last whole table

    sweep_all(classes, args.jobs, save)
    unlike = [name for name in CORE_EQUAL if table.get(name, {}).get("outcome") != compare.EQUAL] if args.core else []
    if unlike:
        print(f"not equal: {', '.join(unlike)}")
    counts = Counter(record["outcome"] for record in table.values())
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))
    return int(bool(unlike or counts[compare.WRONG] + counts[compare.CRASHED]))


if __name__ == "__main__":
    sys.exit(main())
