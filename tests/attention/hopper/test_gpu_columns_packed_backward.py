"""The Hopper backward of packed sequences under column masks on an H100 or H200, given out and lse of the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.packed import Packed
from warploom import masks
from warploom.attention import hopper
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.judge import judge

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

DEVICE = "cuda"
DIMS = [64, 96, 128]
BANDS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (150, 30)}, "behind": {"window": (90, -20)},
}  # fmt: skip
# Queries without keys, keys without queries, neither; odd lengths, one of several tiles of either.
QUERIES, KEYS = [333, 0, 41, 700, 0, 1, 129, 700], [517, 40, 0, 700, 0, 5, 64, 129]
USED = [500, 40, 0, 1, 0, 5, 64, 0]
NAN = float("nan")


def seed() -> int:
    return random.randrange(2**31)


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def drawn(queries: Sequence[int], keys: Sequence[int], heads: int, behind: int = 3) -> list[Tensor]:
    """Four vectors: intervals of blocks of a sequence's keys that differ a little from key to key; a tenth hides all rows.

    Others hide anything, among them those of tokens ``behind`` the last sequence.
    """
    generator = torch.Generator().manual_seed(seed())
    print(f"seed {generator.initial_seed()}")
    parts = []
    for rows, columns in zip([*queries, 100], [*keys, behind], strict=True):
        high, block, own = max(rows, 1), torch.arange(columns) // 100, list[Tensor]()
        for _ in range(2):
            low = torch.randint(-high // 5, high, (heads, columns // 100 + 1), generator=generator)[:, block]
            end = low + torch.randint(0, high, (heads, columns // 100 + 1), generator=generator)[:, block]
            own += [t + torch.randint(0, high // 30 + 2, t.shape, generator=generator) for t in (low, end)]
        dead = torch.rand(columns, generator=generator) < 0.1
        own[0][:, dead], own[1][:, dead] = 0, rows
        parts.append(own)
    return [torch.cat(t, dim=1)[None].int().to(DEVICE) for t in zip(*parts, strict=True)]


def call(heads: int, queries: list[int] | None = None, keys: list[int] | None = None, **options: Any) -> Packed:
    queries, keys = queries or QUERIES, keys or KEYS
    options = {"heads_q": 6, "heads_kv": 2, "head_dim": 64, "dtype": torch.bfloat16, **options}
    found = Packed(seed(), queries, keys, device=DEVICE, vectors=4, **{"head_dim_v": options["head_dim"], **options})
    found.columns = drawn(queries, keys, heads)
    return found


def gradients(case: Packed, out: Tensor, lse: Tensor, dlse: Tensor | None, **keywords: Any) -> tuple[Tensor, ...]:
    args = varlen_args(
        case.q, case.k, case.v, case._starts(case.lengths_q), case._starts(case.keys),
        seqused_k=None if case.used is None else torch.tensor(case.used, dtype=torch.int32, device=DEVICE),
        mask=masks.ColumnMask(*case.columns), sink=case.sinks, **{"deterministic": False, **case.keywords, **keywords},
    )  # fmt: skip
    return hopper.BACKEND.backward(args, case.dout, dlse, out, lse)


def check(case: Packed, **keywords: Any) -> None:
    """Gradients of the kernel from out and lse of the reference, by the criterion of every backend."""
    want, low = case.results("reference", torch.float64), case.model()
    lse = want["lse"].float()
    dlse = case.dlse.masked_fill(torch.isinf(lse), 0.0) if case.lse_gradient else None
    found = gradients(case, want["out"].to(case.dtype), lse, dlse, **keywords)
    for name, value in zip(("dq", "dk", "dv", "dsink") if case.sink else ("dq", "dk", "dv"), found, strict=False):
        verdict = judge(name, value, want[name], low[name], case.dtype)
        assert verdict.passed, f"{verdict}\n{case}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dim", DIMS)
def test_sequences(dim: int, band: str, heads: int, deterministic: bool) -> None:
    """Masks of all heads, of each of the keys and of each; whatever sequences have."""
    dtype = torch.float16 if heads == 2 else torch.bfloat16
    check(call(heads, head_dim=dim, dtype=dtype, keywords=BANDS[band]), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dim", DIMS)
def test_used_keys(dim: int, band: str, deterministic: bool) -> None:
    check(call(2, head_dim=dim, used=USED, keywords=BANDS[band]), deterministic=deterministic)


@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("dims", [(72, 72), (128, 64), (40, 104)], ids=str)
def test_groups_of_seven(dims: tuple[int, int], heads: int) -> None:
    """And head dims narrower than tiles."""
    options = {"heads_q": 7, "heads_kv": 1, "head_dim": dims[0], "head_dim_v": dims[1], "keywords": {"causal": True}}
    check(call(heads, **options))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"sink": True},
        {"lse_gradient": True},
        {"sink": True, "lse_gradient": True, "used": USED},
        {"keywords": {"softcap": 3.0}},
        {"keywords": {"softcap": 3.0, "causal": True}, "used": USED, "lse_gradient": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 96])
def test_features(dim: int, changes: dict[str, Any], deterministic: bool) -> None:
    check(call(2, head_dim=dim, **changes), deterministic=deterministic)


@pytest.mark.parametrize("used", [None, USED], ids=["all keys", "used keys"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dim", [64, 96])
def test_dropout(dim: int, band: str, used: list[int] | None) -> None:
    keywords = {**BANDS[band], "dropout_p": 0.3, "dropout_seed": random.randrange(2**64) - 2**63}
    check(call(6, head_dim=dim, used=used, keywords=keywords))


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3, 0], [1], [128, 128, 128], [3, 1, 0, 2] * 80], ids=lambda x: str(x[:4]))
@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths(lengths: list[int], deterministic: bool) -> None:
    if sum(lengths):
        check(call(2, lengths, lengths, keywords={"causal": True}), deterministic=deterministic)
    found = call(2, lengths, [0] * len(lengths), keywords={"causal": True})
    out, lse = torch.zeros_like(found.dout), torch.full_like(found.dlse, -torch.inf)
    assert not any(t.any() for t in gradients(found, out, lse, None, deterministic=deterministic)[:3])


@pytest.mark.parametrize("name", ["documents", "vectors of each head", "window"])
@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_gradients_have_equal_bits(dim: int, name: str) -> None:
    """Of more key blocks than processors, while others compete for them."""
    lengths = [1700, 300, 0, 2600, 37, 3000, 900]
    cu, total, heads = starts(lengths), sum(lengths), 8
    keywords: dict[str, Any] = {"deterministic": True, "causal": name != "documents"}
    if name == "window":
        keywords = {"deterministic": True, "window": (700, 0)}
    if name == "vectors of each head":
        mask = masks.ColumnMask(*drawn(lengths, lengths, heads, 0))
    else:  # documents of 400 tokens within each sequence
        own = [(torch.arange(n) // 400 + 1) * 400 for n in lengths]
        first = [torch.arange(n) // 400 * 400 for n in lengths]
        ends, firsts = (torch.cat(t)[None, None].int().to(DEVICE) for t in (own, first))
        mask = masks.ColumnMask(ends, None, None, firsts)
    q, k, v, dout = (torch.randn(total, h, dim, device=DEVICE, dtype=torch.bfloat16) for h in (heads, 4, 4, heads))
    out, lse = warploom.attention_varlen(q, k, v, cu, mask=mask, return_lse=True, backend="triton", **keywords)

    def run(**options: Any) -> tuple[Tensor, ...]:
        args = varlen_args(q, k, v, cu, mask=mask, **keywords | options)
        return hopper.BACKEND.backward(args, dout, None, out, lse)[:3]

    want = run()
    for a, b in zip(run(deterministic=False), want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    other.wait_stream(torch.cuda.current_stream())
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(other):
                busy @ busy
        for a, b in zip(run(), want, strict=True):
            assert torch.equal(a, b), i


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dim", DIMS)
def test_keys_that_nobody_sees_and_queries_that_see_nothing_may_hold_anything(dim: int, band: str, poison: float) -> None:
    """Hidden by columns, by the band, past what is used, behind the sequences; bits of what no order of additions changes."""
    case = call(2, head_dim=dim, used=USED, keywords=BANDS[band])
    case.columns[2][..., ::3], case.columns[3][..., ::3] = 0, 0  # or hardly anything is seen
    cu_q, cu_k = starts(QUERIES).tolist(), starts(KEYS).tolist()
    seen, blind = (
        torch.zeros(len(case.k), 2, dtype=torch.bool, device=DEVICE),
        torch.ones_like(case.q[..., 0], dtype=torch.bool),
    )
    left, right = BANDS[band].get("window", (None, 0 if BANDS[band].get("causal") else None))
    for n, (queries, used) in enumerate(zip(QUERIES, USED, strict=True)):
        rows, cols = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n] + used)
        shown = masks.ColumnMask(*(t[..., cols].contiguous() for t in case.columns)).dense(queries, used)[0]
        shown = shown & masks.SlidingWindow(left, right).dense(queries, used)[0].to(DEVICE)
        seen[cols] = shown.any(1).T
        blind[rows] = ~shown.any(2).T.repeat_interleave(3, 1)
    want = case.results("reference", torch.float64)
    out, lse = want["out"].to(case.dtype), want["lse"].float()
    assert torch.equal(torch.isinf(lse).T, blind) and blind.any() and not seen.all()
    clean = gradients(case, out, lse, None)
    case.k[~seen], case.v[~seen] = poison, poison
    case.q[blind], case.dout[blind] = poison, poison
    found = gradients(case, out, lse, None)
    assert torch.equal(found[1], clean[1]) and torch.equal(found[2], clean[2])
    torch.testing.assert_close(found[0], clean[0])
    assert not found[0][blind].any() and not found[1][~seen].any() and not found[2][~seen].any()


@pytest.mark.parametrize("dim", DIMS)
def test_one_sequence_has_the_gradients_of_a_dense_call(dim: int) -> None:
    """Bits of dK and dV, whose steps are the same, however the blocks are handed out."""
    n, mask = 1500, masks.ColumnMask(*drawn([1500], [1500], 4, 0), causal=True)
    q, k, v, dout = (torch.randn(1, n, h, dim, device=DEVICE, dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    out, lse = warploom.attention(q, k, v, mask=mask, return_lse=True, backend="triton")
    dense = dense_args(q, k, v, mask=mask, deterministic=True)
    want = hopper.BACKEND.backward(dense, dout, None, out, lse)
    args = varlen_args(q[0], k[0], v[0], starts([n]), mask=mask, deterministic=True)
    found = hopper.BACKEND.backward(args, dout[0], None, out[0], lse[0])
    for a, b in zip(found[:3], want[:3], strict=True):
        assert torch.equal(a, b[0])


def test_more_blocks_than_processors() -> None:
    """Persistent blocks pass from one key block to the next, of other sequences, some of which see nothing."""
    lengths = [4000, 17, 2500, 0, 3000, 333]
    cu, mask = starts(lengths), masks.ColumnMask(*drawn(lengths, lengths, 8, 0), causal=True)
    q, k, v, dout = (torch.randn(sum(lengths), h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (8, 4, 4, 8))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = warploom.attention_varlen(*leaves, cu, mask=mask, return_lse=True, backend="triton")
    want = torch.autograd.grad(out, leaves, dout)
    args = varlen_args(*(t.detach() for t in leaves), cu, mask=mask, deterministic=False)
    found, again = (hopper.BACKEND.backward(args, dout, None, out.detach(), lse.detach())[:3] for _ in range(2))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[1], again[1]) and torch.equal(found[2], again[2])
