"""What kernels of masks take of a processor, compiled without a GPU: the kernel of documents spilled 3.8 KB a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compile_launch, recorder  # noqa: E402
from warploom.attention import bounds  # noqa: E402
from warploom.masks.zoo import document_kernel, position_kernel, run_kernel, span_kernel, tree_kernel  # noqa: E402
from warploom.runtime import triton_launch  # noqa: E402

ROWS = torch.tensor([[3, 4]])
CPU = torch.device("cpu")
VECTOR = torch.zeros(1, 1, 7, dtype=torch.int32)
LAUNCHES: dict[str, Callable[[], Any]] = {
    "documents": lambda: document_kernel.document_vectors(ROWS, False, False, 7, 7),
    "causal documents, 32 bits": lambda: document_kernel.document_vectors(ROWS.int(), True, True, 7, 7),
    "where causal documents start": lambda: document_kernel.document_vectors(ROWS, False, True, 7, 7, True),
    "prefixes": lambda: document_kernel.part_vectors("prefixes", ROWS, (True, True, False), 7, 7, ROWS),
    "answers": lambda: document_kernel.part_vectors("answers", ROWS, (True, False, False), 7, 7, ROWS[:, :1]),
    "blocks": lambda: document_kernel.part_vectors("blocks", ROWS, (True, True, True), 7, 7),
    "segment ids": lambda: run_kernel.run_vectors(ROWS, True, False, 2, 2),
    "position ids": lambda: run_kernel.run_vectors(ROWS, False, False, 2, 2),
    "causal position ids, 32 bits": lambda: run_kernel.run_vectors(ROWS.int(), False, True, 2, 2),
    "spans": lambda: span_kernel.span_vector(ROWS, ROWS, 7, 7),
    "a tree": lambda: tree_kernel.tree_vector(ROWS, 7, 7),
    "diffusion": lambda: position_kernel.position_vectors("diffusion", 4, (True, True, False, True), 8, 8, CPU, 2),
    "global tokens": lambda: position_kernel.position_vectors(
        "global", ROWS[:, :1], (True, False, True, True), 8, 8, CPU, 2, 3
    ),
    "bounds": lambda: bounds._column_bounds(VECTOR, VECTOR, VECTOR, VECTOR, 3, 0, 7),
    "bounds of one": lambda: bounds._column_bounds(VECTOR, None, None, None, None, 0, 7),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Those that do not happen."""
    found: list[Recorded] = []

    caches = (
        document_kernel._launch,
        run_kernel.run_launch,
        span_kernel._launch,
        tree_kernel._launch,
        bounds._launch,
        bounds._dense,
        position_kernel._launch,
    )
    for module in (document_kernel, position_kernel, run_kernel, span_kernel, tree_kernel, triton_launch):
        monkeypatch.setattr(module, "Launch", recorder(found))
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_kernel_of_masks_spills(name: str, launches: list[Recorded]) -> None:
    LAUNCHES[name]()
    (launch,) = launches
    for architecture in (80, 90):
        found = compile_launch(launch, architecture)
        assert found.stack == 0 and found.faults == 0, found
        assert found.registers * 32 * launch.constants["num_warps"] <= 65536 // 2, f"one program a processor: {found}"
