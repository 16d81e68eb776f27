"""`warploom doctor` tells the truth about the machine, and its selftest sees a broken implementation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warploom.attention import cpu
from warploom.cli import main
from warploom.commands import doctor
from warploom.runtime import dispatch


def report(capsys: pytest.CaptureFixture) -> dict:
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_facts(capsys: pytest.CaptureFixture) -> None:
    facts = report(capsys)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["devices"][0]["device"] == "cpu"
    assert facts["devices"][0]["threads"] == torch.get_num_threads()
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    assert [row["name"] for row in facts["implementations"]] == [i.name for i in dispatch.implementations()]
    assert {"cpu", "reference"} <= {row["name"] for row in facts["implementations"] if row["can_run"]}


def test_text_holds_every_implementation_and_package(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for implementation in dispatch.implementations():
        assert f"\n  {implementation.name}" in shown
    for package in doctor.PACKAGES:
        assert f"\n  {package}" in shown


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-package": "a thing: pip install it"})
    assert main(["doctor"]) == 0
    assert "no-such-package  not installed (a thing: pip install it)" in capsys.readouterr().out


def test_unavailable_implementation_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(cpu.BACKEND, "available", lambda: "needs a machine of another kind")
    row = report(capsys)["implementations"][[i.name for i in dispatch.implementations()].index("cpu")]
    assert row == {"name": "cpu", "can_run": False, "reason": "needs a machine of another kind"}
    assert main(["doctor"]) == 0
    assert "cpu        needs a machine of another kind" in capsys.readouterr().out


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel").write_bytes(b"x" * 10)
    assert report(capsys)["cache"] == {"folder": str(tmp_path), "files": 1, "bytes": 10}


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys; from warploom.cli import main; main(['doctor']);"
        "heavy = {'triton', 'cutlass', 'tvm_ffi', 'transformers', 'matplotlib'} & set(sys.modules);"
        "sys.exit(heavy and str(heavy) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class Work(TorchDispatchMode):
    """Torch's operations and the elements they write."""

    operations, elements = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.operations += 1
        self.elements += sum(t.numel() for t in tree_leaves(results) if isinstance(t, torch.Tensor))
        return results


def test_selftest_passes_and_is_small(capsys: pytest.CaptureFixture) -> None:
    """24,000 operations on 600 million elements take a core 1 s; the command is to take ten at most."""
    with Work() as work:
        status = main(["doctor", "--selftest", "--json"])
    found = json.loads(capsys.readouterr().out)["selftest"]
    failures = [row for row in found["rows"] if row["result"] == "FAILED"]
    assert (status, failures) == (0, []), found["seed"]
    assert {row["implementation"] for row in found["rows"] if row["result"] == "ok"} >= {"cpu", "reference"}
    assert work.operations < 60_000 and work.elements < 1_500_000_000, (work.operations, work.elements)


def test_selftest_sees_a_broken_implementation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    correct = cpu.BACKEND.forward

    def ignores_softcap(args):
        return correct(args._replace(softcap=0.0))

    monkeypatch.setattr(cpu.BACKEND, "forward", ignores_softcap)
    assert main(["doctor", "--selftest", "--seed", "7"]) == 1
    shown = capsys.readouterr().out
    failed = [line.split() for line in shown.splitlines() if " FAILED " in line and "cpu  " in line]
    assert failed and all(line[2] == "softcap" for line in failed)
    assert shown.rstrip().endswith("seed 7")


def test_selftest_reports_a_crash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def crash(args):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(cpu.BACKEND, "forward", crash)
    assert main(["doctor", "--selftest", "--seed", "7"]) == 1
    assert "RuntimeError: illegal instruction" in capsys.readouterr().out
