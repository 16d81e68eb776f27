"""What the host does before the launches of a backward pass, with its kernels in Python in their places."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.delta.cases import Case, truth
from tests.delta.delta_model import results
from tests.delta.hopper.test_run import CASES, drawn, matrix, prepare, readable, spans
from tests.plain import parameters
from warploom.attention.judge import judge
from warploom.delta import hopper
from warploom.delta.hopper import run_back
from warploom.delta.hopper.config import (
    BACK_ITEM,
    BETA,
    CHUNK,
    CLOSING,
    COARSE,
    COLUMNS,
    FINE,
    MATRIX,
    NO_STATE,
    OF_K,
    OF_Q,
    QUERIES,
    READS,
    WHOLE,
    WRITES,
)
from warploom.delta.hopper.plan import width
from warploom.delta.hopper.ranges import Ranges, Sizes
from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Head(NamedTuple):
    """A chunk of a value head in a range, in fp64."""

    sequence: int
    head: int
    entry: int  # of its states' tiles, in rows of all value columns
    item: int  # of what was prepared, and of its tiles of Y
    first: bool  # of the sequence
    last: bool
    rows: slice  # where its tokens are
    batch: int
    inverse: Tensor
    weights: Tensor
    numbers: Tensor


def heads(
    prepared: Tensor, like: Tensor, lengths: Tensor, cu: Tensor, size: int, begin: int, end: int, each: int
) -> Iterator[Head]:
    """All of ranges ``begin`` to ``end``, of a sequence and head one after the other; the first range is the short one."""
    batch, seqlen, count, _ = like.shape
    total = -(-seqlen // CHUNK) if each else len(prepared) // count
    short = -(-total // size) * size - total
    sequences = spans(seqlen, batch, lengths, cu)[: cu.numel() - 1 if cu.numel() else batch]
    for n, (row, start, _, live, slot) in enumerate(sequences):
        chunks = -(-live // CHUNK)
        for head in range(count):
            for c in range(chunks):
                place = short + (c if each else slot + c)
                if not begin * size <= place < (end + 1) * size:
                    continue
                rows = slice(start + c * CHUNK, start + min((c + 1) * CHUNK, live))
                number = (slot + c) * count + head
                item = prepared[number]
                words = item[: 2 * MATRIX].view(torch.bfloat16)
                held = rows.stop - rows.start
                squares = [matrix(t).double()[:held, :held] for t in words.chunk(2)]
                numbers = item[2 * MATRIX :].view(-1, CHUNK).double()[:, :held, None]
                entry = (place - end * size + (n * size if each else 0)) * count + head
                yield Head(n, head, entry, number, c == 0, c == chunks - 1, rows, row, *squares, numbers)


def put(tiles: Tensor, entry: int, values: Tensor) -> None:
    """(rows, M) as tiles of value columns."""
    count, rows = -(-values.shape[1] // COLUMNS), tiles.shape[1] // COLUMNS
    wide = values.new_zeros(rows, count * COLUMNS)
    wide[: values.shape[0], : values.shape[1]] = values
    tiles[entry * count : (entry + 1) * count] = wide.unflatten(1, (count, COLUMNS)).transpose(0, 1).flatten(1)


def take(tiles: Tensor, entry: int, rows: int, m: int) -> Tensor:
    """The way back."""
    count = -(-m // COLUMNS)
    found = tiles[entry * count : (entry + 1) * count].unflatten(1, (-1, COLUMNS)).transpose(0, 1).flatten(1)
    return found[:rows, :m].double()


def place_of_y(missing: tuple[Tensor, Tensor], h: Head, count: int) -> Tensor:
    """Where Y of a chunk of one of ``count`` value heads lies: both tensors have heads by turns, or each has all."""
    for t in missing:
        readable(t)
    tensors = count // missing[0].shape[2]
    return missing[h.head % tensors][h.batch, h.rows, h.head // tensors]


def put_missing(missing: tuple[Tensor, Tensor], h: Head, count: int, y: Tensor) -> None:
    place_of_y(missing, h, count)[:, : y.shape[1]] = y


def take_missing(missing: tuple[Tensor, Tensor], h: Head, count: int, m: int) -> Tensor:
    return place_of_y(missing, h, count)[:, :m].double()


def keep(
    k: Tensor, v: Tensor, prepared: Tensor, state: Tensor, last: Tensor, resume: Tensor, states: Tensor, missing: Tensor,
    missing_odd: Tensor, lengths: Tensor, cu: Tensor, size: int, begin: int, end: int, per_sequence: int, carriers: int,
) -> None:  # fmt: skip
    for t in (k, v):
        readable(t)
    assert prepared.shape[1] == BACK_ITEM
    group, s = v.shape[2] // k.shape[2], torch.empty(0)
    for h in heads(prepared, v, lengths, cu, size, begin, end, per_sequence):
        carrier, place = h.sequence if per_sequence else 0, h.entry // v.shape[2] + end * size
        place -= h.sequence * size if per_sequence else 0
        if h.first:
            s = state[h.sequence, h.head].double() if state.shape[0] else torch.zeros(k.shape[3], v.shape[3]).double()
        elif place == begin * size:
            s = take(resume, ((begin - 1) * carriers + carrier) * v.shape[2] + h.head, k.shape[3], v.shape[3])
        elif place % size == 0:
            put(resume, ((place // size - 1) * carriers + carrier) * v.shape[2] + h.head, s)
        b = k[h.batch, h.rows, h.head // group].double()
        y = v[h.batch, h.rows, h.head].double() - h.numbers[READS] * (b @ s)
        y = y + h.inverse @ y
        if place >= end * size:
            put(states, h.entry, s)
        put_missing((missing, missing_odd), h, v.shape[2], y)
        s = s * h.numbers[WHOLE, 0] + b.T @ (h.numbers[WRITES] * h.numbers[BETA] * y)
        if h.last:
            closing = (s * last[h.sequence, h.head]).sum() if last.shape[0] else 0.0
            tiles = -(-v.shape[3] // COLUMNS)
            prepared[h.item, 2 * MATRIX + WHOLE * CHUNK + CLOSING :][: 4 * tiles] = closing / (4 * tiles)


def again(
    k: Tensor, v: Tensor, prepared: Tensor, state: Tensor, last: Tensor, resume: Tensor, states: Tensor, missing: Tensor,
    missing_odd: Tensor, lengths: Tensor, cu: Tensor, size: int, begin: int, end: int, per_sequence: int, carriers: int,
) -> None:  # fmt: skip
    assert begin == end
    group, s, following = v.shape[2] // k.shape[2], torch.empty(0), (-1, -1)
    for h in heads(prepared, v, lengths, cu, size, begin, end, per_sequence):
        if h.first:
            s = state[h.sequence, h.head].double() if state.shape[0] else torch.zeros(k.shape[3], v.shape[3]).double()
        elif (h.sequence, h.head) != following:
            number = (begin - 1) * carriers + (h.sequence if per_sequence else 0)
            s = take(resume, number * v.shape[2] + h.head, k.shape[3], v.shape[3])
        following = h.sequence, h.head
        put(states, h.entry, s)
        b, y = k[h.batch, h.rows, h.head // group].double(), take_missing((missing, missing_odd), h, v.shape[2], v.shape[3])
        s = s * h.numbers[WHOLE, 0] + b.T @ (h.numbers[WRITES] * h.numbers[BETA] * y)


def back(
    q: Tensor, k: Tensor, dout: Tensor, dv: Tensor, prepared: Tensor, last: Tensor, first: Tensor, carry: Tensor,
    dstates: Tensor, lengths: Tensor, cu: Tensor, size: int, current: int, per_sequence: int,
) -> None:  # fmt: skip
    for t in (q, k, dout, dv):
        readable(t)
    group, ds = dv.shape[2] // k.shape[2], torch.empty(0)
    walked = list(heads(prepared, dv, lengths, cu, size, current, current, per_sequence))
    for i, h in enumerate(reversed(walked)):
        taken, left = (h.sequence,) * 2 if per_sequence else (current % 2, (current + 1) % 2)
        if h.last:
            ds = last[h.sequence, h.head].double() if last.shape[0] else torch.zeros(k.shape[3], dv.shape[3]).double()
        elif i == 0 or (walked[-i].sequence, walked[-i].head) != (h.sequence, h.head):
            ds = take(carry, taken * dv.shape[2] + h.head, k.shape[3], dv.shape[3])
        put(dstates, h.entry, ds)
        a, b = (t[h.batch, h.rows, h.head // group].double() for t in (q, k))
        g = dout[h.batch, h.rows, h.head].double()
        y = h.numbers[BETA] * (h.weights.T @ g + h.numbers[WRITES] * (b @ ds))
        found = y + h.inverse.T @ y
        dv[h.batch, h.rows, h.head] = found
        ds = ds * h.numbers[WHOLE, 0] + a.T @ (h.numbers[QUERIES] * g) - b.T @ (h.numbers[READS] * found)
        if h.first and first.shape[0]:
            first[h.sequence, h.head] = ds
        if not h.first and carry.shape[0]:
            put(carry, left * dv.shape[2] + h.head, ds)
    for n, (_, _, _, live, _) in enumerate(spans(q.shape[1], q.shape[0], lengths, cu)[: first.shape[0]]):
        if not live:
            first[n] = last[n] if last.shape[0] else 0.0


def gradients(
    q: Tensor, k: Tensor, dout: Tensor, dv: Tensor, decay: Tensor, prepared: Tensor, states: Tensor, dstates: Tensor,
    missing: Tensor, missing_odd: Tensor, dq: Tensor, dk: Tensor, dbeta: Tensor, ddecay: Tensor, lengths: Tensor, cu: Tensor,
    eps: float, normalize: int, decays: int, size: int, current: int, per_sequence: int, entries: int, processors: int,
) -> None:  # fmt: skip
    for t in (q, k, dout, dv, dq, dk):
        readable(t)
    (e, m), group = (k.shape[3], dv.shape[3]), dv.shape[2] // k.shape[2]
    sums: dict[Any, list[Tensor]] = {}
    for h in heads(prepared, dv, lengths, cu, size, current, current, per_sequence):
        assert h.entry < entries * dv.shape[2]
        count = h.rows.stop - h.rows.start
        a, b = (t[h.batch, h.rows, h.head // group].double() for t in (q, k))
        g, d = (t[h.batch, h.rows, h.head].double() for t in (dout, dv))
        s, ds = take(states, h.entry, e, m), take(dstates, h.entry, e, m)
        y = take_missing((missing, missing_odd), h, dv.shape[2], m)
        total = (h.numbers[COARSE] + h.numbers[FINE])[:, 0]
        pairs, beta = torch.exp(total[:, None] - total), h.numbers[BETA] + 1e-12
        pairs = pairs * (beta * h.numbers[OF_K]).T
        asked = (g @ y.T * pairs * h.numbers[OF_Q]).tril()
        read = -(d @ y.T * pairs * h.numbers[OF_K]).tril(-1)
        of_q = asked @ b + h.numbers[QUERIES] * g @ s.T
        of_reads = read @ b - h.numbers[READS] * d @ s.T
        part = h.numbers[WRITES] * beta * y @ ds.T
        wrote = part + asked.T @ a + read.T @ b
        found = sums.setdefault((h.batch, h.rows.start, h.rows.stop, h.head // group), [0.0 * a, 0.0 * b])
        found[0] += of_q
        found[1] += of_reads + wrote
        dbeta[h.batch, h.rows, h.head] = (wrote * b).sum(1) / beta[:, 0]
        if decays:
            own = (of_q * a + of_reads * b - wrote * b).sum(1)
            whole = h.numbers[WHOLE, 0]
            after = (part * b).sum() + whole * (s * ds).sum()
            if h.last:
                closing = prepared[h.item, 2 * MATRIX + WHOLE * CHUNK + CLOSING :][: 4 * (-(-m // COLUMNS))].double().sum()
                after += (closing - after) * whole**2 / (whole**2 + count / (2 * width(e)))
            found_decay = own.flip(0).cumsum(0).flip(0) + after
            if decays == NO_STATE and h.first:
                found_decay[0] = 0.0
            ddecay[h.batch, h.rows, h.head] = found_decay
    for (batch, start, stop, head), found in sums.items():
        for x, dx, into in zip((q, k), found, (dq, dk), strict=True):
            a = x[batch, start:stop, head].double()
            through = a * ((a * dx).sum(1) / ((a * a).sum(1) + eps))[:, None] if normalize else 0.0
            into[batch, start:stop, head] = dx - through


KERNELS = {"delta_prepare": prepare, "delta_keep": keep, "delta_back": back, "delta_gradients": gradients}


def load(spec: ModuleSpec) -> Callable[..., None]:
    if spec.name.endswith("_again"):
        return again
    return next(kernel for name, kernel in KERNELS.items() if spec.name.startswith(name))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "fetch", load)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr(run_back, "processors", lambda index: 132)


def check(case: Case) -> None:
    call, dout, dstate = case.call()
    found = hopper.BACKEND.backward(call, dout, dstate)
    wanted = truth(call, dout, dstate)
    for name, t in zip(("dq", "dk", "dv", "dbeta", "ddecay", "dstate"), found, strict=True):
        want = getattr(wanted, name)
        assert (t is None) == (want is None), name
        if t is not None:
            atol = 0.03 * float(want.abs().max())
            torch.testing.assert_close(t.double(), want, rtol=2**-5, atol=atol, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(drawn(**CASES[name]))


def test_short_ends() -> None:
    """Through a chunk of few tokens passes nearly all of ddecay: a sum over rounded states has twice the error allowed."""
    call, dout, dstate = drawn(tokens=280, heads=8, e=64, m=64, state=True, sequences=(3, 66, 1, 130, 2, 70)).call()
    assert call.decay is not None
    call = replace(call, decay=10.0 * call.decay)
    ddecay = hopper.BACKEND.backward(call, dout, dstate)[4]
    wanted, model = (results(call, dout, dstate, exact=exact).ddecay for exact in (True, False))
    assert ddecay is not None and wanted is not None and model is not None
    verdict = judge("ddecay", ddecay, wanted, model, torch.bfloat16)
    assert verdict.passed, verdict


def test_one_token_each() -> None:
    """The kernel is told that no state was given: no decay meets one."""
    for state in (False, True):
        call, dout, dstate = drawn(tokens=6, sequences=(1, 0, 1, 1, 1), heads=2, state=state).call()
        ddecay = hopper.BACKEND.backward(call, dout, dstate)[4]
        assert ddecay is not None and bool(ddecay[:, :4].any()) == state


@pytest.mark.parametrize("kind", ["chunks of each sequence", "slots", "packed"])
def test_ranges(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a pass is cut; in ranges of three chunks the first one of four has less."""
    shape: dict[str, Any] = {"batch": 2, "lengths": (200, 0)} if kind != "packed" else {"sequences": (0, 64, 1, 130, 0)}
    case = drawn(tokens=200, state=True, **shape)
    sizes, each = Sizes.of(case.call()[0]), kind == "chunks of each sequence"
    for cut in (*[sizes.cut(each, wanted) for wanted in (3, 2, 1)], sizes.sized(each, 3)):
        monkeypatch.setattr(Sizes, "ranges", lambda sizes, cut=cut: cut)
        check(case)


def test_kernels_in_python_take_what_the_compiled_ones_take() -> None:
    """By position: else what the host hands over in a wrong order would be right here."""
    for kernel, file in ((keep, "keep"), (again, "keep"), (back, "back"), (gradients, "gradients")):
        of = f"{file.capitalize()}.__call__"
        assert [*inspect.signature(kernel).parameters, "stream"] == parameters(f"delta/hopper/{file}.py", of)


def test_as_many_ranges_as_room_needs() -> None:
    """Within the bytes of q, k, v and out, of which prepared matrices take a fourth; Y takes none, or else a third."""
    call, *_ = drawn(tokens=4, heads=1, group=2, e=128, m=128).call()
    long = replace(call, **{n: getattr(call, n)[:, :1].expand(1, 32768, -1, -1) for n in ("q", "k", "v")})
    sizes = Sizes.of(long)
    assert sizes.ranges() == Ranges(True, 284, 2, 284, 1)
    assert sizes.room(sizes.ranges()) <= 32768 * 2 * (128 + 256) * 2 < sizes.room(sizes.cut(True, 1))
    assert sizes._replace(e=120).ranges().number == 4  # less wide than values


def test_few_tokens_are_one_range() -> None:
    call, *_ = drawn(tokens=4, heads=16, group=2, e=128, m=128).call()
    assert Sizes.of(call).ranges() == Ranges(True, 1, 1, 1, 1)


@pytest.mark.parametrize("name", CASES)
def test_a_kept_launcher_runs_passes_of_its_kind(name: str) -> None:
    call, dout, dstate = drawn(**CASES[name]).call()
    other, *_ = drawn(**CASES[name]).call()
    launch = hopper.BACKEND.bind_backward(call, dout, dstate)
    assert launch is not None
    names = ("q", "k", "v", "beta", "decay", "state", "lengths", "cu_seqlens")
    want = hopper.BACKEND.backward(other, dout, dstate)
    for a, b in zip(launch(dout, dstate, *(getattr(other, n) for n in names)) or (), want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    apart = torch.cat([dout[..., :1], dout], -1)[..., 1:]
    assert launch(apart, dstate, *(getattr(other, n) for n in names)) is None
    assert hopper.BACKEND.bind_backward(call, apart, dstate) is None
