"""A training step of a small transformer on packed documents: forward, backward and AdamW, by who computes the attention.

The documents differ from step to step, so every contender makes of them in each step what it needs: column vectors, a plan,
a block mask, a dense mask. Each trains a model of its own from the same weights; what its first step computes is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warploom
from warploom.bench import peers
from warploom.bench.choice import Choice
from warploom.bench.harness import Call, Case, Comparison, WrongResult, first_line
from warploom.bench.mask_bars import CUDNN, FLEX
from warploom.bench.masks import DOCUMENT_LENGTHS
from warploom.masks import Document

BATCHES = 4  # packed batches that steps take in turn
RATE = 1e-4
# Distance of the first layer's gradient from attention in fp32, relative to its norm, from which a step is wrong: bf16 weights
# and activations make it 0.007 to 0.009, one document of fifteen that begins a token late 0.16.
FURTHEST = 3e-2


@dataclass(frozen=True)
class Config:
    tokens: int = 32768
    layers: int = 4
    heads: int = 16
    heads_kv: int = 4
    head_dim: int = 128
    vocabulary: int = 8192
    longest: int = DOCUMENT_LENGTHS[1]
    shortest: int = DOCUMENT_LENGTHS[0]

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


QUICK = Config(tokens=256, heads=4, heads_kv=2, head_dim=16, vocabulary=64, longest=100, shortest=8)


@dataclass(frozen=True)
class Packed:
    """One row of documents behind each other."""

    tokens: Tensor  # int64 (1, tokens)
    targets: Tensor
    lengths: Tensor  # int64 (documents,), on the device
    cu_seqlens: Tensor  # int32 (documents + 1,)
    longest: int

    @classmethod
    def draw(cls, config: Config, device: torch.device) -> Packed:
        drawn = torch.randint(config.shortest, config.longest + 1, (config.tokens // config.shortest + 1,))
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), drawn.cumsum(0)]).clamp(max=config.tokens).unique()
        tokens, targets = torch.randint(config.vocabulary, (2, 1, config.tokens), device=device)
        lengths = edges.diff()
        return cls(tokens, targets, lengths.to(device), edges.int().to(device), int(lengths.max()))

    @property
    def number(self) -> Tensor:
        """The document of each token."""
        return torch.repeat_interleave(
            torch.arange(len(self.lengths), device=self.lengths.device), self.lengths, output_size=self.tokens.shape[1]
        )


Prepare = Callable[[Packed], peers.Attention]  # what a contender makes of a batch: attention of q, k, v (1, tokens, heads, dim)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, kv = config.width, config.heads_kv * config.head_dim
        self.config = config
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, width + 2 * kv, bias=False), nn.Linear(width, width, bias=False)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: peers.Attention) -> Tensor:
        c = self.config
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split((c.heads, c.heads_kv, c.heads_kv), 2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.inner(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary))

    def loss(self, packed: Packed, attend: peers.Attention) -> Tensor:
        x = self.tokens(packed.tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), packed.targets.flatten())


class Trainer:
    """One contender's model and optimizer; calling it makes a step."""

    def __init__(self, config: Config, seed: int, prepare: Prepare, batches: list[Packed], device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model = Model(config).to(device=device, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=device.type == "cuda")
        self.prepare, self.batches, self.steps = prepare, batches, 0

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient of the first layer's projection."""
        packed = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        loss = self.model.loss(packed, self.prepare(packed))
        self.optimizer.zero_grad()
        loss.backward()
        first: Any = self.model.layers[0]
        gradient = first.qkv.weight.grad.clone()
        self.optimizer.step()
        return loss.detach(), gradient


def ours(packed: Packed) -> peers.Attention:
    mask = Document(packed.lengths)
    return lambda q, k, v: warploom.attention(q, k, v, mask=mask)


def ours_packed(packed: Packed) -> peers.Attention:
    options: dict[str, Any] = {"max_seqlen_q": packed.longest, "max_seqlen_k": packed.longest, "causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = warploom.attention_varlen(q[0], k[0], v[0], packed.cu_seqlens, packed.cu_seqlens, **options)
        return out[None]

    return attend


def dense(packed: Packed) -> peers.Attention:
    """torch's scaled_dot_product_attention with a dense mask; its kernels that take one take no shared key heads."""
    number = packed.number
    mask = (number[:, None] == number).tril_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        a, b, c = peers.heads_first(q, k, v)
        return F.scaled_dot_product_attention(a, b, c, attn_mask=mask).transpose(1, 2)

    return attend


def flex(packed: Packed) -> peers.Attention:
    number, tokens = packed.number, packed.tokens

    def same_and_before(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (number[i] == number[j]) & (i >= j)

    return peers.flex(peers.flex_block_mask(same_and_before, tokens.shape[1], tokens.device))


def flash_4(packed: Packed) -> peers.Attention:
    attend = peers.flash_attention_4(True, None, packed.cu_seqlens, packed.longest)
    return lambda q, k, v: attend(q[0], k[0], v[0])[None]


def cudnn_flex(packed: Packed) -> peers.Attention:
    """cuDNN's; its plan is made when the first layer's q, k and v, whose shapes it asks for, are there."""
    row = torch.arange(packed.tokens.shape[1], dtype=torch.int32, device=packed.tokens.device)
    intervals = torch.stack([torch.zeros_like(row), packed.cu_seqlens[packed.number], row + 1])[None]
    made: list[peers.Attention] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.append(peers.cudnn_flex(peers.cudnn_flex_plan(intervals, q, k, v)))
        return made[0](q, k, v)

    return attend


def exact(packed: Packed) -> peers.Attention:
    """Document by document in fp32, by torch's own kernels."""
    ends = packed.lengths.cumsum(0).tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        parts = []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            a, b, c = (t[:, begin:end].transpose(1, 2).float() for t in (q, k, v))
            parts.append(F.scaled_dot_product_attention(a, b, c, is_causal=True).transpose(1, 2))
        return torch.cat(parts, 1).to(q.dtype)

    return attend


def check(want: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor]) -> float:
    """The distance of a step's gradient from that of `exact`."""
    distance = float((got[1].float() - want[1].float()).norm() / want[1].float().norm())
    if not distance <= FURTHEST or not abs(float(got[0] - want[0])) <= FURTHEST * abs(float(want[0])):
        words = f"the loss is {float(got[0]):.4g}, by attention in fp32 {float(want[0]):.4g}, and the first layer's gradient"
        raise WrongResult(f"{words} is {distance:.2g} of its norm away, more than {FURTHEST:g}")
    return distance


def contenders(choice: Choice, on_gpu: bool) -> dict[str, Prepare]:
    found: dict[str, Prepare] = {"warploom": ours, "warploom, packed": ours_packed}
    others: dict[str, Prepare] = {"SDPA, dense mask": dense}
    if on_gpu:
        others |= {FLEX: flex, CUDNN: cudnn_flex, "FA4": flash_4}
    return found | {name: prepare for name, prepare in others.items() if choice.peer(name)}


def training_cases(quick: bool, choice: Choice) -> list[Case]:
    config = QUICK if quick else Config()
    name = f"{config.layers} layers, {config.tokens} tokens, width {config.width}"
    return [Case("training", name, dict(config.__dict__), partial(_build, config, choice))]


def _build(config: Config, choice: Choice, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    seed = torch.initial_seed() % 2**31
    batches = [Packed.draw(config, device) for _ in range(BATCHES)]
    want = Trainer(config, seed, exact, batches, device)()
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, prepare in contenders(choice, device.type == "cuda").items():
        try:
            calls[name] = Trainer(config, seed, prepare, batches, device)
        except Exception as error:  # out of memory, say
            refused[name] = first_line(error)
    documents = [len(packed.lengths) for packed in batches]
    yield "step", Comparison(calls, partial(check, want), refused=refused, more={"documents": documents})
