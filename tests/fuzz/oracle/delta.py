"""The gated delta rule token by token in fp64 with autograd's gradients, and a low-precision model of a correct kernel.

Each value head has a state S (E, M): S <- exp(decay) S, S <- S + beta k ⊗ (v - Sᵀk), out = scale · Sᵀq. A mutant is a subclass
of `Delta` with one method changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.oracle.rounding import jittered, rounded

Named = dict[str, Tensor]
TOKENS = ("q", "k", "v", "beta", "decay")
# Tokens of the model's chunks.
CHUNK = 64


@dataclass(frozen=True)
class Options:
    """What a call says beside its tensors."""

    scale: float = 1.0
    normalize: bool = False
    eps: float = 1e-6


@dataclass(frozen=True)
class Given:
    """A call's tensors (batch, seqlen, heads, ·), of batch 1 with ``starts``, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | None = None
    state: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    dout: Tensor | None = None
    dstate: Tensor | None = None

    @property
    def group(self) -> int:
        """Value heads to each of the keys'."""
        return self.v.shape[2] // self.q.shape[2]


class Delta:
    """The oracle."""

    def exact(self, given: Given, o: Options, gradients: bool = True) -> Named:
        """Out and the last state in fp64; with ``gradients`` those of all that was given."""
        return _differentiated(self, given, torch.float64, gradients, lambda t: self.walk(t, o))

    def steps(self, given: Given, o: Options, turn: int = 0) -> Named:
        """Out and state of a correct step for each token: fp32 sums, in another order each ``turn``, and out alone rounded."""
        wide = torch.promote_types(given.v.dtype, torch.float32)

        def rolled(t: Named) -> tuple[Tensor, Tensor]:
            over = {"q": -1, "k": -1, "state": -2}
            out, s = self.walk({n: x.roll(5 * turn, over[n]) if n in over else x for n, x in t.items()}, o)
            return out, s.roll(-5 * turn, -2)

        found = _differentiated(self, given, wide, False, rolled)
        return found | {"out": found["out"].to(given.v.dtype)}

    def model(self, given: Given, o: Options, gradients: bool = True, turn: int = 0, chunk: int = CHUNK) -> Named:
        """What a correct kernel of v's dtype returns, chunk by chunk: sums in fp32, operands of matrix products rounded.

        Rounded are normalized queries and keys, products within a chunk, the inverse of I + A, what is written, states, and
        the gradients that are operands; fp32 operands to two TF32 numbers. The inverse itself, its A and decays are fp32. Each
        ``turn`` but 0 has operands that are off by up to half an ulp before they are rounded.
        """
        wide = torch.promote_types(given.v.dtype, torch.float32)
        found = _differentiated(self, given, wide, gradients, lambda t: _chunked(t, o, given.v.dtype, turn, chunk))
        low = ("out", "dq", "dk", "dv")
        return {name: t.to(given.v.dtype) if name in low else t for name, t in found.items()}

    def walk(self, t: Named, o: Options) -> tuple[Tensor, Tensor]:
        """Out and last state by the definition, of tensors (batch, seqlen, heads_v, ·); beta and decay are numbers a head."""
        q, k = (self.unit(t[name], o) for name in ("q", "k"))
        s, rows = t["state"], []
        for i in range(q.shape[1]):
            b = t["beta"][:, i, :, None]
            kept = t["decay"][:, i].exp()[..., None, None] if "decay" in t else None
            s, row = self.token(s, q[:, i], k[:, i], t["v"][:, i], b, kept)
            rows.append(row * self.scale(o.scale, q.shape[-1]))
        return torch.stack(rows, 1) if rows else t["v"] * 0.0, s

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state after a token, and what the query reads."""
        s = s if kept is None else s * kept
        s = s + k[..., None] * (beta * (v - self.read(s, k)))[..., None, :]
        return s, self.read(s, q)

    def read(self, s: Tensor, x: Tensor) -> Tensor:
        """Sᵀx."""
        return (s * x[..., None]).sum(-2)

    def unit(self, x: Tensor, o: Options) -> Tensor:
        """A query or key as it is used."""
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + o.eps) if o.normalize else x

    def scale(self, scale: float, dim: int) -> float:
        return scale

    def grouped(self, x: Tensor, group: int) -> Tensor:
        """Heads of q or k (batch, seqlen, heads_qk, E) for value heads."""
        return x.repeat_interleave(group, 2)

    def sequence_bounds(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """First tokens and numbers of tokens of packed sequences."""
        starts = starts.long()
        return starts[:-1], starts[1:] - starts[:-1]

    def first_state(self, state: Tensor) -> Tensor:
        """The given state, as tokens see it."""
        return state


def _differentiated(oracle: Delta, given: Given, wide: torch.dtype, gradients: bool, run: Any) -> Named:
    """Results of ``run`` on padded sequences in ``wide``, and gradients, in the call's own layout."""
    rows = _Rows(oracle, given)
    leaves = {n: rows.cleared(t.detach().to(wide)) for n in TOKENS if (t := getattr(given, n)) is not None}
    if given.state is not None:
        leaves["state"] = given.state.detach().to(wide)
    leaves = {n: t.requires_grad_(gradients) for n, t in leaves.items()}
    with torch.set_grad_enabled(gradients):
        padded = {n: rows.gathered(t) for n, t in leaves.items() if n != "state"}
        padded |= {n: oracle.grouped(padded[n], given.group) for n in ("q", "k")}
        sizes = len(rows.index), given.v.shape[2], given.q.shape[3], given.v.shape[3]
        first = oracle.first_state(leaves["state"]) if "state" in leaves else padded["v"].new_zeros(sizes)
        out, state = run({**padded, "state": first})
    found = {"out": rows.scattered(out.detach()), "state": state.detach()}
    if not gradients:
        return found
    pairs = [(state, given.dstate)] if given.dstate is not None else []
    if given.dout is not None:
        pairs.append((out, rows.gathered(rows.cleared(given.dout))))
    pairs = [(t, g.to(wide)) for t, g in pairs if t.requires_grad]
    grads: Any = [torch.zeros_like(t) for t in leaves.values()]
    if pairs:
        outputs, upstream = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
    return found | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


class _Rows:
    """A call as a padded batch of sequences, and the way back."""

    def __init__(self, oracle: Delta, given: Given) -> None:
        batch, self.seqlen = given.q.shape[:2]
        self.shape = batch, self.seqlen
        device = given.q.device
        if given.starts is not None:
            first, count = oracle.sequence_bounds(given.starts)
        else:
            first = torch.arange(batch, device=device) * self.seqlen
            count = torch.full_like(first, self.seqlen) if given.lengths is None else given.lengths.long()
        step = torch.arange(int(count.max()) if count.numel() else 0, device=device)
        # (sequences, longest): which tokens count, and their numbers among all; the rest are one more, of zeros.
        self.live = step < count[:, None]
        self.index = torch.where(self.live, first[:, None] + step, batch * self.seqlen)
        self.counts = torch.zeros(batch * self.seqlen + 1, dtype=torch.bool, device=device)
        self.counts[self.index[self.live]] = True

    def cleared(self, t: Tensor) -> Tensor:
        """0 in tokens that count for nothing, which may hold anything."""
        return t.masked_fill(~self.counts[:-1].view(*self.shape, *[1] * (t.ndim - 2)), 0.0)

    def gathered(self, t: Tensor) -> Tensor:
        """(sequences, longest, …)."""
        flat = t.flatten(0, 1)
        return torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])[self.index]

    def scattered(self, t: Tensor) -> Tensor:
        """(batch, seqlen, …), 0 in tokens that count for nothing."""
        found = t.new_zeros((len(self.counts), *t.shape[2:]))
        found[self.index[self.live]] = t[self.live]
        return found[:-1].unflatten(0, self.shape)


class _Product(torch.autograd.Function):
    """a @ b of rounded operands, the gradient among them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, r: Any) -> Tensor:
        a, b = r(a), r(b)
        ctx.save_for_backward(a, b)
        ctx.r = r
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (a, b), g = ctx.saved_tensors, ctx.r(g)
        return g @ b.mT, a.mT @ g, None


class _Written(torch.autograd.Function):
    """What a chunk's tokens write: (I + a)⁻¹ (values - keys s), by the inverse, which is fp32 until it is an operand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, values: Tensor, keys: Tensor, s: Tensor, r: Any) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        inverse = r(torch.linalg.solve_triangular(eye + a, eye.expand_as(a), upper=False, unitriangular=True))
        w, s = r(inverse @ r(keys)), r(s)
        x = inverse @ r(values) - w @ s
        ctx.save_for_backward(inverse, w, s, r(x))
        ctx.r = r
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        (inverse, w, s, x), g = ctx.saved_tensors, ctx.r(g)
        solved = inverse.mT @ g
        low = ctx.r(solved)
        return -(low @ x.mT).tril(-1), solved, -(low @ s.mT), -(w.mT @ g), None


def _chunked(t: Named, o: Options, dtype: torch.dtype, turn: int, chunk: int) -> tuple[Tensor, Tensor]:
    """See `Delta.model`."""

    def r(x: Tensor) -> Tensor:
        return rounded(jittered(x, dtype, turn) if turn else x, dtype)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return _Product.apply(a, b, r)  # type: ignore[no-any-return, no-untyped-call]

    plain = Delta()
    q, k = (plain.unit(t[name], o).transpose(1, 2) for name in ("q", "k"))
    v, beta = t["v"].transpose(1, 2), t["beta"].transpose(1, 2)[..., None]
    logs = t["decay"].transpose(1, 2) if "decay" in t else torch.zeros_like(beta[..., 0])
    # Straight-through: normalized queries and keys are rounded once, for all products.
    q, k = (x + (r(x) - x).detach() for x in (q, k))
    s, outs = t["state"], []
    for n in range(0, q.shape[2], chunk):
        span = slice(n, n + chunk)
        a, b, x, w = q[:, :, span], k[:, :, span], v[:, :, span], beta[:, :, span]
        pairs, first, last, whole = _fading(logs[:, :, span])
        inner = (w * (b @ b.mT) * pairs).tril(-1)
        written = _Written.apply(inner, w * x, w * first * b, s, r)  # type: ignore[no-untyped-call]
        outs.append(product(first * a, s) + product(a @ b.mT * pairs, written))
        s = whole * s + product((last * b).mT, written)
    return torch.cat(outs, 2).transpose(1, 2) * o.scale if outs else t["v"] * 0.0, s


def _fading(logs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a chunk's tokens keep: from key to query (…, rows, rows), from the start, to the end (…, rows, 1), and of all.

    Each is exp of a sum of its own, and 0 where it is over a token that forgets.
    """
    rows = torch.arange(logs.shape[-1], device=logs.device)
    after = rows[:, None, None] < rows  # [j, 1, t], and t up to i
    between = (after & (rows <= rows[None, :, None])).to(logs.dtype)  # [j, i, t]
    forgets = logs < -800.0
    sums, lost = logs.masked_fill(forgets, 0.0), forgets.to(logs.dtype)

    def kept(which: Tensor) -> Tensor:
        return torch.exp((sums @ which.mT).masked_fill(lost @ which.mT > 0, -torch.inf))

    pairs = kept(between.flatten(0, 1)).unflatten(-1, between.shape[:2]).mT.tril()
    until = (rows[:, None] >= rows).to(logs.dtype)
    return pairs, kept(until)[..., None], kept(after[:, 0].to(logs.dtype))[..., None], kept(until[-1:])[..., None]


class DecayLate(Delta):
    """The state decays after a token has written, and before its query reads."""

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        s, _ = super().token(s, q, k, v, beta, None)
        s = s if kept is None else s * kept
        return s, self.read(s, q)


class ReadBeforeDecay(Delta):
    """A value's difference is taken to what the state held before it decayed."""

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        held = s if kept is None else s * kept
        s = held + k[..., None] * (beta * (v - self.read(s, k)))[..., None, :]
        return s, self.read(s, q)


class BetaOfValuesAlone(Delta):
    """What the key had is taken away whole."""

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        s = s if kept is None else s * kept
        s = s + k[..., None] * (beta * v - self.read(s, k))[..., None, :]
        return s, self.read(s, q)


class QueryReadsBefore(Delta):
    """A query does not see its own token."""

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        before = s if kept is None else s * kept
        return super().token(s, q, k, v, beta, kept)[0], self.read(before, q)


class EpsOutside(Delta):
    """eps is added to norms rather than to their squares."""

    def unit(self, x: Tensor, o: Options) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + o.eps) if o.normalize else x


class ScaleForgotten(Delta):
    """The default scale whatever was asked for."""

    def scale(self, scale: float, dim: int) -> float:
        return dim**-0.5


class HeadsByModulo(Delta):
    """Value head h reads key head h modulo their number."""

    def grouped(self, x: Tensor, group: int) -> Tensor:
        return x.repeat(1, 1, group, 1)


class StateNotSeen(Delta):
    """Every sequence begins at zeros."""

    def first_state(self, state: Tensor) -> Tensor:
        return 0.0 * state


class SequencesShifted(Delta):
    """Packed sequences end one token early."""

    def sequence_bounds(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        first, count = super().sequence_bounds(starts)
        return first, (count - 1).clamp(min=0)


MUTANTS: tuple[type[Delta], ...] = (
    DecayLate,
    ReadBeforeDecay,
    BetaOfValuesAlone,
    QueryReadsBefore,
    EpsOutside,
    ScaleForgotten,
    HeadsByModulo,
    StateNotSeen,
    SequencesShifted,
)
