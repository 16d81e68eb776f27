"""What the decode kernels share: where keys lie, how a sequence is cut into splits, the softmax of a split and their merge."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import INTERPRETED, clamp, dot
from warploom.kernels.triton.softmax import by_row, divisor, finite, log_sum

# Where a tile's keys lie: in the sequence's own row, in the one page of a one-column table, within some page of a table,
# or key by key in any page.
CONTIGUOUS = tl.constexpr(0)
ONE_PAGE = tl.constexpr(1)
TILE_IN_PAGE = tl.constexpr(2)
SCATTERED = tl.constexpr(3)

# What holds a key's distance from the first of its sequence or pool: 64 bits; products of numbers of 32 bits; 32 bits.
WIDE = tl.constexpr(0)
NARROW = tl.constexpr(1)
NEAR = tl.constexpr(2)

# What `split_kernel` and `share_kernel` are not compiled for: one binary serves every size. Strides of q, k and v come in units
# of UNIT elements, which tells the compiler how far they align.
SCALARS = [
    "lengths_ptr", "table_ptr", "sink_ptr", "tree_ptr", "k_scale_ptr", "v_scale_ptr", "bias_ptr", "stride_qb", "stride_qt",
    "stride_qh", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh", "stride_table", "stride_tree",
    "programs", "grouped", "crowded", "max_units", "capacity", "pages", "page_shift", "page_mask", "left", "right",
    "stride_ksb", "stride_ksn", "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh", "stride_bias_b", "stride_bias_h",
    "stride_bias_k", "bias_entries", "bias_origin", "prefix_ptr", "sequences", "chunk", "prefix_keys",
]  # fmt: skip


@triton.jit
def key_range(length, left, right, T: tl.constexpr, HAS_LEFT: tl.constexpr):
    """Keys [first, last) that some query of the sequence sees."""
    first = 0
    if HAS_LEFT:
        first = tl.maximum(length - T - left, 0)
    last = tl.minimum(length, length + right)
    return first, last


@triton.jit
def far(n, stride, PLACES: tl.constexpr):
    """n · stride of a 32-bit n, in 64 bits; with NEAR in 32, to be widened where it joins a pointer.

    NARROW: an instruction by name, as the compiler widens a stride ahead of the loop and then multiplies numbers of 64 bits, in
    four instructions.
    """
    if PLACES == NEAR:
        return n * stride.to(tl.int32)
    elif PLACES == NARROW and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [n, stride.to(tl.int32)], tl.int64, is_pure=True, pack=1
        )
    else:
        return n.to(tl.int64) * stride


@triton.jit
def repeated(x, STEP: tl.constexpr):
    """Each number of a vector STEP times."""
    return tl.reshape(tl.broadcast_to(x[:, None], (x.shape[0], STEP)), (x.shape[0] * STEP,))


@triton.jit
def tile_in_pages(rows, inside, stride_page, PAGES: tl.constexpr, STEP: tl.constexpr, PLACES: tl.constexpr):
    """Distances of a tile's rows from the pool's start, of those from their pages': one page's, or each STEP rows' own."""
    if STEP > 1:
        return rows + repeated(far(inside, stride_page, PLACES), STEP)[:, None]
    elif PAGES == SCATTERED:
        return rows + far(inside[:, None], stride_page, PLACES)
    else:
        return rows + far(inside, stride_page, PLACES)


@triton.jit
def place_of_token(
    t, batch, length, table_ptr, slots_ptr, stride_table, stride_slots, stride_slots_t, pages, page_size, capacity
):  # fmt: skip
    """Where a sequence's t-th new token goes: page and offset, int64, whether it is written, 1 if it adds to the length."""
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch * stride_slots + t * stride_slots_t).to(tl.int64)
        page = tl.maximum(slot, 0) // page_size
        return page, tl.maximum(slot, 0) % page_size, (slot >= 0) & (page < pages), (slot >= 0).to(tl.int32)
    else:
        position = length + t
        room = position < capacity
        if table_ptr is not None:
            page = tl.load(table_ptr + batch * stride_table + position // page_size, mask=room, other=-1).to(tl.int64)
            offset = (position % page_size).to(tl.int64)
            return page, offset, room & (page >= 0) & (page < pages), room.to(tl.int32)
        else:
            return batch, position.to(tl.int64), room, room.to(tl.int32)


@triton.jit
def split_size(keys, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, HALVED: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr):
    """Keys of a split of so many: SPLIT, half of it to HALVED keys, or as many more, in whole tiles, as leave MAX_SPLITS."""
    size = keys * 0 + SPLIT
    if not LEAST:
        size = tl.where(keys > SPLIT * MAX_SPLITS, tl.cdiv(tl.cdiv(keys, MAX_SPLITS), N) * N, SPLIT)
    if HALVED > 0:
        size = tl.where(keys <= HALVED, SPLIT // 2, size)
    return size


@triton.jit
def whole_splits(keys, size, SPLIT: tl.constexpr, HALVED: tl.constexpr, LEAST: tl.constexpr):
    """keys // size of a size that `split_size` gave; no division by a value of run time where that can be."""
    if LEAST:
        whole = keys // SPLIT
        if HALVED > 0:
            whole = tl.where(size == SPLIT, whole, keys // (SPLIT // 2))
        return whole
    else:
        return keys // size


@triton.jit
def takes_groups(grouped, lengths_ptr, sequences, capacity):
    """Whether programs take groups of splits: 1 and 0 say it, more is how many keys all sequences have from which on they do.

    A capacity does not tell a batch of long sequences from one of a few long ones, whose groups would be most of a call's time.
    """
    if grouped > 1:
        n = tl.arange(0, 128)
        keys = tl.zeros((128,), tl.int64)
        for i in range(0, sequences, 128):
            keys += clamp(tl.load(lengths_ptr + i + n, mask=i + n < sequences, other=0), 0, capacity)
        grouped = (tl.sum(keys) >= grouped).to(tl.int32)
    return grouped


@triton.jit
def splits(
    first, last, grouped, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, GROUP_SPLITS: tl.constexpr, N: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """How a sequence is cut, halves aside: start of split 0, keys of a split, units that hold keys, splits of a unit.

    Cuts fall on whole tiles, so tiles fall alike everywhere. A unit, what one program computes and stores, is a split or a
    group of GROUP_SPLITS; which one changes no bit (see `fold`). Groups of long splits would leave too few units, and
    programs unlike work where lengths differ. LEAST: no sequence that fits has splits of more than SPLIT keys. Sequences to
    HALVED keys have each split in two (`halves`).
    """
    start = first // N * N
    keys = tl.maximum(last - start, 0)
    used = tl.cdiv(keys, SPLIT)
    each = tl.where(grouped != 0, GROUP_SPLITS, 1)
    if LEAST:
        size = SPLIT
    else:
        size = split_size(keys, SPLIT, MAX_SPLITS, 0, N, LEAST)
        # No key is asked for before this is known: the usual length is spared the division by a value of run time.
        if keys > SPLIT * MAX_SPLITS:
            used = tl.cdiv(keys, size)
        each = tl.where(size <= 2 * SPLIT, each, 1)
    return start, size, tl.where(each == 1, used, tl.cdiv(used, GROUP_SPLITS)), each


@triton.jit
def halves(start, last, size, units, each, grouped, crowded, SPLIT: tl.constexpr, HALVED: tl.constexpr):
    """`splits`, those of a short sequence halved: keys of a split, units, splits of a unit; whether units are halves, or pairs.

    A program takes whole groups as ever, and otherwise a half, or from ``crowded`` keys on both halves of a split: a pair,
    which it stores as two parts.
    """
    keys = last - start
    half = keys <= HALVED
    lone = half & (grouped == 0) & (keys < crowded)
    units = tl.where(lone, tl.cdiv(tl.maximum(keys, 0), SPLIT // 2), units)
    each = tl.where(half & (lone == 0), 2 * each, each)
    return tl.where(half, SPLIT // 2, size), units, each, lone, half & (grouped == 0) & (lone == 0)


@triton.jit
def fold(acc, total, top, part, part_total, part_top):
    """Add a running softmax of later keys to one of earlier ones, all in log2 units.

    Splits are folded in order into their group, and groups in order into the result, from (0, 0, -inf) each. Folding one part
    into nothing gives that part, and folding nothing (0, 0 at -inf) changes nothing, both to the bit: a group has the same
    bits whether its program folds it in registers or the merge kernel does from memory. tl.fma leaves the compiler no
    choice of what to contract.
    """
    new_top = tl.maximum(top, part_top)
    base = finite(new_top)
    old = tl.exp2(top - base)
    new = tl.exp2(part_top - base)
    old_values = tl.broadcast_to(by_row(old, acc), acc.shape)
    new_values = tl.broadcast_to(by_row(new, acc), acc.shape)
    return tl.fma(acc, old_values, part * new_values), tl.fma(total, old, part_total * new), new_top


@triton.jit
def settle(acc, total, top):
    """A running softmax as its normalised result and its lse; 0 and -inf where it holds nothing."""
    lse = log_sum(total, top, 1.0)
    return acc / by_row(divisor(total), acc), lse


@triton.jit
def zeros(M: tl.constexpr, DV: tl.constexpr, SLICES: tl.constexpr):
    """The accumulators of M rows: one, or one of the even and one of the odd columns."""
    accs = ()
    for _ in tl.static_range(SLICES):
        accs += (tl.zeros((M, DV // SLICES), tl.float32),)  # type: ignore[assignment]
    return accs


@triton.jit
def nothing(M: tl.constexpr, DV: tl.constexpr, SLICES: tl.constexpr):
    """A running softmax of M rows that holds nothing yet."""
    return zeros(M, DV, SLICES), tl.zeros((M,), tl.float32), tl.full((M,), float("-inf"), tl.float32)


@triton.jit
def started(M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, SLICES: tl.constexpr):
    """A split's running softmax that holds nothing yet: `nothing`, its total in several parts where `weighed` has them."""
    return zeros(M, DV, SLICES), no_weights(M, N), tl.full((M,), float("-inf"), tl.float32)


@triton.jit
def no_weights(M: tl.constexpr, N: tl.constexpr):
    """Totals of M rows that hold nothing yet."""
    if M < 64:
        return tl.zeros((M, tl.constexpr(min(N // 8, 4)), 4), tl.float32)
    else:
        return tl.zeros((M,), tl.float32)


@triton.jit
def weighed(p, total, rescale):
    """The running totals of M rows, a tile's weights (M, N) later.

    Of fewer than 64 rows four warps have eight columns each by turns, and a thread two of them: totals stay apart by warp and
    thread, (M, 4, 4), until the split ends. Put together tile by tile they would go through shared memory, and a tile would
    have one barrier more. Of 64 rows a warp has whole rows.
    """
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    if M < 64:
        W: tl.constexpr = min(N // 8, 4)
        own = tl.sum(tl.sum(tl.reshape(p, (M, N // (8 * W), W, 4, 2)), 4), 1)
        return tl.fma(total, tl.broadcast_to(rescale[:, None, None], total.shape), own)
    else:
        return total * rescale + tl.sum(p, 1)


@triton.jit
def summed(total):
    """A split's totals as one number a row."""
    if len(total.shape) == 3:
        return tl.sum(tl.sum(total, 2), 1)
    else:
        return total


@triton.jit
def fold_all(accs, total, top, parts, part_total, part_top):
    """`fold` of rows whose columns are in several accumulators."""
    new_accs = ()
    for i in tl.static_range(len(accs)):
        acc, new_total, new_top = fold(accs[i], total, top, parts[i], part_total, part_top)
        new_accs += (acc,)  # type: ignore[assignment]
    return new_accs, new_total, new_top


@triton.jit
def ended(accs, total, top, SCALED: tl.constexpr):
    """What a split leaves: its running softmax.

    SCALED, as `weigh_scaled` has it: normalised, since powers of two of scales are in its maximum, beside which others vanish.
    """
    total = summed(total)
    if SCALED:
        divided = ()
        for i in tl.static_range(len(accs)):
            part, lse = settle(accs[i], total, top)
            divided += (part,)  # type: ignore[assignment]
        return divided, tl.where(total == 0.0, 0.0, 1.0), lse
    else:
        return accs, total, top


@triton.jit
def product(a, b, acc, LATENT: tl.constexpr):
    """a @ b + acc in fp32. Of a latent cache's 576 products in fp32 those of TF32 lose what shows."""
    if LATENT and a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return dot(a, b, acc)


@triton.jit
def shown(bits, cols, first_token):
    """Which keys a tree shows rows by the bits of their ancestors: of the keys from ``first_token`` on those; all before."""
    nth = cols - first_token
    shift = clamp(nth, 0, 63).to(tl.int64)
    return (nth < 0)[None, :] | (((bits[:, None] >> shift[None, :]) & 1) != 0)


@triton.jit
def weigh(s, top, total):
    """A tile of scores joins a running softmax: its weights, the factor of what was summed before, the new total and top."""
    new_top = tl.maximum(top, tl.max(s, 1))
    base = finite(new_top)
    p = tl.exp2(s - base[:, None])
    rescale = tl.exp2(top - base)
    return p, rescale, weighed(p, total, rescale), new_top
