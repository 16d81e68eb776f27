"""gated_delta_rule(), its gradients, and chains of gated_delta_step(), against tests/fuzz/oracle/delta.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.families.delta_draw import DeltaProblem, DeltaVariant, draw_problem, draw_variant
from tests.fuzz.families.spread import spread
from tests.fuzz.oracle.attention import farthest
from tests.fuzz.oracle.delta import CHUNK, Delta, Given, Options
from tests.fuzz.oracle.delta import MUTANTS as ORACLES
from tests.fuzz.problem import DTYPES, OPINIONS, Expected
from tests.fuzz.views import View, bits, place

NAME = "delta"
BACKENDS = ("cpu", "hopper", "triton", "reference")
# Oracles that must be caught, by name: a namespace as `oracle` returns.
MUTANTS = {f"delta: {each.__name__}": SimpleNamespace(delta=each()) for each in ORACLES}
TENSORS = ("q", "k", "v", "beta", "decay", "state")

_ONE_TOKEN = "a step has one token a sequence"
_NAN = "the order of operations decides which gradients a NaN reaches"
# Features that no problem has together, with the reason.
EXCLUSIVE = [
    ({"full", "steps"}, "a call or steps"),
    ({"full", "inplace"}, "a call or steps"),
    *(({"steps", other}, _ONE_TOKEN) for other in ("lengths", "packed", "tokens_of_no_sequence", "several_chunks")),
    *(({"inplace", other}, _ONE_TOKEN) for other in ("lengths", "packed", "tokens_of_no_sequence", "several_chunks")),
    *(({"inplace", other}, "in place nothing is recorded") for other in ("gradients", "gradient_of_the_state")),
    ({"lengths", "packed"}, "packed sequences have no padding"),
    ({"lengths", "tokens_of_no_sequence"}, "packed sequences have no padding"),
    ({"no_decay", "decay_that_forgets"}, "one or the other"),
    ({"no_decay", "strong_decay"}, "one or the other"),
    ({"strong_decay", "decay_that_forgets"}, "one or the other"),
    ({"a_visible_NaN", "decay_that_forgets"}, "what a NaN comes to that is forgotten is not said"),
    *(({"a_visible_NaN", other}, _NAN) for other in ("gradients", "gradient_of_the_state")),
    ({"as_they_are", "eps_that_shows"}, "eps is of the norms"),
]


def variants(d: Draw, backend: str, count: int) -> list[DeltaVariant]:
    """Each is three to ten binaries. Of Hopper's at most one in six is refused: few that differ most were all so."""
    if backend != "hopper":
        return spread(lambda: draw_variant(d, backend), count)

    def taken() -> DeltaVariant:
        return next(v for v in iter(lambda: draw_variant(d, backend), None) if _beyond_hopper(v) is None)

    others = count // 6
    return spread(taken, count - others) + (spread(lambda: draw_variant(d, backend), others) if others else [])


def draw(d: Draw, variant: DeltaVariant | None, backend: str) -> DeltaProblem:
    return draw_problem(d, draw_variant(d, backend) if variant is None else variant, backend)


def oracle() -> SimpleNamespace:
    return SimpleNamespace(delta=Delta())


def features(p: DeltaProblem) -> frozenset[str]:
    views = [getattr(p, f.name) for f in fields(p) if f.name.endswith("_view") and f.name != "dout_view"]
    flags = {
        p.dtype: p.dtype != "float64",
        "full": not p.steps,
        "steps": p.steps,
        "inplace": p.inplace,
        "lengths": p.lengths is not None,
        "packed": p.sequences is not None,
        "tokens_of_no_sequence": p.sequences is not None and sum(p.sequences) < p.seqlen,
        "several_chunks": p.seqlen > 64,
        "heads_grouped": p.group > 1,
        "dims_differ": p.e != p.m,
        "dim_no_power_of_two": bool(p.e & (p.e - 1) or p.m & (p.m - 1)),
        "dim_past_64": max(p.e, p.m) > 64,
        "no_decay": not p.decay,
        "strong_decay": p.decay == "strong",
        "decay_that_forgets": p.decay == "forgets",
        "beta_up_to_2": p.beta == 2.0,
        "beta_in_half": p.beta_dtype in ("float16", "bfloat16"),
        "equal_keys": p.keys == "equal",
        "as_they_are": not p.normalize,
        "eps_that_shows": p.normalize and p.eps >= 1e-3,
        "scale": p.scale is not None,
        "zeros": p.zeros,
        "state_in": p.state,
        "state_out": p.return_state,
        "gradients": p.upstream != "",
        "gradient_of_the_state": p.upstream in ("state", "both"),
        "hidden_NaN_or_infinity": bool(p.hostile),
        "a_visible_NaN": bool(p.visible_nan),
        "an_input_a_view": any(view.kind != "contiguous" for view in views),
        "dout_a_view": p.upstream in ("out", "both") and p.dout_view.kind != "contiguous",
        "shared_memory": any(view.aliased for view in views),
        "unaligned": any(view.offset % 8 for view in views),
    }
    return frozenset(name for name, present in flags.items() if present)


def inputs(p: DeltaProblem, device: torch.device) -> dict[str, Any]:
    """Tensors of the call and gradients of its results; "buffers" is all their memory."""
    generator = torch.Generator().manual_seed(p.seed)
    dtype, beta_dtype, heads_v = DTYPES[p.dtype], DTYPES[p.beta_dtype], p.heads * p.group
    wide = torch.promote_types(dtype, torch.float32)
    count = p.batch if p.sequences is None else len(p.sequences)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = p.batch, p.seqlen
    q, k = normal(*tokens, p.heads, p.e), normal(*tokens, p.heads, p.e)
    v, dout = normal(*tokens, heads_v, p.m), normal(*tokens, heads_v, p.m)
    beta = p.beta * torch.rand((*tokens, heads_v), generator=generator)
    if p.keys == "equal":
        k = k[:, :1].expand_as(k)
    if not p.normalize:
        # Products of I - beta k kT grow without bound once beta |k|^2 passes 2; a view's overlapping keys are parts of two.
        most = (0.9 if p.k_view.aliased else 1.8) / p.beta
        k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-3) * most**0.5
    if p.zeros:
        q, k = (t * (torch.rand((*t.shape[:3], 1), generator=generator) < 0.8) for t in (q, k))
    hidden = _hidden(p)
    placed = {
        "q": place(q.to(dtype), p.q_view, hidden, p.hostile, device),
        "k": place(k.to(dtype), p.k_view, hidden, p.hostile, device),
        "v": place(v.to(dtype), p.v_view, hidden, p.hostile, device),
        "dout": place(dout.to(dtype), p.dout_view, hidden, p.hostile, device),
        "beta": place(beta[..., None].to(beta_dtype), p.beta_view, hidden, p.hostile, device),
    }
    if p.decay:
        placed["decay"] = place(_logs(p, generator)[..., None].to(beta_dtype), p.decay_view, hidden, p.hostile, device)
    if p.state:
        placed["state"] = place(normal(count, heads_v, p.e, p.m).to(wide), p.state_view, None, p.hostile, device)
    found: dict[str, Any] = {name: placed[name].tensor if name in placed else None for name in (*TENSORS, "dout")}
    found |= {name: found[name][..., 0] for name in ("beta", "decay") if found[name] is not None}
    if p.sequences is not None and not p.four:
        found |= {n: t.squeeze(0) for n, t in found.items() if n != "state" and t is not None}
    found["dstate"] = normal(count, heads_v, p.e, p.m).to(device, wide)
    for name, numbers in (("lengths", p.lengths), ("starts", _starts(p))):
        found[name] = None
        if numbers is not None:
            repeated = torch.tensor(numbers, dtype=torch.int32).repeat_interleave(p.index_step)
            if p.index_step > 1:
                repeated[1::2] = 2**30
            found[name] = repeated.to(device)[:: p.index_step]
    _put_visible_nan(p, found)
    others = [found[name] for name in ("dstate", "lengths", "starts") if found[name] is not None]
    found["buffers"] = [each.buffer for each in placed.values()] + others
    found["room"] = placed.get("state")
    return found


def _logs(p: DeltaProblem, generator: torch.Generator) -> Tensor:
    """Of heads that forget in tens of tokens or in one; for "forgets" one in six is -inf, or a number whose exp is 0."""
    shape = p.batch, p.seqlen, p.heads * p.group
    rate = {"mild": 0.05, "strong": 3.0, "forgets": 0.1}[p.decay]
    logs = -rate * torch.randn(shape, generator=generator).square()
    if p.decay == "forgets":
        which = torch.rand(shape, generator=generator)
        logs = torch.where(which < 0.08, -torch.inf, torch.where(which < 0.16, -1e30, logs))
    return logs


def _starts(p: DeltaProblem) -> list[int] | None:
    return None if p.sequences is None else list(accumulate(p.sequences, initial=0))


def _hidden(p: DeltaProblem) -> Tensor | None:
    """Tokens that count for nothing: (batch, seqlen, 1, 1)."""
    token = torch.arange(p.seqlen)
    if p.sequences is not None:
        return (token >= sum(p.sequences)).view(1, -1, 1, 1)
    if p.lengths is not None:
        return (token >= torch.tensor(p.lengths, dtype=torch.int64).view(-1, 1))[:, :, None, None]
    return None


def _put_visible_nan(p: DeltaProblem, found: dict[str, Any]) -> None:
    """A NaN in the first key or value of one sequence, in one head."""
    tokens = p.lengths or p.sequences or (p.seqlen,) * p.batch
    n = p.seed % max(len(tokens), 1)
    if not p.visible_nan or not tokens or tokens[n] == 0:
        return
    t = found[p.visible_nan]
    head, column = p.seed % t.shape[-2], p.seed % t.shape[-1]
    if p.sequences is None:
        t[n, 0, head, column] = float("nan")
    else:
        t[..., sum(p.sequences[:n]), head, column] = float("nan")


def _options(p: DeltaProblem) -> dict[str, Any]:
    return {"scale": p.scale, "normalize_qk": p.normalize, "eps": p.eps}


def run(p: DeltaProblem, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    """Out, the last state where it is asked for, and the gradients that `upstream` gives."""
    from warploom import gated_delta_rule

    recorded = _recorded(p)
    leaves = {name: given[name].detach() for name in TENSORS if given[name] is not None}
    if recorded:
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    results: dict[str, Tensor | None] = {}
    if p.steps:
        buffer = None
        if p.inplace:
            buffer, state = given["room"].buffer.clone(), leaves["state"]
            leaves["state"] = buffer.as_strided(state.shape, state.stride(), state.storage_offset())
        out, last = _chain(p, leaves, backend)
        if buffer is not None:
            results["around"] = _around(buffer, last, given["room"].buffer)
            last = last.clone()
    else:
        found = gated_delta_rule(
            *(leaves[name] for name in ("q", "k", "v", "beta")), leaves.get("decay"), state=leaves.get("state"),
            return_state=p.return_state, lengths=given["lengths"], cu_seqlens=given["starts"], backend=backend, **_options(p),
        )  # fmt: skip
        out, last = found if p.return_state else (found, None)
    results["out"] = out.detach()
    if last is not None:
        results["state"] = last.detach()
    if recorded:
        pairs = [(out, given["dout"])] if p.upstream in ("out", "both") else []
        if p.upstream in ("state", "both"):
            pairs += [(last, given["dstate"])]
        outputs, upstream = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
        results |= {f"d{name}": t for name, t in zip(leaves, grads, strict=True)}
    return results


def _recorded(p: DeltaProblem) -> bool:
    return p.upstream != "" and (p.grad or not p.steps)


def _chain(p: DeltaProblem, t: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    """Tokens one after another: as (batch, heads, dim), or by turns with a dimension of 1."""
    from warploom import gated_delta_step

    rows, state = [], t["state"]
    for i in range(p.seqlen):
        at: Any = slice(i, i + 1) if (p.seed + i) % 2 else i
        decay = t["decay"][:, at] if "decay" in t else None
        row = (t[name][:, at] for name in ("q", "k", "v", "beta"))
        out, after = gated_delta_step(*row, state, decay, inplace=p.inplace, backend=backend, **_options(p))
        assert not p.inplace or after is state
        state = after
        rows.append(out if out.ndim == 4 else out[:, None])
    return torch.cat(rows, 1), state


def _around(buffer: Tensor, state: Tensor, before: Tensor) -> Tensor:
    """1 where memory beside a state that was written in place has other bits than it had."""
    was = before.clone()
    was.as_strided(state.shape, state.stride(), state.storage_offset()).copy_(state)
    return (bits(buffer) != bits(was)).any().double().view(1)


def expect(p: DeltaProblem, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    exact: Delta = oracle.delta
    dtype, beta_dtype = DTYPES[p.dtype], DTYPES[p.beta_dtype]
    wide = torch.promote_types(dtype, torch.float32)
    recorded = _recorded(p)
    packed = p.sequences is not None and not p.four
    tokens = {n: given[n][None] if packed and given[n] is not None else given[n] for n in (*TENSORS[:5], "dout")}
    tokens["dout"] = tokens["dout"] if p.upstream in ("out", "both") else None
    dstate = given["dstate"] if p.upstream in ("state", "both") else None
    call = Given(**tokens, state=given["state"], lengths=given["lengths"], starts=given["starts"], dstate=dstate)
    options = Options(p.e**-0.5 if p.scale is None else p.scale, p.normalize, p.eps)
    want = exact.exact(call, options, recorded)
    # The error that is granted is that of the true call, or a wrong oracle would grant itself its own error.
    true = want if type(exact) is Delta else Delta().exact(call, options, recorded)
    # Of few rows one model's error may be small by luck.
    few = p.batch * p.heads * p.seqlen <= 256
    turns = range(OPINIONS if again else 3 if few else 1)
    if p.steps and not recorded:
        models = [Delta().steps(call, options, turn) for turn in turns]
    else:
        models = [Delta().model(call, options, recorded, turn, 1 if p.steps else CHUNK) for turn in turns]
    if few:
        models.append({name: farthest(t, [m[name] for m in models]) for name, t in true.items()})
    found = {}
    for name, ref in want.items():
        if name == "state" and not p.return_state:
            continue
        near = tuple(ref + (m[name] - true[name]) for m in models)
        if packed and "state" not in name:
            ref, near = ref[0], tuple(t[0] for t in near)
        like = beta_dtype if name in ("dbeta", "ddecay") else wide if "state" in name else dtype
        narrow = beta_dtype if name in ("dbeta", "ddecay") and beta_dtype != wide else None
        found[name] = Expected(ref, near, loose=bool(p.visible_nan), like=like, dtype=narrow)
    if p.inplace:
        found["around"] = Expected(torch.zeros(1, dtype=torch.float64, device=given["q"].device), dtype=torch.float64)
    return found


def _beyond_hopper(p: DeltaProblem | DeltaVariant) -> str | None:
    if p.dtype != "bfloat16":
        return "takes bfloat16"
    if p.e > 128 or p.m > 256 or p.e % 8 or p.m % 8:
        return "in steps of 8"
    return "takes from 2 to" if p.steps else None


def refusal(p: DeltaProblem, given: dict[str, Any], backend: str) -> str | None:
    on_cpu = given["q"].device.type == "cpu"
    if backend == "cpu":
        return None if on_cpu else "runs on CPU tensors"
    if backend == "triton":
        if p.dtype == "float64":
            return "takes float16, bfloat16 or float32"
        if p.dtype == "bfloat16" and on_cpu:
            return "interpreter multiplies bfloat16"
    if backend == "hopper":
        if on_cpu:
            return "hopper"
        return _beyond_hopper(p) or ("takes from 2 to" if p.seqlen < 2 else None)
    return None


def modules(p: DeltaProblem, backend: str) -> list[Any]:
    """Specs of the compiled modules that the backend needs for a problem that it takes."""
    from warploom.delta.hopper.plan import back_modules_of, modules_of

    if backend != "hopper" or p.e > 128:
        return []
    back = back_modules_of("bfloat16", p.e) if _recorded(p) else ()
    return [variant.spec for variant in (*modules_of("bfloat16", p.e), *back)]


def shrink(p: DeltaProblem) -> Iterator[DeltaProblem]:
    """Simpler problems: one thing less each."""
    plain = {
        "visible_nan": "", "zeros": False, "index_step": 1, "four": False, "hostile": "", "scale": None, "eps": 1e-6,
        "grad": False, "inplace": False, "decay": "", "keys": "drawn", "beta": 1.0, "normalize": True,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    if p.decay in ("strong", "forgets"):
        yield replace(p, decay="mild")
    for f in fields(p):
        if f.name.endswith("_view") and getattr(p, f.name) != View():
            yield replace(p, **{f.name: View()})
    if p.sequences is not None:
        for n in range(len(p.sequences)):
            yield replace(p, sequences=p.sequences[:n] + p.sequences[n + 1 :])
        if sum(p.sequences) < p.seqlen:
            yield replace(p, seqlen=sum(p.sequences))
        half = tuple(n // 2 for n in p.sequences)
        if half != p.sequences:
            yield replace(p, sequences=half)
    else:
        if p.batch > 1:
            for n in range(p.batch):
                lengths = None if p.lengths is None else p.lengths[:n] + p.lengths[n + 1 :]
                yield replace(p, batch=p.batch - 1, lengths=lengths)
        if p.seqlen > 1:
            for seqlen in (p.seqlen // 2, p.seqlen - 1):
                lengths = None if p.lengths is None else tuple(min(n, seqlen) for n in p.lengths)
                yield replace(p, seqlen=seqlen, lengths=lengths)
    if p.upstream == "both":
        yield replace(p, upstream="out")
        yield replace(p, upstream="state")
    elif p.upstream:
        yield replace(p, upstream="", grad=False)
    if not p.steps:
        if p.state:
            yield replace(p, state=False)
        if p.return_state and p.upstream in ("", "out"):
            yield replace(p, return_state=False)
        if p.lengths is not None:
            yield replace(p, lengths=None)
    if p.group > 1:
        yield replace(p, group=1)
    if p.heads > 1:
        yield replace(p, heads=1)
    for name in ("e", "m"):
        if getattr(p, name) > 16:
            yield replace(p, **{name: 16})
