"""What the host does before a launch, with a kernel in Python that computes what it is told: views, bands, lengths, vectors."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import CASES, MASKS, NARROWED, case, masked
from tests.attention.chunked import CHUNKED, Chunked, chunked
from tests.attention.packed import PACKED, Packed
from tests.attention.packed_bounds import packed_bounds
from tests.plain import parameters
from warploom.attention import reference
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.band import seen
from warploom.attention.bounds import BLOCK, COARSE_BLOCK
from warploom.attention.chunks import chunk_args
from warploom.attention.hopper import plan, run, run_backward
from warploom.attention.hopper.config import CUT_WORDS, ForwardConfig
from warploom.attention.hopper.offsets import with_columns
from warploom.attention.hopper.plan import REACH, named_set
from warploom.attention.problem import AttentionArgs
from warploom.kernels.distances import head_length
from warploom.kernels.reach import PARTS
from warploom.masks import ColumnMask, Full, Mask, ResolvedMask
from warploom.masks.tiles import column_bounds
from warploom.runtime import dispatch, modules
from warploom.runtime.module_spec import ModuleSpec

DENSE = [name for name in CASES if "scale" not in name]
VARLEN = [name for name in PACKED if "pages" not in name]
PAGED = [name for name in PACKED if "pages of" in name and name != "pages of 1"]
NAN = float("nan")
PROCESSORS = 5  # few, so that small calls have more tiles than blocks


def kernel(spec: ModuleSpec) -> Callable[..., None]:
    """The reference in the kernel's place, held to the kernel's signature and to what it can read."""
    variant = dict(spec.config)
    config = ForwardConfig(**variant)

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None,
        cu_q: Tensor | None, cu_k: Tensor | None, used_k: Tensor | None, counter: Tensor | None, parts: Tensor | None,
        mask: tuple[Any, ...] | None, dropout: tuple[Any, ...] | None, bias: tuple[Any, ...] | None, largest: Tensor | None,
        table: Tensor | None, scale: float, softcap: float, left: int, right: int, pair_heads: int, split: int, blocks: int,
    ) -> None:  # fmt: skip
        assert blocks >= 1 and pair_heads >= 0 and (sink is not None) == variant["sink"]
        assert (parts is not None) == variant["split"] and split >= 0
        if split and variant["paged"]:
            assert parts is not None and parts.is_contiguous() and parts.dtype == torch.float32
            assert parts.numel() == (2 * blocks + 1) * config.piece_floats >= blocks * CUT_WORDS
            assert blocks in (1, PROCESSORS) and not variant["left"]
        elif split and variant["columns"]:  # first query tiles that come last
            assert parts is None and split < -(-q.shape[1] // config.queries) and blocks == PROCESSORS
        elif split:
            group = q.shape[2] // k.shape[2]
            heads = k.shape[2] * -(-group // config.heads_per_tile) if config.pack_gqa else q.shape[2]
            tiles = -(-q.shape[1] // config.queries) * q.shape[0] * heads
            assert parts is not None and parts.is_contiguous() and parts.dtype == torch.float32
            assert parts.numel() == 2 * blocks * config.piece_floats
            assert blocks in (1, PROCESSORS) and (tiles - split) % blocks == 0
        assert (softcap != 0.0) == variant["softcap"]
        assert all(s % 8 == 0 for t in (q, k, v) for s in t.stride()[:-1])
        assert [t is not None for t in (cu_q, cu_k, used_k, counter, table)] == [
            variant["varlen"],
            variant["varlen"] and not variant["paged"],
            variant["used"],
            variant["varlen"] or variant["columns"],
            variant["paged"],
        ]
        options: dict[str, Any] = {
            "window": (left if variant["left"] else None, right if variant["right"] else None),
            "sink": sink,
            "scale": scale,
            "softcap": softcap,
        }
        offsets = None
        assert (mask is not None) == variant["columns"]
        if mask is not None:
            assert counter is not None and not counter.any()
            assert len(mask) == 6 + variant["q_offset"]
            offsets = query_offsets(mask[6:], q.shape[0])
            options["mask"] = column_mask(mask[:6], None if cu_k is None else cu_k.shape[0] - 1, offsets is not None)
        assert (dropout is not None) == variant["dropout"] and not (dropout and config.pack_gqa)
        if dropout is not None:
            options["dropout_seed"], options["dropout_p"], first = told(dropout)
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, first, 0)) for t in (k, v))  # keys that the band hides
        assert (bias is not None) == bool(variant["bias"]) and (largest is not None) == variant["largest"]
        if largest is not None:
            assert largest.shape == (out.shape[0] if cu_q is None else cu_q.shape[0] - 1, q.shape[-2])
            assert (largest == float("-inf")).all() and not config.pack_gqa
            largest.fill_(1.0)
        if cu_q is None:
            found = attended(dense_args(q, k, v, **options)._replace(q_offset=offsets), bias)
        else:
            assert counter is not None and not counter.any()
            (box, box_v), dim, dim_v = config.boxes, config.head_dim, config.head_dim_v
            for t, tile, least in ((q, dim, dim - box), (k, dim, dim - box), (v, dim_v, dim_v - box_v)):
                assert tile >= t.shape[-1] > least  # no box lies beside all columns
            assert not v[..., out.shape[-1] :].any()
            v = v[..., : out.shape[-1]]
            if table is not None:
                assert table.dtype == torch.int32 and table.stride(1) == 1
                assert k.shape[1] % config.page_box == 0 or table.shape[1] == 1
                options["block_table"] = table
            found = attended(varlen_args(q, k, v, cu_q, cu_k, seqused_k=used_k, **options), bias)
        out.copy_(found[0])
        lse.copy_(found[1])

    return call


def attended(args: AttentionArgs, bias: tuple[Any, ...] | None) -> tuple[Tensor, Tensor]:
    """Out and lse of a call with the slopes or table and the origin of distances that a module is handed."""
    if bias is not None:
        args = args._replace(**biased(bias))
    return reference.BACKEND.forward(args)


def biased(bias: tuple[Any, ...]) -> dict[str, Any]:
    """What a call has of slopes and their origin, or of a table, which comes with room to be spread out."""
    values, *rest = bias
    assert values.ndim == 2 and values.is_contiguous() and values.dtype == torch.float32
    if isinstance(rest[0], Tensor):
        assert rest[0].dtype == torch.float32 and rest[0].shape == (values.shape[0] * head_length(values.shape[1]),)
        return {"bias": values, "bias_kind": "distance", "bias_origin": rest[1]}
    assert len(rest) == 1  # no room for norms, which so few keys do not need
    return {"bias": values, "bias_kind": "alibi", "bias_origin": rest[0]}


def told(dropout: tuple[Any, ...]) -> tuple[Tensor, float, int]:
    """Seed, probability and first key that a module is handed."""
    words, bound, scale, first = dropout
    assert words.dtype == torch.int32 and words.shape == (2,) and words.is_contiguous()
    below = bound % 2**15 / 2**15
    dropout_p = 1.0 - below if bound < 0 else below
    assert -(2**31) <= bound < 2**31 and scale == pytest.approx(1.0 / (1.0 - dropout_p))
    return words.view(torch.int64), dropout_p, 16 * first


def query_offsets(given: tuple[Tensor, ...], batch: int) -> Tensor | None:
    """What a module is handed of them."""
    for offsets in given:
        assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.shape == (batch,)
        return offsets
    return None


def column_mask(given: tuple[Any, ...], sequences: int | None, of_entries: bool = False) -> Mask:
    """The mask that a module is handed; its bounds have its batch entries, or those of a call with query offsets."""
    *vectors, bounds, present = given
    assert bounds.dtype == torch.int32 and bounds.is_contiguous()
    found = [t if present >> i & 1 else None for i, t in enumerate(vectors)]
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in vectors)
    keys = vectors[0].shape[2]
    blocks = -(-keys // 64) if sequences is None else keys // 64 + keys // 2048 + 2 * sequences
    assert bounds.shape[2:] in ((blocks, 8), (blocks + of_entries * -(-keys // 2048), 8))
    assert bounds.shape[1] == vectors[0].shape[1] and (of_entries or bounds.shape[0] == vectors[0].shape[0])
    return ColumnMask(*found) if present else Full()  # the first launch's has none


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of PROCESSORS that is the CPU."""
    monkeypatch.setattr(run, "processors", lambda index: PROCESSORS)
    monkeypatch.setattr(run, "_ready", {})
    monkeypatch.setattr(run, "_counters", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr(modules, "load", kernel)


def assert_same(found: tuple[Tensor, ...], want: Any) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    call = case(name, 3, dtype=torch.float16)
    q, k, v, sink = call.tensors()
    want = warploom.attention(q, k, v, sink=sink, return_lse=True, backend="reference", **call.keywords)
    assert_same(run.forward(dense_args(q, k, v, sink=sink, **call.keywords)), want)


@pytest.mark.parametrize("name, narrow", [*((name, False) for name in MASKS), *((name, True) for name in NARROWED)])
def test_mask(name: str, narrow: bool) -> None:
    call = masked(name, 3, narrow=narrow, dtype=torch.float16)
    q, k, v, sink = call.tensors()
    args = dense_args(q, k, v, sink=sink, **call.keywords)
    if args.lts is not None or args.ute is not None:
        args = args._replace(bounds=column_bounds(args.mask, q.shape[1], k.shape[1], BLOCK, "cpu"))
    want = warploom.attention(q, k, v, sink=sink, return_lse=True, backend="reference", **call.keywords)
    assert_same(run.forward(args), want)


CHUNKS = [name for name in CHUNKED if "dropout" not in name and "scale" not in name]


def chunk_call(name: str, apart: bool = False) -> tuple[AttentionArgs, Chunked]:
    """A call with query offsets, with room for bounds of its entries' rows; ``apart``: its offsets do not lie together."""
    given = chunked(name, 3, dtype=torch.float16)
    offsets = torch.tensor(given.offsets, dtype=torch.int32)
    if apart:
        offsets = torch.stack([offsets, offsets - 7], dim=1)[:, 0]
    args = with_columns(chunk_args(given.q, given.k, given.v, offsets, seqlen_q=given.whole, sink=given.sink, **given.keywords))
    heads = next(t.shape[1] for t in args.mask.vectors if t is not None)
    blocks = sum(-(-given.k.shape[1] // columns) for columns in (BLOCK, COARSE_BLOCK))
    return args._replace(bounds=torch.zeros(len(given.offsets), heads, blocks, 8, dtype=torch.int32)), given


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name: str) -> None:
    """Offsets, vectors of the whole, and the band that counts from them; one vector that hides nothing where there is none."""
    args, given = chunk_call(name, apart="window" in name)
    want = given.expected()
    assert_same(run.forward(args), (want["out"].half(), want["lse"].float()))


@pytest.mark.parametrize("name", ["causal", "window behind", "strided", "head_dim 40 and 72", "softcap, sink and lse"])
def test_a_launcher_serves_other_tensors(name: str) -> None:
    """And keeps none of the first call's alive."""
    first, second = case(name, 3, dtype=torch.float16), case(name, 4, dtype=torch.float16)
    q, k, v, sink = first.tensors()
    launch = run.bind(dense_args(q, k, v, sink=sink, **first.keywords))
    alive = weakref.ref(q)
    del q, k, v, sink
    gc.collect()
    assert alive() is None
    q, k, v, sink = second.tensors()
    want = warploom.attention(q, k, v, sink=sink, return_lse=True, backend="reference", **second.keywords)
    assert_same(launch(q, k, v, sink), want)


@pytest.mark.parametrize("name", ["dense", "Document", "packed", "packed, masked"])
def test_a_launcher_serves_other_seeds(name: str) -> None:
    """Each drops its own weights; the first one is not kept alive."""
    call = masked(name, 3, dtype=torch.float16) if name == "Document" else case("causal", 3, dtype=torch.float16)
    q, k, v, _ = call.tensors()
    if "packed" in name:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    starts = torch.tensor([0, 5, q.shape[0]], dtype=torch.int32)

    def args(seed: Tensor) -> AttentionArgs:
        options = dict(call.keywords, dropout_p=0.5, dropout_seed=seed)
        if name == "packed, masked":
            rows = torch.arange(q.shape[0], dtype=torch.int32).view(1, 1, -1) % 5 + 3
            return prepared(varlen_args(q, k, v, starts, mask=ColumnMask(rows), **options))
        found = varlen_args(q, k, v, starts, **options) if name == "packed" else dense_args(q, k, v, **options)
        if name != "Document":
            return found
        return found._replace(bounds=column_bounds(found.mask, q.shape[1], k.shape[1], BLOCK, "cpu"))

    seed = torch.tensor([1])
    alive, launch = weakref.ref(seed), run.bind(args(seed))
    del seed
    gc.collect()
    assert alive() is None
    found = []
    for number in (2, 2**40 + 3):
        given = args(torch.tensor([number]))
        assert given.tensors()[-1] is given.dropout_seed
        found.append(launch(*given.tensors()))
        want = dispatch.find("reference").forward(given._replace(bounds=None))
        assert_same(found[-1], want)
    assert not torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["Document", "four vectors", "ute, per kv head"])
def test_a_launcher_serves_other_masks(name: str) -> None:
    call = masked(name, 3, dtype=torch.float16)
    q, k, v, sink = call.tensors()
    args = dense_args(q, k, v, **call.keywords)
    launch = run.bind(args._replace(bounds=column_bounds(args.mask, q.shape[1], k.shape[1], BLOCK, "cpu")))
    vectors = [None if t is None else t.flip(2).contiguous() for t in args.mask.vectors]
    resolved = ResolvedMask(args.left, args.right, *vectors)
    bounds = column_bounds(resolved, q.shape[1], k.shape[1], BLOCK, "cpu")
    mask, band = ColumnMask(*vectors), {"window": (args.left, args.right)}
    want = warploom.attention(q, k, v, mask=mask, return_lse=True, backend="reference", **band)
    assert_same(launch(q, k, v, sink, *vectors, bounds), want)


DIMS = (128, 40), (136, 24)
NARROW = {f"head dims {a}, {b}": {"lengths_q": [40, 5], "head_dim": a, "head_dim_v": b} for a, b in DIMS}


@pytest.mark.parametrize("name", [*VARLEN, *NARROW])
def test_packed(name: str) -> None:
    call = Packed(**{"seed": 3, "dtype": torch.float16, **(PACKED | NARROW)[name]})  # type: ignore[arg-type]
    starts = [call._starts(call.lengths_q), None if call.lengths_k is None else call._starts(call.keys)]
    options = dict(call.keywords, sink=call.sinks)
    if call.used is not None:
        options["seqused_k"] = torch.tensor(call.used, dtype=torch.int32)
    if call.columns:
        options["mask"] = call._mask(call.columns)
    want = warploom.attention_varlen(call.q, call.k, call.v, *starts, return_lse=True, backend="reference", **options)
    args = varlen_args(call.q, call.k, call.v, *starts, **options)
    assert_same(run.forward(prepared(args) if call.columns else args), want)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", PAGED)
def test_pages(name: str, wide: bool) -> None:
    call = Packed(**{"seed": 3, "dtype": torch.float16, **PACKED[name]})
    starts, options = call._starts(call.lengths_q), dict(call.keywords, sink=call.sinks)
    used = torch.tensor(call.seen, dtype=torch.int32)
    want = warploom.attention_varlen(
        call.q, call.k, call.v, starts, call._starts(call.keys), seqused_k=used, return_lse=True, backend="reference", **options
    )
    table, pages = call.table, (call.k_pages, call.v_pages)
    if wide:  # rows of a table, and pages, that do not lie side by side
        table = torch.nn.functional.pad(table, (0, 5), value=-7)[:, :-5]
        pages = tuple(torch.nn.functional.pad(t, (0, 0, 0, 1))[:, :, :-1] for t in pages)  # type: ignore[assignment]
    args = varlen_args(call.q, *pages, starts, seqused_k=used, block_table=table, **options)
    assert_same(run.forward(args), want)
    launch = run.bind(args)
    assert_same(launch(args.q, args.k, args.v, args.sink, starts, None, used, args.block_table), want)


def test_one_page_a_sequence() -> None:
    """Of any size: a contiguous cache is such a pool."""
    k, used = torch.randn(3, 41, 2, 64).half(), torch.tensor([41, 0, 7], dtype=torch.int32)
    q, starts = torch.randn(9, 4, 64).half(), torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    table = torch.arange(3, dtype=torch.int32)[:, None].expand(3, 2)[:, :1]
    options = {"seqused_k": used, "block_table": table, "causal": True}
    want = warploom.attention_varlen(q, k, k, starts, return_lse=True, backend="reference", **options)
    assert_same(run.forward(varlen_args(q, k, k, starts, **options)), want)


@pytest.mark.parametrize(
    ("options", "packed", "split"),
    [({}, True, 16), ({"max_seqlen_k": 600}, True, 0), ({"batch_invariant": True}, False, 0), ({"window": (9, 0)}, True, 0)],
    ids=str,
)
def test_few_queries_over_pages(options: dict[str, Any], packed: bool, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group share tiles, and key tiles may be shared out, but where bits belong to a sequence alone."""
    found = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        def call(*given: Any) -> None:
            found.append(("packgqa" in spec.name, given[-2]))
            kernel(spec)(*given)

        return call

    monkeypatch.setattr(modules, "load", load)
    k, used = torch.randn(300, 16, 1, 64).half(), torch.tensor([4000, 70], dtype=torch.int32)
    q, starts = torch.randn(5, 4, 64).half(), torch.tensor([0, 1, 5], dtype=torch.int32)
    table = torch.randperm(300, dtype=torch.int32)[:260].view(1, 260).expand(2, 260)
    given: dict[str, Any] = {"seqused_k": used, "block_table": table, "causal": True, **options}
    want = warploom.attention_varlen(q, k, k, starts, return_lse=True, backend="reference", **given)
    assert_same(run.forward(varlen_args(q, k, k, starts, **given)), want)
    assert found[-1] == (packed, split)


def prepared(args: AttentionArgs) -> AttentionArgs:
    """With the bounds of a packed mask."""
    assert args.cu_seqlens_q is not None
    starts = args.cu_seqlens_q if args.cu_seqlens_k is None else args.cu_seqlens_k
    used = None if args.seqused_k is None else args.seqused_k.tolist()
    return args._replace(bounds=packed_bounds(args.mask, args.cu_seqlens_q.tolist(), starts.tolist(), used)[0])


def test_a_launcher_serves_other_packed_masks() -> None:
    call = Packed(**{"seed": 3, "dtype": torch.float16, **PACKED["four vectors"]})
    starts = call._starts(call.lengths_q), call._starts(call.keys)
    args = prepared(varlen_args(call.q, call.k, call.v, *starts, mask=ColumnMask(*call.columns), causal=True))
    launch = run.bind(args)
    vectors = [t.flip(2).contiguous() for t in call.columns]
    other = prepared(args._replace(bounds=None, **dict(zip(("lts", "lte", "uts", "ute"), vectors, strict=True))))
    options: dict[str, Any] = {"mask": ColumnMask(*vectors), "causal": True, "return_lse": True, "backend": "reference"}
    want = warploom.attention_varlen(call.q, call.k, call.v, *starts, **options)
    assert_same(launch(*other.tensors()), want)


@pytest.mark.parametrize("window", [(10, 0), (10, -5), (None, -7), (-3, 40), (0, 0)])
def test_keys_that_no_query_sees_are_not_handed_over(window: tuple[int | None, int]) -> None:
    q, k, v = (torch.randn(1, n, 2, 16, generator=torch.Generator().manual_seed(n)).half() for n in (40, 100, 100))
    want = warploom.attention(q, k, v, window=window, return_lse=True, backend="reference")
    first, end = seen(40, 100, *window)
    for t in (k, v):
        t[:, :first] = NAN
        t[:, end:] = NAN
    found = run.forward(dense_args(q, k, v, window=window))
    assert not found[0].isnan().any()
    assert_same(found, want)


@pytest.mark.parametrize("origin", [0, 9])
@pytest.mark.parametrize("window", [(12, 0), (20, -5), (None, -7), (None, 0), (None, None), (0, 3)])
def test_distances_count_keys_that_are_not_handed_over(window: tuple[int | None, int | None], origin: int) -> None:
    q, k, v = (torch.randn(2, n, 2, 16, generator=torch.Generator().manual_seed(n)).half() for n in (40, 100, 100))
    slopes, table = torch.tensor([[0.3, -0.1], [0.05, 0.7]]), torch.randn(2, 11)
    for bias, kind in ((slopes, "alibi"), (table, "distance")):
        args = dense_args(q, k, v, window=window)._replace(bias=bias, bias_kind=kind, bias_origin=origin)
        assert_same(run.forward(args), reference.BACKEND.forward(args))
        out, lse, largest = run.forward_with_largest(args)
        assert_same((out, lse), reference.BACKEND.forward(args))
        assert (largest == 1.0).all()


@pytest.mark.parametrize("right", [None, 0, 7, -1])
@pytest.mark.parametrize(("keys", "origin"), [(REACH, 0), (REACH - 1, 0), (REACH, 3)])
def test_norms_are_measured_where_keys_may_be_too_far_to_count(
    keys: int, origin: int, right: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many keys, of which each row sees the nearest; the room is another one in each call, and a first launch has it."""
    given: dict[str, list[Any]] = {}
    monkeypatch.setattr(modules, "load", lambda spec: lambda *arguments: given.setdefault(spec.name, []).append(arguments[13]))
    q, k = torch.empty(3, 200, 4, 64, dtype=torch.bfloat16), torch.empty(3, keys, 2, 64, dtype=torch.bfloat16)
    bias = torch.ones(1, 4)
    args = dense_args(q, k, k, window=(None, right))._replace(bias=bias, bias_kind="alibi", bias_origin=origin)
    for _ in range(2):
        run.forward(args)
    ((name, handed),) = given.items()
    assert ("_alibi_reaches" in name) == (keys == REACH and origin == 0 and right != -1)
    if "_reaches" not in name:
        assert {len(each) for each in handed} == {2}
        return
    first, *rooms = [norms for _, _, norms in handed]
    assert first.numel() == (4 + 2) * PARTS and rooms[0].data_ptr() != rooms[1].data_ptr()
    assert all(norms.dtype == torch.float32 and norms.numel() == 3 * (4 + 2) * PARTS for norms in rooms)


def test_without_its_module_a_call_reaches_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(modules, "cannot_come", lambda spec: "reaches" in spec.name)
    monkeypatch.setattr(modules, "load", lambda spec: names.append(spec.name) or (lambda *_: None))
    q, k = torch.empty(1, 200, 4, 64, dtype=torch.bfloat16), torch.empty(1, REACH, 2, 64, dtype=torch.bfloat16)
    run.forward(dense_args(q, k, k)._replace(bias=torch.ones(1, 4), bias_kind="alibi"))
    assert len(names) == 1 and "_alibi" in names[0] and "_reaches" not in names[0]


@pytest.mark.parametrize("most", [5, 6])
def test_norms_are_measured_where_a_grid_has_room_for_all_heads(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(plan, "MOST_BLOCKS", most)
    monkeypatch.setattr(modules, "load", lambda spec: names.append(spec.name) or (lambda *_: None))
    q, k = torch.empty(1, 200, 4, 64, dtype=torch.bfloat16), torch.empty(1, REACH, 2, 64, dtype=torch.bfloat16)
    args = dense_args(q, k, k)._replace(bias=torch.ones(1, 4), bias_kind="alibi")
    run.forward(args)
    assert ["_reaches" in name for name in names] == [most == 6]


@pytest.mark.parametrize("window", [(12, 0), (28, -5), (12, 3)])
def test_dropout_counts_keys_that_are_not_handed_over(window: tuple[int, int]) -> None:
    q, k, v = (torch.randn(1, n, 2, 16, generator=torch.Generator().manual_seed(n)).half() for n in (40, 100, 100))
    options: dict[str, Any] = {"window": window, "dropout_p": 0.4, "dropout_seed": 2**61 + 5}
    want = warploom.attention(q, k, v, return_lse=True, backend="reference", **options)
    assert seen(40, 100, *window)[0] > 0
    assert_same(run.forward(dense_args(q, k, v, **options)), want)


def test_kernels_do_not_begin_between_keys_that_share_a_counter() -> None:
    q, cu = torch.zeros(1, 40, 2, 16).half(), torch.tensor([0, 5, 40], dtype=torch.int32)
    k, cu_k = torch.zeros(1, 100, 2, 16).half(), torch.tensor([0, 15, 100], dtype=torch.int32)
    given = {"dropout_seed": 1}
    for window, dropout_p, want in (
        ((12, 0), 0.5, False),
        ((13, 0), 0.5, True),
        ((16, 0), 0.5, True),
        ((13, 0), 0.0, False),
        ((None, 3), 0.5, False),
    ):
        assert run.parts_counters(dense_args(q, k, k, window=window, dropout_p=dropout_p, **given)) == want
    for band, starts, want in (
        ((12, 0), (cu,), False),
        ((-3, 9), (cu,), True),
        ((12, 0), (cu, cu_k), True),
        (None, (cu, cu_k), False),
    ):
        keys = q[0] if len(starts) == 1 else k[0]
        assert run.parts_counters(varlen_args(q[0], keys, keys, *starts, window=band, dropout_p=0.5, **given)) == want


def test_far_bands_fit_32_bits() -> None:
    q, k, v = (torch.randn(1, 20, 2, 16, generator=torch.Generator().manual_seed(1)).half() for _ in range(3))
    want = warploom.attention(q, k, v, return_lse=True, backend="reference")
    assert_same(run.forward(dense_args(q, k, v, window=(2**40, 2**40))), want)


def test_a_capturing_stream_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q = torch.zeros(1, 20, 2, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="is not loaded, which a capturing stream cannot do"):
        run.forward(dense_args(q, q, q))


def test_heads_of_a_group_share_a_tile_where_queries_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where only the module for one head a tile is here, or may be loaded, that one runs."""
    names: list[str] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        names.append(spec.name)
        return kernel(spec)

    monkeypatch.setattr(modules, "load", load)
    monkeypatch.setattr(plan, "PACK_GQA", (8, 32))
    for queries, group in ((1, 8), (20, 8), (100, 8), (1, 1)):
        q, k = torch.zeros(1, queries, group, 128).half(), torch.zeros(1, 300, 1, 128).half()
        run.forward(dense_args(q, k, k, causal=True))
    assert [name.rpartition("_")[2] for name in names] == ["packgqa8", "packgqa32", "early"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(modules, "loaded", lambda spec: None if "packgqa" in spec.name else kernel(spec))
    q = torch.zeros(1, 1, 2, 64).half()
    run.forward(dense_args(q, q[:, :, :1], q[:, :, :1]))
    assert names[-1].endswith("pingpong")


def test_warm_makes_it_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 20, 2, 16, dtype=torch.float16)
    cu = torch.tensor([0, 5, 20], dtype=torch.int32)
    dense, packed = dense_args(q, q, q, causal=True), varlen_args(q[0], q[0], q[0], cu, softcap=2.0)
    mask = ColumnMask(torch.full((1, 1, 20), 3, dtype=torch.int32))
    under_mask = prepared(varlen_args(q[0], q[0], q[0], cu, seqused_k=cu[1:] - cu[:-1], mask=mask))
    for args in (dense, packed, under_mask._replace(bounds=None)):
        run.warm(args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for args in (dense, packed, under_mask):
        run.forward(args)


def test_no_two_packed_calls_count_with_one_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of two streams take zeroes in turn, more than are made at once; a captured call makes its own."""
    device = torch.device("cpu")
    kept: list[Tensor] = []
    for turn in range(2 * run._COUNTERS + 50):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=turn % 2: stream, raising=False)
        kept.append(run.counter_on(device))
        assert kept[-1].shape == (1,) and kept[-1].dtype == torch.int32 and not kept[-1].any()
        kept[-1] += 1  # as a launch does
    storages = [{t.untyped_storage().data_ptr() for t in kept[stream::2]} for stream in range(2)]
    assert len({t.data_ptr() for t in kept}) == len(kept) and not storages[0] & storages[1]
    left = {key: len(pool) for key, pool in run._counters.items()}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = run.counter_on(device)
    assert not captured.any() and captured.untyped_storage().nbytes() == 4
    assert left == {key: len(pool) for key, pool in run._counters.items()}


def test_the_kernel_in_python_takes_what_the_compiled_one_takes() -> None:
    """By position: else what the host hands over in a wrong order would be right here."""
    stand_in = list(inspect.signature(kernel(named_set()[0].spec)).parameters)
    assert [*stand_in, "stream"] == parameters("attention/hopper/forward.py", "HopperForward.__call__")


def test_the_last_round_is_split_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tiles of 192 queries on five blocks: two are left over; few keys are not worth another kernel.

    Causal calls and windows have tiles of unlike costs, and are split only where few queries see nearly all keys.
    """
    found: list[tuple[int, int]] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        run_it = kernel(spec)

        def call(*arguments: Any) -> None:
            if arguments[0].shape[1] > 1:  # not the first launch
                found.append(arguments[-2:])
            run_it(*arguments)

        return call

    monkeypatch.setattr(modules, "load", load)
    monkeypatch.setattr(run, "SPLIT_COST", 16)
    causal, window, sink = {"causal": True}, {"window": (5, None)}, {"sink": torch.zeros(1)}
    cases: list[tuple[int, int, dict[str, Any], int]] = [
        (1300, 4000, {}, 2),
        (1300, 4000, sink, 2),
        (1300, 2000, {}, 0),
        (1300, 4000, causal, 0),
        (1300, 4000, window, 0),
        (100, 4000, causal, 1),
        (100, 4000, window, 0),
        (1300, 9000, causal, 0),
    ]
    for queries, keys, options, _ in cases:
        q, k = torch.zeros(1, queries, 1, 16).half(), torch.zeros(1, keys, 1, 16).half()
        run.forward(dense_args(q, k, k, **options))
    assert [split for split, _ in found] == [case[-1] for case in cases]
    assert [blocks for _, blocks in found] == [1 if case[0] == 100 and not case[-1] else PROCESSORS for case in cases]


@pytest.mark.parametrize("window", [(0, -1), (-7, 0), (-5, 3)], ids=str)
@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
def test_packed_calls_read_keys_behind_an_empty_window(window: tuple[int, int], with_sink: bool) -> None:
    """Found by the fuzzer: NaN among them reached out. Nothing is launched, and tokens of no sequence have no sink."""
    cu = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    q, k, v = (torch.full((10, 2, 16), NAN, dtype=torch.float16) for _ in range(3))
    sink = torch.tensor([0.5, -3.0]) if with_sink else None
    args = varlen_args(q, k, v, cu, window=window, sink=sink)
    out, lse = run.forward(args)
    assert (out == 0).all() and (lse[:, 8:] == float("-inf")).all()
    assert (lse[:, :8] == (float("-inf") if sink is None else sink[:, None])).all()
    upstream = torch.ones_like(lse)
    *gradients, dsink = run_backward.backward(args, torch.zeros_like(out), upstream, out, lse)
    assert all((t == 0).all() for t in gradients)
    assert torch.equal(dsink, torch.zeros(0) if sink is None else torch.tensor([8.0, 8.0]))


@pytest.mark.parametrize("window", [(0, -37), (-19, 0)], ids=str)
def test_no_key_is_seen_behind_an_empty_window(window: tuple[int, int]) -> None:
    assert seen(117, 115, *window) == (0, 0)
