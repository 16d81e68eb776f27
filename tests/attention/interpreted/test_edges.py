"""The Triton kernels in the interpreter: memory around the buffers, chunks and tile boundaries, drawn calls in small tiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call, check
from warploom import masks
from warploom.attention.triton import call
from warploom.attention.triton.config import Config, Tiling

HALF = torch.float16
NAN = float("nan")
GUARD = 4096  # elements on either side
SMALL = {"batch": 1, "heads_q": 1, "heads_kv": 1, "dtype": HALF}


def gradients(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out, lse = warploom.attention(*leaves, return_lse=True, backend="triton", **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


class Guards:
    """Hands out memory with a pattern on either side of it, and NaN or a large number within."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        buffer = torch.full((size + 2 * GUARD,), 77, dtype=dtype)
        self.buffers.append(buffer)
        inner = buffer[GUARD : GUARD + size]
        inner.fill_(NAN if dtype.is_floating_point else 2**30)
        return inner.view(shape)

    def intact(self) -> bool:
        return all((b[:GUARD] == 77).all() and (b[-GUARD:] == 77).all() for b in self.buffers)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    found = Guards()

    def new_empty(self: Tensor, shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return found.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype or self.dtype)

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        return found.empty(tuple(shape[0]) if not isinstance(shape[0], int) else shape, dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty", empty)
    yield found


def surrounded(t: Tensor) -> Tensor:
    """The same values, NaN in memory before and after."""
    buffer = torch.full((t.numel() + 2 * GUARD,), NAN, dtype=t.dtype)
    inner = buffer[GUARD : GUARD + t.numel()].view(t.shape)
    return inner.copy_(t)


@pytest.mark.parametrize("dims", [(16, 16), (72, 40)])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": masks.Document([50, 19])}, {"window": (9, 3)}], ids=str)
def test_nothing_outside_of_a_buffer_is_read_or_written(
    dims: tuple[int, int], options: dict[str, Any], guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((69, 3, dims[0]), (69, 1, dims[0]), (69, 1, dims[1]), (69, 3, dims[1]))
    inputs = [torch.randn(2, *shape, generator=generator).to(HALF) for shape in shapes]
    found = gradients([surrounded(t) for t in inputs], **options)
    assert len(guards.buffers) >= 7 and guards.intact()
    monkeypatch.undo()
    for a, b in zip(found, gradients(inputs, **options), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


# One chunk is 512 blocks of 64 keys, or 512 tiles of rows.
LONG = 512 * 64 + 70


def _vector(*pieces: tuple[int, int]) -> Tensor:
    return torch.cat([torch.full((n,), value, dtype=torch.int32) for n, value in pieces]).view(1, 1, -1)


def test_mask_over_more_keys_than_a_chunk() -> None:
    """Keys at both ends of the first chunk and in the second; the rest hidden. Forward: a gradient has 500 programs."""
    lts = _vector((100, 2), (32600, 0), (100, 3), (LONG - 32800, 1))
    q, k, v = (torch.randn(1, n, 1, 16).to(HALF) for n in (3, LONG, LONG))
    mask = masks.ColumnMask(lts)
    out, lse = warploom.attention(q, k, v, mask=mask, return_lse=True, backend="triton")
    want, lse_want = warploom.attention(q, k, v, mask=mask, return_lse=True, backend="reference")
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, lse_want, rtol=1e-4, atol=1e-4)


def test_more_queries_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing in the first chunk of row tiles and in the second."""
    tall = Tiling(4096, 64, 4, 1)
    monkeypatch.setattr(call, "config", lambda *_: Config(tall, Tiling(64, 64, 4, 1), tall))
    lts, lte = _vector((30, 40), (10, 0)), _vector((30, LONG - 20), (10, LONG - 20))
    mask = masks.ColumnMask(lts, lte)
    check(Call(random.randrange(2**31), seqlen_q=LONG, seqlen_k=40, keywords={"mask": mask}, **SMALL), "triton")


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(63, 65), (64, 128), (65, 63), (127, 129), (128, 127), (129, 64), (2, 257)])
def test_lengths_around_tiles(seqlen_q: int, seqlen_k: int) -> None:
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    seed = random.randrange(2**31)
    for keywords in (
        {"causal": True},
        {"mask": masks.ColumnMask(torch.full((1, 1, seqlen_k), seqlen_q - 1, dtype=torch.int32))},
    ):
        check(Call(seed, keywords=keywords, **lengths, **SMALL), "triton")


@pytest.mark.parametrize("expanded", [False, True])
def test_vectors_by_strides(expanded: bool) -> None:
    """Vectors that are slices of one tensor, or one head's for all."""
    if expanded:
        lts, ute = torch.arange(90, dtype=torch.int32).flip(0).expand(2, 2, 90), torch.full((2, 2, 1), 5).int().expand(2, 2, 90)
    else:
        generator = torch.Generator().manual_seed(3)
        lts, ute = torch.randint(0, 80, (2, 90, 2, 2), generator=generator, dtype=torch.int32).permute(3, 0, 2, 1)
    mask = masks.ColumnMask(lts, ute=ute)
    c = Call(random.randrange(2**31), seqlen_q=70, seqlen_k=90, heads_q=4, heads_kv=2, dtype=HALF, keywords={"mask": mask})
    check(c, "triton")


# Tiles of other shapes than the table's, small enough for several of each class in a short call.
TILINGS = {
    "small": Config(Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 32, 4, 1)),
    "wide": Config(Tiling(16, 64, 4, 1), Tiling(16, 128, 4, 1), Tiling(32, 16, 4, 1), ("v", "k")),
    "tall": Config(Tiling(64, 32, 4, 1), Tiling(64, 32, 4, 1), Tiling(64, 64, 4, 1)),
}


def drawn_call(seed: int) -> Call:
    """Lengths, band, vectors, heads and features by a seed."""
    pick = random.Random(seed)
    seqlen_q, seqlen_k = pick.randint(1, 90), pick.randint(1, 90)
    heads_kv, group = pick.choice([(1, 1), (2, 1), (1, 3), (2, 2)])
    keywords: dict[str, Any] = {}
    if pick.random() < 0.7:
        generator = torch.Generator().manual_seed(seed)
        shape = (pick.choice([1, 2]), pick.choice([1, heads_kv, heads_kv * group]), pick.randint(2, seqlen_k + 2))
        # Runs of equal entries, so that some tiles are wholly hidden and others wholly visible.
        runs = torch.randint(-10, seqlen_q + 10, (4, *shape), generator=generator, dtype=torch.int32)
        vectors = runs.repeat_interleave(-(-seqlen_k // shape[2]), dim=-1)[..., :seqlen_k].contiguous()
        present = pick.choice([(1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 1)])
        chosen = [t if p else None for t, p in zip(vectors, present, strict=True)]
        keywords["mask"] = masks.ColumnMask(*chosen)
    keywords |= pick.choice(
        [{}, {"causal": True}, {"window": (pick.randint(-9, 60), pick.choice([None, pick.randint(-9, 60)]))}]
    )
    if pick.random() < 0.3:
        keywords["softcap"] = 3.0
    if pick.random() < 0.3:
        keywords |= {"dropout_p": 0.3, "dropout_seed": seed}
    shape_of = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_kv * group, "heads_kv": heads_kv, "dtype": HALF}
    return Call(seed, sink=pick.random() < 0.3, lse_gradient=pick.random() < 0.3, keywords=keywords, **shape_of)


@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("number", range(2))
def test_drawn_calls_in_other_tiles(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "config", lambda *_: TILINGS[name])
    check(drawn_call(random.randrange(2**31)), "triton")


def _poisoned(t: Tensor, start: int, stop: int) -> Tensor:
    """The same values but in rows [start, stop), which hold infinity and NaN."""
    t = t.clone()
    t[..., start:stop, :, :] = float("inf")
    t[..., start:stop, :, ::2] = NAN
    return t


@pytest.mark.parametrize("window", [(0, -37), (-22, 0), (-5, 3)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_infinity_behind_an_empty_window_reached_out(window: tuple[int, int], packed: bool) -> None:
    """A tile that an empty window would show if it were wider was multiplied by zero probabilities."""
    q, k, v = (torch.randn(117, 2, 24).to(HALF) for _ in range(3))
    leaves = [q, _poisoned(k, 0, 117), _poisoned(v, 0, 117)]
    if packed:
        cu = torch.tensor([0, 50, 50, 117], dtype=torch.int32)
        leaves = [t.requires_grad_() for t in leaves]
        options: dict[str, Any] = {"window": window, "dropout_p": 0.2, "dropout_seed": 3}
        out, lse = warploom.attention_varlen(*leaves, cu, return_lse=True, backend="triton", **options)
    else:
        leaves = [t[None].requires_grad_() for t in leaves]
        out, lse = warploom.attention(*leaves, window=window, return_lse=True, backend="triton")
    assert (out == 0).all() and (lse == float("-inf")).all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert (gradient == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_unused_keys_had_gradients(causal: bool) -> None:
    """Without a band no test hid the keys past seqused_k, which lie within the sequence's stored ones."""
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 40, 50], [0, 70, 150]))
    used = torch.tensor([30, 3], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, 16).to(HALF) for n in (50, 150, 150))
    for first, stop in ((30, 70), (73, 150)):
        k, v = _poisoned(k, first, stop), _poisoned(v, first, stop)
    dout = torch.randn(50, 2, 16).to(HALF)

    def run(backend: str) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = warploom.attention_varlen(*leaves, cu_q, cu_k, seqused_k=used, causal=causal, backend=backend)
        return torch.autograd.grad(out, leaves, dout)

    for found, want in zip(run("triton"), run("reference"), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=4e-3)
        assert found.isfinite().all()
    assert (found[30:70] == 0).all() and (found[73:] == 0).all()


@pytest.mark.parametrize("lse_gradient", [False, True])
def test_nan_in_queries_that_see_nothing_reached_dk_beside_a_sink(lse_gradient: bool) -> None:
    """Found by the fuzzer: the lse of such a query is the sink and not -inf, so its row was multiplied by zeros."""
    q, k, v = (torch.randn(1, n, 2, 16).to(HALF) for n in (90, 40, 40))
    q, dout = _poisoned(q, 0, 50), torch.randn(1, 90, 2, 16).to(HALF)
    sink = torch.tensor([0.3, -7.0])

    def run(backend: str, q: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
        options: dict[str, Any] = {"causal": True, "return_lse": True, "backend": backend}
        out, lse = warploom.attention(*leaves[:3], sink=leaves[3], **options)
        assert (lse[..., :50] == sink[:, None]).all()
        upstream = (dout, torch.full_like(lse, 0.5)) if lse_gradient else (dout, torch.zeros_like(lse))
        return torch.autograd.grad((out, lse), leaves, upstream)

    clean = q.clone()
    clean[:, :50] = 0.0
    for found, want in zip(run("triton", q), run("reference", clean), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=4e-3)


def test_no_sequence_with_used_keys_read_before_the_first_entry() -> None:
    """Found by the fuzzer: cu_seqlens of one entry and an empty seqused_k; on a GPU an illegal access."""
    q, k, v = (torch.full((28, 2, 16), NAN, dtype=HALF, requires_grad=True) for _ in range(3))
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    options: dict[str, Any] = {"sink": torch.zeros(2), "return_lse": True, "backend": "triton"}
    out, lse = warploom.attention_varlen(q, k, v, zero, zero, seqused_k=none, **options)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("hostile", [NAN, float("inf")])
def test_an_empty_window_narrower_than_a_tile_reads_no_key(hostile: float) -> None:
    """Rows of one tile reach either side of a window that shows nothing; descriptors read all keys of a tile."""
    q, dout = torch.randn(1, 82, 1, 64, dtype=HALF), torch.randn(1, 82, 1, 64, dtype=HALF)
    k, v = (torch.full((1, 2, 1, 64), hostile, dtype=HALF) for _ in range(2))
    out, lse, *grads = gradients([q, k, v, dout], causal=True, window=(-14, 5))
    assert (lse == float("-inf")).all()
    assert all((t == 0).all() for t in (out, *grads))


SINKS = {
    "every third": lambda t: t[::3],
    "a column": lambda t: t[:12].view(4, 3)[:, 1],
    "one for all": lambda t: t[:1].expand(4),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", list(SINKS))
def test_a_sink_with_gaps_was_read_as_if_it_had_none(kind: str, packed: bool) -> None:
    """And one that is expanded past its end."""
    numbers = torch.cat([torch.randn(12), torch.full((20,), NAN)])
    q, k, v = (torch.randn(1, 20, heads, 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, 20], dtype=torch.int32)
    found = {}
    for backend in ("triton", "reference"):
        leaf = numbers[:12].clone().requires_grad_()
        options = {"sink": SINKS[kind](leaf), "return_lse": True, "backend": backend}
        if packed:
            out, lse = warploom.attention_varlen(q[0], k[0], v[0], starts, **options)
        else:
            out, lse = warploom.attention(q, k, v, **options)
        (gradient,) = torch.autograd.grad(out.square().sum() + lse.sum(), leaf)
        found[backend] = out, lse, gradient
    for got, want in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["every second column", "transposed", "rows apart", "one for all"])
def test_a_table_with_gaps_between_columns_was_read_as_if_it_had_none(kind: str) -> None:
    q, k, v = torch.randn(20, 4, 16), *(torch.randn(12, 8, 2, 16) for _ in range(2))
    table = torch.randperm(12)[:8].view(2, 4).int()
    wide = torch.full((2, 8), -1, dtype=torch.int32)
    wide[:, ::2] = table
    given = {
        "every second column": wide[:, ::2],
        "transposed": table.t().contiguous().t(),
        "rows apart": torch.cat([table, wide], 1)[:, :4],
        "one for all": table[:1].expand(2, -1),
    }[kind]
    starts, used = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 10, 20], [30, 25]))
    options: dict[str, Any] = {"seqused_k": used, "causal": True, "backend": "triton"}
    found = warploom.attention_varlen(q, k, v, starts, block_table=given, **options)
    assert torch.equal(found, warploom.attention_varlen(q, k, v, starts, block_table=given.contiguous(), **options))
    exact = warploom.attention_varlen(q, k, v, starts, block_table=given, **options | {"backend": "reference"})
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
