"""Work by chunks of rows in closed form: exact for every mask, and as few calls for a long sequence as for a short one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.masks import samples
from warploom import masks
from warploom.bench.masks import document_lengths, pairs
from warploom.distributed import work
from warploom.distributed.plan import planned
from warploom.distributed.whole import Whole, resolved

LONG = ("causal", "window 1024", "causal documents", "documents", "prefix LM", "shared question", "chunked", "global + window")


def whole_of(mask: Any, window: Any, seqlen_q: int, seqlen_k: int, starts: tuple[int, ...] | None = None) -> Whole:
    return Whole.of(resolved(mask, False, window, seqlen_q, seqlen_k, starts is not None), seqlen_q, seqlen_k, starts)


def assert_exact(whole: Whole, words: str) -> None:
    rows = work.ByRow(whole.work_of_rows())
    for size in (1, 3, 16):
        assert torch.equal(whole.work().of_chunks(size), rows.of_chunks(size)), words


@pytest.mark.parametrize("name", samples.SAMPLERS)
def test_runs_of_columns_give_the_work_of_each_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "WORTH", 0)
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(8):
        sample = samples.SAMPLERS[name](rng)
        assert_exact(whole_of(sample.mask, None, sample.seqlen_q, sample.seqlen_k), f"seed {seed}: {sample}")


def test_bands_and_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "WORTH", 0)
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(15):
        seqlen_q, seqlen_k = rng.randint(0, 40), rng.randint(0, 40)
        window = rng.choice([None, rng.randint(2, 50), 2**62]), rng.choice([None, 0, rng.randint(-30, 30)])
        starts = [0]
        while rng.random() < 0.8:
            starts.append(min(seqlen_q, starts[-1] + rng.choice([0, 1, 5, 12])))
        vectors = [torch.randint(-2, 8, (1, 1, seqlen_q)).cumsum(2).int() for _ in range(4)]
        flat = [torch.full((1, 1, seqlen_q), rng.randint(-3, 20), dtype=torch.int32) for _ in range(4)]
        for whole in (
            whole_of(None, window, seqlen_q, seqlen_k),
            whole_of(None, window, seqlen_q, seqlen_q, tuple(starts)),
            whole_of(masks.ColumnMask(*vectors), window, seqlen_q, seqlen_q, tuple(starts)),
            whole_of(masks.ColumnMask(*flat), window, seqlen_q, seqlen_q, tuple(starts)),
        ):
            assert_exact(whole, f"seed {seed}: {whole}")


def test_vectors_that_jump_everywhere_are_counted_row_by_row() -> None:
    whole = whole_of(masks.RandomEviction(torch.randint(0, 200, (200,))), None, 200, 200)
    assert whole.runs is None
    falling = torch.arange(200, 0, -1, dtype=torch.int32).view(1, 1, -1)
    whole = whole_of(masks.ColumnMask(falling), None, 200, 200)
    assert whole.runs is None
    assert_exact(whole, "falling")


def test_digests_tell_masks_apart_that_show_different_things() -> None:
    def digest(*lengths: int, **band: Any) -> str:
        return whole_of(masks.Document(list(lengths)), band.get("window"), 300, 300).digest()

    assert digest(100, 200) == digest(100, 200)
    before = whole_of(masks.Document([100, 200]), None, 300, 300)
    before.work()
    assert before.digest() == digest(100, 200)
    assert len({digest(100, 200), digest(101, 199), digest(100, 199), digest(100, 200, window=(7, 0)), digest(300)}) == 5
    jumps = torch.randint(0, 300, (1, 1, 300), dtype=torch.int32)
    other = jumps.clone()
    other[0, 0, 17] += 1
    a, b = (whole_of(masks.ColumnMask(t), None, 300, 300).digest() for t in (jumps, other))
    assert a != b and a == whole_of(masks.ColumnMask(jumps.clone()), None, 300, 300).digest()


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], Any]) -> int:
    """Functions that Python calls, its own and others."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", [*LONG, "packed"])
def test_a_plan_takes_few_calls(name: str, ranks: int) -> None:
    """A count stands for the time: 100 to 200 operators of microseconds each, and Python's work by chunks, not by tokens."""
    for seqlen in (32768, 65536):
        if name == "packed":
            cu_seqlens = [0, *document_lengths(seqlen).cumsum(0).tolist()]
            call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "causal": True}
        else:
            call = {"mask": pairs(seqlen, "cpu")[name]().mask}
            call["mask"].resolve(seqlen, seqlen)  # its vectors exist before

        def plan(seqlen: int = seqlen, call: dict[str, Any] = call) -> Any:
            made = planned(seqlen, ranks, 0, **call)
            return made.whole.digest()

        with Operators() as operators:
            plan()
        assert operators.count <= 200, operators.count
        assert calls_of(plan) <= seqlen / 16, calls_of(plan)
