"""Calls of the Triton kernels, drawn from a seed, and their verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.linear.triton_model import Results, decay_of_heads, results
from warploom.attention.judge import judge
from warploom.linear import triton
from warploom.linear.problem import LinearCall


@dataclass(frozen=True)
class Case:
    """One call. `lengths` or `sequences`, the packed lengths, may be given; the latter sum to at most `rows`."""

    seed: int
    rows: int = 40
    keys: int | None = None  # None: as many as rows
    batch: int = 1
    heads: int = 1
    heads_kv: int | None = None
    e: int = 16
    m: int = 16
    map_q: str = "elu+1"
    map_k: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    scale: float = 1.0
    state: bool = False
    decay: str = ""  # "head", "token", or "token that forgets": -inf in places
    lengths: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    mean: float = 0.0  # of the values: sums then grow with the length
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def call(self) -> tuple[LinearCall, Tensor, Tensor, Tensor]:
        """The call, dO, and the gradients of the final state."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        heads_kv = self.heads_kv or self.heads
        batch, count = (1, len(self.sequences)) if self.sequences is not None else (self.batch, self.batch)
        keys = self.rows if self.keys is None else self.keys
        q, k = draw(batch, self.rows, self.heads, self.e), draw(batch, keys, heads_kv, self.e)
        if self.map_k == "identity" and self.normalize:
            # Signed products could sum to almost nothing; beyond rounding, nothing can then be said of the quotient.
            q, k = q.abs(), k.abs()
        v, dout = draw(batch, keys, heads_kv, self.m) + self.mean, draw(batch, self.rows, self.heads, self.m)
        s, z = draw(count, heads_kv, self.e, self.m), draw(count, heads_kv, self.e).abs()
        cu = None
        if self.sequences is not None:
            cu = torch.tensor([0, *self.sequences], device=self.device).cumsum(0).to(torch.int32)
        logs = None
        if self.decay:
            logs = -torch.rand((batch, keys, heads_kv), generator=generator, device=self.device) * 0.7
            if "forgets" in self.decay:
                logs[draw(batch, keys, heads_kv) > 1.3] = -torch.inf
            logs = logs[0, 0].contiguous() if self.decay == "head" else logs
        q, k, v, dout = (t.to(self.dtype) for t in (q, k, v, dout))
        call = LinearCall(
            q=q,
            k=k,
            v=v,
            map_q=self.map_q,
            map_k=self.map_k,
            causal=self.causal,
            normalize=self.normalize,
            eps=1e-6,
            scale=self.scale,
            s=s if self.state else None,
            z=z if self.state else None,
            lengths=None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            cu_seqlens=cu,
            decay=logs,
            decay_grad=logs is not None,
        )
        return call, dout, draw(*s.shape), draw(*z.shape)


# Every kind of call; those of WHOLE are not cut into segments, or always.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"batch": 2, "heads": 2},
    "unnormalized": {"normalize": False, "scale": 0.3, "map_q": "identity", "map_k": "identity"},
    "blocks of keys as they are": {"map_k": "identity", "e": 32, "m": 32},
    "relu": {"map_k": "relu", "scale": 0.3},
    "blocks": {"state": True, "e": 32, "m": 48},
    "odd dims": {"e": 20, "m": 7},
    "grouped": {"heads": 3, "heads_kv": 1, "state": True},
    "fewer queries": {"rows": 21, "keys": 40, "state": True},
    "fewer keys": {"rows": 40, "keys": 21, "state": True},
    "lengths": {"batch": 3, "lengths": (40, 17, 0), "state": True, "normalize": False, "map_k": "identity"},
    "packed": {"sequences": (0, 21, 1, 16, 0), "heads": 2, "heads_kv": 1, "state": True},
    "half precision": {"dtype": torch.float16, "state": True},
}
WHOLE: dict[str, dict[str, Any]] = {
    "packed without a tail": {"sequences": (19, 21)},
    "bidirectional": {"causal": False, "rows": 21, "keys": 40, "heads": 2, "heads_kv": 1, "state": True},
    "bidirectional lengths": {"causal": False, "batch": 2, "lengths": (40, 17), "normalize": False},
    "bidirectional packed": {"causal": False, "sequences": (0, 21, 1, 16, 0)},
    "one token": {"rows": 1},
}


# With a decay, cut into segments or not.
DECAY: dict[str, dict[str, Any]] = {
    "decay": {"decay": "token", "batch": 2, "state": True},
    "decay of heads, blocks": {
        **{"decay": "head", "heads": 2, "e": 32, "m": 48},
        **{"normalize": False, "map_q": "identity", "map_k": "identity"},
    },
    "decay that forgets, blocks": {"decay": "token that forgets", "e": 32, "m": 32, "state": True},
    "decay, grouped": {"decay": "token", "heads": 3, "heads_kv": 1, "state": True, "scale": 0.3},
    "decay, fewer queries": {"decay": "token that forgets", "rows": 21, "keys": 70, "state": True, "normalize": False},
    "decay, fewer keys": {"decay": "token", "rows": 40, "keys": 21},
    "decay, lengths": {"decay": "token", "batch": 2, "lengths": (40, 17), "state": True, "map_k": "relu"},
    "decay, packed": {"decay": "token that forgets", "sequences": (0, 34, 1, 0), "heads": 2, "heads_kv": 1, "state": True},
    "decay, half precision": {"decay": "token", "dtype": torch.float16, "state": True},
}


def computed(call: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None) -> dict[str, Tensor]:
    """Everything that forward and backward return, by the names of `Results`."""
    assert triton.BACKEND.supports(call) is None, triton.BACKEND.supports(call)
    out, norm, s, z = triton.BACKEND.forward(call, True)
    dq, dk, dv, ds0, dz0, ddecay = triton.BACKEND.backward(call, dout, norm, ds, dz)
    assert (ds0 is None) == (dz0 is None) == (call.s is None) and (ddecay is None) == (call.decay is None)
    if ddecay is not None and call.decay is not None and call.decay.ndim == 1:
        # Its rounding is the tokens', whose sum it is.
        ddecay = ddecay.expand(1, 1, -1)
    found: dict[str, Any] = dict(zip(Results._fields, (out, norm, s, z, dq, dk, dv, ds0, dz0, ddecay), strict=True))
    return {name: t for name, t in found.items() if t is not None}


def check(case: Case, *, gradients_of_state: bool = True) -> None:
    """Hold a case's results and gradients against the fp64 truth, by the error of the model of a correct kernel."""
    call, dout, ds, dz = case.call()
    given = (ds, dz) if gradients_of_state else (None, None)
    truth, model = (results(call, dout, *given, exact=exact) for exact in (True, False))
    if call.decay is not None and call.decay.ndim == 1:
        expected = (t[None, None] for t in decay_of_heads(call, dout, *given))
        truth, model = (r._replace(ddecay=t) for r, t in zip((truth, model), expected, strict=True))
    for name, t in computed(call, dout, *given).items():
        verdict = judge(name, t, getattr(truth, name), getattr(model, name), case.dtype)
        assert verdict.passed, f"{verdict}\n{case}"
