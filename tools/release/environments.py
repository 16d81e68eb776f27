"""Clean environments: which interpreters are here, how an environment is made, and what must work in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

# Modules that each extra is for; None: without one.
MODULES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "triton": ("triton",),
    "hopper": ("cutlass", "tvm_ffi"),
    "lab": ("cuda.core", "matplotlib"),
    "transformers": ("transformers",),
    "demo": ("transformers", "matplotlib"),
    "docs": ("mkdocs", "material", "mike"),
    "dev": ("pytest", "hypothesis", "mypy", "mkdocs", "triton"),
}

# Runs in a folder of its own. What warns on the way in is an error, if it is ours: torch is imported before.
SMOKE = """
import json, sys, warnings
from importlib.metadata import version
from importlib.util import find_spec
wanted, modules, prefix = json.loads(sys.argv[1])
import torch
warnings.simplefilter("error")
import warploom
warnings.resetwarnings()
assert warploom.__version__ == version("warploom") == wanted, (warploom.__version__, wanted)
assert warploom.__file__.startswith(prefix), (warploom.__file__, prefix)
for name in modules:
    assert find_spec(name) is not None, name + " is not installed"
q, k, v = (torch.randn(2, 32, heads, 16, requires_grad=True) for heads in (4, 2, 2))
out = warploom.attention(q, k, v, causal=True)
def first(t): return t.transpose(1, 2)
want = torch.nn.functional.scaled_dot_product_attention(first(q), first(k), first(v), is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, first(want))
for got, wanted in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
packed = warploom.attention(q, k, v, mask=warploom.masks.Document([20, 12]))
torch.testing.assert_close(packed[:, :20], warploom.attention(q[:, :20], k[:, :20], v[:, :20], causal=True))
cache = warploom.KVCache.allocate(2, 64, 2, 16, dtype=torch.float32)
cache.append(k.detach(), v.detach())
torch.testing.assert_close(warploom.decode(q[:, -1:].detach(), cache), out[:, -1:].detach())
assert warploom.linear_attention(q, k, v).shape == q.shape
print("torch", torch.__version__)
"""


@dataclass(frozen=True)
class Interpreter:
    version: str  # "3.12"
    path: str | None  # None: not on this machine


def supported(metadata: Message) -> list[str]:
    """Versions of Python that the classifiers name."""
    lines = metadata.get_all("Classifier", [])
    found = [match[1] for line in lines if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))]
    return sorted(found, key=lambda version: int(version.split(".")[1]))


def interpreters(versions: list[str], pyenv: Path | None = None) -> list[Interpreter]:
    """Where each version's interpreter is: on the PATH, or among pyenv's."""
    pyenv = pyenv or Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = []
    for version in versions:
        there = sorted((pyenv / "versions").glob(f"{version}.*/bin/python3"))
        candidates = [*(str(path) for path in there), shutil.which(f"python{version}")]
        found.append(Interpreter(version, next((path for path in candidates if path and _runs(path, version)), None)))
    return found


def _runs(path: str, version: str) -> bool:
    """Whether it is that version and has venv: shims are on the PATH of what is not installed, and Debian's lacks pip."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    run = subprocess.run([path, "-c", code], capture_output=True, text=True)
    return run.returncode == 0 and run.stdout.strip() == version


def call(command: list[str], folder: Path) -> str:
    """What a command prints; RuntimeError with its last lines where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if run.returncode:
        last = "\n".join((run.stdout + run.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command[:4])} … exited with {run.returncode}:\n{last}")
    return run.stdout


def make(python: str, folder: Path, *requirements: str, below: Path | None = None) -> str:
    """An environment with pip's own choice of ``requirements``; its interpreter.

    Args:
        below: an environment whose packages it sees too. torch takes minutes and gigabytes, so that environments share one.
    """
    call([python, "-m", "venv", str(folder)], folder.parent)
    own = str(folder / "bin" / "python")
    if below is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        (shared,) = below.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(f"{shared}\n")
    if requirements:
        call([own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], folder)
    return own


def megabytes(folder: Path) -> int:
    """What an environment holds by itself, less pip and the package: what its extra brought."""
    (site,) = folder.glob("lib/python*/site-packages")
    ours = ("pip", "setuptools", "warploom", "_distutils_hack")
    files = (path for each in site.iterdir() if not each.name.startswith(ours) for path in (each, *each.rglob("*")))
    return round(sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc") / 1e6)


def smoke(python: str, folder: Path, version: str, extra: str | None) -> str:
    """Imports, calls and the command line of an installed wheel; what it found of torch."""
    wanted = json.dumps([version, MODULES[extra], str(Path(python).parent.parent)])
    found = call([python, "-c", SMOKE, wanted], folder)
    command = str(Path(python).parent / "warploom")
    if call([command, "--version"], folder).strip() != f"warploom {version}":
        raise RuntimeError("warploom --version does not print the version")
    if "can run here" not in call([command, "doctor"], folder):
        raise RuntimeError("warploom doctor names no implementation that can run here")
    call([python, "-m", "pip", "check", "--disable-pip-version-check"], folder)
    return found.strip()
