"""Cases of the gated delta rule and of decays: what a GPU's run compares, with fla in place, absent and refusing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bench import fake_fla
from warploom.bench import decay, delta
from warploom.bench.harness import Call, Case, Timer, compare, run_case
from warploom.bench.patience import PATIENCE
from warploom.bench.recurrence import last_key_head

CPU = torch.device("cpu")


class Once(Timer):
    """One round."""

    def __call__(self, calls: dict[str, Call], most: int = 1) -> dict[str, list[float]]:
        return {name: self.once([call]) for name, call in calls.items()}


def rows(cases: list[Case]) -> dict[str, dict[str, Any]]:
    found = {row["measure"]: row for case in cases for row in run_case(case, Once(CPU))}
    for row in found.values():
        assert not any("wrong" in each for each in row["contenders"].values()), row
    return found


def timed(row: dict[str, Any]) -> set[str]:
    return {name for name, each in row["contenders"].items() if "ms" in each}


def test_delta_rule_beside_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla.install(monkeypatch)
    found = rows(delta.delta_cases(quick=True))
    assert list(found) == ["forward, delta rule", "backward, delta rule", "graph, delta rule"]
    assert timed(found["forward, delta rule"]) == {"warploom", "fla, chunk", "copy"}
    backward = found["backward, delta rule"]
    assert timed(backward) == {"warploom", "copy"}
    assert backward["contenders"]["fla, chunk"]["refused"] == "RuntimeError: these versions compute wrong gradients"
    assert timed(found["graph, delta rule"]) == {"warploom", "warploom, in place", "fla, recurrent", "copy"}
    # q, k: 160 tokens, 2 heads of 16; v and out: 4 heads; beta and decay; fp32. The state: 8 heads of 16 x 16, twice.
    assert found["forward, delta rule"]["bytes"] == 4 * 160 * (2 * 2 * 16 + 2 * 4 * 16 + 2 * 4)
    assert backward["bytes"] == 4 * 160 * (4 * 2 * 16 + 3 * 4 * 16 + 4 * 4)
    assert found["graph, delta rule"]["bytes"] == 2 * 4 * 8 * 16 * 16


def test_decays_beside_the_plain_call_and_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla.install(monkeypatch)
    found = rows(decay.decay_cases(quick=True))
    assert list(found) == [f"{each}, {kind}" for kind in (decay.A_HEAD, decay.A_TOKEN) for each in ("forward", "backward")]
    for row in found.values():
        assert timed(row) == {"warploom", decay.PLAIN, decay.PEER, "copy"}, row


def test_a_peer_that_nobody_asked_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a forward pass that a backward pass needs either: each would be compiled, which takes fla most of a minute."""
    fake_fla.install(monkeypatch)

    def called(*_: Any, **__: Any) -> Any:
        raise AssertionError("fla was called")

    for module, name in (("gated_delta_rule", "chunk_gated_delta_rule"), ("simple_gla", "chunk_simple_gla")):
        monkeypatch.setattr(fake_fla.sys.modules[f"fla.ops.{module}"], name, called)
    monkeypatch.setattr(PATIENCE, "peers", ["copy"])
    found = rows([*delta.delta_cases(quick=True), *decay.decay_cases(quick=True)])
    assert len(found) == 7
    for row in found.values():
        assert timed(row) == set(row["contenders"]) and not any("fla" in name for name in timed(row)), row


def test_without_fla_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_fla.sys.modules, "fla", None)  # any import of it fails
    for row in rows([*delta.delta_cases(quick=True), *decay.decay_cases(quick=True)]).values():
        (refused,) = [each["refused"] for each in row["contenders"].values() if "refused" in each]
        assert refused == "flash-linear-attention is not installed" and "warploom" in timed(row)


def test_a_wrong_peer_and_a_wrong_step_of_ours_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla.install(monkeypatch)
    ours, honest = delta.gated_delta_step, fake_fla._simple_gla

    def step(*tokens: Any, **options: Any) -> Any:  # forgets what it had
        out, state = ours(*tokens, **options)
        return out, state.mul_(0.5)

    def late(*tensors: Any, g: Any, **options: Any) -> Any:
        return honest(*tensors, g=None if g is None else 2 * g, **options)

    monkeypatch.setattr(delta, "gated_delta_step", step)
    monkeypatch.setattr(fake_fla.sys.modules["fla.ops.simple_gla"], "chunk_simple_gla", late)
    step_case, decay_case = delta.delta_cases(quick=True)[-1], decay.decay_cases(quick=True)[0]
    (found,) = run_case(step_case, Once(CPU))
    for name in ("warploom", "warploom, in place"):
        assert "the new state is" in found["contenders"][name]["wrong"]
    found = {row["measure"]: row["contenders"][decay.PEER] for row in run_case(decay_case, Once(CPU))}
    assert [measure for measure, peer in found.items() if "wrong" in peer] == [
        "forward, decay a token",
        "backward, decay a token",
    ]


def test_host_time_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called three times before it is timed; a peer that fails is left out and says why."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fake_fla.install(monkeypatch)
    called: list[int] = []
    monkeypatch.setattr(decay, "linear_attention", counted(decay.linear_attention, called))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(fake_fla.sys.modules["fla.ops.simple_gla"], "chunk_simple_gla", broken)
    q, k, v, dout = (torch.randn(1, 70, 2, 16) for _ in range(4))
    a_head, a_token = -torch.rand(2), -torch.rand(1, 70, 2)
    wanted = {
        kind: last_key_head(decay.Rule(), dout, q, k, v, each)
        for kind, each in ((decay.A_HEAD, a_head), (decay.A_TOKEN, a_token))
    }
    comparison = decay._host([q, k, v], a_head, a_token, wanted)
    assert len(called) == 2 * 3 and comparison.refused == {decay.PEER: "RuntimeError: does not compile"}
    row = compare(comparison, Once(CPU))
    assert timed(row) == {"warploom", decay.A_HEADS, decay.SDPA} and row["contenders"]["warploom"]["error"] < 1e-5


def counted(function: Any, called: list[int]) -> Any:
    def call(*tensors: Any, **options: Any) -> Any:
        called.append(1)
        return function(*tensors, **options)

    return call


def test_states_of_the_steps_are_larger_than_a_cache() -> None:
    moved = [2 * 4 * s.batch * s.heads_v * s.head_dim**2 for s in delta.STEPS]
    assert min(moved) >= 128 * 10**6
