"""States before a segment inside the kernel that needs them: each program sums its own keys, then those of programs before it.

A decoupled look-back (Merrill and Garland, 2016, "Single-pass Parallel Prefix Scan with Decoupled Look-back") over states: one
launch in place of three, though a segment's keys and values come from memory twice as there. A program takes its place
from a ticket, so it waits only for programs that started before it, the first for none: no order of starting and no number of
resident programs can lock them.

Segments are looked back on in groups of GROUP: the last of a group publishes the sum of all up to it, the others their own, and
who looks back adds the states from the end of the group before. What is added in which order never depends on time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.logs import exp2
from warploom.kernels.triton.numerics import INTERPRETED
from warploom.linear.triton.device import dot, load_chunk, load_operand
from warploom.linear.triton.fading import chunk_sums, weighed

# Segments of a group. Longer ones add more states, shorter ones wait for each other more often.
GROUP = tl.constexpr(16)


@triton.jit
def own_sums(
    k_base,
    v_base,
    first,
    stop,
    e,
    m,
    stride_k,
    stride_v,
    fades,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    MAP: tl.constexpr,
    WITH_Z: tl.constexpr,
    DECAY: tl.constexpr,
    A_HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S^T (BM, BE) and z (BE,) of tokens first to stop, from the last chunk on: what is read again first may still be in L2.

    With a DECAY of `fades` keys have faded to the last token; also the sum of the logs, in log2.
    """
    n = tl.arange(0, C)
    rows = n.to(tl.int64) if WIDE else n
    dtype = v_base.dtype.element_ty
    s = tl.zeros([BM, BE], tl.float32)
    z = tl.zeros([BE, 16], tl.float32)
    ones = tl.full([C, 16], 1.0, dtype)
    passed = tl.zeros([], tl.float32)
    chunks = tl.cdiv(tl.maximum(stop - first, 0), C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = first + (chunks - 1 - i) * C
        v = load_chunk(v_base, t, rows, m, stride_v, stop, M, M % BM == 0)
        fk = load_operand(k_base, t, rows, stop, e, stride_k, E, E % BE == 0, MAP, True)
        if DECAY:
            sums = chunk_sums(fades.sums, fades.constant, t, n, fades.rows, fades.length, A_HEAD)
            fk = weighed(fk, exp2(passed + (sums.last - sums.each)))
            passed += sums.last
        s = dot(tl.trans(v), fk, s)
        if WITH_Z:
            z = dot(tl.trans(fk), ones, z)
    return s, tl.sum(z, 1) / 16, passed


@triton.jit
def sums_before(
    flags_ptr,
    own_ptr,
    s,
    z,
    passed,
    first_s,
    first_z,
    slot,
    place,
    head,
    heads,
    BE: tl.constexpr,
    BM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Publish a segment's own sums s (BM, BE) and z (BE,); those of all segments before it.

    Args:
        flags_ptr: (slots, heads) int32, 0 until the slot's state is published.
        own_ptr: (slots, heads, BM + 1, BE) fp32, the states; with a DECAY BM + 2, where `passed` is, the sum of the segment's
            logs in log2, by which what comes before it fades.
        first_s, first_z: what the sequence starts from.
        place: which segment of its sequence the slot is.
        head, heads: this program's state of a slot, and how many a slot has.
        AT_ONCE: two or four states are loaded before they are added: each waits for memory as long as all of them.
    """
    m, e = tl.arange(0, BM), tl.arange(0, BE)
    SIZE: tl.constexpr = (BM + 2) * BE if DECAY else (BM + 1) * BE
    PASSED: tl.constexpr = (BM + 1) * BE
    offsets = m[:, None] * BE + e[None, :]
    own = own_ptr + (slot.to(tl.int64) * heads + head) * SIZE
    flag = flags_ptr + slot.to(tl.int64) * heads + head
    last = place % GROUP == GROUP - 1
    tl.store(own + offsets, s)
    tl.store(own + BM * BE + e, z)
    if DECAY:
        tl.store(own + PASSED, passed)
    # Every thread's stores come before the flag, and its own loads below.
    tl.debug_barrier()
    if not last:
        tl.atomic_xchg(flag, 1, sem="release")

    count = place - tl.maximum(place // GROUP * GROUP - 1, 0)
    i = tl.arange(0, GROUP)
    ready = 0
    while ready < count:
        seen = tl.load(flag - (i + 1).to(tl.int64) * heads, mask=i < count, other=0, volatile=True)
        ready = tl.sum(seen, 0)
    _fence()
    tl.debug_barrier()
    before_s, before_z = first_s, first_z
    if place >= GROUP:
        # The sum up to the group before holds it.
        before_s, before_z = tl.zeros_like(first_s), tl.zeros_like(first_z)
    for j in range(0, count, AT_ONCE):
        at = own - (count - j).to(tl.int64) * heads * SIZE
        if DECAY:
            for next in tl.static_range(AT_ONCE):
                here = at + next * (tl.cast(heads, tl.int64) * SIZE)
                live = j + next < count
                fade = exp2(tl.load(here + PASSED, mask=live, other=0.0))
                before_s = before_s * fade + tl.load(here + offsets, mask=live, other=0.0)
                before_z = before_z * fade + tl.load(here + BM * BE + e, mask=live, other=0.0)
        elif AT_ONCE == 4:
            before_s += _four(at + offsets, heads, SIZE, count - j)
            before_z += _four(at + BM * BE + e, heads, SIZE, count - j)
        else:
            before_s += _two(at + offsets, heads, SIZE, count - j)
            before_z += _two(at + BM * BE + e, heads, SIZE, count - j)
    if last:
        of_all_s, of_all_z = before_s, before_z
        if DECAY:
            of_all_s, of_all_z = before_s * exp2(passed), before_z * exp2(passed)
        tl.store(own + offsets, tl.load(own + offsets) + of_all_s)
        tl.store(own + BM * BE + e, tl.load(own + BM * BE + e) + of_all_z)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release")
    return before_s, before_z


@triton.jit
def _two(pointers, heads, SIZE: tl.constexpr, left):
    """The sum of a state and of the next slot's, of which `left` remain."""
    step = tl.cast(heads, tl.int64) * SIZE
    first = tl.load(pointers, mask=left > 0, other=0.0)
    return first + tl.load(pointers + step, mask=left > 1, other=0.0)


@triton.jit
def _four(pointers, heads, SIZE: tl.constexpr, left):
    """The sum of the states of four slots, of which `left` remain."""
    step = tl.cast(heads, tl.int64) * SIZE
    first = tl.load(pointers, mask=left > 0, other=0.0)
    second = tl.load(pointers + step, mask=left > 1, other=0.0)
    third = tl.load(pointers + 2 * step, mask=left > 2, other=0.0)
    fourth = tl.load(pointers + 3 * step, mask=left > 3, other=0.0)
    return (first + second) + (third + fourth)


@triton.jit
def _fence():
    """What other programs stored before the flags that this one saw is seen from here on."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
