"""The cases of each suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.bench import peers
from warploom.bench.decode import capture, decode_cases
from warploom.bench.harness import Call, Case, Comparison, first_line
from warploom.bench.linear import linear_cases
from warploom.bench.masks import pairs
from warploom.bench.reference import LastDocument, OneHead, one_head
from warploom.masks import Causal, Full, Mask, SlidingWindow
from warploom.masks.intervals import ResolvedMask

SUITES = ("forward", "backward", "masks", "decode", "linear")
# Tokens and channels of a dense case, and its key axes.
TOKENS, CHANNELS = 16384, 2048
HEAD_DIMS, SEQLENS = (64, 128, 256), (1024, 4096, 16384)
MASK_SHAPES, MASK_HEADS, MASK_DIM = ((4, 8192), (1, 32768)), 16, 128


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    heads_kv: int | None = None  # as many as heads
    head_dim_v: int | None = None  # head_dim

    def flops(self, density: float) -> float:
        """FLOPs of a forward pass: two products over the visible scores."""
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        return 2.0 * self.batch * self.heads * self.seqlen**2 * dims * density

    def draw(self, device: torch.device) -> list[Tensor]:
        """q, k, v and an upstream gradient."""
        heads_kv, dim_v = self.heads_kv or self.heads, self.head_dim_v or self.head_dim
        ends = ((self.heads, self.head_dim), (heads_kv, self.head_dim), (heads_kv, dim_v), (self.heads, dim_v))
        return [torch.randn(self.batch, self.seqlen, *end, device=device).bfloat16() for end in ends]

    @property
    def name(self) -> str:
        """Head dims, length, and the heads where keys have fewer."""
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"{dims} S{self.seqlen}" + (f" heads {self.heads}/{self.heads_kv}" if self.heads_kv else "")


# Grouped heads and as many FLOPs without, values narrower than keys, head dims between.
OTHER_SHAPES = (
    Shape(2, 8192, 32, 128, heads_kv=8),
    Shape(2, 8192, 32, 128),
    Shape(2, 8192, 16, 192, head_dim_v=128),
    Shape(4, 4096, 16, 96),
    Shape(1, 16384, 8, 192),
)
# A sliding window, and documents of random lengths packed without padding.
WINDOW, WINDOW_SHAPE = 1024, Shape(1, 32768, 16, 128)
DOCUMENTS, DOCUMENT_LENGTHS, DOCUMENT_SHAPE = 64, (100, 4000), Shape(1, 0, 16, 128)


def cases(suites: list[str], device: torch.device, quick: bool) -> list[Case]:
    """The cases of the suites; `quick` shrinks them to seconds on a CPU."""
    found: list[Case] = []
    passes: list[str] = [name for name in ("forward", "backward") if name in suites]
    if passes:
        found += dense_cases(passes, quick)
    if "masks" in suites:
        found += mask_cases(device, quick)
    if "decode" in suites:
        found += decode_cases(quick)
    if "linear" in suites:
        found += linear_cases(quick)
    return found


def dense_cases(passes: list[str], quick: bool) -> list[Case]:
    tokens, channels = (256, 32) if quick else (TOKENS, CHANNELS)
    shapes = [
        Shape(tokens // seqlen, seqlen, channels // head_dim, head_dim)
        for head_dim in ((16,) if quick else HEAD_DIMS)
        for seqlen in ((128,) if quick else SEQLENS)
    ]
    found = []
    for shape in (*shapes, *(() if quick else OTHER_SHAPES)):
        for causal in (False, True):
            build = partial(_build_dense, shape, causal, passes)
            name = f"{shape.name} {'causal' if causal else 'full'}"
            found.append(Case("dense", name, {**shape.__dict__, "causal": causal}, build))
    shape, window = (Shape(1, 128, 2, 16), 50) if quick else (WINDOW_SHAPE, WINDOW)
    build = partial(_build_window, shape, window, passes)
    found.append(Case("dense", f"{shape.name} window {window}", {**shape.__dict__, "window": window}, build))
    shape, documents, between = (Shape(1, 0, 2, 16), 3, (10, 60)) if quick else (DOCUMENT_SHAPE, DOCUMENTS, DOCUMENT_LENGTHS)
    for causal in (False, True):
        build = partial(_build_documents, shape, documents, between, causal, passes)
        name = f"D{shape.head_dim}, {documents} documents of {between[0]} to {between[1]} {'causal' if causal else 'full'}"
        found.append(Case("dense", name, {**shape.__dict__, "documents": documents, "causal": causal}, build))
    return found


def mask_cases(device: torch.device, quick: bool) -> list[Case]:
    found = []
    for batch, seqlen in ((1, 256),) if quick else MASK_SHAPES:
        shape = Shape(batch, seqlen, 2, 16) if quick else Shape(batch, seqlen, MASK_HEADS, MASK_DIM)
        for name in pairs(seqlen, device):
            build = partial(_build_mask, shape, name)
            found.append(Case("masks", f"{name}, B{batch} S{seqlen}", {**shape.__dict__, "mask": name}, build))
    return found


def _build_dense(shape: Shape, causal: bool, passes: list[str], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    inputs = shape.draw(device)
    contenders: dict[str, peers.Attention] = {
        "warploom": lambda q, k, v: warploom.attention(q, k, v, causal=causal)
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        contenders |= {name: peers.sdpa(name, causal) for name in peers.SDPA}
        try:
            block_mask = peers.flex_block_mask(lambda b, h, i, j: i >= j, shape.seqlen, device) if causal else None
            contenders["FlexAttention"] = peers.flex(block_mask)
        except Exception as error:  # a peer may fail in any way, ours is timed all the same
            refused["FlexAttention"] = first_line(error)
        try:
            contenders["FA4"] = peers.flash_attention_4(causal)
            if "FlexAttention" in contenders:
                contenders["FlexAttention, FLASH"] = peers.flex(block_mask, {"BACKEND": "FLASH"})
        except peers.NotHere as why:
            refused["FA4"] = refused["FlexAttention, FLASH"] = str(why)
    else:
        contenders["SDPA"] = _torch_sdpa(causal)
    mask = Causal() if causal else Full()
    density = mask.density(shape.seqlen, shape.seqlen)
    yield from _compare(contenders, refused, inputs, mask, shape.flops(density), passes, {})


def _build_window(shape: Shape, window: int, passes: list[str], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    inputs, mask = shape.draw(device), SlidingWindow(window, 0)
    contenders: dict[str, peers.Attention] = {
        "warploom": lambda q, k, v: warploom.attention(q, k, v, window=(window, 0))
    }
    refused: dict[str, str] = {}
    try:
        contenders["FA4"] = peers.flash_attention_4(False, (window, 0))
    except peers.NotHere as why:
        refused["FA4"] = str(why)
    density = mask.density(shape.seqlen, shape.seqlen)
    yield from _compare(contenders, refused, inputs, mask, shape.flops(density), passes, {})


def _build_documents(
    shape: Shape, documents: int, between: tuple[int, int], causal: bool, passes: list[str], device: torch.device
) -> Iterator[tuple[str, Comparison]]:
    lengths = torch.randint(between[0], between[1] + 1, (documents,), generator=torch.Generator().manual_seed(0))
    ends = [0, *lengths.cumsum(0).tolist()]
    longest, start = int(lengths.max()), ends[-2]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    packed = replace(shape, seqlen=ends[-1])
    q, k, v, dout = (t[0] for t in packed.draw(device))
    contenders: dict[str, peers.Attention] = {
        "warploom": lambda q, k, v: warploom.attention_varlen(
            q, k, v, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, causal=causal
        )
    }
    refused: dict[str, str] = {}
    try:
        contenders["FA4"] = peers.flash_attention_4(causal, None, cu_seqlens, longest)
    except peers.NotHere as why:
        refused["FA4"] = str(why)
    mask = Causal() if causal else Full()
    last_q, last_k, last_v, upstream = (t[None, start:] for t in (q, k, v, dout))
    resolved = mask.resolve(last_q.shape[1], last_q.shape[1], device)
    found = one_head(last_q, last_k, last_v, resolved, upstream if "backward" in passes else None)
    want = LastDocument(found.out, found.gradients, found.group, start)
    flops = sum(replace(shape, seqlen=n).flops(mask.density(n, n)) for n in lengths.tolist())
    if "forward" in passes:
        calls: dict[str, Call] = {name: partial(_forward, attend, q, k, v) for name, attend in contenders.items()}
        yield "forward", Comparison(calls, want.check_out, flops, None, refused)
    if "backward" in passes:
        yield "backward", _backward(contenders, refused, [q, k, v, dout], want, flops, {})


def _build_mask(shape: Shape, name: str, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    inputs = shape.draw(device)
    pair = pairs(shape.seqlen, device)[name]()
    contenders: dict[str, peers.Attention] = {
        "warploom": lambda q, k, v: warploom.attention(q, k, v, mask=pair.mask)
    }
    density = pair.mask.density(shape.seqlen, shape.seqlen)
    more: dict[str, Any] = {"density": density}
    refused: dict[str, str] = {}
    if device.type == "cuda":
        make = partial(peers.flex_block_mask, pair.mask_mod, shape.seqlen, device)
        try:
            contenders["FlexAttention"] = peers.flex(make())
        except Exception as error:  # a peer may fail in any way, ours is timed all the same
            refused["FlexAttention"] = first_line(error)
        yield "mask", _preparation(pair.mask, shape.seqlen, device, make, refused, more)
    else:
        contenders["SDPA, dense mask"] = _torch_sdpa(False, pair.mask.dense(shape.seqlen, shape.seqlen))
    yield from _compare(contenders, refused, inputs, pair.mask, shape.flops(density), ["forward", "backward"], more)


def _preparation(
    mask: Mask, seqlen: int, device: torch.device, block_mask: Call, refused: dict[str, str], more: dict[str, Any]
) -> Comparison:
    """What a new mask costs, against a block mask.

    Timed are the bounds that every layer shares: once with the column vectors there already, in a CUDA graph, and once
    with the vectors made too.
    """
    calls: dict[str, Call] = {}
    refused = dict(refused)
    mask = mask.to(device)
    resolved = mask.resolve(seqlen, seqlen, device)
    if resolved.lts is None and resolved.ute is None:
        refused["warploom"] = "a band has no vectors, and nothing to prepare"
    else:
        try:
            calls["warploom"] = capture(partial(_bounds, resolved, seqlen))
        except RuntimeError as error:
            refused["warploom"] = first_line(error)
        # A mask moved anew keeps no vectors from an earlier call.
        calls["warploom, with the vectors"] = lambda: _bounds(mask.to(device).resolve(seqlen, seqlen, device), seqlen)
    if "FlexAttention" not in refused:
        calls["FlexAttention"] = block_mask
    return Comparison(calls, lambda _: 0.0, refused=refused, more=more)


def _bounds(mask: ResolvedMask, seqlen: int) -> Tensor:
    return torch.ops.warploom.column_bounds(*mask.vectors, mask.left, mask.right, seqlen)


def _compare(
    contenders: dict[str, peers.Attention],
    refused: dict[str, str],
    inputs: list[Tensor],
    mask: Mask,
    flops: float,
    passes: list[str],
    more: dict[str, Any],
) -> Iterator[tuple[str, Comparison]]:
    q, k, v, dout = inputs
    resolved = mask.resolve(q.shape[1], k.shape[1], q.device)
    want = one_head(q, k, v, resolved, dout if "backward" in passes else None)
    if "forward" in passes:
        calls: dict[str, Call] = {name: partial(_forward, attend, q, k, v) for name, attend in contenders.items()}
        yield "forward", Comparison(calls, want.check_out, flops, None, refused, more=more)
    if "backward" in passes:
        yield "backward", _backward(contenders, refused, inputs, want, flops, more)


def _forward(attend: peers.Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def _backward(
    contenders: dict[str, peers.Attention],
    refused: dict[str, str],
    inputs: list[Tensor],
    want: OneHead,
    flops: float,
    more: dict[str, Any],
) -> Comparison:
    """The comparison of gradients of q, k and v; a backward pass counts five products, a forward pass two."""
    calls: dict[str, Call] = {}
    refused = dict(refused)
    for name, attend in contenders.items():
        try:
            calls[name] = _gradients(attend, inputs)
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
    return Comparison(calls, want.check_gradients, 2.5 * flops, None, refused, more=more)


def _gradients(attend: peers.Attention, inputs: list[Tensor]) -> Call:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the graph is walked many times
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs[3], retain_graph=True)


def _torch_sdpa(causal: bool, mask: Tensor | None = None) -> peers.Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, b, c = peers.heads_first(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=mask, is_causal=causal).transpose(1, 2)

    return attend


def builds(case: Case, device: torch.device) -> Callable[[], None]:
    """Run everything of a case once, untimed: what it compiles is then in the caches on disk."""

    def once() -> None:
        for _, comparison in case.build(device):
            for call in comparison.calls.values():
                try:
                    call()
                except Exception:  # a peer may fail in any way; the run itself records it
                    continue

    return once
