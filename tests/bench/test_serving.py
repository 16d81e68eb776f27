"""The serving loop as on a GPU, on a CPU: every contender's steps, and that a loop which goes wrong is seen."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import fake_flashinfer
from warploom import KVCache, PagedKVCache
from warploom.bench import flashinfer_peer, peers, report, serving, summary
from warploom.bench.harness import Timer, compare
from warploom.bench.serving import Shape

CPU = torch.device("cpu")
# The first step opens a page, the second-to-last another; more steps than a page holds.
SHAPE = Shape(2, 32, 4, 2, 16, layers=2, steps=18)
OURS = {"warploom", "warploom, hopper", "warploom, pages of 16"}
EVERY = OURS | {"cuDNN, masked", "SDPA, eager", "FlashInfer", "FlashInfer, tensor cores"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors on the CPU where a device of type cuda is asked for; a captured step is the step."""
    tokens = serving.Tokens
    monkeypatch.setattr(serving, "Tokens", lambda shape, device: tokens(shape, CPU))
    monkeypatch.setattr(serving, "capture", lambda step: [step() for _ in range(2)] and step)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    of = peers.sdpa_of
    monkeypatch.setattr(peers, "sdpa_of", lambda backend, causal=False: of(None, causal))
    monkeypatch.setattr(flashinfer_peer, "_workspace", lambda device: torch.zeros(16, dtype=torch.uint8))
    return fake_flashinfer.install(monkeypatch)


def row() -> dict[str, Any]:
    device: Any = SimpleNamespace(type="cuda")
    [(measure, comparison)] = serving._build(SHAPE, device)
    assert measure == "step"
    return compare(comparison, Timer(CPU, seconds=0.0))


def test_contenders(gpu: Any) -> None:
    fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plans = 0
    found = row()["contenders"]
    assert set(found) == EVERY
    assert "refused" in found.pop("warploom, hopper")  # on a CPU
    for name, each in found.items():
        assert each["error"] < 1e-5, name
        assert each["tokens_s"] == pytest.approx(SHAPE.batch / each["ms"] * 1e3) and each["rounds"] == serving.ROUNDS
    # Two wrappers, each planned for the capture and for every step of the checked loop and of those timed.
    assert fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plans == 2 * (1 + SHAPE.steps * (1 + serving.ROUNDS))


@pytest.mark.parametrize("cache", [KVCache, PagedKVCache])
def test_a_loop_that_forgets_a_token_is_wrong(cache: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in the last layer, in one step before the last: one key of fifty."""
    append, count = cache.append, [0]

    def forgetful(self: Any, k: Any, v: Any) -> None:
        count[0] += 1
        if count[0] % (SHAPE.layers * SHAPE.steps) != 5 * SHAPE.layers:
            append(self, k, v)

    monkeypatch.setattr(cache, "append", forgetful)
    monkeypatch.setattr(serving, "capture", lambda step: step)
    found = row()["contenders"]
    wrong = {name for name, each in found.items() if "wrong" in each}
    assert wrong == {"warploom, pages of 16" if cache is PagedKVCache else "warploom"}


def test_what_one_contender_left_does_not_help_the_next(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's caches are those of our pages: a loop that appends nothing finds none of what ours appended."""
    monkeypatch.setattr(gpu, "append_paged_kv_cache", lambda *given: None)
    found = row()["contenders"]
    assert {name for name, each in found.items() if "wrong" in each} == {"FlashInfer", "FlashInfer, tensor cores"}


def test_a_peer_that_is_not_here_says_why(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = row()["contenders"]
    assert found["FlashInfer"]["refused"].startswith("flashinfer does not import here") and found["warploom"]["ms"] > 0


def test_a_step_that_cannot_be_captured_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(serving, "capture", refuse)
    found = row()["contenders"]
    assert {name for name, each in found.items() if "ms" in each} == {"SDPA, eager"}
    assert found["warploom"] == {"refused": "RuntimeError: operation not permitted when stream is capturing"}


def test_cases_and_what_a_report_says_of_them() -> None:
    cases = serving.serving_cases(False)
    assert [case.name for case in cases][:2] == ["B1 from 2k, 32 layers, 256 steps", "B1 from 8k, 32 layers, 256 steps"]
    assert all(case.seconds and case.shape["keys"] % serving.PAGE == 0 for case in cases)
    assert "serving" in report.SUITES and ("serving", "step") in report.MEASURES
    family = next(each for each in summary.FAMILIES if each.suite == "serving")
    assert {name for names in family.peers.values() for name in names} >= EVERY - OURS


def test_a_page_of_tokens_a_second(tmp_path: Any) -> None:
    def contender(ms: float) -> dict[str, float]:
        return {"ms": ms, "p20": ms, "p80": ms, "tokens_s": 1e3 / ms}

    names = {"warploom": 0.5, "cuDNN, masked": 0.6, "SDPA, eager": 1.5, "FlashInfer, tensor cores": 0.8}
    measured = {name: contender(ms) for name, ms in names.items()}
    rows = [{"suite": "serving", "measure": "step", "case": f"B1 from {n}k", "contenders": measured} for n in (2, 8)]
    run = {"roofs": {"gemm_tflops": 1.0, "copy_gb_s": 1.0}, "device": "NVIDIA H200", "date": "today", "rows": rows}
    data = tmp_path / "serving.json"
    data.write_text(json.dumps(run))
    report.write([data], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "| Serving loop | torch's SDPA | 1.20 (1.20) | – | H200 | 2 |" in page
    assert "| Serving loop | FlashInfer | 1.60 (1.60) | – | H200 | 2 |" in page
    assert "0.50 ms, 2000 tokens/s" in page and "![tokens a second by case]" in page
