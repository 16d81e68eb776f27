"""decode() against torch's attention kernels on one GPU: writes a JSON and prints a table.

    python benchmarks/decode.py [--repeats 25] [--out benchmarks/results/decode.json]

bf16, head_dim 128, one query a sequence. Every case is captured in a CUDA graph and replayed between events, peers
interleaved, after L2 is emptied by reading 256 MiB ("clean") or by writing them ("dirty": the write-back of the flush then
falls into the timed call). "layers" is a graph of 32 calls on 32 caches, with and without appending the token, per call.
"eager" is wall time a call, calls queued without waiting. Results are compared with fp32 arithmetic first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from warploom import KVCache, PagedKVCache, decode

# name: batch, keys, heads_q, heads_kv
SHAPES = {
    "B1 8k 32/8": (1, 8192, 32, 8),
    "B1 64k 32/8": (1, 65536, 32, 8),
    "B16 8k 32/8": (16, 8192, 32, 8),
    "B64 4k 32/8": (64, 4096, 32, 8),
    "B8 32k 64/8": (8, 32768, 64, 8),
}
HEAD_DIM, LAYERS = 128, 32
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
Cache = KVCache | PagedKVCache
Call = Callable[[], Any]


def draw(batch: int, keys: int, heads_q: int, heads_kv: int) -> tuple[Tensor, KVCache]:
    q = torch.randn(batch, 1, heads_q, HEAD_DIM, device="cuda").bfloat16()
    shape = (batch, keys, heads_kv, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, KVCache(k, v, torch.full((batch,), keys, dtype=torch.int32, device="cuda"))


def in_pages(cache: KVCache, page_size: int) -> PagedKVCache:
    """The same keys in pages of random order."""
    batch, keys, heads, dim = cache.k.shape
    order = torch.randperm(batch * keys // page_size, device="cuda")
    pages = [torch.empty((len(order), page_size, heads, dim), device="cuda", dtype=cache.k.dtype) for _ in range(2)]
    for pool, held in zip(pages, (cache.k, cache.v), strict=True):
        pool[order] = held.view(-1, page_size, heads, dim)
    return PagedKVCache(*pages, order.view(batch, -1).int(), cache.lengths)


def sdpa(q: Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, cache.k, cache.v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def compare(out: Tensor, q: Tensor, cache: KVCache) -> None:
    """Against fp32 arithmetic on some sequences."""
    for b in sorted({0, q.shape[0] // 2, q.shape[0] - 1}):
        length = int(cache.lengths[b])
        k, v = (t[b, :length].float() for t in (cache.k, cache.v))
        rows = q[b, 0].float().view(k.shape[1], -1, HEAD_DIM)
        weights = (torch.einsum("hgd,nhd->hgn", rows, k) * HEAD_DIM**-0.5).softmax(-1)
        want = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        error = float((out[b, 0].float() - want).norm() / want.norm())
        assert error < 6e-3, f"sequence {b}: relative error {error}"


def capture(call: Call) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.result = call()  # type: ignore[attr-defined]  # keeps the graph's output
    return graph


class Bench:
    """Interleaved timing with L2 emptied before every call."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.scratch = torch.zeros(2**26, dtype=torch.int32, device="cuda")

    def flush(self, clean: bool) -> None:
        if clean:
            self.scratch.view(-1, 1024).amax(1)
        else:
            self.scratch.zero_()

    def __call__(self, calls: dict[str, Call], clean: bool = True, each: int = 1) -> dict[str, dict[str, float]]:
        """Microseconds of each call, median, p20 and p80, divided by ``each``."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(self.repeats):
            for name, call in calls.items():
                self.flush(clean)
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                events[name].append((start, stop))
        torch.cuda.synchronize()
        return {name: spread([1000 * a.elapsed_time(b) / each for a, b in pairs]) for name, pairs in events.items()}


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=5)
    return {"us": round(statistics.median(times), 2), "p20": round(cuts[0], 2), "p80": round(cuts[3], 2)}


def wall(calls: dict[str, Call], count: int = 300, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Wall microseconds a call of calls queued one behind the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: spread(t) for name, t in times.items()}


def show(title: str, rows: dict[str, dict[str, float]], gigabytes: float | None = None) -> None:
    parts = [
        f"{name} {t['us']:.1f}" + (f" ({gigabytes / t['us'] * 1e6:.0f} GB/s)" if gigabytes else "") for name, t in rows.items()
    ]
    print(f"{title}: " + " | ".join(parts), flush=True)


def floors(bench: Bench) -> dict[str, Any]:
    """What bounds any kernel here: reading, copying, and an empty graph between the events."""
    a = torch.randn(2**29, device="cuda").bfloat16()
    b = torch.empty_like(a)
    small = torch.zeros(32, device="cuda")
    graphs = {
        "copy": capture(lambda: b.copy_(a)),
        "read": capture(lambda: a.view(-1, 4096).amax(1)),
        "tiny": capture(small.zero_),
    }
    times = bench({name: graph.replay for name, graph in graphs.items()})
    size = a.numel() * 2 / 1e3
    return {
        "copy_gb_s": 2 * size / times["copy"]["us"],
        "read_gb_s": size / times["read"]["us"],
        "tiny_us": times["tiny"]["us"],
    }


def shape_case(bench: Bench, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    q, cache = draw(*shape)
    graphs = {"contiguous": capture(lambda: decode(q, cache))}
    graphs["contiguous"].replay()
    compare(graphs["contiguous"].result, q, cache)  # type: ignore[attr-defined]
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            graphs[name] = capture(lambda: sdpa(q, cache))
    paged = {f"pages of {size}": in_pages(cache, size) for size in (16, 64)}
    for name, pages in paged.items():
        graphs[name] = capture(lambda pages=pages: decode(q, pages))
        graphs[name].replay()
        same = torch.equal(graphs[name].result, graphs["contiguous"].result)  # type: ignore[attr-defined]
        assert same, f"{name}: other bits than the contiguous cache"
    replays = {name: graph.replay for name, graph in graphs.items()}
    size = 4 * shape[0] * shape[1] * shape[3] * HEAD_DIM
    return {"bytes": size, "clean": bench(replays), "dirty": bench(replays, clean=False)}


def ragged_case(bench: Bench) -> dict[str, Any]:
    """Lengths of 512 … 16384 against a masked call over all 16384."""
    q, cache = draw(16, 16384, 32, 8)
    lengths = torch.logspace(9, 14, 16, base=2.0).int()[torch.randperm(16)]
    cache.lengths.copy_(lengths)
    mask = (torch.arange(16384, device="cuda") < cache.lengths[:, None])[:, None, None]
    graphs = {"contiguous": capture(lambda: decode(q, cache))}
    graphs["contiguous"].replay()
    compare(graphs["contiguous"].result, q, cache)  # type: ignore[attr-defined]
    pages = in_pages(cache, 16)
    graphs["pages of 16"] = capture(lambda: decode(q, pages))
    for name, backend in (("cudnn, masked", SDPBackend.CUDNN_ATTENTION), ("efficient, masked", SDPBackend.EFFICIENT_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                graphs[name] = capture(lambda: sdpa(q, cache, mask))
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    size = 4 * int(lengths.sum()) * 8 * HEAD_DIM
    return {"bytes": size, "clean": bench({name: graph.replay for name, graph in graphs.items()})}


def layers_case(bench: Bench) -> dict[str, Any]:
    layers = [draw(*SHAPES["B1 8k 32/8"]) for _ in range(LAYERS)]
    token = torch.randn(1, 1, 8, HEAD_DIM, device="cuda").bfloat16()
    last = torch.tensor([8191], device="cuda")

    def ours(append: bool) -> list[Any]:
        results = []
        for q, cache in layers:
            if append:
                cache.append(token, token)
            results.append(decode(q, cache))
        return results

    def torchs(append: bool) -> list[Any]:
        results = []
        for q, cache in layers:
            if append:
                cache.k.index_copy_(1, last, token)
                cache.v.index_copy_(1, last, token)
            results.append(sdpa(q, cache))
        return results

    results = {}
    for append in (False, True):
        for _, cache in layers:
            cache.lengths.fill_(8192 - append)
        graphs = {"contiguous": capture(lambda append=append: ours(append))}
        for _, cache in layers:
            cache.lengths.fill_(8192)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            graphs["cudnn"] = capture(lambda append=append: torchs(append))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            graphs["fa2"] = capture(lambda append=append: torchs(append))
        times = bench({name: graph.replay for name, graph in graphs.items()}, each=LAYERS)
        results["append and attend" if append else "attend"] = times
    return results


def eager_case() -> dict[str, Any]:
    results = {}
    for keys in (1024, 8192):
        q, cache = draw(1, keys, 32, 8)
        pages = in_pages(cache, 16)
        calls: dict[str, Call] = {
            "contiguous": lambda q=q, c=cache: decode(q, c),
            "pages of 16": lambda q=q, c=pages: decode(q, c),
        }
        times = wall(calls)
        for name, backend in PEERS.items():
            with sdpa_kernel(backend):
                times |= wall({name: lambda q=q, c=cache: sdpa(q, c)})
        results[f"B1 {keys}"] = times
    q, cache = draw(1, 1024, 32, 8)
    token, last = torch.randn(1, 1, 8, HEAD_DIM, device="cuda").bfloat16(), torch.tensor([1023], device="cuda")
    results["append"] = wall(
        {
            "contiguous": lambda: cache.append(token, token),
            "index_copy_ of k and v": lambda: (cache.k.index_copy_(1, last, token), cache.v.index_copy_(1, last, token)),
        }
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.json"))
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    seed = int(torch.seed() % 2**31)
    torch.manual_seed(seed)
    bench = Bench(options.repeats)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "seed": seed,
        "roofs": floors(bench),
        "shapes": {},
    }
    print({k: v for k, v in found.items() if k != "shapes"})
    for name, shape in SHAPES.items():
        found["shapes"][name] = case = shape_case(bench, shape)
        show(name, case["clean"], case["bytes"] / 1e9)
        show(f"{name} dirty", case["dirty"])
        torch.cuda.empty_cache()
    found["ragged"] = ragged_case(bench)
    show("ragged", found["ragged"]["clean"], found["ragged"]["bytes"] / 1e9)
    found["layers"] = layers_case(bench)
    for name, times in found["layers"].items():
        show(f"32 layers, {name}", times)
    torch.cuda.empty_cache()
    found["eager"] = eager_case()
    for name, times in found["eager"].items():
        show(f"eager {name}", times)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
