"""A small transformer learns from documents of many lengths packed into one row, each attending to itself alone.

    python examples/train_packed.py [--steps 150] [--seed 0] [--device cpu]

The task needs attention: every token of a document is to be answered with the document's first token. A packed row is then
compared with its documents run one by one.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warploom
from warploom.masks import Document, Mask

VOCABULARY, SEQLEN, DIM, HEADS = 32, 256, 64, 4


class Layer(nn.Module):
    """Pre-norm: attention under a mask, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)  # (batch, seqlen, heads, head_dim)
        x = x + self.out(warploom.attention(q, k, v, mask=mask).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """Tokens (batch, seqlen) and their places in their documents to logits (batch, seqlen, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(VOCABULARY, DIM), nn.Embedding(2, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor, mask: Mask) -> Tensor:
        x = self.tokens(tokens) + self.first((places == 0).long())
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def draw_lengths() -> list[int]:
    """Lengths of documents that fill a row."""
    lengths: list[int] = []
    while sum(lengths) < SEQLEN:
        lengths.append(min(int(torch.randint(8, 80, ())), SEQLEN - sum(lengths)))
    return lengths


def batch(lengths: list[int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of one packed row, their places, and the answers."""
    tokens = torch.randint(VOCABULARY, (1, SEQLEN))
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    answers = torch.cat([document[:, :1].expand(document.shape) for document in tokens.split(lengths, 1)], 1)
    return tokens.to(device), places.to(device), answers.to(device)


def train(model: Model, steps: int, device: str) -> tuple[float, float]:
    """The loss of the first step and of the last, in nats a token."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(steps):
        lengths = draw_lengths()
        tokens, places, answers = batch(lengths, device)
        # A new mask every step: one int32 for each key, no matrix, and nothing is compiled again.
        logits = model(tokens, places, Document(lengths).to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 5, 1) == 0 or step == steps - 1:
            print(f"step {step:4d}  {len(lengths):2d} documents  loss {losses[-1]:.3f}", flush=True)
    return losses[0], losses[-1]


@torch.no_grad()
def packed_against_alone(model: Model, device: str) -> float:
    """The largest difference between a packed row's logits and those of its documents by themselves."""
    lengths = draw_lengths()
    tokens, places, _ = batch(lengths, device)
    together = model(tokens, places, Document(lengths).to(device))
    documents = zip(tokens.split(lengths, 1), places.split(lengths, 1), strict=True)
    alone = [model(t, p, Document([t.shape[1]]).to(device)) for t, p in documents]
    return float((together - torch.cat(alone, 1)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="of training (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and documents (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps takes 1 or more, got {options.steps}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here")
    torch.manual_seed(options.seed)
    model = Model().to(options.device)
    first, last = train(model, options.steps, options.device)
    print(f"loss went from {first:.3f} to {last:.3f}")
    print(f"a packed row differs from its documents alone by {packed_against_alone(model, options.device):.1e} at most")


if __name__ == "__main__":
    main()
