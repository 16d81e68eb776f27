"""On a GPU that is pretended sharded calls are planned twice, then launched: `python -m tests.distributed.host_counts`."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from tools.frozen.pretend import Recorder, hopper
from warploom import distributed, masks
from warploom.distributed import gather, groups, local, pieces
from warploom.distributed.plan import planned
from warploom.masks.zoo import documents, prefixes

SEQLEN, RANKS = 512, 2


def main() -> None:
    recorder = Recorder()
    with hopper(recorder) as fresh, ExitStack() as stack:
        # By torch, which computes here: what a kernel would have to write is whatever lies there, and may hide every key.
        for builder in (documents, prefixes):
            stack.enter_context(patch.object(builder, "may_launch", return_value=False))
        for mask in (masks.Causal(), masks.Document([200, 312]), masks.PrefixLM(100)):
            fresh()
            plan = planned(SEQLEN, 1, 0, mask=mask)
            q, k, v = (torch.zeros(1, SEQLEN, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
            upstream = torch.zeros_like(q)

            def step(plan=plan, mask=mask, q=q, k=k, v=v, upstream=upstream) -> list[str]:  # type: ignore[no-untyped-def]
                recorder.clear()
                out = distributed.attention(q, k, v, plan=plan, mask=mask)
                torch.autograd.grad(out, (q, k, v), upstream)
                return [each["kernel"] for each in recorder.launches]

            step()
            want = step()
            with patch.object(local.dispatch, "choose", side_effect=AssertionError("chosen again")):
                assert step() == want, mask
            assert sum("attn_fwd" in name for name in want) and sum("attn_bwd" in name for name in want), want


def shared() -> None:
    """A rank's documents are two packed launches, which write to the call's own results, and gradients one."""
    recorder = Recorder()
    with hopper(recorder) as fresh, ExitStack() as stack:
        fresh()
        for where, name in ((groups, "compared"), (torch.distributed, "all_to_all_single")):
            stack.enter_context(patch.object(where, name))
        stack.enter_context(patch.object(gather, "HIDDEN", 0))
        stack.enter_context(patch("warploom.distributed.documents.Aside", lambda device: nullcontext()))
        plan = planned(SEQLEN, RANKS, 1, "a group", causal=True, cu_seqlens=[0, 200, 400, SEQLEN], chunk=16)
        q, k, v = (torch.zeros(plan.tokens[1], heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))

        def step() -> list[dict[str, Any]]:
            recorder.clear()
            out = distributed.attention(q, k, v, plan=plan, causal=True)
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
            return recorder.launches

        step()
        step()
        with patch.object(local.dispatch, "choose", side_effect=AssertionError("chosen again")):
            found = step()
    names, results = [each["kernel"] for each in found], [each["values"][3:5] for each in found]
    assert ["varlen" in name for name in names] == [True, True, False], names
    assert [lse for _, lse in results[:2]] == [f"float32 [4, {rows}] by [256, 1] at 0" for rows in (88, 168)], results


def apart() -> None:
    """A causal backward pass: a launch of no mask on others' keys, of the rows that see them, and a causal one on own keys."""
    recorder = Recorder()
    with hopper(recorder) as fresh, ExitStack() as stack:
        for where, name in ((groups, "compared"), (torch.distributed, "all_to_all_single")):
            stack.enter_context(patch.object(where, name))
        stack.enter_context(patch.object(gather, "KEPT", 0))
        stack.enter_context(patch.object(pieces, "MANY_KEYS", 0))
        for rank, rows in ((0, SEQLEN // 4), (1, SEQLEN // 2)):
            fresh()
            plan = planned(SEQLEN, RANKS, rank, "a group", causal=True, method="gather")
            q, k, v = (torch.zeros(1, plan.tokens[rank], heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
            out = distributed.attention(q, k, v, plan=plan, causal=True)
            recorder.clear()
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
            names, others = [each["kernel"] for each in recorder.launches], recorder.launches[0]["values"][0]
            assert [("_full_" in name, "_r_" in name) for name in names] == [(True, False), (False, True)], names
            assert f"[1, {rows}, 4, 64]" in others, others


if __name__ == "__main__":
    main()
    shared()
    apart()
