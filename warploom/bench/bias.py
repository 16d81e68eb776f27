"""Additive biases: a matrix beside other kernels, ALiBi and relative positions beside no bias, stats beside none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.bench import encoder, peers
from warploom.bench.calls import Shape
from warploom.bench.harness import Call, Case, Comparison, Own, first_line
from warploom.bench.reference import FURTHEST, biased_head, distance
from warploom.bias import ALiBi, Relative, t5_buckets

TOKENS, CHANNELS, SEQLEN = 16384, 2048, 8192
MATRICES = (Shape(1, 4096, 16, 64), Shape(1, 4096, 16, 128), Shape(4, 4096, 16, 64), Shape(4, 4096, 16, 128))
BUCKETS, MAX_DISTANCE = 32, 128
BOTH = "forward and backward"
Attend = Callable[..., Tensor]  # of q, k, v and what a bias is made of, or None


def bias_cases(quick: bool) -> list[Case]:
    found = []
    for shape in (Shape(2, 128, 2, 16),) if quick else MATRICES:
        name = f"a matrix for all of {shape.batch}, {shape.name}"
        found.append(Case("bias", name, dict(shape.__dict__), partial(_matrix, shape)))
    tokens, channels, seqlen = (256, 32, 128) if quick else (TOKENS, CHANNELS, SEQLEN)
    for head_dim in (16,) if quick else (64, 128):
        shape = Shape(tokens // seqlen, seqlen, channels // head_dim, head_dim)
        for causal in (False, True):
            call = f"{shape.name} {'causal' if causal else 'full'}"
            more = {**shape.__dict__, "causal": causal}
            found.append(Case("bias", f"ALiBi, {call}", more, partial(_described, shape, causal, "ALiBi")))
            found.append(Case("bias", f"T5 buckets, {call}", more, partial(_described, shape, causal, "T5")))
            found.append(Case("bias", f"stats, {call}", more, partial(_stats, shape, causal)))
    return [*found, *encoder.encoder_cases(quick)]


def _matrix(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A matrix a head that all batch entries share, with its gradient."""
    inputs = shape.draw(device)
    leaf = torch.randn(1, shape.heads, shape.seqlen, shape.seqlen, device=device).bfloat16()
    contenders: dict[str, Attend] = {"warploom": lambda q, k, v, bias: warploom.attention(q, k, v, bias=bias)}
    refused: dict[str, str] = {}
    if device.type == "cuda":
        contenders["efficient"] = peers.sdpa_of("efficient")
        try:
            contenders["FlexAttention"] = peers.flex_biased()
        except Exception as error:  # a peer may fail in any way, ours is timed all the same
            refused["FlexAttention"] = first_line(error)
    else:
        contenders["SDPA"] = peers.sdpa_of(None)
    q, k, v, dout = inputs
    want = biased_head(q, k, v, dout, leaf[0, -1], lambda bias, rows: bias[rows], False)
    calls: dict[str, Call] = {name: partial(_step, attend, inputs, leaf) for name, attend in contenders.items()}
    yield BOTH, Comparison(calls, partial(_check, want), 3.5 * shape.flops(1.0), refused=refused)


def _described(shape: Shape, causal: bool, kind: str, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A bias of a value a head or a bucket beside the same call without one; a table's gradient is a contender of its own."""
    inputs = shape.draw(device)
    contenders: dict[str, Attend] = {"warploom, no bias": lambda q, k, v, _: warploom.attention(q, k, v, causal=causal)}
    position = torch.arange(shape.seqlen, device=device)
    if kind == "ALiBi":
        leaf = ALiBi.standard(shape.heads, device).slopes
        contenders["warploom"] = lambda q, k, v, t: warploom.attention(q, k, v, bias=ALiBi(t), causal=causal)

        def matrix(leaf: Tensor, rows: Tensor) -> Tensor:
            return -leaf * (rows[:, None] - position).abs()
    else:
        leaf = torch.randn(shape.heads, BUCKETS, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            bias = Relative(table, MAX_DISTANCE, buckets="t5")
            out: Tensor = warploom.attention(q, k, v, bias=bias, causal=causal)
            return out

        contenders["warploom"] = attend

        def matrix(leaf: Tensor, rows: Tensor) -> Tensor:
            return leaf[t5_buckets(rows[:, None] - position, BUCKETS, MAX_DISTANCE, True)]

    q, k, v, dout = inputs
    plain = biased_head(q, k, v, dout, leaf[-1], lambda leaf, rows: leaf.new_zeros(()), causal)
    want = biased_head(q, k, v, dout, leaf[-1], matrix, causal)
    flops = shape.flops(0.5 if causal else 1.0)
    for measure, step, factor in (("forward", _forward, 1.0), (BOTH, _step_frozen, 3.5)):
        calls: dict[str, Call] = {name: partial(step, attend, inputs, leaf) for name, attend in contenders.items()}
        own = {"warploom, no bias": Own(partial(_check, plain), factor * flops)}
        if measure == BOTH and kind == "T5":
            calls["warploom, gradient of the table"] = partial(_step, contenders["warploom"], inputs, leaf)
        yield measure, Comparison(calls, partial(_check, want), factor * flops, own=own)


def _stats(shape: Shape, causal: bool, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A forward pass with the sums of its columns, with its largest logits, and without."""
    q, k, v, _ = shape.draw(device)

    def call(*names: str) -> Any:
        with torch.no_grad():
            return warploom.attention(q, k, v, causal=causal, return_stats=names)

    scores = (q[-1, :, -1].float() @ k[-1, :, -1].float().T) * shape.head_dim**-0.5
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    largest, sums = scores.max(), scores.softmax(-1).sum(0)
    del scores
    plain = biased_head(q, k, v, None, q.new_zeros(()), lambda leaf, rows: leaf, causal)

    def check_sums(found: Any) -> float:
        return distance("column sums", found[-1].column_sums[-1, -1], sums, FURTHEST["out"])

    def check_largest(found: Any) -> float:
        return distance("max logits", found[-1].max_logits[-1, -1], largest, FURTHEST["out"])

    calls: dict[str, Call] = {
        "warploom": partial(call, "column_sums"),
        "warploom, max logits": partial(call, "max_logits"),
        "warploom, no stats": call,
    }
    own = {"warploom, max logits": Own(check_largest), "warploom, no stats": Own(partial(_check, plain))}
    yield "forward, stats", Comparison(calls, check_sums, own=own)


def _forward(attend: Attend, inputs: list[Tensor], leaf: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(*inputs[:3], leaf)


def _step(attend: Attend, inputs: list[Tensor], leaf: Tensor) -> tuple[Tensor, ...]:
    """Out and the gradients of q, k, v and the leaf."""
    leaves = [t.detach().requires_grad_() for t in (*inputs[:3], leaf)]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))


def _step_frozen(attend: Attend, inputs: list[Tensor], leaf: Tensor) -> tuple[Tensor, ...]:
    """The same without the leaf's."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves, leaf)
    return (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))


def _check(want: tuple[Tensor, ...], found: Tensor | tuple[Tensor, ...]) -> float:
    """The largest error of a call's last head: out and, where it has them, gradients of q, k, v and the leaf's last head."""
    found = found if isinstance(found, tuple) else (found,)
    names = ("out", "dq", "dk", "dv", "the bias's gradient")
    errors = []
    for name, got, wanted in zip(names, found, want, strict=False):
        last = got.flatten(0, -2)[-1] if got.ndim < 3 else got[-1, -1] if name == names[-1] else got[-1, :, -1]
        errors.append(distance(name, last, wanted, FURTHEST["out" if name == "out" else "gradient"]))
    return max(errors)
