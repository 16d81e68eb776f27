"""The cases of each suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import warploom
from warploom.bench import peers
from warploom.bench.bias import bias_cases
from warploom.bench.calls import Shape, backward, comparisons, forward, torch_sdpa
from warploom.bench.choice import Choice
from warploom.bench.decay import decay_cases
from warploom.bench.decode import decode_cases
from warploom.bench.delta import delta_cases
from warploom.bench.fp8 import fp8_cases
from warploom.bench.harness import Call, Case, Comparison, asked_of, first_line
from warploom.bench.linear import linear_cases
from warploom.bench.mask_cases import mask_cases
from warploom.bench.patience import PATIENCE
from warploom.bench.reference import LastDocument, one_head
from warploom.bench.serving import serving_cases
from warploom.bench.training import training_cases
from warploom.masks import Causal, Full, SlidingWindow

# Tokens and channels of a dense case, and its key axes.
TOKENS, CHANNELS = 16384, 2048
HEAD_DIMS, SEQLENS = (64, 128, 256), (1024, 4096, 16384)
# Grouped heads and as many FLOPs without, values narrower than keys, head dims between.
OTHER_SHAPES = (
    Shape(2, 8192, 32, 128, heads_kv=8),
    Shape(2, 8192, 32, 128),
    Shape(2, 8192, 16, 192, head_dim_v=128),
    Shape(4, 4096, 16, 96),
    Shape(1, 16384, 8, 192),
    Shape(4, 4096, 16, 80),
    # Short sequences of encoders, of text and of pictures.
    Shape(64, 128, 12, 64),
    Shape(64, 197, 12, 64),
)
# Sliding windows, and documents of random lengths packed without padding.
WINDOWS = ((Shape(1, 32768, 16, 128), 1024), (Shape(1, 32768, 16, 128), 4096), (Shape(1, 16384, 8, 256), 1024))
DOCUMENTS, DOCUMENT_LENGTHS, DOCUMENT_SHAPE = 64, (100, 4000), Shape(1, 0, 16, 128)


def cases(suites: list[str], device: torch.device, quick: bool, choice: Choice | None = None) -> list[Case]:
    """The cases of the suites; `quick` shrinks them to seconds on a CPU, the choice is of the masks suite's."""
    found: list[Case] = []
    passes: list[str] = [name for name in ("forward", "backward") if name in suites]
    if passes:
        found += dense_cases(passes, quick)
    if "masks" in suites:
        found += mask_cases(device, quick, choice or Choice())
    if "decode" in suites:
        found += decode_cases(quick)
    if "serving" in suites:
        found += serving_cases(quick)
    if "linear" in suites:
        found += [*linear_cases(quick), *decay_cases(quick), *delta_cases(quick)]
    if "fp8" in suites:
        found += fp8_cases(quick)
    if "bias" in suites:
        found += bias_cases(quick)
    if "training" in suites:
        found += training_cases(quick, choice or Choice())
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
    for shape, window in ((Shape(1, 128, 2, 16), 50),) if quick else WINDOWS:
        build = partial(_build_window, shape, window, passes)
        found.append(Case("dense", f"{shape.name} window {window}", {**shape.__dict__, "window": window}, build))
    shape, documents, between = (Shape(1, 0, 2, 16), 3, (10, 60)) if quick else (DOCUMENT_SHAPE, DOCUMENTS, DOCUMENT_LENGTHS)
    for causal in (False, True):
        build = partial(_build_documents, shape, documents, between, causal, passes)
        name = f"D{shape.head_dim}, {documents} documents of {between[0]} to {between[1]} {'causal' if causal else 'full'}"
        found.append(Case("dense", name, {**shape.__dict__, "documents": documents, "causal": causal}, build))
    return found


def _build_dense(shape: Shape, causal: bool, passes: list[str], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    inputs = shape.draw(device)
    contenders: dict[str, peers.Attention] = {"warploom": lambda q, k, v: warploom.attention(q, k, v, causal=causal)}
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
        contenders["SDPA"] = torch_sdpa(causal)
    mask = Causal() if causal else Full()
    density = mask.density(shape.seqlen, shape.seqlen)
    yield from comparisons(contenders, refused, inputs, mask, shape.flops(density), passes, {})


def _build_window(shape: Shape, window: int, passes: list[str], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    inputs, mask = shape.draw(device), SlidingWindow(window, 0)
    contenders: dict[str, peers.Attention] = {"warploom": lambda q, k, v: warploom.attention(q, k, v, window=(window, 0))}
    refused: dict[str, str] = {}
    try:
        contenders["FA4"] = peers.flash_attention_4(False, (window, 0))
    except peers.NotHere as why:
        refused["FA4"] = str(why)
    density = mask.density(shape.seqlen, shape.seqlen)
    yield from comparisons(contenders, refused, inputs, mask, shape.flops(density), passes, {})


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
    want = LastDocument(found.out, found.gradients, start)
    flops = sum(replace(shape, seqlen=n).flops(mask.density(n, n)) for n in lengths.tolist())
    if "forward" in passes:
        calls: dict[str, Call] = {name: partial(forward, attend, q, k, v) for name, attend in contenders.items()}
        yield "forward", Comparison(calls, want.check_out, flops, None, refused)
    if "backward" in passes:
        yield "backward", backward(contenders, refused, [q, k, v, dout], want, flops, {})


def builds(case: Case, device: torch.device) -> Callable[[], None]:
    """Run everything of a case once, untimed: what it compiles is then in the caches on disk."""

    def once() -> None:
        for _, comparison in asked_of(case, device):
            for name, call in comparison.calls.items():
                try:
                    PATIENCE.first(name, call)
                except Exception:  # a peer may fail in any way; the run itself records it
                    continue

    return once
