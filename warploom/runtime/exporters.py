"""Exporters that have no form for our ops are refused in words, where torch would name an internal class."""

from __future__ import annotations

import sys


def refuse_onnx(public: str, instead: str) -> None:
    """Raise while torch.onnx.export traces a model.

    Raises:
        RuntimeError: in one sentence; tracers take a NotImplementedError for a missing kernel.
    """
    onnx = sys.modules.get("torch.onnx")  # not imported by torch: who exports has imported it
    if onnx is not None and onnx.is_in_onnx_export():
        raise RuntimeError(f"{public} has no ONNX operator; {instead}")
