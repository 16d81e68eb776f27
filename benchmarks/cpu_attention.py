"""CPU attention against torch's own, medians of interleaved runs, with peak memory: writes a JSON and prints a table.

    python benchmarks/cpu_attention.py [--threads 2] [--repeats 7] [--out benchmarks/results/cpu-attention.json]

B1 H12 S2048 D64: eight documents of 256 against the same documents as a batch and against a dense mask; causal and
full against torch; then documents of 256 over 4k … 64k tokens. Every timed call is compared with its peer first.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom import masks
from warploom.demo.memory import PeakMemory

HEADS, HEAD_DIM, SEQLEN, DOCUMENT = 12, 64, 2048, 256
LENGTHS = (4096, 8192, 16384, 32768, 65536)
sdpa = torch.nn.functional.scaled_dot_product_attention
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Inputs], Tensor]


def heads_first(inputs: Inputs) -> list[Tensor]:
    return [t.transpose(1, 2) for t in inputs]


def documents(seqlen: int) -> masks.Mask:
    return masks.Document([DOCUMENT] * (seqlen // DOCUMENT), causal=False)


def as_batch(inputs: Inputs) -> Tensor:
    q, k, v = (t.view(-1, DOCUMENT, HEADS, HEAD_DIM).transpose(1, 2) for t in inputs)
    return sdpa(q, k, v).transpose(1, 2).reshape(inputs[0].shape)


def contenders(case: str) -> dict[str, Call]:
    """Ours first, then the peers."""
    if case == "documents":
        mask, dense = documents(SEQLEN), documents(SEQLEN).dense(SEQLEN, SEQLEN)
        return {
            "warploom": lambda inputs: warploom.attention(*inputs, mask=mask),  # type: ignore[return-value]
            "torch, documents as a batch": as_batch,
            "torch, dense mask": lambda inputs: sdpa(*heads_first(inputs), attn_mask=dense).transpose(1, 2),
        }
    causal = case == "causal"
    return {
        "warploom": lambda inputs: warploom.attention(*inputs, causal=causal),  # type: ignore[return-value]
        "torch": lambda inputs: sdpa(*heads_first(inputs), is_causal=causal).transpose(1, 2),
    }


def draw(seqlen: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(seqlen)
    shape = (1, seqlen, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def step(call: Call, inputs: Inputs, dout: Tensor | None) -> None:
    """Forward, or with dout forward and backward."""
    if dout is None:
        with torch.no_grad():
            call(inputs)
    else:
        torch.autograd.grad(call(inputs), inputs, dout)


def timed(calls: dict[str, Call], inputs: Inputs, dout: Tensor | None, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds a call: medians, 20th and 80th percentiles of interleaved runs."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            step(call, inputs, dout)
            samples[name].append((time.perf_counter() - start) * 1e3)
    result = {}
    for name, values in samples.items():
        p20, *_, p80 = statistics.quantiles(values[1:], n=5)
        result[name] = {"ms": statistics.median(values[1:]), "p20": p20, "p80": p80}
    return result


def peak_mib(call: Call, inputs: Inputs, dout: Tensor | None) -> float:
    """Memory above the starting level at the highest point of one call."""
    memory = PeakMemory("cpu")
    memory.start()
    step(call, inputs, dout)
    peak = memory.stop()
    if peak is None:
        raise RuntimeError("this system does not report a process's peak memory")
    return peak / 2**20


def close(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def rows(repeats: int) -> list[dict[str, Any]]:
    result = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(SEQLEN, dtype)
        for case in ("documents", "causal", "full"):
            calls = contenders(case)
            want = list(calls.values())[-1](inputs)
            error = close(calls["warploom"](inputs), want)
            assert error < (1e-5 if dtype == torch.float32 else 1e-2), (case, dtype, error)
            for backward in (False, True):
                dout = torch.randn(want.shape).to(dtype) if backward else None
                for name, figures in timed(calls, inputs, dout, repeats).items():
                    peak = peak_mib(calls[name], inputs, dout)
                    row = {"case": case, "dtype": str(dtype).removeprefix("torch."), "backward": backward}
                    result.append({**row, "what": name, **figures, "peak_mib": peak})
                    print_row(result)
    return result


def length_rows(repeats: int) -> list[dict[str, Any]]:
    result = []
    for seqlen in LENGTHS:
        mask, inputs = documents(seqlen), draw(seqlen, torch.float32)
        dout = torch.randn(inputs[0].shape)
        call: Call = lambda given, mask=mask: warploom.attention(*given, mask=mask)  # type: ignore[misc]  # noqa: E731
        assert close(call(inputs), as_batch(inputs)) < 1e-5
        for backward in (False, True):
            figures = timed({"warploom": call}, inputs, dout if backward else None, max(3, repeats // 2))["warploom"]
            peak = peak_mib(call, inputs, dout if backward else None)
            row = {"case": f"{seqlen // 1024}k tokens", "dtype": "float32", "backward": backward, "what": "warploom"}
            result.append({**row, **figures, "us_per_token": figures["ms"] * 1e3 / seqlen, "peak_mib": peak})
            print_row(result)
    return result


def print_row(done: list[dict[str, Any]]) -> None:
    row = done[-1]
    direction = "forward + backward" if row["backward"] else "forward"
    ours = next(r for r in done if all(r[key] == row[key] for key in ("case", "dtype", "backward")) and r["what"] == "warploom")
    ratio = f"warploom takes {ours['ms'] / row['ms']:.2f} of it" if row["what"] != "warploom" else ""
    if "us_per_token" in row:
        ratio = f"{row['us_per_token']:.2f} us/token"
    print(
        f"{row['case']:<12}{row['dtype']:<10}{direction:<20}{row['what']:<29}{row['ms']:>9.1f} ms"
        f"{row['peak_mib']:>9.0f} MiB  {ratio}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu-attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "processor": platform.machine() + " " + torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads,
        "shape": f"B1 H{HEADS} S{SEQLEN} D{HEAD_DIM}",
        "rows": rows(options.repeats) + length_rows(options.repeats),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
