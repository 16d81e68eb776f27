"""The Triton kernels of linear attention compiled offline for sm_90: they fit, use wgmma, and wait once for each product."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

triton = pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compiled_launch, recorder  # noqa: E402
from tools.machine_code import faults, listing  # noqa: E402
from warploom.linear.problem import LinearCall  # noqa: E402
from warploom.linear.triton import call as call_module  # noqa: E402
from warploom.linear.triton import gradients, run, states  # noqa: E402
from warploom.linear.triton.config import config  # noqa: E402

SHARED_LIMIT = 227 * 1024
MODULES = run, states, gradients


def launches(
    dim: int, map_name: str, normalize: bool, heads: int, decay: torch.Tensor | None = None
) -> list[Recorded]:
    """The kernels, constants and arguments of a forward and a backward pass, of launches that do not happen."""
    found: list[Recorded] = []
    cached = [f for module in MODULES for f in vars(module).values() if hasattr(f, "cache_clear")]
    for f in cached:
        f.cache_clear()
    q, k, v = (torch.zeros(1, 4096, heads, dim, dtype=torch.bfloat16) for _ in range(3))
    call = LinearCall(q, k, v, map_name, map_name, True, normalize, 1e-6, 1.0, None, None, None, None, decay)
    call = replace(call, decay_grad=decay is not None and decay.requires_grad)
    try:
        with ExitStack() as patches:
            for module in MODULES:
                patches.enter_context(patch.object(module, "Launch", recorder(found)))
            out, norm, *_ = run.forward(call, False)
            run.backward(call, out, norm, None, None)
    finally:
        for f in cached:
            f.cache_clear()
    return found


@pytest.mark.parametrize(
    ("dim", "map_name", "normalize", "heads", "lookback"),
    [
        (64, "elu+1", True, 128, True),
        (128, "elu+1", True, 128, True),
        (64, "identity", True, 128, True),
        (128, "identity", True, 128, True),
        (64, "identity", False, 2, True),
        (64, "identity", False, 2, False),
    ],
    ids=["D64", "D128", "D64 mapped", "D128 mapped", "few heads, as loaded", "few heads, states in launches of their own"],
)
def test_kernels(
    dim: int, map_name: str, normalize: bool, heads: int, lookback: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(call_module, "config", lambda *a: replace(config(*a), lookback=lookback))
    found = launches(dim, map_name, normalize, heads)
    assert {launch.kernel.__name__ for launch in found} >= {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    for launch in found:
        name = launch.kernel.__name__
        if name == "scan_kernel":
            continue
        binary = compiled_launch(launch, 90)
        assert binary.metadata.shared <= SHARED_LIMIT, name
        assert "wgmma.mma_async" in binary.asm["ptx"], name
        assert not faults(binary.asm["ttgir"], binary.asm["ptx"], listing(binary.asm["cubin"])), name
        ttgir = binary.asm["ttgir"]
        bodies = [loop.partition("scf.yield")[0] for loop in ttgir.split("scf.for")[1:]]
        products = [body for body in bodies if "ttng.warp_group_dot " in body]
        assert products, name
        # The loop over the states before a segment has no product, and loads several at once.
        assert not any("tt.load" in body for body in products), f"{name} loads synchronously"


def test_kernels_that_fade(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Every kernel of a decay with a gradient, once: as few heads as have states in launches of their own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    decay = torch.zeros(1, 4096, 2, requires_grad=True)
    found = {launch.kernel.__name__: launch for launch in launches(64, "identity", False, 2, decay)}
    assert found.pop("scan_kernel") and found.pop("sums_kernel") and found.pop("log_gradients_kernel")
    assert set(found) == {"forward_kernel", "state_kernel", "dq_kernel", "dkdv_kernel"}
    for name, launch in found.items():
        binary = compiled_launch(launch, 90)
        assert binary.metadata.shared <= SHARED_LIMIT, name
        assert "wgmma.mma_async" in binary.asm["ptx"], name
        assert not faults(binary.asm["ttgir"], binary.asm["ptx"], listing(binary.asm["cubin"])), name


@pytest.mark.parametrize("dim", [64, 256])
def test_states_that_fade_do_not_wait_for_each_product(dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(call_module, "config", lambda *a: replace(config(*a), lookback=False))
    found = launches(dim, "identity", False, 2, -torch.ones(2))
    launch = next(x for x in found if x.kernel.__name__ == "state_kernel" and not x.constants["BACKWARD"])
    code = listing(compiled_launch(launch, 90).asm["cubin"])
    assert code.count("HGMMA") >= 8 and code.count("WARPGROUP.DEPBAR") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_gradients_of_a_decay_meet_in_equal_chunks(width: int, capability: int, dtype: torch.dtype) -> None:
    """dQ's kernel leaves the states before its chunks to dK's. Sums of logs are all kernels'."""
    for by_rows in (False, True):
        kinds = [(True, True, True, logs_grad, by_rows) for logs_grad in (True, False)]
        c, without = (config(dtype, width, width, capability, *kind) for kind in kinds)
        assert c.forward == without.forward and c.by_rows == without.by_rows
        assert c.dq.chunk == (c.dkdv or c.dk).chunk
        assert not c.by_rows or {t.chunk for t in (c.forward, c.state, c.dv)} == {c.dq.chunk}
        assert c.by_rows == (by_rows and dtype == torch.bfloat16 and capability == 90)
