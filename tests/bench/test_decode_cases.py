"""The decode suite as on a GPU, on a CPU: what is compared, that wrong results are seen, and what its bars make of rows."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.bench import fake_flashinfer
from warploom import KVCache
from warploom.bench import captured, decode, decode_bars, decode_prefix, flashinfer_peer, peers, prefill, report, tables
from warploom.bench.bars import BARS
from warploom.bench.decode_shapes import FP8_SHAPES, LATENT_SHAPES, SHAPES, Shape, check, in_pages, latent_inputs
from warploom.bench.harness import Timer, WrongResult, compare

CPU = torch.device("cpu")
SHAPE = Shape(3, 64, 8, 2, 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device of type cuda whose tensors are on the CPU, and a stand-in for flashinfer."""
    draw = Shape.draw
    monkeypatch.setattr(Shape, "draw", lambda shape, device: draw(shape, CPU))
    monkeypatch.setattr(decode, "latent_inputs", lambda *sizes: latent_inputs(*sizes[:-1], CPU))
    monkeypatch.setattr(captured, "capture", lambda call: call)
    of = peers.sdpa_of
    monkeypatch.setattr(peers, "sdpa_of", lambda backend, causal=False: of(None, causal))
    monkeypatch.setattr(flashinfer_peer, "_workspace", lambda device: torch.zeros(16, dtype=torch.uint8))
    return fake_flashinfer.install(monkeypatch)


def rows(build: Any, *arguments: Any) -> dict[str, dict[str, Any]]:
    device: Any = SimpleNamespace(type="cuda")
    timer = Timer(CPU, seconds=0.0)
    timer.copy_gb_s = 1000.0
    return {measure: compare(comparison, timer) for measure, comparison in build(*arguments, device)}


def test_contenders_of_one_query(gpu: Any) -> None:
    row = rows(decode._build, SHAPE, (16,))["graph"]
    found = row["contenders"]
    assert set(found) == {
        "warploom", "warploom, hopper", "warploom, pages of 16", "cuDNN", "FA2", "FlashInfer", "FlashInfer, tensor cores"
    }  # fmt: skip
    assert "refused" in found.pop("warploom, hopper")  # on a CPU
    assert all(each["ms"] > 0 and each["error"] < 1e-2 for each in found.values()), found
    assert row["floor_ms"] == pytest.approx(3.5e-3 + SHAPE.numbers * 4 / 1e12 * 1e3)


def test_contenders_of_several_queries(gpu: Any) -> None:
    found = rows(decode._build, Shape(2, 64, 8, 2, 32, queries=4), (16,))["graph"]["contenders"]
    assert "refused" in found.pop("warploom, hopper")
    assert set(found) == {"warploom", "warploom, pages of 16", "cuDNN, masked", "FA2", "FlashInfer"}
    assert all(each.get("ms", 0) > 0 for name, each in found.items() if name != "FA2"), found


def test_contenders_of_other_cases(gpu: Any) -> None:
    ragged = rows(decode._build_ragged, SHAPE)["graph"]["contenders"]
    assert "refused" in ragged.pop("warploom, hopper")
    assert {"warploom, uniform", "cuDNN, masked", "efficient, masked", "FlashInfer", "FlashInfer, tensor cores"} < set(ragged)
    fp8 = rows(decode._build_fp8, SHAPE)["graph, FP8 cache"]["contenders"]
    assert set(fp8) == {"warploom", "warploom, bf16", "cuDNN", "FA2"}
    assert fp8["warploom"]["error"] > 0.005 and fp8["warploom, bf16"]["error"] < 1e-3
    amounts = {name: each["gb_s"] * each["ms"] for name, each in fp8.items()}
    assert amounts["warploom, bf16"] == pytest.approx(SHAPE.numbers * 4 / 1e6)
    assert amounts["warploom"] == pytest.approx(SHAPE.numbers * (1 + 4 / SHAPE.head_dim) / 1e6)
    latent = rows(decode._build_latent, Shape(2, 64, 4, 1, 40), 32, 16)["graph, latent"]["contenders"]
    assert set(latent) == {"warploom", "warploom, pages of 16", "FlashInfer"}
    chunk = rows(decode._build_prefill, Shape(2, 64, 8, 2, 32, queries=20))["graph, prefill over pages"]["contenders"]
    ours = {"warploom", "warploom, contiguous", "warploom, FP8 pages"}
    assert set(chunk) == {*ours, "cuDNN, masked", "FA2", "FA4", "FlashInfer"}
    assert chunk.pop("FA4") == {"refused": "flash_attn.cute is not installed"}
    assert chunk["warploom, FP8 pages"]["error"] > 0.005 and chunk["warploom"]["error"] < 1e-3
    for found in (ragged, fp8, latent, chunk):
        assert all(each.get("ms", 0) > 0 for name, each in found.items() if name != "FA2" or found is fp8), found


@pytest.mark.parametrize("shared", [0, 32])
def test_contenders_of_prefixes(shared: int, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences begin in the same pages, which hold the same keys; the floor has those once."""
    given, decoded = [], warploom.decode

    def noted(q: Tensor, cache: Any, **keywords: Any) -> Any:
        if "prefix" in keywords:
            given.append((cache, keywords["prefix"].keys.tolist()))
        return decoded(q, cache, **keywords)

    monkeypatch.setattr(warploom, "decode", noted)
    ((measure, row),) = rows(decode_prefix.build_prefix, SHAPE, shared, 16, decode.LATENCY, decode._add_flashinfer).items()
    assert measure == ("graph, shared prefix" if shared else "graph, nothing shared")
    found = row["contenders"]
    ours = {"warploom", "warploom, plain", "warploom, found in the call"}
    assert set(found) == {*ours, "FlashInfer", "FlashInfer, tensor cores"}
    assert all(each["error"] < 1e-5 for each in found.values())
    assert all(keys == [0, shared, shared, shared] for _, keys in given) and given
    pages = given[0][0]
    assert len(pages.block_table.unique()) == 3 * 4 - 2 * shared // 16
    once = SHAPE.numbers * 4 - 2 * 2 * shared * 2 * 32 * 4
    amounts = {name: each["gb_s"] * each["ms"] * 1e6 for name, each in found.items()}
    assert row["bytes"] == once == pytest.approx(amounts["warploom"])
    assert SHAPE.numbers * 4 == pytest.approx(amounts["warploom, plain"]) == pytest.approx(amounts["FlashInfer"])


def test_contenders_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    of = peers.sdpa_of
    monkeypatch.setattr(peers, "sdpa_of", lambda backend, causal=False: of(None, causal))
    monkeypatch.setattr(captured, "capture", lambda call: call)
    asked, attention = [], warploom.attention

    def noted(*args: Any, **keywords: Any) -> Any:
        asked.append(keywords.get("batch_invariant"))
        return attention(*args, **keywords)

    monkeypatch.setattr(warploom, "attention", noted)
    shape: Any = prefill.Shape(2, 64, 2, 16)
    monkeypatch.setattr(prefill.Shape, "draw", lambda shape, device: [torch.randn(2, 64, 2, 16) for _ in range(4)])
    found = rows(prefill.build_invariant, shape)["graph, batch invariant"]["contenders"]
    assert set(found) == {"warploom", "warploom, plain"} and all(each["ms"] > 0 for each in found.values())
    assert set(asked) == {True, None}
    monkeypatch.setattr(torch, "randn", functools.partial(_on_the_cpu, torch.randn))
    found = rows(prefill.build_short, prefill.Crossed(2, 32, 7, 2, 16))["graph, few keys"]["contenders"]
    assert set(found) == {"warploom", "cuDNN", "FA2", "FA4"} and "refused" in found.pop("FA4")
    assert all(each["ms"] > 0 for each in found.values()), found


def _on_the_cpu(draw: Any, *shape: int, device: Any = None, dtype: Any = None) -> Tensor:
    return draw(*shape)


def test_a_wrong_peer_is_seen_and_an_absent_one_says_so(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
            return super().run(q, (paged_kv_cache[0], paged_kv_cache[1].flip(1)))

    monkeypatch.setattr(gpu, "BatchDecodeWithPagedKVCacheWrapper", Reversed)
    assert "wrong" in rows(decode._build, SHAPE, (16,))["graph"]["contenders"]["FlashInfer"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = rows(decode._build, SHAPE, (16,))["graph"]["contenders"]["FlashInfer"]["refused"]
    assert found.startswith("flashinfer does not import here (pip install flashinfer-python)")
    assert "ms" in rows(decode._build_ragged, SHAPE)["graph"]["contenders"]["warploom"]


def test_heads_that_flashinfer_refuses_without_tensor_cores(gpu: Any) -> None:
    found = rows(decode._build, Shape(2, 64, 10, 2, 16), (16,))["graph"]["contenders"]
    assert found["FlashInfer"] == {"refused": "RuntimeError: Unsupported group_size: 5"}
    assert found["FlashInfer, tensor cores"]["ms"] > 0


def test_a_result_of_other_keys_is_wrong() -> None:
    q, cache = Shape(3, 40, 4, 2, 16, queries=3).draw(CPU)
    cache.lengths.copy_(torch.tensor([40, 30, 7]))
    out = warploom.decode(q, cache)
    assert check(q, cache, out) < 1e-5
    assert check(q, cache, warploom.decode(q, cache, scale=0.2), scale=0.2) < 1e-5
    with pytest.raises(WrongResult, match=r"more than 0\.01"):
        check(q, cache, out.flip(1))
    with pytest.raises(WrongResult):
        check(q, cache, out * float("nan"))
    short = KVCache(cache.k, cache.v, cache.lengths - 1)
    with pytest.raises(WrongResult):
        check(q, cache, warploom.decode(q, short))


@pytest.mark.parametrize("latent", [False, True])
def test_pages_hold_the_same(latent: bool) -> None:
    q, cache = latent_inputs(2, 64, 4, 16, 8, CPU) if latent else SHAPE.draw(CPU)
    pages = in_pages(cache, 16)
    assert pages.latent == latent
    torch.testing.assert_close(warploom.decode(q, pages), warploom.decode(q, cache))


def test_pages_as_flashinfer_takes_them() -> None:
    """Lengths on a page's border, within one, and of a single key."""
    _, cache = SHAPE.draw(CPU)
    pages = in_pages(cache, 16)
    pages.lengths.copy_(torch.tensor([32, 33, 1]))
    indptr, indices, last = flashinfer_peer.pages_of(pages)
    assert indptr.tolist() == [0, 2, 5, 6] and last.tolist() == [16, 1, 1]
    assert indices.tolist() == [*pages.block_table[0, :2], *pages.block_table[1, :3], pages.block_table[2, 0]]
    assert all(t.dtype == torch.int32 for t in (indptr, indices, last))


def test_cases() -> None:
    """Every shape that the bars ask for, under names that tell them apart, with the seconds each takes."""
    cases = decode.decode_cases(False)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) == len(SHAPES) + len(FP8_SHAPES) + len(LATENT_SHAPES) + 4 + 2 + 4 + 3 + 9
    for keys in ("2k", "4k", "8k", "16k", "64k"):
        assert f"B1 KV{keys} 32/8" in names
    for other in ("B2 KV16k 64/1", "B8 KV8k 16/2 D64", "B4 KV8k 16/8 D256", "B128 KV1k 32/8", "B32 KV4k 40/8"):
        assert other in names
    assert {"prefix, B64 KV8704 32/8, 8192 shared", "prefix, B16 KV1k 32/8, nothing shared"} <= set(names)
    assert {"few keys, B4 4096x77 H16 D64", "one set of bits, D256 S4096 causal"} <= set(names)
    assert {"FP8 cache, B1 KV64k 16/8 D256", "latent, B64 KV4k 128/1", "B4 KV8k 32/8, 4 queries"} <= set(names)
    reckoned = {case.name: case.seconds or 0.0 for case in cases}
    assert min(reckoned.values()) > 0
    # The captured calls of bf16 caches fit a budget of 100.
    assert sum(n for name, n in reckoned.items() if "," not in name) <= 100


def row(case: str, amount: float = 1e6, **ms: float) -> dict[str, Any]:
    names = {"pages": "pages of 16", "even": "uniform", "bf16": "bf16", "plain": "plain", "dense": "contiguous"}
    named = {"ours": "warploom", **{short: f"warploom, {name}" for short, name in names.items()}}
    contenders = {named.get(name, name): {"ms": value, "tflops": 100.0 / value} for name, value in ms.items()}
    return {"suite": "decode", "case": case, "bytes": amount, "copy_gb_s": 4000.0, "contenders": contenders}


def test_bars_of_captured_calls() -> None:
    """A peer near the floor need only be reached but for a hundredth; the rate counts where there are bytes enough."""
    near = decode_bars.floor(row("", 4e8)) * 1.03
    found = [
        row("B1 KV8k 32/8", ours=0.02, cuDNN=0.026, FlashInfer=0.024, pages=0.021),
        row("B16 KV8k 32/8", 4e8, ours=near / 0.992, cuDNN=near, pages=near / 0.992 * 1.02),
        row("B16 of 512 to 16k, ragged", 4e8, ours=0.2, even=0.19, FlashInfer=0.3),
        {**row("B1 KV2k 32/8", cuDNN=0.01), "contenders": {"warploom": {"wrong": "far away"}, "cuDNN": {"ms": 0.01}}},
    ]
    bars = {what: (least, value) for what, least, value in BARS["decode", "graph"](found)}
    worst = bars["the best peer over ours, the worst (0.99 where it is within 4 % of the floor)"]
    assert worst == (1.0, pytest.approx(0.992 / 0.99))
    assert bars["the best peer over ours, mean without ragged batches"][1] == pytest.approx((1.2 * 0.992) ** 0.5)
    assert bars["cuDNN over ours, B1 KV8k 32/8"] == (1.25, pytest.approx(1.3))
    assert bars["the floor over ours, the worst from 64 MB of keys and values on"][1] == pytest.approx(0.992 / 1.03)
    assert bars["contiguous over pages of 16, the worst"][1] == pytest.approx(0.02 / 0.021)
    assert bars["uniform over ragged, the same bytes"] == (1 / 1.05, pytest.approx(0.95))


def test_bars_of_other_caches() -> None:
    fp8 = [row("FP8 cache, a", ours=0.5, bf16=1.0), row("FP8 cache, b", ours=0.7, bf16=1.0)]
    assert BARS["decode", "graph, FP8 cache"](fp8)[0][1:] == (1 / 0.6, pytest.approx(1 / 0.7))
    # 500 TFLOP/s of 560 (row() has 100 over the time); 4e9 bytes take 1.0035 ms at the least.
    latent = [row("latent, a", ours=0.2), row("latent, b", ours=0.3)]
    assert BARS["decode", "graph, latent"](latent[:1])[0][2] == pytest.approx(500 / 560)
    assert BARS["decode", "graph, latent"](latent)[0][2] == pytest.approx(100 / 0.3 / 560)
    assert BARS["decode", "graph, latent"]([row("latent, c", 4e9, ours=1.2)])[0][2] == pytest.approx(1.0035 / 1.2 / 0.85)
    assert BARS["decode", "graph"]([])[0][2] is None


def test_bars_of_prompts() -> None:
    """A row counts where FA4 ran: cuDNN alone, which reads a mask, would meet any bar."""
    found = [
        row("prefill, a", ours=1.0, dense=0.75, FA4=0.9, FlashInfer=0.5, **{"cuDNN, masked": 2.0}),
        row("prefill, b", ours=1.0, **{"cuDNN, masked": 0.5}),
        row("prefill, c", ours=1.0, FA4=0.95),
    ]
    bars = BARS["decode", "graph, prefill over pages"](found)
    assert [value for _, _, value in bars] == pytest.approx([0.9, 1.2])
    assert [value for _, _, value in BARS["decode", "graph, prefill over pages"](found[1:2])] == [None, None]
    assert BARS["decode", "graph, prefill over pages"](found[1:])[0][2] == pytest.approx(0.95)
    few = [row("few keys, a", ours=1.0, FA4=0.9, cuDNN=0.8), row("few keys, b", ours=1.0, FA4=2.0, cuDNN=3.0)]
    assert BARS["decode", "graph, few keys"](few)[0][1:] == (1.0, pytest.approx(0.8))
    whole = [{**row("one", ours=1.1, plain=1.0), "head_dim": dim} for dim in (64, 128)]
    bars = BARS["decode", "graph, batch invariant"]([*whole, {**row("two", ours=1.2, plain=1.0), "head_dim": 256}])
    assert [each[1:] for each in bars] == [(1 / 1.08, pytest.approx(1 / 1.1)), (1 / 1.25, pytest.approx(1 / 1.2))]


def test_bars_of_prefixes_and_of_the_host() -> None:
    shared = [row("prefix, a", ours=1.0, plain=3.4), row("prefix, b", ours=1.0, plain=5.0)]
    assert BARS["decode", "graph, shared prefix"](shared)[0][1:] == (4.0, pytest.approx(3.4))
    apart = [row("prefix, small", 1e6, ours=2.0, plain=1.0), row("prefix, large", 1e8, ours=1.0, plain=0.99)]
    assert BARS["decode", "graph, nothing shared"](apart)[0][1:] == (0.98, pytest.approx(0.99))
    host = [row("B1 KV8k 32/8", ours=0.010, pages=0.020, cuDNN=0.03)]
    assert BARS["decode", "host in a row"](host)[0][1:] == (1.0, pytest.approx(0.75))
    for measure in ("graph, shared prefix", "graph, nothing shared", "host in a row", "graph, few keys"):
        assert BARS["decode", measure]([row("none", cuDNN=1.0)])[0][2] is None


def test_the_floor_stands_in_the_table() -> None:
    shown = {**row("B1 KV8k 32/8", ours=0.02, cuDNN=0.026), "floor_ms": 0.012}
    lines = tables.timed([shown, row("B1 KV2k 32/8", ours=0.01)], compared=True).splitlines()
    assert lines[0].endswith("| cuDNN | floor | floor over ours |")
    assert lines[2].endswith("| 12.0 us | 0.60 |") and lines[3].endswith("| – | – |")


def test_every_measure_of_the_suite_has_a_title() -> None:
    measures = {measure for suite, measure in BARS if suite == "decode"}
    assert {("decode", measure) for measure in measures} <= set(report.MEASURES)
