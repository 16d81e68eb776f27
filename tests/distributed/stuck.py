"""A rank that lives and does not come: the others end with the group's timeout. `python -m tests.distributed.stuck ring`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from warploom import distributed

WORLD, TIMEOUT, LATEST = 3, 3.0, 60.0  # ranks; seconds of the group; seconds by which the others have ended


def rank_of(rank: int, folder: str, method: str) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT), **where)
    plan = distributed.shard_plan(60, None, causal=True, method=method)
    q, k, v = (torch.randn(1, plan.tokens[rank], 3, 8, requires_grad=True) for _ in range(3))
    out = distributed.attention(q, k, v, plan=plan, causal=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    if rank == WORLD - 1:
        time.sleep(10 * LATEST)
    begun = time.monotonic()
    try:
        distributed.attention(q, k, v, plan=plan, causal=True)
    except RuntimeError as error:
        # The first to end closes its connections, which others may see before their own time is over.
        assert any(word in str(error).lower() for word in ("timed out", "timeout", "connection", "closed")), error
        assert time.monotonic() - begun < LATEST
    else:
        raise AssertionError("a call without the last rank has ended")


def main(method: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(WORLD):
            children.append(os.fork())
            if children[-1] == 0:
                status = 1
                try:
                    rank_of(rank, folder, method)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
        *others, stuck = children
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in others]
        os.kill(stuck, signal.SIGKILL)
        os.waitpid(stuck, 0)
    return max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
