"""Bytes that method ring allocates, on a GPU that is pretended: `python -m tests.distributed.ring_bytes`.

Counted are storages that operators make, while they live; what the kernels of a module use they are given by tensors.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.frozen.pretend import Recorder, hopper
from warploom import distributed
from warploom.distributed import groups, ring
from warploom.distributed.plan import planned

ROWS, HEADS, HEADS_KV, HEAD_DIM = 640, 64, 8, 128  # of a rank; the tiles of both passes divide the rows
Q, KV = ROWS * HEADS * HEAD_DIM * 2, ROWS * HEADS_KV * HEAD_DIM * 2 * 2  # bytes of q, and of k and v together
BAR, MEASURED = 1.2, 8192  # times what a pass needs anyway; rows of a rank for which that was asked
STATISTICS = 8  # numbers in fp32 for each row and head of a group: lse of a block and of all, and what merges them


class Live(TorchDispatchMode):
    """Storages that operators made, but for those of ``known`` tensors: their bytes now, and the most at once."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = operator(*arguments, **(named or {}))
        for t in tree_leaves(found):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._known:
                self._begin(t.untyped_storage())
        return found

    def _begin(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._end, key, nbytes)

    def _end(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class Peaks(NamedTuple):
    """Most bytes at once beside q, k and v, in a backward pass beside out and dout too."""

    forward: int
    backward: int


def peaks(ranks: int, rank: int, least: tuple[int, int, int], **mask: Any) -> Peaks:
    """Of the second call of its kind; ``least``: for LEAST_FORWARD, LEAST_BACKWARD and LEAST_OF_TWO."""
    with hopper(Recorder()) as fresh, ExitStack() as stack:
        fresh()
        stack.enter_context(patch.object(groups, "compared"))
        stack.enter_context(patch.object(torch.distributed, "all_to_all_single", lambda *_, **__: None))  # a mock keeps tensors
        stack.enter_context(patch.multiple(ring, LEAST_FORWARD=least[0], LEAST_BACKWARD=least[1], LEAST_OF_TWO=least[2]))
        plan = planned(ROWS * ranks, ranks, rank, "a group", method="ring", **mask)
        q, k, v = [torch.zeros(1, ROWS, n, HEAD_DIM).bfloat16().requires_grad_() for n in (HEADS, HEADS_KV, HEADS_KV)]
        dout = torch.zeros_like(q)
        for _ in range(2):  # what masks need is kept from the first
            with Live([q, k, v]) as forward:
                out = distributed.attention(q, k, v, plan=plan, **mask)
            assert isinstance(out, Tensor)
            with Live([q, k, v, out, dout]) as backward:
                torch.autograd.grad(out, (q, k, v), dout)
    return Peaks(forward.most, backward.most)


def formula(groups_forward: int, groups_backward: int) -> Peaks:
    """Of a mask that hides nothing, on three ranks or more, but for statistics.

    Forward: out; of a group out in fp32, a block's out, keys and values here, on their way, and sent. Backward: dq, dk and dv,
    which one group has in fp32 alone; of a group dq in fp32, a block's dq, the same in fp32 within its kernel, a block's dk and
    dv, their sums in fp32, keys and values here, on their way, and sent, gradients on their way back, and sent.
    """
    forward = Q + (3 * Q + 3 * KV) // groups_forward
    return Peaks(forward, (groups_backward > 1) * (Q + KV) + (5 * Q + 8 * KV) // groups_backward)


def check_formula() -> None:
    fp32 = ROWS * HEADS * HEAD_DIM * 4
    for counts in ((1, 1), (2, 2), (4, 4), (2, 8)):
        found, want = peaks(4, 1, (fp32 // counts[0], *[fp32 // counts[1]] * 2)), formula(*counts)
        for count, most, least in zip(counts, found, want, strict=True):
            beside = ROWS * HEADS * 4 * (1 + STATISTICS // count)
            assert least <= most <= least + beside, (counts, found, want, beside)


def check_bar() -> None:
    """Proportions are those of the call that the bar is for, and so are groups."""
    least = [getattr(ring, f"LEAST_{name}") * ROWS // MEASURED for name in ("FORWARD", "BACKWARD", "OF_TWO")]
    bar = BAR * (4 * Q + 3 * KV)  # q, out, dout and dq; dk and dv; two blocks of keys and values
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (ROWS, 0)})
    for ranks, rank in ((2, 1), (4, 0), (6, 5)):
        for mask in masks:
            forward, backward = peaks(ranks, rank, (least[0], least[1], least[2]), **mask)
            assert 2 * Q + forward <= bar, (ranks, rank, mask, forward / Q)  # with q and dout
            assert 3 * Q + backward <= bar, (ranks, rank, mask, backward / Q)  # and out


if __name__ == "__main__":
    check_formula()
    check_bar()
