"""gated_delta_rule() and its step against fla's kernels and a copy of as many bytes: forward, backward, host time.

Shapes, normalised queries and keys and decays are those of a Gated DeltaNet layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom import gated_delta_rule, gated_delta_step
from warploom.bench import peers
from warploom.bench.captured import capture
from warploom.bench.harness import Call, Case, Comparison, Own, first_line, host, in_a_row
from warploom.bench.linear import copy_of
from warploom.bench.patience import PATIENCE
from warploom.bench.recurrence import Rule, last_key_head
from warploom.bench.reference import FURTHEST, distance

EPS = 1e-6
RULE = "delta rule"
SDPA = "torch's SDPA, small"


@dataclass(frozen=True)
class Shape:
    batch: int
    heads_qk: int
    heads_v: int
    tokens: int  # of each sequence; 1: a step
    head_dim: int
    passes: tuple[str, ...] = ("forward",)

    @property
    def name(self) -> str:
        length = f" L{self.tokens}" if self.tokens > 1 else ""
        return f"B{self.batch} H{self.heads_qk}/{self.heads_v}{length} D{self.head_dim}"

    @property
    def sizes(self) -> dict[str, int]:
        """What a row says of its shape."""
        return {name: x for name, x in self.__dict__.items() if name != "passes"}


SHAPES = (
    Shape(1, 16, 64, 32768, 128, ("forward", "host")),
    Shape(4, 16, 64, 8192, 128),
    Shape(1, 16, 32, 8192, 128, ("forward", "backward")),
    Shape(1, 16, 32, 32768, 128, ("forward", "backward")),
    Shape(1, 16, 32, 262144, 128),
)
# States of 64 and 256 MiB, read and written.
STEPS = (Shape(32, 16, 32, 1, 128), Shape(128, 16, 32, 1, 128))


def delta_cases(quick: bool) -> list[Case]:
    """Every shape with its passes, then the steps."""
    shapes = (Shape(1, 2, 4, 160, 16, ("forward", "backward")),) if quick else SHAPES
    steps = (Shape(2, 2, 4, 1, 16),) if quick else STEPS
    found = [Case("linear", f"{RULE}, {shape.name}", shape.sizes, partial(_build, shape)) for shape in shapes]
    return found + [Case("linear", f"delta step, {shape.name}", shape.sizes, partial(_build_step, shape)) for shape in steps]


def draw(shape: Shape, device: torch.device) -> list[Tensor]:
    """q, k, v, decay, beta and an upstream gradient; decays are fp32.

    The heads forget at rates from 16 down to 1/64 times a softplus of about 0.03, as in a layer that is trained; the last
    head, which is checked, remembers some thousand tokens.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lead = shape.batch, shape.tokens
    ends = (shape.heads_qk, shape.head_dim), (shape.heads_v, shape.head_dim)
    q, k, v, dout = (torch.randn(*lead, *ends[i], device=device).to(dtype) for i in (0, 0, 1, 1))
    noise, written = (torch.randn(*lead, shape.heads_v, device=device) for _ in range(2))
    rates = torch.logspace(4, -6, shape.heads_v, base=2, device=device)
    return [q, k, v, -rates * F.softplus(noise - 4), written.sigmoid().to(dtype), dout]


def _build(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    *inputs, dout = draw(shape, device)
    contenders: dict[str, Callable[..., Tensor]] = {"warploom": _ours}
    refused: dict[str, str] = {}
    try:
        contenders["fla, chunk"] = partial(_fla, peers.fla("gated_delta_rule", "chunk_gated_delta_rule"))
    except peers.NotHere as why:
        refused["fla, chunk"] = str(why)
    rule = Rule(shape.head_dim**-0.5, EPS)
    want = last_key_head(rule, dout if "backward" in shape.passes else None, *inputs)
    read = float(sum(t.nbytes for t in inputs))
    calls: dict[str, Call] = {name: partial(rule_of, *inputs) for name, rule_of in contenders.items()}
    with_copy = {**calls, "copy": copy_of(read + dout.nbytes, device)}
    yield f"forward, {RULE}", Comparison(with_copy, _unless_copied(want.check_out), bytes=read + dout.nbytes, refused=refused)
    if "host" in shape.passes and device.type == "cuda":
        own = {SDPA: Own(lambda _: 0.0)}
        yield f"host in a row, {RULE}", host(calls | sdpa(device), want.check_out, refused, own, clock=in_a_row)
    if "backward" in shape.passes:
        moved = 2 * read + dout.nbytes
        calls, refused = backward(contenders, refused, inputs, dout)
        calls["copy"] = copy_of(moved, device)
        yield f"backward, {RULE}", Comparison(calls, _unless_copied(want.check_gradients), bytes=moved, refused=refused)


def sdpa(device: torch.device) -> dict[str, Call]:
    """A small call of torch's own attention, which says how quick a host is."""
    q, k, v = (torch.zeros(1, 16, 512, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    return {SDPA: partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}


def backward(
    contenders: dict[str, Callable[..., Tensor]], refused: dict[str, str], inputs: list[Tensor], dout: Tensor
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls for the gradients of all inputs, and whose forward pass was refused as well; it runs once, here."""
    calls: dict[str, Call] = {}
    refused = dict(refused)
    for name, attend in contenders.items():
        try:
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = PATIENCE.first(name, partial(attend, *leaves))
            calls[name] = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
    return calls, refused


def _build_step(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A token of every sequence: the states are read and written once."""
    tokens = draw(shape, device)[:5]
    q, k, v, decay, beta = (t[:, 0] for t in tokens)
    state = torch.randn(shape.batch, shape.heads_v, shape.head_dim, shape.head_dim, device=device)
    ours = partial(gated_delta_step, q, k, v, beta, decay=decay, normalize_qk=True, eps=EPS)
    written = state.clone()
    calls: dict[str, Call] = {
        "warploom": partial(ours, state=state),
        "warploom, in place": partial(ours, state=written, inplace=True),
    }
    refused = {}
    try:
        recurrent = peers.fla("gated_delta_rule", "fused_recurrent_gated_delta_rule")
        calls["fla, recurrent"] = partial(_recurrent, recurrent, state, *tokens)
    except peers.NotHere as why:
        refused["fla, recurrent"] = str(why)
    moved = 2.0 * state.nbytes
    calls["copy"] = copy_of(moved, device)
    want = _step(q, k, v, decay, beta, state)
    with torch.no_grad():
        # A call in place begins where the one before it ended: the first of all is the one that is checked.
        first = tuple(t[-1:].clone() for t in calls["warploom, in place"]())
        own = {"warploom, in place": Own(lambda _: _near(want, first))}
        if device.type == "cuda":
            for name in list(calls):
                try:
                    PATIENCE.first(name, calls[name])
                    calls[name] = capture(calls[name])
                except Exception as error:  # a peer may fail in any way
                    refused[name] = first_line(error)
                    del calls[name]
        check = _unless_copied(partial(_near, want))
        yield f"graph, {RULE}", Comparison(calls, check, bytes=moved, refused=refused, own=own)


def _ours(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule(q, k, v, beta, decay, normalize_qk=True, eps=EPS)


def _fla(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Its scale and the eps of its norms are ours; it takes grouped heads as ours."""
    out: Tensor = function(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    return out


def _recurrent(
    function: Callable[..., Any], state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, last = function(q, k, v, g=decay, beta=beta, **options)
    return out[:, 0], last


def _unless_copied(check: Callable[[Any], float]) -> Callable[[Any], float]:
    """A copy returns nothing."""
    return lambda result: 0.0 if result is None else check(result)


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Out and the new state of the last batch entry, in fp64."""
    q, k, v, decay, beta, s = (t[-1:].double() for t in (q, k, v, decay, beta, state))
    group = v.shape[1] // q.shape[1]
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q, k = (t.repeat_interleave(group, 1) for t in (q * q.shape[-1] ** -0.5, k))
    s = s * decay.exp()[..., None, None]
    learned = beta[..., None] * (v - torch.einsum("bhe,bhem->bhm", k, s))
    s = s + k[..., None] * learned[..., None, :]
    return torch.einsum("bhe,bhem->bhm", q, s).float(), s.float()


def _near(want: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> float:
    """The larger error of out and state, of the last batch entry."""
    named = zip(("out", "the new state"), found, want, strict=True)
    return max(distance(name, got[-1:], wanted, FURTHEST["out"]) for name, got, wanted in named)
