"""cuDNN's FP8 attention, called through nvidia-cudnn-frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warploom.bench.peers import NotHere
from warploom.fp8 import Fp8Tensor
from warploom.kernels.e4m3 import E4M3

# What P, at most 1, is multiplied by before it is rounded to e4m3, whose largest number is 448.
_OF_P = 256.0


def cudnn_fp8(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor, causal: bool) -> Callable[[], Fp8Tensor]:
    """A call over these tensors, (batch, seqlen, heads, head_dim) with one scale each. On Hopper cuDNN's out is e4m3 too.

    Its scale is v's: no weighted mean is larger than the largest value.

    Raises:
        NotHere: the package is not installed, or lacks what it needs.
    """
    try:
        import cudnn
    except Exception as error:  # absent, or without libcudnn
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotHere(f"cudnn does not import here (pip install nvidia-cudnn-frontend): {words}") from None
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream(q.data.device).cuda_stream)
    graph = cudnn.pygraph(handle=handle, io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32)
    filled: dict[Any, Tensor] = {}

    def tensor(name: str, value: Tensor, dtype: Any) -> Any:
        node = graph.tensor(name=name, dim=list(value.shape), stride=list(value.stride()), data_type=dtype)
        filled[node] = value
        return node

    def output(node: Any, value: Tensor, dtype: Any) -> None:
        node.set_output(True).set_dim(list(value.shape)).set_stride(list(value.stride())).set_data_type(dtype)
        filled[node] = value

    # Heads come before rows there; where they lie is said by strides, the last of which must be 1.
    given = {name: t.data.contiguous().transpose(1, 2) for name, t in zip("qkv", (q, k, v), strict=True)}
    scales = {f"descale_{name}": t.scale for name, t in zip("qkv", (q, k, v), strict=True)}
    scales |= {"scale_s": torch.full_like(v.scale, _OF_P), "descale_s": torch.full_like(v.scale, 1 / _OF_P)}
    scales["scale_o"] = 1 / v.scale
    nodes = {name: tensor(name, value, fp8) for name, value in given.items()}
    nodes |= {name: tensor(name, value.view(1, 1, 1, 1), fp32) for name, value in scales.items()}
    scale = q.data.shape[-1] ** -0.5
    found, _, largest_p, largest_out = graph.sdpa_fp8(
        **nodes, generate_stats=False, attn_scale=scale, use_causal_mask=causal
    )  # fmt: skip
    out = torch.empty((*q.data.shape[:-1], v.data.shape[-1]), dtype=E4M3, device=q.data.device)
    output(found, out.transpose(1, 2), fp8)
    for node in (largest_p, largest_out):
        output(node, torch.zeros(1, 1, 1, 1, device=q.data.device), fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    room = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.data.device)
    result = Fp8Tensor(out, v.scale, dtype=v.dtype)

    def call() -> Fp8Tensor:
        graph.execute(filled, room, handle=handle)
        return result

    return call
