"""Calls with query offsets run under a column mask, whose kernels take an offset for each batch entry.

Which keys an entry sees is known on the device alone. Those kernels classify tiles there, and clear what no row of an entry
sees, which a call under a band leaves outside of what it reads. A call without vectors gets one that hides nothing.
"""

from __future__ import annotations

import torch

from warploom.attention.problem import AttentionArgs

NEVER = 1 << 30  # a row past every sequence's last one


def with_columns(args: AttentionArgs) -> AttentionArgs:
    """The call that a call is run as, or itself."""
    if args.q_offset is None or args.lts is not None or args.ute is not None:
        return args
    return args._replace(lts=args.q.new_full((1, 1, args.k.shape[1]), NEVER, dtype=torch.int32))
