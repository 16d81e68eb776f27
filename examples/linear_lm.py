"""A small causal linear transformer learns Python's help texts byte by byte, then writes with a state of constant size.

    python examples/linear_lm.py [--kind linear|decay|delta] [--steps 300] [--seed 0] [--device cpu] [--tokens 400]

The text is `pydoc_data.topics`, which comes with Python. Training runs `CausalLinearAttention`, or `GatedDeltaNet`, over whole
sequences; writing runs its `step`, whose time and memory do not grow with what was written, and is compared with running whole
sequences anew. With `--kind decay` heads of linear attention forget, each at a rate of its own, as in RetNet.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warploom import LinearState
from warploom.nn import CausalLinearAttention, GatedDeltaNet, GatedDeltaState

VOCABULARY = 256  # bytes
State = LinearState | GatedDeltaState
CONTEXT = 3  # bytes that a position sees without attention
BATCH, SEQLEN = 8, 256
FURTHEST = 512  # positions that training draws its windows from


class Layer(nn.Module):
    """Pre-norm: causal linear attention, or the gated delta rule, then a perceptron."""

    def __init__(self, dim: int, heads: int, kind: str) -> None:
        super().__init__()
        # Half of what a head has summed is left after 5, 11, 22, 44 … tokens.
        rates = torch.log1p(-(2.0 ** -(3.0 + torch.arange(heads))))
        self.register_buffer("decay", rates if kind == "decay" else None)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = GatedDeltaNet(dim, heads) if kind == "delta" else CausalLinearAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), **self._decay())
        return x + self.mlp(self.norm_mlp(x))

    def prefill(self, x: Tensor) -> tuple[Tensor, State]:
        out, state = self.attention(self.norm_attention(x), return_state=True, **self._decay())
        x = x + out
        return x + self.mlp(self.norm_mlp(x)), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        out, state = self.attention.step(self.norm_attention(x), state, **self._decay())
        x = x + out
        return x + self.mlp(self.norm_mlp(x)), state

    def _decay(self) -> dict[str, Tensor]:
        return {} if self.decay is None else {"decay": self.decay}


class Model(nn.Module):
    """Bytes to logits of the next byte.

    A position enters with the two bytes before it, as a short convolution would let it, and with sinusoids of where it is.
    """

    def __init__(self, dim: int = 128, heads: int = 4, layers: int = 2, kind: str = "linear") -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, dim) for _ in range(CONTEXT))
        self.layers = nn.ModuleList(Layer(dim, heads, kind) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY)
        rates = torch.exp(-math.log(10_000) * torch.arange(0, dim, 2) / dim)
        self.register_buffer("rates", rates, persistent=False)

    def embed(self, recent: Tensor, position: Tensor) -> Tensor:
        """Channels (…, dim) of the last bytes up to each position (…, CONTEXT)."""
        angles = position.unsqueeze(-1) * self.rates
        found = [table(recent[..., n]) for n, table in enumerate(self.embeddings)]
        return sum(found) + torch.cat([angles.sin(), angles.cos()], -1)

    def embed_all(self, tokens: Tensor, start: int = 0) -> Tensor:
        recent = F.pad(tokens, (CONTEXT - 1, 0)).unfold(-1, CONTEXT, 1)
        return self.embed(recent, start + torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Logits (batch, seqlen, 256) of tokens (batch, seqlen), the first at position ``start``."""
        x = self.embed_all(tokens, start)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[State]]:
        """Logits of the last token and every layer's state."""
        x, states = self.embed_all(tokens), []
        for layer in self.layers:
            x, state = layer.prefill(x)
            states.append(state)
        return self.head(self.norm(x[:, -1])), states

    def step(self, recent: Tensor, position: int, states: list[State]) -> tuple[Tensor, list[State]]:
        """Logits (batch, 256) after one more token, the last of ``recent`` (batch, CONTEXT), and the new states."""
        x, new = self.embed(recent, torch.tensor(position, device=recent.device)), []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer.step(x, state)
            new.append(state)
        return self.head(self.norm(x)), new


def text(device: str) -> Tensor:
    """All topics of Python's help() as bytes."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode()), device=device)


def train(model: Model, data: Tensor, steps: int) -> tuple[float, float]:
    """The mean loss of the first and of the last twentieth of the steps, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    losses, begin = [], time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(data) - SEQLEN, (BATCH, 1), device=data.device)
        window = data[starts + torch.arange(SEQLEN + 1, device=data.device)]
        logits = model(window[:, :-1], int(torch.randint(FURTHEST, ())))
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(steps // 10, 1) == 0 or step == steps - 1:
            tokens = (step + 1) * BATCH * SEQLEN / (time.perf_counter() - begin)
            print(f"step {step:4d}  loss {losses[-1]:.3f}  {tokens:,.0f} tokens/s", flush=True)
    part = max(steps // 20, 1)
    return sum(losses[:part]) / part, sum(losses[-part:]) / part


@torch.no_grad()
def write(model: Model, prompt: Tensor, count: int) -> tuple[Tensor, float]:
    """The prompt (seqlen,) and ``count`` drawn bytes, by steps; seconds they took."""
    begin = time.perf_counter()
    logits, states = model.prefill(prompt[None])
    written = F.pad(prompt, (0, count))
    for position in range(len(prompt), len(written)):
        written[position] = torch.multinomial((logits[0] / 0.7).softmax(-1), 1)
        logits, states = model.step(written[None, position + 1 - CONTEXT : position + 1], position, states)
    return written, time.perf_counter() - begin


@torch.no_grad()
def written_anew(model: Model, written: Tensor, prompt: int) -> tuple[float, float]:
    """The largest difference of the steps' logits from one pass over all, and seconds of a pass for each of 20 tokens."""
    whole = model(written[None])[0]
    _, states = model.prefill(written[None, :prompt])
    worst = 0.0
    for position in range(prompt, len(written)):
        logits, states = model.step(written[None, position + 1 - CONTEXT : position + 1], position, states)
        worst = max(worst, float((logits[0] - whole[position]).abs().max()))
    begin = time.perf_counter()
    for end in range(len(written) - 20, len(written)):
        model(written[None, :end])
    return worst, (time.perf_counter() - begin) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("linear", "decay", "delta")
    parser.add_argument("--kind", choices=kinds, default="linear", help="of the layers (default: linear)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--tokens", type=int, default=400, help="to write (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = parser.parse_args()
    for name in ("steps", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} takes 1 or more, got {getattr(options, name)}")
    try:
        torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device takes cpu or cuda, got {options.device}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here")
    torch.manual_seed(options.seed)
    data = text(options.device)
    model = Model(kind=options.kind).to(options.device)
    print(f"{len(data):,} bytes of text, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    first, last = train(model, data, options.steps)
    print(f"loss fell from {first:.3f} to {last:.3f} nats a byte (a uniform guess is {math.log(VOCABULARY):.3f})\n")

    prompt = torch.tensor(list(b"The for statement is used to "), device=options.device)
    written, seconds = write(model, prompt, options.tokens)
    print(bytes(written.tolist()).decode(errors="replace"))
    worst, anew = written_anew(model, written, len(prompt))
    print(f"\n{options.tokens / seconds:,.0f} tokens/s by steps; {1 / anew:,.0f} tokens/s running all text anew for each token")
    print(f"logits of the steps and of one pass differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
