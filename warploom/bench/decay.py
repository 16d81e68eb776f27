"""linear_attention() with a decay beside the same call without, fla's kernels and a copy of as many bytes.

A decay is one constant a head (RetNet, Lightning) or a number for each token and head (Mamba-2). All without a denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom import linear_attention
from warploom.bench import peers
from warploom.bench.delta import SDPA, backward, sdpa
from warploom.bench.harness import Call, Case, Comparison, Own, host, in_a_row
from warploom.bench.linear import Shape, copy_of
from warploom.bench.recurrence import LastKeyHead, Rule, last_key_head

SHAPES: tuple[Shape, ...] = ((1, 16, 16384, 64), (8, 16, 2048, 128), (4, 32, 8192, 128))
A_HEAD, A_TOKEN = "decay a head", "decay a token"
PLAIN, A_HEADS = "warploom, plain", "warploom, a head"
PEER = "fla, simple GLA"

Attend = Callable[..., Tensor]


def decay_cases(quick: bool) -> list[Case]:
    """Every shape with both kinds of decay, forward and backward; the last one's host time."""
    found = []
    shapes = ((1, 2, 160, 16),) if quick else SHAPES
    for batch, heads, tokens, dim in shapes:
        shape = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": dim}
        build = partial(_build, shape, (batch, heads, tokens, dim) == shapes[-1])
        found.append(Case("linear", f"decay, B{batch} H{heads} L{tokens} D{dim}", shape, build))
    return found


def _build(shape: dict[str, int], timed_on_host: bool, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    batch, heads, tokens, dim = shape.values()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(batch, tokens, heads, dim, device=device).to(dtype) for _ in range(4))
    # RetNet's: of the last head, which is checked, more than a chunk's keys are remembered, and not all of a sequence's.
    a_head = torch.log1p(-(2.0 ** -torch.linspace(5, 9, heads, device=device)))
    a_token = 2 * a_head * F.softplus(torch.randn(batch, tokens, heads, device=device))
    plain = last_key_head(Rule(), dout, q, k, v)
    wanted = {}
    for kind, decay in ((A_HEAD, a_head), (A_TOKEN, a_token)):
        wanted[kind] = want = last_key_head(Rule(), dout, q, k, v, decay)
        # A constant of a head is no parameter: gradients are those of q, k and v, and of a token's decay.
        given = {"decay": decay} if kind == A_HEAD else {}
        inputs = [q, k, v] if kind == A_HEAD else [q, k, v, decay]
        contenders: dict[str, Attend] = {"warploom": partial(_ours, **given)}
        others, refused = fla(**given)
        yield from _passes(kind, contenders | others, refused, inputs, dout, want, plain)
    if timed_on_host and device.type == "cuda":
        yield "host in a row, decay", _host([q, k, v], a_head, a_token, wanted)


def _passes(
    kind: str,
    contenders: dict[str, Attend],
    refused: dict[str, str],
    inputs: list[Tensor],
    dout: Tensor,
    want: LastKeyHead,
    plain: LastKeyHead,
) -> Iterator[tuple[str, Comparison]]:
    """Forward and backward, each with the plain call, which has a check of its own."""
    read, device = float(sum(t.nbytes for t in inputs)), dout.device
    calls: dict[str, Call] = {name: partial(attend, *inputs) for name, attend in contenders.items()}
    calls |= {PLAIN: partial(_ours, *inputs[:3]), "copy": copy_of(read + dout.nbytes, device)}
    own = {PLAIN: Own(plain.check_out), "copy": Own(lambda _: 0.0)}
    yield f"forward, {kind}", Comparison(calls, want.check_out, bytes=read + dout.nbytes, refused=refused, own=own)
    moved = 2 * read + dout.nbytes
    calls, refused = backward(contenders, refused, inputs, dout)
    others, found = backward({PLAIN: _ours}, refused, inputs[:3], dout)
    calls |= others | {"copy": copy_of(moved, device)}
    own = {PLAIN: Own(plain.check_gradients), "copy": Own(lambda _: 0.0)}
    yield f"backward, {kind}", Comparison(calls, want.check_gradients, bytes=moved, refused=found, own=own)


def _host(inputs: list[Tensor], a_head: Tensor, a_token: Tensor, wanted: dict[str, LastKeyHead]) -> Comparison:
    q, k, v = inputs
    others, refused = fla()
    contenders: dict[str, Attend] = {"warploom": _ours, **others}
    calls: dict[str, Call] = {name: partial(attend, q, k, v, a_token) for name, attend in contenders.items()}
    calls[A_HEADS] = partial(_ours, q, k, v, a_head)
    own = {A_HEADS: Own(wanted[A_HEAD].check_out), SDPA: Own(lambda _: 0.0)}
    return host(calls | sdpa(q.device), wanted[A_TOKEN].check_out, refused, own, clock=in_a_row)


def _ours(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
    return linear_attention(q, k, v, feature_map="identity", normalize=False, decay=decay)


def fla(decay: Tensor | None = None) -> tuple[dict[str, Attend], dict[str, str]]:
    """flash-linear-attention's kernel, with this constant a head or with a token's decay as its last argument."""
    try:
        return {PEER: partial(_simple_gla, peers.fla("simple_gla", "chunk_simple_gla"), decay)}, {}
    except peers.NotHere as why:
        return {}, {PEER: str(why)}


def _simple_gla(
    function: Callable[..., Any], a_head: Tensor | None, q: Tensor, k: Tensor, v: Tensor, a_token: Tensor | None = None
) -> Tensor:
    out: Tensor = function(q, k, v, g=a_token, g_gamma=a_head, scale=1.0)[0]
    return out
