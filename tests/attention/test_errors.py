"""Bad input raises in words, before any work: the argument, what it got, what it takes."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.runtime import dispatch

T = torch.randn
I32 = torch.int32
CACHE = warploom.KVCache.allocate(2, 8, 2, 16, dtype=torch.float32)


def q() -> torch.Tensor:
    return T(2, 8, 4, 16)


def kv() -> torch.Tensor:
    return T(2, 8, 2, 16)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "rank": (
        {"q": T(8, 4, 16)},
        ValueError,
        r"q must have 4 dimensions \(batch, seqlen, heads, head_dim\).*\(8, 4, 16\)",
    ),
    "integer dtype": (
        {"q": torch.ones(2, 8, 4, 16, dtype=torch.int64)},
        TypeError,
        "q has dtype torch.int64; attention takes",
    ),
    "mixed dtype": ({"k": kv().half()}, TypeError, "k has dtype torch.float16 but q has torch.float32.*autocast"),
    "device": ({"v": kv().to("meta")}, ValueError, "v is on meta but q is on cpu"),
    "batch": ({"k": T(3, 8, 2, 16), "v": T(3, 8, 2, 16)}, ValueError, "q has batch 2 but k has batch 3"),
    "k against v": ({"v": T(2, 9, 2, 16)}, ValueError, "k and v must agree in all but the last dimension"),
    "head_dim": ({"k": T(2, 8, 2, 8)}, ValueError, "q and k must have the same head_dim, got 16 and 8"),
    "head_dim 0": ({"q": T(2, 8, 4, 0), "k": T(2, 8, 2, 0)}, ValueError, "head_dim must be at least 1"),
    "heads": (
        {"k": T(2, 8, 3, 16), "v": T(2, 8, 3, 16)},
        ValueError,
        "4 heads, which is not a multiple of the 3 heads",
    ),
    "no kv heads": ({"k": T(2, 8, 0, 16), "v": T(2, 8, 0, 16)}, ValueError, "not a multiple of the 0 heads"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
    "scale inf": ({"scale": float("inf")}, ValueError, "scale must be a finite number"),
    "softcap": ({"softcap": -1.0}, ValueError, r"softcap must be 0 \(off\) or a positive"),
    "dropout": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    "seed": ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "dropout_seed must be an int or an int64 tensor"),
    "sink shape": ({"sink": T(3)}, ValueError, r"sink must have shape \(4,\).*got \(3,\)"),
    "sink dtype": ({"sink": torch.ones(4, dtype=I32)}, TypeError, "sink must be a floating point tensor"),
    "window": ({"window": 5}, TypeError, r"window must be a pair \(left, right\)"),
    "window entry": ({"window": (1.5, 0)}, TypeError, "window's left must be an int or None, got 1.5"),
    "dense mask": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, TypeError, "torch.bool tensor.*ColumnMask.from_dense"),
    "float mask": ({"mask": torch.zeros(8, 8)}, TypeError, "torch.float32 tensor"),
    "dense mask, ways": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, TypeError, "docs/masks.md, 'Masks that are not column"),
    "mask_mod": ({"mask": lambda b, h, q, k: q >= k}, TypeError, r"got function; .*ColumnMask.from_mask_mod \(docs/from-flex"),
    "mask class": ({"mask": masks.Causal}, TypeError, r"the class Causal itself; give a mask, as Causal\(...\) makes one"),
    "cache": ({"k": CACHE, "v": None}, TypeError, r"k is a KVCache: decode\(q, cache\) reads caches"),
    "mask type": ({"mask": "causal"}, TypeError, "mask must be a builder or ColumnMask.*got str"),
    "mask length": ({"mask": masks.ColumnMask(torch.zeros(1, 1, 9, dtype=I32))}, ValueError, "9.*8"),
    "mask batch": (
        {"mask": masks.ColumnMask(torch.zeros(3, 1, 8, dtype=I32))},
        ValueError,
        "mask has batch 3.*must be 1 or the batch of q, 2",
    ),
    "mask heads": (
        {"mask": masks.ColumnMask(torch.zeros(1, 3, 8, dtype=I32))},
        ValueError,
        r"mask has 3 heads.*1, 2 \(of k\) or 4 \(of q\)",
    ),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be one of .*'cpu'.*'reference', got 'cuda'"),
}


@pytest.mark.parametrize("name", BAD)
def test_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, error, words = BAD[name]
    for backend in dispatch.implementations():
        monkeypatch.setattr(backend, "forward", _no_work)
    with pytest.raises(error, match=words):
        warploom.attention(**{"q": q(), "k": kv(), "v": kv(), **changed})


def _no_work(*_: object) -> None:
    raise AssertionError("work began")


def cu(*values: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


PAGED = {
    "k": T(4, 2, 2, 16),
    "v": T(4, 2, 2, 16),
    "seqused_k": cu(3, 4),
    "block_table": torch.tensor([[0, 1], [2, 3]], dtype=I32),
}

BAD_PACKED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"q": q()}, ValueError, r"q must have 3 dimensions \(total_tokens, heads, head_dim\)"),
    "float": (
        {"cu_seqlens_q": cu(0, 3, 8, dtype=torch.float32)},
        TypeError,
        "cu_seqlens_q must be an int32 tensor, got a torch.float32",
    ),
    "past int32": (
        {"cu_seqlens_q": cu(0, 3, 2**32 + 8, dtype=torch.int64)},
        ValueError,
        "cu_seqlens_q must hold values that fit int32, got 4294967304",
    ),
    "none": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be an int32 tensor"),
    "cache without pages": ({"k": CACHE, "v": None}, TypeError, r"k is a KVCache.*PagedKVCache for more queries"),
    "decreasing": (
        {"cu_seqlens_q": cu(0, 5, 3)},
        ValueError,
        "cu_seqlens_q must not decrease, got 5 then 3 at index 2",
    ),
    "start": ({"cu_seqlens_q": cu(1, 3, 8)}, ValueError, "cu_seqlens_q must start at 0, got 1"),
    "end": ({"cu_seqlens_q": cu(0, 3, 9)}, ValueError, "cu_seqlens_q ends at 9, past the 8 packed tokens"),
    "entries": ({"cu_seqlens_k": cu(0, 8)}, ValueError, "cu_seqlens_k has 2 entries but cu_seqlens_q has 3"),
    "other total": (
        {"k": T(9, 2, 16), "v": T(9, 2, 16)},
        ValueError,
        "k has 9 packed tokens but q has 8: give cu_seqlens_k",
    ),
    "max": ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q is 4 but the longest sequence of cu_seqlens_q has 5"),
    "negative max": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must not be negative"),
    "seqused": ({"seqused_k": cu(3)}, ValueError, "seqused_k has 1 entries but cu_seqlens_q describes 2 sequences"),
    "seqused past the keys": ({"seqused_k": cu(3, 6)}, ValueError, r"seqused_k\[1\] is 6, but sequence 1 has 5 keys"),
    "negative seqused": ({"seqused_k": cu(3, -1)}, ValueError, "seqused_k must not be negative, got -1"),
    "builder": ({"mask": masks.PrefixLM(2)}, ValueError, "attention_varlen takes a band.*got PrefixLM"),
    "mask length": ({"mask": masks.ColumnMask(torch.zeros(1, 1, 9, dtype=I32))}, ValueError, "9.*8"),
    "pages without lengths": (
        {**PAGED, "seqused_k": None},
        ValueError,
        "block_table takes the keys' lengths from seqused_k",
    ),
    "page number": (
        {**PAGED, "block_table": torch.tensor([[0, 1], [2, 7]], dtype=I32)},
        ValueError,
        r"block_table\[1, 1\] is 7, outside the 4 pages",
    ),
    "capacity": (
        {**PAGED, "seqused_k": cu(3, 5)},
        ValueError,
        "seqused_k reaches 5 but block_table holds 2 pages of 2",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_attention_varlen(name: str) -> None:
    changed, error, words = BAD_PACKED[name]
    good = {"q": T(8, 4, 16), "k": T(8, 2, 16), "v": T(8, 2, 16), "cu_seqlens_q": cu(0, 3, 8)}
    with pytest.raises(error, match=words):
        warploom.attention_varlen(**{**good, **changed})


def test_probably_transposed_input_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # `warploom.attention` is the function; the package of that name is reached through sys.modules.
    monkeypatch.setattr(sys.modules["warploom.attention.arguments"], "_warned_layout", False)
    swapped = T(1, 4, 300, 8)
    with pytest.warns(UserWarning, match=r"300 heads and seqlen 4: .*\(batch, seqlen, heads, head_dim\)"):
        warploom.attention(swapped, swapped, swapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warploom.attention(swapped, swapped, swapped)
