"""Linear attention on a CPU against the per-token recurrence, medians of interleaved runs: writes a JSON, prints a table.

    python benchmarks/cpu_linear.py [--threads 2] [--repeats 7] [--out benchmarks/results/cpu-linear.json]

B4 H8 L2048 E=M=64 fp32, elu+1 inside: ours; the recurrence of idiap's CPU code, which goes batch entry after batch entry and
token after token, vectorised over heads; the same over batch entries too, as one writes it and with fused updates in place;
and the matrix products alone that ours is made of. All but the last also on one thread: a token's update is so small that
threads slow it down. Then ours alone over 4k … 64k tokens, whose time a token should not grow. Results are compared first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom import linear_attention
from warploom.bench.linear import EPS, token_by_token

BATCH, HEADS, SEQLEN, DIM, CHUNK = 4, 8, 2048, 64, 32
LENGTHS = (4096, 16384, 65536)
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Inputs], Tensor]


def ours(inputs: Inputs) -> Tensor:
    return linear_attention(*inputs)  # type: ignore[return-value]


def fused_loop(inputs: Inputs) -> Tensor:
    """idiap's causal layer around its recurrence, the update one fused call, the result written in place."""
    q, k, v = inputs
    return token_by_token(F.elu(q) + 1, F.elu(k) + 1, v, True)


def plain_loop(inputs: Inputs) -> Tensor:
    """The same as one writes it, an outer product added and a product a token, backward too.

    Autograd through it would keep every state.
    """
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (F.elu(inputs[0]) + 1, F.elu(inputs[1]) + 1, inputs[2]))
    out = PlainLoop.apply(q, k, v) / ((q * k.cumsum(1)).sum(-1, keepdim=True) + EPS)
    return out.unflatten(0, inputs[0].shape[::2][:2]).transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def entry_loop(inputs: Inputs) -> Tensor:
    """The plain loop for one batch entry after the other, as idiap's runs."""
    return torch.cat([plain_loop((q, k, v)) for q, k, v in zip(*(t.split(1) for t in inputs), strict=True)])


class PlainLoop(torch.autograd.Function):
    """idiap's loop over tokens and its backward's two, over all heads at once; tensors (heads, seqlen, dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(q, k, v)
        s, out = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), torch.empty_like(v)
        for t in range(q.shape[1]):
            s += k[:, t, :, None] * v[:, t, None, :]
            out[:, t] = (q[:, t, None, :] @ s)[:, 0]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        s = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        for t in range(q.shape[1]):
            s += k[:, t, :, None] * v[:, t, None, :]
            dq[:, t] = (s @ dout[:, t, :, None])[..., 0]
        s.zero_()
        for t in reversed(range(q.shape[1])):
            s += q[:, t, :, None] * dout[:, t, None, :]
            dk[:, t] = (s @ v[:, t, :, None])[..., 0]
            dv[:, t] = (k[:, t, None, :] @ s)[:, 0]
        return dq, dk, dv


def products() -> dict[bool, Callable[[], None]]:
    """The matrix products of ours, forward and in both directions, in the caches: its floor."""
    size, rows, heads = SEQLEN // CHUNK, CHUNK, BATCH * HEADS
    tiles = [torch.randn(8 * heads, rows, DIM) for _ in range(2)]
    p, s = torch.randn(8 * heads, rows, rows), torch.randn(8 * heads, DIM, DIM)

    def run(scores: int, states: int) -> None:
        for _ in range(size // 8):
            for _ in range(scores):
                torch.bmm(tiles[0], tiles[1].mT, out=p)
                torch.bmm(p, tiles[1], out=tiles[0])
            for _ in range(states):
                torch.bmm(tiles[0], s, out=tiles[1])
                torch.bmm(tiles[0].mT, tiles[1], out=s)
            for t in (*tiles, p, s):
                t.fill_(0.5)

    # Two with scores and two with states a chunk going forward; backward five and six, one of them in the first sweep.
    return {False: partial(run, 1, 1), True: partial(run, 3, 4)}


def draw(batch: int, heads: int, seqlen: int) -> Inputs:
    generator = torch.Generator().manual_seed(seqlen)
    q, k, v = (torch.randn(batch, seqlen, heads, DIM, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v


def step(call: Call, inputs: Inputs, dout: Tensor | None) -> None:
    """Forward, or with dout forward and backward."""
    if dout is None:
        with torch.no_grad():
            call(inputs)
    else:
        torch.autograd.grad(call(inputs), inputs, dout)


def on_one_thread(call: Callable[[], None]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    call()
    torch.set_num_threads(threads)


def timed(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds a call: medians, 20th and 80th percentiles of interleaved runs."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e3)
    found = {}
    for name, values in samples.items():
        p20, *_, p80 = statistics.quantiles(values[1:], n=5)
        found[name] = {"ms": statistics.median(values[1:]), "least": min(values[1:]), "p20": p20, "p80": p80}
    return found


def rows(repeats: int) -> list[dict[str, Any]]:
    inputs = draw(BATCH, HEADS, SEQLEN)
    contenders: dict[str, Call] = {
        "warploom": ours,
        "token by token, fused": fused_loop,
        "token by token, plain": plain_loop,
        "token by token, an entry at a time": entry_loop,
    }
    want = ours(inputs).detach()
    upstream = torch.randn(want.shape)
    wanted = torch.autograd.grad(ours(inputs), inputs, upstream)
    for name, call in contenders.items():
        out = call(inputs)
        for got, right in zip((out.detach(), *torch.autograd.grad(out, inputs, upstream)), (want, *wanted), strict=True):
            assert (got - right).norm() / right.norm() < 1e-4, name
    result = []
    for backward in (False, True):
        dout = upstream if backward else None
        calls: dict[str, Callable[[], None]] = {n: partial(step, call, inputs, dout) for n, call in contenders.items()}
        if torch.get_num_threads() > 1:
            calls |= {f"{name}, one thread": partial(on_one_thread, call) for name, call in calls.items()}
        calls["the products alone"] = products()[backward]
        times = timed(calls, repeats)
        for name, figures in times.items():
            ratio = figures["ms"] / times["warploom"]["ms"]
            result.append(
                {"case": "N4 H8 L2048 E64", "dtype": "float32", "backward": backward, "what": name, **figures, "ratio": ratio}
            )
            print_row(result[-1], f"{ratio:.2f}x ours")
    return result


def length_rows(repeats: int) -> list[dict[str, Any]]:
    result = []
    for seqlen in LENGTHS:
        inputs = draw(1, HEADS, seqlen)
        dout = torch.randn(inputs[0].shape)
        for backward in (False, True):
            call = partial(step, ours, inputs, dout if backward else None)
            figures = timed({"": call}, max(2, repeats // 2))[""]
            row = {"case": f"{seqlen // 1024}k tokens, H8", "dtype": "float32", "backward": backward, "what": "warploom"}
            result.append({**row, **figures, "us_per_token": figures["ms"] * 1e3 / seqlen})
            print_row(result[-1], f"{result[-1]['us_per_token']:.2f} us/token")
    return result


def print_row(row: dict[str, Any], what: str) -> None:
    direction = "forward + backward" if row["backward"] else "forward"
    print(
        f"{row['case']:<18}{direction:<20}{row['what']:<46}{row['ms']:>9.1f} ms (least {row['least']:.1f})  {what}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu-linear.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "title": "Linear attention on a CPU",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "processor": platform.machine() + " " + torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads,
        "shape": f"B{BATCH} H{HEADS} L{SEQLEN} E=M={DIM}, causal, elu+1, normalized",
        "rows": rows(options.repeats) + length_rows(options.repeats),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
