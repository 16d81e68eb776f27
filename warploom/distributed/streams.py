"""A stream beside the present one, for kernels that need not wait for each other's ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class Aside:
    """What runs within it follows what the present stream was given before this was made, and comes before what follows it.

    Nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = _stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> None:
        if self._stream is not None:
            self._within = torch.cuda.stream(self._stream)
            self._within.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._stream is not None:
            self._within.__exit__(*raised)
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
