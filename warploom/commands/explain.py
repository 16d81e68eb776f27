"""`warploom explain`: the plan of a call described by its shapes; nothing of the call's size is allocated."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from warploom.attention.arguments import dense_args
from warploom.attention.plan import plan_of
from warploom.attention.problem import AttentionProblem
from warploom.bias import T5_MAX_DISTANCE
from warploom.commands.devices import capability
from warploom.commands.mask_argument import parse_mask
from warploom.commands.outputs import fitted
from warploom.masks import ResolvedMask
from warploom.masks.kept import Kept
from warploom.runtime import machine
from warploom.runtime.outline import Outline
from warploom.runtime.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Elsewhere:
    """What runs on a GPU that is not here: with the packages that are, and with every extra where that is something else."""

    device: str
    capability: tuple[int, int]
    here: Plan
    extras: Plan | None

    def to_dict(self) -> dict[str, Any]:
        device = {"name": self.device, "capability": "{}.{}".format(*self.capability), "here": False}
        return {"device": device, **self.here.to_dict(), "with_extras": self.extras and self.extras.to_dict()}

    def __str__(self) -> str:
        major, minor = self.capability
        place = f"{self.device}, compute capability {major}.{minor}, not here"
        text = f"device    {place}: with the packages and the cache of this machine\n{self.here}"
        if self.extras is None:
            return text
        plan = str(self.extras).split("\n", 1)[1]  # of the same call
        return f"{text}\n\nwith all extras (pip install 'warploom[triton,hopper]')\n{plan}"


def run(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else fitted(str(plan)))
    return 0


def make_plan(options: argparse.Namespace) -> Plan | Elsewhere:
    """What `warploom.explain()` says of tensors of these shapes, here or on a GPU that is not here."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device is None else options.device.lower()
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; name the GPU, as in --device h100")
    if device in ("cpu", "cuda"):
        return _plan(options, torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu"))
    found = capability(device)
    there = torch.device("cuda", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a slower implementation runs is what the plan says
        with machine.elsewhere(found):
            here = _plan(options, there)
        with machine.elsewhere(found, extras=True):
            best = _plan(options, there)
    return Elsewhere(device, found, here, None if best.implementation == here.implementation else best)


def _plan(options: argparse.Namespace, device: torch.device) -> Plan:
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    seqlen_k = options.seqlen if options.seqlen_k is None else options.seqlen_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v

    widest = max(options.seqlen * options.heads, seqlen_k * kv_heads) * max(options.head_dim, head_dim_v)
    if options.batch * widest >= 2**63:
        raise ValueError("these sizes make tensors of 2**63 elements and more, which torch has not")

    def tensor(seqlen: int, heads: int, dim: int) -> Outline:
        return Outline((options.batch, seqlen, heads, dim), DTYPES[options.dtype], device, options.backward)

    mask = None if options.mask is None else parse_mask(options.mask)
    resolved = None if mask is None else mask.resolve(options.seqlen, seqlen_k, "cpu")
    vectors = [] if resolved is None else [None if t is None else Outline(t.shape, t.dtype, device) for t in resolved.vectors]
    kept = None
    if mask is not None and resolved is not None:
        count = mask._documents(options.seqlen, seqlen_k) if device.type == "cuda" else None
        documents = None if count is None else Outline((count + 1,), torch.int32, device)
        kept = Kept(ResolvedMask(resolved.left, resolved.right, *vectors), False, documents)
    args = dense_args(
        tensor(options.seqlen, options.heads, options.head_dim),
        tensor(seqlen_k, kv_heads, options.head_dim),
        tensor(seqlen_k, kv_heads, head_dim_v),
        mask=mask,
        causal=options.causal,
        window=options.window,
        softcap=options.softcap,
        sink=Outline((options.heads,), torch.float32, device) if options.sink else None,
        dropout_p=options.dropout,
        dropout_seed=Outline((1,), torch.int64, device),
        deterministic=options.deterministic or None,
        batch_invariant=options.batch_invariant,
        kept=kept,
    )
    if options.bias_grad and (options.bias is None or not options.backward):
        raise ValueError("--bias-grad asks for the gradient of a bias: it goes with --bias and --backward")
    if options.bias is not None:
        kind, shape = _bias(options.bias, options.heads, options.seqlen, seqlen_k)
        values = Outline(shape, torch.float32, device)
        args = args._replace(bias=values, bias_kind=kind, bias_grad=options.bias_grad)
    counted = args.mask if resolved is None else ResolvedMask(args.left, args.right, *resolved.vectors)
    return plan_of(args, AttentionProblem.from_args(args, options.backward), options.backend, counted)


def _bias(name: str, heads: int, seqlen_q: int, seqlen_k: int) -> tuple[str, tuple[int, ...]]:
    """What implementations are given of a bias of `warploom.bias`, or of a tensor: its kind and its shape."""
    if name == "alibi":
        return "alibi", (1, heads)
    if name == "relative":
        return "distance", (heads, 2 * T5_MAX_DISTANCE + 1)
    return "tensor", (1, heads, 1 if name == "key" else seqlen_q, seqlen_k)
