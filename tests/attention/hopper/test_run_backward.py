"""What the host does before a backward launch, with a kernel in Python that computes what it is told."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import CASES, MASKS, NARROWED, case, masked
from tests.attention.hopper.test_run import CHUNKS, chunk_call, told
from tests.attention.packed import PACKED, Packed
from tests.attention.packed_bounds import packed_bounds
from tests.plain import parameters
from warploom.attention import hopper, reference
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.band import seen
from warploom.attention.hopper import run_backward
from warploom.attention.hopper.config import STRETCHES, TABLE, BackwardConfig
from warploom.attention.hopper.plan import REACH, backward_config_for, backward_set, workspace
from warploom.attention.philox import keep_mask, keep_scale
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.bias import ALiBi, Relative
from warploom.kernels.distances import head_length
from warploom.kernels.reach import PARTS
from warploom.masks import ColumnMask, tiles
from warploom.masks.intervals import ResolvedMask
from warploom.masks.visible import visible
from warploom.runtime import dispatch, modules
from warploom.runtime.module_spec import ModuleSpec

DENSE = [name for name in CASES if "scale" not in name]
VARLEN = [name for name in PACKED if "pages" not in name]
NAN = float("nan")
PROCESSORS = 7


def kernel(spec: ModuleSpec) -> Callable[..., None]:
    """The formulas in the kernel's place, held to the kernel's signature and to what it can read."""
    variant = dict(spec.config)
    row_statistics = 3 if variant["bias"] == "distance" and not variant["right"] else 2

    def one(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
        scale: float, softcap: float, left: int, right: int, masked: Tensor | None = None,
        dropout: tuple[Any, ...] | None = None, bias: tuple[Any, ...] | None = None, sequence: int | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of (batch, seqlen, heads, dim) in fp64, given lse and delta (batch, heads, seqlen)."""
        assert (dropout is not None) == variant["dropout"]
        group = q.shape[2] // k.shape[2]
        q, k, v, dout = (t.double().transpose(1, 2) for t in (q, k, v, dout))
        keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        s = q @ keys.transpose(-1, -2) * scale
        slope = torch.ones_like(s)
        if variant["softcap"]:
            bent = torch.tanh(s / softcap)
            s, slope = softcap * bent, 1 - bent.square()
        shift = s.shape[3] - s.shape[2] if offsets is None else offsets[:, None, None, None]
        distance = torch.arange(s.shape[2])[:, None] + shift - torch.arange(s.shape[3])
        assert (bias is not None) == bool(variant["bias"])
        if bias is not None and variant["bias"] == "distance":
            table, room, origin, *gradient = bias
            at = (distance + origin).clamp(0, table.shape[1] - 1)
            s = s + table.double()[:, at]
            assert room.numel() == table.shape[0] * head_length(table.shape[1]) and len(gradient) == variant["bias_grad"]
        elif bias is not None:
            slopes, origin, *_ = bias
            slopes = slopes if sequence is None or slopes.shape[0] == 1 else slopes[sequence : sequence + 1]
            s = s - slopes.double()[..., None, None] * (distance + origin).abs()
        hidden = (distance < -right) & variant["right"] | (distance > left) & variant["left"]
        hidden = hidden if masked is None else hidden | masked
        p = (s - lse[..., None]).masked_fill(hidden | (lse == -torch.inf)[..., None], -torch.inf).exp()
        keep = torch.ones_like(s)
        if dropout is not None:
            dropout_seed, dropout_p, begin = told(dropout)
            batch = torch.arange(s.shape[0]) if sequence is None else torch.tensor([sequence])
            rows, cols = torch.arange(s.shape[2]), begin + torch.arange(s.shape[3])
            keep = keep_mask(dropout_seed, dropout_p, batch, torch.arange(s.shape[1]), rows, cols) * keep_scale(dropout_p)
        ds = p * (keep * (dout @ values.transpose(-1, -2)) - delta[..., None]) * slope * scale
        if variant["bias_grad"]:
            assert bias is not None and gradient[0].shape == table.shape and gradient[0].is_contiguous()
            gradient[0].index_add_(1, at.flatten(), (ds / scale).sum(0).flatten(1).float())
        parts = ds @ keys, ds.transpose(-1, -2) @ q, (keep * p).transpose(-1, -2) @ dout
        dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in parts[1:])
        return parts[0].transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def hidden_by(
        vectors: Sequence[Tensor | None], queries: int, keys: int, heads: int, offsets: Tensor | None = None
    ) -> Tensor | None:
        """What the columns hide, of each head."""
        if not variant["columns"]:
            return None
        rows = torch.arange(queries) if offsets is None else torch.arange(queries) + offsets.long()[:, None, None]
        masked = ~visible(ResolvedMask(None, None, *vectors), rows, torch.arange(keys), 0)
        return masked.repeat_interleave(heads // masked.shape[1], 1)

    def carve(tiles: int, dq: Tensor, workspace: Tensor, split: int = 0) -> Tensor:
        """Row statistics where the kernel puts them: behind the sums if anything is there, else in dq, written last. And in
        dq, behind room for those, what pieces of ``split`` key blocks sum up.
        """
        sums, stats = tiles * variant["tile_m"] * variant["head_dim"], tiles * row_statistics * variant["tile_m"]
        states = (4 if variant["pair"] and variant["claims"] else 2) * (variant["deterministic"] or variant["claims"])
        config = BackwardConfig(**variant)
        turns = tiles * states + (STRETCHES + TABLE) * config.dealt + config.ordered + variant["persistent"] + 8 * split
        others = stats + turns
        if split:
            others = -(-others // 32) * 32
            pieces = split * variant["tile_n"] * (variant["head_dim"] + variant["head_dim_v"])
            assert variant["persistent"] and dq.numel() // 2 >= others + pieces
            dq.view(-1).view(torch.float32)[others : others + pieces] = NAN
        behind = workspace.numel() > sums
        found = workspace[sums:] if behind else dq.view(-1).view(torch.float32)
        assert found.numel() == stats + turns if behind else found.numel() >= stats + turns
        assert found.data_ptr() % 16 == 0
        found[: stats + turns] = NAN
        return found[:stats]

    def packed(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None,
        dq: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None,
        vectors: tuple[Tensor | None, ...], dropout: tuple[Any, ...] | None, bias: tuple[Any, ...] | None,
        scale: float, softcap: float, left: int, right: int,
    ) -> None:  # fmt: skip
        assert variant["varlen"] and cu_k is not None and (used is not None) == variant["used"]
        config, dim, dim_v = BackwardConfig(**variant), dq.shape[-1], dv.shape[-1]
        tile_dims = (config.head_dim, config.head_dim, config.head_dim_v, config.head_dim_v)
        for t, columns, tile, box in zip((q, k, v, dout), (dim, dim, dim_v, dim_v), tile_dims, config.boxes, strict=True):
            assert tile >= t.shape[-1] > tile - box and not t[..., columns:].any()  # no box lies beside all columns
        q, k, v, dout = q[..., :dim], k[..., :dim], v[..., :dim_v], dout[..., :dim_v]
        starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
        for t in (dq, dk, dv):  # the kernels zero what belongs to no sequence, and keys that nobody sees
            t.zero_()
        for n in range(len(starts_q) - 1):
            a, b, c, d = starts_q[n], starts_q[n + 1], starts_k[n], starts_k[n + 1]
            d = d if used is None else c + int(used[n])
            delta = (dout[a:b].double() * out[a:b].double()).sum(-1).T - (0 if dlse is None else dlse[:, a:b])
            parts = (t[None] for t in (q[a:b], k[c:d], v[c:d], dout[a:b], lse[:, a:b].double(), delta))
            masked = hidden_by([None if t is None else t[..., c:d] for t in vectors], b - a, d - c, q.shape[1])
            gradients = one(*parts, scale, softcap, left, right, masked, dropout=dropout, bias=bias, sequence=n)
            for t, found in zip((dq[a:b], dk[c:d], dv[c:d]), gradients, strict=True):
                t.copy_(found[0])

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None,
        dq: Tensor, dk: Tensor, dv: Tensor, sums: Tensor,
        cu_q: Tensor | None, cu_k: Tensor | None, used: Tensor | None,
        lts: Tensor | None, lte: Tensor | None, uts: Tensor | None, ute: Tensor | None,
        bounds: Tensor | None, present: int | None, offsets: Tensor | None,
        dropout: tuple[Any, ...] | None, bias: tuple[Any, ...] | None,
        scale: float, softcap: float, left: int, right: int, section: int, blocks: int, split: int, each: int,
    ) -> None:  # fmt: skip
        assert blocks == PROCESSORS
        vectors: tuple[Tensor | None, ...] = (None,) * 4
        if variant["columns"]:
            assert lts is not None and lte is not None and uts is not None and ute is not None and bounds is not None
            assert present and bounds.is_contiguous() and all(t.is_contiguous() for t in (lts, lte, uts, ute))
            count = -(-k.shape[1] // 64)
            if cu_q is not None:
                count = k.shape[0] // 64 + k.shape[0] // 2048 + 2 * (cu_q.shape[0] - 1)
            assert (offsets is not None) == variant["q_offset"]
            if offsets is None:
                assert bounds.shape[2:] == (count, 8) and bounds.shape[:2] == lts.shape[:2]
            else:
                assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.shape == q.shape[:1]
                assert bounds.shape == (q.shape[0], lts.shape[1], count + -(-k.shape[1] // 2048), 8)
            vectors = tuple(t if present >> i & 1 else None for i, t in enumerate((lts, lte, uts, ute)))
        else:
            assert (lts, lte, uts, ute, bounds, present, offsets) == (None,) * 7
        steps = q.shape[2] // k.shape[2] * -(-q.shape[1] // variant["tile_m"]) if cu_q is None else 0
        n_blocks = 0 if cu_q is not None else k.shape[0] * k.shape[2] * -(-k.shape[1] // variant["tile_n"])
        assert 0 <= split <= n_blocks and (split == 0 or PROCESSORS * each >= split * steps)
        if cu_q is not None:
            carve((q.shape[0] // variant["tile_m"] + cu_q.shape[0] - 1) * q.shape[1], dq, sums)
            numbers = scale, softcap, left, right
            packed(q, k, v, out, dout, lse, dlse, dq, dk, dv, cu_q, cu_k, used, vectors, dropout, bias, *numbers)
            return
        assert section >= 1 and (dlse is not None) == variant["dlse"]
        assert (softcap != 0.0) == variant["softcap"]
        assert all(s % 8 == 0 for t in (q, k, v, out, dout) for s in t.stride()[:-1]) and lse.is_contiguous()
        tile_m, dim = variant["tile_m"], variant["head_dim"]
        assert max(q.shape[-1], v.shape[-1]) <= dim
        delta = (dout.double() * out.double()).sum(-1).transpose(-1, -2)
        if dlse is not None:
            delta = delta - dlse
        masked = hidden_by(vectors, q.shape[1], k.shape[1], q.shape[2], offsets)
        options = (scale, softcap, left, right, masked, dropout, bias, None, offsets)
        stats = carve(q.shape[0] * q.shape[2] * -(-q.shape[1] // tile_m), dq, sums, split)
        rows = stats.view(q.shape[0], q.shape[2], -1, row_statistics, tile_m)[:, :, :, 1]
        padded = torch.full((*delta.shape[:2], rows.shape[2] * tile_m), NAN)
        padded[..., : q.shape[1]] = delta
        rows.copy_(padded.view(rows.shape))
        for a, b in zip((dq, dk, dv), one(q, k, v, dout, lse.double(), delta, *options), strict=True):
            a.copy_(b)

    return call


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_backward, "_ready", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modules, "load", kernel)
    monkeypatch.setattr(run_backward, "processors", lambda index: PROCESSORS)


def compare(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, deterministic: bool) -> None:
    call = case(name, 3, dtype=torch.float16)
    q, k, v, sink = call.tensors()
    leaves = [t.double().requires_grad_() for t in (q, k, v, *([] if sink is None else [sink]))]
    options = {"sink": leaves[3] if sink is not None else None, "return_lse": True, "backend": "reference"}
    out, lse = warploom.attention(*leaves[:3], **options, **call.keywords)
    dout, dlse = call.upstream(out.half(), lse.float())
    given = dlse if call.lse_gradient else None
    seen = ~torch.isinf(lse)
    total = (out * dout.double()).sum() + (0 if given is None else (torch.where(seen, lse, 0.0) * dlse).sum())
    want = torch.autograd.grad(total, leaves)
    args = dense_args(q, k, v, sink=sink, deterministic=deterministic, **call.keywords)
    if given is not None:
        given = torch.where(seen, given, 0.0)
    found = run_backward.backward(args, dout, given, out.detach().half(), lse.detach().float())
    compare(found[: len(want)], want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name: str, deterministic: bool) -> None:
    args, given = chunk_call(name, apart="window" in name)
    want = given.expected()
    args = args._replace(deterministic=deterministic)
    dlse = torch.where(torch.isinf(want["lse"]), 0.0, given.dlse) if given.call.lse_gradient else None
    found = run_backward.backward(args, given.dout, dlse, want["out"].half(), want["lse"].float())
    names = [name for name in ("dq", "dk", "dv", "dsink") if name in want]
    if given.shared:
        found = (found[0], *(t.sum(0, keepdim=True) for t in found[1:3]))
    compare(found[: len(names)], tuple([want[name] for name in names]))


@pytest.mark.parametrize("window", [(12, 0), (20, -5), (None, -7), (None, 0), (None, None), (0, 3)])
def test_distances_count_keys_that_are_not_handed_over(window: tuple[int | None, int | None]) -> None:
    q, k, v = (torch.randn(2, n, 2, 16, generator=torch.Generator().manual_seed(n)).half() for n in (40, 100, 100))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    alibi, table = ALiBi(torch.tensor([[0.3, -0.1], [0.05, 0.7]])), torch.randn(2, 21).requires_grad_()
    for bias in (alibi, Relative(table.detach()), Relative(table)):
        out, lse = warploom.attention(*leaves, bias=bias, window=window, return_lse=True, backend="reference")
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
        args = dense_args(q, k, v, window=window, bias=bias)
        found = run_backward.backward(args, dout, None, out.detach().half(), lse.detach().float())
        wanted = [*leaves, table] if args.bias_grad else leaves
        assert len(found) == 4 + args.bias_grad
        compare((*found[:3], *found[4:]), torch.autograd.grad((out * dout.double()).sum(), wanted))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_table_and_a_frozen_one(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a module of its own; a gradient is added to zeros."""
    names: list[str] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        names.append(spec.name)
        return kernel(spec)

    def poisoned(t: Tensor, **options: Any) -> Tensor:
        return torch.full_like(t, NAN, **options)

    monkeypatch.setattr(modules, "load", load)
    monkeypatch.setattr(torch, "empty_like", poisoned)
    q, k, v = (torch.randn(1, n, 2, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (40, 100, 100))
    leaves = [*(t.double().requires_grad_() for t in (q, k, v)), torch.randn(2, 21, requires_grad=True)]
    bias = Relative(leaves[3].detach() if frozen else leaves[3])
    out, lse = warploom.attention(*leaves[:3], bias=bias, causal=True, return_lse=True, backend="reference")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    args = dense_args(q, k, v, causal=True, bias=bias)
    found = run_backward.backward(args, dout, None, out.detach().bfloat16(), lse.detach().float())
    wanted = leaves[: 4 - frozen]
    for a, b in zip((*found[:3], *found[4:]), torch.autograd.grad((out * dout.double()).sum(), wanted), strict=True):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.norm()
    assert len(names) == 1 and names[0] in {c.name for c in backward_set()}
    assert ("_distance_grad" in names[0]) != frozen


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ({"causal": True}, 99),  # 40 queries, the last of which is at 99
        ({"causal": True, "window": (30, 0)}, 30),
        ({"window": (200, 5)}, 99),
        ({}, 99),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_an_entry_that_no_pair_reaches_has_no_gradient(
    options: dict[str, Any], reached: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rounding leaves of all others' sum is not its own."""

    def bind(args: AttentionArgs, with_dlse: bool, gradient: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        gradient.fill_(1.0)
        return lambda *tensors: tensors[:1] * 4

    monkeypatch.setattr(run_backward, "bind", bind)
    for last in (reached - 1, reached, reached + 1, reached + 50):
        q, k, v = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16) for n in (40, 100, 100))
        bias = Relative(torch.zeros(2, last + 1, requires_grad=True), bidirectional=False)
        if packed:
            starts = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
            args = varlen_args(q[0], k[0], v[0], *starts, 40, 100, bias=bias, **options)
        else:
            args = dense_args(q, k, v, bias=bias, **options)
        lse = torch.zeros(1, 2, 40)
        *_, gradient = run_backward.backward(args, q, None, q, lse)
        assert gradient[:, :-1].eq(1).all() and gradient[:, -1].eq(float(last <= reached)).all()


@pytest.mark.parametrize("name, narrow", [*((name, False) for name in MASKS), *((name, True) for name in NARROWED)])
@pytest.mark.parametrize("dims", [(16, 16), (160, 128), (176, 192), (256, 200)], ids=str)
def test_masks(name: str, narrow: bool, dims: tuple[int, int]) -> None:
    """What vectors, which of them, and that no keys are cut off: bounds count blocks of all."""
    call = masked(name, 5, narrow=narrow, dtype=torch.float16, head_dim=dims[0], head_dim_v=dims[1])
    leaves = [t.double().requires_grad_() for t in call.tensors()[:3]]  # type: ignore[union-attr]
    out, lse = warploom.attention(*leaves, return_lse=True, backend="reference", **call.keywords)
    dout, _ = call.upstream(out.half(), lse.float())
    want = torch.autograd.grad((out * dout.double()).sum(), leaves)
    args = dense_args(*call.tensors()[:3], **call.keywords)  # type: ignore[misc]
    if any(t is not None for t in args.mask.vectors):
        args = args._replace(bounds=tiles.column_bounds(args.mask, call.seqlen_q, call.seqlen_k, 64))
    found = run_backward.backward(args, dout, None, out.detach().half(), lse.detach().float())
    compare(found[:3], want)


@pytest.mark.parametrize("name", ["causal", "window behind", "strided", "softcap, sink and lse"])
def test_a_launcher_serves_other_tensors(name: str) -> None:
    """And keeps none of the first call's alive."""
    first, call = case(name, 3, dtype=torch.float16), case(name, 4, dtype=torch.float16)
    q, k, v, sink = first.tensors()
    launch = run_backward.bind(dense_args(q, k, v, sink=sink, **first.keywords), call.lse_gradient)
    alive = weakref.ref(q)
    del q, k, v, sink
    gc.collect()
    assert alive() is None
    q, k, v, sink = call.tensors()
    out, lse = warploom.attention(q, k, v, sink=sink, return_lse=True, backend="reference", **call.keywords)
    dout, dlse = call.upstream(out, lse)
    given = dlse if call.lse_gradient else None
    want = run_backward.backward(dense_args(q, k, v, sink=sink, **call.keywords), dout, given, out, lse)
    for a, b in zip(launch(dout, given, out, lse, q, k, v, sink), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_a_launcher_serves_other_seeds(packed: bool) -> None:
    q, k, v, _ = case("causal", 3, dtype=torch.float16).tensors()
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    starts = torch.tensor([0, 5, q.shape[0]], dtype=torch.int32)

    def args(number: int) -> AttentionArgs:
        options: dict[str, Any] = {"causal": True, "dropout_p": 0.5, "dropout_seed": torch.tensor([number])}
        return varlen_args(q, k, v, starts, **options) if packed else dense_args(q, k, v, **options)

    launch, found = run_backward.bind(args(1), False), []
    for number in (2, 3):
        out, lse = dispatch.find("reference").forward(args(number))
        found.append(launch(torch.ones_like(out), None, out, lse, *args(number).tensors()))
        want = dispatch.find("reference").backward(args(number), torch.ones_like(out), None, out, lse)
        compare(found[-1][:3], want[:3])
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("window", [(10, 0), (10, -5), (None, -7), (-3, 40), (0, 0)])
def test_keys_that_no_query_sees_are_not_handed_over(window: tuple[int | None, int]) -> None:
    q, k, v = (torch.randn(1, n, 2, 16, generator=torch.Generator().manual_seed(n)).half() for n in (40, 100, 100))
    out, lse = warploom.attention(q, k, v, window=window, return_lse=True, backend="reference")
    want = run_backward.backward(dense_args(q, k, v, window=window), torch.ones_like(out), None, out, lse)
    first, end = seen(40, 100, *window)
    for t in (k, v):
        t[:, :first] = NAN
        t[:, end:] = NAN
    found = run_backward.backward(dense_args(q, k, v, window=window), torch.ones_like(out), None, out, lse)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(found, want, strict=True))


def test_what_the_kernel_does_not_take_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Exception):
        pass

    def elsewhere(*_: object, **__: object) -> None:
        raise Elsewhere

    monkeypatch.setattr(hopper, "_next", elsewhere)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)

    def dense(dim: int, dlse: bool = False, **options: Any) -> None:
        q, lse = torch.zeros(1, 20, 2, dim, dtype=torch.float16), torch.zeros(1, 2, 20)
        hopper.BACKEND.backward(dense_args(q, q, q, **options), q, lse if dlse else None, q, lse)

    for options in ({"scale": -1.0}, {"scale": 0.0}):
        with pytest.raises(Elsewhere):
            dense(64, **options)  # type: ignore[arg-type]
    for dim, options in (
        (64, {"softcap": 2.0, "dlse": True}), (128, {"window": (3, 3)}), (72, {"window": (3, None)}), (256, {"causal": True}),
        (136, {"softcap": 2.0, "dlse": True}),
    ):  # fmt: skip
        dense(dim, **options)  # type: ignore[arg-type]
    q, cu = torch.zeros(20, 2, 64, dtype=torch.float16), torch.tensor([0, 5, 20], dtype=torch.int32)
    hopper.BACKEND.backward(varlen_args(q, q, q, cu), q, None, q, torch.zeros(2, 20))
    monkeypatch.setattr(hopper, "MOST_KEYS", 19)
    with pytest.raises(Elsewhere):
        hopper.BACKEND.backward(varlen_args(q, q, q, cu), q, None, q, torch.zeros(2, 20))


def test_which_packed_masks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose registers would spill."""

    def takes(dim: int, **options: Any) -> bool:
        q, cu = torch.zeros(20, 2, dim, dtype=torch.float16), torch.tensor([0, 5, 20], dtype=torch.int32)
        mask = ColumnMask(torch.full((1, 1, 20), 20, dtype=torch.int32), causal=True)
        return hopper._takes_backward(varlen_args(q, q, q, cu, mask=mask, **options), True)

    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    used = torch.tensor([5, 7], dtype=torch.int32)
    for dim in (8, 64, 96, 128):
        assert all(takes(dim, **options) for options in ({}, {"seqused_k": used}, {"deterministic": True}, {"window": (9, 0)}))
        assert takes(dim, dropout_p=0.3, dropout_seed=1, seqused_k=used)
        for options in ({"softcap": 2.0, "deterministic": True}, {"dropout_p": 0.3, "dropout_seed": 1, "deterministic": True}):
            assert takes(dim, **options) == (dim <= 96)
    assert not takes(64, dropout_p=0.3, dropout_seed=1, softcap=2.0, deterministic=True)


@pytest.mark.parametrize("name", VARLEN)
def test_packed(name: str) -> None:
    case = Packed(3, **PACKED[name])
    mask = {"mask": case._mask(case.columns)} if case.columns else {}
    leaves = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    cu_q, cu_k = case._starts(case.lengths_q), None if case.lengths_k is None else case._starts(case.keys)
    used = None if case.used is None else torch.tensor(case.used, dtype=torch.int32)
    sink = None if case.sinks is None else case.sinks.double().requires_grad_()
    out, lse = warploom.attention_varlen(
        *leaves, cu_q, cu_k, seqused_k=used, sink=sink, return_lse=True, backend="reference", **case.keywords, **mask
    )
    dlse = torch.where(torch.isinf(lse), 0.0, case.dlse.double())
    total = (out * case.dout.double()).sum() + (torch.where(torch.isinf(lse), 0.0, lse) * dlse).sum()
    want = torch.autograd.grad(total, [*leaves, *([] if sink is None else [sink])])
    args = varlen_args(case.q, case.k, case.v, cu_q, cu_k, seqused_k=used, sink=case.sinks, **case.keywords, **mask)
    if case.columns:
        bounds, _ = packed_bounds(args.mask, cu_q.tolist(), (cu_q if cu_k is None else cu_k).tolist(), case.used)
        args = args._replace(bounds=bounds)
    given = dlse.float() if case.lse_gradient else None
    found = run_backward.backward(args, case.dout, given, out.detach().half(), lse.detach().float())
    compare(found[: len(want)], want)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"causal": True}, {"sink": True}], ids=str)
@pytest.mark.parametrize("seqlen", [1, 16, 65, 127, 1600])
def test_what_a_call_allocates(seqlen: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What explain() says; besides dQ in fp32 nothing where row statistics fit into dq, but for a gradient of a sink."""
    given: list[Tensor] = []
    monkeypatch.setattr(modules, "load", lambda spec: lambda *arguments: given.extend(arguments[7:11]))
    sink = torch.zeros(2) if options.get("sink") else None
    for dim in (8, 40, 64, 96, 128, 192, 256):
        q = torch.zeros(1, seqlen, 2, dim, dtype=torch.float16)
        args = dense_args(q, q, q, **{**options, "sink": sink})
        run_backward.backward(args, q, None, q, torch.zeros(1, 2, seqlen))
        dq, _, _, found = given[-4:]
        problem = AttentionProblem.from_args(args, True)
        variant = backward_config_for(problem)
        tiles = 2 * -(-seqlen // variant.tile_m)
        others = tiles * (2 * variant.tile_m + variant.states) + variant.persistent
        inside = sink is None and 4 * others <= 2 * dq.numel()
        assert found.numel() == tiles * variant.tile_m * variant.head_dim + (0 if inside else others)
        assert workspace(problem) == 4 * found.numel()
        assert inside == (sink is None) or seqlen < variant.tile_m or dim < 40


GROUPED = {  # batch, queries, keys, heads, of keys, head_dim: sections, waves
    (2, 8192, 8192, 32, 8, 128): (8, 1),
    (4, 4096, 4096, 32, 8, 128): (8, 1),
    (1, 32768, 32768, 32, 4, 128): (4, 2),
    (2, 8192, 8192, 32, 32, 128): None,  # heads of their own
    (2, 6400, 6400, 32, 8, 128): (2, 3),
    (2, 8192, 8192, 16, 8, 128): None,  # those in flight fit into L2
    (2, 8192, 8192, 64, 8, 64): None,  # no faster
    (2, 8192, 8192, 16, 4, 256): None,
    (1, 8192, 8192, 8, 1, 128): None,  # fewer blocks than processors
    (8, 1024, 1024, 64, 8, 128): None,  # blocks claim tiles
}

# Deterministic ones whose heads fit into L2 go a few heads at a time, others in waves, many heads at a time.
TOGETHER = {(2, 8192, 8192, 32, 32, 128): 4, (2, 8192, 8192, 16, 8, 128): 2}


@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_which_calls_go_in_waves(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, queries, keys, heads, heads_kv, dim = shape
    given: list[Any] = []
    names: list[str] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        names.append(spec.name)
        return lambda *arguments: given.extend(arguments[27:])

    monkeypatch.setattr(modules, "load", load)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    q, k = (torch.empty(batch, n, h, dim, dtype=torch.float16) for n, h in ((queries, heads), (keys, heads_kv)))
    lse = torch.empty(batch, heads, queries)
    for options in ({"causal": True}, {"causal": True, "deterministic": True}, {}, {"window": (100, 0)}):
        given.clear()
        names.clear()
        args = dense_args(q, k, k, **options)  # type: ignore[arg-type]
        run_backward.backward(args, q, None, q, lse)
        want = GROUPED[shape] if options == {"causal": True} else None
        assert names == [backward_config_for(AttentionProblem.from_args(args, True)).name]
        assert names[0].endswith("_waves") == (want is not None)
        if want is not None:
            sections, _, split, each = given
            assert (sections, split, each) == (want[0], 0, want[1])
        if options.get("deterministic"):
            assert given[0] == TOGETHER.get(shape, -min(32, batch * heads_kv))


def test_without_its_module_a_call_goes_head_after_head(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(run_backward, "waves", lambda *_: (1, 1))
    monkeypatch.setattr(modules, "cannot_come", lambda spec: spec.name.endswith("_waves"))
    monkeypatch.setattr(modules, "load", lambda spec: names.append(spec.name) or kernel(spec))
    q, k = torch.randn(1, 2000, 2, 16).half(), torch.randn(1, 20, 1, 16).half()
    run_backward.backward(dense_args(q, k, k, causal=True), q, None, q, torch.zeros(1, 2, 2000))
    assert [name.endswith("_waves") for name in names] == [False]


@pytest.mark.parametrize(
    "claims, longest, options",
    [
        (True, 4096, {"causal": True}),
        (False, 4097, {"causal": True}),
        (False, None, {"causal": True}),  # all tokens may be one sequence's
        (False, 300, {}),
        (False, 300, {"window": (100, 0)}),
        (False, 300, {"causal": True, "deterministic": True}),
        (False, 300, {"causal": True, "used": True}),  # whose tiles without keys the kernel after does not find
    ],
    ids=str,
)
def test_which_packed_calls_claim_tiles(
    claims: bool, longest: int | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        return lambda *arguments: given.extend((spec.name, arguments[27]))

    monkeypatch.setattr(modules, "load", load)
    q, cu = torch.empty(5000, 8, 128, dtype=torch.float16), torch.tensor([0, 300, 300, 600], dtype=torch.int32)
    options = dict(options)
    used = cu.diff() if options.pop("used", False) else None
    args = varlen_args(q, q, q, cu, None, longest, longest, seqused_k=used, **options)
    run_backward.backward(args, q, None, q, torch.empty(8, 5000))
    name, together = given
    assert ("_claims" in name) == claims and together == (2 if claims else 4)
    assert name == backward_config_for(AttentionProblem.from_args(args, True)).name


@pytest.mark.parametrize("far", [False, True])
def test_norms_have_room_in_a_call_and_where_it_is_warmed(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no first launch of what measures them falls inside a capture; without its module a call goes without."""
    names: list[str] = []
    given: list[tuple[Any, ...]] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        names.append(spec.name)
        return lambda *arguments: given.append(next(each for each in arguments if isinstance(each, tuple)))

    monkeypatch.setattr(modules, "load", load)
    q, k = (torch.empty(3, n, h, 64, dtype=torch.bfloat16) for n, h in ((20, 4), (REACH - 1 + far, 2)))
    args = dense_args(q, k, k, causal=True)._replace(bias=torch.ones(3, 4), bias_kind="alibi")
    run_backward.warm(args)
    run_backward.backward(args, q, None, q, torch.empty(3, 4, 20))
    assert len(names) == 1 and ("_alibi_reaches" in names[0]) == far
    assert [[each.numel() for each in bias[2:]] for bias in given] == [[n * (4 + 2) * PARTS] * far for n in (1, 3)]
    monkeypatch.setattr(run_backward, "_ready", {})
    monkeypatch.setattr(modules, "cannot_come", lambda spec: "_reaches" in spec.name)
    run_backward.backward(args, q, None, q, torch.empty(3, 4, 20))
    assert "_reaches" not in names[1] and len(given[2]) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_warming_runs_one_token(packed: bool) -> None:
    q, cu = torch.zeros(1, 20, 2, 200, dtype=torch.float16), torch.tensor([0, 5, 20], dtype=torch.int32)
    run_backward.warm(varlen_args(q[0], q[0], q[0], cu) if packed else dense_args(q, q, q, causal=True))
    assert len(run_backward._ready) == 1


def test_the_kernel_in_python_takes_what_the_compiled_one_takes() -> None:
    """By position: else what the host hands over in a wrong order would be right here."""
    stand_in = list(inspect.signature(kernel(backward_set()[0].spec)).parameters)
    assert [*stand_in, "stream"] == parameters("attention/hopper/backward.py", "HopperBackward.__call__")


def test_names_are_unique_and_memory_fits() -> None:
    found = backward_set()
    assert len({c.name for c in found}) == len(found) <= 240
    # Barriers, and statistics up to the alignment of what follows, take up to 1 KiB more.
    assert all(c.name.isidentifier() and c.shared_bytes + 1024 <= 227 * 1024 for c in found)


@pytest.mark.parametrize(
    ("with_sink", "with_mask"), [(False, False), (True, False), (True, True)], ids=["no sink", "sink", "sink and column mask"]
)
def test_nan_in_packed_queries_that_see_nothing_reached_dk(with_sink: bool, with_mask: bool) -> None:
    """Found by the fuzzer: their rows were multiplied by zeros, which leaves NaN. Under a mask alone the kernel clears them."""
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 40, 70], [0, 10, 50]))
    q, k, v = (torch.randn(n, 2, 16).half() for n in (70, 50, 50))
    dout = torch.randn(70, 2, 16).half()
    sink = torch.tensor([0.5, -3.0]) if with_sink else None
    mask = ColumnMask(torch.full((1, 2, 50), 25, dtype=torch.int32), torch.full((1, 2, 50), 35, dtype=torch.int32))
    options: dict[str, Any] = {"causal": True, "sink": sink, "mask": mask if with_mask else None}

    def gradients(q: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        args = varlen_args(q, k, v, cu_q, cu_k, **options)
        out, lse = reference.BACKEND.forward(varlen_args(q.nan_to_num(0.0), k, v, cu_q, cu_k, **options))
        if with_mask:
            args = args._replace(bounds=packed_bounds(args.mask, cu_q.tolist(), cu_k.tolist())[0])
        return run_backward.backward(args, dout, None, out.half(), lse.float())

    hostile, upstream = q.clone(), dout.clone()
    hostile[:30, :, ::2], upstream[:30, 1] = NAN, float("inf")
    clean_q, clean_dout = q.clone(), dout.clone()
    clean_q[:30, :, ::2], clean_dout[:30, 1] = 0.0, 0.0
    want = gradients(clean_q, clean_dout)
    for found, expected in zip(gradients(hostile, upstream), want, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected)
