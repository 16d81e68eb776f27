"""One validated, frozen description of an attention call: what dispatch decides on and explain() prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.masks.intervals import ResolvedMask
from warploom.runtime import arguments
from warploom.runtime.qkv import check_starts

# Beyond it sums of rows, lengths and limits of the band would leave 32 bits.
MOST_OFFSET = 1 << 29

_ALWAYS = ("q", "k", "v", "sink")
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_COLUMNS = ("lts", "lte", "uts", "ute", "bounds")
LAUNCHED = (*_ALWAYS, *_SEQUENCES, *_COLUMNS, "documents", "dropout_seed")  # tensors that launchers take, in their order


class AttentionArgs(NamedTuple):
    """The arguments of the attention op, in schema order; every implementation receives one of these.

    Dense calls have q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ·); packed calls
    have q (total_q, heads_q, head_dim) and ``cu_seqlens_q``; paged ones k and v (pages, page_size, heads_kv, ·)
    and ``block_table``. ``lts … ute`` are int32 (batch|1, heads|1, seqlen_k) with rows local to each sequence.
    ``bounds`` is a slot for prepared per-tile extrema of those four, as `warploom.attention.bounds` has them. left and right
    are the band -right <= p - j <= left with p = i + seqlen_k - seqlen_q; None is unlimited.

    With ``q_offset``, int32 (batch,) on the device, none negative, queries are chunks of longer sequences and keys are
    whole: row i of batch entry b (in packed calls: of sequence b) stands for row r = i + q_offset[b]. Then

    - the band counts from p = r, without seqlen_k - seqlen_q: a chunk's length says nothing about where it lies. Whoever makes
      the call knows the whole lengths, and adds their alignment to left and right (`warploom.attention.chunks` does). A
      prompt whose keys begin where its queries do has nothing to add, however many of its keys are there yet.
    - column vectors are compared with r: those of the whole serve all of its chunks.
    - dropout's elements are those of row r of batch entry b // ``q_chunks``: where each sequence has so many chunks in a
      row, they drop together what the whole drops. ``dropout_seed`` may be int64 (2,): the seed and, of a call that has some
      heads of the whole, the number of its first one there.

    A key counts as hidden in batch entry b if no row of that entry sees it, whatever other chunks see: ``bounds`` are extrema
    over each entry's own rows, counted from 0 and cut to [0, seqlen_q], and have a batch dimension of their own where
    the vectors have none. Kernels clamp offsets to [0, 2**29]; no address depends on one.

    With ``bias`` a score is softcap(scale · q kᵀ) + bias, added in fp32 (fp64 for fp64 inputs), where the mask shows it. A bias
    of -inf hides its element as the mask does; what a hidden element holds changes nothing and has gradient 0. Rows, keys and
    batch entries are those of each sequence (of a packed call, its number is the batch entry), and d = p - j + ``bias_origin``,
    where p = i + seqlen_k - seqlen_q with the sequence's own lengths, or p = r with ``q_offset``. By ``bias_kind``:

    - "tensor": any float dtype and any strides, (batch|1, heads_q|1, rows|1, keys|1). Of dense calls rows are seqlen_q and keys
      seqlen_k; of packed ones at least max_seqlen_q and max_seqlen_k; with ``q_offset`` those of the whole, read at r. A
      dimension of 1 is read with a stride of 0; an index beyond rows or keys, which wrong contents alone can bring, is clamped
      or reads 0.
    - "alibi": slopes, contiguous fp32 (batch|1, heads_q): the bias is -slope · |d|.
    - "distance": a table, contiguous fp32 (heads_q, entries), read at clamp(d, 0, entries - 1); entries is at least 1.

    For fp64 inputs slopes and tables are fp64. With ``bias_grad`` a backward pass returns a fifth gradient, of the shape and
    dtype of ``bias``: the sum over all that was read from an element, of dscores before softcap and scale. Without, it returns
    four, and no work is done for a bias.

    With ``batch_invariant`` the bits of a sequence's out and lse depend on nothing but its own queries and keys, the model's
    shapes and the call's options: not on the batch, its other sequences, its longest lengths, nor on where its tokens lie.
    ``deterministic`` is true then.

    ``documents``, int32 (documents + 1,), is what a dense call's mask says besides: it hides nothing but other documents, which
    lie in a row, and what the band hides. They start there, within the call's one batch entry, as cu_seqlens has them; tokens
    past the last one are none's. Whoever does not make use of it has the same in the vectors.

    ``k`` and ``v`` of a paged call may be float8_e4m3fn, with ``k_scale`` and ``v_scale``, float32 (1,), (heads_kv,) or a token
    and head, (pages, page_size, heads_kv): what their numbers are multiplied by. q has another dtype then, is rotated as k is,
    and nothing has a gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lts: Tensor | None
    lte: Tensor | None
    uts: Tensor | None
    ute: Tensor | None
    bounds: Tensor | None
    sink: Tensor | None
    dropout_seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str
    q_offset: Tensor | None = None
    q_chunks: int = 1
    bias: Tensor | None = None
    bias_kind: str = ""
    bias_origin: int = 0
    bias_grad: bool = False
    batch_invariant: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    documents: Tensor | None = None

    @property
    def mask(self) -> ResolvedMask:
        return ResolvedMask(self.left, self.right, self.lts, self.lte, self.uts, self.ute)

    @property
    def launched(self) -> tuple[str, ...]:
        """Names of the tensors that launchers take, in their order: of a call without a bias, whose pages are not of FP8."""
        found: tuple[str, ...] = _ALWAYS
        if self.cu_seqlens_q is not None:
            found = (*found, *_SEQUENCES)
        if self.block_table is not None:
            found = (*found, "block_table")
        if self.lts is not None or self.ute is not None:
            found = (*found, *_COLUMNS)
        if self.documents is not None:
            found = (*found, "documents")
        return (*found, "dropout_seed") if self.dropout_p else found

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of ``launched``."""
        return tuple([getattr(self, name) for name in self.launched])


class Kind:
    """All of a call but its tensors, of which it keeps none alive."""

    def __init__(self, args: AttentionArgs) -> None:
        self._names = args.launched
        self._fields: dict[str, Any] = args._asdict() | dict.fromkeys(self._names)

    def call(self, *tensors: Tensor | None) -> AttentionArgs:
        """The call with these tensors, which launchers take."""
        return AttentionArgs(**self._fields | dict(zip(self._names, tensors, strict=True)))


@dataclass(frozen=True)
class AttentionProblem:
    """Everything dispatch may look at: shapes, dtypes and features, never tensor contents."""

    device: str
    dtype: torch.dtype
    layout: str  # "dense", "varlen" or "paged"
    batch: int
    seqlen_q: int  # the longest, for packed calls
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    left: int | None = None
    right: int | None = None
    columns: tuple[str, ...] = ()  # which of lts, lte, uts, ute are present
    softcap: bool = False
    sink: bool = False
    dropout: bool = False
    deterministic: bool = False
    backward: bool = False
    seqused: bool = False  # a packed sequence's keys may end early
    q_offset: bool = False  # queries are chunks of longer sequences
    bias: str = ""  # its kind: "tensor", "alibi", "distance"
    bias_grad: bool = False  # which has a gradient
    batch_invariant: bool = False
    fp8_pages: bool = False  # k and v are e4m3 with scales
    documents: bool = False  # the column mask is of documents in a row, which say where they start
    page_box: int = 0  # of a call over pages, as ``page_box`` has it
    mean_q: int = 0  # and how many queries its sequences have on average, rounded up

    @classmethod
    def from_args(cls, args: AttentionArgs, backward: bool) -> AttentionProblem:
        q, k, v = args.q, args.k, args.v
        if args.cu_seqlens_q is None:
            layout, batch, seqlen_q, seqlen_k = "dense", q.shape[0], q.shape[1], k.shape[1]
        else:
            layout = "varlen" if args.block_table is None else "paged"
            batch = args.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = args.max_seqlen_q or 0, args.max_seqlen_k or 0
        columns = tuple([name for name in ("lts", "lte", "uts", "ute") if getattr(args, name) is not None])
        return cls(
            device=q.device.type,
            dtype=q.dtype,
            layout=layout,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=q.shape[-2],
            heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            left=args.left,
            right=args.right,
            columns=columns,
            softcap=args.softcap != 0.0,
            sink=args.sink is not None,
            dropout=args.dropout_p > 0.0,
            deterministic=args.deterministic,
            backward=backward,
            seqused=args.seqused_k is not None,
            q_offset=args.q_offset is not None,
            bias=args.bias_kind,
            bias_grad=args.bias_grad,
            batch_invariant=args.batch_invariant,
            fp8_pages=args.k_scale is not None,
            documents=args.documents is not None,
            page_box=page_box(args),
            mean_q=mean_queries(args),
        )

    def describe(self) -> str:
        """One line in the words of a user."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        parts = [
            f"{self.layout} {str(self.dtype).removeprefix('torch.')} on {self.device}",
            f"batch {self.batch}, seqlen {self.seqlen_q}×{self.seqlen_k}, "
            f"heads {self.heads_q}/{self.heads_kv}, head_dim {dims}",
            band_words(self.left, self.right),
        ]
        if self.columns:
            parts.append(f"column mask ({', '.join(self.columns)})")
        parts += [name for name in ("softcap", "sink", "dropout", "deterministic") if getattr(self, name)]
        if self.bias:
            kind = {"alibi": "ALiBi", "distance": "Relative"}.get(self.bias, self.bias)
            parts.append(f"bias ({kind}{', with a gradient' if self.bias_grad else ''})")
        if self.fp8_pages:
            parts.append("pages in FP8")
        if self.q_offset:
            parts.append("queries are chunks")
        if self.batch_invariant:
            parts.append("batch-invariant")
        parts.append("forward + backward" if self.backward else "forward")
        return "; ".join(parts)


# Keys that a copy may bring of a page: the most first.
BOXES = (128, 64, 32, 16, 8, 4, 2)


def page_box(args: AttentionArgs) -> int:
    """As ``largest_box``, of the pages of a call; 0 without pages."""
    return 0 if args.block_table is None else largest_box(args.k.shape[1], args.block_table.shape[1])


def mean_queries(args: AttentionArgs) -> int:
    """Queries of a sequence of a call over pages on average, rounded up; 0 without pages."""
    if args.block_table is None or args.cu_seqlens_q is None:
        return 0
    sequences = args.cu_seqlens_q.shape[0] - 1
    return -(-args.q.shape[0] // sequences) if sequences else 0


def largest_box(page_size: int, pages: int) -> int:
    """The largest of BOXES, or 1, of which pages are whole multiples; ``pages``: how many a sequence may have.

    Where that is one, of whatever size, nothing follows its end: the largest.
    """
    if pages == 1:
        return BOXES[0]
    for box in BOXES:
        if page_size % box == 0:  # a branch, which a tracer of symbolic sizes decides
            return box
    return 1


def band_words(left: int | None, right: int | None) -> str:
    """The band as a user would name it."""
    if left is None and right is None:
        return "no band"
    if left is None and right == 0:
        return "causal"
    return f"window (left {'∞' if left is None else left}, right {'∞' if right is None else right})"


def halves_refusal(problem: AttentionProblem, widest: int) -> str | None:
    """Why kernels of 16-bit tensors and head dims up to ``widest``, compiled for CUDA devices, do not take a problem."""
    if problem.device != "cuda":
        return f"runs on CUDA tensors, not on {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 or bfloat16, not {problem.dtype}"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not 8 <= dim <= widest or dim % 8:
            return f"takes {name} from 8 to {widest} in steps of 8, not {dim}"
    return None


def check_columns(mask: ResolvedMask, batch: int, heads_q: int, heads_kv: int, seqlen_k: int, q: Tensor) -> None:
    """Shapes of the column vectors against the call."""
    for name in ("lts", "lte", "uts", "ute"):
        vector = getattr(mask, name)
        if vector is None:
            continue
        b, h, s = vector.shape
        if s != seqlen_k:
            raise ValueError(f"mask has {s} columns ({name}) but k has seqlen {seqlen_k}")
        if b not in (1, batch):
            raise ValueError(f"mask has batch {b} ({name}); it must be 1 or the batch of q, {batch}")
        if h not in (1, heads_kv, heads_q):
            raise ValueError(f"mask has {h} heads ({name}); it must be 1, {heads_kv} (of k) or {heads_q} (of q)")
        if vector.device != q.device:
            raise ValueError(f"mask is on {vector.device} but q is on {q.device}; use mask.to(q.device)")


def check_contents(args: AttentionArgs) -> None:
    """Values of index tensors, where looking costs nothing (CPU) or was asked for (WARPLOOM_CHECK=1)."""
    q = args.q
    if not arguments.readable(q):
        return
    if args.cu_seqlens_q is not None:
        check_starts("cu_seqlens_q", args.cu_seqlens_q, q.shape[0], args.max_seqlen_q)
    if args.cu_seqlens_k is not None and args.block_table is None:
        check_starts("cu_seqlens_k", args.cu_seqlens_k, args.k.shape[0], args.max_seqlen_k)
    if args.q_offset is not None and args.q_offset.numel():
        low, high = args.q_offset.aminmax()
        if int(low) < 0 or int(high) > MOST_OFFSET:
            raise ValueError(f"q_offset must be from 0 to {MOST_OFFSET}, got {int(low if int(low) < 0 else high)}")
    if args.seqused_k is not None and args.seqused_k.numel() and int(args.seqused_k.min()) < 0:
        raise ValueError(f"seqused_k must not be negative, got {int(args.seqused_k.min())}")
    if args.seqused_k is not None and args.block_table is None:
        cu_k = args.cu_seqlens_q if args.cu_seqlens_k is None else args.cu_seqlens_k
        assert cu_k is not None
        beyond = args.seqused_k > cu_k.diff()
        if bool(beyond.any()):
            n = int(beyond.nonzero()[0])
            raise ValueError(f"seqused_k[{n}] is {int(args.seqused_k[n])}, but sequence {n} has {int(cu_k.diff()[n])} keys")
    if args.block_table is not None:
        assert args.seqused_k is not None
        pages, page_size = args.k.shape[:2]
        capacity = args.block_table.shape[1] * page_size
        if args.seqused_k.numel() and int(args.seqused_k.max()) > capacity:
            raise ValueError(
                f"seqused_k reaches {int(args.seqused_k.max())} but block_table holds "
                f"{args.block_table.shape[1]} pages of {page_size} a sequence, {capacity} keys"
            )
        used = torch.arange(args.block_table.shape[1], device=q.device) * page_size < args.seqused_k[:, None]
        bad = used & ((args.block_table < 0) | (args.block_table >= pages))
        if bool(bad.any()):
            row, col = bad.nonzero()[0].tolist()
            raise ValueError(f"block_table[{row}, {col}] is {int(args.block_table[row, col])}, outside the {pages} pages of k")
