"""linear_attention(), its gradients, and chains of linear_attention_step(), against tests/fuzz/oracle/linear.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.families.linear_draw import LinearProblem, LinearVariant, draw_problem, draw_variant
from tests.fuzz.families.spread import spread
from tests.fuzz.oracle.attention import farthest
from tests.fuzz.oracle.linear import MUTANTS as ORACLES
from tests.fuzz.oracle.linear import Given, Linear, Options
from tests.fuzz.problem import DTYPES, OPINIONS, Expected
from tests.fuzz.views import View, place

NAME = "linear"
BACKENDS = ("cpu", "hopper", "triton", "reference")
# Oracles that must be caught, by name: a namespace as `oracle` returns.
MUTANTS = {f"linear: {each.__name__}": SimpleNamespace(linear=each()) for each in ORACLES}

_ONE_TOKEN = "a step has one token a sequence"
# Features that no problem has together, with the reason.
EXCLUSIVE = [
    ({"full", "steps"}, "a call or steps"),
    *(({"steps", other}, _ONE_TOKEN) for other in ("lengths", "packed", "tokens_of_no_sequence", "fewer_keys", "more_keys")),
    *(({"steps", other}, _ONE_TOKEN) for other in ("not_causal", "several_chunks")),
    ({"lengths", "packed"}, "packed sequences have no padding"),
    ({"lengths", "tokens_of_no_sequence"}, "packed sequences have no padding"),
    *(
        ({a, b}, "packed queries and keys are as many")
        for a in ("packed", "tokens_of_no_sequence")
        for b in ("fewer_keys", "more_keys")
    ),
    ({"fewer_keys", "more_keys"}, "one or the other"),
    *(({"not_causal", f"decay_of_a_{each}"}, "a decay needs an order of keys") for each in ("head", "token")),
    ({"not_causal", "decay_that_forgets"}, "a decay needs an order of keys"),
    ({"decay_of_a_head", "decay_of_a_token"}, "one or the other"),
    ({"no_denominator", "eps_that_shows"}, "eps is in the denominator"),
    *(
        ({"a_visible_NaN", other}, "the order of operations decides which gradients a NaN reaches")
        for other in ("gradients", "gradient_of_the_state", "dout_a_view")
    ),
]


def variants(d: Draw, backend: str, count: int) -> list[LinearVariant]:
    """Each is three to eight binaries."""
    return spread(lambda: draw_variant(d, backend), count, lambda w: 3 * (w.map_q != w.map_k,))


def draw(d: Draw, variant: LinearVariant | None, backend: str) -> LinearProblem:
    return draw_problem(d, draw_variant(d, backend) if variant is None else variant, backend)


def oracle() -> SimpleNamespace:
    return SimpleNamespace(linear=Linear())


def features(p: LinearProblem) -> frozenset[str]:
    views = (p.q_view, p.k_view, p.v_view)
    flags = {
        p.dtype: p.dtype != "float64",
        "full": not p.steps,
        "steps": p.steps,
        "not_causal": not p.causal,
        "lengths": p.lengths is not None,
        "packed": p.sequences is not None,
        "tokens_of_no_sequence": p.sequences is not None and sum(p.sequences) < p.seqlen_q,
        "fewer_keys": p.seqlen_k < p.seqlen_q,
        "more_keys": p.seqlen_k > p.seqlen_q,
        "several_chunks": max(p.seqlen_q, p.seqlen_k) > 64,
        "heads_grouped": p.group > 1,
        "dims_differ": p.e != p.m,
        "dim_no_power_of_two": bool(p.e & (p.e - 1) or p.m & (p.m - 1)),
        "dim_past_64": max(p.e, p.m) > 64,
        "elu+1": "elu+1" in (p.map_q, p.map_k),
        "relu": "relu" in (p.map_q, p.map_k),
        "identity": "identity" in (p.map_q, p.map_k),
        "two_maps": p.map_q != p.map_k,
        "no_denominator": not p.normalize,
        "eps_that_shows": p.normalize and p.eps >= 0.1,
        "scale": p.scale != 1.0,
        "state_in": p.state,
        "state_out": p.return_state,
        "decay_of_a_head": p.decay == "head",
        "decay_of_a_token": p.decay == "token",
        "decay_that_forgets": p.forgets,
        "gradients": p.upstream != "",
        "gradient_of_the_state": p.upstream in ("state", "both"),
        "hidden_NaN_or_infinity": bool(p.hostile),
        "a_visible_NaN": bool(p.visible_nan),
        "zeros": p.zeros,
        "values_of_a_mean": p.mean != 0.0,
        "an_input_a_view": any(view.kind != "contiguous" for view in views),
        "dout_a_view": p.upstream in ("out", "both") and p.dout_view.kind != "contiguous",
        "shared_memory": any(view.aliased for view in views),
        "unaligned": any(view.offset % 8 for view in views) or p.state_gap > 0,
    }
    return frozenset(name for name, present in flags.items() if present)


def inputs(p: LinearProblem, device: torch.device) -> dict[str, Any]:
    """Tensors of the call and gradients of its results; "buffers" is all their memory."""
    generator = torch.Generator().manual_seed(p.seed)
    dtype, heads_q = DTYPES[p.dtype], p.heads_kv * p.group
    wide = torch.promote_types(dtype, torch.float32)
    count = p.batch if p.sequences is None else len(p.sequences)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = normal(p.batch, p.seqlen_q, heads_q, p.e), normal(p.batch, p.seqlen_k, p.heads_kv, p.e)
    if p.normalize:
        # Products of both signs could sum to almost nothing; beyond rounding, nothing can then be said of the quotient.
        q, k = (t.abs() if name == "identity" else t for t, name in ((q, p.map_q), (k, p.map_k)))
    if p.zeros:
        q, k = (t * (torch.rand(t.shape, generator=generator) < 0.8) for t in (q, k))
    v, dout = normal(p.batch, p.seqlen_k, p.heads_kv, p.m) + p.mean, normal(p.batch, p.seqlen_q, heads_q, p.m)
    rest, padding = _hidden(p)
    placed = {
        "q": place(q.to(dtype), p.q_view, rest, p.hostile, device),
        "k": place(k.to(dtype), p.k_view, padding, p.hostile, device),
        "v": place(v.to(dtype), p.v_view, padding, p.hostile, device),
        "dout": place(dout.to(dtype), p.dout_view, rest, p.hostile, device),
    }
    found: dict[str, Any] = {name: each.tensor for name, each in placed.items()}
    found["decay"] = _logs(p, generator, padding).to(device, wide) if p.decay else None
    if p.sequences is not None and not p.four:
        found |= {name: found[name].squeeze(0) for name in (*placed, *(["decay"] if p.decay == "token" else []))}
    shape = count, p.heads_kv, p.e, p.m
    found["s"] = found["z"] = None
    if p.state:
        room = normal(*shape[:3], p.m + p.state_gap).to(device, wide)
        found["s"] = room[..., p.state_gap :]
        found["z"] = normal(*shape[:2], p.e + p.state_gap).abs().to(device, wide)[..., p.state_gap :]
    found["ds"], found["dz"] = normal(*shape).to(device, wide), normal(*shape[:3]).to(device, wide)
    for name, numbers in (("lengths", p.lengths), ("starts", _starts(p))):
        found[name] = None
        if numbers is not None:
            repeated = torch.tensor(numbers, dtype=torch.int32).repeat_interleave(p.index_step)
            if p.index_step > 1:
                repeated[1::2] = 2**30
            found[name] = repeated.to(device)[:: p.index_step]
    _put_visible_nan(p, found)
    others = [found[name] for name in ("s", "z", "ds", "dz", "decay", "lengths", "starts") if found[name] is not None]
    found["buffers"] = [each.buffer for each in placed.values()] + others
    return found


def _logs(p: LinearProblem, generator: torch.Generator, padding: Tensor | None) -> Tensor:
    """Heads that forget in a token, in a few or in hundreds; NaN where a key counts for nothing and may hold anything."""
    rates = 10 ** (2.5 * torch.rand(p.heads_kv + p.state_gap, generator=generator) - 2)
    shape = (p.batch, p.seqlen_k, p.heads_kv + p.state_gap) if p.decay == "token" else (p.heads_kv + p.state_gap,)
    logs = -torch.rand(shape, generator=generator) * rates
    if p.forgets:
        logs[torch.rand(shape, generator=generator) < 0.15] = -torch.inf
    if p.decay == "token" and p.hostile and padding is not None:
        logs = logs.masked_fill(padding[..., 0], torch.nan)
    return logs[..., p.state_gap :]


def _starts(p: LinearProblem) -> list[int] | None:
    return None if p.sequences is None else list(accumulate(p.sequences, initial=0))


def _hidden(p: LinearProblem) -> tuple[Tensor | None, Tensor | None]:
    """Queries of no sequence, and keys that count for nothing: (batch, seqlen, 1, 1)."""
    row, key = torch.arange(p.seqlen_q), torch.arange(p.seqlen_k)
    if p.sequences is not None:
        rest = (row >= sum(p.sequences)).view(1, -1, 1, 1)
        return rest, rest
    padding = torch.zeros(p.batch, p.seqlen_k, dtype=torch.bool)
    if p.lengths is not None:
        padding |= key >= torch.tensor(p.lengths, dtype=torch.int64).view(-1, 1)
    if p.causal and not p.return_state:
        padding |= key >= p.seqlen_q
    return None, padding[:, :, None, None]


def _put_visible_nan(p: LinearProblem, found: dict[str, Any]) -> None:
    """A NaN in the first key, or its value, of one sequence: all its queries see it, of the heads that share it."""
    keys = p.lengths or p.sequences or (p.seqlen_k,) * p.batch
    n = p.seed % max(len(keys), 1)
    if not p.visible_nan or not any(keys) or keys[n] == 0 or (p.causal and p.seqlen_q == 0):
        return
    t = found[p.visible_nan]
    head, column = p.seed % t.shape[-2], p.seed % t.shape[-1]
    if p.sequences is None:
        t[n, 0, head, column] = float("nan")
    else:
        t[..., sum(p.sequences[:n]), head, column] = float("nan")


def _options(p: LinearProblem) -> dict[str, Any]:
    maps = p.map_q if p.map_q == p.map_k else (p.map_q, p.map_k)
    return {"feature_map": maps, "normalize": p.normalize, "eps": p.eps, "scale": p.scale}


def run(p: LinearProblem, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    """Out, the last state where it is asked for, and the gradients that `upstream` gives."""
    from warploom import LinearState, linear_attention

    recorded = p.upstream != "" and (p.grad or not p.steps)
    leaves = {name: given[name].detach() for name in ("q", "k", "v", "s", "z", "decay") if given[name] is not None}
    if recorded:
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    state = LinearState(leaves["s"], leaves["z"]) if p.state else None
    if p.steps:
        out, last = _chain(p, leaves, state, backend)
    else:
        found = linear_attention(
            leaves["q"], leaves["k"], leaves["v"], causal=p.causal, state=state, return_state=p.return_state,
            lengths=given["lengths"], cu_seqlens=given["starts"], decay=leaves.get("decay"), backend=backend, **_options(p),
        )  # fmt: skip
        out, last = found if p.return_state else (found, None)
    results: dict[str, Tensor | None] = {"out": out.detach()}
    if last is not None:
        results |= {"s": last.s.detach(), "z": last.z.detach()}
    if recorded:
        pairs = [(out, given["dout"])] if p.upstream in ("out", "both") else []
        if p.upstream in ("state", "both") and last is not None:
            pairs += [(last.s, given["ds"]), (last.z, given["dz"])]
        outputs, upstream = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
        results |= {f"d{name}": t for name, t in zip(leaves, grads, strict=True)}
    return results


def _chain(p: LinearProblem, t: dict[str, Tensor], state: Any, backend: str) -> tuple[Tensor, Any]:
    """Tokens one after another: as (batch, heads, dim), or by turns with a dimension of 1."""
    from warploom import linear_attention_step

    rows = []
    for i in range(p.seqlen_q):
        at: Any = slice(i, i + 1) if (p.seed + i) % 2 else i
        logs = t["decay"][:, at] if p.decay == "token" else t.get("decay")
        row = t["q"][:, at], t["k"][:, at], t["v"][:, at], state
        out, state = linear_attention_step(*row, decay=logs, backend=backend, **_options(p))
        rows.append(out if out.ndim == 4 else out[:, None])
    return torch.cat(rows, 1), state


def expect(p: LinearProblem, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    exact: Linear = oracle.linear
    dtype = DTYPES[p.dtype]
    wide = torch.promote_types(dtype, torch.float32)
    recorded = p.upstream != "" and (p.grad or not p.steps)
    names = ["s", "z", "lengths", "starts", "decay"]
    names += ["dout"] if p.upstream in ("out", "both") else []
    names += ["ds", "dz"] if p.upstream in ("state", "both") else []
    flat = {name: t.squeeze(0) if p.four else t for name, t in given.items() if name in ("q", "k", "v", "dout")}
    if p.decay == "token":
        flat["decay"] = given["decay"].squeeze(0) if p.four else given["decay"]
    call = Given(flat["q"], flat["k"], flat["v"], **{name: flat.get(name, given.get(name)) for name in names})
    options = Options(p.causal, p.map_q, p.map_k, p.normalize, p.eps, p.scale, p.return_state)
    want = exact.exact(call, options, recorded)
    # The error that is granted is that of the true call, or a wrong oracle would grant itself its own error.
    true = want if type(exact) is Linear else Linear().exact(call, options, recorded)
    if p.steps and not recorded:
        models = [Linear().steps(call, options)]
    else:
        # Of few rows one model's error may be small by luck.
        rows = p.batch * p.heads_kv * min(p.group * p.seqlen_q, p.seqlen_k)
        turns = range(OPINIONS if again else 1 if rows > 256 else 3)
        models = [Linear().model(call, options, recorded, turn) for turn in turns]
        if rows <= 256:
            models.append({name: farthest(t, [m[name] for m in models]) for name, t in true.items()})
    lows = {name: tuple(want[name] + (m[name] - t) for m in models) for name, t in true.items()}
    if not p.return_state:
        want = {name: t for name, t in want.items() if name not in ("s", "z")}
    found = {}
    for name, ref in want.items():
        near = lows[name]
        if p.four and (name in ("out", "dq", "dk", "dv") or (name == "ddecay" and p.decay == "token")):
            ref, near = ref[None], tuple(t[None] for t in near)
        like = dtype if name in ("out", "dq", "dk", "dv") else wide
        found[name] = Expected(ref, near, loose=bool(p.visible_nan), like=like)
    return found


def refusal(p: LinearProblem, given: dict[str, Any], backend: str) -> str | None:
    on_cpu = given["q"].device.type == "cpu"
    if backend == "cpu":
        return None if on_cpu else "runs on CPU tensors"
    if backend == "triton":
        if p.dtype == "float64":
            return "takes float16, bfloat16 or float32"
        if p.dtype == "bfloat16" and on_cpu:
            return "interpreter multiplies bfloat16"
    if backend == "hopper":
        return _walk_refusal(p, given, on_cpu)
    return None


def _walk_refusal(p: LinearProblem, given: dict[str, Any], on_cpu: bool) -> str | None:
    """Part of what the docs say the walks do not take."""
    if on_cpu:
        return "hopper"
    if p.dtype != "bfloat16":
        return "takes bfloat16"
    if any(not 64 <= n <= 256 or n % 8 for n in (p.e, p.m)):
        return "from 64 to 256 in steps of 8"
    least = 64 if p.decay else 136 if p.normalize else 72
    if max(p.e, p.m) < least:
        return f"from {least} on"
    if not p.causal:
        return "is causal only"
    if not p.normalize and {p.map_q, p.map_k} != {"identity"}:
        return "takes maps with a denominator only"
    if p.state:
        return "takes no initial state"
    if p.decay and p.normalize:
        return "takes a decay without a denominator only"
    if p.lengths is not None or p.sequences is not None:
        return "takes neither lengths nor packed sequences"
    if p.seqlen_k != p.seqlen_q:
        return "takes as many keys as queries"
    if p.group > 1:
        return "takes as many heads of keys as of queries"
    processors = torch.cuda.get_device_properties(given["q"].device).multi_processor_count
    if p.batch * p.heads_kv * (1 if max(p.e, p.m) <= 128 else -(-min(p.e, p.m) // 64)) < 0.24 * processors:
        return "needs more sequences and heads"
    return None


def modules(p: LinearProblem, backend: str) -> list[Any]:
    """Specs of the compiled modules that the backend needs for a problem that it takes."""
    from warploom.linear.hopper.plan import configs, width

    if backend != "hopper" or max(p.e, p.m) > 256:
        return []
    fading, logs = p.decay != "", p.decay != "" and p.upstream != ""
    return [config.spec for config in configs(width(p.e, p.m), p.normalize, fading, p.decay == "head", logs=logs)]


def shrink(p: LinearProblem) -> Iterator[LinearProblem]:
    """Simpler problems: one thing less each."""
    plain = {
        "visible_nan": "", "zeros": False, "mean": 0.0, "state_gap": 0, "index_step": 1, "four": False, "hostile": "",
        "scale": 1.0, "eps": 1e-6, "grad": False, "forgets": False, "decay": "",
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    for name in ("q_view", "k_view", "v_view", "dout_view"):
        if getattr(p, name) != View():
            yield replace(p, **{name: View()})
    if p.sequences is not None:
        for n in range(len(p.sequences)):
            yield replace(p, sequences=p.sequences[:n] + p.sequences[n + 1 :])
        if sum(p.sequences) < p.seqlen_q:
            yield replace(p, seqlen_q=sum(p.sequences), seqlen_k=sum(p.sequences))
        half = tuple(n // 2 for n in p.sequences)
        if half != p.sequences:
            yield replace(p, sequences=half)
    elif p.batch > 1:
        for n in range(p.batch):
            lengths = None if p.lengths is None else p.lengths[:n] + p.lengths[n + 1 :]
            yield replace(p, batch=p.batch - 1, lengths=lengths)
    if p.upstream == "both":
        yield replace(p, upstream="out")
        yield replace(p, upstream="state")
    elif p.upstream:
        yield replace(p, upstream="", grad=False)
    if not p.steps:
        if p.state:
            yield replace(p, state=False, state_gap=0)
        if p.return_state and p.upstream in ("", "out"):
            yield replace(p, return_state=False)
        if p.lengths is not None:
            yield replace(p, lengths=None)
    if p.group > 1:
        yield replace(p, group=1)
    if p.heads_kv > 1:
        yield replace(p, heads_kv=1)
    if p.sequences is None:
        if p.seqlen_q != p.seqlen_k and p.lengths is None:
            yield replace(p, seqlen_k=p.seqlen_q)
        if p.seqlen_q > 1:
            lengths = None if p.lengths is None else tuple(n // 2 for n in p.lengths)
            yield replace(p, seqlen_q=p.seqlen_q // 2, seqlen_k=p.seqlen_k // 2, lengths=lengths)
    for name in ("e", "m"):
        if getattr(p, name) > 16:
            yield replace(p, **{name: 16})
    for name in ("map_q", "map_k"):
        if getattr(p, name) != "identity":
            yield replace(p, **{name: "identity"})
    if not p.causal:
        yield replace(p, causal=True)
    if p.normalize:
        yield replace(p, normalize=False)
