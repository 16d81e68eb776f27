"""What the package does, written down before a refactoring and compared after it.

python tools/freeze.py record OUT.json [--part plans] [--part triton] …     a name that ends in .gz is compressed
python tools/freeze.py compare BEFORE.json AFTER.json                       exit status 1 where anything but host times differs

Parts; all that need no `--cache` unless some are named:
    plans    what calls of the fuzzer's problems would launch on a Hopper GPU: backends, modules, kernels, grids, numbers
    triton   machine code and resources of every variant of tools/kernel_resources.py, compiled anew: minutes
    modules  machine code and resources of the CuTe DSL modules in a cache (--cache)
    bits     digests of results and gradients (--device)
    host     microseconds that a call keeps the host (--device); compared as ratios, which never fail

Only `bits` and `host` with --device cuda need a GPU. Two recordings of one tree on one machine are equal but for host times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.frozen.compare import PARTS, compare  # noqa: E402  isort: skip


def record(chosen: argparse.Namespace) -> int:
    """Write OUT."""
    parts = chosen.part or [part for part in PARTS if part != "modules" or chosen.cache]
    if "modules" in parts and chosen.cache is None:
        print("--part modules needs --cache, a folder of compiled modules", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"made": _made()}
    for part in (p for p in PARTS if p in parts):
        found[part] = _recorded(part, chosen)
        count = len(found[part]["entries"])
        print(f"{part}: {count} recorded", file=sys.stderr, flush=True)
        if not count:
            print(f"{part}: nothing to record", file=sys.stderr)
            return 1
    text = json.dumps(found, indent=1).encode()
    # Without the time, so that equal recordings are equal files.
    chosen.out.write_bytes(gzip.compress(text, mtime=0) if chosen.out.suffix == ".gz" else text)
    return 0


def _recorded(part: str, chosen: argparse.Namespace) -> dict[str, Any]:
    if part == "plans":
        from tools.frozen import plans

        return plans.record(range(0, (chosen.problems or 2000) * chosen.step, chosen.step))
    if part == "bits":
        from tools.frozen import bits

        return bits.record(range(0, (chosen.problems or 400) * chosen.step, chosen.step), chosen.device)
    if part == "host":
        from tools.frozen import host

        return host.record(chosen.device)
    from tools.frozen import machine

    if part == "modules":
        return machine.record_modules(chosen.cache, chosen.only)
    return machine.record_triton(chosen.only, chosen.j)


def _made() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "nvidia-cutlass-dsl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def load(path: Path) -> dict[str, Any]:
    """A recording, compressed or not."""
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="write down what this tree does")
    one.add_argument("out", type=Path, metavar="OUT.json")
    one.add_argument("--part", action="append", choices=PARTS, help="several may be named")
    one.add_argument("--problems", type=int, help="of plans (2000) and bits (400)")
    one.add_argument("--step", type=int, default=1, help="every how manieth problem is taken")
    one.add_argument("--only", default="", help="of triton and modules: names that hold this text")
    one.add_argument("-j", type=int, help="of triton: compilers at once")
    one.add_argument("--cache", type=Path, help="of modules: their folder")
    one.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of bits and host")
    two = commands.add_parser("compare", help="hold two recordings against each other")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--most", type=int, default=20, help="kinds of difference that are named for each part")
    chosen = parser.parse_args()
    if chosen.command == "record":
        return record(chosen)
    for path in (chosen.before, chosen.after):
        if not path.is_file():
            two.error(f"{path} is not there")
    lines, equal = compare(load(chosen.before), load(chosen.after), chosen.most)
    print("\n".join(lines))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
