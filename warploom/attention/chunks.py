"""Calls on chunks of longer query sequences, all keys given: for chunked prefill and context parallel, not public."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention import registry  # noqa: F401  (it fills the dispatch list)
from warploom.attention.arguments import dense_args, resolve
from warploom.attention.biases import with_bias
from warploom.attention.ops import attention_op
from warploom.attention.problem import MOST_OFFSET, AttentionArgs, AttentionProblem, check_columns, check_contents
from warploom.bias import Bias
from warploom.masks import Mask
from warploom.runtime import arguments, dispatch
from warploom.runtime.arguments import Window


def chunk_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offset: Tensor,
    *,
    seqlen_q: int,
    chunks: int = 1,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | Bias | None = None,
    **others: Any,
) -> AttentionArgs:
    """The arguments of `attention_chunks`."""
    args = dense_args(q, k, v, **others)
    (batch, _, heads_q, _), (_, seqlen_k, heads_kv, _) = args.q.shape, args.k.shape
    seqlen_q = arguments.integer("seqlen_q", seqlen_q, minimum=0, maximum=MOST_OFFSET)
    chunks = arguments.integer("chunks", chunks, minimum=1)
    if batch % chunks:
        raise ValueError(f"chunks must divide the batch of q, {batch}, got {chunks}")
    if q_offset is None:
        raise TypeError("q_offset must be an int32 tensor of as many entries as q has batch, got None")
    q_offset = arguments.int32("q_offset", q_offset, 1, args.q)
    if q_offset.shape[0] != batch:
        raise ValueError(f"q_offset has {q_offset.shape[0]} entries but q has batch {batch}")
    whole = resolve(mask, causal, window, seqlen_q, seqlen_k, args.q)
    check_columns(whole, batch, heads_q, heads_kv, seqlen_k, args.q)
    shift = seqlen_k - seqlen_q
    args = args._replace(
        lts=whole.lts,
        lte=whole.lte,
        uts=whole.uts,
        ute=whole.ute,
        left=None if whole.left is None else arguments.near(whole.left - shift),
        right=None if whole.right is None else arguments.near(whole.right + shift),
        q_offset=q_offset,
        q_chunks=chunks,
    )
    check_contents(args)
    args = with_bias(args, bias, seqlen_q, seqlen_k)
    return args if args.bias_kind in ("", "tensor") else args._replace(bias_origin=args.bias_origin + shift)


def attention_chunks(
    q: Tensor, k: Tensor, v: Tensor, q_offset: Tensor, *, seqlen_q: int, backend: str | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Of each batch entry some rows of attention(Q, k, v, …), where Q has ``seqlen_q`` rows: out and lse, differentiable.

    Chunks of one sequence may be neighbours in the batch; k and v are expanded to it then, by strides of 0.

    Args:
        q: (batch, rows, heads_q, head_dim): rows q_offset[b] … q_offset[b] + rows - 1 of entry b's sequence. Rows past
            ``seqlen_q`` are computed as if the sequence went on.
        k, v: (batch, seqlen_k, heads_kv, ·), of the whole sequence.
        q_offset: int32 (batch,) on q's device, from 0 on; its contents are read on the device alone.
        seqlen_q: rows of Q, which masks are resolved for and aligned by.
        backend: as attention()'s.
        keywords: ``chunks``, how many entries in a row a sequence has, for dropout's elements; mask, causal, window, scale,
            softcap, sink, dropout_p, dropout_seed, deterministic and bias as attention() takes them for Q. A mask or bias of
            ``batch`` entries has one for each of q's.

    Returns:
        out (batch, rows, heads_q, head_dim_v) in q's dtype, lse (batch, heads_q, rows) in float32.

    Raises:
        TypeError, ValueError: before any work, as attention() does.
    """
    args = chunk_args(q, k, v, q_offset, seqlen_q=seqlen_q, **keywords)
    tensors = (args.q, args.k, args.v, args.sink, args.bias)
    backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    chosen = dispatch.choose(AttentionProblem.from_args(args, backward), backend)
    implementation = dispatch.find(chosen)
    if implementation.eager:
        out, lse = implementation.forward(args)
        return out, lse.float()
    result: tuple[Tensor, Tensor] = attention_op(*implementation.prepare(args)._replace(backend=chosen))
    return result
