"""On a GPU that is pretended sharded calls are planned twice, then launched: `python -m tests.distributed.host_counts`."""

from __future__ import annotations

from unittest.mock import patch

import torch

from tools.frozen.pretend import Recorder, hopper
from warploom import distributed, masks
from warploom.distributed import local
from warploom.distributed.plan import planned

SEQLEN, RANKS = 512, 2


def main() -> None:
    recorder = Recorder()
    with hopper(recorder) as fresh:
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


if __name__ == "__main__":
    main()
