"""The gated delta rule's Hopper kernels on a GPU: results against fp64, dims, packing, strides, waves, bits, graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.delta.cases import CASES, Case
from tests.delta.cases import check as hold
from warploom import gated_delta_rule
from warploom.delta import hopper
from warploom.delta.hopper import run, run_back
from warploom.delta.hopper.ranges import Sizes
from warploom.delta.problem import DeltaCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(hopper.BACKEND.available() is not None, reason=f"needs a Hopper GPU: {hopper.BACKEND.available()}"),
]


def drawn(**options: Any) -> Case:
    return Case(random.randrange(2**31), device="cuda", dtype=torch.bfloat16, **options)


def wide(name: str, **changes: Any) -> dict[str, Any]:
    """A case with three times the tokens and sixteen times the heads: of few numbers the errors would be luck.

    A decay's gradient has one error for each chunk of a head. Of four heads of four chunks 3 draws of 76 passed its bound.
    """
    options: dict[str, Any] = {"tokens": 70, "heads": 1, **CASES[name], **changes}
    options.pop("dtype", None)
    if options["tokens"] > 1:
        options["tokens"] *= 3
        for lengths in ("lengths", "sequences"):
            if options.get(lengths) is not None:
                options[lengths] = tuple(3 * n for n in options[lengths])
    return {**options, "heads": 16 * options["heads"]}


def check(case: Case) -> None:
    hold(case, hopper.BACKEND)


def results(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    return *hopper.BACKEND.forward(call, True), *run_back.backward(call, dout, dstate)


def equal(found: tuple[Tensor | None, ...], wanted: tuple[Tensor | None, ...]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (40, 72)], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "one token"])
def test_case(name: str, dims: tuple[int, int]) -> None:
    check(drawn(**wide(name, e=dims[0], m=dims[1])))


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("dims", [(8, 8), (16, 200), (64, 64), (72, 192), (120, 256), (128, 136)], ids=str)
def test_dims(dims: tuple[int, int], group: int) -> None:
    """Both tiles of keys, one warpgroup and two, dims that fill no tile; a decay and a norm, then neither."""
    shape = {"tokens": 333, "batch": 2, "heads": 8, "group": group, "e": dims[0], "m": dims[1], "state": True}
    check(drawn(**shape))
    check(drawn(**shape, decay=None, normalize_qk=False, keys="long"))


@pytest.mark.parametrize("dim", [64, 128])
def test_many_tokens(dim: int) -> None:
    check(drawn(tokens=8192, heads=2, group=2, e=dim, m=dim, beta=2.0, state=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_many_waves(dim: int) -> None:
    """More blocks than run at once."""
    check(drawn(tokens=333, batch=5, heads=8, group=7, e=dim, m=2 * dim, state=True))


def test_many_sequences() -> None:
    """More than a warp looks at at once, empty ones among them."""
    lengths = tuple(random.randrange(4) * random.randrange(70) for _ in range(300))
    check(drawn(tokens=sum(lengths) + 90, sequences=lengths, heads=2, group=2, e=64, m=64, state=True, hidden=float("nan")))


@pytest.mark.parametrize("dim", [64, 128])
def test_short_ends(dim: int) -> None:
    """Sequences whose last chunk has few tokens, which nearly all of ddecay passes through."""
    lengths = (3, 66, 1, 130, 2, 70)
    check(drawn(tokens=300, sequences=lengths, heads=16, e=dim, m=dim, state=True, hidden=float("nan")))


@pytest.mark.parametrize("dim", [64, 128])
def test_one_token_each(dim: int) -> None:
    """No decay has a state to meet: their gradients are 0, and no rounding stands in for them."""
    call, dout, dstate = drawn(tokens=9, sequences=(1, 0, 1, 1, 1), heads=3, group=2, e=dim, m=dim).call()
    ddecay = run_back.backward(call, dout, dstate)[4]
    assert ddecay is not None and not ddecay.any()


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_do_not_pass_a_token_that_forgets(dim: int) -> None:
    """A decay of e^-50 in the midst of a chunk: what rounding leaves of the inverse is not carried past it either."""
    call, dout, _ = drawn(tokens=100, heads=16, e=dim, m=dim, keys="equal", beta=2.0, decay="mild").call()
    assert call.decay is not None
    call.decay[:, 30] = -50.0
    dout[:, :30] = 0.0
    dq, dk, dv, dbeta, *_ = run_back.backward(call, dout, None)
    for t in (dq, dk, dv, dbeta):
        assert float(t[:, :30].abs().max()) < 1e-6 < float(t[:, 30:].abs().max())


@pytest.mark.parametrize("dim", [64, 128])
def test_a_hundred_repeats(dim: int) -> None:
    """Also while another stream keeps the memory busy."""
    call, dout, dstate = drawn(tokens=2050, batch=2, heads=16, group=4, e=dim, m=dim, state=True).call()
    first = results(call, dout, dstate)
    busy, other = torch.empty(2**26, dtype=torch.int8, device="cuda"), torch.cuda.Stream()
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(other):
                busy.add_(1)
        assert equal(results(call, dout, dstate), first)


def test_strides() -> None:
    """Views as they are, or copied where TMA cannot read them: results are the same to the bit."""
    call, dout, dstate = drawn(tokens=300, heads=2, group=2, batch=2, e=64, m=64, state=True).call()
    assert call.decay is not None and call.state is not None
    want = results(call, dout, dstate)
    qkv = torch.cat([call.q, call.k], -1)
    views = replace(call, q=qkv[..., :64], k=qkv[..., 64:])
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :64],
        k=call.k.transpose(1, 2).contiguous().transpose(1, 2),
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
        beta=call.beta.transpose(1, 2).contiguous().transpose(1, 2),
        decay=torch.stack([call.decay, call.decay], -1)[..., 1],
        state=torch.cat([call.state, call.state], -1)[..., :64],
    )
    apart = dout.transpose(1, 3).contiguous().transpose(1, 3), torch.cat([dstate, dstate], -1)[..., 64:]
    for given, *gradients in ((views, dout, dstate), (odd, *apart)):
        assert equal(results(given, *gradients), want)


def test_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "ranges", lambda sizes: sizes.cut(False, 3))
    call, dout, dstate = drawn(tokens=500, heads=2, group=2, e=128, m=128, sequences=(130, 0, 300), state=True).call()
    wanted = results(call, dout, dstate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(call, dout, dstate)
    for t in found:
        assert t is not None
        t.fill_(float("nan"))
    graph.replay()
    assert equal(found, wanted)


@pytest.mark.parametrize("wanted", [2, 5, 64])
@pytest.mark.parametrize("kind", ["chunks of each sequence", "slots", "packed"])
def test_ranges(kind: str, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a backward pass is cut, and it gives the same bits as in one range. Fewer heads: see ``wide``."""
    each = kind == "chunks of each sequence"
    shape: dict[str, Any] = {"batch": 3, "lengths": (700, 130, 0)}
    if kind == "packed":
        shape = {"sequences": (0, 300, 1, 64, 250, 0)}
    case = drawn(tokens=700, heads=16, e=64, m=128, state=True, **shape)
    found = []
    for n in (wanted, 1):
        monkeypatch.setattr(Sizes, "ranges", lambda sizes, n=n: sizes.cut(each, n))
        check(case)
        found.append(results(*case.call()))
    assert equal(*found)


def test_a_backward_pass_takes_no_more_room_than_it_says() -> None:
    call, dout, _ = drawn(tokens=8192, heads=8, group=2, e=128, m=128).call()
    run_back.backward(call, dout, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run_back.backward(call, dout, None)
    torch.cuda.synchronize()
    given = sum(t.numel() * t.element_size() for t in found if t is not None)
    tensors = 2 * (call.q.numel() + call.v.numel()) * call.q.element_size()
    assert torch.cuda.max_memory_allocated() - before <= given + tensors + 2**22


def test_dispatch_and_a_state_passed_on() -> None:
    """The public function runs these kernels, and in two halves comes to the same state as in one."""
    call, *_ = drawn(tokens=256, heads=2, group=4, e=128, m=128).call()
    given = {name: getattr(call, name) for name in ("q", "k", "v", "beta", "decay")}
    out, state = gated_delta_rule(**given, normalize_qk=True, return_state=True)
    assert equal((out, state), run.forward(call, True))
    halves = [{name: t[:, part] for name, t in given.items()} for part in (slice(0, 128), slice(128, 256))]
    first, between = gated_delta_rule(**halves[0], normalize_qk=True, return_state=True)
    second, last = gated_delta_rule(**halves[1], normalize_qk=True, return_state=True, state=between)
    assert equal((torch.cat([first, second], 1), last), (out, state))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_beta_and_decay_are_read_as_they_are(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Kept calls give the bits of checked ones, which convert; from odd addresses and by odd strides too, packed or not."""
    call, *_ = drawn(tokens=200, heads=2, group=3, e=128, m=64).call()
    assert call.decay is not None
    beta, decay = (t.to(dtype) for t, dtype in zip((call.beta, call.decay), dtypes, strict=True))
    wider = [torch.cat([t[..., :1], t], -1)[..., 1:] for t in (beta, decay)]
    turned = [t.mT.contiguous().mT for t in (beta, decay)]
    for given in ((beta, decay), wider, turned):
        rows = call.q, call.k, call.v, *given
        found = [gated_delta_rule(*rows, normalize_qk=True, return_state=True) for _ in range(4)]
        assert all(equal(each, found[0]) for each in found)
        whole = [t[0] for t in rows]
        starts = torch.tensor([0, 77, 200], dtype=torch.int32, device="cuda")
        found = [gated_delta_rule(*whole, normalize_qk=True, cu_seqlens=starts, return_state=True) for _ in range(4)]
        assert all(equal(each, found[0]) for each in found)


def test_a_device_that_is_not_the_current_one() -> None:
    index = torch.cuda.device_count() - 1
    call, *_ = drawn(tokens=100, heads=2, e=64, m=64).call()
    moved: dict[str, Any] = {n: t.to(f"cuda:{index}") for n, t in vars(call).items() if isinstance(t, Tensor)}
    found: DeltaCall = replace(call, **moved)
    for a, b in zip(hopper.BACKEND.forward(call, True), hopper.BACKEND.forward(found, True), strict=True):
        assert a is not None and b is not None and torch.equal(a, b.to(a.device))
