"""Biases of every kind, drawn from a seed, with the matrix that each stands for written out by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.attention.harness import Call, results
from warploom.attention.arguments import dense_args
from warploom.attention.judge import judge, low_precision
from warploom.bias import ALiBi, Key, Relative
from warploom.masks.visible import visible

Shape = tuple[int, int, int, int]  # batch, heads_q, seqlen_q, seqlen_k
REACH = 6  # max_distance of relative tables: less than the lengths of most calls


@dataclass(frozen=True)
class Kind:
    shape: Callable[[Shape], tuple[int, ...]]  # of the leaf
    build: Callable[[Tensor], Any]  # the bias of a leaf
    matrix: Callable[[Tensor, Tensor], Tensor]  # of a leaf and the distances p - j: (batch|1, heads|1, seqlen_q|1, seqlen_k|1)


def _same(leaf: Tensor) -> Tensor:
    return leaf


def _element(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[(None,) * (4 - leaf.ndim)]


def _key(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[:, :, None]


def _linear(leaf: Tensor, distance: Tensor) -> Tensor:
    slopes = leaf if leaf.ndim == 2 else leaf[None]
    return -slopes[:, :, None, None] * distance.abs()


def _two_sided(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[:, distance.clamp(-REACH, REACH) + REACH][None]


def _one_sided(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[:, distance.clamp(0, REACH)][None]


def t5_bucket(relative: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """Of a key's position less the query's: the T5 paper's code, one number at a time."""
    found = 0
    if bidirectional:
        buckets //= 2
        found = buckets if relative > 0 else 0
        relative = abs(relative)
    else:
        relative = -min(relative, 0)
    exact = buckets // 2
    if relative < exact:
        return found + relative
    large = exact + int(math.log(relative / exact) / math.log(max_distance / exact) * (buckets - exact))
    return found + min(large, buckets - 1)


def _t5(bidirectional: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def matrix(leaf: Tensor, distance: Tensor) -> Tensor:
        at = [[t5_bucket(-d, bidirectional, leaf.shape[1], 20) for d in row] for row in distance.tolist()]
        return leaf[:, torch.tensor(at, dtype=torch.int64).reshape(distance.shape)][None]

    return matrix


def _long(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[:, distance.clamp(-300, 300) + 300][None]


def _constant(leaf: Tensor, distance: Tensor) -> Tensor:
    return leaf[:, torch.zeros_like(distance)][None]


SHARED = torch.tensor([0, 1, 1, 2, 0, 3, 3, 3, 1, 2, 2, 0, 0])  # of 2 · REACH + 1 distances

KINDS = {
    "full": Kind(lambda s: s, _same, _element),
    "of heads": Kind(lambda s: (1, *s[1:]), _same, _element),
    "of batches": Kind(lambda s: (s[0], 1, *s[2:]), _same, _element),
    "of rows": Kind(lambda s: (s[1], s[2], 1), _same, _element),
    "a matrix": Kind(lambda s: s[2:], _same, _element),
    "keys": Kind(lambda s: (s[0], s[1], s[3]), Key, _key),
    "keys of all heads": Kind(lambda s: (s[0], 1, s[3]), Key, _key),
    "alibi": Kind(lambda s: (s[1],), ALiBi, _linear),
    "alibi of batches": Kind(lambda s: s[:2], ALiBi, _linear),
    "relative": Kind(lambda s: (s[1], 2 * REACH + 1), Relative, _two_sided),
    "relative, one side": Kind(lambda s: (s[1], REACH + 1), lambda t: Relative(t, bidirectional=False), _one_sided),
    "relative, buckets": Kind(
        lambda s: (1, 4), lambda t: Relative(t, buckets=SHARED.to(t.device)), lambda leaf, d: _two_sided(leaf[:, SHARED], d)
    ),
    "t5": Kind(lambda s: (s[1], 8), lambda t: Relative(t, 20, buckets="t5"), _t5(True)),
    "t5, one side": Kind(lambda s: (s[1], 8), lambda t: Relative(t, 20, buckets="t5", bidirectional=False), _t5(False)),
}

# Those that only kernels with cases of their own for them are tested with.
ALL_KINDS = KINDS | {
    "relative, long": Kind(lambda s: (s[1], 601), Relative, _long),
    "relative, constant": Kind(lambda s: (s[1], 1), Relative, _constant),
}


def leaf_of(kind: str, shape: Shape, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7)
    leaf = torch.randn(ALL_KINDS[kind].shape(shape), generator=generator, dtype=torch.float64)
    # Slopes of either sign, which leave no row to one far key.
    return (leaf * 0.1 if kind.startswith("alibi") else leaf).to(dtype)


def distances(seqlen_q: int, seqlen_k: int, shift: int | None = None) -> Tensor:
    shift = seqlen_k - seqlen_q if shift is None else shift
    return torch.arange(seqlen_q)[:, None] + shift - torch.arange(seqlen_k)


def matrix_of(kind: str, leaf: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    return ALL_KINDS[kind].matrix(leaf, distances(seqlen_q, seqlen_k))


def check(call: Call, kind: str, backend: str, bias_dtype: torch.dtype) -> None:
    """Every result of a backend passes the criterion; ``harness.check`` of a call with a bias."""
    shape = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    leaf = leaf_of(kind, shape, call.seed, bias_dtype)
    got = biased_results(call, kind, leaf, backend)
    want = biased_results(call, kind, leaf.double(), "reference", torch.float64)
    low = _model(call, kind, leaf)
    for name, value in got.items():
        if name != "dsink":  # whose own tests are without a bias
            verdict = judge(name, value, want[name], low[name], call.dtype)
            assert verdict.passed, f"{backend}, bias {kind} in {bias_dtype}: {verdict}\n{call}"


def check_frozen(call: Call, kind: str, backend: str) -> None:
    """As ``check``, of a bias that asks for no gradient: a backend may then compute both passes itself."""
    leaf = leaf_of(kind, (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k), call.seed, torch.float32)
    bias = ALL_KINDS[kind].build(leaf.to(call.device))
    got = results(replace(call, keywords={**call.keywords, "bias": bias}), backend)
    want = biased_results(call, kind, leaf.double(), "reference", torch.float64)
    low = _model(call, kind, leaf, frozen=True)
    for name, value in got.items():
        verdict = judge(name, value, want[name], low[name], call.dtype)
        assert verdict.passed, f"{backend}, bias {kind}: {verdict}\n{call}"


def biased_results(
    call: Call, kind: str, leaf: Tensor, backend: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    leaf = leaf.detach().to(call.device).requires_grad_()
    return results(call, backend, dtype, bias=(leaf, ALL_KINDS[kind].build(leaf)))


def _model(call: Call, kind: str, leaf: Tensor, frozen: bool = False) -> dict[str, Tensor]:
    q, k, v, sink = call.tensors()
    args = dense_args(q, k, v, sink=sink, **call.keywords)
    rows, cols = torch.arange(call.seqlen_q), torch.arange(call.seqlen_k)
    seen = visible(args.mask, rows, cols, call.seqlen_k - call.seqlen_q).to(q.device)
    dout, dlse = call.upstream(
        q.new_empty((call.batch, call.seqlen_q, call.heads_q, v.shape[-1])),
        torch.empty((call.batch, call.heads_q, call.seqlen_q), device=q.device),
    )
    leaf = leaf.detach().requires_grad_()
    bias = matrix_of(kind, leaf.float(), call.seqlen_q, call.seqlen_k)
    options: dict[str, Any] = {"scale": args.scale, "softcap": args.softcap, "sink": sink, "bias": bias.detach().to(q.device)}
    low = low_precision(q, k, v, dout, dlse, seen, **options)
    named = {"out": low.out, "lse": low.lse, "dq": low.dq, "dk": low.dk, "dv": low.dv}
    if frozen:
        return named
    if ALL_KINDS[kind].matrix in (_element, _key) and kind != "of rows":  # whose gradient cancels to zero
        (dbias,) = torch.autograd.grad(bias, leaf, low.dscores.cpu().sum_to_size(bias.shape))
    else:
        wide = (t.double() for t in (q, k, v, dout, dlse))
        exact = low_precision(*wide, seen, **{n: t.double() if isinstance(t, Tensor) else t for n, t in options.items()})
        dbias = _summed(kind, leaf, call, low.dscores.double().cpu(), exact.dscores.cpu())
    return named | {"dbias": dbias.to(q.device)}


def _summed(kind: str, leaf: Tensor, call: Call, low: Tensor, exact: Tensor) -> Tensor:
    """The gradient of a leaf whose few elements sum many terms, with the error expected of it, as ``dsink_like`` has it.

    Terms of one row err together, by the rounding of the row's out and lse, and rows apart; but terms of one distance err
    together by the rounding of the bias, as they do in the model.
    """
    one = torch.ones_like(leaf, dtype=torch.float64).requires_grad_()
    slope = matrix_of(kind, one, call.seqlen_q, call.seqlen_k)  # of each term by the one element that it reads

    def summed(t: Tensor) -> Tensor:
        return torch.autograd.grad(slope, one, t.sum_to_size(slope.shape), retain_graph=True)[0]

    sums, error = summed(exact), low - exact
    squares = summed(slope.detach() * (2.0**-24 * exact).square()).abs() + summed(error).square()
    for row in range(call.seqlen_q):
        alone = torch.zeros_like(error)
        alone[:, :, row] = error[:, :, row]
        squares = squares + summed(alone).square()
    rounding = torch.finfo(leaf.dtype).eps / 4 * sums
    return sums + 1.5 * (squares + rounding.square()).sqrt()
