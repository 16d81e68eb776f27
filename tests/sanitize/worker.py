"""A process that runs problems, under compute-sanitizer or not: python -m tests.sanitize.worker ORDER RESULTS.

Several share the order's problems: each takes one that no other has taken, until none is left. What it did goes to the file
RESULTS, a line of JSON each; on stdout it says where a problem begins and ends, so that reports in between are the problem's.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.sanitize.problems import Options, run

BEGIN, END = "=== begin ", "=== end "
LOST = 3  # exit status: the device's context is lost, another process has to go on


class Kernels:
    """Names of the kernels that this process used for the first time since it was last asked.

    Of Triton a function with its constants, signature and compile options; of the CuTe DSL a module.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()

    def new(self, name: str) -> list[str]:
        """After the problem of this name."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            return [f"interpreted {name}"]  # where nothing is compiled a problem stands for its kernels
        found = kernels() - self.known
        self.known |= found
        return sorted(found)


def kernels() -> set[str]:
    """Those that this process has launched or is ready to, as the function's name and a digest of what it was compiled for."""
    from warploom.runtime import modules

    found = {f"module {spec.name}" for spec in modules._loaded}
    if "triton" not in sys.modules:
        return found
    from triton.runtime.jit import JITFunction

    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "warploom"]
    functions = {f for module in ours for f in vars(module).values() if isinstance(f, JITFunction)}
    for function in functions:
        for binaries, *_ in function.device_caches.values():
            for key in binaries:
                digest = hashlib.sha256(str(key).encode()).hexdigest()[:16]
                found.add(f"{function.fn.__module__}.{function.fn.__name__} {digest}")
    return found


def take(folder: Path, names: list[str]) -> str | None:
    """A problem that nobody has taken."""
    for number, name in enumerate(names):
        try:
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return name
    return None


def main(order_path: str, results_path: str) -> int:
    order = json.loads(Path(order_path).read_text())
    options, names, folder = Options.from_json(order["options"]), order["names"], Path(order["taken"])
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import interpreter_patches

        interpreter_patches.apply()
    seen = Kernels()
    with open(results_path, "a") as results:

        def say(**fields: Any) -> None:
            results.write(json.dumps(fields) + "\n")
            results.flush()

        while time.time() < order["until"]:
            name = take(folder, names)
            if name is None:
                return 0
            say(begin=name)
            print(f"{BEGIN}{name}", flush=True)
            status, words = "ran", ""
            try:
                words = run(options, name)
                status = "refused" if words else "ran"
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                status, words = "failed", f"{type(error).__name__}: {str(error)[:800]} ({last.filename}:{last.lineno})"
            try:
                if options.device == "cuda":
                    torch.cuda.synchronize()
            except RuntimeError as error:
                say(end=name, status="lost", words=f"{words or str(error)[:800]}", kernels=[])
                return LOST
            print(f"{END}{name}", flush=True)
            say(end=name, status=status, words=words, kernels=seen.new(name))
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a lost context fails again on the way out
