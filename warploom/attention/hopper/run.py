"""Running a call: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from warploom.attention import philox
from warploom.attention.band import reach, seen
from warploom.attention.features import Features
from warploom.attention.hopper import documents
from warploom.attention.hopper.config import BackwardConfig, ForwardConfig
from warploom.attention.hopper.offsets import with_columns
from warploom.attention.hopper.plan import (
    LONG,
    SPLIT_COST,
    config,
    few_queries,
    last_tiles,
    may_be_too_far,
    may_share,
    pack_gqa,
    shape,
    with_largest,
    with_reach,
)
from warploom.attention.hopper.schedule import heads_in_pairs, section, tile_heads, tiles_to_split
from warploom.attention.problem import AttentionArgs, mean_queries
from warploom.kernels.distances import head_length
from warploom.kernels.reach import PARTS
from warploom.runtime import modules
from warploom.runtime.alignment import aligned, stepped
from warploom.runtime.arguments import keeps_nothing
from warploom.runtime.likeness import like


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    args = documents.settled(with_columns(args))
    return bind(args)(*args.tensors())


def forward_with_largest(args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """As ``forward``, and the largest logits, fp32 (batch, heads) or (sequences, heads)."""
    batch = args.q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
    largest = torch.full((batch, args.q.shape[-2]), float("-inf"), dtype=torch.float32, device=args.q.device)
    out, lse = bind(args, largest)(*args.tensors())
    return out, lse, largest


def bind(args: AttentionArgs, largest: Tensor | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """A call made ready: takes any q, k, v and sink that differ from these in contents and addresses only.

    Of packed calls also cu_seqlens_q, cu_seqlens_k and seqused_k, over pages their table; under a column mask its vectors and
    their bounds behind those, and of documents where they start; with dropout the seed, last. ``largest`` is raised to the
    largest logits. Calls without dropout, but for those of documents, write to ``into``, an out and an lse, where given it.
    """
    if args.cu_seqlens_q is not None:
        return _bind_packed(args, largest)
    if args.documents is not None and largest is None:
        return documents.bind(args, _bind_packed)
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    _, seqlen_k, heads_kv, head_dim = k.shape
    head_dim_v = v.shape[3]
    out_shape, lse_shape = (batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)
    device, index = q.device, q.device.index
    left, right = args.left, args.right
    if args.q_offset is not None:
        if keeps_nothing(left, right):
            return partial(_nothing_seen, lse_shape)
        return _bind_columns(args, *_function(args, seqlen_k))
    first, end = seen(seqlen_q, seqlen_k, left, right)
    if first >= end:
        return partial(_nothing_seen, lse_shape)
    # Keys that no query sees stay outside of what TMA reads: a NaN among their values would not vanish against P = 0.
    cut = first > 0 or end < seqlen_k
    left = None if left is None else left - (seqlen_k - end)
    right = None if right is None else right + (seqlen_k - end)
    members = heads // heads_kv
    function, variant = _function(args, seqlen_k, (seqlen_q, members), largest is not None)
    m_blocks = -(-seqlen_q // variant.queries)
    if variant.columns:
        assert largest is None
        return with_seed(args, _bind_columns(args, function, variant))
    rows = batch * (heads_kv * tile_heads(members, variant.heads_per_tile) if variant.pack_gqa else heads)
    tiles, blocks = m_blocks * rows, processors(index)
    split = 0
    # A window's tiles see few keys each, and so do the first of a causal call with as many queries as keys. How a call is split
    # depends on how many tiles it has, and pieces are rounded where whole tiles are not.
    if variant.split and not args.batch_invariant and args.left is None and (args.right is None or 4 * seqlen_q <= seqlen_k):
        n_blocks = -(-(end - first) // variant.tile_n)
        split, blocks = tiles_to_split(tiles, n_blocks, blocks, SPLIT_COST, args.right is None)
    parts_shape = parts_shape_of(blocks, variant)
    blocks = min(blocks, tiles) if not split else blocks
    shared = k.element_size() * (end - first) * (head_dim + head_dim_v) // members
    numbers = numbers_of(args, left, right, heads_in_pairs(m_blocks, rows, blocks, shared), split, blocks)
    like_out, like_lse = like(out_shape, q.dtype, device), like(lse_shape, torch.float32, device)
    readable = all(map(stepped, (q, k, v)))
    dropout, bias = dropped(args, first), added(args, seqlen_k - end)
    reached = reaching(variant, bias, q, k)

    def launch(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seed: Tensor | None = None,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = into or (torch.empty_like(like_out), torch.empty_like(like_lse))
        if cut:
            k, v = k[:, first:end], v[:, first:end]
        q, k, v = _read_by_tma(readable, q, k, v)
        if sink is not None:
            sink = sink.float().contiguous()
        parts = lse if variant.split else None  # not read: of the type
        if split:
            parts = torch.empty(parts_shape, dtype=torch.float32, device=device)
        biases = bias if reached is None else reached()
        given = (q, k, v, out, lse, sink, None, None, None, None, parts, None, dropout(seed), biases, largest, None, *numbers)
        launch_on(index, function, given)
        return out, lse

    return with_seed(args, launch)


def _bind_columns(
    args: AttentionArgs, function: Callable[..., None], variant: ForwardConfig
) -> Callable[..., tuple[Tensor, Tensor]]:
    """As ``bind``, under a column mask, whose vectors may differ too.

    Keys that the band hides from every query are among the columns that no row sees, whose values count as zeros.
    Query offsets are this call's own.
    """
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    device, index = q.device, q.device.index
    like_out = like((batch, seqlen_q, heads, head_dim_v), q.dtype, device)
    like_lse = like((batch, heads, seqlen_q), torch.float32, device)
    readable = all(map(stepped, (q, k, v)))
    m_blocks = -(-seqlen_q // variant.queries)
    shared = k.element_size() * seqlen_k * (head_dim + head_dim_v) * heads_kv // heads
    blocks = min(processors(index), m_blocks * batch * heads)
    last = last_tiles(m_blocks, batch * heads, blocks)
    numbers = numbers_of(args, args.left, args.right, section(batch * heads, m_blocks, shared), last, blocks)
    dropout = dropped(args)
    offsets = None if args.q_offset is None else args.q_offset.contiguous()

    def launch(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *mask: Tensor | None, seed: Tensor | None = None,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = into or (torch.empty_like(like_out), torch.empty_like(like_lse))
        q, k, v = _read_by_tma(readable, q, k, v)
        if sink is not None:
            sink = sink.float().contiguous()
        counter = counter_on(device)
        columns = column_mask(*mask)
        if offsets is not None:
            columns = *columns, offsets
        given = (q, k, v, out, lse, sink, None, None, None, counter, None, columns, dropout(seed), None, None, None, *numbers)
        launch_on(index, function, given)
        return out, lse

    return launch


def column_mask(
    lts: Tensor | None, lte: Tensor | None, uts: Tensor | None, ute: Tensor | None, bounds: Tensor | None
) -> tuple[Tensor | int, ...]:
    """What a module takes of a column mask: lts, lte, uts and ute, their bounds, and bits of those vectors that exist.

    Another one stands for who does not.
    """
    some = lts if lts is not None else ute
    assert some is not None and bounds is not None
    some = some.contiguous()
    present = (lts is not None) + 2 * (lte is not None) + 4 * (uts is not None) + 8 * (ute is not None)
    if present in (1, 8):
        return some, some, some, some, bounds, present
    lts, lte, uts, ute = [some if t is None else t.contiguous() for t in (lts, lte, uts, ute)]
    return lts, lte, uts, ute, bounds, present


def dropped(args: AttentionArgs, first: int = 0) -> Callable[[Tensor | None], tuple[Tensor | float, ...] | None]:
    """What makes of a seed what a module takes of dropout: the seed's two words and three numbers.

    Of a call without its keys before ``first``.
    """
    if not args.dropout_p:
        return lambda seed: None
    numbers = philox.kernel_bound(args.dropout_p), philox.keep_scale(args.dropout_p), first // philox.KEYS

    def of(seed: Tensor | None) -> tuple[Tensor | float, ...]:
        assert seed is not None
        return seed.reshape(1).view(torch.int32), *numbers

    return of


def added(args: AttentionArgs, beyond: int = 0, gradient: Tensor | None = None) -> tuple[Tensor | int, ...] | None:
    """What a module takes of a bias: its values, room to spread out a table, and what to add to distances.

    ``beyond``: keys left out at the end; ``gradient``: of a table, which is added to.
    """
    if args.bias is None:
        return None
    values, origin = args.bias.detach(), args.bias_origin + beyond
    if args.bias_kind == "distance":
        spread = values.new_empty(values.shape[0] * head_length(values.shape[1]))
        return (values, spread, origin) if gradient is None else (values, spread, origin, gradient)
    return values, origin


def reaching(
    variant: ForwardConfig | BackwardConfig, bias: tuple[Tensor | int, ...] | None, q: Tensor, k: Tensor
) -> Callable[[], tuple[Tensor | int, ...]] | None:
    """Where a variant reaches what makes of ALiBi what its module takes, which has room for norms; else None."""
    if not variant.reaches:
        return None
    assert bias is not None
    values, origin = bias
    device, floats = q.device, q.shape[0] * (q.shape[2] + k.shape[2]) * PARTS
    return lambda: (values, origin, torch.empty(floats, dtype=torch.float32, device=device))


def too_far(args: AttentionArgs) -> bool:
    """``may_be_too_far`` of a dense call."""
    batch, seqlen_k, heads_kv, _ = args.k.shape
    return may_be_too_far(batch, args.q.shape[2] + heads_kv, seqlen_k, args.right, args.bias_origin)


def one_entry(args: AttentionArgs) -> AttentionArgs:
    """The call with the bias of its first batch entry, as a launch on one token has it."""
    return args if args.bias is None else args._replace(bias=args.bias[:1])


def with_seed(args: AttentionArgs, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch``, which takes a seed by its name, so that it takes that of a call that drops as its last tensor."""
    if not args.dropout_p:
        return launch

    def run(*tensors: Tensor | None) -> Any:
        return launch(*tensors[:-1], seed=tensors[-1])

    return run


def parts_counters(args: AttentionArgs) -> bool:
    """Whether kernels may begin between keys that share a Philox counter: behind those that no query sees."""
    if not args.dropout_p or args.left is None or args.lts is not None or args.ute is not None:
        return False
    if args.cu_seqlens_q is not None:
        return args.cu_seqlens_k is not None or args.left < 0
    return seen(args.q.shape[1], args.k.shape[1], args.left, args.right)[0] % philox.KEYS > 0


def _read_by_tma(readable: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of what TMA cannot read; ``readable``: strides are fine, and only addresses may not be."""
    if not readable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return aligned(q), aligned(k), aligned(v)
    return q, k, v


def _nothing_seen(
    lse_shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = into or _outputs(q, v, lse_shape)
    out.zero_()
    return out, lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[:, None].expand(lse_shape))


def _nothing_seen_packed(
    lse_shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor, *_: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = into or _outputs(q, v, lse_shape)
    out.zero_()
    lse.fill_(float("-inf"))
    if sink is not None:
        # Tokens past the last sequence have no sink.
        inside = torch.arange(lse_shape[1], device=q.device) < cu_q[-1]
        lse.copy_(torch.where(inside, sink.float()[:, None], lse))
    return out, lse


def _bind_packed(args: AttentionArgs, largest: Tensor | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """As ``bind``, of packed sequences, whose starts and lengths may differ too, and the vectors of their mask."""
    q, cu_q = args.q, args.cu_seqlens_q
    assert cu_q is not None
    (tokens, heads, head_dim), head_dim_v = q.shape, args.v.shape[-1]
    lse_shape, device, index = (heads, tokens), q.device, q.device.index
    if keeps_nothing(args.left, args.right):
        return partial(_nothing_seen_packed, lse_shape)
    function, variant = _function(args, args.max_seqlen_k or 0, few_of_pages(args), largest is not None)
    blocks, split = _packed_blocks(args, variant)
    numbers = numbers_of(args, args.left, args.right, split=split, blocks=blocks)
    parts_shape = parts_shape_of(blocks, variant)
    like_out = like((tokens, heads, head_dim_v), q.dtype, device)
    like_lse = like(lse_shape, torch.float32, device)
    readable = all(map(stepped, (q, args.k, args.v)))
    box, box_v = variant.boxes
    whole = head_dim > variant.head_dim - box and head_dim_v > variant.head_dim_v - box_v  # as ``filled`` has it
    dropout, bias = dropped(args), added(args)
    wide = args.block_table is not None and args.block_table.shape[1] != 1

    def launch(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None,
        *others: Tensor | None, seed: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = into or (torch.empty_like(like_out), torch.empty_like(like_lse))
        cu_q = cu_q.contiguous()
        columns = table = None
        if variant.paged:
            table = others[0] if wide else one_page(*others)
        else:
            cu_k = cu_q if cu_k is None else cu_k.contiguous()
        if used is not None:
            used = used.contiguous()
        if sink is not None:
            sink = sink.float().contiguous()
        counter = counter_on(device)
        parts = None
        if split:
            parts = torch.empty(parts_shape, dtype=torch.float32, device=device)
        elif variant.split:
            parts = lse[None]  # not read: of the type
        if not whole:
            q, k, v = _filled(variant, q, k, v)
        q, k, v = _read_by_tma(readable, q, k, v)
        if variant.columns:
            columns = column_mask(*others)
        packed = cu_q, cu_k, used, counter
        given = (q, k, v, out, lse, sink, *packed, parts, columns, dropout(seed), bias, largest, table, *numbers)
        launch_on(index, function, given)
        return out, lse

    return with_seed(args, launch)


def few_of_pages(args: AttentionArgs) -> tuple[int, int] | None:
    """Queries, and heads that share their keys, of a call over pages whose tiles may hold several heads, else None."""
    if args.block_table is None:
        return None
    return few_queries(args.max_seqlen_q or 0, mean_queries(args)), args.q.shape[1] // args.k.shape[2]


def _packed_blocks(args: AttentionArgs, variant: ForwardConfig) -> tuple[int, int]:
    """Blocks of a packed call; over pages, by how many key tiles the longest tile is to be past a share, else 0."""
    assert args.cu_seqlens_q is not None
    tokens, heads = args.q.shape[:2]
    count = args.cu_seqlens_q.shape[0]  # of sequences, and one of the tokens past the last
    blocks = processors(args.q.device.index)
    if variant.pack_gqa:
        heads_kv = args.k.shape[2]
        heads = heads_kv * tile_heads(heads // heads_kv, variant.heads_per_tile)
    most = (tokens // variant.queries + count) * heads
    if variant.split and not args.batch_invariant and args.block_table is not None:
        capacity = -(-args.block_table.shape[1] * args.k.shape[1] // variant.tile_n)
        n_blocks = min(-(-(args.max_seqlen_k or 0) // variant.tile_n), capacity)
        fewest = -(-tokens // variant.queries) * heads
        # What the kernel adds up stays in 32 bits.
        if most * capacity < 2**30 and may_share(count - 1, heads, fewest, n_blocks, blocks):
            return blocks, SPLIT_COST
    return min(blocks, most), 0


def one_page(table: Tensor | None) -> Tensor:
    """A table of one page a sequence as a module takes it: its second stride may be any, and counts for the module."""
    assert table is not None
    return table[:, 0].unsqueeze(-1)


# Counters of packed calls, zeroed many at a time, by device and stream.
_COUNTERS = 256
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}


def counter_on(device: torch.device) -> Tensor:
    """A zero on the device that no other launch counts with.

    A captured call zeroes its own: it runs again. Others take one that their stream zeroed before, which costs the host less.
    """
    if device.index != torch._C._cuda_getDevice() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return _counters[device, stream].pop()
    except (KeyError, IndexError):
        _counters[device, stream] = fresh = list(torch.zeros(_COUNTERS, 1, dtype=torch.int32, device=device).unbind())
        return fresh.pop()


def _filled(variant: ForwardConfig, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    box, box_v = variant.boxes
    return filled(q, variant.head_dim, box), filled(k, variant.head_dim, box), filled(v, variant.head_dim_v, box_v)


def filled(t: Tensor, columns: int, box: int) -> Tensor:
    """``t``, or a copy of as many columns as the tile has where the tile's last TMA box would hold none of its own.

    Packed tensors are described to TMA by an address far before their first row. A box all of whose columns are past the
    last one then ended in an illegal access on an H100.
    """
    return t if t.shape[-1] > columns - box else torch.nn.functional.pad(t, (0, columns - t.shape[-1]))


def warm(args: AttentionArgs) -> None:
    """Load or build the call's module, and launch it on one token."""
    args = documents.packed(args) or with_columns(args)
    if args.cu_seqlens_q is None:
        few = args.q.shape[1], args.q.shape[2] // args.k.shape[2]
        _first_launch(args, *_function(args, args.k.shape[1], few))
    else:
        _first_launch(args, *_function(args, args.max_seqlen_k or 0, few_of_pages(args)))


def _first_launch(args: AttentionArgs, function: Callable[..., None], variant: ForwardConfig) -> None:
    """Launch the module's kernels on one token: CUDA loads their code when they are first launched."""
    packed: tuple[Tensor | None, ...] = (None, None, None, None)
    shape: tuple[int, ...] = (1, 1)
    table = None
    if args.cu_seqlens_q is not None:
        ones = args.cu_seqlens_q.new_tensor([0, 1])
        packed = (ones, ones, None if args.seqused_k is None else ones[1:], ones.new_zeros(1))
        shape = (1,)
        if variant.paged:
            packed, table = (ones, None, *packed[2:]), ones.new_zeros(1, 1)
    q, k, v = (t.new_zeros((*shape, *t.shape[-2:])) for t in (args.q, args.k, args.v))
    if variant.paged:
        k, v = k[None], v[None]  # a page of a key
    out, lse = _outputs(q, v, (*shape[1:], q.shape[-2], 1))
    split = int(variant.split)
    parts = lse.new_empty(parts_shape_of(1, variant)) if split else None
    sink = None if args.sink is None else args.sink.float().contiguous()
    mask: tuple[Tensor | int, ...] | None = None
    if variant.columns:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        packed = (*packed[:3], counter)
        mask = *(counter.view(1, 1, 1),) * 4, counter.new_zeros(1, 1, 2, 8), 0  # a block and a coarse one
        if variant.q_offset:
            mask = *mask, counter.new_zeros(1)
    largest = lse.new_full((1, q.shape[-2]), float("-inf")) if variant.largest else None
    numbers = numbers_of(args, args.left, args.right, pair_heads=1, split=split)
    dropout, bias = dropped(args)(args.dropout_seed), added(one_entry(args))
    reached = reaching(variant, bias, q, k)
    if args.cu_seqlens_q is not None:
        q, k, v = _filled(variant, q, k, v)
    biases = bias if reached is None else reached()
    given = (q, k, v, out, lse, sink, *packed, parts, mask, dropout, biases, largest, table, *numbers)
    launch_on(q.device.index, function, given)


def numbers_of(
    args: AttentionArgs, left: int | None, right: int | None, pair_heads: int = 0, split: int = 0, blocks: int = 1
) -> tuple[float, float, int, int, int, int, int]:
    """What a module takes after its tensors.

    Under a column mask ``pair_heads`` are the heads of a section, and ``split`` is what ``last_tiles`` says.
    """
    return args.scale, args.softcap, reach(left), reach(right), pair_heads, split, blocks


def parts_shape_of(blocks: int, variant: ForwardConfig) -> tuple[int, int, int]:
    """Two pieces a block; over pages room for what blocks say of tiles they share, which is less than a piece."""
    return 2 * blocks + variant.paged, variant.piece_floats // variant.tile_m, variant.tile_m


def _outputs(q: Tensor, v: Tensor, lse_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty(shape, dtype=q.dtype, device=q.device), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def _function(
    args: AttentionArgs, seqlen_k: int, few: tuple[int, int] | None = None, largest: bool = False
) -> tuple[Callable[..., None], ForwardConfig]:
    """The compiled variant; ``few``: queries, and heads that share their keys, of a call whose tiles may be special.

    ``largest``: which finds the largest logits too.
    """
    features, long = Features.of_args(args), seqlen_k >= LONG
    usual = variant = config(features, long)
    if few is not None:
        if not (features.columns or features.dropout or features.batch_invariant):
            each = 0 if largest or features.bias == "distance" else pack_gqa(*few, usual.tile_m)
            variant = config(features, long, each, "" if each else shape(few[0], seqlen_k))
        if variant.may_reach and too_far(args):
            variant = with_reach(variant)
    if largest:
        usual, variant = with_largest(usual), with_largest(variant)
    function = _ready.get(variant.spec.name)
    if function is None:
        if variant != usual and not modules.at_hand(variant.spec):
            # Which takes longer, but its module may be here.
            return _function(args, seqlen_k, largest=largest)
        function = _ready[variant.spec.name] = modules.fetch(variant.spec)
        if variant.split and not torch.cuda.is_current_stream_capturing():
            _first_launch(args, function, variant)  # of what merges pieces too, which a captured call may be the first to need
    return function, variant


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name


def launch_on(index: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a module's function with its tensors' device current; asking costs less than a context."""
    if index == torch._C._cuda_getDevice():
        function(*arguments)
    else:
        with torch.cuda.device(index):
            function(*arguments)


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
