"""Linear attention's Hopper walks on a GPU: results against fp64, strides, poisoned outputs, many waves, bits, graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.linear.triton_cases import Case
from tests.linear.triton_model import decay_of_heads, results
from warploom import linear_attention
from warploom.attention.judge import judge
from warploom.linear import hopper
from warploom.linear.problem import LinearCall
from warploom.runtime import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(hopper.BACKEND.available() is not None, reason=f"needs the Hopper walks: {hopper.BACKEND.available()}"),
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"map_q": "identity", "map_k": "identity", "normalize": False, "scale": 0.3},
    "normalized": {"map_q": "identity", "map_k": "identity"},
    "elu+1": {"scale": 0.3},
    "maps of two kinds": {"map_q": "relu"},
}


def case(kind: str, **shape: Any) -> Case:
    e = shape.setdefault("e", 256)
    shape.setdefault("m", e)
    return Case(random.randrange(2**31), dtype=torch.bfloat16, device="cuda", **{**KINDS[kind], **shape})


def computed(call: LinearCall, dout: Tensor) -> dict[str, Tensor]:
    out, norm, *_ = hopper.BACKEND.forward(call, False)
    dq, dk, dv, _, _, ddecay = hopper.BACKEND.backward(call, dout, norm, None, None)
    found = {"out": out, "norm": norm, "dq": dq, "dk": dk, "dv": dv, "ddecay": ddecay}
    return {name: t for name, t in found.items() if t is not None}


def check(of: Case) -> None:
    call, dout, *_ = of.call()
    check_call(replace(call, decay_grad=call.decay_grad and hopper._leaves_terms(call)), dout, of)


def check_call(call: LinearCall, dout: Tensor, of: object) -> None:
    """With and without a gradient of the logs, where it asks for one; the same bits twice."""
    truth, model = ({**results(call, dout, None, None, exact=exact)._asdict()} for exact in (True, False))
    if call.decay is not None and call.decay.ndim == 1:
        truth["ddecay"], model["ddecay"] = decay_of_heads(call, dout, None, None)
    for each in [call, replace(call, decay_grad=False)][: 1 + call.decay_grad]:
        found, again = (computed(each, dout) for _ in range(2))
        assert ("ddecay" in found) == each.decay_grad
        for name, t in found.items():
            verdict = judge(name, t, truth[name], model[name], torch.bfloat16)
            assert verdict.passed, f"{verdict}\n{of}"
            assert torch.equal(t, again[name]), f"{name}\n{of}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (136, 200), (64, 256), (248, 72), (184, 136)], ids=str)
@pytest.mark.parametrize("rows", [1, 333, 1025])
def test_dims(rows: int, dims: tuple[int, int], kind: str) -> None:
    """Odd lengths, one of which ends a row into a chunk; head dims that fill no tile; a mean that makes sums grow."""
    check(case(kind, rows=rows, batch=2, heads=3, e=dims[0], m=dims[1], mean=0.5))


@pytest.mark.parametrize("dims", [(128, 128), (72, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("rows", [1, 333, 1025])
def test_narrower_heads(rows: int, dims: tuple[int, int]) -> None:
    check(case("plain", rows=rows, batch=2, heads=3, e=dims[0], m=dims[1], mean=0.5))


@pytest.mark.parametrize("decay", ["head", "token", "token that forgets"])
@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (136, 200), (248, 72), (128, 128), (72, 64), (64, 64)], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 333, 1025])
def test_a_decay(rows: int, dims: tuple[int, int], decay: str) -> None:
    """Up to 128 dims the gradient of the logs, too."""
    check(case("plain", rows=rows, batch=2, heads=60 if dims == (64, 64) else 3, e=dims[0], m=dims[1], decay=decay))


WEAK, FORGOTTEN = -2e-4, -torch.inf


@pytest.mark.parametrize("logs", ["weak", "steep", "weak with steep ones", "weak, some forget", "steep first"])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(4096 + 37, 4, 64), (2500, 90, 64), (3000, 8, 128)])
def test_the_gradient_of_logs_forgets(tokens: int, heads: int, dim: int, logs: str) -> None:
    """It is a sum over all later tokens: what was large stays nowhere where much or all has been forgotten since."""
    call, dout, *_ = case("plain", rows=tokens, heads=heads, e=dim, decay="token").call()
    assert call.decay is not None
    u = torch.rand_like(call.decay)
    weak, steep, few = WEAK * u, -5.0 * (1 + u), torch.rand_like(u) < 1 / 300
    chosen = {
        "weak": weak,
        "steep": steep,
        "weak with steep ones": weak.where(~few, -20.0),
        "weak, some forget": weak.where(~few, FORGOTTEN),
        "steep first": torch.cat([steep[:, : tokens // 2], weak[:, tokens // 2 :]], 1),
    }[logs]
    check_call(replace(call, decay=chosen), dout, (tokens, heads, dim, logs))


@pytest.mark.parametrize(("dim", "decay"), [(64, "token"), (128, "token"), (256, "token"), (128, None)])
def test_a_decay_or_none_over_many_waves(dim: int, decay: str | None) -> None:
    check(case("plain", rows=321, batch=5, heads=53, e=dim, decay=decay))


@pytest.mark.parametrize("decay", ["head", "token", "token that forgets"])
@pytest.mark.parametrize(("rows", "heads"), [(4096, 8), (5000, 16), (16384 + 1, 5)])
def test_a_decay_over_segments(rows: int, heads: int, decay: str) -> None:
    """Whole ones, a short last one, more than are added up at once."""
    of = case("plain", rows=rows, heads=heads, e=64, decay=decay)
    assert hopper._segments(of.call()[0]) > 1
    check(of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [192, 256])
def test_many_waves(dim: int, kind: str) -> None:
    """More blocks than run at once, three waves and a part of one."""
    check(case(kind, rows=321, batch=5, heads=21, e=dim))


@pytest.mark.parametrize("kind", ["plain", "normalized"])
def test_many_tokens(kind: str) -> None:
    """The longest sequences: sums pass bf16's 256."""
    assert hopper.LONGEST == 16384
    check(case(kind, rows=16384, heads=2, mean=1.0))


@pytest.mark.parametrize("kind", ["plain", "elu+1"])
def test_strides(kind: str) -> None:
    """Views as they are, or copied where TMA cannot read them: results are the same to the bit."""
    call, dout, *_ = case(kind, rows=300, heads=2, batch=2).call()
    want = computed(call, dout)
    packed = torch.cat([call.q, call.k, call.v], -1)
    views = dict(zip(("q", "k", "v"), packed.split(256, -1), strict=True))
    odd = {
        "q": torch.cat([call.q, call.q[..., :3]], -1)[..., :256],
        "k": call.k.transpose(1, 2).contiguous().transpose(1, 2),
        "v": call.v.transpose(1, 3).contiguous().transpose(1, 3),
    }
    for given, upstream in ((views, dout), (odd, dout.transpose(1, 2).contiguous().transpose(1, 2))):
        for name, t in computed(replace(call, **given), upstream).items():
            assert torch.equal(t, want[name]), name


def test_an_expanded_gradient() -> None:
    call, dout, *_ = case("normalized", rows=200, heads=2).call()
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(dout.shape)
    want = computed(call, ones.contiguous())
    for name, t in computed(call, ones).items():
        assert torch.equal(t, want[name]), name


@pytest.mark.parametrize("kind", ["plain", "elu+1"])
def test_a_hundred_repeats(kind: str) -> None:
    """Also while another stream keeps the memory busy."""
    call, dout, *_ = case(kind, rows=700, batch=4, heads=9).call()
    first = computed(call, dout)
    busy = torch.empty(2**26, dtype=torch.int8, device="cuda")
    other = torch.cuda.Stream()
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(other):
                busy.add_(1)
        for name, t in computed(call, dout).items():
            assert torch.equal(t, first[name]), name


@pytest.mark.parametrize("kind", ["plain", "elu+1"])
def test_graph(kind: str) -> None:
    call, dout, *_ = case(kind, rows=300, heads=4).call()
    computed(call, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = computed(call, dout)
    for _ in range(3):
        for t in (call.q, call.k, call.v, dout):
            t.copy_(torch.randn_like(t))
        graph.replay()
        for name, t in computed(call, dout).items():
            assert torch.equal(captured[name], t), name


def draw(batch: int, rows: int, heads: int, **options: Any) -> tuple[Tensor, ...]:
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True, **options}
    return tuple(torch.randn(batch, rows, heads, 256, **shape) for _ in range(3))


@pytest.mark.parametrize("options", [{}, {"feature_map": "identity", "normalize": False}], ids=str)
def test_dispatch_compile_and_the_ops_contract(options: dict[str, Any]) -> None:
    from warploom.linear.arguments import linear_call
    from warploom.linear.ops import flat

    defaults = {"causal": True, "feature_map": "elu+1", "normalize": True, "eps": 1e-6, "scale": 1.0}
    tensors = draw(4, 70, 8)
    call = linear_call(*tensors, **{**defaults, **options}, state=None, lengths=None, cu_seqlens=None)
    assert dispatch.choose(call, None, "linear") == "hopper"
    torch.library.opcheck(torch.ops.warploom.linear_attention.default, flat(call, "hopper", False))
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    want, got = (f(*tensors, **options) for f in (linear_attention, compiled))
    assert torch.equal(want, got)
    for a, b in zip(*(torch.autograd.grad(t.sum(), tensors) for t in (want, got)), strict=True):
        assert torch.equal(a, b)


def test_a_state_and_its_gradient_come_from_triton() -> None:
    q, k, v = draw(4, 70, 8)
    out, state = linear_attention(q, k, v, return_state=True)
    other, last = linear_attention(q, k, v, return_state=True, backend="triton")
    assert torch.equal(out, other) and torch.equal(state.s, last.s) and torch.equal(state.z, last.z)
    found, wanted = (torch.autograd.grad((o.sum(), s.s.sum()), (q, k, v)) for o, s in ((out, state), (other, last)))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [192, 256])
def test_gradients_of_a_decay_of_wide_heads_come_from_triton(dim: int) -> None:
    q, k, v = (torch.randn(2, 300, 20, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    decay = (torch.rand(2, 300, 20, device="cuda") * -0.1).requires_grad_()
    options: dict[str, Any] = {"decay": decay, "feature_map": "identity", "normalize": False}
    out, other = (linear_attention(q, k, v, backend=backend, **options) for backend in ("hopper", "triton"))
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(t, (q, k, v, decay), dout) for t in (out, other))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_both_gpus_or_the_one() -> None:
    """On a device that is not the current one, where there are two."""
    index = torch.cuda.device_count() - 1
    call, dout, *_ = case("elu+1", rows=100, heads=2).call()
    moved = replace(call, **{name: getattr(call, name).to(f"cuda:{index}") for name in ("q", "k", "v")})
    for (name, a), b in zip(computed(call, dout).items(), computed(moved, dout.to(f"cuda:{index}")).values(), strict=True):
        assert torch.equal(a, b.to(a.device)), name


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "a_head"),
    [(2048, 32, 128, False), (2048, 32, 128, True), (2048, 90, 128, False), (4096, 8, 64, False), (4096, 8, 64, True)],
)
def test_launches_that_begin_early(rows: int, heads: int, dim: int, a_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no fills between launches; logs are another call's each time, so that what an earlier call left would be seen."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    q, k, v, dout = (torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    logs = [torch.rand((heads,) if a_head else (1, rows, heads), device="cuda") * -0.1 for _ in range(6)]

    def gradients(decay: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v, decay)]
        options: dict[str, Any] = {"feature_map": "identity", "normalize": False, "backend": "hopper"}
        out = linear_attention(*leaves[:3], decay=leaves[3], **options)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    alone = []
    for decay in logs:
        torch.cuda.synchronize()
        alone.append(gradients(decay))
    torch.cuda.synchronize()
    for i in range(60):
        found = gradients(logs[i % 6])
        assert all(torch.equal(a, b) for a, b in zip(found, alone[i % 6], strict=True)), i
