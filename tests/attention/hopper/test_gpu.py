"""The Hopper forward on an H100 or H200: the criterion over the grid, bits, graphs, streams, compile, sizes past 32 bits."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import CASES, case
from tests.attention.harness import Call, check
from tests.attention.packed import PACKED, Packed
from warploom.attention import hopper
from warploom.attention.hopper.plan import PACK_GQA
from warploom.runtime import dispatch

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

HALVES = [torch.float16, torch.bfloat16]
NAN = float("nan")
DENSE = list(CASES)
VARLEN = [name for name in PACKED if name != "pages of 1"]


def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_case(name: str, dtype: torch.dtype) -> None:
    check(case(name, seed(), dtype=dtype, device="cuda"), "hopper")


@pytest.mark.parametrize("name", VARLEN)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packed(name: str, dtype: torch.dtype) -> None:
    Packed(**{"seed": seed(), "dtype": dtype, "device": "cuda", **PACKED[name]}).check("hopper")


@pytest.mark.parametrize("seqlen", [1, 17, 113, 127, 129, 1023])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"window": (70, 30)}], ids=["full", "causal", "window"])
def test_odd_lengths(seqlen: int, keywords: dict[str, Any], dim: int) -> None:
    for seqlen_k in (seqlen, 300):
        shape = {"seqlen_q": seqlen, "seqlen_k": seqlen_k, "head_dim": dim, "batch": 1}
        check(Call(seed(), device="cuda", dtype=torch.bfloat16, keywords=keywords, **shape), "hopper")


@pytest.mark.parametrize(
    "dims", [(8, 8), (24, 24), (64, 64), (88, 88), (96, 96), (104, 40), (136, 136), (192, 192), (192, 128), (248, 256)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(dims: tuple[int, int], causal: bool) -> None:
    shape = {"seqlen_q": 333, "seqlen_k": 417, "head_dim": dims[0], "head_dim_v": dims[1], "dtype": torch.bfloat16}
    compare(Call(seed(), device="cuda", keywords={"causal": causal}, **shape))


def compare(call: Call) -> None:
    """As check(), of head dims whose backward pass has no implementation too."""
    if call.head_dim >= 16 and (call.head_dim_v or 16) >= 16:
        check(call, "hopper")
        return
    q, k, v, _ = call.tensors()
    out = warploom.attention(q, k, v, backend="hopper", **call.keywords)
    want = warploom.attention(q.double(), k.double(), v.double(), backend="reference", **call.keywords)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


def drawn(batch: int, seqlen: int, heads: int, kv: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(batch, seqlen, h, dim, device="cuda", dtype=dtype) for h in (heads, kv, kv)]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return warploom.attention(q, k, v, return_lse=True, backend="hopper", **options)  # type: ignore[return-value]


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"window": (300, 0)}], ids=["full", "causal", "window"])
def test_many_tiles_a_block(keywords: dict[str, Any]) -> None:
    """More tiles than blocks, of both causal tile widths, against the reference on some heads."""
    for shape in ((3, 1500, 24, 8, 128), (1, 7000, 6, 2, 128), (3, 1500, 24, 8, 64), (1, 7000, 6, 2, 64)):
        q, k, v = drawn(*shape)
        out, lse = attend(q, k, v, **keywords)
        for head in (0, shape[2] - 1):
            kv = head * shape[3] // shape[2]
            part = [q[-1:, -700:, head : head + 1], *(t[-1:, :, kv : kv + 1] for t in (k, v))]
            want, want_lse = warploom.attention(*(t.float() for t in part), return_lse=True, backend="reference", **keywords)
            torch.testing.assert_close(out[-1:, -700:, head : head + 1].float(), want, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(lse[-1:, head : head + 1, -700:], want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dims", [(64, 64), (88, 72), (128, 128), (128, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "keywords", [{}, {"softcap": 20.0}, {"causal": True}, {"sink": True}, {"sink": True, "causal": True}], ids=str
)
def test_split_tiles(dims: tuple[int, int], keywords: dict[str, Any]) -> None:
    """Keys dealt out over all blocks: fewer tiles than blocks, whole rounds before them (not causal), short tiles."""
    for batch, seqlen_q, seqlen_k, heads, kv in (
        (1, 130, 9001, 2, 1),
        (2, 1, 20000, 3, 1),
        (1, 700, 5003, 3, 1),
        (1, 3000, 5003, 12, 4),
    ):
        q = torch.randn(batch, seqlen_q, heads, dims[0], device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, seqlen_k, kv, d, device="cuda", dtype=torch.bfloat16) for d in dims)
        sink = 5 * torch.randn(heads, device="cuda") if "sink" in keywords else None
        out, lse = attend(q, k, v, **{**keywords, "sink": sink})
        for head in (0, heads - 1):
            part = [q[:, -200:, head : head + 1], *(t[:, :, head * kv // heads][:, :, None] for t in (k, v))]
            options = {**keywords, "sink": None if sink is None else sink[head : head + 1].double()}
            want, want_lse = warploom.attention(*(t.double() for t in part), return_lse=True, backend="reference", **options)
            torch.testing.assert_close(out[:, -200:, head : head + 1].double(), want, rtol=2e-2, atol=5e-4)
            torch.testing.assert_close(lse[:, head : head + 1, -200:].double(), want_lse.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ((2, 1000, 77, 6, 2, 64), {}), ((2, 1000, 77, 6, 2, 128), {}), ((1, 300, 5, 4, 4, 128), {}),
        ((5, 197, 197, 4, 2, 64), {}), ((2, 256, 250, 4, 2, 64), {}),
        ((1, 512, 4100, 8, 2, 128), {"causal": True}), ((2, 333, 2500, 5, 5, 120), {"causal": True}),
        ((1, 100, 9000, 3, 1, 128), {"causal": True}), ((1, 512, 4100, 8, 2, 128), {"causal": True, "sink": True}),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_by_lengths(shape: tuple[int, ...], keywords: dict[str, Any], dtype: torch.dtype) -> None:
    """Few keys, squares that one tile of four warpgroups holds, few queries under a causal mask: against the reference."""
    batch, seqlen_q, seqlen_k, heads, kv, dim = shape
    q = torch.randn(batch, seqlen_q, heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, seqlen_k, kv, dim, device="cuda", dtype=dtype) for _ in range(2))
    options = {**keywords, "sink": 5 * torch.randn(heads, device="cuda") if "sink" in keywords else None}
    out, lse = attend(q, k, v, **options)
    judged = {**options, "sink": None if options["sink"] is None else options["sink"].double()}
    want = warploom.attention(*(t.double() for t in (q, k, v)), return_lse=True, backend="reference", **judged)
    torch.testing.assert_close(out.double(), want[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse.double(), want[1].double(), rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, attend(q, k, v, **options), (out, lse)))


FEW: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (900, 3)}, {"sink": True, "causal": True}, {"softcap": 20.0}]


@pytest.mark.parametrize(
    ("dims", "keywords"),
    [((128, 128), keywords) for keywords in FEW]
    + [((64, 64), keywords) for keywords in FEW[:3]]
    + [((88, 72), FEW[1]), ((192, 128), FEW[0]), ((256, 256), FEW[1])],
    ids=str,
)
def test_few_queries_of_groups(dims: tuple[int, int], keywords: dict[str, Any]) -> None:
    """Tiles that hold 8 or 32 queries of several heads of a group, split or not, strided or not, against the reference."""
    shapes = [(1, 700, 8, 2), (8, 9001, 7, 1), (5, 9001, 36, 2), (13, 2500, 12, 3), (32, 9001, 8, 2)]
    for queries, keys, heads, kv in shapes if dims == (128, 128) and keywords in FEW[:2] else shapes[:3]:
        q = torch.randn(2, heads, queries, dims[0], device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k, v = (torch.randn(2, keys, kv, d, device="cuda", dtype=torch.bfloat16) for d in dims)
        sink = 5 * torch.randn(heads, device="cuda") if "sink" in keywords else None
        options = {**keywords, "sink": sink}
        assert not PACK_GQA or "packgqa" in str(warploom.explain(q, k, v, backend="hopper", **options))
        out, lse = attend(q, k, v, **options)
        judged = {**options, "sink": None if sink is None else sink.double(), "return_lse": True, "backend": "reference"}
        want, want_lse = warploom.attention(*(t.double() for t in (q, k, v)), **judged)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-4, atol=1e-4)
        assert all(map(torch.equal, attend(q.contiguous(), k, v, **options), (out, lse)))


def test_views_are_read_in_place() -> None:
    """Transposed, packed QKV, expanded heads and batch, and what TMA cannot read, which is copied."""
    q, k, v = drawn(2, 300, 4, 4, 128)
    want = attend(q, k, v, causal=True)
    packed = torch.stack([q, k, v], dim=2)
    for a, b in zip(attend(*packed.unbind(2), causal=True), want, strict=True):
        assert torch.equal(a, b)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for a, b in zip(attend(*heads_first, causal=True), want, strict=True):
        assert torch.equal(a, b)
    odd = [torch.cat([t[..., :1], t], dim=-1)[..., 1:] for t in (q, k, v)]
    for a, b in zip(attend(*odd, causal=True), want, strict=True):
        assert torch.equal(a, b)
    one = [t[:1, :, :1] for t in (k, v)]
    expanded = [t.expand(2, 300, 4, 128) for t in one]
    for a, b in zip(attend(q, *expanded), attend(q, *(t.contiguous() for t in expanded)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [(10, 0), (10, -5), (None, 0)])
def test_hidden_nan_changes_nothing(window: tuple[int | None, int]) -> None:
    """NaN in keys and values that no query sees, beside ones that some do."""
    q, k, v = drawn(1, 400, 2, 2, 128)
    q = q[:, :100]
    left, right = window
    first = 0 if left is None else 300 - left
    end = 400 + right
    want = attend(q, k, v, window=window)
    for t in (k, v):
        t[:, :first] = NAN
        t[:, end:] = NAN
    for a, b in zip(attend(q, k, v, window=window), want, strict=True):
        assert torch.equal(a, b)


def test_nan_of_other_sequences_changes_nothing() -> None:
    q, k, v = (t[0] for t in drawn(1, 400, 2, 2, 128))
    cu = torch.tensor([0, 130, 131, 300], dtype=torch.int32, device="cuda")
    options = {"return_lse": True, "backend": "hopper", "causal": True}
    want = warploom.attention_varlen(q, k, v, cu, **options)
    for t in (q, k, v):
        t[:130] = NAN
        t[131:] = NAN
    found = warploom.attention_varlen(q, k, v, cu, **options)
    for a, b, rows in ((found[0], want[0], 0), (found[1], want[1], 1)):
        assert torch.equal(a.select(rows, 130), b.select(rows, 130))
        assert not b.isnan().any()


@pytest.mark.parametrize("queries", [5, 300])
def test_nan_of_a_query_stays_in_its_row(queries: int) -> None:
    """Among heads of one tile, too."""
    q, k, v = drawn(1, 3000, 8, 2, 128)
    q = q[:, :queries].clone()
    want = attend(q, k, v)
    q[0, 3, 2] = NAN
    found = attend(q, k, v)
    assert found[0][0, 3, 2].isnan().all() and found[1][0, 2, 3].isnan()
    found[0][0, 3, 2], found[1][0, 2, 3] = want[0][0, 3, 2], want[1][0, 2, 3]
    assert all(map(torch.equal, found, want))


def test_visible_nan_stays() -> None:
    q, k, v = drawn(1, 200, 1, 1, 128)
    v[0, 150, 0, 7] = NAN
    out, _ = attend(q, k, v, causal=True)
    assert out[0, 150:, 0, 7].isnan().all() and not out[0, :128].isnan().any()
    k[0, 150, 0, 7] = NAN
    out, lse = attend(q, k, v, causal=True)
    assert out[0, 150:].isnan().all() and lse[0, 0, 150:].isnan().all()


def test_scores_far_below_zero() -> None:
    q, k, v = drawn(1, 130, 1, 1, 128)
    q, k = q.abs() * 130, -k.abs() * 130
    out, lse = attend(q, k, v)
    want = warploom.attention(q.double(), k.double(), v.double(), backend="reference")
    assert lse.max() < -5e4
    torch.testing.assert_close(out.double(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("rise", [0.5, 2.0, 7.5, 8.5, 40.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_maxima_that_climb(rise: float, dim: int) -> None:
    """Scores that grow by so many powers of two each 64 keys, forwards or backwards: O is rescaled now and then."""
    q, k, v = drawn(1, 1500, 2, 2, dim, torch.float16)
    steps = rise * torch.arange(1500, device="cuda").div(64, rounding_mode="floor")
    for keys in (steps, steps.flip(0)):
        q[..., 0], k[..., 0] = 1.0, keys[None, :, None].half()
        q[..., 1:] *= 0.1
        for causal in (False, True):
            out, lse = attend(q, k, v, scale=math.log(2), causal=causal)
            options = {"scale": math.log(2), "causal": causal, "return_lse": True, "backend": "reference"}
            want, want_lse = warploom.attention(q.double(), k.double(), v.double(), **options)
            torch.testing.assert_close(out.double(), want, rtol=4e-3, atol=4e-3)
            torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-5, atol=1e-3)


def test_values_of_one_give_one() -> None:
    q, k, v = drawn(2, 700, 4, 1, 128)
    out, _ = attend(q, k, torch.ones_like(v), causal=True)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=8e-3, atol=0)


REPEATED: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (200, 100)}}


@pytest.mark.parametrize("name", [*REPEATED, "head_dim 64", "few queries"])
def test_a_thousand_equal_runs(name: str) -> None:
    q, k, v = drawn(2, 3000 if name == "few queries" else 1000, 8, 2, 64 if name == "head_dim 64" else 128)
    q = q[:, :5] if name == "few queries" else q  # several heads a tile, and tiles split
    want = attend(q, k, v, **REPEATED.get(name, {}))
    for _ in range(1000):
        for a, b in zip(attend(q, k, v, **REPEATED.get(name, {})), want, strict=True):
            assert torch.equal(a, b)


def test_packed_bits_do_not_depend_on_the_order_of_tiles() -> None:
    lengths = torch.tensor([0, 700, 701, 1500, 1500, 2800], dtype=torch.int32, device="cuda")
    q, k, v = (t[0] for t in drawn(1, 3000, 8, 2, 128))
    run = lambda: warploom.attention_varlen(q, k, v, lengths, causal=True, return_lse=True, backend="hopper")  # noqa: E731
    want = run()
    for _ in range(1000):
        for a, b in zip(run(), want, strict=True):
            assert torch.equal(a, b)


def test_more_than_two_to_the_31_elements() -> None:
    batch, seqlen, heads, dim = 34, 16384, 32, 128
    q, k, v = (torch.empty(batch, seqlen, heads, dim, device="cuda", dtype=torch.float16) for _ in range(3))
    for t in (q, k, v):
        for b in range(batch):
            t[b].normal_()
    out, lse = attend(q, k, v, window=(100, 0))
    want, want_lse = attend(*(t[-1:].clone() for t in (q, k, v)), window=(100, 0))
    assert torch.equal(out[-1:], want) and torch.equal(lse[-1:], want_lse)


def test_packed_more_than_two_to_the_31_elements() -> None:
    tokens, last, heads, dim = 33 * 16384, 5000, 32, 128
    q, k, v = (torch.empty(tokens, heads, dim, device="cuda", dtype=torch.float16) for _ in range(3))
    for t in (q, k, v):
        for part in t.split(16384):
            part.normal_()
    cu = torch.tensor([*range(0, tokens, 16384), tokens - last, tokens], dtype=torch.int32, device="cuda")
    options = {"window": (100, 0), "return_lse": True, "backend": "hopper"}
    out, lse = warploom.attention_varlen(q, k, v, cu, max_seqlen_q=16384, max_seqlen_k=16384, **options)
    want, want_lse = attend(*(t[None, -last:].clone() for t in (q, k, v)), window=(100, 0))
    torch.testing.assert_close(out[-last:], want[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse[:, -last:], want_lse[0], rtol=1e-5, atol=1e-4)


def test_one_query_of_groups_and_two_to_the_31_elements_of_keys() -> None:
    keys, kv = 2**20, 17
    q = torch.randn(1, 1, 2 * kv, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.empty(1, keys, kv, 128, device="cuda", dtype=torch.float16).normal_() for _ in range(2))
    out, lse = attend(q, k, v)
    for head in (0, kv - 1):
        pair = slice(2 * head, 2 * head + 2)
        want, want_lse = attend(q[:, :, pair], *(t[:, :, head : head + 1].clone() for t in (k, v)))
        torch.testing.assert_close(out[:, :, pair], want, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(lse[:, pair], want_lse, rtol=1e-5, atol=1e-5)


def test_rows_far_apart() -> None:
    seqlen, stride = 100, 2**25
    storage = torch.empty(seqlen * stride, device="cuda", dtype=torch.float16)
    far = [storage.as_strided((1, seqlen, 1, 64), (0, stride, 64, 1), 64 * n).normal_() for n in range(3)]
    for a, b in zip(attend(*far, causal=True), attend(*(t.contiguous() for t in far), causal=True), strict=True):
        assert torch.equal(a, b)


def test_seventy_thousand_batches() -> None:
    q, k, v = drawn(70000, 3, 1, 1, 64)
    found = attend(q, k, v, causal=True)
    for a, b in zip(found, attend(*(t[-5:].clone() for t in (q, k, v)), causal=True), strict=True):
        assert torch.equal(a[-5:], b)


def test_graph_replays() -> None:
    q, k, v = drawn(2, 512, 4, 2, 128)
    few, keys, values = drawn(1, 9000, 4, 2, 128)
    cu = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        packed = warploom.attention_varlen(q[0], k[0], v[0], cu, causal=True, return_lse=True, backend="hopper")
        return [*attend(q, k, v, causal=True), *attend(few[:, :100], keys, values), *packed]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for middle in (100, 300, 512, 7):
        cu[1] = middle
        for t in (q, k, v, few, keys, values):
            t.normal_()
        graph.replay()
        for a, b in zip(found, step(), strict=True):
            assert torch.equal(a, b), middle


FRESH = """
import sys
import torch
import warploom

def drawn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

q, k, v = drawn(1, 300, 8, 128), drawn(1, 3000, 2, 128), drawn(1, 3000, 2, 128)
cu, cu_k = (torch.tensor(starts, dtype=torch.int32, device="cuda") for starts in ([0, 100, 300], [0, 1, 3000]))
attend, packed = warploom.attention, warploom.attention_varlen
calls = [(attend, (q, k, v), {"causal": True}), (attend, (q[:, :3], k, v), {}), (packed, (q[0], k[0], v[0], cu, cu_k), {})]
if sys.argv[1] == "prepared":
    for _, tensors, options in calls:
        warploom.prepare(*tensors, backend="hopper", **options)
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
try:
    with torch.cuda.graph(graph, stream=stream):
        found = [call(*tensors, backend="hopper", **options) for call, tensors, options in calls]
except RuntimeError as error:
    print("refused:", error)
    sys.exit()
for t in (q, k, v):
    t.normal_()
graph.replay()
for (call, tensors, options), out in zip(calls, found):
    assert torch.equal(out, call(*tensors, backend="hopper", **options))
print("replayed")
"""


@pytest.mark.parametrize(("how", "words"), [("prepared", "replayed"), ("not prepared", "a capturing stream cannot do")])
def test_a_fresh_process_captures_what_it_prepared(how: str, words: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FRESH, how], capture_output=True, text=True, check=False)
    assert words in ran.stdout, ran.stdout + ran.stderr


def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of both batch entries as three sequences."""
    cu = torch.tensor([0, 100, 700, 1024], dtype=torch.int32, device="cuda")
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    return warploom.attention_varlen(*packed, cu, causal=True, return_lse=True, backend="hopper")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["dense", "split", "packed"])
def test_streams_do_not_mix(kind: str) -> None:
    """Inputs come late on each stream; a launch, a workspace or a counter of another stream would show."""
    run: dict[str, Any] = {
        "dense": lambda q, k, v: attend(q, k, v, causal=True),
        "split": lambda q, k, v: attend(q[:, :70], k, v),
        "packed": attend_packed,
    }
    attend_it = run[kind]
    streams = [torch.cuda.Stream() for _ in range(8)]
    inputs = [drawn(2, 512, 4, 2, 128) for _ in streams]
    want = [attend_it(*x) for x in inputs]
    torch.cuda.synchronize()
    found = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            late = [torch.empty_like(t) for t in x]
            torch.cuda._sleep(2_000_000)
            for a, b in zip(late, x, strict=True):
                a.copy_(b)
            found.append(attend_it(*late))
    torch.cuda.synchronize()
    for a, b in zip(found, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_synchronisation() -> None:
    q, k, v = drawn(2, 500, 4, 2, 128)
    cu = torch.tensor([0, 100, 500], dtype=torch.int32, device="cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            attend(q, k, v, causal=True)
            warploom.attention_varlen(q[0], k[0], v[0], cu, causal=True, backend="hopper")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_whole(dynamic: bool | None) -> None:
    call = lambda q, k, v: warploom.attention(q, k, v, causal=True, backend="hopper")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    q, k, v = (t.requires_grad_() for t in drawn(2, 130, 4, 2, 128))
    out = compiled(q, k, v)
    assert torch.equal(out, attend(q, k, v, causal=True)[0])
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)),
        torch.autograd.grad(attend(q, k, v, causal=True)[0].sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_compiles_packed_calls_whole() -> None:
    q, k, v = (t[0] for t in drawn(1, 300, 4, 2, 128))
    cu = torch.tensor([0, 130, 300], dtype=torch.int32, device="cuda")
    call = lambda q, k, v, cu: warploom.attention_varlen(q, k, v, cu, causal=True, backend="hopper")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True)
    for middle in (130, 7, 299):
        cu[1] = middle
        assert torch.equal(compiled(q, k, v, cu), call(q, k, v, cu))


def test_backward_matches_triton_on_its_own_forward() -> None:
    """The next implementation's backward takes this forward's out and lse."""
    q, k, v = (t.requires_grad_() for t in drawn(1, 500, 4, 2, 128))
    found, want = (
        torch.autograd.grad(warploom.attention(q, k, v, causal=True, backend=b).float().pow(2).sum(), (q, k, v))
        for b in ("hopper", "triton")
    )
    for a, b in zip(found, want, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 2e-2


def test_default_dispatch_and_scale_of_zero() -> None:
    q, k, v = drawn(1, 200, 4, 2, 128)
    assert "hopper" in str(warploom.explain(q, k, v, causal=True)).split("runs", 1)[1].splitlines()[0]
    assert torch.equal(warploom.attention(q, k, v, causal=True), attend(q, k, v, causal=True)[0])
    torch.testing.assert_close(
        attend(q, k, v, scale=0.0)[0].float(),
        v.float().mean(1, True).repeat_interleave(2, 2).expand(1, 200, 4, 128),
        rtol=1e-2,
        atol=1e-2,
    )


def test_checkpointed_layers_of_a_first_step() -> None:
    """A launcher that the first two layers left runs them again: a sink and a mask came back in another order."""
    q, k, v = (t.requires_grad_() for t in drawn(2, 130, 4, 2, 128))
    mask, sink = warploom.masks.Document([60, 70]), torch.randn(4, device="cuda")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return warploom.attention(q, k, v, mask=mask, sink=sink, backend="hopper")

    want = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    dispatch.strict(False)  # forgets the launchers
    outs = [torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False).sum() for _ in range(4)]
    for out in outs:
        for a, b in zip(torch.autograd.grad(out, (q, k, v)), want, strict=True):
            assert torch.allclose(a, b, rtol=0.01, atol=0.01)  # dq is added up in no order
