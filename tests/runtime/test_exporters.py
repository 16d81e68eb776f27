"""Exporters and tracers: each takes a model that calls us, or is refused in one sentence that says what to do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import warploom
from warploom import masks

Function = Callable[..., Any]


class Calls(nn.Module):
    """A model of one call."""

    def __init__(self, call: Function) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.call(q, k, v)
        return found


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return warploom.attention_varlen(q[0], k[0], v[0], torch.tensor([0, 3, 8], dtype=torch.int32), causal=True)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return warploom.decode(q[:, -1:], warploom.KVCache(k, v, torch.tensor([8, 5], dtype=torch.int32)))


CALLS: dict[str, Function] = {
    "attention": lambda q, k, v: warploom.attention(q, k, v, causal=True),
    "masked": lambda q, k, v: warploom.attention(q, k, v, mask=masks.Document([3, 5])),
    "packed": packed,
    "sdpa": lambda q, k, v: warploom.scaled_dot_product_attention(q, k, v, is_causal=True),
    "decode": decode,
    "linear": lambda q, k, v: warploom.linear_attention(q, k, v),
    "delta": lambda q, k, v: warploom.gated_delta_rule(q, k, v, torch.sigmoid(v[..., 0]), normalize_qk=True),
}
EAGER: dict[str, Function] = {
    "attention": lambda q, k, v: warploom.attention(q, k, v, causal=True, backend="reference"),
    "linear": lambda q, k, v: warploom.linear_attention(q, k, v, backend="reference"),
    "delta": lambda q, k, v: warploom.gated_delta_rule(q, k, v, torch.sigmoid(v[..., 0]), backend="reference"),
}
every = pytest.mark.parametrize("name", list(CALLS))


def inputs(seqlen: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, seqlen, 2, 16) for _ in range(3))
    return q, k, v


def agrees(traced: Function, model: nn.Module, *tensors: Tensor) -> None:
    torch.testing.assert_close(traced(*tensors), model(*tensors))


@every
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_torch_export_keeps_the_op(name: str, strict: bool) -> None:
    model = Calls(CALLS[name])
    program = torch.export.export(model, inputs(), strict=strict)
    assert any(str(node.target).startswith("warploom.") for node in program.graph.nodes)
    agrees(program.module(), model, *inputs())


def test_torch_export_keeps_the_op_through_decompositions_a_file_and_other_lengths() -> None:
    model = Calls(CALLS["attention"])
    lengths = {1: torch.export.Dim("seqlen", min=2, max=64)}
    program = torch.export.export(model, inputs(), dynamic_shapes=(lengths, lengths, lengths))
    file = io.BytesIO()
    torch.export.save(program.run_decompositions(), file)
    file.seek(0)
    agrees(torch.export.load(file).module(), model, *inputs(11))


@pytest.mark.parametrize("name", list(EAGER))
def test_the_reference_exports_as_torch_s_own_operations(name: str) -> None:
    """Which is what ONNX and other formats without our ops take."""
    model = Calls(EAGER[name])
    program = torch.export.export(model, inputs())
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called and not [target for target in called if "warploom" in target]
    agrees(program.module(), model, *inputs())


@every
def test_jit_trace_records_the_op(name: str) -> None:
    model = Calls(CALLS[name])
    agrees(torch.jit.trace(model, inputs()), model, *inputs())


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++")
def test_aot_inductor_packages_a_model(tmp_path: Path) -> None:
    model = Calls(CALLS["attention"])
    program = torch.export.export(model, inputs())
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    path = str(tmp_path / "model.pt2")
    package = torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quick)
    agrees(torch._inductor.aoti_load_package(package), model, *inputs())


@every
def test_symbolic_trace_is_refused_in_words(name: str) -> None:
    with pytest.raises(TypeError, match=r"is a Proxy of torch\.fx\.symbolic_trace.*use torch\.export\.export"):
        torch.fx.symbolic_trace(Calls(CALLS[name]))


def test_symbolic_trace_takes_a_wrapped_name() -> None:
    """The sentence above names the way; torch.fx.wrap reads the globals of the module that it is called in."""
    space: dict[str, Any] = {"__name__": "model"}
    exec(
        "import torch\nfrom warploom import attention\ntorch.fx.wrap('attention')\n"
        "def forward(q, k, v):\n    return attention(q, k, v, causal=True) * 2",
        space,
    )
    traced = torch.fx.symbolic_trace(space["forward"])
    agrees(traced, Calls(space["forward"]), *inputs())


ONNX = {
    "attention": "warploom.attention has no ONNX operator; export the model with backend='reference' or torch's "
    "scaled_dot_product_attention in its place",
    "decode": "warploom.decode has no ONNX operator; export torch's scaled_dot_product_attention in its place",
    "linear": "warploom.linear_attention has no ONNX operator; export the model with backend='reference' in its place",
    "delta": "warploom.gated_delta_rule has no ONNX operator; export the model with backend='reference' in its place",
}
ONNX |= dict.fromkeys(("masked", "packed", "sdpa"), ONNX["attention"])


@every
def test_the_legacy_onnx_exporter_is_refused_in_words(name: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.onnx.export(Calls(CALLS[name]), inputs(), io.BytesIO(), dynamo=False)
    assert str(refused.value) == ONNX[name]


@every
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_the_onnx_exporter_is_refused_in_words(name: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures by torch.export.export, while this is true; the rest of it needs onnxscript."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError) as refused:
        torch.export.export(Calls(CALLS[name]), inputs(), strict=strict)
    assert ONNX[name] in str(refused.value)


@pytest.mark.parametrize("name", list(EAGER))
def test_the_reference_is_not_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    torch.export.export(Calls(EAGER[name]), inputs())


def test_an_exported_program_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone exports it first and hands it to torch.onnx.export, which runs it through decompositions."""
    program = torch.export.export(Calls(CALLS["attention"]), inputs())
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match="has no ONNX operator"):
        program.run_decompositions()


def test_script_is_refused_by_torch_itself() -> None:
    """TorchScript's language has no keyword-only arguments with defaults; docs/export.md says what to use."""

    def script(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return warploom.attention(q, k, v)

    with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only arguments"):
        torch.jit.script(script)
