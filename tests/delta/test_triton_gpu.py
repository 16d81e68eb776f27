"""The gated delta rule's Triton kernels on a CUDA device: every case in every dtype, dims, ranges, bits, graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.delta.cases import CASES, Case, check
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.delta.triton import BACKEND
from warploom.delta.triton.call import Call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
Found = tuple[torch.Tensor | None, ...]


def drawn(**options: Any) -> Case:
    return Case(random.randrange(2**31), device="cuda", **options)


def results(call: DeltaCall, dout: torch.Tensor, dstate: torch.Tensor | None) -> Found:
    return *BACKEND.forward(call, True), *BACKEND.backward(call, dout, dstate)


def equal(found: Found, wanted: Found) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def wide(name: str, **changes: Any) -> dict[str, Any]:
    """A case with three times the tokens and four times the heads: of few numbers the errors would be luck."""
    options: dict[str, Any] = {"tokens": 70, "heads": 1, **CASES[name], **changes}
    if options["tokens"] > 1:
        options["tokens"] *= 3
        for lengths in ("lengths", "sequences"):
            if options.get(lengths) is not None:
                options[lengths] = tuple(3 * n for n in options[lengths])
    return {**options, "heads": 4 * options["heads"]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    check(drawn(**wide(name, dtype=dtype)), BACKEND)


@pytest.mark.parametrize("dim", [64, 128])
def test_one_token_each(dim: int) -> None:
    """No decay has a state to meet: their gradients are 0, and no rounding stands in for them."""
    call, dout, dstate = drawn(tokens=9, sequences=(1, 0, 1, 1, 1), heads=3, group=2, e=dim, m=dim, dtype=torch.bfloat16).call()
    ddecay = BACKEND.backward(call, dout, dstate)[4]
    assert ddecay is not None and not ddecay.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    "dims",
    [(16, 16), (24, 40), (64, 64), (72, 72), (33, 17), (64, 128), (128, 128), (192, 128), (128, 256), (256, 256)],
    ids=str,
)
def test_dims(dims: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """Every configuration; a decay and a norm, then neither."""
    shape = {"tokens": 333, "batch": 2, "heads": 2, "group": group, "e": dims[0], "m": dims[1], "state": True, "dtype": dtype}
    check(drawn(**shape), BACKEND)
    check(drawn(**shape, decay=None, normalize_qk=False, keys="long"), BACKEND)


@pytest.mark.parametrize("wanted", [2, 5, 64])
@pytest.mark.parametrize("kind", ["chunks of each sequence", "slots", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges(kind: str, wanted: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a backward pass is cut, and it gives the same bits as in one range."""
    per_sequence = kind == "chunks of each sequence"
    shape: dict[str, Any] = {"batch": 3, "lengths": (700, 130, 0)}
    if kind == "packed":
        shape = {"sequences": (0, 300, 1, 64, 250, 0)}
    c = drawn(tokens=700, heads=4, e=64, m=128, state=True, dtype=dtype, **shape)
    found = []
    for n in (wanted, 1):
        monkeypatch.setattr(Call, "ranges", lambda call, n=n: call.cut(per_sequence, n))
        check(c, BACKEND)
        found.append(results(*c.call()))
    assert equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_many_tokens(dim: int, dtype: torch.dtype) -> None:
    check(drawn(tokens=8192, heads=2, group=2, e=dim, m=dim, beta=2.0, state=True, dtype=dtype), BACKEND)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_twenty_repeats(dim: int) -> None:
    """More programs than run at once, to the same bits."""
    c = drawn(tokens=2050, batch=2, heads=16, group=4, e=dim, m=dim, state=True, dtype=torch.bfloat16)
    call, dout, dstate = c.call()
    first = results(call, dout, dstate)
    for _ in range(20):
        assert equal(results(call, dout, dstate), first)


def test_strides() -> None:
    """Slices of odd strides, transposed tensors, a last dimension that is not contiguous."""
    c = drawn(tokens=300, heads=2, batch=2, e=64, m=64, state=True, dtype=torch.bfloat16)
    call, dout, dstate = c.call()
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :64],
        k=call.k.transpose(1, 2).contiguous().transpose(1, 2),
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
        beta=call.beta.transpose(1, 2).contiguous().transpose(1, 2),
    )
    found = results(odd, dout.transpose(1, 2).contiguous().transpose(1, 2), dstate)
    for a, b in zip(found, results(call, dout, dstate), strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_pass_takes_no_more_room_than_it_says() -> None:
    c = drawn(tokens=8192, heads=8, group=2, e=128, m=128, dtype=torch.bfloat16)
    call, dout, _ = c.call()
    BACKEND.backward(call, dout, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = BACKEND.backward(call, dout, None)
    torch.cuda.synchronize()
    given = sum(t.numel() * t.element_size() for t in found if t is not None)
    tensors = 2 * (call.q.numel() + call.v.numel()) * call.q.element_size()
    assert torch.cuda.max_memory_allocated() - before <= given + tensors + 2**22


@pytest.mark.parametrize("inplace", [False, True], ids=["new state", "in place"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 128), (20, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_in_a_graph(dims: tuple[int, int], dtype: torch.dtype, inplace: bool) -> None:
    """One token at a time equals one pass, captured once and replayed."""
    c = drawn(tokens=40, batch=3, heads=2, group=2, e=dims[0], m=dims[1], state=True, dtype=dtype)
    call, *_ = c.call()
    assert call.state is not None and call.decay is not None
    want, last = BACKEND.forward(call, True)
    names = ("q", "k", "v", "beta", "decay")
    held = {n: getattr(call, n)[:, 0].clone() for n in names}
    state = call.state.clone()
    args = StepArgs(state=state, scale=call.scale, normalize_qk=True, eps=call.eps, backend="triton", **held)

    def step() -> torch.Tensor:
        out, new = BACKEND.step(args, state if inplace else None)
        if not inplace:
            state.copy_(new)
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    state.copy_(call.state)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for at in range(40):
        for n in names:
            held[n].copy_(getattr(call, n)[:, at])
        graph.replay()
        torch.testing.assert_close(out, want[:, at], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, last, rtol=tolerance, atol=tolerance)


def test_passes_in_a_graph() -> None:
    c = drawn(tokens=500, heads=2, group=2, e=128, m=128, sequences=(130, 0, 300), state=True, dtype=torch.bfloat16)
    call, dout, dstate = c.call()
    wanted = results(call, dout, dstate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(call, dout, dstate)
    for t in found:
        if t is not None:
            t.fill_(float("nan"))
    graph.replay()
    assert equal(found, wanted)
