"""attention() at inference: few keys, and one set of bits beside what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import warploom
from warploom.bench import peers
from warploom.bench.calls import Shape
from warploom.bench.captured import captured
from warploom.bench.harness import Call, Case, Comparison
from warploom.bench.reference import one_head
from warploom.masks import Causal, Full

# Prompts of one set of bits: tokens of all sequences, channels, and the key axes.
TOKENS, CHANNELS, HEAD_DIMS, SEQLENS = 16384, 2048, (64, 128, 256), (1024, 4096, 16384)
INVARIANT, SHORT = "graph, batch invariant", "graph, few keys"


@dataclass(frozen=True)
class Crossed:
    """Queries over other keys, all of them seen."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"few keys, B{self.batch} {self.queries}x{self.keys} H{self.heads} D{self.head_dim}"


# An image's tokens over a text's; sentences and images of encoders.
SHORT_SHAPES = (Crossed(4, 4096, 77, 16, 64), Crossed(64, 128, 128, 12, 64), Crossed(64, 197, 197, 12, 64))


def prefill_cases(suite: str, quick: bool) -> list[Case]:
    """Cases of another suite's, whose name they bear."""
    short = (Crossed(2, 32, 7, 2, 16),) if quick else SHORT_SHAPES
    if quick:
        shapes = [Shape(2, 64, 2, 16)]
    else:
        shapes = [Shape(TOKENS // seqlen, seqlen, CHANNELS // dim, dim) for dim in HEAD_DIMS for seqlen in SEQLENS]
    found = [Case(suite, each.name, dict(each.__dict__), partial(build_short, each), 2.0) for each in short]
    return found + [
        Case(suite, f"one set of bits, {each.name} causal", dict(each.__dict__), partial(build_invariant, each), 2.0)
        for each in shapes
    ]


def build_short(shape: Crossed, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(shape.batch, shape.queries, shape.heads, shape.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(shape.batch, shape.keys, *q.shape[2:], device=device, dtype=dtype) for _ in range(2))
    calls: dict[str, Call] = {"warploom": lambda: warploom.attention(q, k, v)}
    refused: dict[str, str] = {}
    if device.type == "cuda":
        calls |= {name: partial(peers.sdpa(name, False), q, k, v) for name in ("cuDNN", "FA2")}
        peers.add_peer(calls, refused, "FA4", lambda: partial(peers.flash_attention_4(False), q, k, v))
    want = one_head(q, k, v, Full().resolve(shape.queries, shape.keys, q.device), None)
    flops = 4.0 * shape.batch * shape.heads * shape.queries * shape.keys * shape.head_dim
    with torch.no_grad():
        yield SHORT, captured(calls, want.check_out, device, refused, flops=flops)


def build_invariant(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    q, k, v, _ = (t.detach() for t in shape.draw(device))
    mask = Causal()
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.attention(q, k, v, causal=True, batch_invariant=True),
        "warploom, plain": lambda: warploom.attention(q, k, v, causal=True),
    }
    want = one_head(q, k, v, mask.resolve(shape.seqlen, shape.seqlen, q.device), None)
    flops = shape.flops(mask.density(shape.seqlen, shape.seqlen))
    with torch.no_grad():
        yield INVARIANT, captured(calls, want.check_out, device, flops=flops)
