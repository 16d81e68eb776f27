"""Running a backward pass: views, workspaces, the order of blocks, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.attention.band import reach, seen
from warploom.attention.bounds import with_bounds
from warploom.attention.features import Features
from warploom.attention.hopper import documents, schedule
from warploom.attention.hopper.config import MOST_SLOTS, BackwardConfig
from warploom.attention.hopper.offsets import with_columns
from warploom.attention.hopper.plan import (
    backward_config,
    in_turns,
    is_short,
    shared_bytes,
    waves,
    with_reach,
    workspace_floats,
)
from warploom.attention.hopper.run import (
    added,
    column_mask,
    dropped,
    filled,
    one_entry,
    processors,
    reaching,
    too_far,
    with_seed,
)
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.arguments import keeps_nothing
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like

CLAIMING_HEADS = 8  # of short causal calls at the most: 1024 keys, head_dim 64 321 TFLOP/s, 16 heads 313, 64 heads 312
# Key heads of packed sequences in flight together: enough of a head's blocks share what they read; and where they claim tiles.
# Documents of 100 to 4000 tokens, causal: 4 heads 7.84 ms, 8 7.82; with claims 2 7.47, 4 7.57, 8 7.67, 16 8.08.
PACKED_HEADS, PACKED_CLAIMING_HEADS = 4, 2

NO_COLUMNS: tuple[Tensor | int | None, ...] = (None,) * 7


Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink; dbias of a table, if asked for."""
    gradient = _table_gradient(args)
    args = with_bounds(with_columns(args), packed=True)
    found = bind(args, dlse is not None, gradient)(dout, dlse, out, lse, *args.tensors())
    if gradient is None:
        return found
    if _farthest(args) < gradient.shape[1] - 1:
        gradient[:, -1:].zero_()
    return *found, gradient


def _farthest(args: AttentionArgs) -> int:
    """The last entry of a table that a pair may read.

    The kernel takes the gradient of the far left's from what all others get, and rounding is left of it where no pair is there.
    """
    keys = args.k.shape[1] if args.cu_seqlens_k is None else args.max_seqlen_k or 0
    return (keys - 1 if args.left is None else min(keys - 1, args.left)) + args.bias_origin


def _table_gradient(args: AttentionArgs) -> Tensor | None:
    """Zeros that the kernel adds a table's gradient to, if it is asked for."""
    if args.bias is None or args.bias_kind != "distance" or not args.bias_grad:
        return None
    return torch.zeros_like(args.bias)


def bind(args: AttentionArgs, with_dlse: bool, gradient: Tensor | None = None) -> Backward:
    """A backward pass made ready: takes dout, dlse, out and lse, and behind them what the forward's ``bind`` takes."""
    if args.cu_seqlens_q is not None:
        return _bind_packed(args, with_dlse, gradient)
    if args.documents is not None:
        return documents.bind_backward(args, lambda masked: bind(masked, with_dlse, gradient))
    seqlen_q, seqlen_k = args.q.shape[1], args.k.shape[1]
    left, right, masked, first, end = args.left, args.right, _masked(args), 0, seqlen_k
    offsets = None if args.q_offset is None else args.q_offset.contiguous()
    if keeps_nothing(left, right):
        return _nothing_seen
    if offsets is None and (left is not None or right is not None):
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            return _nothing_seen
    # As in the forward: keys that no query sees stay outside of what TMA reads.
    cut = not masked and (first > 0 or end < seqlen_k)
    keys = end - first if cut else seqlen_k
    if cut:
        left = None if left is None else left - (seqlen_k - end)
        right = None if right is None else right + (seqlen_k - end)
    launch, variant, tiles = _bind_dense(args, with_dlse, first if cut else 0, keys, (left, right), gradient)
    shape = args.q.shape[0], args.q.shape[2], -1, 2, variant.tile_m
    no_sink = like((0,), args.q.dtype, args.q.device)

    def run(
        dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *mask: Tensor | None, seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = _like(q), _like(k), _like(v)
        gradients: tuple[Tensor, ...] = dq, dk, dv
        columns = (*column_mask(*mask), offsets) if masked else NO_COLUMNS
        if cut:
            for t in (dk, dv):
                t[:, :first].zero_()
                t[:, end:].zero_()
            k, v, *of_keys = (t[:, first:end] for t in (k, v, dk, dv))
            gradients = (dq, *of_keys)
        if masked and sink is not None:  # beside which the kernel does not know such rows
            q, dout = (_where_seeing(t, lse, sink) for t in (q, dout))
        workspace = launch((q, k, v, out, dout), lse, dlse, gradients, columns=columns, seed=seed)
        if sink is None:
            return dq, dk, dv, no_sink
        stats = workspace[variant.sums(tiles) :][: variant.stats(tiles)]
        delta = stats.view(shape)[:, :, :, 1].flatten(2)[:, :, :seqlen_q]
        return dq, dk, dv, _dsink(q, sink, dlse, delta, lse)

    return with_seed(args, run)


def _bind_dense(
    args: AttentionArgs,
    with_dlse: bool,
    first: int,
    keys: int,
    band: tuple[int | None, int | None],
    gradient: Tensor | None = None,
) -> tuple[Callable[..., Tensor], BackwardConfig, int]:
    """The launch of a dense call of so many keys from the first on, its variant, and tiles of queries."""
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    heads_kv = k.shape[2]
    features, short = described(args, with_dlse)
    together, each = _waves(args, backward_config(features, short))
    function, variant = _function(features, short, each > 0, too_far(args))
    if not variant.waves and (args.deterministic or band[1] is not None):
        shared = shared_bytes(seqlen_q, heads // heads_kv, q.shape[3], v.shape[3])
        if variant.claims or (variant.pair and not args.deterministic):
            # A section is one wave: blocks that claim tiles wait less, and of pairs 515 TFLOP/s (4096 keys) were 493 in two.
            shared = max(shared, schedule.L2_BYTES)
        together = schedule.section(batch * heads_kv, -(-keys // variant.tile_n), shared)
        if variant.deterministic:
            together = in_turns(variant, batch * heads_kv, heads // heads_kv, keys, shared)
        if variant.claims:
            together = min(together, CLAIMING_HEADS)
    m_blocks = -(-seqlen_q // variant.tile_m)
    tiles = batch * heads * m_blocks
    split, each = 0, max(each, 1)
    if variant.stream_k and args.sink is None:
        blocks = batch * heads_kv * -(-keys // variant.tile_n)
        split, each = schedule.stream_k(
            blocks, heads // heads_kv * m_blocks, processors(q.get_device()), variant.most_split(tiles, q.numel())
        )
    if variant.dealt:
        split = min(MOST_SLOTS, variant.most_split(tiles, q.numel()))
    beyond = k.shape[1] - first - keys
    launch = _launcher(function, variant, args, tiles, band, together, split, each, first, beyond, gradient)
    return launch, variant, tiles


def _masked(args: AttentionArgs) -> bool:
    return args.lts is not None or args.ute is not None


def _nothing_seen(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (_like(t).zero_() for t in (q, k, v))
    return dq, dk, dv, _dsink(q, sink, dlse, None, lse)


def _waves(args: AttentionArgs, variant: BackwardConfig) -> tuple[int, int]:
    """Sections of a dense call that a variant would serve, and waves of each; 0: not in waves."""
    q, k, v = args.q, args.k, args.v
    group = q.shape[2] // k.shape[2]
    if group == 1 or args.right is None:
        return 1, 0
    shared = shared_bytes(q.shape[1], group, q.shape[3], v.shape[3])
    return waves(variant, q.shape[0] * k.shape[2], k.shape[1], shared)


def warm(args: AttentionArgs) -> None:
    """Load or build the module of a call's backward pass, and launch it on one token."""
    args, packed = with_columns(args), args.cu_seqlens_q is not None
    one = (1,) if packed else (1, 1)
    q, k, v = (t.new_zeros((*one, *t.shape[-2:])) for t in (args.q, args.k, args.v))
    features, short = described(args, False)
    several = not packed and _waves(args, backward_config(features, short))[1] > 0
    function, variant = _function(features, short, several, not packed and too_far(args))
    starts: tuple[Tensor | None, ...] = (None, None, None)
    if args.cu_seqlens_q is not None:
        ends = args.cu_seqlens_q.new_tensor([0, 1])
        starts = ends, ends, None if args.seqused_k is None else ends[1:]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = out.new_zeros((q.shape[1], 1) if packed else (1, q.shape[2], 1), dtype=torch.float32)
    gradients = tuple(torch.zeros_like(t) for t in (q, k, v))
    tiles = q.shape[-2] * (1 // variant.tile_m + 1)
    columns = NO_COLUMNS
    if variant.columns:
        some = next(t for t in args.mask.vectors if t is not None)
        offsets = some.new_zeros(1) if variant.q_offset else None
        columns = *(some.new_zeros((1, 1, 1)),) * 4, some.new_zeros((1, 1, 2, 8)), 0, offsets  # a block and a coarse one
    one_token = one_entry(args._replace(q=q))
    band = args.left, args.right
    launch = _launcher(function, variant, one_token, tiles, band, 1, gradient=_table_gradient(one_token))
    launch((q, k, v, out, out), lse, None, gradients, starts, columns, args.dropout_seed)


def _bind_packed(args: AttentionArgs, with_dlse: bool, gradient: Tensor | None) -> Backward:
    """As ``bind``, of packed sequences, whose starts and lengths may differ too."""
    cu_q = args.cu_seqlens_q
    assert cu_q is not None
    if cu_q.shape[0] == 1 or keeps_nothing(args.left, args.right):
        return _nothing_seen
    function, variant = _function(*described(args, with_dlse))
    tiles = (args.q.shape[0] // variant.tile_m + cu_q.shape[0] - 1) * args.q.shape[1]
    together = min(args.k.shape[1], PACKED_CLAIMING_HEADS if variant.claims else PACKED_HEADS)
    launch = _launcher(function, variant, args, tiles, (args.left, args.right), together, gradient=gradient)
    masked = _masked(args)
    # Rows that see nothing the kernel clears under a mask, but beside a sink, where it does not know them.
    clears = args.sink is not None if masked else not _every_query_sees(args)

    def run(
        dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
        cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None, *mask: Tensor | None, seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        # The kernels write zeros for tokens of no sequence and for keys that none of theirs sees.
        dq, dk, dv = gradients = _like(q), _like(k), _like(v)
        cu_q = cu_q.contiguous()
        starts = cu_q, cu_q if cu_k is None else cu_k.contiguous(), None if used is None else used.contiguous()
        if clears:
            q, dout = (_where_seeing(t, lse, sink) for t in (q, dout))
        columns = (*column_mask(*mask), None) if masked else NO_COLUMNS
        launch((q, k, v, out, dout), lse, dlse, gradients, starts, columns, seed)
        if sink is None:
            return dq, dk, dv, _dsink(q, sink, dlse, None, lse)
        delta = (dout.float() * out.float()).sum(-1).transpose(0, 1)
        return dq, dk, dv, _dsink(q, sink, dlse, delta if dlse is None else delta - dlse, lse)

    return with_seed(args, run)


def _every_query_sees(args: AttentionArgs) -> bool:
    """Whether each query of a packed call sees a key at least, by what is known without its lengths: its own one."""
    alike = args.cu_seqlens_k is None and args.seqused_k is None
    return alike and (args.left is None or args.left >= 0) and (args.right is None or args.right >= 0)


def _where_seeing(t: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """``t`` ([batch,] tokens, heads, ·) with zeros for NaN and infinities in rows that see nothing: tiles multiply them by 0.

    Beside a sink the lse of such a row is the sink, and so is that of one whose keys weigh nothing.
    """
    blind = lse == float("-inf")
    if sink is not None:
        logits = sink.float()[:, None]
        blind = blind | ((lse - logits).abs() <= 1e-5 * (1.0 + logits.abs()))
    return torch.where(blind.transpose(-1, -2)[..., None] & ~torch.isfinite(t), 0.0, t)


def _like(t: Tensor) -> Tensor:
    """Contiguous, of the same shape and type: takes the host half as long as ``new_empty``."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _launcher(
    function: Callable[..., None],
    variant: BackwardConfig,
    args: AttentionArgs,
    tiles: int,
    band: tuple[int | None, int | None],
    together: int,
    split: int = 0,
    each: int = 1,
    first: int = 0,
    beyond: int = 0,
    gradient: Tensor | None = None,
) -> Callable[..., Tensor]:
    """What allocates the workspace, launches and returns the workspace, as ``workspace_floats`` has it.

    Until the last kernel stores dq, its memory also holds partial sums of the ``split`` key blocks that are shared out.
    """
    q, packed = args.q, args.cu_seqlens_q is not None
    floats = workspace_floats(variant, tiles, q.numel(), args.sink is not None and not packed, split)
    like_workspace = like((floats,), torch.float32, q.device)
    dropout, bias = dropped(args, first), added(args, beyond, gradient)
    reached = reaching(variant, bias, q, args.k)
    numbers = (args.scale, args.softcap, *map(reach, band), together, processors(q.get_device()), split, each)
    dim, dim_v = variant.head_dim, variant.head_dim_v
    box_q, box_k, box_v, box_do = variant.boxes

    def launch(
        tensors: tuple[Tensor, ...],
        lse: Tensor,
        dlse: Tensor | None,
        gradients: tuple[Tensor, ...],
        starts: tuple[Tensor | None, ...] = (None, None, None),
        columns: tuple[Tensor | int | None, ...] = NO_COLUMNS,
        seed: Tensor | None = None,
    ) -> Tensor:
        workspace = torch.empty_like(like_workspace)
        if packed:
            q, k, v, out, dout = tensors
            tensors = filled(q, dim, box_q), filled(k, dim, box_k), filled(v, dim_v, box_v), out, filled(dout, dim_v, box_do)
        views = [aligned(t) for t in tensors]
        with on_device(views[0]):
            biases = bias if reached is None else reached()
            function(*views, lse.contiguous(), dlse, *gradients, workspace, *starts, *columns, dropout(seed), biases, *numbers)
        return workspace

    return launch


def _dsink(q: Tensor, sink: Tensor | None, dlse: Tensor | None, delta: Tensor | None, lse: Tensor) -> Tensor:
    """-sum over queries of exp(sink - lse) · (rowsum(dO∘O) - dLSE); ``delta`` is what is in brackets, None: O is 0."""
    if sink is None:
        return like((0,), q.dtype, q.device)
    if delta is None:
        delta = torch.zeros_like(lse) if dlse is None else -dlse
    share = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum(dim=[d for d in range(lse.ndim) if d != lse.ndim - 2]).to(sink.dtype)


def described(args: AttentionArgs, dlse: bool) -> tuple[Features, bool]:
    """What ``backward_config`` takes: the call's features, and whether it is short."""
    longest = args.q.shape[1] if args.cu_seqlens_q is None else args.max_seqlen_q
    features = Features.of_args(args, dlse)
    if features.q_offset:
        features = features._replace(columns=True)
    return features, is_short(longest or 0, args.q.shape[-2] > args.k.shape[-2], features.columns)


def _function(
    features: Features, short: bool, several: bool = False, far: bool = False
) -> tuple[Callable[..., None], BackwardConfig]:
    """The compiled variant; ``several``: in waves, ``far``: one that reaches, unless only the other's module is to be had."""
    variant = backward_config(features, short, several)
    far = far and variant.may_reach
    variant = with_reach(variant) if far else variant
    function = _ready.get(variant.spec.name)
    if function is None:
        if (several or far) and not modules.at_hand(variant.spec):
            return _function(features, short, several and far)  # takes longer, but its module may be here
        function = _ready[variant.spec.name] = modules.fetch(variant.spec)
    return function, variant


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name
