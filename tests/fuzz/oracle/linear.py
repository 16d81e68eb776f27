"""Linear attention as its definition says, in fp64 with autograd's gradients, and a low-precision model of a correct kernel.

out_i = scale · phi(q_i) s_i / (scale · phi(q_i) · z_i + eps), s_i the sum of phi(k_j) ⊗ v_j and z_i that of phi(k_j) over the
keys that query i sees: j <= i when causal, both counted from the start, else all; the given state comes on top. With a decay
key j counts for query i times exp of the sum of the logs of j + 1 to i, and the given state times that of all up to i. A mutant
is a subclass of `Linear` with one method changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.oracle.rounding import jittered, rounded

Named = dict[str, Tensor]
# Tokens of the model's chunks.
CHUNK = 64


@dataclass(frozen=True)
class Options:
    """What a call says beside its tensors."""

    causal: bool = True
    map_q: str = "elu+1"
    map_k: str = "elu+1"
    normalize: bool = True
    eps: float = 1e-6
    scale: float = 1.0
    state_wanted: bool = True  # else causal keys past the last query reach no result


@dataclass(frozen=True)
class Given:
    """A call's q, k, v (batch, seqlen, heads, ·), or (total, heads, ·) with ``starts``, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor | None = None
    z: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    decay: Tensor | None = None  # (heads_kv,), or (batch, seqlen_k, heads_kv) or (total, heads_kv)
    dout: Tensor | None = None
    ds: Tensor | None = None
    dz: Tensor | None = None


class Linear:
    """The oracle."""

    def exact(self, given: Given, options: Options, gradients: bool = True) -> Named:
        """Out and the last state s and z in fp64; with ``gradients`` dq, dk, dv, and ds and dz of a given state."""
        rows = _Rows(given, options, self)
        leaves = {name: t.double().requires_grad_(gradients) for name, t in rows.tensors.items()}
        with torch.set_grad_enabled(gradients):
            out, s, z = self._quadratic(leaves, rows, options)
        found = {"out": rows.back(out.detach(), "q"), "s": s.detach(), "z": z.detach()}
        if gradients:
            upstream = [(out, rows.dout), (s, given.ds), (z, given.dz)]
            pairs = [(t, d.double()) for t, d in upstream if d is not None and t.requires_grad]
            wanted = list(leaves.values())
            grads = tuple(torch.zeros_like(t) for t in wanted)
            if pairs:
                outputs, given_grads = zip(*pairs, strict=True)
                grads = torch.autograd.grad(outputs, wanted, given_grads, materialize_grads=True)
            found |= _named_gradients(dict(zip(leaves, grads, strict=True)), rows)
        return found

    def _quadratic(self, t: Named, rows: _Rows, o: Options) -> tuple[Tensor, Tensor, Tensor]:
        """Out, s and z through the matrix of scores, (batch, heads, seqlen_q, seqlen_k)."""
        group = t["q"].shape[2] // t["k"].shape[2]
        fq = self.features(t["q"], o.map_q)
        fk = self.hide(self.features(t["k"], o.map_k), rows.keys)
        v = self.hide(t["v"], rows.keys)
        s, z = torch.einsum("bnhe,bnhm->bhem", fk, v), fk.sum(1)
        held = {name: t[name].repeat_interleave(group, 1) for name in ("s", "z") if name in t}
        left = before = None
        if "decay" in t:
            left, before, at_end, kept = self._fading(t, rows, fq.shape[1])
            s, z = torch.einsum("bnhe,bnhm->bhem", fk * at_end[..., None], v), (fk * at_end[..., None]).sum(1)
            left, before = left.repeat_interleave(group, 1), before.repeat_interleave(group, 2)
            if held:
                held = {name: t[name].repeat_interleave(group, 1) for name in ("s", "z")}
                s = self.joined(s, t["s"] * kept[..., None, None])
                z = self.joined(z, t["z"] * kept[..., None])
        elif held:
            s, z = self.joined(s, t["s"]), self.joined(z, t["z"])
        fk, v = (x.repeat_interleave(group, 2) for x in (fk, v))
        seen = self.visible(fq.shape[1], fk.shape[1], o.causal, fq.device)
        seen = seen if left is None else seen * left
        scores = torch.einsum("bihe,bjhe->bhij", fq * self.scale(o.scale), fk) * seen
        above = torch.einsum("bhij,bjhm->bihm", scores, v)
        below = scores.sum(-1).transpose(1, 2)
        if held:
            rest = fq * self.scale(o.scale) if before is None else fq * self.scale(o.scale) * before[..., None]
            above = above + torch.einsum("bihe,bhem->bihm", rest, self.seen_state(held["s"]))
            below = below + torch.einsum("bihe,bhe->bih", rest, self.seen_state(held["z"]))
        out = self.divided(above, below, o.eps) if o.normalize else above
        return out * rows.queries[:, :, None, None], s, z

    def _fading(self, t: Named, rows: _Rows, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is left of key j at query i, (batch, heads_kv, queries, keys), and at the end, (batch, keys, heads_kv).

        And of the given state at query i, (batch, queries, heads_kv), and at the end, (batch, heads_kv). Logs of -inf are
        counted apart: a difference of two infinities would be none.
        """
        logs = t["decay"].expand(*t["k"].shape[:3])
        logs = self.logs(logs.masked_fill(~rows.keys[:, :, None], 0.0))
        tokens = torch.nn.functional.pad(logs, (0, 0, 0, max(queries - logs.shape[1], 0)))
        forgets = tokens == -torch.inf
        sums, count = tokens.masked_fill(forgets, 0.0).cumsum(1), forgets.long().cumsum(1)

        def left(i: slice, j: slice) -> Tensor:
            apart = sums[:, i, None] - sums[:, None, j]
            # Past the diagonal there is nothing to see, nor to overflow.
            return torch.where(count[:, i, None] == count[:, None, j], apart.clamp(max=0.0), -torch.inf).exp()

        end, keys = slice(tokens.shape[1] - 1, tokens.shape[1]), slice(logs.shape[1])
        before = torch.where(count == 0, sums, -torch.inf).exp()
        if not tokens.shape[1]:
            return tokens.new_ones(len(logs), logs.shape[2], 0, 0), before, logs, tokens.new_ones(len(logs), logs.shape[2])
        return left(slice(queries), keys).permute(0, 3, 1, 2), before[:, :queries], left(end, keys)[:, 0], before[:, -1]

    def logs(self, logs: Tensor) -> Tensor:
        """What keys' logs are, (batch, keys, heads_kv)."""
        return logs

    def features(self, x: Tensor, name: str) -> Tensor:
        """phi(x)."""
        if name == "elu+1":
            # exp of a minimum, so that a large x does not send an infinity into the gradient.
            return torch.where(x > 0, x + 1.0, torch.exp(torch.where(x > 0, 0.0, x)))
        return torch.where(x <= 0, 0.0, x) if name == "relu" else x

    def hide(self, x: Tensor, keys: Tensor) -> Tensor:
        """x (batch, seqlen, heads, ·), 0 at keys that do not count, (batch, seqlen) False."""
        return x.masked_fill(~keys[:, :, None, None], 0.0)

    def visible(self, queries: int, keys: int, causal: bool, device: Any) -> Tensor:
        """(queries, keys), 1 where a query sees a key."""
        seen = torch.ones(queries, keys, dtype=torch.float64, device=device)
        return seen.tril() if causal else seen

    def scale(self, scale: float) -> float:
        return scale

    def divided(self, above: Tensor, below: Tensor, eps: float) -> Tensor:
        """Numerators over denominators."""
        return above / (below + eps)[..., None]

    def joined(self, own: Tensor, given: Tensor) -> Tensor:
        """The last state, from the keys' own sums and the given state."""
        return own + given

    def seen_state(self, given: Tensor) -> Tensor:
        """What queries see of the given state."""
        return given

    def sequence_bounds(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """First tokens and numbers of tokens of packed sequences."""
        starts = starts.long()
        return starts[:-1], starts[1:] - starts[:-1]

    def model(self, given: Given, options: Options, gradients: bool = True, turn: int = 0) -> Named:
        """What a correct kernel of v's dtype returns: sums in fp32 over chunks, operands of matrix products rounded.

        Rounded are mapped queries and keys, scores, states, scale / denominator · phi(q), and results, once each; fp32 operands
        to two TF32 numbers. Slopes of maps come from their rounded values. Each ``turn`` but 0 has operands that are off by up
        to half an ulp before they are rounded, as by sums in another order or a factor applied elsewhere.
        """
        rows = _Rows(given, options, self)
        dtype = given.v.dtype
        wide = torch.promote_types(dtype, torch.float32)
        tensors = {name: t.to(wide) for name, t in rows.tensors.items()}
        results, grads = _chunked(tensors, rows, given, options, dtype, gradients, turn)
        results["out"] = rows.back(results["out"], "q").to(dtype)
        named = _named_gradients(grads, rows)
        return results | {n: t.to(dtype) if n in ("dq", "dk", "dv") else t for n, t in named.items()}

    def steps(self, given: Given, options: Options, gradients: bool = False) -> Named:
        """Out, s and z by a correct step for each token: sums in fp32, nothing rounded but out. It has no gradients."""
        assert not gradients
        dtype = given.v.dtype
        wide = torch.promote_types(dtype, torch.float32)
        assert given.s is not None and given.z is not None
        group = given.q.shape[2] // given.k.shape[2]
        fq = self.features(given.q.to(wide), options.map_q) * options.scale
        fk, v = self.features(given.k.to(wide), options.map_k), given.v.to(wide)
        s, z, outs = given.s.to(wide), given.z.to(wide), []
        for i in range(fq.shape[1]):
            if given.decay is not None:
                kept = (given.decay if given.decay.ndim == 1 else given.decay[:, i]).exp()
                s, z = s * kept[..., None, None], z * kept[..., None]
            s, z = s + fk[:, i, :, :, None] * v[:, i, :, None], z + fk[:, i]
            row = fq[:, i].unflatten(1, (-1, group))
            out = row @ s
            if options.normalize:
                out = out / ((row @ z[..., None]) + options.eps)
            outs.append(out.flatten(1, 2))
        return {"out": torch.stack(outs, 1).to(dtype), "s": s, "z": z}


class _Rows:
    """A call as a padded batch of sequences: which tokens count, and the way back to the call's own layout."""

    def __init__(self, given: Given, options: Options, oracle: Linear) -> None:
        q, k, v = given.q, given.k, given.v
        self.given, self.index = given, None
        device = q.device
        if given.starts is None:
            self.queries = torch.ones(q.shape[:2], dtype=torch.bool, device=device)
            self.keys = torch.ones(k.shape[:2], dtype=torch.bool, device=device)
            if given.lengths is not None:
                self.keys = torch.arange(k.shape[1], device=device) < given.lengths[:, None]
        else:
            first, count = oracle.sequence_bounds(given.starts)
            longest = int(count.max()) if count.numel() else 0
            step = torch.arange(longest, device=device)
            self.queries = self.keys = step < count[:, None]
            self.index = torch.where(self.keys, first[:, None] + step, len(q))
        if options.causal and not options.state_wanted:
            self.keys = self.keys & (torch.arange(self.keys.shape[1], device=device) < self.queries.shape[1])
        dout = given.dout
        self.tensors = {"q": self._padded(q, self.queries), "k": self._padded(k, self.keys), "v": self._padded(v, self.keys)}
        self.dout = None if dout is None else self._padded(dout, self.queries)
        if given.s is not None and given.z is not None:
            self.tensors |= {"s": given.s.detach(), "z": given.z.detach()}
        if given.decay is not None:
            whole = given.decay.ndim == 1
            logs = given.decay.detach() if whole else self._padded(given.decay[..., None], self.keys)[..., 0]
            self.tensors["decay"] = logs

    def _padded(self, t: Tensor, live: Tensor) -> Tensor:
        """Rows by sequence, 0 where they count for nothing, whatever they hold."""
        t = t.detach()
        if self.index is not None:
            t = torch.cat([t, t.new_zeros((1, *t.shape[1:]))])[self.index]
        return t.masked_fill(~live[:, :, None, None], 0.0)

    def back(self, t: Tensor, like: str) -> Tensor:
        """Rows by sequence in the layout of q, k or v; 0 in tokens of no sequence."""
        live = self.queries if like == "q" else self.keys
        t = t.masked_fill(~live[:, :, None, None], 0.0)
        if self.index is None:
            return t
        total = len(getattr(self.given, like))
        found = t.new_zeros((total + 1, *t.shape[2:]))
        found[self.index] = t
        return found[:total]


def _named_gradients(grads: Named, rows: _Rows) -> Named:
    found = {f"d{name}": rows.back(t, name) if name in "qkv" else t for name, t in grads.items()}
    if "decay" in grads and grads["decay"].ndim == 3:
        found["ddecay"] = rows.back(grads["decay"][..., None], "k")[..., 0]
    return found


def _chunked(
    t: Named, rows: _Rows, given: Given, o: Options, dtype: torch.dtype, gradients: bool, turn: int
) -> tuple[Named, Named]:
    """The model's out, s and z, and its gradients of q, k, v, s and z, all chunks at once; see `Linear.model`."""
    plain = Linear()
    group = t["q"].shape[2] // t["k"].shape[2]
    heads_kv = t["k"].shape[2]
    seqlen_q, seqlen_k = t["q"].shape[1], t["k"].shape[1]
    chunks = max(-(-max(seqlen_q, seqlen_k) // CHUNK), 1)

    def r(x: Tensor) -> Tensor:
        return rounded(jittered(x, dtype, turn) if turn else x, dtype)

    def cut(x: Tensor, repeat: int) -> Tensor:
        """(batch, heads_q, chunks, CHUNK, ·)."""
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - x.shape[1]))
        return x.transpose(1, 2).repeat_interleave(repeat, 1).unflatten(2, (chunks, CHUNK))

    def joined(x: Tensor, seqlen: int, heads: int) -> Tensor:
        """The way back; a group's heads are added."""
        return x.flatten(2, 3)[:, :, :seqlen].unflatten(1, (heads, -1)).sum(2).transpose(1, 2)

    fq = r(cut(plain.features(t["q"], o.map_q), 1))
    fk = r(cut(plain.hide(plain.features(t["k"], o.map_k), rows.keys), group))
    v = cut(t["v"], group)
    zeros = fq.new_zeros((fq.shape[0], fq.shape[1], fq.shape[-1], v.shape[-1]))
    s0 = t["s"].repeat_interleave(group, 1) if "s" in t else zeros
    z0 = t["z"].repeat_interleave(group, 1) if "z" in t else zeros[..., 0]
    seen = torch.ones(CHUNK, CHUNK, dtype=fq.dtype, device=fq.device).tril() * o.causal
    fading = "decay" in t
    at: Any = 1.0
    if fading:
        # fp64: kernels keep sums of logs in two numbers.
        logs = t["decay"].double().expand(*t["k"].shape[:3]).masked_fill(~rows.keys[:, :, None], 0.0)
        sums = cut(logs.clamp_min(-1000.0)[..., None], group)[..., 0].cumsum(-1)
        apart = (sums[..., :, None] - sums[..., None, :]).clamp(max=0.0)
        seen = (seen * apart.exp()).to(fq.dtype)
        at, kept = sums.exp()[..., None].to(fq.dtype), sums[..., -1].exp().to(fq.dtype)
        left = (sums[..., -1:] - sums).exp()[..., None].to(fq.dtype)

    def walked(own: Tensor, first: Tensor, order: Any) -> tuple[Tensor, Tensor]:
        """Sums before each chunk, in an order of chunks, and after all, where they fade."""
        found, now = torch.empty_like(own), first
        for n in order:
            found[:, :, n] = now
            now = now * kept[:, :, n].view(*now.shape[:2], *[1] * (now.ndim - 2)) + own[:, :, n]
        return found, now

    def before(own: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Sums before each chunk, from ``first`` on; of all chunks where the call is not causal. And after all."""
        if fading:
            return walked(own, first, range(chunks))
        if not o.causal:
            return (first + own.sum(2)).unsqueeze(2).expand(-1, -1, chunks, *own.shape[3:]), first + own.sum(2)
        return first.unsqueeze(2) + own.cumsum(2) - own if chunks > 1 else first.unsqueeze(2), first + own.sum(2)

    joining = r(fk * left) if fading else fk
    (s, last_s), (z, last_z) = before(joining.mT @ v, s0), before(joining.sum(3), z0)
    p = (fq @ fk.mT) * seen
    below = o.scale * (p.sum(-1) + (fq * z[:, :, :, None] * at).sum(-1)) + o.eps
    norm = below if o.normalize else torch.ones_like(below)
    factor = (o.scale / norm)[..., None]
    live = cut(rows.queries[:, :, None, None].to(fq.dtype), 1)
    out = (r(p) @ v + fq @ r(s) * at) * factor * live
    found = {
        "out": joined(out, seqlen_q, fq.shape[1]),
        "s": last_s.unflatten(1, (heads_kv, group))[:, :, 0],
        "z": last_z.unflatten(1, (heads_kv, group))[:, :, 0],
    }
    if not gradients:
        return found, {}
    dout = rows.dout if rows.dout is not None else out.new_zeros((*t["q"].shape[:3], t["v"].shape[3]))
    g = cut(dout.to(fq.dtype), 1)
    gradient = r((g @ v.mT) * seen) @ fk + g @ r(s).mT * at
    delta = (fq * gradient).sum(-1) * factor[..., 0] if o.normalize else torch.zeros_like(norm)
    dfq = (gradient - delta[..., None] * (z[:, :, :, None] * at + (r(seen) if fading else seen) @ fk)) * factor * live
    # Queries, weighted: rows that are no query have dout 0.
    f = r(fq * factor)
    df = r(fq * factor * delta[..., None])

    def after(own: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        if fading:
            return walked(own, last, reversed(range(chunks)))
        if not o.causal:
            return (last + own.sum(2)).unsqueeze(2).expand(-1, -1, chunks, *own.shape[3:]), last + own.sum(2)
        own_after = last.unsqueeze(2) + own.flip(2).cumsum(2).flip(2) - own if chunks > 1 else last.unsqueeze(2)
        return own_after, last + own.sum(2)

    def shared(x: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if x is None else x.to(fq.dtype).repeat_interleave(group, 1) / group

    reaching = r(fq * factor * at) if fading else f
    ds, first_ds = after(reaching.mT @ g, shared(given.ds, s0))
    dz, first_dz = after(-(df * at).sum(3), shared(given.dz, z0))
    of_keys: Any = left if fading else 1.0
    dv = r((f @ fk.mT) * seen).mT @ g + fk @ r(ds) * of_keys
    dfk = r((g @ v.mT) * seen).mT @ f + v @ r(ds).mT * of_keys + (dz[:, :, :, None] * of_keys - seen.mT @ df)

    def through(x: Tensor, mapped: Tensor, name: str) -> Tensor:
        if name == "elu+1":
            return x * mapped.clamp(max=1.0)
        return x * (mapped > 0) if name == "relu" else x

    grads = {
        "q": joined(through(dfq, fq, o.map_q), seqlen_q, fq.shape[1]),
        "k": joined(through(dfk, fk, o.map_k), seqlen_k, heads_kv),
        "v": joined(dv, seqlen_k, heads_kv),
    }
    if "s" in t:
        grads["s"] = first_ds.unflatten(1, (heads_kv, group)).sum(2)
        grads["z"] = first_dz.unflatten(1, (heads_kv, group)).sum(2)
    if fading:
        # Every pair of a query at or after a token and a key before it, both in the chunk, or before or after it.
        y, x = torch.cat([g, -delta[..., None]], -1), torch.cat([v, torch.ones_like(v[..., :1])], -1)
        first, last = torch.cat([s, z[..., None]], -1), torch.cat([ds, dz[..., None]], -1)
        met = (f @ fk.mT * r(y @ x.mT * seen)).tril(-1)
        gives = met.sum(-1) - met.sum(-2) + (f * (y @ r(first).mT * at)).sum(-1)
        takes = (fk * (x @ r(last).mT * left)).sum(-1)
        both = (last * r(first)).sum((-1, -2)) * kept
        dlogs = gives.flip(-1).cumsum(-1).flip(-1) + takes.cumsum(-1) - takes + both[..., None]
        dlogs = joined(dlogs[..., None], seqlen_k, heads_kv)[..., 0].masked_fill((logs < -100.0) | ~rows.keys[:, :, None], 0.0)
        grads["decay"] = dlogs if t["decay"].ndim == 3 else dlogs.sum((0, 1))
    return found, grads


class StateNotAdded(Linear):
    """The last state is the keys' own sums."""

    def joined(self, own: Tensor, given: Tensor) -> Tensor:
        return own


class StateNotSeen(Linear):
    """Queries see the call's own keys alone."""

    def seen_state(self, given: Tensor) -> Tensor:
        return torch.zeros_like(given)


class EpsOutside(Linear):
    """eps is added to the quotient's denominator as a factor: numerators over (1 + eps) denominators."""

    def divided(self, above: Tensor, below: Tensor, eps: float) -> Tensor:
        return above / (below * (1 + eps) + 1e-30)[..., None]


class ScaleMissing(Linear):
    """The scale is 1."""

    def scale(self, scale: float) -> float:
        return 1.0


class PaddedKeysInNormalizer(Linear):
    """Keys that do not count are in the denominator, as phi(0)."""

    def hide(self, x: Tensor, keys: Tensor) -> Tensor:
        return x


class DiagonalHidden(Linear):
    """A causal query does not see its own key."""

    def visible(self, queries: int, keys: int, causal: bool, device: Any) -> Tensor:
        seen = super().visible(queries, keys, causal, device)
        return seen.tril(-1) if causal else seen


class CausalFromTheEnd(Linear):
    """Queries and keys are aligned at their ends, as in softmax attention."""

    def visible(self, queries: int, keys: int, causal: bool, device: Any) -> Tensor:
        seen = torch.ones(queries, keys, dtype=torch.float64, device=device)
        return seen.tril(keys - queries) if causal else seen


class EluWithoutOne(Linear):
    """phi(x) is exp(x) for positive x too."""

    def features(self, x: Tensor, name: str) -> Tensor:
        return torch.exp(x.clamp(max=20.0)) if name == "elu+1" else super().features(x, name)


class SequencesShifted(Linear):
    """Packed sequences end one token early."""

    def sequence_bounds(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        first, count = super().sequence_bounds(starts)
        return first, (count - 1).clamp(min=0)


class DecayMissing(Linear):
    """Nothing fades."""

    def logs(self, logs: Tensor) -> Tensor:
        return torch.zeros_like(logs) + 0.0 * logs.nan_to_num(0.0, neginf=0.0)


class DecayLate(Linear):
    """The state is multiplied after a key has joined it: every log is the next token's."""

    def logs(self, logs: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(logs[:, :1]), logs[:, :-1]], 1)


MUTANTS: tuple[type[Linear], ...] = (
    StateNotAdded,
    StateNotSeen,
    EpsOutside,
    ScaleMissing,
    PaddedKeysInNormalizer,
    DiagonalHidden,
    CausalFromTheEnd,
    EluWithoutOne,
    SequencesShifted,
    DecayMissing,
    DecayLate,
)
