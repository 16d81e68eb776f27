"""A step of an encoder as T5 base has it: forward and backward, by who computes the attention of its layers.

Written out in torch, so that it is measured where transformers is absent; the eager and the SDPA path are those of its T5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warploom
from warploom.bench.harness import Call, Case, Comparison
from warploom.bench.reference import distance
from warploom.bias import T5_MAX_DISTANCE, Relative, t5_buckets

# Distances from the same model in fp32, over the norm, from which what leaves it, and its table's gradient, are wrong: about
# three times what bf16 shows in all twelve layers, 0.009 and 0.05.
FURTHEST, FURTHEST_TABLE = 3e-2, 0.15
SEED = 7
BUCKETS = 32


@dataclass(frozen=True)
class Size:
    """Of T5 base."""

    batch: int = 32
    seqlen: int = 512
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    width: int = 768
    inner: int = 3072
    vocabulary: int = 32128


QUICK = Size(2, 64, 2, 2, 16, 32, 64, 100)


def encoder_cases(quick: bool) -> list[Case]:
    size = QUICK if quick else Size()
    name = f"T5 encoder, {size.layers} layers of {size.heads} heads of {size.head_dim}, {size.batch} × {size.seqlen}"
    return [Case("bias", name, asdict(size), partial(_build, size))]


def _build(size: Size, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.seqlen), device=device)
    calls: dict[str, Call] = {name: partial(_step, model_of(size, name, device).bfloat16(), tokens) for name in PATHS}
    part = slice(0, min(size.batch, 4))
    model = model_of(size, "eager", device)
    want = _step(model, tokens)[0][part].clone()
    table = model.table.weight.grad
    assert table is not None
    del model
    yield "encoder step", Comparison(calls, partial(_check, want, table, part))


def model_of(size: Size, path: str, device: torch.device) -> Encoder:
    """The same weights under every name, drawn as T5 draws them."""
    torch.manual_seed(SEED)
    with device:
        return Encoder(size, path)


# Attention of q, k and v (batch, seqlen, heads, head_dim) with a bias.


def _eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) + bias
    return (weights.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.contiguous(), scale=1.0).transpose(1, 2)


def _warploom(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | Relative) -> Tensor:
    out: Tensor = warploom.attention(q, k, v, bias=bias, scale=1.0)
    return out


TABLE = "warploom, Relative"
PATHS: dict[str, Callable[..., Tensor]] = {"warploom": _warploom, TABLE: _warploom, "eager": _eager, "sdpa": _sdpa}


class Norm(nn.Module):
    """T5's: of the root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(self.weight.dtype)


class Layer(nn.Module):
    """Attention and what follows it, each behind a norm."""

    def __init__(self, size: Size, path: str) -> None:
        super().__init__()
        self.size, self.attend = size, PATHS[path]
        inner = size.heads * size.head_dim
        self.norms = nn.ModuleList(Norm(size.width) for _ in range(2))
        self.q, self.k, self.v = (_linear(size.width, inner, (size.width * of) ** -0.5) for of in (size.head_dim, 1, 1))
        self.o = _linear(inner, size.width, inner**-0.5)
        self.wide = _linear(size.width, size.inner, size.width**-0.5)
        self.narrow = _linear(size.inner, size.width, size.inner**-0.5)

    def forward(self, x: Tensor, bias: Tensor | Relative) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (to(normed).unflatten(-1, (self.size.heads, self.size.head_dim)) for to in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v, bias).flatten(2))
        return x + self.narrow(self.wide(self.norms[1](x)).relu())


class Encoder(nn.Module):
    """What T5's encoder computes of tokens; its first layer's table of biases serves all."""

    def __init__(self, size: Size, path: str) -> None:
        super().__init__()
        self.path = path
        self.embedding, self.table = nn.Embedding(size.vocabulary, size.width), nn.Embedding(BUCKETS, size.heads)
        nn.init.normal_(self.table.weight, std=size.width**-0.5)
        self.layers = nn.ModuleList(Layer(size, path) for _ in range(size.layers))
        self.norm = Norm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x, bias = self.embedding(tokens), self.bias(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        found: Tensor = self.norm(x)
        return found

    def bias(self, seqlen: int) -> Tensor | Relative:
        """A matrix of all heads, as transformers makes it; or the table that it is read from."""
        if self.path == TABLE:
            return Relative(self.table.weight.t(), T5_MAX_DISTANCE, buckets="t5")
        position = torch.arange(seqlen, device=self.table.weight.device)
        buckets = t5_buckets(position[:, None] - position, BUCKETS, T5_MAX_DISTANCE, True)
        found: Tensor = self.table(buckets).permute(2, 0, 1)[None]
        return found


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    found = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(found.weight, std=std)
    return found


def _step(model: Encoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What leaves the encoder, and the gradient of its table; gradients of all parameters are computed."""
    model.zero_grad(set_to_none=True)
    hidden = model(tokens)
    hidden.float().sin().sum().backward()
    table = model.table.weight.grad
    assert table is not None
    return hidden.detach(), table


def _check(want: Tensor, table: Tensor, part: slice, found: tuple[Tensor, Tensor]) -> float:
    error = distance("what leaves the encoder", found[0][part], want, FURTHEST)
    return max(error, distance("the table's gradient", found[1], table, FURTHEST_TABLE))
