"""Calls of the gated delta rule, drawn from a seed, and their verdicts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.delta.delta_model import Results, results
from warploom.attention.judge import judge
from warploom.delta import reference
from warploom.delta.backend import DeltaBackend
from warploom.delta.problem import DeltaCall


@dataclass(frozen=True)
class Case:
    """One call. `lengths` or `sequences`, the packed lengths, may be given; the latter sum to at most `tokens`."""

    seed: int
    tokens: int = 70
    batch: int = 1
    heads: int = 1  # of q and k
    group: int = 1  # value heads to each
    e: int = 16
    m: int = 16
    decay: str | None = "mild"  # None, "mild", "strong", "forgets": one token in eight is -inf or as good as that
    beta: float = 1.0  # the largest
    keys: str = "drawn"  # "equal": all tokens of a head, the inverse's worst case; "long": of norms that the rule just bears
    normalize_qk: bool = True
    scale: float | None = None
    state: bool = False
    lengths: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    hidden: float = 0.0  # what tokens that count for nothing hold
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def call(self) -> tuple[DeltaCall, Tensor, Tensor]:
        """The call, and the gradients of out and of the final state."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float64)

        batch, count = (1, len(self.sequences)) if self.sequences is not None else (self.batch, self.batch)
        heads_v = self.heads * self.group
        q, k = draw(batch, self.tokens, self.heads, self.e), draw(batch, self.tokens, self.heads, self.e)
        v, dout = draw(batch, self.tokens, heads_v, self.m), draw(batch, self.tokens, heads_v, self.m)
        beta = self.beta * torch.rand(v.shape[:3], generator=generator, device=self.device, dtype=torch.float64)
        if self.keys == "equal":
            k, beta = k[:, :1].expand_as(k).clone(), 0.5 * beta + 0.5 * self.beta
        if self.keys == "long":
            # Products of I - beta k kT grow without bound once beta |k|^2 passes 2.
            k = k / k.norm(dim=-1, keepdim=True) * math.sqrt(1.9 / self.beta)
        dtype = torch.promote_types(self.dtype, torch.float32)
        decay = None
        if self.decay is not None:
            decay = draw(*beta.shape).square() * {"mild": -0.05, "strong": -3.0, "forgets": -0.1}[self.decay]
            if self.decay == "forgets":
                which = torch.rand(beta.shape, generator=generator, device=self.device)
                decay = torch.where(which < 0.06, -math.inf, torch.where(which < 0.12, -1e30, decay))
        state, dstate = draw(count, heads_v, self.e, self.m), draw(count, heads_v, self.e, self.m)
        cu = None if self.sequences is None else torch.tensor([0, *self.sequences], device=self.device).cumsum(0)
        for t in (q, k, v, dout, beta, *([] if decay is None else [decay])):
            if self.lengths is not None:
                for row, length in zip(t, self.lengths, strict=True):
                    row[length:] = self.hidden
            if cu is not None:
                t[:, int(cu[-1]) :] = self.hidden
        q, k, v, dout = (t.to(self.dtype) for t in (q, k, v, dout))
        call = DeltaCall(
            q=q,
            k=k,
            v=v,
            beta=beta.to(dtype),
            decay=None if decay is None else decay.to(dtype),
            scale=self.e**-0.5 if self.scale is None else self.scale,
            normalize_qk=self.normalize_qk,
            eps=1e-6,
            state=state.to(dtype) if self.state else None,
            lengths=None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            cu_seqlens=None if cu is None else cu.to(torch.int32),
        )
        return call, dout, dstate.to(dtype)


nan = float("nan")
half, bfloat = torch.float16, torch.bfloat16

# Calls that every backend must pass, small enough for Triton's interpreter: everything of a Case but its seed.
CASES: dict[str, dict[str, Any]] = {
    "default": {"batch": 2},
    "one token": {"tokens": 1, "state": True},
    "a chunk exactly": {"tokens": 64, "state": True},
    "a chunk and one": {"tokens": 65},
    "three chunks": {"tokens": 150, "state": True},
    "no decay": {"decay": None, "state": True},
    "keys as they are": {"normalize_qk": False, "keys": "long", "state": True},
    "beta near 2": {"beta": 2.0, "state": True},
    "equal keys": {"keys": "equal", "decay": None},
    "equal keys, beta near 2": {"keys": "equal", "beta": 2.0, "decay": None, "state": True},
    "strong decay": {"decay": "strong", "state": True},
    "forgets": {"decay": "forgets", "tokens": 140, "state": True},
    "grouped": {"heads": 2, "group": 3, "state": True},
    "a group of 7": {"group": 7, "tokens": 30},
    "odd dims": {"e": 20, "m": 7, "state": True},
    "wide": {"e": 48, "m": 80, "scale": 0.3},
    "lengths": {"batch": 3, "lengths": (70, 17, 0), "state": True, "hidden": nan, "group": 2},
    "packed": {"tokens": 100, "sequences": (0, 21, 1, 70, 0), "heads": 2, "state": True, "hidden": nan},
    "packed, no state": {"tokens": 40, "sequences": (19, 21), "group": 2},
    # Of one head of 70 tokens the decay's gradient has the error of two or three numbers, its chunks', which is above or below
    # the model's by luck.
    "half precision": {"dtype": half, "state": True, "batch": 3, "heads": 2},
    "bfloat16": {"dtype": bfloat, "state": True, "group": 2},
}


def truth(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Results:
    """The specification, token by token on the same numbers in fp64."""
    wide = dataclasses.replace(call, **{n: t.double() for n, t in vars(call).items() if isinstance(t, Tensor) and _real(t)})
    out, state = reference.BACKEND.forward(wide, True)
    assert state is not None
    hidden = _counts(call)
    dout = dout.double().masked_fill(~hidden[..., None, None], 0.0)
    return Results(out, state, *reference.BACKEND.backward(wide, dout, None if dstate is None else dstate.double()))


def _real(t: Tensor) -> bool:
    return t.is_floating_point()


def _counts(call: DeltaCall) -> Tensor:
    """(batch, seqlen): tokens that count."""
    position = torch.arange(call.v.shape[1], device=call.v.device).expand(call.v.shape[0], -1)
    if call.lengths is not None:
        return position < call.lengths[:, None]
    return position < (call.cu_seqlens[-1] if call.cu_seqlens is not None else call.v.shape[1])


def check(case: Case, backend: DeltaBackend, *, gradient_of_state: bool = True) -> None:
    """Hold a case's results and gradients against the fp64 truth, by the error of the model of a correct kernel."""
    call, dout, dstate = case.call()
    assert backend.supports(call) is None, backend.supports(call)
    given = dstate if gradient_of_state else None
    wanted, model = truth(call, dout, given), results(call, dout, given, exact=False)
    out, state = backend.forward(call, True)
    got = Results(out, state, *backend.backward(call, dout, given))
    for name, t in got._asdict().items():
        want = getattr(wanted, name)
        assert (t is None) == (want is None), name
        if t is not None:
            verdict = judge(name, t, want, getattr(model, name), case.dtype)
            assert verdict.passed, f"{verdict}\n{case}"
            assert t.isfinite().all()
