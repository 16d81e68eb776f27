"""A serving loop: in every step each layer appends a token to its cache and attends, hundreds of steps one after the other.

Every contender runs the same steps from the same caches, and is timed by the wall clock from the first step to the last, with
what its host does in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import warploom
from warploom import KVCache, PagedKVCache
from warploom.bench import flashinfer_peer, peers
from warploom.bench.captured import capture
from warploom.bench.decode_shapes import check
from warploom.bench.harness import Call, Case, Comparison, first_line, order_of

PAGE = 16
KINDS = 64  # different tokens, over and over
# Of new keys with all queries, others' are about 0: an output without one of them is wrong. And what lies where no step wrote.
SCORE, UNWRITTEN = 5.0, 100.0
ROUNDS = 3
# For --list: what a loop's kernels reach, bytes a second, and seconds of a layer besides; contenders and runs of each.
REACHED, LAYER, LOOPS, MAKING = 3e12, 1.5e-5, 7 * (ROUNDS + 1), 6.0

Outs = list[Tensor]  # of the first and the last layer, (batch, 1, heads, head_dim)


@dataclass(frozen=True)
class Shape:
    """Sequences that hold ``keys`` keys each before the first step."""

    batch: int
    keys: int
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    layers: int = 32
    steps: int = 256

    @property
    def name(self) -> str:
        keys = f"{self.keys // 1024}k" if self.keys % 1024 == 0 else str(self.keys)
        return f"B{self.batch} from {keys}, {self.layers} layers, {self.steps} steps"

    @property
    def capacity(self) -> int:
        return self.keys + -(-self.steps // PAGE) * PAGE


SHAPES = (Shape(1, 2048), Shape(1, 8192), Shape(1, 32768), Shape(16, 4096), Shape(64, 1024))
QUICK = Shape(2, 32, 4, 2, 16, layers=2, steps=4)


def serving_cases(quick: bool) -> list[Case]:
    shapes = (QUICK,) if quick else SHAPES
    return [Case("serving", s.name, dict(s.__dict__), partial(_build, s), _seconds(s)) for s in shapes]


def _seconds(shape: Shape) -> float:
    read = 4.0 * shape.batch * shape.keys * shape.heads_kv * shape.head_dim
    return MAKING + LOOPS * shape.steps * shape.layers * (read / REACHED + LAYER)


class Tokens:
    """Queries, keys and values of every layer's new token, as a model's projections leave them: memory that steps overwrite."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape = shape
        heads = (shape.heads, shape.heads_kv, shape.heads_kv)
        self.sizes = [shape.layers * shape.batch * n * shape.head_dim for n in heads]
        self.kinds = torch.randn(KINDS, sum(self.sizes), device=device, dtype=dtype)
        towards = torch.randn(shape.layers, shape.batch, 1, shape.heads_kv, shape.head_dim, device=device, dtype=dtype)
        for kind in self.kinds:
            q, k, _ = self.parts(kind)
            q.unflatten(3, (shape.heads_kv, -1)).add_(towards[:, :, :, :, None])
            k.mul_(0.1).add_(towards, alpha=SCORE * shape.head_dim**-0.5)
        self.now = torch.empty_like(self.kinds[0])
        self.q, self.k, self.v = self.parts(self.now)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """q, k and v, (layers, batch, 1, heads, head_dim)."""
        s = self.shape
        return [t.view(s.layers, s.batch, 1, -1, s.head_dim) for t in flat.split(self.sizes)]

    def next(self, step: int) -> None:
        self.now.copy_(self.kinds[step % KINDS])


class Caches:
    """Keys and values of every layer, contiguous and the same in pages of random order, one table for all layers."""

    def __init__(self, shape: Shape, tokens: Tokens) -> None:
        device, dtype = tokens.now.device, tokens.now.dtype
        held = (shape.layers, shape.batch, shape.capacity, shape.heads_kv, shape.head_dim)
        self.shape = shape
        self.k, self.v = (torch.randn(held, device=device, dtype=dtype) for _ in range(2))
        count = shape.batch * shape.capacity // PAGE
        order = torch.randperm(count, device=device)
        self.table = order.view(shape.batch, -1).int()
        pooled = (shape.layers, count, PAGE, shape.heads_kv, shape.head_dim)
        self.k_pages, self.v_pages = (torch.empty(pooled, device=device, dtype=dtype) for _ in range(2))
        for pages, cache in ((self.k_pages, self.k), (self.v_pages, self.v)):
            pages[:, order] = cache.view(pooled)
        self.tail = order.view(shape.batch, -1)[:, shape.keys // PAGE :].flatten()
        self.forget()

    def forget(self) -> None:
        """Overwrite what steps have appended: the next contender is to find none of it."""
        for cache, pages in ((self.k, self.k_pages), (self.v, self.v_pages)):
            cache[:, :, self.shape.keys :] = UNWRITTEN
            pages[:, self.tail] = UNWRITTEN


def _nothing(step: int) -> None:
    pass


@dataclass
class Contender:
    """One way to run the loop."""

    begin: Callable[[], object]  # lengths back to where the first step finds them
    step: Callable[[], Outs]  # on the device
    before: Callable[[int], None] = field(default=_nothing)  # on the host, before a step of this number
    captured: bool = True  # the step as a CUDA graph, where there are any


def _build(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    tokens = Tokens(shape, device)
    caches = Caches(shape, tokens)
    makers: dict[str, Callable[[], Contender]] = {
        "warploom": partial(_ours, caches, tokens, paged=False),
        f"warploom, pages of {PAGE}": partial(_ours, caches, tokens, paged=True),
    }
    if device.type == "cuda":
        makers["warploom, hopper"] = partial(_ours, caches, tokens, paged=False, backend="hopper")
        makers["cuDNN, masked"] = partial(_masked, caches, tokens, peers.sdpa_of("cuDNN"))
        makers["FlashInfer"] = partial(_flashinfer, caches, tokens, tensor_cores=False)
        makers["FlashInfer, tensor cores"] = partial(_flashinfer, caches, tokens, tensor_cores=True)
    else:
        makers["SDPA, masked"] = partial(_masked, caches, tokens, peers.sdpa_of(None))
    makers["SDPA, eager"] = partial(_eager, caches, tokens)
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    with torch.no_grad():
        for name, make in makers.items():
            try:
                calls[name] = partial(_loop, _ready(make(), device), tokens)
            except peers.NotHere as why:
                refused[name] = str(why)
            except Exception as error:  # a peer may fail in any way
                refused[name] = first_line(error)
            caches.forget()
        judge, clock = Judge(caches, tokens), partial(whole, device)
        yield "step", Comparison(calls, judge, refused=refused, divide=shape.steps, tokens=shape.batch, clock=clock)


def _ready(contender: Contender, device: torch.device) -> Contender:
    """The contender with its step captured, on a GPU where it may be."""
    if device.type == "cuda" and contender.captured:
        contender.begin()
        contender.before(0)
        contender.step = capture(contender.step)
    return contender


@torch.no_grad()
def _loop(contender: Contender, tokens: Tokens) -> Outs:
    """All steps; the last one's outputs."""
    contender.begin()
    for step in range(tokens.shape.steps):
        tokens.next(step)
        contender.before(step)
        outs = contender.step()
    return outs


def _ours(caches: Caches, tokens: Tokens, paged: bool, backend: str | None = None) -> Contender:
    shape = caches.shape
    lengths = torch.empty(shape.layers, shape.batch, dtype=torch.int32, device=tokens.now.device)
    layers: list[KVCache | PagedKVCache] = [
        PagedKVCache(caches.k_pages[n], caches.v_pages[n], caches.table, lengths[n])
        if paged
        else KVCache(caches.k[n], caches.v[n], lengths[n])
        for n in range(shape.layers)
    ]

    def step() -> Outs:
        outs = []
        for n, cache in enumerate(layers):
            cache.append(tokens.k[n], tokens.v[n])
            outs.append(warploom.decode(tokens.q[n], cache, backend=backend))
        return [outs[0], outs[-1]]

    return Contender(lambda: lengths.fill_(shape.keys), step)


def _masked(caches: Caches, tokens: Tokens, attend: peers.Masked) -> Contender:
    """A graph has one length of keys, so all that a cache can hold are given, those to come hidden by a mask."""
    shape, device = caches.shape, tokens.now.device
    lengths = torch.empty(shape.batch, dtype=torch.int64, device=device)
    places = torch.arange(shape.capacity, device=device)

    def step() -> Outs:
        position = lengths[:1].clone()
        lengths.add_(1)
        mask = (places < lengths[:, None])[:, None, None]
        outs = []
        for n in range(shape.layers):
            caches.k[n].index_copy_(1, position, tokens.k[n])
            caches.v[n].index_copy_(1, position, tokens.v[n])
            outs.append(attend(tokens.q[n], caches.k[n], caches.v[n], mask))
        return [outs[0], outs[-1]]

    return Contender(lambda: lengths.fill_(shape.keys), step)


def _eager(caches: Caches, tokens: Tokens) -> Contender:
    """The keys of the moment, cut out on the host: each step has another length, so none is captured."""
    shape, attend = caches.shape, peers.sdpa_of(None)
    length = [shape.keys]

    def begin() -> None:
        length[0] = shape.keys

    def step() -> Outs:
        at = length[0]
        length[0] = at + 1
        outs = []
        for n in range(shape.layers):
            caches.k[n, :, at] = tokens.k[n, :, 0]
            caches.v[n, :, at] = tokens.v[n, :, 0]
            outs.append(attend(tokens.q[n], caches.k[n, :, : at + 1], caches.v[n, :, : at + 1], None))
        return [outs[0], outs[-1]]

    return Contender(begin, step, captured=False)


def _flashinfer(caches: Caches, tokens: Tokens, tensor_cores: bool) -> Contender:
    """Its plan is made anew for each step, and serves all layers of it."""
    shape = caches.shape
    steps = flashinfer_peer.Steps(caches.table, PAGE, tokens.q[0], shape.heads_kv, tensor_cores)

    def step() -> Outs:
        outs = []
        for n in range(shape.layers):
            pages = caches.k_pages[n], caches.v_pages[n]
            steps.append(tokens.k[n], tokens.v[n], pages)
            outs.append(steps.attend(tokens.q[n], pages))
        return [outs[0], outs[-1]]

    return Contender(lambda: None, step, lambda step: steps.plan(shape.keys + step + 1))


class Judge:
    """The last step's outputs of the first and the last layer, against fp32 arithmetic on keys that no loop writes."""

    def __init__(self, caches: Caches, tokens: Tokens) -> None:
        shape, self.caches = caches.shape, caches
        steps = torch.arange(shape.steps, device=tokens.now.device) % KINDS
        last = tokens.parts(tokens.kinds[(shape.steps - 1) % KINDS])[0]
        self.wanted: list[tuple[Tensor, KVCache]] = []
        self.batches = torch.tensor(sorted({0, shape.batch // 2, shape.batch - 1}), device=tokens.now.device)
        kinds = [tokens.parts(kind) for kind in tokens.kinds]
        for layer in (0, shape.layers - 1):
            k, v = (
                torch.cat([cache[layer, self.batches, : shape.keys], torch.stack(new, 1)[:, steps]], 1)
                for cache, new in (
                    (caches.k, [kind[1][layer, self.batches, 0] for kind in kinds]),
                    (caches.v, [kind[2][layer, self.batches, 0] for kind in kinds]),
                )
            )
            lengths = torch.full((len(self.batches),), shape.keys + shape.steps, dtype=torch.int32, device=steps.device)
            self.wanted.append((last[layer, self.batches], KVCache(k, v, lengths)))

    def __call__(self, outs: Outs) -> float:
        """The larger error; the caches forget what the contender appended."""
        try:
            return max(check(q, cache, out[self.batches]) for (q, cache), out in zip(self.wanted, outs, strict=True))
        finally:
            self.caches.forget()


def whole(device: torch.device, calls: dict[str, Call], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of whole loops by the wall clock, the device's work included."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for at in order_of(turn, len(names)):
            wait()
            begin = time.perf_counter()
            calls[names[at]]()
            wait()
            times[names[at]].append((time.perf_counter() - begin) * 1e3)
    return times
