"""The options of `warploom explain`."""

from __future__ import annotations

import argparse

from warploom.commands.numbers import whole
from warploom.runtime.limits import LONGEST

EXAMPLES = """examples:
  warploom explain --seqlen 4096 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --causal
  warploom explain --seqlen 4096 --heads 16 --mask 'Document([1000, 3096])' --backward
  warploom explain --device h100 --seqlen 8192 --heads 16 --head-dim 128 --causal    a GPU that this machine lacks
  warploom explain --seqlen 1 --seqlen-k 8192 --heads 32 --window 1023 --json
"""


DTYPES = ("bf16", "fp16", "fp32", "fp64")
# The builders that warploom.commands.mask_argument finds, written down again: to look is to import torch.
MASKS = (
    *("BidirectionalSpans", "BlockDiffusion", "Causal", "CausalBlockwise", "Chunked", "Document", "Full", "GlobalWindow"),
    *("Padding", "PrefixDocument", "PrefixLM", "QKSparse", "RandomEviction", "SharedQuestion", "SlidingWindow", "Tree"),
)


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
    shapes.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, or a GPU that this machine lacks, as h100, a100, l40s or sm_90; default: cuda where there is one",
    )
    features = parser.add_argument_group("what the call asks for")
    features.add_argument("--causal", action="store_true", help="bottom-right aligned")
    features.add_argument(
        "--window",
        type=_window,
        metavar="L[,R]",
        help="keys before and after the position; 'none' is unlimited, a negative one needs =, as in --window=-1,8",
    )
    features.add_argument("--mask", metavar="EXPRESSION", help=f"one of {', '.join(MASKS)}, or several joined by & and |")
    features.add_argument("--softcap", type=float, default=0.0, metavar="C")
    features.add_argument("--sink", action="store_true", help="a sink logit for each head")
    features.add_argument("--bias", choices=("alibi", "relative", "key", "tensor"), help="an additive bias of this kind")
    features.add_argument("--bias-grad", action="store_true", help="with --bias and --backward: the bias has a gradient")
    features.add_argument("--dropout", type=float, default=0.0, metavar="P")
    features.add_argument("--backward", action="store_true", help="gradients are needed")
    features.add_argument("--deterministic", action="store_true", help="bitwise equal run to run")
    features.add_argument("--batch-invariant", action="store_true", help="a sequence's bits depend on no other sequence")
    features.add_argument("--backend", metavar="NAME", help="force this implementation")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    from warploom.commands.explain import run

    return run(options)


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
