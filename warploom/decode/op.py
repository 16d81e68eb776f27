"""The torch.library boundary of decode: what compilers see in place of the kernels and of the cache's append."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.decode.problem import DecodeArgs
from warploom.runtime import dispatch

_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? block_table, Tensor? sink, SymInt? left, SymInt right, "
    "float scale, float softcap, str backend) -> (Tensor, Tensor)"
)
_library.define(
    "decode_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) lengths, Tensor? block_table, Tensor? slot_mapping, "
    "Tensor k, Tensor v, bool advance) -> ()"
)


def is_empty(args: DecodeArgs) -> bool:
    """Whether there is no query or no key: no implementation sees such a call."""
    return args.q.numel() == 0 or args.capacity == 0 or args.k.shape[0] == 0


def run(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, head_dim_v) and lse, fp32 (batch, heads_q, T), of validated arguments."""
    if is_empty(args):
        out, lse = _results(args)
        lse.fill_(float("-inf"))
        if args.sink is not None:
            lse.copy_(args.sink[:, None].expand_as(lse))
        return out.zero_(), lse
    module = dispatch.find(args.backend, "decode").module
    if torch.is_autocast_enabled(args.q.device.type):
        # The call's dtypes are settled; an implementation's own fp32 products are not autocast's to change.
        with torch.autocast(args.q.device.type, enabled=False):
            out, lse = module.forward(args)
    else:
        out, lse = module.forward(args)
    return out, lse.float()


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    k: Tensor,
    v: Tensor,
    advance: bool,
) -> None:
    """Write validated new keys and values behind each sequence's length; ``advance`` adds them to the lengths."""
    if k.shape[0] == 0 or k.shape[1] == 0:
        return
    if k.is_cuda and k.numel() and _triton() is not None:
        _triton().append(k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance)
    else:
        from warploom.decode.append import append as torch_append

        torch_append(k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance)


def _results(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    batch, queries, heads_q, _ = args.q.shape
    out = args.q.new_empty((batch, queries, heads_q, args.v.shape[-1]))
    return out, args.q.new_empty((batch, heads_q, queries), dtype=torch.float32)


def _triton() -> Any:
    from warploom.decode import triton

    return triton if triton.available() is None else None


for _key in ("CPU", "CUDA"):
    _library.impl("decode", lambda *flat: run(DecodeArgs(*flat)), _key)
    _library.impl("decode_append", append, _key)
torch.library.register_fake("warploom::decode", lambda *flat: _results(DecodeArgs(*flat)), lib=_library)
torch.library.register_fake("warploom::decode_append", lambda *flat: None, lib=_library)

decode_op = torch.ops.warploom.decode.default
append_op = torch.ops.warploom.decode_append.default


def needs_op(t: Tensor) -> bool:
    """Whether something watches torch's ops (a compiler, a dispatch mode, a tensor subclass): the call must be one.

    Otherwise decode, which has no autograd, calls the implementation straight: a step of a small model is bound by the
    host, and the dispatcher costs as much as a launch.
    """
    return (
        torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0
    )
