"""Other implementations of attention, each by a function of q, k, v as ours take them; what is not here says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from warploom.bench.harness import Call, first_line

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

Masked = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # with a mask as SDPA takes it

SDPA = {"cuDNN": "CUDNN_ATTENTION", "FA2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, heads, seqlen, head_dim), as torch takes them."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class NotHere(Exception):
    """A peer that this machine or call lacks; the message says why."""


def add_peer(calls: dict[str, Call], refused: dict[str, str], name: str, make: Callable[[], Call]) -> None:
    """A peer's call, or why there is none."""
    try:
        calls[name] = make()
    except NotHere as why:
        refused[name] = str(why)
    except Exception as error:  # a peer may fail in any way
        refused[name] = first_line(error)


def sdpa(backend: str, causal: bool, mask: Any = None) -> Attention:
    """torch's scaled_dot_product_attention held to one of its kernels, with a mask as it takes them."""
    attend = sdpa_of(backend, causal)
    return lambda q, k, v: attend(q, k, v, mask)


def sdpa_of(backend: str | None, causal: bool = False) -> Masked:
    """As `sdpa`, of a mask that each call brings; None leaves the choice of the kernel to torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = None if backend is None else getattr(SDPBackend, SDPA[backend])

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        a, b, c = heads_first(q, k, v)
        with nullcontext() if kind is None else sdpa_kernel(kind):
            options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}
            return torch.nn.functional.scaled_dot_product_attention(a, b, c, **options).transpose(1, 2)

    return attend


def flex(block_mask: Any, options: dict[str, Any] | None = None) -> Attention:
    """FlexAttention, compiled for each shape and each code of a mask_mod."""
    compiled = _compiled_flex()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[2] != k.shape[2]
        out: Tensor = compiled(*heads_first(q, k, v), block_mask=block_mask, enable_gqa=shared, kernel_options=options)
        return out.transpose(1, 2)

    return attend


def flex_biased() -> Masked:
    """FlexAttention with a tensor (1, heads, seqlen, seqlen) added to the scores, which its score_mod reads."""
    compiled = _compiled_flex()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
        def add(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + bias[0, h, i, j]

        out: Tensor = compiled(*heads_first(q, k, v), score_mod=add).transpose(1, 2)
        return out

    return attend


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(flex_attention, dynamic=False)


def flex_block_mask(mask_mod: Callable[..., Tensor], seqlen: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, None, None, seqlen, seqlen, device=str(device))


def flash_attention_4(
    causal: bool, window: tuple[int, int] | None = None, cu_seqlens: Tensor | None = None, longest: int | None = None
) -> Attention:
    """FlashAttention-4 where flash_attn.cute is importable; of packed sequences with ``cu_seqlens``."""
    try:
        found = find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotHere("flash_attn.cute is not installed")
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": causal} if window is None else {"window_size": window}
    packed = {f"cu_seqlens_{side}": cu_seqlens for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if cu_seqlens is None:
            out = flash_attn_func(q, k, v, **options)
        else:
            out = flash_attn_varlen_func(q, k, v, **packed, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


def fla(family: str, name: str) -> Callable[..., Any]:
    """A function of flash-linear-attention's `fla.ops.<family>`."""
    try:
        return getattr(import_module(f"fla.ops.{family}"), name)
    except Exception as error:  # its imports fail in many ways where a version does not match
        if isinstance(error, ModuleNotFoundError) and error.name in ("fla", "fla.ops"):
            raise NotHere("flash-linear-attention is not installed") from None
        raise NotHere(f"flash-linear-attention cannot be imported: {first_line(error)}") from error


def cudnn_flex_plan(intervals: Tensor, q: Tensor, k: Tensor, v: Tensor, backward: bool = True) -> Any:
    """The plan that `cudnn.flex_attention` makes of a mask's row intervals before the first call; waits for the device.

    Args:
        intervals: `warploom.bench.intervals.row_intervals` of the mask.
        backward: with what gradients need.
    """
    return _cudnn_flex().create_mask_plan(intervals, q, k, v, build_backward=backward)


def cudnn_flex(plan: Any) -> Attention:
    """cuDNN's FlexAttention in the CuTe DSL (nvidia-cudnn-frontend 1.32), for calls of the shapes its plan was made for."""
    attend = _cudnn_flex().flex_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, mask_plan=plan)
        return out

    return call


def _cudnn_flex() -> Any:
    try:
        from cudnn import flex_attention
    except Exception as error:  # absent, or without what it needs: libcudnn, the CuTe DSL, a GPU it knows
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotHere(f"cudnn.flex_attention does not import here (pip install nvidia-cudnn-frontend): {words}") from None
    return flex_attention
