"""The fp8 suite as on a GPU, on a CPU: what is compared, and that a wrong result of a peer's or of ours is seen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom.bench import cudnn_fp8, fp8, peers
from warploom.bench.bars import BARS
from warploom.bench.calls import Shape
from warploom.bench.harness import Timer, compare
from warploom.fp8 import Fp8Tensor, quantize

SHAPE = Shape(2, 160, 2, 32)
FP8, FP32 = "e4m3", "float"
OURS = "warploom", "warploom, quantised too", "warploom, fast sums"


@dataclass(eq=False)
class Node:
    """A tensor of the stand-in's graph; its sizes must be those of what it is filled with."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    dtype: str = ""
    result: bool = False

    def set_output(self, value: bool) -> Node:
        self.result = value
        return self

    def set_dim(self, dim: list[int]) -> Node:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Node:
        self.stride = stride
        return self

    def set_data_type(self, dtype: str) -> Node:
        self.dtype = dtype
        return self


class Graph:
    """`cudnn.pygraph` with one `sdpa_fp8`: refuses what it refuses on Hopper, and computes the same in fp32."""

    def __init__(self, **_: Any) -> None:
        self.steps: list[str] = []

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: str) -> Node:
        return Node(dim, stride, data_type)

    def sdpa_fp8(self, generate_stats: bool, attn_scale: float, use_causal_mask: bool, **nodes: Node) -> tuple[Any, ...]:
        for name in "qkv":
            if nodes[name].stride[-1] != 1:
                raise RuntimeError("The stride for the last dimension corresponding to the embedding size should be 1")
        assert not generate_stats and set(nodes) == {
            *"qkv", *(f"descale_{name}" for name in "qkvs"), "scale_s", "scale_o"
        }  # fmt: skip
        self.nodes, self.scale, self.causal = nodes, attn_scale, use_causal_mask
        self.results = [Node() for _ in range(3)]
        return self.results[0], None, *self.results[1:]

    def __getattr__(self, name: str) -> Any:
        assert name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
        return lambda *_: self.steps.append(name)

    def get_workspace_size(self) -> int:
        assert len(self.steps) == 5
        return 0

    def execute(self, filled: dict[Node, Tensor], room: Tensor, handle: object) -> None:
        for node, value in filled.items():
            assert node.dim == list(value.shape) and node.stride == list(value.stride())
            assert value.dtype == {FP8: torch.float8_e4m3fn, FP32: torch.float32}[node.dtype]
        given = {name: filled[node].float() for name, node in self.nodes.items()}
        q, k, v = (given[name] * given[f"descale_{name}"] for name in "qkv")
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        assert float(given["scale_s"] * given["descale_s"]) == 1 and given["scale_s"] <= 448
        filled[self.results[0]].copy_(out * given["scale_o"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A device of type cuda whose tensors are on the CPU, and a stand-in for nvidia-cudnn-frontend."""

    def draw(shape: Shape, device: Any) -> list[Tensor]:
        return [torch.randn(shape.batch, shape.seqlen, shape.heads, shape.head_dim) for _ in range(4)]

    monkeypatch.setattr(Shape, "draw", draw)
    monkeypatch.setattr(peers, "sdpa", lambda name, causal: fp8.torch_sdpa(causal))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    fake: Any = ModuleType("cudnn")
    fake.data_type = SimpleNamespace(FP8_E4M3=FP8, FLOAT=FP32)
    fake.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    fake.create_handle = lambda: object()
    fake.set_stream = lambda handle, stream: None
    fake.pygraph = Graph
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    return fake


def rows(causal: bool = False) -> dict[str, dict[str, Any]]:
    device: Any = SimpleNamespace(type="cuda")
    timer = Timer(torch.device("cpu"), seconds=0.0)
    return {measure: compare(comparison, timer) for measure, comparison in fp8._build(SHAPE, causal, device)}


@pytest.mark.parametrize("causal", [False, True])
def test_contenders(causal: bool, gpu: ModuleType) -> None:
    found = rows(causal)
    forward = found["forward"]["contenders"]
    assert set(forward) == {*OURS, "warploom, bf16", "cuDNN", "cuDNN, FP8"}
    for name, each in forward.items():
        assert each["ms"] > 0 and each["tflops"] > 0, name
        eighth = "FP8" in name or name in OURS
        assert (0.01 if eighth else 0) < each["error"] < (fp8.FURTHEST if eighth else 1e-2), (name, each["error"])
    assert ("quantising" in found) == (not causal)
    if not causal:
        quantising = found["quantising"]["contenders"]
        assert set(quantising) == {*fp8.WAYS, "copy"} and all(each["gb_s"] > 0 for each in quantising.values())


def test_documents(gpu: ModuleType) -> None:
    device: Any = SimpleNamespace(type="cuda")
    [(measure, comparison)] = fp8._documents(SHAPE, device)
    found = compare(comparison, Timer(torch.device("cpu"), seconds=0.0))["contenders"]
    assert measure == "forward" and set(found) == {"warploom", "warploom, packed", "warploom, bf16", "warploom, bf16, packed"}
    for name, each in found.items():
        assert ("bf16" in name) == (each["error"] < 1e-2) and each["error"] < fp8.FURTHEST, (name, each)


def test_a_wrong_peer_and_wrong_numbers_are_seen(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Graph):
        def execute(self, filled: dict[Node, Tensor], room: Tensor, handle: object) -> None:
            super().execute({**filled, self.nodes["descale_v"]: 1.25 * filled[self.nodes["descale_v"]]}, room, handle)

    monkeypatch.setattr(gpu, "pygraph", Doubled)
    assert "wrong" in rows()["forward"]["contenders"]["cuDNN, FP8"]
    monkeypatch.setattr(fp8, "quantize", lambda q, k, v, **options: quantize(q, k, v.roll(1, 1), **options))
    found = rows()
    assert "wrong" in found["forward"]["contenders"]["warploom"]
    assert all("wrong" in each for name, each in found["quantising"]["contenders"].items() if name != "copy")


def test_a_peer_that_is_not_here_says_why(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no engine\nmore")

    monkeypatch.setattr(gpu, "pygraph", refuse)
    assert rows()["forward"]["contenders"]["cuDNN, FP8"] == {"refused": "RuntimeError: no engine"}
    monkeypatch.setitem(sys.modules, "cudnn", None)
    refused = rows()["forward"]["contenders"]["cuDNN, FP8"]["refused"]
    assert refused.startswith("cudnn does not import here (pip install nvidia-cudnn-frontend)")


def test_values_that_lie_key_by_key_are_copied_for_cudnn(gpu: Any) -> None:
    q, k, v = quantize(*(torch.randn(1, 40, 2, 16) for _ in range(3)), hadamard=False, granularity="tensor")
    want = cudnn_fp8.cudnn_fp8(q, k, v, False)().dequantize()
    turned = v.data.view(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(v.data.dtype)
    assert torch.equal(cudnn_fp8.cudnn_fp8(q, k, Fp8Tensor(turned, v.scale), False)().dequantize(), want)


def test_cases_and_bars() -> None:
    names = [case.name for case in fp8.fp8_cases(False)]
    some = {"D64 S4096 full", "D128 S16384 documents", "D192 S16384 causal", "D256 S32768 full"}
    assert len(names) == 29 and some <= set(names)

    def row(case: str, **ms: float) -> dict[str, Any]:
        contenders: dict[str, Any] = {name: {"ms": each} for name, each in ms.items()}
        contenders["warploom"]["tflops"] = 1000.0
        return {"case": case, "contenders": contenders}

    full = row("D128 S16384 full", **{"warploom": 4.0, "cuDNN, FP8": 4.4, "warploom, quantised too": 4.2})
    other = row("D64 S4096 causal", **{"warploom": 4.0, "cuDNN, FP8": 3.9})
    wide = row("D256 S16384 full", **{"warploom": 4.0, "warploom, quantised too": 4.4, "warploom, fast sums": 3.9})
    wide["contenders"]["warploom, fast sums"]["tflops"] = 1100.0
    found = {what: value for what, _, value in BARS["fp8", "forward"]([full, other, wide])}
    assert found["cuDNN's FP8 over ours, the worst case"] == pytest.approx(3.9 / 4.0)
    assert found["D128 S16384 full over 1050 TFLOP/s"] == pytest.approx(1000 / 1050)
    assert found["D128 S16384 causal over 980 TFLOP/s"] is None
    assert found["1.08 of D128 S16384 full over the same quantised too"] == pytest.approx(1.08 * 4.0 / 4.2)
    assert found["1.08 of D256 S16384 full over the same quantised too"] == pytest.approx(1.08 * 4.0 / 4.4)
    assert found["D256 S16384 full, fast sums, over 1150 TFLOP/s"] == pytest.approx(1100 / 1150)
