"""FP8 inputs of a call: checked, then run by a kernel that multiplies e4m3 numbers, or dequantised where none takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.attention.ops import fp8_op
from warploom.attention.problem import AttentionArgs
from warploom.bias import Bias
from warploom.fp8 import ACCUMULATES, BLOCK, Fp8Tensor, refuse_gradients
from warploom.kernels.e4m3 import E4M3
from warploom.runtime import arguments, dispatch

NAMES = ("q", "k", "v")
KERNEL, DEVICE = "hopper", "cuda"  # the implementation that has a kernel, and what it runs on


class Fp8Call(NamedTuple):
    """The checked FP8 inputs of a call."""

    given: tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]
    out_dtype: torch.dtype
    wide: torch.dtype  # what numbers become where no kernel multiplies them

    def stand_ins(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors of q's, k's and v's shapes that hold a head_dim each, for who looks at no numbers."""
        q, k, v = [
            torch.empty(data.shape[-1:], dtype=self.wide, device=data.device).expand(data.shape)
            for data in [t.data for t in self.given]
        ]
        return q, k, v

    def as_numbers(self, args: AttentionArgs) -> AttentionArgs:
        """The validated call of ``stand_ins`` over the numbers that these stand for."""
        q, k, v = [t.dequantize(self.wide).to(args.q.dtype) for t in self.given]
        return args._replace(q=q, k=k, v=v)

    def as_e4m3(self, args: AttentionArgs) -> AttentionArgs:
        """The same over the numbers as they are, as kernels take them, besides ``scales``."""
        q, k, v = [t.data for t in self.given]
        return args._replace(q=q, k=k, v=v)

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = [t.scale for t in self.given]
        return q, k, v

    @property
    def fast(self) -> bool:
        """Whether tensor cores alone sum P V."""
        return self.given[2].accumulate == "fast"

    def refusal(self, args: AttentionArgs, backend: str | None, stats: bool) -> str | None:
        """Why no kernel multiplies the numbers of a validated call, or None; ``stats``: whether it asks for any."""
        data = self.given[0].data
        if data.device.type != DEVICE or backend not in (None, KERNEL):
            return "no kernel multiplies it"
        if stats:
            return "stats are computed of other numbers"
        if not torch.compiler.is_compiling() and type(data) is not Tensor:
            return "a subclass of torch.Tensor is to see every operation"
        refused: str | None = dispatch.find(KERNEL).fp8_refusal(self.as_e4m3(args), self.out_dtype, self.fast)  # type: ignore[attr-defined]
        return None if refused is None else f"{KERNEL} {refused}"

    def run(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out and lse of a validated call that is not refused."""
        found: tuple[Tensor, Tensor] = fp8_op(
            *self.as_e4m3(args)._replace(backend=KERNEL), *self.scales, self.out_dtype, self.fast
        )
        return found

    def warm(self, args: AttentionArgs) -> None:
        """Make ready what ``run`` of the call over e4m3 runs."""
        dispatch.find(KERNEL).warm_fp8(args, self.out_dtype, self.fast)  # type: ignore[attr-defined]

    def words(self, refused: str | None, args: AttentionArgs) -> str:
        """What happens to the numbers of a validated call, for explain()."""
        scales = ["block" if t.scale.ndim > 1 else "tensor" if t.scale.shape == (1,) else "head" for t in self.given]
        scale = scales[0] if len(set(scales)) == 1 else ", ".join(scales)
        seed = self.given[0].hadamard_seed
        rotated = "" if seed is None else f", q and k rotated by seed {seed}"
        if refused is None:
            summed = "PV of all keys summed by tensor cores (fast)" if self.fast else "each key tile's PV added in float32"
            module = dispatch.find(KERNEL).describe_fp8(args, self.out_dtype, self.fast)  # type: ignore[attr-defined]
            return f"{module}; FP8 as it is, {summed}: scales by {scale}{rotated}"
        kind = str(self.wide).removeprefix("torch.")
        return f"FP8 is dequantised to {kind} first, as {refused}: scales by {scale}{rotated}"


def checked(
    q: Any,
    k: Any,
    v: Any,
    descale: Any,
    out_dtype: Any,
    backend: Any,
    others: dict[str, Any],
    cu_seqlens: tuple[Any, Any] | None = None,
    paged: bool = False,
) -> Fp8Call:
    """The inputs of a call whose tensors are FP8 or that has a keyword of FP8.

    Args:
        q, k, v: what quantize() returned, or float8_e4m3fn tensors with ``descale``, their three scales.
        out_dtype: of the result; None: that of the q that was quantised, bfloat16 with ``descale``.
        backend: the caller's.
        others: the call's sink and bias, by name, which may not ask for a gradient.
        cu_seqlens: of a packed call, cu_seqlens_q and cu_seqlens_k.
        paged: whether k and v lie in pages.
    """
    if out_dtype is not None:
        out_dtype = arguments.float_dtype("out_dtype", out_dtype)
    given = _of_descale(q, k, v, descale, cu_seqlens) if descale is not None else _of_quantize(q, k, v, out_dtype)
    if paged:
        raise ValueError(
            "block_table with FP8 inputs is not supported: give the PagedKVCache of FP8 pages in place of k, and q in floats"
        )
    rank, layout = (4, "(batch, seqlen, heads, head_dim)") if cu_seqlens is None else (3, "(total_tokens, heads, head_dim)")
    for name, t in zip(NAMES, given, strict=True):
        if t.data.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(t.data.shape)}")
        _check_scale(name, t, descale is not None)
    if given[2].accumulate not in ACCUMULATES:
        raise ValueError(f"v.accumulate must be one of 'fp32', 'fast', got {given[2].accumulate!r}")
    if cu_seqlens is not None and descale is None:
        _check_starts(given, *cu_seqlens)
    seeds = [t.hadamard_seed for t in given]
    if seeds[0] != seeds[1]:
        words = ["is not rotated" if seed is None else f"is rotated by seed {seed}" for seed in seeds]
        raise ValueError(f"q {words[0]} and k {words[1]}, which changes their products: quantize both in one call")
    tensors: dict[str, Tensor] = {}
    for name, t in zip(NAMES, given, strict=True):
        tensors |= {name: t.data, f"the scale of {name}": t.scale}
    for name, value in others.items():
        for each in value.tensors() if isinstance(value, Bias) else [value]:
            if isinstance(each, Tensor) and each.requires_grad:
                tensors[name] = each
    refuse_gradients(**tensors)

    out = given[0].dtype if out_dtype is None else out_dtype
    return Fp8Call(given, out, computed_in(given[0].data.device.type, backend, out))


def computed_in(device: str, backend: Any, out: torch.dtype) -> torch.dtype:
    """What FP8 inputs become: float32, or what a GPU's tensor cores are fast in.

    Not float16 for a float16 result: a rotation may bring √head_dim times the largest number together.
    """
    wide = device == "cpu" or backend == "reference" or out in (torch.float32, torch.float64)
    return torch.float32 if wide else torch.bfloat16


def _of_quantize(q: Any, k: Any, v: Any, out_dtype: Any) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    given = dict(zip(NAMES, (q, k, v), strict=True))
    if any(isinstance(t, Fp8Tensor) for t in given.values()):
        for name, t in given.items():
            if not isinstance(t, Fp8Tensor):
                raise TypeError(f"{name} must be an Fp8Tensor as the others, got {arguments.describe(t)}: quantize all three")
            if not isinstance(t.data, Tensor) or t.data.dtype != E4M3:
                raise TypeError(f"{name}.data must be a torch.float8_e4m3fn tensor, got {arguments.describe(t.data)}")
        return q, k, v
    for name, t in given.items():
        if arguments.strided(name, t).dtype == E4M3:
            raise TypeError(f"{name} has dtype {E4M3}: give descale=, the scales of q, k and v, or what quantize() returns")
    raise TypeError(f"out_dtype={out_dtype} goes with FP8 inputs; q has dtype {q.dtype}, which is out's too")


def _of_descale(q: Any, k: Any, v: Any, descale: Any, cu_seqlens: Any) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    if not isinstance(descale, (tuple, list)) or len(descale) != 3:
        raise TypeError(f"descale must be three float32 tensors, the scales of q, k and v, got {arguments.describe(descale)}")
    for name, t in zip(NAMES, (q, k, v), strict=True):
        if isinstance(t, Fp8Tensor):
            raise TypeError(f"descale goes with plain {E4M3} tensors, and {name} is an Fp8Tensor, which has its scales")
        if arguments.strided(name, t).dtype != E4M3:
            raise TypeError(f"descale goes with {E4M3} tensors, and {name} has dtype {t.dtype}")
    starts = [None, None]
    if cu_seqlens is not None:
        of_q = arguments.int32("cu_seqlens_q", cu_seqlens[0], 1, q)
        of_k = arguments.int32("cu_seqlens_k", cu_seqlens[1], 1, k)
        starts = [of_q, of_q if of_k is None else of_k]
    found = []
    for t, scale, cu in zip((q, k, v), descale, (starts[0], starts[1], starts[1]), strict=True):
        found.append(Fp8Tensor(t, scale, cu if isinstance(scale, Tensor) and scale.ndim > 1 else None))
    return found[0], found[1], found[2]


def _check_scale(name: str, t: Fp8Tensor, of_descale: bool) -> None:
    what = f"descale of {name}" if of_descale else f"{name}.scale"
    if not isinstance(t.scale, Tensor) or t.scale.dtype != torch.float32:
        raise TypeError(f"{what} must be a float32 tensor, got {arguments.describe(t.scale)}")
    arguments.strided(what, t.scale)
    heads = t.data.shape[-2]
    if t.data.ndim == 4:
        blocks: tuple[int, ...] = (t.data.shape[0], -(-t.data.shape[1] // BLOCK), heads)
    elif t.cu_seqlens is not None:
        blocks = (t.data.shape[0] // BLOCK + max(t.cu_seqlens.shape[0] - 1, 1), heads)
    else:
        blocks = ()
    if tuple(t.scale.shape) not in ((1,), (heads,), blocks):
        by_block = f", or that of a scale a block of {BLOCK} rows and head, {blocks}" if blocks else ""
        raise ValueError(f"{what} must have shape (1,) or (heads,) = ({heads},){by_block}, got {tuple(t.scale.shape)}")
    if t.scale.device != t.data.device:
        raise ValueError(f"{what} is on {t.scale.device} but {name} is on {t.data.device}")


def _check_starts(given: tuple[Fp8Tensor, ...], cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """Blocks begin with each sequence: sequences of the call must be those of quantize()."""
    calls = (("cu_seqlens_q", cu_seqlens_q),) + (("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k),) * 2
    for name, t, (which, cu) in zip(NAMES, given, calls, strict=True):
        if t.cu_seqlens is None or not isinstance(cu, Tensor):
            continue
        same = cu.shape == t.cu_seqlens.shape
        if same and arguments.readable(cu) and arguments.readable(t.cu_seqlens):
            same = cu.device == t.cu_seqlens.device and bool((cu == t.cu_seqlens).all())
        if not same:
            raise ValueError(f"{which} differs from the one that {name} was quantised with, whose blocks begin there")
