"""The masks suite: each mask against FlexAttention and cuDNN's, beside a dense causal call of about the same length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.bench import peers
from warploom.bench.calls import Shape, backward, forward, gradients, torch_sdpa
from warploom.bench.captured import capture
from warploom.bench.choice import Choice, chosen
from warploom.bench.harness import Call, Case, Comparison, Own, first_line, host
from warploom.bench.intervals import row_intervals
from warploom.bench.mask_bars import CUDNN, DENSE, FLEX, NEW, PLAIN, UNMASKED, VECTORS, share, verdict
from warploom.bench.masks import NOTHING, MaskPair, pairs
from warploom.bench.reference import Dropout, one_head
from warploom.masks import Causal, Mask
from warploom.masks.columns import column_mask
from warploom.masks.intervals import ResolvedMask, intervals_of

SHAPES = (Shape(1, 32768, 64, 128, heads_kv=8), Shape(1, 8192, 32, 64), Shape(1, 16384, 8, 256), Shape(4, 8192, 16, 128))
QUICK_SHAPES = (Shape(1, 256, 2, 16),)
OPTIONS = ("deterministic", "dropout forward", "dropout backward")
PASSES = ("mask", "host", "forward", "backward", *OPTIONS)
# What an option costs is measured on these; it depends little on the mask.
OPTIONS_ON = ("causal", "causal documents")
DROPOUT = 0.1
FRESH = 32  # masks that no call has seen, for the first layer's host time: more than are timed
# What a run takes, for --list: seconds a comparison besides its rounds (inputs, checks), those of compiling, and what
# kernels reach. FlexAttention compiles each pass of each case, cuDNN's once a shape.
CHECKING, FLEX_COMPILES, CUDNN_COMPILES, REACHED = 1.0, 10.0, 20.0, 400e12


def mask_cases(device: torch.device, quick: bool, choice: Choice) -> list[Case]:
    """A case for each chosen mask and shape."""
    shapes = {_named(shape): shape for shape in (QUICK_SHAPES if quick else SHAPES)}
    passes = chosen("--passes", choice.passes, PASSES)
    found = []
    for label in chosen("--shapes", choice.shapes, shapes, part=True):
        shape = shapes[label]
        compiles = True
        for name in chosen("--masks", choice.masks, pairs(shape.seqlen, device)):
            here = [each for each in passes if name in OPTIONS_ON or each not in OPTIONS]
            if here:
                build = partial(_build, shape, name, here, choice)
                seconds = _seconds(shape, here, choice, compiles)
                found.append(Case("masks", f"{name}, {label}", {**shape.__dict__, "mask": name}, build, seconds))
                compiles = False
    return found


def _named(shape: Shape) -> str:
    heads = str(shape.heads) if shape.heads_kv is None else f"{shape.heads}/{shape.heads_kv}"
    return f"B{shape.batch} S{shape.seqlen} H{heads} D{shape.head_dim}"


def _seconds(shape: Shape, passes: list[str], choice: Choice, compiles: bool) -> float:
    """About what a case takes on a Hopper GPU: half the scores visible, six rounds of each contender."""
    contenders = 2 + sum(choice.peer(peer) for peer in (CUDNN, FLEX))
    products = sum({"forward": 1.0, "backward": 2.5}.get(each.split()[-1], 0.0) for each in passes)
    total = CHECKING * len(passes) + products * contenders * 6 * shape.flops(0.5) / REACHED
    if choice.peer(FLEX):
        total += FLEX_COMPILES * sum(each in ("forward", "backward") for each in passes)
    return total + (CUDNN_COMPILES if choice.peer(CUDNN) and compiles else 0.0)


def _build(
    shape: Shape, name: str, passes: list[str], choice: Choice, device: torch.device
) -> Iterator[tuple[str, Comparison]]:
    inputs = shape.draw(device)
    q, k, v, dout = inputs
    pair = pairs(shape.seqlen, device)[name]()
    resolved = pair.mask.resolve(shape.seqlen, shape.seqlen, q.device)
    back = any(each in passes for each in ("backward", "deterministic"))
    found = _Contenders(pair, resolved, inputs, back, choice, name == NOTHING, device.type == "cuda")
    more: dict[str, Any] = {"density": pair.mask.density(shape.seqlen, shape.seqlen)}
    if "mask" in passes and device.type == "cuda":
        yield "mask", _preparation(pair.mask, shape.seqlen, q.device, found, more)
    if "host" in passes and device.type == "cuda":
        yield "host", _host(resolved, inputs, found, more)
    flops = shape.flops(more["density"])
    if "forward" in passes or back:
        want = one_head(q, k, v, resolved, dout if back else None)
        dense = _Dense(shape, more["density"], back, device)
    if "forward" in passes:
        calls: dict[str, Call] = {each: partial(forward, attend, q, k, v) for each, attend in found.calls.items()}
        calls[DENSE] = partial(forward, _causal, *dense.inputs[:3])
        own = {DENSE: Own(dense.want.check_out, dense.flops)}
        judge = _judge("forward", pair.mask, shape, inputs)
        yield "forward", Comparison(calls, want.check_out, flops, None, found.refused, more=more, own=own, verdict=judge)
    if "backward" in passes:
        compared = backward(found.calls, found.refused, inputs, want, flops, more)
        compared.calls[DENSE] = gradients(_causal, dense.inputs)
        compared.own = {DENSE: Own(dense.want.check_gradients, 2.5 * dense.flops)}
        compared.verdict = _judge("backward", pair.mask, shape, inputs)
        yield "backward", compared
    if "deterministic" in passes:
        yield "deterministic", backward(_with_option(pair.mask, {"deterministic": True}), {}, inputs, want, flops, more)
    yield from _dropout(pair.mask, resolved, passes, inputs, flops, more)


def _judge(measure: str, mask: Mask, shape: Shape, inputs: list[Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return partial(verdict, measure, share(measure, mask, shape.seqlen, *inputs[:3]))


def _ours(mask: Mask | None, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = warploom.attention(q, k, v, mask=mask, **options)
    return out


def _with_option(mask: Mask, options: dict[str, Any]) -> dict[str, peers.Attention]:
    return {"warploom": partial(_ours, mask, options), PLAIN: partial(_ours, mask, {})}


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _ours(None, {"causal": True}, q, k, v)


@dataclass
class _Contenders:
    """Ours and the peers, ready to be called with q, k and v; `prepare` has what each makes of a new mask."""

    pair: MaskPair
    resolved: ResolvedMask
    inputs: list[Tensor]
    backward: bool
    choice: Choice
    hides_nothing: bool
    on_gpu: bool

    def __post_init__(self) -> None:
        self.calls: dict[str, peers.Attention] = {"warploom": partial(_ours, self.pair.mask, {})}
        self.refused: dict[str, str] = {}
        self.prepare: dict[str, Call] = {}
        if self.hides_nothing:
            self.calls[UNMASKED] = partial(_ours, None, {})
            return
        self.seqlen = self.inputs[0].shape[1]
        if self.on_gpu:
            self._try(CUDNN, self._cudnn)
            self._try(FLEX, self._flex)
        elif self.choice.peer("SDPA, dense mask"):
            self.calls["SDPA, dense mask"] = torch_sdpa(False, self.pair.mask.dense(self.seqlen, self.seqlen))

    def _try(self, peer: str, make: Callable[[], peers.Attention]) -> None:
        if not self.choice.peer(peer):
            return
        try:
            self.calls[peer] = make()
        except peers.NotHere as why:
            self.refused[peer] = str(why)
        except Exception as error:  # a peer may fail in any way, ours is timed all the same
            self.refused[peer] = first_line(error)

    def _cudnn(self) -> peers.Attention:
        q, k, v = self.inputs[:3]
        intervals = row_intervals(self.resolved, q.shape[1], k.shape[1], q.shape[0], q.shape[2], q.device)
        make = partial(peers.cudnn_flex_plan, intervals, q, k, v, self.backward)
        attend = peers.cudnn_flex(make())
        self.prepare[CUDNN] = make
        return attend

    def _flex(self) -> peers.Attention:
        if self.pair.mask_mod is None:
            return peers.flex(None)
        make = partial(peers.flex_block_mask, self.pair.mask_mod, self.seqlen, self.inputs[0].device)
        attend = peers.flex(make())
        self.prepare[FLEX] = make
        return attend


class _Dense:
    """A causal call of ours with as many visible scores, which therefore takes about as long."""

    def __init__(self, shape: Shape, density: float, backward: bool, device: torch.device) -> None:
        visible = shape.seqlen * (2 * density) ** 0.5
        self.shape = replace(shape, seqlen=max(128, round(visible / 128) * 128))
        self.inputs = self.shape.draw(device)
        q, k, v, dout = self.inputs
        mask = Causal()
        self.flops = self.shape.flops(mask.density(self.shape.seqlen, self.shape.seqlen))
        self.want = one_head(q, k, v, mask.resolve(q.shape[1], k.shape[1], q.device), dout if backward else None)


def _dropout(
    mask: Mask, resolved: ResolvedMask, passes: list[str], inputs: list[Tensor], flops: float, more: dict[str, Any]
) -> Iterator[tuple[str, Comparison]]:
    """With dropout, against the same call without, which has a reference of its own."""
    chosen = [each for each in ("forward", "backward") if f"dropout {each}" in passes]
    if not chosen:
        return
    q, k, v, dout = inputs
    upstream = dout if "backward" in chosen else None
    seed = torch.tensor([torch.initial_seed() % 2**31], device=q.device)
    dropping = {"dropout_p": DROPOUT, "dropout_seed": seed}
    want = one_head(q, k, v, resolved, upstream, Dropout(DROPOUT, seed))
    plain = one_head(q, k, v, resolved, upstream)
    ours = _with_option(mask, dropping)
    if "forward" in chosen:
        calls: dict[str, Call] = {each: partial(forward, attend, q, k, v) for each, attend in ours.items()}
        yield "dropout forward", Comparison(calls, want.check_out, flops, more=more, own={PLAIN: Own(plain.check_out, flops)})
    if "backward" in chosen:
        compared = backward(ours, {}, inputs, want, flops, more)
        compared.own = {PLAIN: Own(plain.check_gradients, 2.5 * flops)}
        yield "dropout backward", compared


def _preparation(mask: Mask, seqlen: int, device: torch.device, found: _Contenders, more: dict[str, Any]) -> Comparison:
    """What a new mask costs the device: the bounds that every layer shares, a plan, a block mask.

    Ours is timed once with the column vectors there already, in a CUDA graph, and once with the vectors made too.
    """
    calls: dict[str, Call] = {}
    refused = dict(found.refused)
    mask = mask.to(device)
    resolved = mask.resolve(seqlen, seqlen, device)
    vectors = [t for t in resolved.vectors if t is not None]
    if not vectors:
        refused["warploom"] = "a band has no vectors, and nothing to prepare"
    else:
        more = {**more, "vector_bytes": sum(t.numel() * t.element_size() for t in vectors)}
        more["bound_bytes"] = vectors[0].numel() // 64 * 32
        try:
            calls["warploom"] = capture(partial(_bounds, resolved, seqlen))
        except RuntimeError as error:
            refused["warploom"] = first_line(error)
        # A mask moved anew keeps no vectors from an earlier call.
        calls[VECTORS] = lambda: _bounds(mask.to(device).resolve(seqlen, seqlen, device), seqlen)
    return Comparison(calls | found.prepare, lambda _: 0.0, refused=refused, more=more)


def _bounds(mask: ResolvedMask, seqlen: int) -> Tensor:
    return torch.ops.warploom.column_bounds(*mask.vectors, mask.left, mask.right, seqlen)


def _host(resolved: ResolvedMask, inputs: list[Tensor], found: _Contenders, more: dict[str, Any]) -> Comparison:
    """What a forward call costs the host: with a mask that earlier calls had, and with one that none had."""
    q, k, v = inputs[:3]  # none wants a gradient: nothing stands around the call
    calls: dict[str, Call] = {each: partial(attend, q, k, v) for each, attend in found.calls.items()}
    if any(t is not None for t in resolved.vectors):
        fresh = [_copied(resolved) for _ in range(FRESH)]
        calls[NEW] = lambda: _ours(fresh.pop(), {}, q, k, v)
    return host(calls, lambda _: 0.0, found.refused, more=more)


def _copied(mask: ResolvedMask) -> Mask:
    """The same band and vectors as a mask that no call has seen."""
    copies = ResolvedMask(mask.left, mask.right, *[None if t is None else t.clone() for t in mask.vectors])
    return column_mask(mask.left, mask.right, intervals_of(copies))
