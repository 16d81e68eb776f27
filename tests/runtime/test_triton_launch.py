"""How Triton kernels are compiled, and launched past Triton."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

triton_launch = pytest.importorskip("warploom.runtime.triton_launch")
LINES, FUSION = "TRITON_DISABLE_LINE_INFO", "TRITON_DEFAULT_FP_FUSION"


def test_line_numbers_changed_the_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out, in our compilations alone, and stay where somebody asks for them."""
    from triton import knobs

    monkeypatch.delenv(LINES, raising=False)
    with pytest.raises(KeyError), triton_launch.settings():
        assert knobs.compilation.disable_line_info
        raise KeyError
    assert not knobs.compilation.disable_line_info and LINES not in os.environ
    monkeypatch.setenv(LINES, "0")
    with triton_launch.settings():
        assert not knobs.compilation.disable_line_info
    assert os.environ[LINES] == "0"


def test_multiply_adds_are_fused_whatever_becomes_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FUSION, raising=False)
    with triton_launch.settings():
        assert os.environ[FUSION] == "1"
    assert FUSION not in os.environ
    monkeypatch.setenv(FUSION, "0")
    with triton_launch.settings():
        assert os.environ[FUSION] == "0"


@pytest.mark.parametrize("as_tuple", [False, True])
def test_arguments_of_the_launcher(monkeypatch: pytest.MonkeyPatch, as_tuple: bool) -> None:
    """In the order of Triton 3.6's, and of that of 3.8 and 3.9."""
    monkeypatch.setattr(triton_launch, "_TUPLE", as_tuple)
    monkeypatch.setattr(triton_launch.torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    seen: list[tuple[Any, ...]] = []
    named = {"arg_annotations": "annotations", "kernel_signature": b"signature"} if as_tuple else {}
    launcher = SimpleNamespace(
        launch=lambda *given: seen.append(given), launch_cooperative_grid=False, launch_pdl=True, **named
    )
    raw = triton_launch.RawLaunch(launcher, SimpleNamespace(function=9, packed_metadata=(4, 1, 512)), 1, 2)
    raw((5, 6), 71, 100, 2.5)
    raw.bound((5, 6), (2.5,))(100)
    grid, arguments = (5, 6, 1, 71, 9, False, True), (100, 2.5, None, None)
    if as_tuple:
        expected: tuple[Any, ...] = (*grid, (4, 1, 512), *(None,) * 5, "annotations", b"signature", arguments)
    else:
        expected = (*grid, None, None, (4, 1, 512), None, None, None, *arguments)
    assert seen == [expected] * 2
