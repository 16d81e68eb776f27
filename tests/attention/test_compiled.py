"""Kernels compiled offline for sm_80 and sm_90: what they take fits the devices and does not grow unseen.

`python tools/kernel_resources.py` writes the table anew after a change that is meant.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from tools import kernel_resources as tool  # noqa: E402

TABLE = json.loads((Path(__file__).parent / "resources.json").read_text())
VARIANTS: dict[str, dict[str, int]] = TABLE["variants"]
# Compiled here; the rest when the table is written.
CORE_CASES = {
    "sm_90 bf16 64/64 causal",
    "sm_90 bf16 128/128 columns",
    "sm_90 bf16 256/256 causal",
    "sm_90 fp32 128/128 causal",
    "sm_80 fp16 128/128 columns",
    "sm_90 bf16 128/128 decode",
    "sm_80 bf16 128/128 paged decode",
}
CORE = [name for name in VARIANTS if name.rpartition(" ")[0] in CORE_CASES]


def test_every_variant_is_in_the_table() -> None:
    assert {name for case in tool.cases() for name in tool.recorded(case)} == set(VARIANTS)
    assert {name.rpartition(" ")[0] for name in CORE} == CORE_CASES


@pytest.mark.parametrize("name", CORE)
def test_core_variant(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = next(c for c in tool.cases() if str(c) == name.rpartition(" ")[0])
    found = tool.compile_launch(tool.recorded(case)[name], case.architecture)
    assert found.shared <= tool.SHARED_LIMIT[case.architecture] and found.registers <= 255
    if VARIANTS[name]["wgmma"]:
        assert found.wgmma
    if triton.__version__ == TABLE["triton"]:  # another version allocates otherwise
        for resource in ("registers", "stack", "shared"):
            assert getattr(found, resource) <= VARIANTS[name][resource], (name, found, VARIANTS[name])


def test_table_fits_the_devices() -> None:
    def fits(name: str, row: dict[str, int]) -> bool:
        return row["shared"] <= tool.SHARED_LIMIT[int(name[3:5])] and row["registers"] <= 255

    assert VARIANTS and [name for name, row in VARIANTS.items() if not fits(name, row)] == []


def test_sixteen_bit_tiles_use_wgmma() -> None:
    for name, row in VARIANTS.items():
        if name.startswith("sm_90") and " fp32 " not in name and name.endswith(" forward"):
            assert row["wgmma"], name


# Whose registers let three programs share a multiprocessor as it is, and which is slower otherwise.
ONE_BY_ONE = {"sm_90 bf16 64/64 distance forward"}


def test_products_do_not_wait_for_each_other() -> None:
    """ptxas may run wgmma one by one, which docs/lab-notes/compiler.md tells of: then there are as many waits as products."""
    found = {name for name, row in VARIANTS.items() if row["wgmma"] >= 8 and row["waits"] >= row["wgmma"] / 2}
    assert found == ONE_BY_ONE


def test_a_decode_kernel_without_a_bias_takes_nothing_of_one() -> None:
    """Its binary is what it was before there were any."""
    case = next(c for c in tool.cases() if str(c) == "sm_90 bf16 128/128 decode")
    found = tool.specialised(tool.recorded(case)[f"{case} split"])
    taken = {name: kind for name, kind in found.signature.items() if "bias" in name.lower()}
    assert len(taken) == 7 and set(taken.values()) == {"constexpr"} and found.constants["BIAS"] == ""


def test_a_decode_kernel_without_a_prefix_takes_nothing_of_one() -> None:
    case = next(c for c in tool.cases() if str(c) == "sm_90 bf16 128/128 decode")
    for kernel in ("split", "merge"):
        found = tool.specialised(tool.recorded(case)[f"{case} {kernel}"])
        taken = {found.signature[name] for name in ("prefix_ptr", "prefix_keys", "sequences", "chunk")}
        assert taken == {"constexpr"} and not found.constants["SHARED"]


def test_recording_leaves_nothing_behind() -> None:
    from warploom.attention.triton import call, run

    tool.recorded(tool.cases()[0])
    assert call.capability(torch.device("cpu")) == 90
    assert run._forward_launch.cache_info().currsize == 0
