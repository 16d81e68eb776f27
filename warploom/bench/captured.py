"""Calls as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warploom.bench.harness import Call, Comparison, first_line
from warploom.bench.patience import PATIENCE


@dataclass
class Captured:
    """A call as a graph; running it replays and gives the graph's output."""

    graph: torch.cuda.CUDAGraph
    result: Any
    call: Call  # its kernels read what the call holds, which is not to be freed before the graph

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def capture(call: Call) -> Captured:
    """Call twice, which compiles and allocates, then capture."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return Captured(graph, result, call)


def captured(
    calls: dict[str, Call],
    check: Callable[[Any], float],
    device: torch.device,
    refused: dict[str, str] | None = None,
    **more: Any,
) -> Comparison:
    """The comparison of these calls, each a graph of its own on a GPU.

    One that cannot be captured is refused in its words; a peer that the run does not ask is left out.
    """
    refused = dict(refused or {})
    if device.type != "cuda":
        return Comparison(calls, check, refused=refused, **more)
    graphs: dict[str, Call] = {}
    for name, call in calls.items():
        if not PATIENCE.asks(name):
            continue
        try:
            graphs[name] = capture(call)
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
    return Comparison(graphs, check, refused=refused, **more)
