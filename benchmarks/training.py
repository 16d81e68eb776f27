"""Train a small transformer with fp32 attention and with bf16 kernels: writes the loss curves, fails where they part.

    python benchmarks/training.py [--steps 300] [--out benchmarks/results/training.json]
    python benchmarks/training.py --backends hopper "hopper packed" "hopper packed deterministic"

Four layers with four kinds of attention: causal, head_dim 64; causal, grouped, head_dim 128; a window, head_dim 64; causal,
head_dim 256. Everything but attention is fp32, so that runs differ by their attention only. The task is to predict tokens
of Markov chains: each sequence follows one of eight, which has to be inferred from the tokens so far. "fp32" is torch's own
formula in fp32; "again" the same of q, k and v rounded to bf16, which shows what noise of this size does to a curve; the
others give such q, k and v to a backend. "packed" puts eight sequences behind each other, after a few tokens so that none
begins where a tile does, under a mask of documents: the same numbers through the kernels of column masks. How long a step of
a packed model takes is what `warploom bench training` measures; `warploom bench report` draws the curves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warploom
from warploom.bench.harness import environment
from warploom.masks import Document, SlidingWindow

VOCABULARY, SEQLEN, BATCH, WIDTH, CHAINS = 64, 512, 16, 512, 8
PACKED, BEFORE = 8, 37  # sequences of a packed row, and tokens of a document before them
LAST = 50  # steps whose mean loss is compared
Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]  # q, k, v (batch, seqlen, heads, dim), window


@dataclass(frozen=True)
class Kind:
    heads: int
    kv_heads: int
    window: int | None = None


LAYERS = (Kind(8, 8), Kind(4, 2), Kind(8, 8, window=100), Kind(2, 2))


def exact(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The formula in fp32."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance <= window)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def rounded(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The formula in fp32 of q, k and v rounded to bf16."""
    return exact(*(t.bfloat16().float() for t in (q, k, v)), window)


def kernels(backend: str | None, deterministic: bool = False, packed: bool = False) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        q, k, v = (t.bfloat16() for t in (q, k, v))
        options: dict[str, Any] = {"causal": True} if window is None else {"window": (window, 0)}
        if packed:
            documents = Document([BEFORE, *[q.shape[1]] * PACKED])
            options = {"mask": documents if window is None else documents & SlidingWindow(window, 0)}
            q, k, v = (behind_each_other(t) for t in (q, k, v))
        out = warploom.attention(q, k, v, backend=backend, deterministic=deterministic, **options)
        if packed:
            out = out[:, BEFORE:].reshape(-1, SEQLEN, *out.shape[2:])
        return out.float()

    return attend


def behind_each_other(t: Tensor) -> Tensor:
    """Rows of sequences (batch, seqlen, heads, dim) as rows of documents, a short one of zeros first."""
    rows = t.reshape(t.shape[0] // PACKED, -1, *t.shape[2:])
    return torch.cat([rows.new_zeros(rows.shape[0], BEFORE, *rows.shape[2:]), rows], 1)


class Layer(nn.Module):
    def __init__(self, kind: Kind, attend: Attend) -> None:
        super().__init__()
        self.kind, self.attend = kind, attend
        dim = WIDTH // kind.heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * kind.kv_heads * dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.kind.heads, -1))
        k, v = self.kv(y).unflatten(-1, (2, self.kind.kv_heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v, self.kind.window).flatten(2))
        return x + self.inner(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.layers = nn.Sequential(*(Layer(kind, attend) for kind in LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]))  # type: ignore[no-any-return]


def sequences(count: int, seed: int) -> Tensor:
    """Tokens (count, SEQLEN + 1), each row of one of the chains."""
    generator = torch.Generator().manual_seed(1234)
    chains = torch.distributions.Dirichlet(torch.full((CHAINS, VOCABULARY, VOCABULARY), 0.05))
    torch.manual_seed(1234)
    table = chains.sample()
    generator.manual_seed(seed)
    own = torch.randint(CHAINS, (count,), generator=generator)
    tokens = [torch.randint(VOCABULARY, (count,), generator=generator)]
    for _ in range(SEQLEN):
        tokens.append(torch.multinomial(table[own, tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def train(attend: Attend, steps: int, device: str, data: Tensor) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = Model(attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 30)
        tokens = data[torch.arange(BATCH) + step * BATCH % len(data)].to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()  # type: ignore[no-any-return]


def distance(losses: list[float], reference: list[float]) -> tuple[float, float]:
    """Mean absolute difference over all steps, and of the means over the last ones."""
    a, b = torch.tensor(losses), torch.tensor(reference)
    return (a - b).abs().mean().item(), (a[-LAST:].mean() - b[-LAST:].mean()).abs().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--backends", nargs="*", default=["hopper", "hopper deterministic"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    data = sequences(min(options.steps, 100) * BATCH, 5)
    runs: dict[str, Attend] = {"fp32": exact, "again": rounded}
    for name in options.backends:
        backend, *how = name.split()
        if set(how) - {"packed", "deterministic"}:
            parser.error(f"--backends takes names, with packed or deterministic behind them, got {name!r}")
        runs[name] = kernels(backend, "deterministic" in how, "packed" in how)
    curves = {name: train(attend, options.steps, device, data) for name, attend in runs.items()}
    found = {name: distance(losses, curves["fp32"]) for name, losses in curves.items() if name != "fp32"}
    for name, (everywhere, at_end) in found.items():
        print(f"{name:24} last {curves[name][-1]:.4f}, from fp32's: {everywhere:.5f} on average, {at_end:.5f} at the end")
    if options.out:
        options.out.write_text(json.dumps({**environment(torch.device(device)), "loss": curves}))
    # Noise of one rounding parts curves by so much; kernels round P and dS too.
    noise = found.pop("again")
    apart = [name for name, gaps in found.items() if any(a > 3 * b + 2e-3 for a, b in zip(gaps, noise, strict=True))]
    print("curves part: " + ", ".join(apart) if apart else "the curves match within noise")
    return int(bool(apart))


if __name__ == "__main__":
    raise SystemExit(main())
