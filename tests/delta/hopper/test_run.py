"""What the host does before a launch, with both kernels in Python in their places: operands, views, slots, states."""

from __future__ import annotations

import ctypes
import inspect
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.delta.cases import Case
from tests.plain import parameters
from warploom.delta import hopper, reference
from warploom.delta.hopper import run
from warploom.delta.hopper.config import (
    BACK_ITEM,
    BETA,
    BOX,
    BOX_ROWS,
    CHUNK,
    COARSE,
    FINE,
    ITEM,
    MATRIX,
    OF_K,
    OF_Q,
    QUERIES,
    READS,
    WHOLE,
    WRITES,
)
from warploom.runtime import modules

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def stored(matrix: Tensor) -> Tensor:
    """A lower triangular matrix as `config` has it: boxes of columns, 16 bytes of a row exchanged by the row's bit 2."""
    found = []
    for box, rows in enumerate(BOX_ROWS):
        halves = matrix[CHUNK - rows :, box * BOX : (box + 1) * BOX].reshape(rows, 2, 8)
        found.append(torch.where((torch.arange(rows) // 4 % 2 == 1)[:, None, None], halves.flip(1), halves).flatten())
    return torch.cat(found)


def matrix(words: Tensor) -> Tensor:
    """The way back."""
    found, start = words.new_zeros(CHUNK, CHUNK), 0
    for box, rows in enumerate(BOX_ROWS):
        halves = words[start : start + rows * BOX].view(rows, 2, 8)
        halves = torch.where((torch.arange(rows) // 4 % 2 == 1)[:, None, None], halves.flip(1), halves)
        found[CHUNK - rows :, box * BOX : (box + 1) * BOX] = halves.reshape(rows, BOX)
        start += rows * BOX
    return found


def spans(seqlen: int, batch: int, lengths: Tensor, cu: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Batch, start, rows, tokens that count and first slot of each sequence; last of those packed, the tokens of none."""
    if cu.numel():
        starts = cu.tolist()
        found = [(0, a, b - a, b - a, a // CHUNK + n) for n, (a, b) in enumerate(pairwise(starts))]
        return [*found, (0, starts[-1], seqlen - starts[-1], 0, 0)]
    live = lengths.tolist() if lengths.numel() else [seqlen] * batch
    return [(n, 0, seqlen, live[n], n * -(-seqlen // CHUNK)) for n in range(batch)]


def prepare(
    q: Tensor, k: Tensor, beta: Tensor, decay: Tensor, lengths: Tensor, cu: Tensor, prepared: Tensor,
    scale: float, eps: float, normalize: int, decays: int,
) -> None:  # fmt: skip
    for t in (q, k):
        readable(t)
    assert prepared.shape[1] in (ITEM, BACK_ITEM) and prepared.is_contiguous() and beta.dtype == decay.dtype == torch.float32
    assert lengths.is_contiguous() and cu.is_contiguous() and lengths.dtype == cu.dtype == torch.int32
    heads_v, group = beta.shape[2], beta.shape[2] // q.shape[2]
    for batch, start, _, live, slot in spans(q.shape[1], q.shape[0], lengths, cu):
        for n, first in enumerate(range(0, live, CHUNK)):
            part = slice(start + first, start + min(first + CHUNK, live))
            rows = part.stop - part.start
            for head in range(heads_v):
                a, b = torch.zeros(2, CHUNK, q.shape[3]).double()
                w, g = torch.zeros(2, CHUNK).double()
                a[:rows], b[:rows] = q[batch, part, head // group], k[batch, part, head // group]
                w[:rows] = beta[batch, part, head]
                if decays:
                    g[:rows] = decay[batch, part, head]
                counts = torch.arange(CHUNK) < rows
                of_q, of_k = (
                    (torch.rsqrt(t.square().sum(1) + eps) if normalize else torch.ones(CHUNK)) * counts for t in (a, b)
                )
                a, b, total = a * (of_q * scale)[:, None], b * of_k[:, None], g.cumsum(0)
                pairs = torch.exp(total[:, None] - total).tril()
                eye = torch.eye(CHUNK).double()
                inverse = torch.linalg.inv(eye + (b @ b.T * pairs * w).tril(-1)) - eye
                item = prepared[(slot + n) * heads_v + head]
                words = item[: 2 * MATRIX].view(q.dtype)
                words[: 2 * MATRIX], words[2 * MATRIX :] = stored(inverse.to(q.dtype)), stored((a @ b.T * pairs).to(q.dtype))
                since, until = total.exp(), (total[-1] - total).exp()
                lines = {READS: since * of_k, QUERIES: since * of_q * scale, BETA: w, WRITES: until * of_k, WHOLE: since[-1]}
                if prepared.shape[1] == BACK_ITEM:
                    lines |= {COARSE: total, FINE: 0.0 * total, OF_K: of_k, OF_Q: of_q * scale}
                for row, values in lines.items():
                    item[2 * MATRIX :].view(-1, CHUNK)[row] = values


def walk(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, prepared: Tensor, state: Tensor, last: Tensor, lengths: Tensor, cu: Tensor
) -> None:
    for t in (q, k, v, out):
        readable(t)
    heads_v, group = v.shape[2], v.shape[2] // q.shape[2]
    for n, (batch, start, rows, live, slot) in enumerate(spans(q.shape[1], q.shape[0], lengths, cu)):
        out[batch, start : start + rows] = 0.0
        for head in range(heads_v):
            s = torch.zeros(q.shape[3], v.shape[3]).double()
            if state.shape[0] > n:
                s = state[n, head].double()
            for i, first in enumerate(range(0, live, CHUNK)):
                part = slice(start + first, start + min(first + CHUNK, live))
                count = part.stop - part.start
                item = prepared[(slot + i) * heads_v + head]
                words = item[: 2 * MATRIX].view(q.dtype)
                inverse, weights = (matrix(t).double()[:count, :count] for t in words.chunk(2))
                numbers = item[2 * MATRIX :].view(-1, CHUNK).double()[:, :count, None]
                a, b = q[batch, part, head // group].double(), k[batch, part, head // group].double()
                y = v[batch, part, head].double() - numbers[READS] * (b @ s)
                y = (y + inverse @ y) * numbers[BETA]
                out[batch, part, head] = (numbers[QUERIES] * (a @ s) + weights @ y).to(out.dtype)
                s = s * numbers[WHOLE, 0] + b.T @ (numbers[WRITES] * y)
            if last.shape[0] > n:
                last[n, head] = s


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, prepared: Tensor, state: Tensor, last: Tensor, lengths: Tensor, cu: Tensor,
    beta: int, beta_batch: int, beta_row: int, beta_head: int, beta_words: int,
    decay: int, decay_batch: int, decay_row: int, decay_head: int, decay_words: int,
    scale: float, eps: float, normalize: int, decays: int,
) -> None:  # fmt: skip
    betas = numbers(beta, v.shape[:3], (beta_batch, beta_row, beta_head), beta_words)
    logs = numbers(decay, v.shape[:3], (decay_batch, decay_row, decay_head), decay_words)
    prepare(q, k, betas, logs, lengths, cu, prepared, scale, eps, normalize, decays)
    walk(q, k, v, out, prepared, state, last, lengths, cu)


def numbers(address: int, shape: tuple[int, ...], strides: tuple[int, ...], words: int) -> Tensor:
    """Those that lie at an address, strides in words of 16 bits; in fp32."""
    size = words + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.frombuffer((ctypes.c_int16 * size).from_address(address), dtype=torch.int16)
    apart = memory.view(torch.bfloat16 if words == 1 else torch.float32)
    return apart.as_strided(shape, [stride // words for stride in strides]).float()


def readable(t: Tensor) -> None:
    assert t.dtype == torch.bfloat16 and t.stride(-1) == 1 and not t.data_ptr() % 16
    assert all(s % 8 == 0 for s in t.stride()[:-1])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "fetch", lambda spec: forward)
    monkeypatch.setattr(run, "processors", lambda index: 132)


def drawn(**options: Any) -> Case:
    return Case(random.randrange(2**31), dtype=torch.bfloat16, **{"e": 16, "m": 24, **options})


CASES: dict[str, dict[str, Any]] = {
    "dense": {"batch": 2, "heads": 2, "group": 2},
    "a state": {"tokens": 130, "state": True, "decay": None},
    "keys as they are": {"normalize_qk": False, "keys": "long", "tokens": 20, "group": 3},
    "lengths": {"batch": 3, "lengths": (66, 17, 0), "state": True, "hidden": float("nan")},
    "packed": {"tokens": 110, "sequences": (0, 21, 1, 70, 0), "state": True, "hidden": float("nan"), "group": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    call, *_ = drawn(**CASES[name]).call()
    out, state = hopper.BACKEND.forward(call, True)
    wanted_out, wanted_state = reference.BACKEND.forward(call, True)
    assert state is not None and wanted_state is not None
    torch.testing.assert_close(out, wanted_out, rtol=2**-6, atol=1e-2)
    torch.testing.assert_close(state, wanted_state, rtol=2**-6, atol=2e-2)
    other, none = hopper.BACKEND.forward(call, False)
    assert none is None and torch.equal(out, other)


def test_kernels_in_python_take_what_the_compiled_ones_take() -> None:
    """By position: else what the host hands over in a wrong order would be right here."""
    assert [*inspect.signature(prepare).parameters, "stream"] == parameters("delta/hopper/prepare.py", "Prepare.__call__")
    assert [*inspect.signature(walk).parameters, "stream"] == parameters("delta/hopper/walk.py", "Walk.__call__")
    assert [*inspect.signature(forward).parameters, "stream"] == parameters("delta/hopper/forward.py", "Forward.__call__")


def test_a_matrix_there_and_back() -> None:
    lower = torch.randn(CHUNK, CHUNK).tril()
    words = stored(lower)
    assert words.numel() == 2 * MATRIX and torch.equal(matrix(words), lower)


def test_views() -> None:
    """Only what TMA cannot read is copied: odd strides, odd addresses, a last dimension that is not contiguous."""
    call, *_ = drawn(batch=2, heads=2, tokens=30).call()
    want, _ = hopper.BACKEND.forward(call, False)
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :16],
        k=torch.cat([call.k[..., :1], call.k], -1)[..., 1:],
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
        beta=call.beta.transpose(1, 2).contiguous().transpose(1, 2),
    )
    found, _ = hopper.BACKEND.forward(odd, False)
    assert torch.equal(found, want)


@pytest.mark.parametrize("name", CASES)
def test_a_kept_launcher_runs_calls_of_its_kind(name: str) -> None:
    call, *_ = drawn(**CASES[name]).call()
    other, *_ = drawn(**CASES[name]).call()
    launch = hopper.BACKEND.bind(call, True)
    assert launch is not None
    rows = [other.q, other.k, other.v, other.beta, other.decay]
    where = [other.state, other.lengths, other.cu_seqlens]
    want = hopper.BACKEND.forward(other, True)
    for given in (rows, [t if t is None else t.squeeze(0) for t in rows]):
        for a, b in zip(launch(*given, *where) or (), want, strict=True):
            assert b is not None and torch.equal(a, b)
    apart = torch.cat([other.k[..., :1], other.k], -1)[..., 1:]
    assert launch(other.q, apart, *rows[2:], *where) is None
    assert hopper.BACKEND.bind(replace(call, k=apart), True) is None


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_beta_and_decay_are_read_in_their_own_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """At odd strides too, from an address that is no word's."""
    call, *_ = drawn(batch=2, heads=2, tokens=70).call()
    assert call.decay is not None and all(map(hopper.BACKEND.reads, dtypes))
    beta, decay = (t.to(dtype) for t, dtype in zip((call.beta, call.decay), dtypes, strict=True))
    beta = torch.cat([beta[..., :1], beta], -1)[..., 1:]
    want = hopper.BACKEND.forward(replace(call, beta=beta.float(), decay=decay.float()), True)
    launch = hopper.BACKEND.bind(replace(call, beta=beta, decay=decay), True)
    assert launch is not None
    found = launch(call.q, call.k, call.v, beta, decay, call.state, None, None)
    assert found is not None and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))  # type: ignore[arg-type]


def test_a_refusal_that_nothing_changes_is_told_from_a_module_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    call, *_ = drawn(batch=1, heads=1, tokens=30).call()
    monkeypatch.setattr(type(call), "device", "cuda")
    monkeypatch.setattr(modules, "cannot_build", lambda: "no compiler")
    assert hopper.BACKEND.wavers(call) and hopper.BACKEND.wavers()
    assert not hopper.BACKEND.wavers(replace(call, v=call.v.half()))
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    assert not hopper.BACKEND.wavers(call)
