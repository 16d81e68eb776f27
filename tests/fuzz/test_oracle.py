"""The oracle: it shares nothing with the package, and agrees with definitions that are plainer still."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.fuzz import maskspec
from tests.fuzz.draw import Draw
from tests.fuzz.maskspec import MaskSpec
from tests.fuzz.oracle import attention, masks, philox
from tests.masks import predicates

HERE = Path(__file__).parent
# What the oracle is made of besides itself: plain data and its judgement.
PARTS = [
    *sorted((HERE / "oracle").glob("*.py")),
    HERE / "judge.py",
    HERE / "problem.py",
    HERE / "maskspec.py",
    HERE / "draw.py",
    HERE / "views.py",
]


@pytest.mark.parametrize("path", PARTS, ids=lambda p: p.name)
def test_imports_nothing_of_the_package(path: Path) -> None:
    allowed = {p.relative_to(HERE.parents[1]).with_suffix("").as_posix().replace("/", ".") for p in PARTS}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [n for n in names if n in allowed] or [node.module]
        for name in names:
            assert name.split(".")[0] != "warploom", f"{path.name} imports {name}"
            inside = name == "tests.fuzz.oracle" or name in allowed
            assert inside or not name.startswith("tests"), f"{path.name} imports {name}"


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123's kat_vectors for philox4x32 10."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in philox.words(0, zero, zero, zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = zero + 0xFFFFFFFF
    assert [int(w) for w in philox.words(-1, ones, ones, ones, ones)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [torch.tensor([n]) for n in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    assert [int(w) for w in philox.words(0x299F31D0_A4093822, *digits)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def plain(mask: MaskSpec, batch: int, heads: int, q: int, k: int) -> torch.Tensor:
    """The same by loops over elements."""

    def rows(given: maskspec.Rows) -> list[list[int]]:
        return [list(row) for row in (given if len(given) == batch else given * batch)]

    first = [row[0] if row else 0 for row in rows(mask.a)]
    of = {
        "full": lambda: predicates.full(),
        "causal": lambda: predicates.causal(),
        "window": lambda: predicates.sliding_window(mask.left, mask.right),
        "chunked": lambda: predicates.chunked(first[0]),
        "padding_lengths": lambda: predicates.padding([[j < n for j in range(k)] for n in first]),
        "padding_bits": lambda: predicates.padding(maskspec.bits(mask, k).expand(batch, k).tolist()),
        "document": lambda: predicates.document(rows(mask.a), k, mask.causal),
        "document_both": lambda: predicates.document(rows(mask.a), k, mask.causal),
        "document_cu": lambda: predicates.document(rows(mask.a), k, mask.causal),
        "document_segments": lambda: predicates.segments(rows(mask.a), mask.causal),
        "prefix_lm": lambda: predicates.prefix_lm(first),
        "prefix_document": lambda: predicates.prefix_document(rows(mask.a), rows(mask.b), k),
        "shared_question": lambda: predicates.shared_question(first, rows(mask.b), k),
        "global_window": lambda: predicates.global_window(first, mask.left, mask.right),
        "global_window_causal": lambda: predicates.global_window(first, mask.left, mask.right),
        "blockwise": lambda: predicates.causal_blockwise(rows(mask.a), k),
        "tree": lambda: predicates.tree(rows(mask.a)),
        "spans": lambda: predicates.bidirectional_spans(rows(mask.a), rows(mask.b)),
        "qk_sparse_bits": lambda: predicates.qk_sparse(maskspec.bits(mask, k).expand(batch, k).tolist()),
        "qk_sparse_positions": lambda: predicates.qk_sparse([[j in row for j in range(k)] for row in rows(mask.a)]),
        "eviction": lambda: predicates.random_eviction(
            attention.masks.over_heads(maskspec.eviction_rows(mask, q, k), heads).expand(batch, heads, k).tolist()
        ),
        "block_diffusion": lambda: predicates.block_diffusion(max(mask.a[0][0], 1), mask.a[0][1]),
        "document_positions": lambda: predicates.document([_runs(row) for row in rows(mask.a)], k, mask.causal),
        "columns": lambda: _by_vectors(mask, batch, heads, q, k),
    }
    return predicates.dense(of[mask.kind](), batch, heads, q, k)


def _runs(ids: list[int]) -> list[int]:
    starts = [n for n, t in enumerate(ids) if t == 0] or [0]
    return [b - a for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def _by_vectors(mask: MaskSpec, batch: int, heads: int, q: int, k: int) -> predicates.Predicate:
    found = maskspec.vectors(mask, q, k)
    v = {n: masks.over_heads(t, heads).expand(batch, heads, k).tolist() for n, t in found.items()}

    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        lower = "lts" in v and v["lts"][b][h][j] <= i and ("lte" not in v or i < v["lte"][b][h][j])
        upper = "ute" in v and i < v["ute"][b][h][j] and ("uts" not in v or v["uts"][b][h][j] <= i)
        return not lower and not upper and (j <= p or not mask.causal)

    return visible


@pytest.mark.parametrize("kind", maskspec.KINDS)
def test_masks_equal_their_predicates_element_by_element(kind: str) -> None:
    oracle = attention.functions()
    for n in range(25):
        d = Draw("masks", kind, n)
        q, k, batch = d.integer(0, 14), d.integer(0, 14), d.integer(1, 3)
        k += k % 2
        heads_q, heads_kv = d.heads(4)
        mask = maskspec.draw_mask(d, kind, batch, heads_q, heads_kv, q, k)
        seen = oracle.over_heads(masks.visible(oracle, mask, masks.grid(oracle, q, k, "cpu")), heads_q)
        expected = plain(mask, batch, heads_q, q, k)
        assert torch.equal(seen.expand(batch, heads_q, q, k), expected), mask


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_closed_form_gradients_equal_those_of_autograd(softcap: float, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = drawn(2, 4, 5, 8), drawn(2, 2, 7, 8), drawn(2, 2, 7, 6)
    sink = drawn(4) if sinks else None
    seen = torch.rand(2, 4, 5, 7, generator=generator) < 0.6
    seen[0, :, 2] = False
    keep = (torch.rand(2, 4, 5, 7, generator=generator) < 0.7).double() / 0.7
    dout, dlse = drawn(2, 4, 5, 6), drawn(2, 4, 5)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *([sink] if sinks else []))]
    ks, vs = (t.repeat_interleave(2, dim=1) for t in leaves[1:3])
    scores = leaves[0] @ ks.transpose(-1, -2) * 0.4
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    joined = torch.cat([scores, leaves[3].view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1) if sinks else scores
    nothing = torch.isinf(joined).all(-1)
    lse = torch.logsumexp(joined.masked_fill(nothing[..., None], 0.0), -1)
    weights = torch.exp(scores - lse[..., None])
    out = (weights * keep) @ vs
    total = (out * dout).sum() + (lse.masked_fill(nothing, 0.0) * dlse).sum()
    want = dict(zip(("dq", "dk", "dv", "dsink"), torch.autograd.grad(total, leaves), strict=False))
    want |= {"out": out.detach(), "lse": lse.detach().masked_fill(nothing, float("-inf"))}
    oracle: SimpleNamespace = attention.functions()
    found = attention.attend(oracle, q, k, v, seen, scale=0.4, softcap=softcap, sink=sink, keep=keep, dout=dout, dlse=dlse)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
