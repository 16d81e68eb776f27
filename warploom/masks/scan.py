"""The column mask of a matrix that is read block by block and never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from warploom.masks.fit import KEPT, check, fit
from warploom.masks.intervals import ResolvedMask
from warploom.masks.runs import Runs

# Elements of a block. On a CPU a block and the temporaries of a mask function stay in its caches; on a GPU it is large enough
# that launching costs little.
_ON_CPU, _ELSEWHERE = 1 << 20, 1 << 24
_WIDTH = 1024  # columns of a block of a matrix that is larger than a block

Span = tuple[int, int]
# (batch entries, heads, rows, columns) -> bool (batch entries, heads, rows, columns), True = visible
Block = Callable[[Span, Span, Span, Span], Tensor]


def scan(
    what: str,
    block: Block,
    shape: tuple[int, int, int, int],
    device: torch.device,
    step: Callable[[int], object] = lambda elements: None,
) -> ResolvedMask:
    """Reads every element once; memory is that of one block and O(batch · heads · seqlen_k).

    Args:
        what: names the mask in the error.
        block: gives the elements of a block; each span is (first, past the last).
        shape: (batch, heads, seqlen_q, seqlen_k).
        device: where the blocks are.
        step: called with the number of elements of each block that was read.

    Raises:
        ValueError: as `fit`; in column order, and as soon as a column is met that no band can help.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    if 0 in shape:
        hidden = torch.zeros(batch, heads, seqlen_k, dtype=torch.int32, device=device)
        return ResolvedMask(None, None, hidden, None, None, None)
    most = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    width = min(seqlen_k, max(_WIDTH, most // seqlen_q))
    height = min(seqlen_q, max(1, most // width))
    together = max(1, most // (width * height)) if (width, height) == (seqlen_k, seqlen_q) else 1
    # A column that is yet to come counts as hidden from top to end.
    count = torch.ones(batch, heads, seqlen_k, dtype=torch.int32, device=device)
    starts = torch.full((KEPT, batch, heads, seqlen_k), seqlen_q, dtype=torch.int32, device=device)
    ends = starts.clone()
    starts[0] = 0
    for b in _spans(batch, max(1, together // heads)):
        for h in _spans(heads, together):
            for c in _spans(seqlen_k, width):
                runs = Runs((b[1] - b[0], h[1] - h[0], c[1] - c[0]), seqlen_q, KEPT, device)
                for r in _spans(seqlen_q, height):
                    seen = block(b, h, r, c)
                    runs.add(r[0], seen)
                    step(seen.numel())
                here = (slice(*b), slice(*h), slice(*c))
                count[here] = runs.count
                for number, (start, end) in enumerate(runs.kept):
                    starts[number][here], ends[number][here] = start, end
                if bool((runs.count > 2).any()):
                    check(what, list(zip(starts, ends, strict=True)), count, seqlen_q, seqlen_k)
    return fit(what, list(zip(starts, ends, strict=True)), count, seqlen_q, seqlen_k)


def _spans(length: int, size: int) -> Iterator[Span]:
    return ((at, min(at + size, length)) for at in range(0, length, size))
