"""`warploom explain`: the plan of a call described by its shapes; nothing of the call's size is allocated."""

from __future__ import annotations

import argparse
import json

import torch

import warploom
from warploom.attention.plan import Plan
from warploom.commands.mask_argument import builders, parse_mask
from warploom.commands.numbers import whole
from warploom.masks.base import LONGEST

EXAMPLES = """examples:
  warploom explain --seqlen 4096 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --causal
  warploom explain --seqlen 4096 --heads 16 --mask 'Document([1000, 3096])' --backward
  warploom explain --seqlen 1 --seqlen-k 8192 --heads 32 --window 1023 --json
"""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_argument_group("shapes")
    shapes.add_argument("--batch", type=whole(), default=1, metavar="B", help="default: 1")
    shapes.add_argument("--seqlen", type=whole(most=LONGEST), required=True, metavar="S", help="queries")
    shapes.add_argument("--seqlen-k", type=whole(most=LONGEST), metavar="S", help="keys; default: --seqlen")
    shapes.add_argument("--heads", type=whole(), required=True, metavar="H", help="query heads")
    shapes.add_argument("--kv-heads", type=whole(), metavar="H", help="key and value heads; default: --heads")
    shapes.add_argument("--head-dim", type=whole(), default=64, metavar="D", help="default: 64")
    shapes.add_argument("--head-dim-v", type=whole(), metavar="D", help="of the values; default: --head-dim")
    shapes.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    shapes.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    features = parser.add_argument_group("what the call asks for")
    features.add_argument("--causal", action="store_true", help="bottom-right aligned")
    features.add_argument(
        "--window",
        type=_window,
        metavar="L[,R]",
        help="keys before and after the position; 'none' is unlimited",
    )
    features.add_argument("--mask", metavar="EXPRESSION", help=f"one of {', '.join(builders())}, or several with &")
    features.add_argument("--softcap", type=float, default=0.0, metavar="C")
    features.add_argument("--sink", action="store_true", help="a sink logit for each head")
    features.add_argument("--dropout", type=float, default=0.0, metavar="P")
    features.add_argument("--backward", action="store_true", help="gradients are needed")
    features.add_argument("--deterministic", action="store_true", help="bitwise equal run to run")
    features.add_argument("--backend", metavar="NAME", help="force this implementation")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """What `warploom.explain()` says of tensors of these shapes."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here, and a plan holds for the machine it is made on")

    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        # Rows that overlap: the shape of the call without its memory. Strides of 8 elements are as good to every kernel as
        # those of a contiguous tensor, which strides of 0 are not.
        shape = (options.batch, seqlen, heads, dim)
        needed = sum(8 * max(0, length - 1) for length in shape[:3]) + dim
        row = torch.zeros(needed, dtype=DTYPES[options.dtype], device=device, requires_grad=options.backward)
        return row.as_strided(shape, (8, 8, 8, 1))

    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    seqlen_k = options.seqlen if options.seqlen_k is None else options.seqlen_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    mask = None if options.mask is None else parse_mask(options.mask).to(device)
    return warploom.explain(
        tensor(options.seqlen, options.heads, options.head_dim),
        tensor(seqlen_k, kv_heads, options.head_dim),
        tensor(seqlen_k, kv_heads, head_dim_v),
        mask=mask,
        causal=options.causal,
        window=options.window,
        softcap=options.softcap,
        sink=torch.zeros(options.heads, device=device) if options.sink else None,
        dropout_p=options.dropout,
        deterministic=options.deterministic or None,
        backend=options.backend,
    )


def _window(text: str) -> tuple[int | None, int | None]:
    left, comma, right = text.partition(",")
    return _bound(left), _bound(right) if comma else 0


def _bound(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes L or L,R, whole numbers or 'none', got {text!r}") from None
