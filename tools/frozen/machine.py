"""The parts `triton` and `modules`: digests of machine code without names, addresses and debug lines, and its resources."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.machine_code import tool
from warploom.runtime.cubin import resources

_CUDA = 190  # ELF's number of the machine
_ENTRY = re.compile(r"\.(?:visible |extern )?\.?(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_TEXT = re.compile(r"^\s*\.section\s+\.text\.([^\s,\"]+)")
_NAME = re.compile(r"^\s*\.(?:global|type)\s+([^\s,]+)")
_CODE = re.compile(r"/\*[0-9a-f]{4,}\*/(.*)")
_ENCODING = re.compile(r"^\s*/\* (0x[0-9a-f]+) \*/\s*$")
_LABEL = re.compile(r"\.L_x_\d+|\.L_\d+")


def sha(text: str) -> str:
    """The first 16 digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain_ptx(ptx: str) -> str:
    """PTX without comments and debug sections, lines and labels; functions and labels are numbered by their first place."""
    ptx = re.sub(r"^\s*\.(?:loc|file)\b.*$", "", ptx, flags=re.M)
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.S)
    ptx = re.sub(r"\.section\s+\.debug_\w+\s*\{[^}]*\}", "", ptx)
    ptx = re.sub(r"^\s*\$L__(?:tmp|func_[a-z]+)\d+:\s*$", "", ptx, flags=re.M)
    text = "\n".join(" ".join(line.split()) for line in ptx.splitlines() if line.strip())
    for n, name in enumerate(dict.fromkeys(_ENTRY.findall(text))):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=[\W_])", f"function{n}", text)
    return _in_order(text, re.compile(r"\$L__BB\d+_\d+"), "$L")


def plain_sass(listing: str) -> dict[str, str]:
    """nvdisasm's listing (-c -hex) by kernel: instructions and their encodings, without addresses and names."""
    parts: dict[str, list[str]] = {}
    names: list[str] = []
    current: list[str] = []
    for line in listing.splitlines():
        section, name, code, encoding = (p.match(line) for p in (_TEXT, _NAME, re.compile(r"\s*" + _CODE.pattern), _ENCODING))
        if section:
            current = parts.setdefault(section[1], [])
        elif name:
            names.append(name[1])
        elif code:
            current.append(re.sub(r"\s+", " ", code[1]).strip())
        elif encoding:
            current.append(encoding[1])
        elif re.match(r"\s*[^\s/]+:\s*$", line) and not line.strip().startswith(".text."):
            current.append(line.strip())
    known = sorted({*names, *parts}, key=len, reverse=True)
    return {kernel: _unnamed("\n".join(lines), known) for kernel, lines in parts.items()}


def _unnamed(text: str, names: list[str]) -> str:
    if names:
        text = _in_order(text, re.compile("|".join(rf"(?<![\w$.]){re.escape(n)}(?![\w$])" for n in names)), "name")
    return _in_order(text, _LABEL, ".L")


def _in_order(text: str, pattern: re.Pattern[str], prefix: str) -> str:
    """What matches is numbered by its first place in the text."""
    seen: dict[str, str] = {}
    return pattern.sub(lambda m: seen.setdefault(m[0], f"{prefix}{len(seen)}"), text)


def disassembled(cubin: bytes) -> str:
    """nvdisasm's listing with encodings, which hold what the text leaves out: stalls and barriers between instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool("nvdisasm"), "-c", "-hex", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def kernels(cubin: bytes) -> list[dict[str, Any]]:
    """Digest and resources of a cubin's kernels, in an order that no name decides."""
    code = plain_sass(disassembled(cubin))
    if not code:
        raise ValueError("the cubin holds no kernel that nvdisasm can read")
    taken = {r.kernel: r for r in resources(cubin)}
    found = []
    for name, text in code.items():
        r = taken[name]
        counted = text.count(";")
        rest = {"registers": r.registers, "stack": r.stack, "shared": r.shared, "instructions": counted}
        found.append({"sass": sha(text), **rest})
    return sorted(found, key=lambda k: json.dumps([k["instructions"], k["registers"], k["sass"]]))


def cubins(library: bytes) -> list[bytes]:
    """GPU code that a library holds as plain ELF files."""
    found = []
    for match in re.finditer(rb"\x7fELF\x02\x01", library):
        at = match.start()
        if at + 64 > len(library) or struct.unpack_from("<H", library, at + 18)[0] != _CUDA:
            continue
        programs, sections = struct.unpack_from("<QQ", library, at + 0x20)
        program_size, program_count, section_size, section_count = struct.unpack_from("<4H", library, at + 0x36)
        end = max(programs + program_size * program_count, sections + section_size * section_count)
        for n in range(section_count):  # nothing of a section lies past the headers, as nvdisasm would tell
            kind, offset, size = struct.unpack_from("<4xI16xQQ", library, at + sections + n * section_size)
            end = max(end, offset + size if kind != 8 else 0)  # 8: takes no place in the file
        found.append(library[at : at + end])
    return found


def launcher(library: Path) -> str:
    """A digest of the host code that launches a module's kernels, where grids, clusters and TMA descriptors are made.

    Of x86-64, as binutils' objdump prints it. Addresses are left out; constants in memory count, runs of letters (names) not.
    """
    if shutil.which("objdump") is None:
        return "not recorded: objdump is not here"
    done = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    code = plain_host(done.stdout)
    if not code:
        raise ValueError(f"{library} has no function that launches")
    return sha(code + repr(_constants(library.read_bytes())))


def plain_host(listing: str) -> str:
    """The launching functions of objdump's listing without names, addresses and offsets from the table of addresses."""
    lines, inside = [], False
    for line in listing.splitlines():
        heading = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if heading:
            inside = "_cutlass___call__" in heading[1] and "_mlir_ciface" not in heading[1]
        elif inside and ":" in line:
            text = line.partition(":")[2].partition("#")[0]
            text = re.sub(r"-?0x[0-9a-f]+\(%rip\)", "(%rip)", re.sub(r"\b[0-9a-f]+ <[^>]*>", "target", text))
            # Small numbers are moved by shorter instructions.
            text = re.sub(r"movabs +\$0x(?:f{11}[0-9a-f]{5}|[0-9a-f]{1,5}),", "movabs offset,", text)
            lines.append(" ".join(text.split()))
    return "\n".join(lines)


def _constants(library: bytes) -> bytes:
    """What .rodata holds, without runs of letters and zeros."""
    sections, size, count, names = (*struct.unpack_from("<Q", library, 0x28), *struct.unpack_from("<3H", library, 0x3A))
    headers = [struct.unpack_from("<II16xQQ", library, sections + n * size) for n in range(count)]
    for name, _, offset, length in headers:
        start = headers[names][2] + name
        if library[start : library.index(b"\0", start)] == b".rodata":
            return re.sub(rb"[ -~]{4,}|\0", b"", library[offset : offset + length])
    return b""


def record_modules(folder: Path, only: str = "") -> dict[str, Any]:
    """Every compiled module of a cache (or of its folder `modules`) by its name without the digest of its sources."""
    found: dict[str, Any] = {}
    for library in sorted([*folder.glob("*.so"), *folder.glob("modules/*.so")]):
        name = re.sub(r"-[0-9a-f]{12}$", "", library.stem)
        if only not in name:
            continue
        manifest = library.with_suffix(".json")
        facts = json.loads(manifest.read_text()).get("facts", {}) if manifest.exists() else {}
        code = [k for cubin in cubins(library.read_bytes()) for k in kernels(cubin)]
        if not code:
            raise ValueError(f"{library} holds no GPU code")
        entry = {"launcher": launcher(library), "kernels": code, "facts": {n: v for n, v in facts.items() if n != "seconds"}}
        # Modules of several versions or machines may lie side by side.
        if name in found and found[name] != entry:
            raise ValueError(f"{folder} has several modules {name} that differ: give a cache of one version")
        found[name] = entry
    return {"entries": found}


def record_triton(only: str = "", jobs: int | None = None) -> dict[str, Any]:
    """Every variant of tools/kernel_resources.py, compiled anew."""
    from tools import kernel_resources as table

    work = [(case, name) for case in table.cases() for name in table.recorded(case) if only in name]
    variants: dict[str, Any] = {}
    binaries: Counter[str] = Counter()
    seen = set()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
            for n, (name, kernel, binary, found) in enumerate(pool.map(_variant, work), 1):
                variants[name] = found
                if binary not in seen:
                    seen.add(binary)
                    binaries[kernel] += 1
                if n % 25 == 0 or n == len(work):
                    print(f"triton: {n} of {len(work)} variants", file=sys.stderr, flush=True)
    return {"specialisations": dict(sorted(binaries.items())), "entries": variants}


def _variant(job: tuple[Any, str]) -> tuple[str, str, str, dict[str, Any]]:
    from tools import kernel_resources as table

    case, name = job
    torch.set_num_threads(1)
    launch = table.recorded(case)[name]
    s = table.specialised(launch)
    values = [[*s.signature.values()], [str(v) for v in s.constants.values()], sorted(s.attributes), sorted(s.options.items())]
    kernel = launch.kernel.__name__
    binary = f"{case.architecture} {kernel} {values}"
    try:
        compiled = table.compiled_launch(launch, case.architecture)
    except Exception as error:
        return name, kernel, binary, {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"}
    code = kernels(compiled.asm["cubin"])
    found = {"ptx": sha(plain_ptx(compiled.asm["ptx"])), **asdict(table.resources_of(launch, compiled, case.architecture))}
    return name, kernel, binary, {**found, "kernels": [{n: k[n] for n in ("sass", "instructions")} for k in code]}
