"""What the host does before a launch, with a walk in Python in the kernel's place: operands, views, weights, what goes on.

The passes over rows around it are in Python too; `tests/linear/interpreted/test_rows.py` has Triton's.
"""

from __future__ import annotations

import gc
import inspect
import math
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.linear.log_terms import added_up
from tests.linear.triton_cases import Case
from tests.linear.triton_model import Results, results
from tests.plain import parameters
from warploom.linear import hopper, registry, triton  # noqa: F401  (registry fills the dispatch list)
from warploom.linear.feature_maps import NAMED
from warploom.linear.hopper import run
from warploom.linear.hopper.config import WalkConfig
from warploom.linear.hopper.log_gradients import Terms
from warploom.linear.hopper.plan import config, configs
from warploom.linear.problem import LinearCall
from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEGMENTS = 3  # where sequences are cut
PLAIN: dict[str, Any] = {"map_q": "identity", "map_k": "identity", "normalize": False, "dtype": torch.bfloat16}


def walk(spec: ModuleSpec) -> Callable[..., None]:
    """The sum by its definition, held to the kernel's signature and to what it can read."""
    variant = dict(spec.config)
    if variant["paired"]:
        return pair(WalkConfig(**variant))

    def call(
        a: Tensor,
        b: Tensor,
        c: Tensor,
        out: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        states: Tensor | None,
        fades: Tensor | None,
        logs: Tensor | None,
        x: Tensor | None,
        dots: Tensor | None,
        totals: Tensor | None,
        dots_k: Tensor | None,
        totals_k: Tensor | None,
        found: Tensor | None,
        scale: float,
    ) -> None:
        for t in (a, b, c, out):
            assert t is out or t.dtype == torch.bfloat16
            readable(t)
        assert a.shape == b.shape and c.shape == out.shape and a.shape[:3] == c.shape[:3]
        assert a.shape[3] <= variant["head_dim"] and c.shape[3] <= variant["head_dim_v"]
        assert (out.dtype == torch.float32) == variant["wide"]
        if variant["cut"]:
            assert states is not None and fades is not None and states.shape[:3] == fades.shape == (*a.shape[:3:2], SEGMENTS)
        else:
            assert states is None and fades is None
        scores = torch.einsum("bihe,bjhe->bhij", a.double(), b.double())
        sums_logs = variant["fading"] and not (variant["a_head"] or variant["cut"])
        assert (logs is not None) == (sums_logs or variant["finds"])
        assert logs is None or (logs.dtype == torch.float32 and logs.shape == a.shape[:3])
        vectors = (weights, variant["weighted"] or (variant["fading"] and not sums_logs)), (bias, variant["biased"])
        for vector, present in vectors:
            assert (vector is not None) == present
            if vector is not None:
                shape = (a.shape[2],) if variant["a_head"] else scores.shape[:3]
                assert vector.is_contiguous() and vector.dtype == torch.float32 and vector.shape == shape
        if bias is not None:
            assert variant["reverse"] and variant["weighted"]
            scores = scores - bias[:, :, None]
        scores = scores.triu() if variant["reverse"] else scores.tril()
        if variant["a_head"]:
            assert weights is not None
            weights = sums_of_logs(weights.expand(a.shape[:3]), variant["chunk"])
        if sums_logs:
            assert logs is not None
            weights = sums_of_logs(logs, variant["chunk"])
        if variant["fading"]:
            assert weights is not None
            # Sums within chunks, of all before and of the token's own, in log2.
            ends = weights[..., variant["chunk"] - 1 :: variant["chunk"]].double().cumsum(-1)
            before = torch.nn.functional.pad(ends, (1, 0)).repeat_interleave(variant["chunk"], -1)[..., : weights.shape[2]]
            sums = before + weights
            apart = sums[..., None] - sums[:, :, None]
            scores = scores * torch.exp2((-apart if variant["reverse"] else apart).clamp_max(0.0))
        elif weights is not None:
            scores = scores * (weights[:, :, None] if variant["reverse"] else weights[..., None])
        out.copy_(scale * torch.einsum("bhij,bjhm->bihm", scores, c.double()))
        assert (x is not None) == variant["terms"]
        assert (dots is not None) == (totals is not None) == (variant["terms"] or variant["finds"])
        assert (dots_k is not None) == (totals_k is not None) == (found is not None) == variant["finds"]
        if dots is not None and totals is not None and dots_k is not None and totals_k is not None and found is not None:
            assert logs is not None and logs.shape == found.shape
            assert found.is_contiguous() and found.dtype == logs.dtype == torch.float32
            terms = Terms(dots, totals), Terms(dots_k, totals_k)
            found.copy_(added_up(*terms, logs, variant["chunk"], scale))
        if x is not None and dots is not None and totals is not None:
            assert x.shape == c.shape
            readable(x)
            leave_terms(variant, scores, x.double(), c.double(), dots, totals)

    return call


def pair(variant: WalkConfig) -> Callable[..., None]:
    """Both walks of a pair."""
    of_keys, of_values = (walk(replace(each, paired=False).spec) for each in (variant, variant.beside))

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        dk: Tensor,
        dv: Tensor,
        weights: Tensor | None,
        logs: Tensor | None,
        dots: Tensor,
        totals: Tensor,
        scale: float,
    ) -> None:
        of_keys(v, dout, q, dk, weights, None, None, None, logs, k, dots, totals, None, None, None, scale)
        of_values(k, q, dout, dv, weights, None, None, None, logs, *[None] * 6, scale)

    return call


def leave_terms(variant: dict[str, Any], scores: Tensor, x: Tensor, c: Tensor, dots: Tensor, totals: Tensor) -> None:
    """What the gradient of the logs is made of, by its definition."""
    config = WalkConfig(**variant)
    chunk, groups, seqlen = config.chunk, config.parts, x.shape[1]
    batch, heads, chunks = x.shape[0], x.shape[2], -(-seqlen // chunk)
    pairs = config.meets * config.blocks
    assert dots.shape == (groups + pairs, batch, heads, seqlen) and totals.shape == (groups, batch, heads, chunks)
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (dots, totals))
    at = torch.arange(seqlen) // chunk
    together = at[:, None] == at
    taken = x * torch.einsum("bhij,bjhm->bihm", scores.masked_fill(together, 0.0), c)
    for g in range(groups):
        dots[g] = taken[..., g * 64 : (g + 1) * 64].sum(-1).mT
    totals.copy_(torch.nn.functional.pad(dots[:groups], (0, -seqlen % chunk)).unflatten(-1, (chunks, chunk)).sum(-1))
    if pairs:
        met = (scores * torch.einsum("bihm,bjhm->bhij", x, c) * together).tril(-1)
        dots[groups:] = (met.sum(-1) - met.sum(-2)) / pairs


def mapped(x: Tensor, name: str) -> Tensor:
    readable(x)
    return x if name == "identity" else NAMED[name](x.float()).to(x.dtype)


def mapped_and_sums(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    found = mapped(x, name)
    return found, found.double().cumsum(1)  # what is made of them is rows.py's own


def denominators(q: Tensor, k: Tensor, sums: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    norm = (scale * (q.double() * sums).sum(-1).transpose(1, 2) + eps).float().contiguous()
    return norm, 1 / norm


def through(gradient: Tensor, mapped: Tensor, name: str) -> Tensor:
    slopes = {"identity": torch.ones_like(mapped), "elu+1": mapped.clamp_max(1.0), "relu": (mapped > 0).to(mapped.dtype)}
    return gradient.mul_(slopes[name])


def queries_gradient(
    q: Tensor, k: Tensor, sums: Tensor, x: Tensor, weights: Tensor, scale: float, name: str
) -> tuple[Tensor, Tensor]:
    weight = weights.double().transpose(1, 2)[..., None]
    bias = weight * (q * x.double()).sum(-1, keepdim=True)
    dq = weight * (x - scale * bias * sums)
    return through(dq, q.double(), name).to(q.dtype), bias[..., 0].transpose(1, 2).float().contiguous()


def readable(t: Tensor) -> None:
    assert t.stride(-1) == 1 and not t.data_ptr() % 16 and all(s % 8 == 0 for s in t.stride()[:-1])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (mapped, mapped_and_sums, denominators, queries_gradient, through):
        monkeypatch.setattr(run, function.__name__, function)
    run._function.cache_clear()
    monkeypatch.setattr(hopper, "_processors", lambda index: 1)
    monkeypatch.setattr(modules, "loaded", lambda spec: None)
    monkeypatch.setattr(modules, "load", walk)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def computed(call: LinearCall, dout: Tensor) -> dict[str, Tensor]:
    out, norm, *states = hopper.BACKEND.forward(call, False)
    assert states == [None, None] and (norm is None) == (not call.normalize)
    dq, dk, dv, *states, ddecay = hopper.BACKEND.backward(call, dout, norm, None, None)
    assert states == [None, None] and (ddecay is None) == (not call.decay_grad)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv} | ({} if ddecay is None else {"ddecay": ddecay})


def assert_near(found: dict[str, Tensor], want: Results) -> None:
    for name, t in found.items():
        if name == "ddecay":
            truth = want.ddecay.sum((0, 1)) if t.ndim == 1 else want.ddecay
            # Behind tokens that forget sums of logs are in the ten thousands, of which fp32 has two digits behind the point.
            torch.testing.assert_close(t.double(), truth, rtol=2e-3, atol=1e-3 * float(truth.abs().max()))
            continue
        assert t.dtype == torch.bfloat16
        torch.testing.assert_close(t.double(), getattr(want, name), rtol=2**-7, atol=1e-2)


def test_the_walk_in_python_takes_what_the_compiled_one_takes() -> None:
    """By position: else what the host hands over in a wrong order would be right here."""
    stand_in = list(inspect.signature(walk(config(256).spec)).parameters)
    assert [*stand_in, "stream"] == parameters("linear/hopper/walk.py", "Walk.__call__")
    stand_in = list(inspect.signature(walk(configs(128, False, True, logs=True, paired=True)[-1].spec)).parameters)
    assert [*stand_in, "stream"] == parameters("linear/hopper/walk_pair.py", "Pair.__call__")


@pytest.mark.parametrize("dims", [(64, 136), (200, 72), (256, 256), (72, 128)])
def test_plain(dims: tuple[int, int]) -> None:
    case = Case(random.randrange(2**31), rows=21, batch=2, heads=3, e=dims[0], m=dims[1], scale=0.3, **PLAIN)
    call, dout, *_ = case.call()
    assert_near(computed(call, dout), results(call, dout, None, None, exact=True))


def sums_of_logs(logs: Tensor, chunk: int) -> Tensor:
    sums = [part.double().clamp_min(-1000.0).cumsum(1) for part in logs.split(chunk, 1)]
    return (torch.cat(sums, 1).transpose(1, 2) / math.log(2)).float().contiguous()


@pytest.mark.parametrize("decay", ["head", "token that forgets"])
@pytest.mark.parametrize(("dims", "processors"), [((136, 136), 1), ((72, 128), 1), ((72, 128), 12), ((64, 64), 1)], ids=str)
def test_a_decay(dims: tuple[int, int], processors: int, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one chunk; with a gradient of the logs where walks leave what it is made of, also side by side."""
    monkeypatch.setattr(run, "log_gradients", added_up)
    monkeypatch.setattr(hopper, "_processors", lambda index: processors)
    case = Case(random.randrange(2**31), rows=150, batch=2, heads=3, e=dims[0], m=dims[1], decay=decay, scale=0.3, **PLAIN)
    call, dout, *_ = case.call()
    if max(dims) <= 128:
        assert_near(computed(call, dout), results(call, dout, None, None, exact=True))
    call = replace(call, decay_grad=False)
    assert_near(computed(call, dout), results(call, dout, None, None, exact=True))


@pytest.mark.parametrize("decay", ["head", "token"])
def test_segments(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk is given what the segments' own states were asked for."""
    rows, heads, asked = 3 * 1024, 4, []

    def bind_states(k: Tensor, v: Tensor, segments: int, chunk: int, log_stride: int, a_head: bool) -> Any:
        def own_states(k: Tensor, v: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
            for t in (k, v):
                readable(t)
            asked.append((segments, chunk, tuple(logs.shape)))
            assert logs.stride()[-2 + a_head] == log_stride
            shape = k.shape[0], k.shape[2], segments
            return torch.zeros(*shape, 64, 64), torch.zeros(shape)

        return own_states

    monkeypatch.setattr(run, "bind_sums", lambda logs, chunk: partial(sums_of_logs, chunk=chunk))
    monkeypatch.setattr(run, "bind_states", bind_states)
    monkeypatch.setattr(hopper, "_processors", lambda index: 3 * heads)
    case = Case(random.randrange(2**31), rows=rows, heads=heads, e=64, m=64, decay=decay, scale=0.3, **PLAIN)
    call, dout, *_ = case.call()
    still = replace(call, decay_grad=False)
    want = results(call, dout, None, None, exact=True)
    assert_near({"out": hopper.BACKEND.forward(still, False)[0]}, want)
    assert asked == [(SEGMENTS, 64, (heads,) if decay == "head" else (1, heads, rows))]

    def gradient_states(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor, logs: Tensor, segments: int, chunk: int
    ) -> list[tuple[Tensor, Tensor]]:
        for t in (q, dout):
            readable(t)
        own_states = bind_states(k, v, segments, chunk, logs.stride()[-2:][0], logs.ndim == 1)
        return [own_states(k, v, logs) for _ in range(3)]

    monkeypatch.setattr(run, "gradient_states", gradient_states)
    monkeypatch.setattr(run, "log_gradients", added_up)
    assert_near(computed(call, dout), want)
    assert asked[1:] == 4 * asked[:1]
    assert_near(computed(still, dout), results(still, dout, None, None, exact=True))


def assert_goes_on(call: LinearCall, dout: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are another implementation's."""

    class Next:
        def backward(self, *given: Any) -> tuple[Any, ...]:
            return given

        bind_backward = backward

    monkeypatch.setattr(hopper, "_beside", lambda call: Next())
    for backward in (hopper.BACKEND.backward, hopper.BACKEND.bind_backward):
        assert backward(call, dout, None, None, None) == (call, dout, None, None, None)


def test_a_decay_with_a_gradient_of_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(random.randrange(2**31), rows=150, heads=3, e=136, m=128, decay="token", scale=0.3, **PLAIN)
    call, dout, *_ = case.call()
    assert call.decay_grad
    assert_near({"out": hopper.BACKEND.forward(call, False)[0]}, results(call, dout, None, None, exact=True))
    assert_goes_on(call, dout, monkeypatch)


@pytest.mark.parametrize(("decay", "grad"), [(None, False), ("token", False), ("token", True)], ids=str)
def test_bound(decay: str | None, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept gives what the call gave, and hands back what starts off 16 bytes."""
    monkeypatch.setattr(run, "log_gradients", added_up)
    case = Case(random.randrange(2**31), rows=150, heads=3, e=72, m=128, decay=decay, scale=0.3, **PLAIN)
    call, dout, *_ = case.call()
    call = replace(call, decay_grad=grad)
    monkeypatch.setattr(hopper, "_beside", lambda call: SimpleNamespace(bind=lambda *given: given))
    assert hopper.BACKEND.bind(call, True) == (call, True)
    bound = hopper.BACKEND.bind(call, False)
    assert bound is not None
    tensors = (call.q, call.k, call.v, None, None, call.decay, None, None)
    out, *rest = bound(*tensors)
    assert torch.equal(out, hopper.BACKEND.forward(call, False)[0]) and rest == [None, None, None]
    storage = torch.zeros(call.q.numel() + 1, dtype=call.q.dtype)
    off = storage[1:].view(call.q.shape)
    assert bound(off, *tensors[1:]) is None
    odd = replace(call, q=torch.cat([call.q, call.q[..., :3]], -1)[..., :72])
    assert hopper.BACKEND.bind(odd, False) is None

    none = (None, None, None)
    bound = hopper.BACKEND.bind_backward(call, dout, *none)
    assert bound is not None and hopper.BACKEND.bind_backward(odd, dout, *none) is None
    want = hopper.BACKEND.backward(call, dout, *none)
    for upstream in (dout, dout.transpose(1, 3).contiguous().transpose(1, 3)):
        found = bound(upstream, *none, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], want[:3], strict=True)) and found[3:5] == none[:2]
        assert torch.equal(found[5], want[5]) if grad else found[5] is None
    assert bound(dout, *none, off, *tensors[1:]) is None


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_kept_holds_no_tensors(grad: bool) -> None:
    call, dout, *_ = Case(random.randrange(2**31), rows=70, e=72, m=72, decay="token", **PLAIN).call()
    call = replace(call, decay_grad=grad)
    kept = hopper.BACKEND.bind(call, False), hopper.BACKEND.bind_backward(call, dout, None, None, None)
    assert None not in kept
    assert call.decay is not None
    held = [weakref.ref(t) for t in (call.q, call.k, call.v, call.decay)]
    del call, dout, _
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


MAPS = [("identity", "identity"), ("elu+1", "elu+1"), ("relu", "elu+1"), ("elu+1", "identity")]


@pytest.mark.parametrize("maps", MAPS, ids=str)
@pytest.mark.parametrize("dims", [(200, 136), (64, 256)])
def test_denominators(dims: tuple[int, int], maps: tuple[str, str]) -> None:
    options = {**PLAIN, "normalize": True, "scale": 0.3, "map_q": maps[0], "map_k": maps[1]}
    call, dout, *_ = Case(random.randrange(2**31), rows=21, batch=2, heads=3, e=dims[0], m=dims[1], **options).call()
    if maps[1] == "identity":
        call = replace(call, k=call.k.abs())
    want = results(call, dout, None, None, exact=True)
    assert_near(computed(call, dout), want)
    torch.testing.assert_close(hopper.BACKEND.forward(call, False)[1], want.norm.float(), rtol=1e-2, atol=1e-2)


class Beside:
    """The next implementation."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forward(self, call: LinearCall, return_state: bool) -> None:
        self.asked.append(f"forward {return_state}")

    def backward(self, call: LinearCall, dout: Tensor, norm: Tensor, *states: Tensor | None) -> None:
        self.asked.append(f"backward {[t is not None for t in states]}")


def test_states_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is asked for, and a gradient that arrives through it."""
    beside = Beside()
    monkeypatch.setattr(hopper, "_beside", lambda call: beside)
    call, dout, ds, dz = Case(random.randrange(2**31), rows=9, e=136, m=136, **PLAIN).call()
    hopper.BACKEND.forward(call, True)
    hopper.BACKEND.backward(call, dout, None, ds, None)
    hopper.BACKEND.backward(call, dout, None, None, dz)
    assert beside.asked == ["forward True", "backward [True, False]", "backward [False, True]"]


def test_views() -> None:
    """Only what TMA cannot read is copied: odd strides, odd addresses, a last dimension that is not contiguous, no stride."""
    call, dout, *_ = Case(random.randrange(2**31), rows=21, batch=2, heads=2, e=136, m=136, **PLAIN).call()
    want = computed(call, dout)
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :136],
        k=call.k.transpose(1, 2).contiguous().transpose(1, 2),
        v=torch.cat([call.v[..., :1], call.v], -1)[..., 1:],
    )
    for name, t in computed(odd, dout.transpose(1, 3).contiguous().transpose(1, 3)).items():
        assert t.is_contiguous() and torch.equal(t, want[name]), name
    ones = torch.ones((), dtype=torch.bfloat16).expand(call.v.shape)
    for name, t in computed(call, ones.contiguous()).items():
        assert torch.equal(t, computed(call, ones)[name]), name


def test_a_capturing_stream_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call, *_ = Case(1, rows=9, e=136, m=136, **PLAIN).call()
    with pytest.raises(RuntimeError, match="is not loaded, which a capturing stream cannot do"):
        hopper.BACKEND.forward(call, False)


def test_a_loaded_module_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(modules, "loaded", walk)
    call, *_ = Case(1, rows=9, e=136, m=136, **PLAIN).call()
    out, _ = run.forward(call, 1)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("missing", "next_one"), [(None, "triton"), ("no such GPU", "reference")])
def test_what_goes_on_goes_to_triton_or_past_it(missing: str | None, next_one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that says it is a GPU."""
    monkeypatch.setattr(LinearCall, "device", "cuda")
    monkeypatch.setattr(triton.BACKEND, "available", lambda: missing)
    call, *_ = Case(1, rows=9, e=136, m=136, **PLAIN).call()
    assert hopper._beside(call).name == next_one
