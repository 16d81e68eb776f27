"""What kept launchers of linear attention and the gated delta rule launch on a GPU that is pretended, and in how many calls.

A process of its own runs it: `python -m tests.runtime.host_counts`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import warploom
from tests.attention.host_counts import calls_of, launched
from tools.frozen.pretend import Recorder, hopper
from warploom.decode.triton import launch as decode_launch
from warploom.delta import api as delta_api
from warploom.kernels.e4m3 import E4M3
from warploom.linear import api as linear_api

BATCH, TOKENS, HEADS, DIM = 2, 64, 4, 64
Call = Callable[[], Any]

# Calls that lines of the package make from the third call of a kind on; in brackets what they were when every call was checked
# and planned anew.
MOST_CALLS = {
    "delta": 39,  # (346)
    "delta, with a state": 40,  # (357)
    "delta, packed": 41,  # (369)
    "delta, recorded": 56,  # (391)
    "delta, both passes": 122,  # (936)
    "delta on Hopper": 22,  # (106)
    "delta on Hopper, packed": 27,  # (126)
    "delta on Hopper, both passes": 101,
    "delta step": 30,  # (270)
    "delta step in place": 31,  # (268)
    "linear": 38,  # (296)
    "linear, decay": 40,  # (323)
    "linear, with a state": 42,  # (322)
    "linear, packed": 42,  # (337)
    "linear, recorded": 55,  # (349)
    "linear, both passes": 118,  # (604)
    "linear, both passes, decay": 138,  # (681)
    "linear on Hopper": 23,
    "linear on Hopper, decay": 23,
    "linear on Hopper, both passes": 95,
    "linear step": 34,  # (252)
    "linear step, decay": 34,  # (271)
    "decode": 30,
    "decode, a prefix": 37,  # (149); a launch more than without: what is shared
    "decode, a number of keys": 34,  # (149)
    "decode, FP8": 38,  # (210)
    "decode, FP8, not rotated": 32,  # (168)
    "decode, FP8, a prefix": 45,
    "append": 76,
}
BACKWARD = ["back_kernel", "dq_kernel", "dk_kernel"]
LAUNCHED = {
    "delta": ["prepare_kernel", "walk_kernel"],
    "delta, both passes": ["prepare_kernel", "walk_kernel", "prepare_kernel", "walk_kernel", *BACKWARD],
    "delta on Hopper": ["delta_forward"],
    "delta on Hopper, both passes": [f"delta_{n}" for n in ("forward", "prepare", "keep", "back", "gradients")],
    "delta step": ["step_kernel"],
    "linear": ["forward_kernel"],
    "linear, both passes": ["forward_kernel", "dq_kernel", "dkdv_kernel"],
    "linear on Hopper": ["linear_walk"],
    "linear on Hopper, decay": ["linear_walk"],
    "linear on Hopper, both passes": ["linear_walk"] * 4,
    "linear step": ["step_kernel"],
    "decode, FP8": ["_rotate_kernel", "split_kernel"],
    "decode, FP8, not rotated": ["split_kernel"],
    "decode, FP8, a prefix": ["_rotate_kernel", "share_kernel", "split_kernel", "merge_kernel"],
}


def cases() -> dict[str, Call]:
    """Calls without gradients unless their names say so."""
    q, k, v = (torch.randn(BATCH, TOKENS, HEADS, DIM).bfloat16() for _ in range(3))
    beta, decay = torch.rand(BATCH, TOKENS, HEADS), -torch.rand(BATCH, TOKENS, HEADS)
    s, z = torch.zeros(BATCH, HEADS, DIM, DIM), torch.zeros(BATCH, HEADS, DIM)
    rows, (one_beta, one_decay) = [t[:, 0].contiguous() for t in (q, k, v)], (t[:, 0].contiguous() for t in (beta, decay))
    packed, starts = [t.flatten(0, 1) for t in (q, k, v)], torch.tensor([0, 40, BATCH * TOKENS], dtype=torch.int32)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    beside = [t.clone().requires_grad_() for t in (beta, decay)]
    upstream = torch.ones_like(v)
    cache = warploom.KVCache.allocate(BATCH, 256, HEADS, DIM, device="cuda")
    pages = warploom.PagedKVCache.allocate(BATCH, 2048, HEADS, DIM, device="cuda")
    prefix = pages.shared_prefix()
    sizes: dict[str, Any] = {"dtype": E4M3, "device": "cuda"}
    fp8 = warploom.KVCache.allocate(BATCH, 256, HEADS, DIM, **sizes)
    straight = warploom.KVCache.allocate(BATCH, 256, HEADS, DIM, granularity="head", hadamard_seed=None, **sizes)
    fp8_pages = warploom.PagedKVCache.allocate(BATCH, 2048, HEADS, DIM, **sizes)
    token = [t.unsqueeze(1) for t in rows]
    wide, *others = (torch.empty(BATCH, TOKENS, 16, 128, dtype=torch.bfloat16) for _ in range(3))
    wide_decay = torch.empty(wide.shape[:3])
    wide_leaves = [torch.empty_like(wide).requires_grad_() for _ in range(3)]
    numerator: dict[str, Any] = {"feature_map": "identity", "normalize": False}
    delta, linear = partial(warploom.gated_delta_rule, backend="triton"), warploom.linear_attention
    first = warploom.gated_delta_rule
    delta_step, linear_step = warploom.gated_delta_step, warploom.linear_attention_step
    return {
        "delta": lambda: delta(q, k, v, beta, decay),
        "delta, with a state": lambda: delta(q, k, v, beta, decay, state=s, return_state=True, normalize_qk=True),
        "delta, packed": lambda: delta(*packed, beta.flatten(0, 1), decay.flatten(0, 1), cu_seqlens=starts),
        "delta, recorded": lambda: delta(*leaves, *beside),
        "delta, both passes": lambda: torch.autograd.grad(delta(*leaves, *beside), (*leaves, *beside), upstream),
        "delta on Hopper": lambda: first(q, k, v, beta, decay),
        "delta on Hopper, packed": lambda: first(*packed, beta.flatten(0, 1), decay.flatten(0, 1), cu_seqlens=starts),
        "delta on Hopper, both passes": lambda: torch.autograd.grad(first(*leaves, *beside), (*leaves, *beside), upstream),
        "delta step": lambda: delta_step(*rows, one_beta, s, one_decay),
        "delta step in place": lambda: delta_step(*rows, one_beta, s, one_decay, inplace=True),
        "linear": lambda: linear(q, k, v),
        "linear, decay": lambda: linear(q, k, v, decay=decay, normalize=False, feature_map="identity"),
        "linear, with a state": lambda: linear(q, k, v, state=(s, z), return_state=True),
        "linear, packed": lambda: linear(*packed, cu_seqlens=starts),
        "linear, recorded": lambda: linear(*leaves),
        "linear, both passes": lambda: torch.autograd.grad(linear(*leaves), leaves, upstream),
        "linear, both passes, decay": lambda: torch.autograd.grad(
            linear(*leaves, decay=beside[1]), (*leaves, beside[1]), upstream
        ),
        "linear on Hopper": lambda: linear(wide, *others, **numerator),
        "linear on Hopper, decay": lambda: linear(wide, *others, decay=wide_decay, **numerator),
        "linear on Hopper, both passes": lambda: torch.autograd.grad(linear(*wide_leaves, **numerator), wide_leaves, wide),
        "linear step": lambda: linear_step(*rows, (s, z)),
        "linear step, decay": lambda: linear_step(*rows, (s, z), decay=one_decay),
        "decode": lambda: warploom.decode(token[0], cache),
        "decode, a prefix": lambda: warploom.decode(token[0], pages, prefix=prefix),
        "decode, a number of keys": lambda: warploom.decode(token[0], pages, prefix=1100),
        "decode, FP8": lambda: warploom.decode(token[0], fp8),
        "decode, FP8, not rotated": lambda: warploom.decode(token[0], straight),
        "decode, FP8, a prefix": lambda: warploom.decode(token[0], fp8_pages, prefix=prefix),
        "append": lambda: cache.append(*token[1:]),
    }


def check() -> None:
    """From the third call on a call launches the same kernels, checks nothing again, and makes no more calls than these."""
    recorder = Recorder()
    # Small caches share nothing.
    with hopper(recorder) as fresh, patch.object(decode_launch, "worth_sharing", lambda _: True):
        fresh()
        for name, call in cases().items():
            first = [launched(recorder, call) for _ in range(3)]
            again = AssertionError("checked again")
            with (
                patch.object(delta_api, "delta_call", side_effect=again),
                patch.object(delta_api, "step_call", side_effect=again),
                patch.object(linear_api, "linear_call", side_effect=again),
            ):
                assert [launched(recorder, call) for _ in range(3)] == first, (name, first)
                assert name not in LAUNCHED or LAUNCHED[name] == first[0], (name, first)
                found = calls_of(call)
            assert found <= MOST_CALLS[name], (name, found)


def check_arguments() -> None:
    """What a decode call launches the short way takes what it took the long way."""
    recorder = Recorder()
    with hopper(recorder) as fresh:
        fresh()
        for name, call in cases().items():
            if name.startswith("decode"):
                long, short = ([list(map(known, each["values"])) for each in given(recorder, call)] for _ in range(2))
                assert long == short, (name, long, short)


def given(recorder: Recorder, call: Call) -> list[dict[str, Any]]:
    """The launches of a call."""
    recorder.clear()
    call()
    return recorder.launches


def known(value: Any) -> Any:
    """What a launch takes, of a pointer how far it is aligned."""
    return f"pointer at {value.rpartition(' at ')[2]}" if isinstance(value, str) and " at " in value else value


def check_memory() -> None:
    """Launchers keep none of the tensors alive that they were made of, or run with."""
    with hopper(Recorder()) as fresh:
        fresh()
        gathered: list[weakref.ref[Tensor]] = []

        def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            made = torch.rand(*shape).to(dtype)
            gathered.append(weakref.ref(made))
            return made.requires_grad_()

        def used(step: bool, grad: bool) -> None:
            tokens = (BATCH,) if step else (BATCH, TOKENS)
            q, k, v = (drawn(*tokens, HEADS, DIM) for _ in range(3))
            beta, decay = (drawn(*tokens, HEADS, dtype=torch.float32) for _ in range(2))
            s, z = drawn(BATCH, HEADS, DIM, DIM, dtype=torch.float32), drawn(BATCH, HEADS, DIM, dtype=torch.float32)
            functions: list[Callable[[], Any]] = [
                partial(warploom.gated_delta_rule, q, k, v, beta, decay, state=s),
                partial(warploom.linear_attention, q, k, v, state=(s, z), decay=decay),
            ]
            if step:
                functions = [
                    partial(warploom.gated_delta_step, q, k, v, beta, s, decay),
                    partial(warploom.linear_attention_step, q, k, v, (s, z), decay=decay),
                ]
            for function in functions:
                for _ in range(4):
                    out = function()
                    if grad:
                        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        used(False, True)
        with torch.no_grad():
            used(False, False)
            used(True, False)
        gc.collect()
        assert [ref() for ref in gathered] == [None] * len(gathered)


if __name__ == "__main__":
    check()
    check_arguments()
    check_memory()
    print("as few as can be")
