"""Masks as plain data: what a problem holds of a mask, drawing one, and the numbers that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.problem import spec

Rows = tuple[tuple[int, ...], ...]


@spec
@dataclass(frozen=True)
class MaskSpec:
    """A builder of warploom.masks and its arguments. One row of `a` and `b` serves all batch entries, else each has its own.

    kind: a name of KINDS, or "and" with two `parts`.
    form: how the builder is given rows: "list", "int32" or "int64" tensors.
    seed: of numbers that are too many to be written down: bits, rows and vectors.
    """

    kind: str
    a: Rows = ()
    b: Rows = ()
    left: int | None = None
    right: int | None = None
    causal: bool = False
    form: str = "list"
    seed: int = 0
    batch: int = 1  # of what comes from the seed
    heads: int = 1
    vectors: tuple[str, ...] = ()
    parts: tuple[MaskSpec, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.parts[0].kinds + self.parts[1].kinds if self.kind == "and" else (self.kind,)


# kind: which column vectors it has, whether it brings a left and a right band. "or": it depends on values.
SHAPES: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "full": ((), False, False),
    "causal": ((), False, True),
    "chunked": (("lts",), False, True),
    "padding_lengths": (("lts",), False, False),
    "padding_bits": (("lts",), False, False),
    "document": (("lts",), False, True),
    "document_both": (("lts", "ute"), False, False),
    "document_cu": (("lts",), False, True),
    "document_segments": (("lts", "ute"), False, False),
    "document_positions": (("lts",), False, True),
    "prefix_lm": (("ute",), False, False),
    "prefix_document": (("lts", "ute"), False, False),
    "shared_question": (("lts",), False, True),
    "global_window": (("lts", "uts", "ute"), False, False),
    "global_window_causal": (("lts",), False, True),
    "blockwise": (("lts", "lte"), False, True),
    "tree": (("lts",), False, True),
    "spans": (("ute",), False, False),
    "qk_sparse_bits": (("lts", "lte"), False, True),
    "qk_sparse_positions": (("lts", "lte"), False, True),
    "eviction": (("lts",), False, True),
    "block_diffusion": (("lts", "lte", "ute"), False, False),
}
KINDS = (*SHAPES, "window", "columns")
VECTORS = (
    ("lts",),
    ("lts", "lte"),
    ("ute",),
    ("uts", "ute"),
    ("lts", "ute"),
    ("lts", "lte", "ute"),
    ("lts", "uts", "ute"),
    ("lts", "lte", "uts", "ute"),
)


def classes() -> dict[tuple[tuple[str, ...], bool], list[str]]:
    """Kinds by the vectors that they have and whether they bring a right limit; "columns" may be any."""
    found: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for kind, (vectors, _, right) in SHAPES.items():
        if vectors and kind != "blockwise":  # whose padding has other vectors
            found.setdefault((vectors, right), []).append(kind)
    for vectors in VECTORS:
        for right in (False, True):
            found.setdefault((vectors, right), []).append("columns")
    return found


def limit(d: Draw, seqlen_q: int, seqlen_k: int) -> int | None:
    """One side of a window: mostly one that cuts something, at times negative, huge or none."""
    span = max(seqlen_q, seqlen_k, 1)
    return d.any_of(
        {
            None: 3,
            0: 3,
            d.integer(0, 8): 2,
            d.integer(0, span): 5,
            -d.integer(1, 8): 1.5,
            -d.integer(1, span + 2): 1.5,
            10**12: 0.3,
        }
    )


def window(d: Draw, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """Any window but (−1, −1), which flash-attn reads as none and warploom refuses."""
    while True:
        found = limit(d, seqlen_q, seqlen_k), limit(d, seqlen_q, seqlen_k)
        if found != (-1, -1) and found != (None, None):
            return found


def draw_mask(d: Draw, kind: str, batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> MaskSpec:
    """A mask of that kind for a call of these sizes. For "block_diffusion" seqlen_k has to be even."""
    n = seqlen_k
    count = batch if d.chance(0.7) else 1
    form = d.pick(("list", "int32", "int64"))
    mask = MaskSpec(kind, form=form)

    def rows(make: object) -> Rows:
        return tuple(make() for _ in range(max(count, 1)))  # type: ignore[operator]

    if kind in ("full", "causal"):
        return MaskSpec(kind)
    if kind == "window":
        left, right = window(d, seqlen_q, seqlen_k)
        return MaskSpec(kind, left=left, right=right)
    if kind == "chunked":
        return replace(mask, a=((d.integer(1, max(1, n + 3)),),))
    if kind == "padding_lengths":
        return replace(mask, a=rows(lambda: (d.integer(0, n),)))
    if kind in ("padding_bits", "qk_sparse_bits"):
        return replace(mask, seed=d.seed(), batch=max(count, 1), a=((d.pick((10, 50, 90)),),))
    if kind in ("document", "document_both", "document_cu", "blockwise"):
        causal = kind != "document_both"
        return replace(mask, a=rows(lambda: d.split(n)), causal=causal)
    if kind == "document_segments":
        return replace(mask, a=rows(lambda: _segments(d, n)), causal=False)
    if kind == "document_positions":
        return replace(mask, a=rows(lambda: tuple(t for m in d.split(n, True) for t in range(m))), causal=True)
    if kind == "prefix_lm":
        return replace(mask, a=rows(lambda: (d.integer(0, n + 1),)))
    if kind == "prefix_document":
        lengths = rows(lambda: d.split(n))
        return replace(mask, a=lengths, b=tuple(tuple(d.integer(0, m) for m in row) for row in lengths))
    if kind == "shared_question":
        question = rows(lambda: (d.integer(0, n),))
        return replace(mask, a=question, b=tuple(d.split(n - q[0]) for q in question))
    if kind in ("global_window", "global_window_causal"):
        left = d.integer(-2, max(1, n))
        right = 0 if kind == "global_window_causal" else d.pick((d.integer(1, max(1, n)), d.integer(-3, -1)))
        return replace(mask, a=rows(lambda: (d.integer(0, d.pick((4, n + 1))),)), left=left, right=right)
    if kind == "tree":
        return replace(mask, a=rows(lambda: _parents(d, d.pick((n, n, d.integer(0, n))))))
    if kind == "spans":
        drawn = rows(lambda: _spans(d, n))
        return replace(mask, a=tuple(s[0] for s in drawn), b=tuple(s[1] for s in drawn))
    if kind == "qk_sparse_positions":
        share = d.pick((0.1, 0.5, 0.9))
        return replace(mask, a=rows(lambda: tuple(j for j in range(n) if d.chance(share))))
    if kind == "eviction":
        return replace(mask, seed=d.seed(), batch=max(count, 1), heads=d.pick((1, heads_q, heads_kv)))
    if kind == "block_diffusion":
        return replace(mask, a=((n // 2, d.integer(1, max(1, n // 2 + 2))),))
    if kind == "columns":
        return columns(d, d.pick(VECTORS), d.chance(0.4), max(count, 1), d.pick((1, heads_q, heads_kv)))
    raise ValueError(f"there is no mask {kind!r}")


def columns(d: Draw, vectors: Sequence[str], causal: bool, batch: int, heads: int) -> MaskSpec:
    """Raw vectors: of drawn rows, or near the diagonal, or in long runs."""
    style = d.pick((0, 1, 2, 3), (3, 3, 3, 1))
    return MaskSpec("columns", a=((style,),), causal=causal, seed=d.seed(), batch=batch, heads=heads, vectors=tuple(vectors))


def _segments(d: Draw, total: int) -> tuple[int, ...]:
    """Ids in runs, each of one document; padding between and after them is negative."""
    ids: list[int] = []
    for n, length in enumerate(d.split(total)):
        ids += [-d.integer(1, 3) if d.chance(0.1) else 7 * n + d.integer(0, 6)] * length
    return tuple(ids + [-1] * (total - len(ids)))


def _parents(d: Draw, count: int) -> tuple[int, ...]:
    """A forest in preorder."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(count):
        del path[d.pick((len(path), len(path), len(path), d.integer(0, len(path)))) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return tuple(parents)


def _spans(d: Draw, total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    parts = d.split(total)
    spans = [(sum(parts[:n]), parts[n]) for n in range(len(parts)) if d.chance(0.5)]
    spans = d.shuffled(spans)
    return tuple(s for s, _ in spans), tuple(n for _, n in spans)


@cache
def _generator() -> torch.Generator:
    return torch.Generator()


def bits(mask: MaskSpec, seqlen_k: int) -> Tensor:
    """bool (batch, seqlen_k), true with the probability that `a` holds in percent."""
    generator = _generator().manual_seed(mask.seed)
    return torch.rand(mask.batch, seqlen_k, generator=generator) * 100 < mask.a[0][0]


def eviction_rows(mask: MaskSpec, seqlen_q: int, seqlen_k: int) -> Tensor:
    """int64 (batch, heads, seqlen_k)."""
    generator = _generator().manual_seed(mask.seed)
    return torch.randint(0, seqlen_q + 3, (mask.batch, mask.heads, seqlen_k), generator=generator)


def vectors(mask: MaskSpec, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    """int32 (batch, heads, seqlen_k) of each vector that the mask has."""
    generator = _generator().manual_seed(mask.seed)
    style, shape = mask.a[0][0], (mask.batch, mask.heads, seqlen_k)
    places = torch.arange(seqlen_k) - (seqlen_k - seqlen_q)
    found = {}
    for name in mask.vectors:
        drawn = torch.randint(-5, seqlen_q + 6, shape, generator=generator)
        if style == 1:  # near the diagonal: most keys are hidden from late rows or early ones
            near = torch.randint(-8, 9, shape, generator=generator) + places
            drawn = torch.where(torch.rand(shape, generator=generator) < 0.8, near, drawn)
        elif style == 2:  # runs of 40 keys share their bounds
            drawn = drawn[..., torch.arange(seqlen_k) // 40 * 40]
        elif style == 3:  # beyond every row
            far = torch.randint(0, 2, shape, generator=generator) * (2**32 - 1) - 2**31
            drawn = torch.where(torch.rand(shape, generator=generator) < 0.3, far, drawn)
        found[name] = drawn.to(torch.int32)
    return found
