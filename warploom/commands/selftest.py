"""Every implementation that can run here against the fp64 reference, over small cases of each feature."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.attention import philox
from warploom.attention.judge import judge, low_precision
from warploom.commands.table import table
from warploom.masks import Causal, ColumnMask, Document, Full, Mask, SlidingWindow
from warploom.runtime import dispatch


@dataclass(frozen=True)
class Case:
    """One small call. `mask` makes its mask from (batch, seqlen_q, seqlen_k, heads_kv)."""

    name: str
    seqlen_q: int = 96
    seqlen_k: int = 96
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 64
    head_dim_v: int = 64
    mask: Callable[[int, int, int, int], Any] | None = None
    sink: bool = False
    packed: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)


BATCH = 2


def _columns(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> ColumnMask:
    """Hidden rows that differ from column to column, batch to batch and head to head."""
    start = torch.randint(0, seqlen_q, (batch, heads, seqlen_k), dtype=torch.int32)
    return ColumnMask(start, start + seqlen_q // 4)


CASES = (
    Case("full"),
    Case("causal", keywords={"causal": True}),
    Case("causal, seqlen_q < seqlen_k", seqlen_q=61, seqlen_k=130, keywords={"causal": True}),
    Case("queries that see no key", seqlen_q=130, seqlen_k=61, keywords={"causal": True}),
    Case("sliding window", keywords={"window": (17, 5)}),
    Case("documents", mask=lambda b, q, k, h: Document([40, 1, 55])),
    Case("column mask per head", heads_kv=2, mask=_columns),
    Case("GQA, head_dim 72", heads_kv=1, head_dim=72, head_dim_v=40),
    Case("softcap", keywords={"softcap": 2.0}),
    Case("sink", sink=True, keywords={"causal": True}),
    Case("dropout", keywords={"dropout_p": 0.25}),
    Case("packed sequences", packed=True, keywords={"causal": True}),
)


@dataclass(frozen=True)
class Row:
    """One implementation on one case and dtype; `ratio` is the worst error over its bound."""

    implementation: str
    device: str
    case: str
    dtype: str
    result: str  # "ok", "FAILED" or "refused"
    ratio: float | None
    detail: str


@dataclass(frozen=True)
class Selftest:
    seed: int
    seconds: float
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Something ran and nothing failed."""
        return any(row.result == "ok" for row in self.rows) and all(
            row.result != "FAILED" for row in self.rows
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        cells = [
            (row.implementation, row.device, row.case, row.dtype, row.result, _ratio(row.ratio))
            for row in self.rows
        ]
        heading = ("implementation", "device", "case", "dtype", "result", "error/bound")
        details = [
            f"  {row.implementation}, {row.case}, {row.dtype}: {row.detail}"
            for row in self.rows
            if row.detail
        ]
        ran = sum(row.result != "refused" for row in self.rows)
        failed = sum(row.result == "FAILED" for row in self.rows)
        end = f"selftest: {ran - failed} of {ran} passed in {self.seconds:.1f} s, seed {self.seed}"
        return "\n".join(["selftest against the fp64 reference", table(cells, heading), *details, end])


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def selftest(seed: int | None = None, quiet: bool = False) -> Selftest:
    """Run every case on every implementation that can run here; forward, backward and lse.

    Args:
        seed: of the inputs; None draws a fresh one, kept in the result.
        quiet: no progress on stderr.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    start = time.perf_counter()
    work = list(_work())
    rows = []
    for done, (implementation, device, case, dtype) in enumerate(work, start=1):
        if not quiet and sys.stderr.isatty():
            print(
                f"\r\x1b[Kselftest {done}/{len(work)}: {implementation}, {case.name}", end="", file=sys.stderr
            )
        rows.append(_run(implementation, device, case, dtype, seed))
    if not quiet and sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return Selftest(seed, time.perf_counter() - start, tuple(rows))


def _work() -> Iterator[tuple[str, str, Case, torch.dtype]]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for implementation in dispatch.implementations():
        if implementation.available() is None:
            for device in devices:
                for case in CASES:
                    for dtype in (torch.float32, torch.bfloat16):
                        yield implementation.name, device, case, dtype


def _run(implementation: str, device: str, case: Case, dtype: torch.dtype, seed: int) -> Row:
    name = str(dtype).removeprefix("torch.")
    call = _Call(case, dtype, device, seed)
    try:
        got = call.results(implementation, dtype)
    except ValueError as refusal:
        return Row(implementation, device, case.name, name, "refused", None, str(refusal))
    wanted, model = call.results("reference", torch.float64), call.model()
    verdicts = [judge(part, got[part], wanted[part], model[part], dtype) for part in wanted]
    worst = max(
        verdicts, key=lambda verdict: float("inf") if verdict.ratio != verdict.ratio else verdict.ratio
    )
    result = "ok" if all(verdict.passed for verdict in verdicts) else "FAILED"
    return Row(
        implementation, device, case.name, name, result, worst.ratio, "" if result == "ok" else str(worst)
    )


class _Call:
    """The tensors of one case, and what an implementation, and the model, make of them."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seed: int) -> None:
        self.case, self.dtype = case, dtype
        torch_state = torch.get_rng_state()
        torch.manual_seed(seed)
        batch = () if case.packed else (BATCH,)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, dtype=torch.float32).to(device, dtype)

        self.q = draw(*batch, case.seqlen_q, case.heads, case.head_dim)
        self.k = draw(*batch, case.seqlen_k, case.heads_kv, case.head_dim)
        self.v = draw(*batch, case.seqlen_k, case.heads_kv, case.head_dim_v)
        self.sink = draw(case.heads, dtype=torch.float32) if case.sink else None
        self.dout = draw(*batch, case.seqlen_q, case.heads, case.head_dim_v)
        self.dlse = draw(*batch, case.heads, case.seqlen_q, dtype=torch.float32)
        self.seed = torch.tensor([seed], dtype=torch.int64, device=device)
        self.mask: Mask | None = None
        if case.mask is not None:
            self.mask = case.mask(BATCH, case.seqlen_q, case.seqlen_k, case.heads_kv).to(device)
        # One sequence is empty, so that packing over it is checked too.
        self.cu_seqlens = torch.tensor([0, 70, 70, case.seqlen_q], dtype=torch.int32, device=device)
        torch.set_rng_state(torch_state)

    def results(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """out, lse and the gradients of a loss that uses both, by `backend` from inputs in `dtype`."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in (self.q, self.k, self.v)]
        sink = self.sink
        if sink is not None:
            sink = sink.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
            leaves.append(sink)
        keywords = {**self.case.keywords, "sink": sink, "return_lse": True, "backend": backend}
        if "dropout_p" in keywords:
            keywords["dropout_seed"] = self.seed
        if self.case.packed:
            cu = self.cu_seqlens
            longest = self.case.seqlen_q
            out, lse = warploom.attention_varlen(*leaves[:3], cu, cu, longest, longest, **keywords)
        else:
            out, lse = warploom.attention(*leaves[:3], mask=self.mask, **keywords)
        finite = torch.isfinite(lse)
        loss = (out.double() * self.dout).sum() + (lse.double()[finite] * self.dlse[finite]).sum()
        gradients = torch.autograd.grad(loss, leaves)
        names = ("dq", "dk", "dv", "dsink")
        return {"out": out, "lse": lse, **dict(zip(names, gradients, strict=False))}

    def model(self) -> dict[str, Tensor]:
        """The same from the low-precision model, sequence by sequence."""
        if not self.case.packed:
            return self._dense(self.q, self.k, self.v, self.dout, self.dlse)
        bounds = self.cu_seqlens.tolist()
        parts = []
        for a, b in pairwise(bounds):
            if a < b:
                q, k, v, dout = (t[None, a:b] for t in (self.q, self.k, self.v, self.dout))
                part = self._dense(q, k, v, dout, self.dlse[None, :, a:b])
                parts.append({name: t[0] for name, t in part.items()})
        axes = {name: 1 if name == "lse" else 0 for name in parts[0]}
        return {name: torch.cat([part[name] for part in parts], dim=axis) for name, axis in axes.items()}

    def _visible(self) -> Mask:
        if self.mask is not None:
            return self.mask
        if "window" in self.case.keywords:
            return SlidingWindow(*self.case.keywords["window"])
        return Causal() if self.case.keywords.get("causal") else Full()

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        case, keywords = self.case, self.case.keywords
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        seen = self._visible().dense(seqlen_q, seqlen_k).to(q.device)
        if seen.shape[1] not in (1, case.heads):
            seen = seen.repeat_interleave(case.heads // seen.shape[1], dim=1)
        options: dict[str, Any] = {"scale": case.head_dim**-0.5, "sink": self.sink}
        options["softcap"] = keywords.get("softcap", 0.0)
        if "dropout_p" in keywords:
            p = keywords["dropout_p"]
            sizes = (q.shape[0], case.heads, seqlen_q, seqlen_k)
            kept = philox.keep_mask(self.seed, p, *(torch.arange(n, device=q.device) for n in sizes))
            options["keep"] = kept / (1.0 - p)
        found = low_precision(q, k, v, dout, dlse, seen, **options)
        return {name: t for name, t in vars(found).items() if t is not None}
