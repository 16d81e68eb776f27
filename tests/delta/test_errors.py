"""Every wrong call is refused before any work, in words that name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import gated_delta_rule, gated_delta_step


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors(**changes: Any) -> dict[str, Any]:
    q, beta = torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 4)
    return {"q": q, "k": q, "v": torch.zeros(2, 9, 4, 6), "beta": beta, "decay": beta, **changes}


PACKED = {name: t[0] for name, t in tensors().items()}
HIGH = torch.tensor([0.0, 0.5]).repeat(2, 9, 2)


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": torch.zeros(9, 2, 8)}, ValueError, r"q must have 4 dimensions \(batch, seqlen, heads, ·\)"),
        ({"k": torch.zeros(2, 8, 2, 8)}, ValueError, r"q and k must have one shape, got \(2, 9, 2, 8\) and \(2, 8, 2, 8\)"),
        ({"v": torch.zeros(2, 8, 4, 6)}, ValueError, "q and v must agree in all but the last two dimensions"),
        ({"v": torch.zeros(2, 9, 3, 6)}, ValueError, "v has 3 heads, which is not a multiple of the 2 heads of q and k"),
        ({"v": torch.zeros(2, 9, 4, 0)}, ValueError, "the last dimension must be at least 1"),
        ({"v": torch.zeros(2, 9, 4, 6).half()}, TypeError, "v has dtype torch.float16 but q has torch.float32"),
        ({n: torch.zeros(2, 9, 2, 8, dtype=torch.int32) for n in "qkv"}, TypeError, "q has dtype torch.int32"),
        ({"beta": None}, TypeError, r"beta must be a floating point tensor \(batch, seqlen, heads_v\), got None"),
        ({"beta": torch.zeros(2, 9, 2)}, ValueError, r"beta must have shape .* = \(2, 9, 4\), got \(2, 9, 2\)"),
        ({"decay": 0.5}, TypeError, r"decay must be a floating point tensor \(batch, seqlen, heads_v\), got float 0.5"),
        ({"decay": torch.zeros(4)}, ValueError, r"decay must have shape .* = \(2, 9, 4\), got \(4,\)"),
        ({"decay": HIGH}, ValueError, "decay must be at most 0, the natural logarithm of what is kept, got 0.5"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"eps": 0.0}, ValueError, "eps must be a positive finite number"),
        ({"normalize_qk": 1}, TypeError, "normalize_qk must be"),
        ({"lengths": ints(9)}, ValueError, "lengths has 1 entries but q has batch 2"),
        ({"lengths": ints(9, 10)}, ValueError, "lengths must be from 0 to the 9 tokens of a row, got 9 to 10"),
        ({"cu_seqlens": ints(0, 9)}, ValueError, r"with cu_seqlens q is \(total_tokens, …\) or has batch 1"),
        ({"lengths": ints(9, 9), "cu_seqlens": ints(0, 9)}, ValueError, "lengths and cu_seqlens together"),
        ({**PACKED, "cu_seqlens": ints()}, ValueError, r"cu_seqlens must have sequences \+ 1 entries"),
        ({**PACKED, "cu_seqlens": ints(1, 9)}, ValueError, "cu_seqlens must start at 0, got 1"),
        ({**PACKED, "cu_seqlens": ints(0, 10)}, ValueError, "cu_seqlens ends at 10, past the 9 packed tokens"),
        ({**PACKED, "cu_seqlens": ints(0, 9), "beta": torch.zeros(1, 9, 4)}, ValueError, r"shape \(total_tokens, heads_v\)"),
        ({"state": (torch.zeros(2, 4, 8, 6),)}, TypeError, "state must be a torch.Tensor, got tuple"),
        ({"state": torch.zeros(2, 2, 8, 6)}, ValueError, r"state must have shape .* = \(2, 4, 8, 6\), got \(2, 2, 8, 6\)"),
        ({"state": torch.zeros(2, 4, 8, 6).bfloat16()}, TypeError, "state must be torch.float32 beside torch.float32"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'cpu', 'hopper', 'triton', 'reference', got 'cuda'"),
    ],
)
def test_gated_delta_rule(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gated_delta_rule(**tensors(**changes))


def test_a_decay_above_zero_where_nothing_counts_is_no_error() -> None:
    high = torch.zeros(2, 9, 4)
    high[:, 5:] = 1.0
    gated_delta_rule(**tensors(decay=high), lengths=ints(5, 0))
    gated_delta_rule(**{**PACKED, "decay": high[0]}, cu_seqlens=ints(0, 5))
    with pytest.raises(ValueError, match="decay must be at most 0"):
        gated_delta_rule(**tensors(decay=high), lengths=ints(5, 6))


def test_a_backend_that_refuses_says_why() -> None:
    with pytest.raises(ValueError, match="backend='triton' cannot run this call: "):
        gated_delta_rule(**{n: t.double() for n, t in tensors().items()}, backend="triton")


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"state": None}, TypeError, r"state must be a tensor \(batch, heads_v, E, M\), got None"),
        ({"q": torch.zeros(2, 8)}, ValueError, r"q must have 3 dimensions \(batch, heads_qk, E\) or 4"),
        ({"k": torch.zeros(2, 1, 2, 8)}, ValueError, r"k must have 3 dimensions \(batch, heads, ·\) beside q of 3"),
        ({"beta": torch.zeros(2, 1, 4)}, ValueError, r"beta must have 2 dimensions \(batch, heads_v\) beside q of 3"),
        ({"decay": 1.0}, TypeError, "decay must be a torch.Tensor, got float"),
        (tensors(), ValueError, "a step takes one token a sequence, got 9"),
        ({"state": torch.zeros(3, 4, 8, 6)}, ValueError, "state must have shape"),
        ({"state": torch.zeros(2, 4, 6, 8).mT, "inplace": True}, ValueError, "with inplace=True the last dimension of state"),
        ({"state": torch.zeros(1, 4, 8, 6).expand(2, 4, 8, 6), "inplace": True}, ValueError, "no two elements share memory"),
        *(
            ({"state": torch.zeros(999).as_strided((2, 4, 8, 6), steps), "inplace": True}, ValueError, "no two elements share")
            for steps in ((10, 48, 6, 1), (192, 48, 5, 1))
        ),
        ({"inplace": 1}, TypeError, "inplace must be"),
    ],
)
def test_step(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {n: t[:, 0] for n, t in tensors().items()} | {"state": torch.zeros(2, 4, 8, 6)} | changes
    with pytest.raises(error, match=words):
        gated_delta_step(**arguments)
