"""How Triton kernels are compiled."""

from __future__ import annotations

import os

import pytest

triton_launch = pytest.importorskip("warploom.runtime.triton_launch")
LINES = "TRITON_DISABLE_LINE_INFO"


def test_line_numbers_changed_the_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out, in our compilations alone, and stay where somebody asks for them."""
    from triton import knobs

    monkeypatch.delenv(LINES, raising=False)
    with pytest.raises(KeyError), triton_launch.without_lines():
        assert knobs.compilation.disable_line_info
        raise KeyError
    assert not knobs.compilation.disable_line_info and LINES not in os.environ
    monkeypatch.setenv(LINES, "0")
    with triton_launch.without_lines():
        assert not knobs.compilation.disable_line_info
    assert os.environ[LINES] == "0"
