"""Linear attention's Triton kernels on a CUDA device: every case in every dtype, long sequences, bits, graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.linear.triton_cases import CASES, DECAY, WHOLE, Case, check, computed
from warploom.linear.problem import StepArgs
from warploom.linear.triton import BACKEND
from warploom.linear.triton import call as call_module
from warploom.linear.triton.config import config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAN = float("nan")


def seed() -> int:
    return random.randrange(2**31)


def cut(monkeypatch: pytest.MonkeyPatch, yes: bool, segment: int = 128, lookback: bool = True) -> None:
    """Segments of so many tokens, or whole sequences, in the tilings of the device."""
    chosen = {"fill": 1e9 if yes else 0.0, "segment": segment, "lookback": lookback}
    monkeypatch.setattr(call_module, "config", lambda *a: replace(config(*a), **chosen))


def wide(name: str, **changes: Any) -> dict[str, Any]:
    """A case with seven times the tokens: whole chunks and a short one, several segments."""
    options = {"rows": 40, **(CASES | WHOLE | DECAY)[name], **changes}
    for length in ("rows", "keys"):
        if options.get(length, 1) > 1:
            options[length] *= 7
    for lengths in ("lengths", "sequences"):
        if options.get(lengths) is not None:
            options[lengths] = tuple(7 * n for n in options[lengths])
    return options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", CASES | WHOLE | DECAY)
def test_case(name: str, cuts: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, cuts)
    check(Case(seed(), device="cuda", **wide(name, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "dims", [(16, 16), (24, 40), (64, 64), (72, 72), (33, 17), (64, 128), (128, 128), (192, 128), (256, 256)], ids=str
)
def test_dims(dims: tuple[int, int], cuts: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration, with a mean that makes sums grow."""
    cut(monkeypatch, cuts)
    check(Case(seed(), rows=333, batch=2, heads=2, e=dims[0], m=dims[1], mean=0.5, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["", "grouped", "as loaded"])
@pytest.mark.parametrize("decay", ["head", "token", "token that forgets"])
@pytest.mark.parametrize("dims", [(24, 40), (64, 64), (64, 128), (128, 128), (256, 256)], ids=str)
def test_decay(
    dims: tuple[int, int], decay: str, kind: str, cuts: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every configuration that fades, the same bits twice; in bf16 tokens that forget make chunks too steep for rows."""
    cut(monkeypatch, cuts)
    options: dict[str, Any] = {"heads": 4, "heads_kv": 2 if kind == "grouped" else 4, "e": dims[0], "m": dims[1]}
    if kind == "as loaded":
        options |= {"map_q": "identity", "map_k": "identity", "normalize": False}
    case = Case(seed(), rows=333, decay=decay, state=True, dtype=dtype, device="cuda", **options)
    check(case)
    call, *upstream = case.call()
    first, second = computed(call, *upstream), computed(call, *upstream)
    assert all(torch.equal(t, second[name]) for name, t in first.items()), case


MANY = [(d, kind, True) for d in (64, 128, 256) for kind in ("plain", "as loaded")]
MANY += [(64, "packed", True), (64, "lengths", True), (64, "packed", False), (128, "plain", False), (256, "as loaded", False)]


@pytest.mark.parametrize(("dim", "kind", "lookback"), MANY, ids=str)
def test_many_segments(dim: int, kind: str, lookback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than one group of those that look back, and more programs than run at once."""
    cut(monkeypatch, True, lookback=lookback)
    options: dict[str, Any] = {"batch": 2, "heads": 3}
    if kind == "packed":
        options = {"sequences": (0, 2400, 1, 128, 2300, 0, 100), "heads": 2}
    elif kind == "lengths":
        options["lengths"] = (2750, 700)
    elif kind == "as loaded":
        options |= {"map_q": "identity", "map_k": "identity", "normalize": False}
    rows = 5000 if kind == "packed" else 2750
    check(Case(seed(), rows=rows, e=dim, m=dim, state=True, dtype=torch.bfloat16, device="cuda", **options))


def test_programs_that_look_back_do_not_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times as many as run at once, again and again, to the same bits."""
    cut(monkeypatch, True)
    call, dout, *_ = Case(seed(), rows=8192, batch=4, heads=16, e=64, m=64, dtype=torch.bfloat16, device="cuda").call()
    first = BACKEND.forward(call, True)
    gradients = BACKEND.backward(call, dout, first[1], None, None)[:3]
    for _ in range(50):
        for a, b in zip(BACKEND.forward(call, True), first, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(BACKEND.backward(call, dout, first[1], None, None)[:3], gradients, strict=True):
            assert torch.equal(a, b)


IDENTITY = {"map_q": "identity", "map_k": "identity"}
KINDS: dict[str, dict[str, Any]] = {
    "mapped": IDENTITY,
    "mapped, ungrouped": {**IDENTITY, "heads_kv": 4},
    "relu": {"map_q": "elu+1", "map_k": "relu"},
    "unnormalized": {"normalize": False},
    "as loaded": {**IDENTITY, "normalize": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
def test_kinds(kind: str, dim: int, cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, cuts)
    options = {"heads": 4, "heads_kv": 2, "e": dim, "m": dim, "state": True, **KINDS[kind]}
    check(Case(seed(), rows=333, dtype=torch.bfloat16, device="cuda", **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [16384, 65536])
def test_many_tokens(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest sequences in one pass, and longer ones: sums pass bf16's 256 and fp16's 65504."""
    cut(monkeypatch, False, 1024)
    assert tokens in (config(dtype, 64, 64, 90, True, True).longest, 65536)
    check(Case(seed(), rows=tokens, heads=2, e=64, m=64, mean=1.0, state=True, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("normalize", [False, True], ids=["as loaded", "normalized"])
@pytest.mark.parametrize("dim", [64, 128])
def test_error_does_not_grow_with_the_length(dim: int, normalize: bool) -> None:
    """The last 1024 rows of 64k and 2k tokens against fp64, relative to their norm, as the configuration cuts them."""
    found = []
    for tokens in (2048, 65536):
        maps = {"map_q": "elu+1", "map_k": "elu+1"} if normalize else {"map_q": "identity", "map_k": "identity"}
        shape = {"rows": tokens, "e": dim, "m": dim, "mean": 1.0, "dtype": torch.bfloat16, "device": "cuda"}
        call, *_ = Case(seed(), normalize=normalize, **shape, **maps).call()
        q, k, v = (t[0, :, 0].double() for t in (call.q, call.k, call.v))
        if normalize:
            q, k = (torch.nn.functional.elu(t) + 1 for t in (q, k))
        scores = (q[-1024:] @ k.T).tril(tokens - 1024)
        want = scores @ v / (scores.sum(-1, keepdim=True) if normalize else 1.0)
        out = BACKEND.forward(call, False)[0][0, -1024:, 0].double()
        found.append(float((out - want).norm() / want.norm()))
    assert found[1] < 1.5 * found[0] and found[0] < 0.01, found


def test_the_ops_contracts_and_compile() -> None:
    from warploom import linear_attention
    from warploom.linear.ops import flat

    call, *_ = Case(seed(), rows=130, heads=2, e=64, m=64, state=True, dtype=torch.bfloat16, device="cuda").call()
    torch.library.opcheck(torch.ops.warploom.linear_attention.default, flat(call, "triton", True))
    q, k, v = (t.clone().requires_grad_() for t in (call.q, call.k, call.v))
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    want, got = linear_attention(q, k, v), compiled(q, k, v)
    assert torch.equal(want, got)
    for a, b in zip(*(torch.autograd.grad(t.sum(), (q, k, v)) for t in (want, got)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
def test_twenty_repeats(dim: int, cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, cuts)
    shape = {"rows": 1500, "batch": 2, "heads": 8, "heads_kv": 4, "e": dim, "m": dim, "state": True}
    call, dout, ds, dz = Case(seed(), dtype=torch.bfloat16, device="cuda", **shape).call()
    first = computed(call, dout, ds, dz)
    for _ in range(20):
        for name, t in computed(call, dout, ds, dz).items():
            assert torch.equal(t, first[name]), name


def test_real_threshold() -> None:
    """Few heads and many, as the configuration itself decides."""
    for batch, heads in ((1, 2), (8, 16)):
        check(Case(seed(), rows=2050, batch=batch, heads=heads, e=64, m=64, dtype=torch.bfloat16, device="cuda"))


def test_strides() -> None:
    call, dout, *_ = Case(seed(), rows=300, heads=2, batch=2, e=64, m=64, dtype=torch.bfloat16, device="cuda").call()
    out, norm, *_ = BACKEND.forward(call, False)
    want = (out, *BACKEND.backward(call, dout, norm, None, None)[:3])
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :64],
        k=call.k.transpose(1, 2).contiguous().transpose(1, 2),
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
    )
    out, norm, *_ = BACKEND.forward(odd, False)
    got = (out, *BACKEND.backward(odd, dout.transpose(1, 2).contiguous().transpose(1, 2), norm, None, None)[:3])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_hidden_nan_changes_nothing() -> None:
    shape = {"rows": 333, "keys": 400, "e": 64, "m": 64, "lengths": (400, 77)}
    call, dout, *_ = Case(seed(), batch=2, dtype=torch.bfloat16, device="cuda", **shape).call()
    out, norm, *_ = BACKEND.forward(call, False)
    want = (out, *BACKEND.backward(call, dout, norm, None, None)[:3])
    k, v = call.k.clone(), call.v.clone()
    k[1, 77:], v[1, 77:] = NAN, NAN
    poisoned = replace(call, k=k, v=v)
    out, norm, *_ = BACKEND.forward(poisoned, False)
    for a, b in zip((out, *BACKEND.backward(poisoned, dout, norm, None, None)[:3]), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (20, 7), (256, 256)], ids=str)
def test_steps_continue_a_prefill(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = {"rows": 300, "heads": 4, "heads_kv": 2, "e": dims[0], "m": dims[1], "batch": 2, "scale": 0.4}
    call, *_ = Case(seed(), dtype=dtype, device="cuda", **shape).call()
    full, _, s_full, z_full = BACKEND.forward(call, True)
    _, _, s, z = BACKEND.forward(replace(call, **{n: getattr(call, n)[:, :290] for n in ("q", "k", "v")}), True)
    options = (call.map_q, call.map_k, True, call.eps, call.scale, "triton")
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for t in range(290, 300):
        out, s, z = BACKEND.step(StepArgs(call.q[:, t], call.k[:, t], call.v[:, t], s, z, *options))
        torch.testing.assert_close(out, full[:, t], **tolerance)
    torch.testing.assert_close((s, z), (s_full, z_full), rtol=1e-2, atol=1e-1)


def test_graph_of_a_step() -> None:
    q, k, v = (torch.randn(8, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    s, z = torch.randn(8, 4, 64, 64, device="cuda"), torch.rand(8, 4, 64, device="cuda")
    args = StepArgs(q, k, v, s, z, "elu+1", "elu+1", True, 1e-6, 1.0, "triton")
    BACKEND.step(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = BACKEND.step(args)
    for _ in range(3):
        for t in (q, k, v, s):
            t.copy_(torch.randn_like(t))
        graph.replay()
        for a, b in zip(captured, BACKEND.step(args), strict=True):
            assert torch.equal(a, b)


def test_graph_of_a_packed_call() -> None:
    """Lengths are read by the device when the graph runs."""
    shape = {"rows": 1200, "heads": 2, "e": 64, "m": 64, "dtype": torch.bfloat16, "device": "cuda"}
    call, *_ = Case(seed(), sequences=(500, 0, 700), **shape).call()
    assert call.cu_seqlens is not None
    BACKEND.forward(call, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = BACKEND.forward(call, True)
    call.cu_seqlens.copy_(torch.tensor([0, 3, 900, 1100]))
    graph.replay()
    for a, b in zip(captured, BACKEND.forward(call, True), strict=True):
        assert torch.equal(a, b)
