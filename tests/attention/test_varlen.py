"""Packed and paged calls equal dense calls sequence by sequence, forward and backward."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom import masks

BACKENDS = ["cpu", "reference"]
LENGTHS_Q, LENGTHS_K = [5, 0, 70, 1, 3], [9, 4, 70, 6, 0]


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(extra: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(1)
    total_q, total_k = sum(LENGTHS_Q) + extra, sum(LENGTHS_K) + extra
    shapes = [(total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 24)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqused", [None, [4, 4, 33, 0, 0]])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_sequence_by_sequence(backend: str, seqused: list[int] | None, causal: bool) -> None:
    q, k, v = packed(extra=3)
    sink = torch.randn(4, requires_grad=True)
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    used = None if seqused is None else torch.tensor(seqused, dtype=torch.int32)
    options = {"causal": causal, "sink": sink, "softcap": 4.0, "window": (40, None), "backend": backend}
    out, lse = warploom.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, return_lse=True, **options)
    assert not out[sum(LENGTHS_Q) :].any() and (lse[:, sum(LENGTHS_Q) :] == float("-inf")).all()
    weight, loss = torch.randn_like(out), 0.0
    for n in range(len(LENGTHS_Q)):
        rows = slice(int(cu_q[n]), int(cu_q[n + 1]))
        length = LENGTHS_K[n] if seqused is None else seqused[n]
        cols = slice(int(cu_k[n]), int(cu_k[n]) + length)
        want, want_lse = warploom.attention(q[None, rows], k[None, cols], v[None, cols], return_lse=True, **options)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
        loss = loss + (want[0] * weight[rows]).sum()
    got = torch.autograd.grad((out * weight).sum(), (q, k, v, sink))
    assert all(torch.isfinite(g).all() for g in got)
    for a, b in zip(got, torch.autograd.grad(loss, (q, k, v, sink)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_past_the_lengths_changes_nothing(backend: str) -> None:
    q, k, v = (t.detach() for t in packed(extra=4))
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    used = torch.tensor([4, 2, 33, 5, 0], dtype=torch.int32)
    want = warploom.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, backend=backend)
    for n, length in enumerate(used.tolist()):
        k[int(cu_k[n]) + length : int(cu_k[n + 1])] = float("nan")
        v[int(cu_k[n]) + length : int(cu_k[n + 1])] = float("inf")
    k[int(cu_k[-1]) :] = v[int(cu_k[-1]) :] = float("nan")
    got = warploom.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_column_masks_have_packed_columns_and_local_rows(backend: str) -> None:
    q, k, v = packed()
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    lts = torch.randint(0, 71, (1, 2, sum(LENGTHS_K)), dtype=torch.int32)
    mask = masks.ColumnMask(lts, causal=True)
    out = warploom.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, backend=backend)
    for n in range(len(LENGTHS_Q)):
        rows, cols = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        part = masks.ColumnMask(lts[..., cols].contiguous(), causal=True)
        want = warploom.attention(q[None, rows], k[None, cols], v[None, cols], mask=part)[0]
        torch.testing.assert_close(out[rows], want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_equal_contiguous_keys(backend: str, page_size: int) -> None:
    torch.manual_seed(2)
    lengths_q, lengths_k = [5, 3, 0, 1], [21, 3, 7, 0]
    per_sequence = -(-max(lengths_k) // page_size)
    pages = torch.randperm(len(lengths_k) * per_sequence + 3)
    table = pages[: len(lengths_k) * per_sequence].view(len(lengths_k), -1).int()
    k_pages, v_pages = (torch.full((len(pages), page_size, 2, 16), float("nan")) for _ in range(2))
    k, v = (torch.randn(sum(lengths_k), 2, 16, requires_grad=True) for _ in range(2))
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    for n, length in enumerate(lengths_k):
        for j in range(length):
            page, slot = int(table[n, j // page_size]), j % page_size
            k_pages[page, slot], v_pages[page, slot] = k[int(cu_k[n]) + j].detach(), v[int(cu_k[n]) + j].detach()
    q = torch.randn(sum(lengths_q), 4, 16, requires_grad=True)
    k_pages.requires_grad_(), v_pages.requires_grad_()
    used = torch.tensor(lengths_k, dtype=torch.int32)
    out = warploom.attention_varlen(q, k_pages, v_pages, cu_q, seqused_k=used, block_table=table, causal=True, backend=backend)
    want = warploom.attention_varlen(q, k, v, cu_q, cu_k, causal=True, backend=backend)
    torch.testing.assert_close(out, want)
    dq, dk_pages, _ = torch.autograd.grad(out.square().sum(), (q, k_pages, v_pages))
    want_dq, want_dk, _ = torch.autograd.grad(want.square().sum(), (q, k, v))
    torch.testing.assert_close(dq, want_dq)
    for n, length in enumerate(lengths_k):
        slots = [(int(table[n, j // page_size]), j % page_size) for j in range(length)]
        for j, (page, slot) in enumerate(slots):
            torch.testing.assert_close(dk_pages[page, slot], want_dk[int(cu_k[n]) + j])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_gradient_of_a_half_precision_sink_is_summed_over_sequences_in_fp32(backend: str) -> None:
    """It was rounded after every sequence: of 2,000 the later ones were lost."""
    count = 2000
    q = torch.zeros(count, 1, 16, dtype=torch.bfloat16)
    cu = torch.arange(count + 1, dtype=torch.int32)
    sink = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    _, lse = warploom.attention_varlen(q, q, q, cu, sink=sink, return_lse=True, backend=backend)
    (dsink,) = torch.autograd.grad(lse.sum(), sink)
    assert dsink.item() == count / 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_of_a_shared_page_are_summed_before_they_are_rounded(backend: str) -> None:
    """Of one sequence 257 reaches the value, of the other -256: bfloat16 has no 257."""
    q = torch.zeros(3, 1, 16, dtype=torch.bfloat16)
    k, v = (torch.ones(1, 1, 1, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    cu_q, used, table = torch.tensor([0, 2, 3]), torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    out = warploom.attention_varlen(q, k, v, cu_q, seqused_k=used, block_table=table, backend=backend)
    out.backward(torch.tensor([256.0, 1.0, -256.0], dtype=torch.bfloat16)[:, None, None].expand_as(out))
    assert v.grad is not None and v.grad.eq(1.0).all()
