"""One tester for the laboratory's kernels: each is checked, then all of one kind are timed side by side, on a GPU.

`warploom banks --ladder`, `--gemm` and `--attention`. The timing is the benchmarks' own: interleaved, L2 emptied, medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warploom.bench.harness import Comparison, Timer, WrongResult, compare, environment
from warploom.runtime.table import table
from warploom.smem.device.kernels import attention, gemm, ladder, nvrtc

Call = Callable[[], Tensor]
ATTENTION_TOKENS = 16384  # in all sequences together


@dataclass(frozen=True)
class Trial:
    """Contenders for one piece of work as the harness reports them, and the (wavefronts, excess) predicted for some of ours."""

    work: str
    contenders: dict[str, dict[str, Any]]
    predicted: dict[str, tuple[int, int]]
    ours: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether every kernel of ours ran and had the right result."""
        return all("ms" in self.contenders[name] for name in self.ours)

    def to_dict(self) -> dict[str, Any]:
        kernels = []
        for name, found in self.contenders.items():
            counts = dict(zip(("wavefronts", "excess"), self.predicted[name], strict=True)) if name in self.predicted else {}
            kernels.append({"kernel": name, **counts, **found})
        return {"work": self.work, "kernels": kernels}


def time_ladder() -> Trial:
    """The 16×16×16 product, one warp: six kernels."""
    _needs("--ladder", nvrtc.refusal())
    subjects = ladder.Subjects()

    def call(name: str) -> Call:
        c = subjects.poisoned()
        return lambda: subjects.launch(name, c)

    calls = {rung.name: call(rung.name) for rung in ladder.rungs()}
    predicted = {
        rung.name: (rung.wavefronts(True) + rung.wavefronts(False), rung.excess(True) + rung.excess(False))
        for rung in ladder.rungs()
    }
    return Trial("16×16×16 halves, one warp", _compare(calls, subjects.check, subjects.FLOPS), predicted, tuple(predicted))


def time_gemm(size: int) -> Trial:
    """The product of two `size`×`size` half matrices in three layouts, beside torch.matmul, which is cuBLAS."""
    _needs("--gemm", nvrtc.refusal())
    subjects = gemm.Subjects(size)

    def call(layout: str) -> Call:
        c = subjects.poisoned()
        return lambda: subjects.launch(layout, c)

    calls = {gemm.name(layout): call(layout) for layout in gemm.LAYOUTS}
    predicted = {config.name: _sums(gemm.wavefronts(config, size, size, size)) for config in gemm.configs().values()}
    calls["cuBLAS"] = lambda: subjects.a @ subjects.b
    return Trial(f"{size}×{size}×{size} halves", _compare(calls, subjects.check, subjects.flops), predicted, tuple(predicted))


def time_attention(seqlen: int) -> list[Trial]:
    """The Ampere forward in three layouts, then under a causal mask, each beside torch's FlashAttention-2.

    As many sequences as make ATTENTION_TOKENS tokens, at least one.
    """
    _needs("--attention", nvrtc.refusal() or attention.refusal())
    batch = max(1, ATTENTION_TOKENS // seqlen)
    q, k, v = attention.draw(seqlen, batch)
    configs = attention.layouts()
    predicted = {
        attention.name(layout): _sums(attention.wavefronts(config, seqlen, batch)) for layout, config in configs.items()
    }
    full = {attention.name(layout): config for layout, config in configs.items()}
    shape = f"{batch} × {seqlen} tokens, {attention.HEADS} heads of {attention.HEAD_DIM}, bf16"
    trials = []
    for causal, ours in ((False, full), (True, {attention.name("causal"): attention.causal()})):
        check = attention.Check(q, k, v, causal)
        calls: dict[str, Call] = {name: partial(attention.forward, config, q, k, v) for name, config in ours.items()}
        calls["FlashAttention-2"] = _flash(q, k, v, causal)
        flops = 4 * batch * attention.HEADS * attention.HEAD_DIM * (seqlen * (seqlen + 1) // 2 if causal else seqlen**2)
        found = _compare(calls, check, flops)
        work = f"attention, {'causal' if causal else 'full'}, {shape}"
        trials.append(Trial(work, found, {} if causal else predicted, tuple(ours)))
    return trials


def _needs(option: str, refusal: str | None) -> None:
    if refusal is not None:
        raise ValueError(f"{option}: {refusal}")


def _sums(moved: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Wavefronts and excess of all accesses."""
    wavefronts, ideal = map(sum, zip(*moved.values(), strict=True))
    return wavefronts, wavefronts - ideal


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def _compare(calls: dict[str, Call], check: Callable[[Tensor], float], flops: float) -> dict[str, dict[str, Any]]:
    """`check` returns the largest error over that of one rounding of the exact result, of which a contender may have two."""

    def within(result: Tensor) -> float:
        error = check(result)
        if not error <= 2:
            raise WrongResult(f"the error is {error:.3g} times that of one rounding")
        return error

    return compare(Comparison(dict(calls), within, flops=flops), Timer(torch.device("cuda")))["contenders"]


def to_dict(trials: Sequence[Trial]) -> dict[str, Any]:
    """For `--json`, and for the page that `warploom bench` writes of it."""
    return {**environment(torch.device("cuda")), "trials": [trial.to_dict() for trial in trials]}


def report(trial: Trial) -> str:
    """A table of the kernels of one trial."""
    rows = []
    for name, found in trial.contenders.items():
        wavefronts, excess = map(str, trial.predicted.get(name, ("", "")))
        if "ms" in found:
            spread = f"{found['p20'] * 1e3:.1f} to {found['p80'] * 1e3:.1f}"
            rate = f"{found['tflops']:.1f}" if found["tflops"] >= 1 else f"{found['tflops']:.5f}"
            cells = [f"{found['error']:.2f}", f"{found['ms'] * 1e3:.1f}", spread, rate]
        else:
            cells = [f"no: {found.get('wrong') or found.get('refused')}", "", "", ""]
        rows.append([name, wavefronts, excess, *cells])
    heading = ["kernel", "wavefronts", "excess", "error", "us", "p20 to p80", "TFLOP/s"]
    return f"{trial.work}: wavefronts and excess predicted, error in roundings\n{table(rows, heading)}"
