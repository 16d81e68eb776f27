"""FP8 attention beside our bf16, cuDNN's bf16 and cuDNN's FP8, and what quantising costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.bench import peers
from warploom.bench.calls import Shape, forward, torch_sdpa
from warploom.bench.cudnn_fp8 import cudnn_fp8
from warploom.bench.harness import Call, Case, Comparison, Own, first_line
from warploom.bench.masks import document_lengths
from warploom.bench.reference import OneHead, distance, one_head
from warploom.fp8 import Fp8Tensor, quantize
from warploom.kernels.e4m3 import rotate
from warploom.masks import Causal, Document, Full

TOKENS, CHANNELS = 16384, 2048
HEAD_DIMS, SEQLENS = (64, 128, 256), (4096, 8192, 16384, 32768)
BETWEEN = (96, 192)  # head dims that have tiles of their own, timed at TOKENS alone
# Distances from fp32 over the norm from which a result is wrong: about twice what correct kernels show. Of normal numbers,
# attention in e4m3 is 0.05 to 0.064 away, and rounding alone 0.026.
FURTHEST, FURTHEST_ROUNDED = 0.12, 0.05
WAYS: dict[str, dict[str, Any]] = {
    "warploom": {},
    "warploom, a scale a head": {"granularity": "head"},
    "warploom, one scale": {"granularity": "tensor"},
    "warploom, not rotated": {"hadamard": False},
}


def fp8_cases(quick: bool) -> list[Case]:
    tokens, channels = (128, 32) if quick else (TOKENS, CHANNELS)
    sizes = [(head_dim, seqlen) for head_dim in HEAD_DIMS for seqlen in SEQLENS] + [(head_dim, TOKENS) for head_dim in BETWEEN]
    found = []
    for head_dim, seqlen in [(16, 128)] if quick else sizes:
        shape = Shape(max(tokens // seqlen, 1), seqlen, channels // head_dim, head_dim)
        for causal in (False, True):
            name = f"{shape.name} {'causal' if causal else 'full'}"
            found.append(Case("fp8", name, {**shape.__dict__, "causal": causal}, partial(_build, shape, causal)))
        if quick or (head_dim, seqlen) == (128, TOKENS):
            found.append(Case("fp8", f"{shape.name} documents", dict(shape.__dict__), partial(_documents, shape)))
    return found


def _build(shape: Shape, causal: bool, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    q, k, v, _ = shape.draw(device)
    mask = Causal() if causal else Full()
    want = one_head(q, k, v, mask.resolve(shape.seqlen, shape.seqlen, q.device), None)
    numbers, fast = quantize(q, k, v), quantize(q, k, v, accumulate="fast")
    half: dict[str, peers.Attention] = {
        "warploom, bf16": lambda q, k, v: warploom.attention(q, k, v, causal=causal),
        **({"cuDNN": peers.sdpa("cuDNN", causal)} if device.type == "cuda" else {"SDPA": torch_sdpa(causal)}),
    }
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.attention(*numbers, causal=causal),
        "warploom, quantised too": lambda: warploom.attention(*quantize(q, k, v), causal=causal),
        "warploom, fast sums": lambda: warploom.attention(*fast, causal=causal),
        **{name: partial(forward, attend, q, k, v) for name, attend in half.items()},
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        try:
            calls["cuDNN, FP8"] = cudnn_fp8(*quantize(q, k, v, hadamard=False, granularity="tensor"), causal)
        except peers.NotHere as why:
            refused["cuDNN, FP8"] = str(why)
        except Exception as error:  # a peer may fail in any way
            refused["cuDNN, FP8"] = first_line(error)
    flops = shape.flops(mask.density(shape.seqlen, shape.seqlen))
    own = {name: Own(want.check_out, flops) for name in half}
    yield "forward", Comparison(calls, partial(_check, want), flops, refused=refused, own=own)
    if not causal:
        yield "quantising", _quantising(q, k, v)


def _documents(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """Documents of one row, by a column mask and packed, beside bf16."""
    q, k, v, _ = shape.draw(device)
    lengths = document_lengths(shape.seqlen)
    mask = Document(lengths, causal=False)
    want = one_head(q, k, v, mask.resolve(shape.seqlen, shape.seqlen, q.device), None)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(q.device, torch.int32)
    longest = int(lengths.max())
    packed = [t[-1] for t in (q, k, v)]
    numbers, of_documents = quantize(q, k, v), quantize(*packed, cu_seqlens_q=ends)

    def attend_packed(q: Any, k: Any, v: Any) -> Tensor:
        return warploom.attention_varlen(q, k, v, ends, ends, longest, longest)[None]

    half: dict[str, Call] = {
        "warploom, bf16": lambda: warploom.attention(q, k, v, mask=mask),
        "warploom, bf16, packed": partial(attend_packed, *packed),
    }
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.attention(*numbers, mask=mask),
        "warploom, packed": partial(attend_packed, *of_documents),
        **half,
    }
    flops = shape.flops(mask.density(shape.seqlen, shape.seqlen))
    yield "forward", Comparison(calls, partial(_check, want), flops, own={name: Own(want.check_out, flops) for name in half})


def _check(want: OneHead, out: Tensor | Fp8Tensor) -> float:
    out = out.dequantize() if isinstance(out, Fp8Tensor) else out
    return distance("out", out[-1, :, -1], want.out, FURTHEST)


def _quantising(q: Tensor, k: Tensor, v: Tensor) -> Comparison:
    """Quantising q, k and v in each way, beside a copy that reads and writes as many bytes."""
    ways: dict[str, Call] = {name: partial(quantize, q, k, v, **options) for name, options in WAYS.items()}
    amount = sum(t.numel() * (t.element_size() + 1) for t in (q, k, v))
    source = torch.zeros(amount // 2, dtype=torch.uint8, device=q.device)
    target = torch.empty_like(source)
    calls = {**ways, "copy": lambda: target.copy_(source)}
    check: Callable[[Any], float] = partial(_check_numbers, (q, k, v))
    return Comparison(calls, check, bytes=float(amount), own={"copy": Own(lambda _: 0.0)})


def _check_numbers(given: tuple[Tensor, Tensor, Tensor], found: tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]) -> float:
    """The largest error of a tensor's last head."""
    errors = []
    for name, x, t in zip("qkv", given, found, strict=True):
        last = x[-1, :, -1]
        want = last.float() if t.hadamard_seed is None else rotate(last, t.hadamard_seed)
        errors.append(distance(name, t.dequantize()[-1, :, -1], want, FURTHEST_ROUNDED))
    return max(errors)
