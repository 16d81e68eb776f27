"""A rank that lives and does not come: the others end with the group's timeout. `python -m tests.distributed.stuck ring`.

A busy machine is no defect: the timeout is short only for the call that cannot end but by it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from warploom import distributed
from warploom.distributed import groups

WORLD, PATIENT, SHORT = 3, timedelta(hours=3), timedelta(seconds=2)


def rank_of(rank: int, folder: str, method: str) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": WORLD}
    dist.init_process_group("gloo", timeout=PATIENT, **where)
    plan = distributed.shard_plan(60, None, causal=True, method=method)
    q, k, v = (torch.randn(1, plan.tokens[rank], 3, 8, requires_grad=True) for _ in range(3))
    out = distributed.attention(q, k, v, plan=plan, causal=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    if rank == WORLD - 1:
        signal.pause()  # until it is killed
    for group in (dist.group.WORLD, groups.own(dist.group.WORLD)):
        assert group._get_backend(torch.device("cpu")).options._timeout == PATIENT  # ours is the user's
        _set_pg_timeout(SHORT, group)
    try:
        distributed.attention(q, k, v, plan=plan, causal=True)
    except RuntimeError as error:
        # The first to end closes its connections, which others may see before their own time is over.
        assert any(word in str(error).lower() for word in ("timed out", "timeout", "connection", "closed")), error
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
        lived = os.waitstatus_to_exitcode(os.waitpid(stuck, 0)[1]) == -signal.SIGKILL
    return max(*found, not lived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
