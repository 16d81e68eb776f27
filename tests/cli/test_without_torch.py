"""Help and the version come without torch, and what they put off is all there once something asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import warploom
from warploom.cli import COMMANDS
from warploom.commands.mask_argument import builders
from warploom.commands.options import banks, explain
from warploom.smem import ACCESSES, copies, layout
from warploom.smem.access import ORDERS

# As pip writes it, with an ear at the end.
SCRIPT = """
import atexit, sys
atexit.register(lambda: print("imported" if "torch" in sys.modules else "spared", file=sys.stderr))
from warploom.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
LISTENING = "import sys; print('imported' if 'torch' in sys.modules else 'spared', file=sys.stderr)"
HELP = [["--version"], ["--help"], *([command, "--help"] for command in COMMANDS)]


def script(folder: Path, text: str) -> str:
    path = folder / "warploom"  # the name is what the package knows its command by
    path.write_text(text)
    return str(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(Path(warploom.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_and_version_imported_torch(arguments: list[str], tmp_path: Path) -> None:
    ended = run(script(tmp_path, SCRIPT), *arguments)
    assert (ended.returncode, ended.stderr) == (0, "spared\n")
    imported = run("-X", "importtime", "-m", "warploom", *arguments)
    assert imported.returncode == 0 and imported.stdout == ended.stdout
    names = [line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()]
    assert "warploom.cli" in names and not [name for name in names if name.partition(".")[0] == "torch"]


def test_wrong_usage_imported_torch(tmp_path: Path) -> None:
    ended = run(script(tmp_path, SCRIPT), "explain", "--seqlen", "few")
    assert ended.returncode == 2 and ended.stderr.endswith("spared\n")


def test_torch_warned_of_numpy_at_every_command(tmp_path: Path) -> None:
    """Where NumPy is not installed, which no command needs."""
    without = script(tmp_path, "import sys; sys.modules['numpy'] = None" + SCRIPT)
    ended = run(without, "explain", "--seqlen", "8", "--heads", "2")
    assert (ended.returncode, ended.stderr) == (0, "imported\n")


@pytest.mark.parametrize(
    "first",
    [
        "warploom.attention",
        "from warploom import *",
        # Imports that bind a package to the name of a function.
        "import warploom.attention.problem, warploom.decode.api",
        "from warploom.decode.problem import DecodeProblem",
    ],
)
def test_a_deferred_package_is_complete_once_it_is_used(first: str, tmp_path: Path) -> None:
    """In the command's process everything is as in any other, whatever asks first."""
    code = f"""
import json, sys, types
import warploom
assert type(warploom) is not types.ModuleType and "torch" not in sys.modules
assert set(warploom.__all__) <= set(dir(warploom)) and not hasattr(warploom, "nonsense")
{first}
assert type(warploom) is types.ModuleType
import torch
assert torch.ops.warploom.attention.default and torch.ops.warploom.decode.default
print(json.dumps({{name: repr(type(getattr(warploom, name))) for name in warploom.__all__}}))
"""
    ended = run(script(tmp_path, code))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {name: repr(type(getattr(warploom, name))) for name in warploom.__all__}


def test_every_other_program_has_all_of_it_at_once() -> None:
    """Ops, masks known to pytrees and to safe loading, whatever is imported first."""
    code = """
import types, warploom, torch
assert type(warploom) is types.ModuleType and callable(vars(warploom)["attention"])
assert torch.ops.warploom.attention.default
assert len(torch.utils._pytree.tree_leaves(warploom.masks.Document([3, 4]))) == 1
assert warploom.masks.Document in torch.serialization.get_safe_globals()
"""
    ended = run("-c", code)
    assert ended.returncode == 0, ended.stderr


def test_what_is_written_down_again_is_what_torch_s_side_has() -> None:
    assert tuple(builders()) == explain.MASKS
    assert set(banks.ACCESSES) == set(ACCESSES) and banks.ORDERS == ORDERS
    assert banks.COPY == copies.NAME and set(banks.DTYPES) == set(layout.DTYPES)
