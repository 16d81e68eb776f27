"""Draw a linear attention call, run it with its gradients on a backend, and compare all with the reference in fp64."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom import LinearState, linear_attention
from warploom.linear import reference
from warploom.linear.arguments import linear_call

# Distance allowed from fp64, relative to the value and to the largest one: one rounding of the result, and fp32 sums.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SUMS = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}


@dataclass
class Case:
    """A call drawn from one seed."""

    seed: int
    batch: int = 2
    seqlen_q: int = 70
    seqlen_k: int | None = None  # None: seqlen_q
    heads_q: int = 2
    heads_kv: int | None = None  # None: heads_q
    dim: int = 16
    dim_v: int | None = None  # None: dim
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    starts: list[int] | None = None  # cu_seqlens of a packed call of batch 1
    lengths: list[int] | None = None
    state: bool = False
    decay: str = ""  # "head" or "token", or with "forgets" -inf in places
    poison: float = 0.0  # what positions that count for nothing hold
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    def draw(self) -> dict[str, Any]:
        """linear_attention's arguments; q, k, v and the state require grad."""
        generator = torch.Generator().manual_seed(self.seed)
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        heads_kv = self.heads_q if self.heads_kv is None else self.heads_kv
        dim_v = self.dim if self.dim_v is None else self.dim_v

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        q = normal(self.batch, self.seqlen_q, self.heads_q, self.dim)
        k = normal(self.batch, seqlen_k, heads_kv, self.dim)
        v = normal(self.batch, seqlen_k, heads_kv, dim_v)
        found: dict[str, Any] = {"q": q, "k": k, "v": v, **self.keywords}
        sequences = self.batch
        if self.decay:
            found["decay"] = self._logs(generator, self.batch, seqlen_k, heads_kv)
        if self.starts is not None:
            found["cu_seqlens"] = torch.tensor(self.starts, dtype=torch.int32, device=self.device)
            sequences = len(self.starts) - 1
            for t in (q, k, v, *self._of_tokens(found)):
                t[:, self.starts[-1] :] = self.poison
        if self.lengths is not None:
            found["lengths"] = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
            for t in (k, v, *self._of_tokens(found)):
                for row, length in zip(t, self.lengths, strict=True):
                    row[length:] = self.poison
        if self.state:
            wide = torch.promote_types(self.dtype, torch.float32)
            s = torch.randn(sequences, heads_kv, self.dim, dim_v, generator=generator).to(self.device, wide)
            z = torch.rand(sequences, heads_kv, self.dim, generator=generator).to(self.device, wide)
            found["state"] = LinearState(s.requires_grad_(), z.requires_grad_())
        for t in (q, k, v, *([found["decay"]] if self.decay else [])):
            t.requires_grad_()
        return found

    def _logs(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Heads that forget in one token, in a few and in hundreds; one shape dimension where there is one log a head."""
        if self.decay.startswith("head"):
            shape = shape[-1:]
        logs = -torch.rand(shape, generator=generator) * 10 ** (2 * torch.rand(shape[-1:], generator=generator) - 1.5)
        if "forgets" in self.decay:
            logs[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
        return logs.to(self.device, torch.promote_types(self.dtype, torch.float32))

    def _of_tokens(self, found: dict[str, Any]) -> list[Tensor]:
        return [found["decay"]] if self.decay.startswith("token") else []


@dataclass
class Results:
    out: Tensor
    state: LinearState
    gradients: dict[str, Tensor]


def upstream(case: Case, results: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in results]


def run(case: Case, backend: str | None) -> Results:
    """Out, last state and all gradients of linear_attention()."""
    arguments = case.draw()
    out, state = linear_attention(**arguments, return_state=True, backend=backend)
    return _with_gradients(case, arguments, out, state)


def want(case: Case) -> Results:
    """The same through the reference and autograd, inputs widened to fp64."""
    arguments = case.draw()
    options = {"causal": True, "feature_map": "elu+1", "normalize": True, "eps": 1e-6, "scale": 1.0, "state": None}
    options |= {"lengths": None, "cu_seqlens": None, "decay": None}
    wide = {name: _widen(value) for name, value in arguments.items()}
    call = linear_call(**{**options, **wide})
    out, _, s, z = reference.BACKEND.forward(call, True)
    assert s is not None and z is not None
    return _with_gradients(case, wide, out, LinearState(s, z))


def _widen(value: Any) -> Any:
    if isinstance(value, LinearState):
        return LinearState(*(_widen(t) for t in value))
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def _with_gradients(case: Case, arguments: dict[str, Any], out: Tensor, state: LinearState) -> Results:
    leaves = {name: arguments[name] for name in ("q", "k", "v")}
    if case.state:
        leaves.update(zip(("s", "z"), arguments["state"], strict=True))
    if case.decay:
        leaves["decay"] = arguments["decay"]
    results = (out, *state)
    # Upstream gradients of out in the case's dtype, so that both sides see the same numbers.
    grads = [g.to(case.dtype).to(t.dtype) for g, t in zip(upstream(case, (out.float(), *state)), results, strict=True)]
    found = torch.autograd.grad(results, list(leaves.values()), grads, materialize_grads=True)
    return Results(out.detach(), state, dict(zip(leaves, found, strict=True)))


def check(case: Case, backend: str | None) -> None:
    """Assert that everything is near the reference; the message holds the case and its seed."""
    got, wanted = run(case, backend), want(case)
    pairs = {"out": (got.out, wanted.out), "s": (got.state.s, wanted.state.s), "z": (got.state.z, wanted.state.z)}
    pairs |= {f"d{name}": (got.gradients[name], wanted.gradients[name]) for name in got.gradients}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape, (name, case)
        assert_near(name, a, b, case)


def assert_near(name: str, got: Tensor, want: Tensor, case: Case) -> None:
    assert got.isfinite().all(), f"{name} is not finite\n{case}"
    if not got.numel():
        return
    error = (got.double() - want).abs()
    allowed = ROUNDING[got.dtype] * want.abs() + SUMS[case.dtype] * want.abs().max()
    assert (error <= allowed).all(), f"{name} is off by {float((error - allowed).max()):.3g} beyond what is allowed\n{case}"


def any_case(seed: int) -> Case:
    """A small fp64 case with anything in it."""
    rng = random.Random(seed)
    heads_kv, seqlen = rng.choice([1, 2]), rng.choice([0, 1, 5, 31, 32, 33, 64, 65, 130])
    packed = rng.random() < 0.3
    batch = 1 if packed else rng.choice([1, 2, 3])
    seqlen_k = seqlen if packed or rng.random() < 0.4 else rng.choice([0, 1, 7, 40, 64, 100, 150])
    cuts = sorted(rng.randint(0, seqlen) for _ in range(rng.randint(1, 5)))
    normalize, causal = rng.random() < 0.6, rng.random() < 0.7
    # Without positive features a denominator may be anything.
    maps = ["elu+1", "relu"] if normalize else ["elu+1", "relu", "identity"]
    return Case(
        seed,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen_k,
        heads_q=heads_kv * rng.choice([1, 2, 3]),
        heads_kv=heads_kv,
        dim=rng.choice([1, 4, 5, 16]),
        dim_v=rng.choice([1, 3, 7, 16]),
        dtype=torch.float64,
        starts=[0, *cuts] if packed else None,
        lengths=None if packed or rng.random() < 0.5 else [rng.randint(0, seqlen_k) for _ in range(batch)],
        state=rng.random() < 0.5,
        decay=rng.choice(["head", "token", "token that forgets"]) if causal and rng.random() < 0.5 else "",
        poison=float("nan"),
        keywords={
            "causal": causal,
            "normalize": normalize,
            "feature_map": (rng.choice(maps), rng.choice(maps)),
            "eps": 0.1,
            "scale": rng.choice([1.0, 0.3]),
        },
    )
