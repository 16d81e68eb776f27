"""Running a call: one pass where there are enough heads, else states of segments first; backward, and a step of decoding."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from warploom.kernels.triton.feature_maps import MAPS
from warploom.linear.problem import StepArgs
from warploom.linear.triton.backward_kernels import GIVEN_DELTA, PARTIAL_DELTA, WHOLE, dkdv_kernel, dq_kernel
from warploom.linear.triton.call import Call, Cut, Variant, block_of, dims
from warploom.linear.triton.config import Tiling, padded
from warploom.linear.triton.forward_kernel import forward_kernel
from warploom.linear.triton.state_kernels import scan_kernel, state_kernel
from warploom.linear.triton.step_kernel import step_kernel
from warploom.runtime.device import on_device
from warploom.runtime.qkv import last_contiguous
from warploom.runtime.triton_launch import Launch

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall

# Elements of a state that one program of the scan sums; many small programs, as each walks all segments.
_SCAN = {"BLOCK": 512, "STAGES": 4, "num_warps": 4}
_STEP = {"BM": 64, "num_warps": 4}

States = tuple[Tensor | None, Tensor | None]


def forward(c: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Out, norm, s and z; see `warploom.linear.problem`."""
    call = Call.of(c)
    variant, tiling = call.variant, call.config.forward
    out = call.q.new_empty((*call.q.shape[:3], variant.m), dtype=variant.dtype)
    norm = call.q.new_empty((call.q.shape[0], call.heads, call.seqlen_q), dtype=torch.float32) if variant.normalize else None
    blocks = -(-variant.m // tiling.block)
    last: States = call.states(call.sequences) if return_state else (None, None)
    with on_device(call.q):
        room: States = (None, None)
        if call.looks_back(blocks * call.heads):
            cut, first, per_slot = call.looking_back(blocks * call.heads), (call.s, call.z), False
            room = _room(call, cut, call.heads * blocks, padded(variant.e), block_of(variant.m, tiling.block))
        else:
            cut, first, per_slot = _prefixes(call, blocks * call.heads, last)
        one_pass = (cut.whole or room[0] is not None) and variant.causal
        s_out, z_out = last if one_pass else (None, None)
        present = tuple(t is not None for t in (first[0], s_out, room[0]))
        _forward_launch(variant, tiling, per_slot, present)(
            (cut.slots * call.heads * blocks, 1),
            *(call.q, call.k, call.v, out, norm, *first, s_out, z_out, *room, call.lengths, call.cu, call.decay),
            *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_g, *call.numbers(cut)),
            *(call.heads, variant.group, call.scale, call.eps),
        )
    return out, norm, *last


def backward(
    c: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, ds0 and dz0 where the call has a state, and the decay's gradient where it asks for one."""
    call = Call.of(c, dout, (ds is not None, dz is not None))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (c.q, c.k, c.v))
    ds, dz = (None if t is None else t.contiguous() for t in (ds, dz))
    norm = None if norm is None else norm.contiguous()
    first: States = call.states(call.sequences) if call.s is not None else (None, None)
    with on_device(call.q):
        pieces = _Pieces.of(call) if c.decay_grad else None
        delta = _dq(call, dq, norm, pieces)
        ddecay = _dkdv(call, dk, dv, norm, delta, (ds, dz), first, pieces)
    if ddecay is not None and c.decay is not None and c.decay.ndim == 1:
        ddecay = ddecay.sum((0, 1))
    return dq, dk, dv, *first, ddecay


def step(args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Out (batch, heads_q, M) in v's dtype and the new s and z of one token a sequence, in one launch."""
    q, k, v, s, z, map_q, map_k, normalize, eps, scale, _, decay = args
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    s, z = s.contiguous(), z.contiguous()
    batch, heads, e = q.shape
    heads_kv, m = v.shape[1:]
    out = v.new_empty((batch, heads, m))
    s_out, z_out = torch.empty_like(s), torch.empty_like(z)
    direct = all(t.data_ptr() % 16 == 0 for t in (q, k, v, s)) and max(*q.stride(), *k.stride(), *v.stride()) < 2**31
    strides_g = (None, None) if decay is None else decay.expand(batch, heads_kv).stride()
    launch = _step_launch(
        v.dtype, e, m, heads // heads_kv, (map_q, map_k), normalize, direct, q.device.index, decay is not None
    )
    with on_device(q):
        blocks = -(-m // block_of(m, _STEP["BM"]))
        launch(
            (batch * heads_kv * blocks, 1),
            *(q, k, v, s, z, out, s_out, z_out, decay, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *strides_g),
            *(heads_kv, scale, eps),
        )
    return out, s_out, z_out


def _prefixes(call: Call, programs: int, last: States, keys: bool = False) -> tuple[Cut, States, bool]:
    """How queries are cut, the states that their segments start from, and whether those are one a segment.

    `programs` is how many would walk a sequence. The states after the sequences go to `last`, unless None, where they are
    not the queries' kernel's to write. With `keys` those past the last query are walked too.
    """
    variant, segment = call.variant, call.config.segment
    given: States = (call.s, call.z)
    keys = keys or last[0] is not None
    longest = max(call.seqlen_q, call.seqlen_k) if keys else call.seqlen_q
    if not variant.causal:
        # Every query sees all keys: the sums over segments are the state, and any number of programs may share them.
        cut = call.cut(call.seqlen_k, segment)
        total = last if last[0] is not None else call.states(call.sequences)
        _scan(call, cut, *_own_states(call, cut, False), given, total, reverse=False)
        return call.cut(call.seqlen_q, segment), total, False
    if call.crowded(programs * call.sequences) or (call.cu is None and longest <= segment):
        return call.cut(longest if keys else call.seqlen_q), given, False
    cut = call.cut(longest, segment)
    own, fading = _own_states(call, cut, not keys)
    _scan(call, cut, own, fading, given, last, reverse=False)
    return cut, own, True


def _suffixes(
    call: Call, programs: int, norm: Tensor | None, delta: Tensor | None, last: States, first: States
) -> tuple[Cut, States, bool]:
    """As `_prefixes`, of dS and dz for the keys: `last` are the gradients of the final states, `first` takes the sums."""
    variant, segment = call.variant, call.config.segment
    longest = max(call.seqlen_q, call.seqlen_k)
    if not variant.causal:
        cut = call.cut(call.seqlen_q, segment)
        total = first if first[0] is not None else call.states(call.sequences)
        _scan(call, cut, *_own_gradients(call, cut, norm, delta, False), last, total, reverse=True)
        return call.cut(call.seqlen_k, segment), total, False
    if call.crowded(programs * call.sequences) or (call.cu is None and longest <= segment):
        return call.cut(longest), last, False
    cut = call.cut(longest, segment)
    own, fading = _own_gradients(call, cut, norm, delta, first[0] is None)
    _scan(call, cut, own, fading, last, first, reverse=True)
    return cut, own, True


def _room(call: Call, cut: Cut, programs: int, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Zeroed flags and a ticket, and room for a state of each program: see lookback.py."""
    count = cut.slots * programs
    flags = torch.zeros(1 + count, dtype=torch.int32, device=call.q.device)
    return flags, torch.empty(count * (rows + 1) * columns, dtype=torch.float32, device=call.q.device)


def _own_states(call: Call, cut: Cut, skip: bool) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Each segment's own S and z, `skip` that of the last one, and the sums of their logs."""
    own, fading = call.states(cut.slots), _fading(call, cut)
    tiling = call.config.state
    blocks = -(-call.variant.m // tiling.block)
    _state_launch(call.variant, tiling, False, skip)(
        (cut.slots * call.heads_kv * blocks, 1),
        *(call.k, call.v, None, None, *own, call.lengths, call.cu, call.decay, fading),
        *(*call.strides_k, *call.strides_v, *call.strides_g, *call.numbers(cut), call.heads_kv, call.scale),
    )
    return own, fading


def _own_gradients(
    call: Call, cut: Cut, norm: Tensor | None, delta: Tensor | None, skip: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Each segment's own dS and dz, `skip` that of the first one, and the sums of their logs."""
    own, fading = call.states(cut.slots), _fading(call, cut)
    tiling = call.config.state
    blocks = -(-call.variant.m // tiling.block)
    _state_launch(call.variant, tiling, True, skip)(
        (cut.slots * call.heads_kv * blocks, 1),
        *(call.q, call.dout, norm, delta, *own, call.lengths, call.cu, call.decay, fading),
        *(*call.strides_q, *call.strides_do, *call.strides_g, *call.numbers(cut), call.heads_kv, call.scale),
    )
    return own, fading


def _fading(call: Call, cut: Cut) -> Tensor | None:
    """Room for the sum of each segment's logs, where there are any."""
    return None if call.decay is None else call.q.new_empty((cut.slots, call.heads_kv), dtype=torch.float32)


def _scan(
    call: Call, cut: Cut, own: tuple[Tensor, Tensor], fading: Tensor | None, first: States, total: States, *, reverse: bool
) -> None:
    """Turn segments' own states into sums over those before them; `total` takes the sums over all."""
    e, m = call.variant.e, call.variant.m
    blocks = -(-e * m // _SCAN["BLOCK"]) + -(-e // _SCAN["BLOCK"])
    present = tuple(t is not None for t in (*first, *total, call.cu, fading))
    _scan_launch(e, m, reverse, present, call.variant.device)(
        (blocks * call.sequences * call.heads_kv, 1),
        *(*own, *first, *total, call.cu, fading, call.sequences, cut.segments, cut.segment, call.seqlen_q, call.heads_kv),
    )


class _Pieces(NamedTuple):
    """What the decay's gradient is made of: see `Decay` in backward_kernels.py."""

    first_s: Tensor
    first_z: Tensor
    from_queries: Tensor  # (blocks of dQ's kernel, batch, heads, seqlen_q)

    @classmethod
    def of(cls, call: Call) -> _Pieces:
        variant, tiling = call.variant, call.config.dq
        chunks, blocks = call.chunks(tiling.chunk), -(-variant.e // block_of(variant.e, tiling.block))
        # Of fp16 in fp32: sums pass its range.
        narrow = torch.bfloat16 if variant.dtype == torch.bfloat16 else torch.float32
        first_s = call.q.new_empty((chunks, call.heads_kv, variant.m, variant.e), dtype=narrow)
        first_z = call.q.new_empty((chunks, call.heads_kv, variant.e), dtype=torch.float32)
        rows = call.q.new_empty((blocks, call.q.shape[0], call.heads, call.seqlen_q), dtype=torch.float32)
        return cls(first_s, first_z, rows)


def _dq(call: Call, dq: Tensor, norm: Tensor | None, pieces: _Pieces | None) -> Tensor | None:
    """Write dq and `pieces`; return delta, (batch, heads, seqlen_q), where the call normalizes."""
    variant, tiling = call.variant, call.config.dq
    blocks = -(-variant.e // block_of(variant.e, tiling.block))
    room: States = (None, None)
    # With a denominator too many registers hold what waits: 98 against 116 us at 16 heads of 16384 tokens, D64.
    if call.looks_back(blocks * call.heads) and not variant.normalize:
        cut, first, per_slot = call.looking_back(blocks * call.heads), (call.s, call.z), False
        room = _room(call, cut, call.heads * blocks, block_of(variant.e, tiling.block), padded(variant.m))
    else:
        cut, first, per_slot = _prefixes(call, blocks * call.heads, (None, None), pieces is not None)
    kept = (None, None, None) if pieces is None else pieces
    shape = (call.q.shape[0], call.heads, call.seqlen_q)
    delta = call.q.new_empty((blocks, *shape), dtype=torch.float32) if variant.normalize else None

    def launch(part: int, delta: Tensor | None) -> None:
        _dq_launch(variant, tiling, part, per_slot, (first[0] is not None, room[0] is not None, pieces is not None))(
            (cut.slots * call.heads * blocks, 1),
            *(call.q, call.k, call.v, call.dout, dq, norm, delta, *first, *room, call.lengths, call.cu, call.decay, *kept),
            *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_do, *call.strides_g, *call.numbers(cut)),
            *(call.heads, variant.group, call.q.shape[0], call.scale),
        )

    if delta is None or blocks == 1:
        launch(WHOLE.value, delta)
        return None if delta is None else delta[0]
    launch(PARTIAL_DELTA.value, delta)
    delta = delta.sum(0)
    launch(GIVEN_DELTA.value, delta)
    return delta


def _dkdv(
    call: Call,
    dk: Tensor,
    dv: Tensor,
    norm: Tensor | None,
    delta: Tensor | None,
    last: States,
    first: States,
    pieces: _Pieces | None,
) -> Tensor | None:
    """Write dk, dv and the gradients of the initial states, unless None; that of the logs where there are pieces for it."""
    variant, config = call.variant, call.config
    parts = [("kv", config.dkdv)] if config.dkdv is not None else [("k", config.dk), ("v", config.dv)]
    # Programs of a segment and key head, or pairs of them: the two of a pair share a multiprocessor.
    blocks = {"kv": 1, "k": -(-variant.e // config.dk.block), "v": -(-variant.m // config.dv.block)}
    if config.dkdv is not None and config.paired:
        blocks["kv"] = -(-max(variant.e, variant.m) // config.dkdv.block)
    programs = call.heads_kv * min(blocks[part] for part, _ in parts)
    cut, after, per_slot = _suffixes(call, programs, norm, delta, last, first)
    one_pass = cut.whole and variant.causal
    kept: tuple[Tensor | None, ...] = (None, None, None, None)
    if pieces is not None:
        whole = config.dkdv is not None and not config.paired
        parts_e = 1 if whole else -(-variant.e // (config.dkdv or config.dk).block)
        logs = call.k.new_empty((parts_e, *call.k.shape[:3]), dtype=torch.float32)
        from_queries = pieces.from_queries[0] if len(pieces.from_queries) == 1 else pieces.from_queries.sum(0)
        kept = (pieces.first_s, pieces.first_z, from_queries, logs)
    stride = None if pieces is None else logs.stride(0)
    for part, tiling in parts:
        s_out, z_out = first if one_pass and "k" in part else (None, None)
        present = tuple(t is not None for t in (*after, s_out, pieces))
        paired = config.paired and part == "kv"
        _dkdv_launch(variant, tiling, part, paired, per_slot, present)(
            (cut.slots * call.heads_kv * blocks[part] * (2 if paired else 1), 1),
            *(call.q, call.k, call.v, call.dout, dk, dv, norm, delta, *after, s_out, z_out, call.lengths, call.cu),
            *(call.decay, *kept),
            *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_do, *call.strides_g, stride, *call.numbers(cut)),
            *(call.heads_kv, call.scale),
        )
    if pieces is None:
        return None
    return logs[0] if len(logs) == 1 else logs.sum(0)


def _maps(variant: Variant) -> dict[str, int]:
    return {"MAP_Q": MAPS[variant.map_q], "MAP_K": MAPS[variant.map_k]}


def _tile(tiling: Tiling) -> dict[str, int]:
    return {"C": tiling.chunk, "STAGES": tiling.stages, "num_warps": tiling.warps}


def _kind(variant: Variant) -> dict[str, bool]:
    return {"CAUSAL": variant.causal, "NORMALIZE": variant.normalize}


@cache
def _forward_launch(variant: Variant, tiling: Tiling, per_slot: bool, present: tuple[bool, ...]) -> Launch:
    shapes = dims(variant, DE=padded(variant.e), BM=block_of(variant.m, tiling.block))
    options = {**shapes, **_maps(variant), **_kind(variant), **_tile(tiling), "PER_SLOT": per_slot}
    return Launch(forward_kernel, options, direct=variant.direct)


@cache
def _state_launch(variant: Variant, tiling: Tiling, backward: bool, skip: bool) -> Launch:
    shapes = dims(variant, DE=padded(variant.e), BM=block_of(variant.m, tiling.block))
    kind: dict[str, Any] = {
        "GROUP": variant.group if backward else 1,
        "MAP": MAPS[variant.map_q if backward else variant.map_k],
        "BACKWARD": backward,
        "NORMALIZE": variant.normalize,
        "SKIP": skip,
    }
    return Launch(state_kernel, {**shapes, **kind, **_tile(tiling)}, direct=variant.direct)


@cache
def _scan_launch(e: int, m: int, reverse: bool, present: tuple[bool, ...], device: int | None) -> Launch:
    return Launch(scan_kernel, {"E": e, "M": m, "REVERSE": reverse, **_SCAN}, direct=True)


@cache
def _dq_launch(variant: Variant, tiling: Tiling, part: int, per_slot: bool, present: tuple[bool, ...]) -> Launch:
    shapes = dims(variant, BE=block_of(variant.e, tiling.block), DM=padded(variant.m))
    flags = {"PART": part, "PER_SLOT": per_slot, "COLUMNS": tiling.columns}
    options = {**shapes, **_maps(variant), **_kind(variant), **_tile(tiling), **flags}
    return Launch(dq_kernel, options, direct=variant.direct)


@cache
def _dkdv_launch(
    variant: Variant, tiling: Tiling, part: str, paired: bool, per_slot: bool, present: tuple[bool, ...]
) -> Launch:
    be = padded(variant.e) if "v" in part and not paired else block_of(variant.e, tiling.block)
    bm = padded(variant.m) if "k" in part and not paired else block_of(variant.m, tiling.block)
    whole = {"DE": padded(variant.e), "DM": padded(variant.m)}
    flags = {"GROUP": variant.group, "WITH_DK": "k" in part, "WITH_DV": "v" in part, "PAIRED": paired, "PER_SLOT": per_slot}
    options = {**dims(variant, BE=be, BM=bm, **whole), **_maps(variant), **_kind(variant), **_tile(tiling), **flags}
    return Launch(dkdv_kernel, options, direct=variant.direct)


@cache
def _step_launch(
    dtype: torch.dtype,
    e: int,
    m: int,
    group: int,
    maps: tuple[str, str],
    normalize: bool,
    direct: bool,
    device: int | None,
    decay: bool,
) -> Launch:
    kind = {"GROUP": group, "MAP_Q": MAPS[maps[0]], "MAP_K": MAPS[maps[1]], "NORMALIZE": normalize}
    shapes = {"E": e, "M": m, "DE": padded(e), "BM": block_of(m, _STEP["BM"]), "num_warps": _STEP["num_warps"]}
    return Launch(step_kernel, {**shapes, **kind}, direct=direct)
