"""The tiled CPU implementation against the reference, over shapes, masks and flags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import warploom
from tests.attention.harness import Call, check
from warploom import masks
from warploom.demo.memory import PeakMemory


@st.composite
def column_mask(draw: st.DrawFn, batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> masks.Mask:
    """Arbitrary vectors, constant over runs or different in every column, with any of the four absent."""
    mask_batch, mask_heads = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads_kv, heads_q]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    run = draw(st.sampled_from([1, 1, 7, seqlen_k]))

    def vector() -> torch.Tensor:
        shape = (mask_batch, mask_heads, -(-seqlen_k // run))
        values = torch.randint(-3, seqlen_q + 4, shape, generator=generator, dtype=torch.int32)
        return values.repeat_interleave(run, dim=2)[..., :seqlen_k].contiguous()

    present = draw(st.sampled_from(["lts", "lts lte", "lts ute", "ute", "uts ute", "lts lte uts ute"])).split()
    vectors = {name: vector() if name in present else None for name in ("lts", "lte", "uts", "ute")}
    if vectors["lts"] is None:
        vectors["lts"] = torch.full((mask_batch, mask_heads, seqlen_k), seqlen_q, dtype=torch.int32)
    return masks.ColumnMask(**vectors, causal=draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    # Of one key in all, dQ and dK cancel to zero, and what is left of rounding the exact model has no measure for.
    seqlen_q, seqlen_k = draw(st.integers(1, 260)), draw(st.integers(2, 260))
    if draw(st.booleans()):
        seqlen_k = max(seqlen_q, 2)
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 7]))
    # The criterion compares two roundings' worst cases, which takes a sample: short sequences come in larger batches.
    batch = max(batch, 128 // (heads_kv * min(seqlen_q, seqlen_k)))
    keywords: dict[str, object] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        bound = st.none() | st.integers(-20, seqlen_k + 5)
        keywords["window"] = (draw(bound), draw(bound))
    if draw(st.booleans()):
        keywords["mask"] = draw(column_mask(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k))
    if draw(st.integers(0, 3)) == 0:
        keywords["softcap"] = draw(st.sampled_from([0.5, 20.0]))
    if draw(st.integers(0, 3)) == 0:
        keywords |= {"dropout_p": draw(st.sampled_from([0.1, 0.7])), "dropout_seed": draw(st.integers(0, 2**62))}
    if draw(st.booleans()):
        keywords["scale"] = draw(st.sampled_from([0.05, 0.7, -0.2]))
    head_dim = draw(st.sampled_from([1, 8, 20, 32]))
    return Call(
        seed=draw(st.integers(0, 2**31)),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([None, None, 24])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        sink=draw(st.booleans()),
        lse_gradient=draw(st.booleans()),
        strided=draw(st.booleans()),
        keywords=keywords,
    )


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(calls())
def test_matches_the_reference(call: Call) -> None:
    check(call, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["document", "document_causal", "short documents", "prefix", "window", "padding"])
def test_long_enough_for_every_kind_of_rectangle(name: str, dtype: torch.dtype) -> None:
    seqlen = 700
    mask = {
        "document": masks.Document([300, 100, 300], causal=False),
        "document_causal": masks.Document([[300, 100, 200], [1, 650, 49]]),
        "short documents": masks.Document([7] * 100),
        "prefix": masks.PrefixLM([200, 0]),
        "window": masks.SlidingWindow(300, 20),
        "padding": masks.Padding(torch.tensor([650, 3])),
    }[name]
    check(Call(seed=11, seqlen_q=seqlen, seqlen_k=seqlen, dtype=dtype, keywords={"mask": mask}), "cpu")


def test_identical_runs_are_bitwise_equal() -> None:
    q, k, v = (torch.randn(2, 200, 4, 32, requires_grad=True) for _ in range(3))
    mask = masks.Document([90, 110])

    def run() -> list[torch.Tensor]:
        out, lse = warploom.attention(q, k, v, mask=mask, deterministic=True, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_small_integers_are_exact() -> None:
    """One key each: weights are exactly 1, so sums of small integers are exact in every dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (torch.randint(-4, 5, (1, 64, 2, 16)).to(dtype).requires_grad_() for _ in range(3))
        out = warploom.attention(q, k, v, window=(0, 0), backend="cpu")
        assert torch.equal(out, v)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert torch.equal(dv, torch.ones_like(v)) and not dq.any() and not dk.any()


def test_ones_in_give_ones_out() -> None:
    q, k = torch.randn(2, 150, 4, 32), torch.randn(2, 170, 2, 32)
    out = warploom.attention(q, k, torch.ones(2, 170, 2, 32), causal=True)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-6)


def test_memory_is_linear_in_the_sequence() -> None:
    """A dense mask of this call would take 1 GiB; gradients, plan and partial results stay far below."""
    seqlen = 32768
    q, k, v = (torch.randn(1, seqlen, 1, 16, requires_grad=True) for _ in range(3))
    memory = PeakMemory("cpu")
    memory.start()
    warploom.attention(q, k, v, mask=masks.Document([256] * (seqlen // 256))).sum().backward()
    peak = memory.stop()
    assert peak is not None and peak < 100 * 2**20, f"took {peak} bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_k", [1, 4, 17, 515, 600])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 0)}, {"softcap": 3.0}], ids=str)
def test_a_row_of_nan_scores_stays_nan(dtype: torch.dtype, seqlen_k: int, options: dict[str, object]) -> None:
    """torch's flash kernel took such a row for one that sees nothing: out 0 and lse 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, dtype=dtype) for n in (5, seqlen_k, seqlen_k))
    q[0, 4], k[1, :, 0] = float("nan"), float("nan")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    found, expected = (warploom.attention(*inputs, return_lse=True, backend=b, **options) for b in ("cpu", "reference"))  # type: ignore[arg-type]
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours.isnan(), right.isnan())
    gradients = [torch.autograd.grad(out.float().sum(), inputs) for out, _ in (found, expected)]
    for ours, right in zip(*gradients, strict=True):
        assert not (right.isnan() & ~ours.isnan()).any()


@pytest.mark.parametrize("seqlen_k", [3, 90])
def test_a_row_of_infinitely_low_scores_sees_nothing(seqlen_k: int) -> None:
    q, k, v = torch.ones(1, 5, 2, 16), torch.zeros(1, seqlen_k, 2, 16), torch.randn(1, seqlen_k, 2, 16)
    k[..., 0] = -float("inf")
    for backend in ("cpu", "reference"):
        out, lse = warploom.attention(q, k, v, return_lse=True, backend=backend)
        assert not out.any() and (lse == -float("inf")).all()


@pytest.mark.parametrize(
    "strides", [(1, 112, 16, 1), (560, 112, 1, 1), (560, 1, 16, 1), (1, 1, 1, 1), (0, 112, 16, 1), (3, 8, 5, 1)]
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_overlapping_inputs(strides: tuple[int, ...], name: str) -> None:
    """torch's flash kernel misreads a q whose batches, rows or heads start an element apart."""
    torch.manual_seed(0)
    shape = (3, 5, 7, 16)
    inputs = {key: torch.randn(shape) for key in "qkv"}
    memory = torch.randn(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1)
    inputs[name] = memory.as_strided(shape, strides)
    leaves = {key: t.requires_grad_() for key, t in inputs.items()}
    plain = {key: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for key, t in inputs.items()}
    found, expected = warploom.attention(**leaves), warploom.attention(**plain, backend="reference")
    torch.testing.assert_close(found, expected)
    for ours, right in zip(
        torch.autograd.grad(found.square().sum(), list(leaves.values())),
        torch.autograd.grad(expected.square().sum(), list(plain.values())),
        strict=True,
    ):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
