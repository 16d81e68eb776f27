"""The short causal convolution before a gated delta rule: every channel by itself, over a token and the few before it.

What a sequence leaves for its next tokens are its last inputs, ``taps`` - 1 of them, as a state leaves its sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def convolve(
    x: Tensor, weight: Tensor, before: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out of x's shape, and the last inputs of each sequence.

    Args:
        x: (batch, seqlen, channels); packed sequences have batch 1 and cu_seqlens.
        weight: (channels, taps), the last for the token itself.
        before: inputs before the first token, (sequences, taps - 1, channels); None: zeros.
        lengths: int32 (batch,), tokens of each row that count.
        cu_seqlens: int32 (sequences + 1,).

    Returns:
        out, and inputs (sequences, taps - 1, channels).
    """
    sequences, past = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, weight.shape[1] - 1
    if before is None:
        before = x.new_zeros(sequences, past, x.shape[2])
    if cu_seqlens is not None:
        # Bad starts that nobody may look at are read within bounds.
        return _packed(x, weight, before, cu_seqlens.long().clamp(0, x.shape[1]).cummax(0).values)
    inputs = torch.cat([before, x], 1)
    # Without a token torch refuses to convolve.
    rows = inputs if x.shape[1] else F.pad(inputs, (0, 0, 0, 1))
    out = F.conv1d(rows.mT, weight.unsqueeze(1), groups=weight.shape[0]).mT[:, : x.shape[1]]
    if lengths is None:
        return out, inputs[:, x.shape[1] :]
    last = lengths.clamp(0, x.shape[1]).long()[:, None] + torch.arange(past, device=x.device)
    return out, inputs.gather(1, last.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _packed(x: Tensor, weight: Tensor, before: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Taps that reach past a sequence's start read what came before it, from one list of all inputs."""
    tokens, past = x.shape[1], weight.shape[1] - 1
    inputs = torch.cat([before.flatten(0, 1), x[0], x.new_zeros(1, x.shape[2])])
    first, lengths, held = starts[:-1], starts.diff(), torch.arange(before.shape[0], device=x.device) * past
    nothing = inputs.shape[0] - 1

    def source(sequence: Tensor, position: Tensor) -> Tensor:
        """Rows of the list: position -1 is the last input before a sequence's first token."""
        return torch.where(position < 0, held[sequence] + past + position, before.shape[0] * past + first[sequence] + position)

    position = torch.arange(tokens, device=x.device)
    out = torch.zeros_like(x[0])
    if before.shape[0]:
        own = torch.searchsorted(starts[1:].contiguous(), position, right=True)
        sequence = own.clamp(max=before.shape[0] - 1)
        for back in range(past + 1):
            rows = torch.where(own < before.shape[0], source(sequence, position - first[sequence] - back), nothing)
            out = out + inputs[rows] * weight[:, past - back]
    which = torch.arange(before.shape[0], device=x.device)[:, None]
    last = source(which, lengths[:, None] - past + torch.arange(past, device=x.device))
    return out.unsqueeze(0), inputs[last]
