"""linear_attention() against fla's kernels and a copy of as many bytes: forward, backward, with and without normalizer, a step.

Every contender takes mapped queries and keys, as fla does; ours with the feature map inside is a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom import LinearState, linear_attention, linear_attention_step
from warploom.bench import peers
from warploom.bench.captured import capture
from warploom.bench.harness import Call, Case, Comparison, WrongResult, first_line
from warploom.bench.patience import PATIENCE
from warploom.bench.peers import NotHere
from warploom.bench.reference import CHUNK, OneHead

# batch, heads, tokens, head_dim
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (8, 16, 2048, 64),
    (8, 16, 2048, 128),
    (1, 16, 16384, 64),
    (1, 16, 16384, 128),
    (4, 32, 8192, 128),
    (4, 8, 4096, 256),
)
LONG: tuple[Shape, ...] = ((1, 16, 65536, 64), (1, 16, 262144, 64))
STEP = {"batch": 64, "heads": 16, "head_dim": 128}
EPS = 1e-6
FURTHEST_STEP = 1e-2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_cases(quick: bool) -> list[Case]:
    """Every shape forward and backward, two long ones forward only, and a decode step."""
    shapes, long, step = (
        (SHAPES, LONG, STEP) if not quick else (((1, 2, 160, 16),), (), {"batch": 2, "heads": 2, "head_dim": 16})
    )
    found = []
    for batch, heads, tokens, dim in (*shapes, *long):
        shape = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": dim}
        name = f"B{batch} H{heads} L{tokens} D{dim}"
        found.append(Case("linear", name, shape, partial(_build, shape, (batch, heads, tokens, dim) in long)))
    name = f"step, B{step['batch']} H{step['heads']} D{step['head_dim']}"
    return [*found, Case("linear", name, step, partial(_build_step, step))]


def _build(shape: dict[str, int], forward_only: bool, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    size = (shape["batch"], shape["tokens"], shape["heads"], shape["head_dim"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    raw = [torch.randn(size, device=device).to(dtype) for _ in range(4)]
    for normalize in (False,) if forward_only else (False, True):
        what = ", normalized" if normalize else ""
        # A denominator needs positive features.
        q, k = (F.elu(t) + 1 for t in raw[:2]) if normalize else raw[:2]
        inputs = [q, k, *raw[2:]]
        contenders: dict[str, Attend] = {"warploom": partial(_ours, "identity", normalize)}
        others, refused = fla(normalize)
        contenders |= others
        if device.type == "cpu":
            contenders["token by token"] = partial(token_by_token, normalize=normalize)
        want = one_head(q, k, raw[2], None if forward_only else raw[3], normalize)
        bytes_moved = 4.0 * q.numel() * q.element_size()
        calls: dict[str, Call] = {name: partial(_forward, attend, *inputs[:3]) for name, attend in contenders.items()}
        if normalize:
            calls["warploom, elu+1 inside"] = partial(_forward, partial(_ours, "elu+1", True), *raw[:3])
        calls["copy"] = copy_of(bytes_moved, device)
        yield f"forward{what}", Comparison(calls, partial(_check, want.check_out), bytes=bytes_moved, refused=refused)
        if not forward_only:
            yield f"backward{what}", _backward(contenders, refused, inputs, want, device)


def _backward(
    contenders: dict[str, Attend], refused: dict[str, str], inputs: list[Tensor], want: OneHead, device: torch.device
) -> Comparison:
    """The comparison of gradients of q, k and v, which reads four tensors and writes three at the least."""
    bytes_moved = 7.0 * inputs[0].numel() * inputs[0].element_size()
    calls: dict[str, Call] = {}
    refused = dict(refused)
    for name, attend in contenders.items():
        try:
            leaves = [t.detach().requires_grad_() for t in inputs[:3]]
            out = PATIENCE.first(name, partial(attend, *leaves))
            calls[name] = partial(torch.autograd.grad, out, leaves, inputs[3], retain_graph=True)
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
    calls["copy"] = copy_of(bytes_moved, device)
    return Comparison(calls, partial(_check, want.check_gradients), bytes=bytes_moved, refused=refused)


def _build_step(shape: dict[str, int], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A token of every sequence: the state is read and written once."""
    batch, heads, dim = shape["batch"], shape["heads"], shape["head_dim"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(batch, heads, dim, device=device).to(dtype) for _ in range(3))
    held = LinearState(torch.randn(batch, heads, dim, dim, device=device), 100 * torch.rand(batch, heads, dim, device=device))
    with torch.no_grad():
        bytes_moved = 8.0 * held.s.numel()
        calls: dict[str, Call] = {"warploom": lambda: linear_attention_step(q, k, v, held)[0]}
        calls["warploom, no normalizer"] = lambda: linear_attention_step(
            q, k, v, held, feature_map="identity", normalize=False
        )[0]
        refused = {}
        try:
            recurrent = peers.fla("linear_attn", "fused_recurrent_linear_attn")
            rows = [t.unsqueeze(1) for t in (q, k, v)]
            calls["fla, recurrent"] = lambda: recurrent(
                *rows, scale=1.0, initial_state=held.s, output_final_state=True, normalize=False
            )[0].squeeze(1)
        except NotHere as why:
            refused["fla, recurrent"] = str(why)
        wanted = [_step(q, k, v, held, normalize) for normalize in (True, False)]
        calls["copy"] = copy_of(bytes_moved, device)
        if device.type == "cuda":
            for name in list(calls):
                try:
                    PATIENCE.first(name, calls[name])
                    calls[name] = capture(calls[name])
                except Exception as error:  # a peer may fail in any way
                    refused[name] = first_line(error)
                    del calls[name]
        yield "graph", Comparison(calls, partial(_check, partial(_nearest, wanted)), bytes=bytes_moved, refused=refused)


def _ours(feature_map: str, normalize: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map=feature_map, normalize=normalize, eps=EPS)


def _forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def fla(normalize: bool) -> tuple[dict[str, Attend], dict[str, str]]:
    """flash-linear-attention's two kernels for sequences, or why they are not here."""
    found: dict[str, Attend] = {}
    refused = {}
    for name, function in (("fla, chunk", "chunk_linear_attn"), ("fla, fused chunk", "fused_chunk_linear_attn")):
        try:
            found[name] = partial(_first_of, peers.fla("linear_attn", function), normalize)
        except NotHere as why:
            refused[name] = str(why)
    return found, refused


def _first_of(function: Callable[..., Any], normalize: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return function(q, k, v, scale=1.0, normalize=normalize)[0]


def copy_of(bytes_moved: float, device: torch.device) -> Call:
    """A copy that reads half of so many bytes and writes the other half: what memory allows."""
    source = torch.empty(int(bytes_moved) // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def _check(check: Callable[[Any], float], result: Any) -> float:
    return 0.0 if result is None else check(result)


def _nearest(wanted: list[Tensor], out: Tensor) -> float:
    """The error against the nearer of the results with and without normalizer."""
    error = min(float((out.double() - want).norm() / want.norm()) for want in wanted)
    if not error <= FURTHEST_STEP:
        raise WrongResult(f"out is {error:.2g} of its norm away from fp64, more than {FURTHEST_STEP:g}")
    return error


def _step(q: Tensor, k: Tensor, v: Tensor, state: LinearState, normalize: bool) -> Tensor:
    q, k, v, s, z = (t.double() for t in (q, k, v, *state))
    if normalize:
        q, k = F.elu(q) + 1, F.elu(k) + 1
    out = torch.einsum("bhe,bhem->bhm", q, s + k.unsqueeze(-1) * v.unsqueeze(-2))
    return out / ((q * (z + k)).sum(-1, keepdim=True) + EPS) if normalize else out


def one_head(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, normalize: bool) -> OneHead:
    """Causal linear attention of the last batch entry's last head on mapped inputs, in fp64, through its scores.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim); dout: gradient of out, or None for no gradients.
    """
    rows, keys, values = (t.detach()[-1, :, -1].double() for t in (q, k, v))
    outs, dqs = [], []
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for at in range(0, len(rows), CHUNK):
        part = rows[at : at + CHUNK]
        end = at + len(part)
        scores = (part @ keys[:end].T).tril(at)
        den = scores.sum(-1, keepdim=True) + EPS if normalize else scores.new_ones(len(part), 1)
        out = scores @ values[:end] / den
        outs.append(out)
        if dout is not None:
            upstream = dout[-1, at:end, -1].double()
            dv[:end] += scores.T @ (upstream / den)
            inner = (out * upstream).sum(-1, keepdim=True) if normalize else 0.0
            dscores = ((upstream @ values[:end].T - inner) / den).tril(at)
            dqs.append(dscores @ keys[:end])
            dk[:end] += dscores.T @ part
    gradients = None if dout is None else (torch.cat(dqs).float(), dk.float(), dv.float())
    return OneHead(torch.cat(outs).float(), gradients)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The recurrence of idiap's CPU code over all batch entries and heads at once: an outer product and a product a token."""
    batch, seqlen, heads = q.shape[:3]
    tokens = [t.permute(1, 0, 2, 3).reshape(seqlen, batch * heads, -1) for t in (q, k, v)]
    out = TokenByToken.apply(*tokens)
    if normalize:
        out = out / ((tokens[0] * tokens[1].cumsum(0)).sum(-1, keepdim=True) + EPS)
    return out.view(seqlen, batch, heads, -1).transpose(0, 1).contiguous()


class TokenByToken(torch.autograd.Function):
    """out_t = q_t s_t with s_t = s_{t-1} + k_t ⊗ v_t; tensors (seqlen, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        s, out = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), torch.empty_like(v)
        for t in range(len(q)):
            s.addcmul_(k[t].unsqueeze(-1), v[t].unsqueeze(-2))
            torch.bmm(q[t].unsqueeze(-2), s, out=out[t].unsqueeze(-2))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        s = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(len(q)):
            s.addcmul_(k[t].unsqueeze(-1), v[t].unsqueeze(-2))
            torch.bmm(s, dout[t].unsqueeze(-1), out=dq[t].unsqueeze(-1))
        s.zero_()
        for t in range(len(q) - 1, -1, -1):
            s.addcmul_(q[t].unsqueeze(-1), dout[t].unsqueeze(-2))
            torch.bmm(s, v[t].unsqueeze(-1), out=dk[t].unsqueeze(-1))
            torch.bmm(k[t].unsqueeze(-2), s, out=dv[t].unsqueeze(-2))
        return dq, dk, dv
