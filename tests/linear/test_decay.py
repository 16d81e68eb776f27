"""What a decay means: sums that fade before a key joins them, on the CPU and in the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.linear.harness import Case
from tests.linear.test_step import near
from warploom import LinearState, linear_attention, linear_attention_step

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def drawn(**sizes: Any) -> tuple[Case, dict[str, Tensor]]:
    """A case and its tensors, none of which asks for a gradient."""
    case = Case(random.randrange(2**31), **{"dtype": torch.float64, "seqlen_q": 90, "heads_q": 4, "heads_kv": 2, **sizes})
    return case, {name: t.detach() for name, t in case.draw().items()}


@BACKENDS
def test_the_state_fades_before_the_key_joins(backend: str) -> None:
    """Two tokens by hand: the first keeps nothing of an empty state, the second half of the first."""
    q = k = torch.ones(1, 2, 1, 1)
    v = torch.tensor([8.0, 1.0]).view(1, 2, 1, 1)
    options = {"feature_map": "identity", "normalize": False, "decay": torch.tensor([0.5]).log(), "backend": backend}
    out, state = linear_attention(q, k, v, return_state=True, **options)
    torch.testing.assert_close(out.flatten(), torch.tensor([8.0, 5.0]))
    torch.testing.assert_close(state, LinearState(torch.full((1, 1, 1, 1), 5.0), torch.full((1, 1, 1), 1.5)))


@BACKENDS
def test_a_log_of_zero_is_no_decay(backend: str) -> None:
    case, arguments = drawn()
    want = linear_attention(**arguments, return_state=True, backend=backend)
    got = linear_attention(**arguments, decay=torch.zeros(2, dtype=torch.float64), return_state=True, backend=backend)
    torch.testing.assert_close(got, want, msg=lambda m: f"{case}: {m}")


@BACKENDS
def test_a_token_that_forgets_begins_a_sequence(backend: str) -> None:
    """-inf at the first token of each document: packed sequences, to the last gradient; the logs of those tokens have none."""
    case, arguments = drawn(batch=1, decay="token")
    starts = torch.tensor([0, 30, 31, 70, 90], dtype=torch.int32)
    apart = arguments["decay"].clone()
    apart[:, starts[:-1]] = -torch.inf
    results = []
    for options in ({"decay": apart}, {"decay": arguments["decay"], "cu_seqlens": starts}):
        leaves = {name: t.clone().requires_grad_() for name, t in {**arguments, "decay": options["decay"]}.items()}
        out = linear_attention(**{**options, **leaves}, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(leaves.values()))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, msg=lambda m: f"{case}: {m}")
    assert not results[0][-1][:, starts[:-1]].any()


@BACKENDS
def test_forgetting_every_token_leaves_the_own_key(backend: str) -> None:
    case, arguments = drawn()
    out = linear_attention(**arguments, decay=torch.full((2,), -torch.inf, dtype=torch.float64), eps=1e-12, backend=backend)
    torch.testing.assert_close(out, arguments["v"].repeat_interleave(2, 2), rtol=1e-8, atol=1e-8, msg=lambda m: f"{case}: {m}")


@pytest.mark.parametrize("first", [-torch.inf, -20.0, -1e4])
def test_small_logs_behind_large_ones_keep_their_bits(first: float) -> None:
    """Differences of one running fp32 sum would have lost what 60 logs of a thousandth add up to."""
    case, arguments = drawn(dtype=torch.float32)
    logs = torch.full((2, 90, 2), -1e-3)
    logs[:, 3:15] = first
    got = linear_attention(**arguments, decay=logs, backend="cpu")
    want = linear_attention(**{n: t.double() for n, t in arguments.items()}, decay=logs.double(), backend="reference")
    assert near(got, want, 2e-6), case


@BACKENDS
@pytest.mark.parametrize("decay", ["head", "token that forgets"])
def test_steps_equal_the_pass(decay: str, backend: str) -> None:
    case, arguments = drawn(seqlen_q=9, decay=decay)
    logs = arguments.pop("decay")
    want, last = linear_attention(**arguments, decay=logs, return_state=True, backend=backend)
    state, rows = LinearState.zeros(2, 2, 16, 16, dtype=torch.float64), []
    for i in range(9):
        token = {name: t[:, i] for name, t in arguments.items()}
        row, state = linear_attention_step(**token, state=state, decay=logs if logs.ndim == 1 else logs[:, i], backend=backend)
        rows.append(row)
    torch.testing.assert_close((torch.stack(rows, 1), *state), (want, *last), msg=lambda m: f"{case}: {m}")
    # As one row of a longer call.
    row = {name: t[:, -1:] for name, t in arguments.items()}
    held = linear_attention(**{n: t[:, :-1] for n, t in arguments.items()}, decay=logs if logs.ndim == 1 else logs[:, :-1],
                            return_state=True, backend=backend)[1]  # fmt: skip
    out, _ = linear_attention_step(**row, state=held, decay=logs if logs.ndim == 1 else logs[:, -1:], backend=backend)
    torch.testing.assert_close(out, want[:, -1:], msg=lambda m: f"{case}: {m}")


def test_gradients_flow_through_steps() -> None:
    case, arguments = drawn(seqlen_q=6, decay="token")
    leaves = {name: t.requires_grad_() for name, t in arguments.items()}
    want = torch.autograd.grad(linear_attention(**leaves).sin().sum(), list(leaves.values()))
    state, rows = LinearState.zeros(2, 2, 16, 16, dtype=torch.float64), []
    for i in range(6):
        row, state = linear_attention_step(**{name: t[:, i] for name, t in leaves.items()}, state=state)
        rows.append(row)
    got = torch.autograd.grad(torch.stack(rows, 1).sin().sum(), list(leaves.values()))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), case


@BACKENDS
def test_a_visible_nan_stays_one(backend: str) -> None:
    """A log that is no number reaches every later row of its head, and no earlier one."""
    case, arguments = drawn(decay="token", state=False)
    arguments["decay"][0, 40, 1] = torch.nan
    out = linear_attention(**arguments, backend=backend)
    assert out[0, 40:, 2:].isnan().all(), case
    out[0, 40:, 2:] = 0.0
    assert out.isfinite().all(), case


def test_positive_logs_count_where_keys_do() -> None:
    case, arguments = drawn(seqlen_q=8, decay="token", lengths=[8, 3])
    arguments["decay"][1, 3:] = 1.0
    assert linear_attention(**arguments).isfinite().all(), case
    arguments["decay"][1, 2] = 1.0
    with pytest.raises(ValueError, match="decay must be at most 0, the natural log of a factor of at most 1, got 1"):
        linear_attention(**arguments)
