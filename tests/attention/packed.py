"""A packed or paged call, judged against the fp64 reference; the model sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.attention import philox
from warploom.attention.judge import judge, low_precision
from warploom.masks import ColumnMask


@dataclass
class Packed:
    """Sequences of given lengths and some tokens past them. `used` shortens keys; `vectors` are a mask's, per key.

    Under `hostile` whoever is judged finds NaN in keys and values that no query sees and in all tokens past the last sequence.
    """

    seed: int
    lengths_q: list[int]
    lengths_k: list[int] | None = None
    used: list[int] | None = None
    vectors: int = 0
    names: tuple[str, ...] = ("lts", "lte", "uts", "ute")  # of the vectors
    mask_heads: int | None = None  # None: heads_kv
    hostile: bool = False
    page_size: int | None = None
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 16
    head_dim_v: int = 24
    extra: int = 3
    sink: bool = False
    lse_gradient: bool = False
    dtype: torch.dtype = torch.float16
    device: str = "cpu"
    keywords: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.keys = self.lengths_q if self.lengths_k is None else self.lengths_k
        self.seen = self.keys if self.used is None else self.used
        total_q = sum(self.lengths_q) + self.extra
        total_k = total_q if self.lengths_k is None else sum(self.keys) + self.extra

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        self.q, self.dout = draw(total_q, self.heads_q, self.head_dim), draw(total_q, self.heads_q, self.head_dim_v)
        self.k, self.v = (draw(total_k, self.heads_kv, dim) for dim in (self.head_dim, self.head_dim_v))
        self.dlse = draw(self.heads_q, total_q, dtype=torch.float32) * self.lse_gradient
        self.sinks = draw(self.heads_q, dtype=torch.float32) if self.sink else None
        high = max(self.lengths_q, default=0) + 5
        shape = (1, self.mask_heads or self.heads_kv, total_k)
        drawn = [torch.randint(-5, high, shape, generator=generator, dtype=torch.int32) for _ in range(self.vectors)]
        self.columns = [t.to(self.device) for t in drawn]
        if self.page_size is not None:
            self._fill_pages(generator)

    def _starts(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32, device=self.device).cumsum(0, dtype=torch.int32)

    def _fill_pages(self, generator: torch.Generator) -> None:
        """Pages in a drawn order; slots that no sequence uses hold NaN, entries that none needs point anywhere."""
        size, count = self.page_size, len(self.keys)
        each = max(-(-max(self.seen) // size), 1)
        order = torch.randperm(count * each + 2, generator=generator)
        self.table = order[: count * each].view(count, each).int()
        self.k_pages, self.v_pages = (
            torch.full((len(order), size, self.heads_kv, dim), float("nan"), dtype=self.dtype, device=self.device)
            for dim in (self.head_dim, self.head_dim_v)
        )
        first = 0
        for n, length in enumerate(self.keys):
            for j in range(self.seen[n]):
                at = int(self.table[n, j // size]), j % size
                self.k_pages[at], self.v_pages[at] = self.k[first + j], self.v[first + j]
            self.table[n, -(-self.seen[n] // size) :] = 2**31 - 1 if n % 2 else -5
            first += length
        self.table = self.table.to(self.device)

    def results(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """out, lse and, but for pages, gradients."""
        paged = self.page_size is not None and dtype is None
        source = (self.q, self.k_pages, self.v_pages) if paged else (self.q, self.k, self.v)
        if self.hostile and dtype is None:
            source = self._poisoned()
        leaves = [t.detach().to(dtype or self.dtype).requires_grad_(not paged) for t in source]
        keywords = dict(self.keywords)
        if self.sinks is not None:
            keywords["sink"] = self.sinks.to(torch.promote_types(dtype or torch.float32, torch.float32)).requires_grad_(
                not paged
            )
        if self.columns:
            keywords["mask"] = self._mask(self.columns)
        if paged:
            keywords["block_table"] = self.table
            used: list[int] | None = self.seen
        else:
            used = self.used
        if used is not None:
            keywords["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=self.device)
        starts_k = None if paged or self.lengths_k is None else self._starts(self.keys)
        out, lse = warploom.attention_varlen(
            *leaves, self._starts(self.lengths_q), starts_k, return_lse=True, backend=backend, **keywords
        )
        found = {"out": out, "lse": lse}
        if self.page_size is None:
            if self.sinks is not None:
                leaves.append(keywords["sink"])
            total = (out * self.dout.to(out)).sum() + (lse * self.dlse.to(lse)).masked_fill(torch.isinf(lse), 0.0).sum()
            found |= dict(zip(("dq", "dk", "dv", "dsink"), torch.autograd.grad(total, leaves), strict=False))
        return found

    def _mask(self, columns: list[Tensor]) -> ColumnMask:
        named = dict(zip(self.names, columns, strict=False))
        return ColumnMask(named.pop("lts", None), **named)

    def _poisoned(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with NaN where nothing depends on them."""
        hidden = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.device)
        first_q, first_k = 0, 0
        for length, stored, used in zip(self.lengths_q, self.keys, self.seen, strict=True):
            seen = self._visible(length, slice(first_k, first_k + used)).expand(1, self.heads_q, -1, -1)
            hidden[first_k : first_k + used] = ~seen[0].any(1).unflatten(0, (self.heads_kv, -1)).any(1).T
            first_q, first_k = first_q + length, first_k + stored
        q, k, v = (t.clone() for t in (self.q, self.k, self.v))
        q[first_q:] = float("nan")
        for t in (k, v):
            t[hidden] = float("nan")
        return q, k, v

    def _visible(self, length: int, cols: slice) -> Tensor:
        """bool (1, heads_q|1, queries, keys) of a sequence of so many queries, whose keys are ``cols``."""
        used = cols.stop - cols.start
        whole = self._mask([t[..., cols].contiguous() for t in self.columns]) if self.columns else warploom.masks.Full()
        seen = whole.dense(length, used).to(self.device)
        if seen.shape[1] != 1:
            seen = seen.repeat_interleave(self.heads_q // seen.shape[1], dim=1)
        left, right = self.keywords.get("window", (None, None))
        band = warploom.masks.SlidingWindow(left, 0 if self.keywords.get("causal") else right)
        return seen & band.dense(length, used).to(self.device)

    def model(self) -> dict[str, Tensor]:
        """The low-precision model, zeros where no sequence is."""
        found = {
            "out": torch.zeros_like(self.dout),
            "lse": torch.full_like(self.dlse, float("-inf")),
            **{name: torch.zeros_like(t) for name, t in (("dq", self.q), ("dk", self.k), ("dv", self.v))},
        }
        first_q, first_k, dsinks = 0, 0, []
        for n, (length, stored, used) in enumerate(zip(self.lengths_q, self.keys, self.seen, strict=True)):
            rows, cols = slice(first_q, first_q + length), slice(first_k, first_k + used)
            if length and not used and self.sinks is not None:
                found["lse"][:, rows] = self.sinks[:, None]
            if length and used:
                part, dsink = self._sequence(n, rows, cols)
                for name, at in (("out", rows), ("dq", rows), ("dk", cols), ("dv", cols)):
                    found[name][at] = getattr(part, name)[0]
                found["lse"][:, rows] = part.lse[0]
                dsinks.append(dsink)
            first_q, first_k = first_q + length, first_k + stored
        if self.sinks is not None:
            found["dsink"] = sum(dsinks, torch.zeros_like(self.sinks, dtype=torch.float64))
        return found

    def _sequence(self, n: int, rows: slice, cols: slice) -> tuple[Any, Tensor | None]:
        q, k, v, dout = self.q[None, rows], self.k[None, cols], self.v[None, cols], self.dout[None, rows]
        length, used = q.shape[1], k.shape[1]
        seen = self._visible(length, cols)
        keep = None
        p = self.keywords.get("dropout_p", 0.0)
        device = self.device
        if p:
            at = [torch.tensor([n], device=device), *(torch.arange(m, device=device) for m in (self.heads_q, length, used))]
            keep = philox.keep_mask(torch.tensor([self.keywords["dropout_seed"]], device=device), p, *at) * philox.keep_scale(p)
        scale = self.keywords.get("scale", self.head_dim**-0.5)
        options = {"scale": scale, "softcap": self.keywords.get("softcap", 0.0), "sink": self.sinks, "keep": keep}
        low = low_precision(q, k, v, dout, self.dlse[None, :, rows], seen, **options)
        if self.sinks is None:
            return low, None
        options["sink"] = self.sinks.double()
        wide = (t.double() for t in (q, k, v, dout, self.dlse[None, :, rows]))
        return low, low.dsink_like(low_precision(*wide, seen, **options))

    def check(self, backend: str) -> None:
        got, want, low = self.results(backend), self.results("reference", torch.float64), self.model()
        for name, value in got.items():
            verdict = judge(name, value, want[name], low[name], self.dtype)
            assert verdict.passed, f"{backend}: {verdict}\n{self}"


# name: everything of a Packed but its seed
PACKED: dict[str, dict[str, Any]] = {
    "causal": {"lengths_q": [70, 1, 130, 5], "keywords": {"causal": True}},
    "empty sequences": {"lengths_q": [0, 70, 0, 0, 3, 0]},
    "all empty": {"lengths_q": [0, 0]},
    "one sequence": {"lengths_q": [128], "extra": 0, "keywords": {"causal": True}},
    "other keys": {"lengths_q": [5, 0, 70, 1, 3], "lengths_k": [9, 4, 130, 6, 0], "keywords": {"causal": True}},
    "used keys": {"lengths_q": [5, 0, 70, 4], "lengths_k": [9, 4, 130, 6], "used": [4, 4, 65, 0], "keywords": {"causal": True}},
    "window": {"lengths_q": [150, 33], "lengths_k": [200, 10], "keywords": {"window": (40, 5)}},
    "sink, softcap, lse": {
        "lengths_q": [70, 3],
        "sink": True,
        "lse_gradient": True,
        "keywords": {"softcap": 2.0, "causal": True},
    },
    "dropout": {"lengths_q": [70, 3, 40], "keywords": {"dropout_p": 0.4, "dropout_seed": 99}},
    "column mask": {"lengths_q": [100, 40], "vectors": 1, "keywords": {"causal": True}},
    "four vectors": {"lengths_q": [100, 40], "lengths_k": [150, 40], "vectors": 4, "heads_q": 4, "heads_kv": 2},
    "column masks of query heads": {
        "lengths_q": [100, 0, 40, 3],
        "lengths_k": [150, 5, 170, 0],
        "vectors": 2,
        "names": ("lts", "ute"),
        "heads_q": 4,
        "heads_kv": 2,
        "mask_heads": 4,
        "hostile": True,
        "sink": True,
        "keywords": {"window": (90, 20)},
    },
    "used keys under a column mask": {
        "lengths_q": [5, 0, 70, 4],
        "lengths_k": [9, 4, 130, 6],
        "used": [4, 4, 65, 0],
        "vectors": 1,
        "names": ("ute",),
        "mask_heads": 1,
        "heads_q": 7,
        "hostile": True,
        "lse_gradient": True,
        "keywords": {"softcap": 3.0},
    },
    "group of 7": {"lengths_q": [40, 65], "heads_q": 7, "head_dim": 72, "head_dim_v": 72, "keywords": {"causal": True}},
    "many short ones": {"lengths_q": [3, 1, 0, 2] * 80, "keywords": {"causal": True}},
    "pages of 1": {"lengths_q": [5, 3, 0, 1], "lengths_k": [21, 3, 7, 0], "page_size": 1, "keywords": {"causal": True}},
    "pages of 16": {"lengths_q": [40, 70, 1], "lengths_k": [90, 70, 130], "page_size": 16, "keywords": {"causal": True}},
    "pages of 64, window": {"lengths_q": [40, 3], "lengths_k": [200, 64], "page_size": 64, "keywords": {"window": (50, 0)}},
    "pages of 256, sink": {"lengths_q": [20], "lengths_k": [300], "page_size": 256, "sink": True},
}
