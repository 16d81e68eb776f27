"""Every wrong call is refused before any work, in words that name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import LinearState, linear_attention, linear_attention_step


def tensors(**changes: Any) -> dict[str, Any]:
    return {"q": torch.zeros(2, 9, 4, 8), "k": torch.zeros(2, 9, 2, 8), "v": torch.zeros(2, 9, 2, 6), **changes}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PACKED = {name: torch.zeros(9, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": torch.zeros(9, 4, 8)}, ValueError, r"q must have 4 dimensions \(batch, seqlen, heads, head_dim\)"),
        ({"q": torch.zeros(3, 9, 4, 8)}, ValueError, "q has batch 3 but k has batch 2"),
        ({"q": torch.zeros(2, 9, 3, 8)}, ValueError, "q has 3 heads, which is not a multiple of the 2"),
        ({"k": torch.zeros(2, 9, 2, 7)}, ValueError, "q and k must have the same head_dim, got 8 and 7"),
        ({"v": torch.zeros(2, 8, 2, 6)}, ValueError, "k and v must agree in all but the last dimension"),
        ({"v": torch.zeros(2, 9, 2, 6).half()}, TypeError, "v has dtype torch.float16 but q has torch.float32"),
        ({"scale": float("inf")}, ValueError, "scale must be a finite number, got inf"),
        ({"eps": 0.0}, ValueError, "eps must be a positive finite number.*got 0.0"),
        ({"feature_map": "softmax"}, ValueError, "feature_map is 'softmax'; it takes one of elu"),
        ({"feature_map": lambda x: x.sum(-1)}, ValueError, "feature_map may change the last dimension only"),
        ({"feature_map": lambda x: x > 0}, TypeError, "feature_map must return a floating point tensor"),
        ({"feature_map": (torch.exp, lambda x: x[..., :3])}, ValueError, "must give q and k one head_dim, got 8 and 3"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths must be an int32 tensor"),
        ({"lengths": ints(9)}, ValueError, "lengths has 1 entries but q has batch 2"),
        ({"lengths": ints(9, 10)}, ValueError, "lengths must be from 0 to the 9 keys of a row, got 9 to 10"),
        ({"lengths": ints(9, -1)}, ValueError, "got -1 to 9"),
        ({"cu_seqlens": ints(0, 9)}, ValueError, r"with cu_seqlens q is \(total_tokens, heads, head_dim\) or has batch 1"),
        ({"lengths": ints(9, 9), "cu_seqlens": ints(0, 9)}, ValueError, "lengths and cu_seqlens together"),
        ({**PACKED, "cu_seqlens": ints()}, ValueError, r"cu_seqlens must have sequences \+ 1 entries"),
        ({**PACKED, "cu_seqlens": ints(1, 9)}, ValueError, "cu_seqlens must start at 0, got 1"),
        ({**PACKED, "cu_seqlens": ints(0, 6, 5)}, ValueError, "cu_seqlens must not decrease, got 6 then 5 at index 2"),
        ({**PACKED, "cu_seqlens": ints(0, 10)}, ValueError, "cu_seqlens ends at 10, past the 9 packed tokens"),
        ({**PACKED, "q": torch.zeros(8, 4, 8), "cu_seqlens": ints(0, 8)}, ValueError, "have the same tokens, got 8 and 9"),
        ({"state": torch.zeros(2, 2, 8, 6)}, TypeError, "state must be a LinearState or a pair"),
        ({"state": LinearState.zeros(2, 4, 8, 6)}, ValueError, r"state.s must have shape .* = \(2, 2, 8, 6\)"),
        ({"state": (torch.zeros(2, 2, 8, 6), torch.zeros(2, 8))}, ValueError, r"state.z must have shape .* = \(2, 2, 8\)"),
        ({"state": LinearState.zeros(2, 2, 8, 6, dtype=torch.bfloat16)}, TypeError, "state.s must be torch.float32"),
        (
            {"decay": -0.1},
            TypeError,
            r"decay must be a tensor of natural logs of shape \(heads_kv,\) = \(2,\) or .* = \(2, 9, 2\), got",
        ),
        (
            {"decay": torch.zeros(4)},
            ValueError,
            r"decay must have shape \(heads_kv,\) = \(2,\) or .* = \(2, 9, 2\), got \(4,\)",
        ),
        ({"decay": torch.zeros(2, 9, 4)}, ValueError, r"got \(2, 9, 4\)"),
        ({"decay": torch.zeros(2).half()}, TypeError, "decay must be torch.float32 beside torch.float32 inputs"),
        ({"decay": torch.tensor([-1.0, 0.25])}, ValueError, "decay must be at most 0, .*, got 0.25"),
        ({"decay": torch.zeros(2), "causal": False}, ValueError, "decay needs causal=True"),
        (
            {**PACKED, "decay": torch.zeros(8, 2), "cu_seqlens": ints(0, 9)},
            ValueError,
            r"\(total_tokens, heads_kv\) = \(9, 2\)",
        ),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'cpu', 'hopper', 'triton', 'reference', got 'cuda'"),
    ],
)
def test_linear_attention(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        linear_attention(**tensors(**changes))


def test_a_backend_that_refuses_says_why() -> None:
    with pytest.raises(ValueError, match="backend='triton' cannot run this call: "):
        linear_attention(**tensors(**{n: t.double() for n, t in tensors().items()}), backend="triton")


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"state": None}, TypeError, "state must be a LinearState, got None; LinearState.zeros"),
        ({"q": torch.zeros(2, 8)}, ValueError, r"q must have 3 dimensions \(batch, heads_q, head_dim\) or 4"),
        ({"k": torch.zeros(2, 1, 2, 8)}, ValueError, r"k must have 3 dimensions \(batch, heads, head_dim\) as q has"),
        ({n: torch.zeros(2, 3, 2, 8) for n in "qkv"}, ValueError, "a step takes one token a sequence, got 3 queries and 3"),
        ({"state": LinearState.zeros(3, 2, 8, 8)}, ValueError, r"state.s must have shape"),
        (
            {"decay": torch.zeros(2, 1, 2)},
            ValueError,
            r"decay must have shape \(heads_kv,\) = \(2,\) or \(batch, heads_kv\) = \(2, 2\), got \(2, 1, 2\)",
        ),
        ({"decay": torch.zeros(4)}, ValueError, r"decay must have shape .* = \(2,\) or .* = \(2, 2\), got \(4,\)"),
        ({"decay": torch.zeros(3, 2)}, ValueError, r"decay must have shape .* = \(2,\) or .* = \(2, 2\), got \(3, 2\)"),
        ({"decay": torch.ones(2, 2)}, ValueError, "decay must be at most 0"),
    ],
)
def test_step(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {n: torch.zeros(2, 2, 8) for n in "qkv"} | {"state": LinearState.zeros(2, 2, 8, 8)} | changes
    with pytest.raises(error, match=words):
        linear_attention_step(**arguments)
