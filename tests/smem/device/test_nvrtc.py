"""Compiling and launching CUDA C++ against a stand-in for cuda-core: what NVRTC and the launch are given."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.smem.device.kernels import nvrtc


class Core(ModuleType):
    """Records every program, launch and shared-memory size."""

    def __init__(self) -> None:
        super().__init__("cuda.core")
        self.__version__ = "1.2.2"
        self.LEGACY_DEFAULT_STREAM = "default stream"
        self.programs: list[tuple[str, str, dict[str, Any]]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.allowed: list[tuple[int, Any]] = []
        self.ProgramOptions = self.LaunchConfig = lambda **options: options
        self.Device = lambda index: SimpleNamespace(set_current=lambda: None)
        self.Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
        self.launch = lambda *arguments: self.launches.append(arguments)

    def Program(self, source: str, language: str, options: dict[str, Any]) -> Any:
        self.programs.append((source, language, options))
        code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(name=name, handle=f"handle of {name}"))
        return SimpleNamespace(compile=lambda kind: code)

    def set_attribute(self, attribute: str, value: int, handle: Any, device: int) -> tuple[str]:
        assert attribute == "most dynamic shared memory"
        self.allowed.append((value, handle))
        return ("success" if value < 200_000 else SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)  # type: ignore[return-value]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    driver = SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most dynamic shared memory"),
        CUresult=SimpleNamespace(CUDA_SUCCESS="success"),
        cuKernelSetAttribute=core.set_attribute,
    )
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    package = ModuleType("cuda")
    package.core, package.bindings = core, bindings  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.core", core), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return core


def test_launches(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = nvrtc.Kernels("source")
    ((source, language, options),) = core.programs
    assert (source, language, options["arch"], options["std"]) == ("source", "c++", "sm_90a", "c++17")
    tensor = torch.zeros(4)
    kernels.launch("small", 1, 32, [tensor, 7])
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=123))
    for _ in range(2):
        kernels.launch("large", 64, 128, [tensor], 100_000)
    (stream, config, kernel, pointer, number), *large = core.launches
    assert (stream, kernel.name, pointer) == ("default stream", "small", tensor.data_ptr())
    assert config == {"grid": 1, "block": 32, "shmem_size": 0}
    assert isinstance(number, ctypes.c_int) and number.value == 7
    assert [one[0] for one in large] == ["stream 123"] * 2 and large[0][1]["shmem_size"] == 100_000
    assert core.allowed == [(100_000, "handle of large")], "asked once, and only where more than the default is taken"
    with pytest.raises(RuntimeError, match="300000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        kernels.launch("large", 64, 128, [tensor], 300_000)


def test_refusals(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.refusal() is None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert "compute capability 8.0" in str(nvrtc.refusal())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    old = ModuleType("cuda.core")
    old.__version__ = "0.3.2"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["cuda"], "core", old)
    monkeypatch.setitem(sys.modules, "cuda.core", old)
    assert nvrtc.refusal() == "cuda-core 0.3.2 is too old, 1.0 is needed (pip install 'warploom[lab]')"
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert nvrtc.refusal() == "cuda-core is not installed (pip install 'warploom[lab]')"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert nvrtc.refusal() == "no CUDA device is visible"


def test_headers_are_found_where_all_of_them_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for root, names in (("partial", ("cuda_fp16.h",)), ("whole", ("cuda_fp16.h", "mma.h", "crt/mma.h"))):
        for name in names:
            path = tmp_path / root / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "partial"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "whole"))
    assert nvrtc.headers() == tmp_path / "whole" / "include"
