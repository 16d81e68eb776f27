"""Predicted wavefronts of the forward against those counted on a GPU, instruction by instruction (benchmarks/results)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.traffic import wavefronts
from warploom.smem.device.residual import Instruction, access_of, by_access, corrected, parse_source, residuals

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "banks_attention.json").read_text())
KERNELS = {kernel["layout"]: kernel for kernel in MEASURED["kernels"]}


def measured(kernel: dict[str, Any]) -> list[Instruction]:
    return [Instruction(int(address, 16), *rest) for address, *rest in kernel["instructions"]]


@pytest.mark.parametrize("layout", KERNELS)
def test_prediction_is_exact(layout: str) -> None:
    kernel, call = KERNELS[layout], MEASURED["call"]
    fields = {name: kernel[name] for name in ("tile_n", "swizzle", "pad")}
    config = ForwardConfig(call["dtype"], call["head_dim"], arch="sm_90a", **fields)
    blocks = call["batch"] * call["heads"] * call["seqlen_q"] // config.tile_m
    assert wavefronts(config, blocks, call["seqlen_k"] // config.tile_n) == by_access(corrected(measured(kernel)))


def test_ncu_misreads_the_copies_whose_predicate_is_in_p0_and_no_other() -> None:
    """Padding delays every copy of a tile alike; those without a delay in the table are the ones with P0."""
    copies = [one for one in measured(KERNELS["padded"]) if one.access == "cp.async.128"]
    assert [one.misread for one in copies] == [one.excess == 0 for one in copies]
    assert sum(one.misread for one in copies) == 10 and len(copies) == 40
    assert {one.excess / one.executed for one in copies if not one.misread} == {6.5, 6.5 * 63 / 64}


def test_the_swizzle_leaves_nothing() -> None:
    assert residuals(measured(KERNELS["swizzled"])) == []
    conflicts = residuals(measured(KERNELS["plain"]))
    assert {one.access for one in conflicts} == {"ldmatrix.x4", "ldmatrix.x4.trans"}
    assert all(one.wavefronts == 8 * one.ideal for one in conflicts)


@pytest.mark.parametrize(
    ("sass", "access"),
    [
        ("@!P0 LDSM.16.MT88.4 R8, [R228+UR4+0x10080]", "ldmatrix.x4.trans"),
        ("LDSM.16.M88 R8, [R2]", "ldmatrix.x1"),
        ("STSM.16.M88.2 [R2], R8", "stmatrix.x2"),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R226+0x10000], desc[UR32][R24.64], P1", "cp.async.128"),
        ("LDGSTS.E [R226], desc[UR32][R24.64]", "cp.async.32"),
        ("LDS R4, [R2]", "lds.32"),
        ("LDS.U8 R4, [R2]", "lds.8"),
        ("STS.128 [R2], R4", "sts.128"),
        ("HMMA.16816.F32.BF16 R116, R4, R8, R116", None),
        ("LDG.E.128 R4, desc[UR4][R2.64]", None),
        ("", None),
    ],
)
def test_access_of(sass: str, access: str | None) -> None:
    assert access_of(sass) == access


HEADER = '"Address","Source","Instructions Executed","L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"'


def test_source_page() -> None:
    page = f"""==PROF== some words
kernel, (512, 1, 1)
{HEADER}
"1","      S2R R1, SR_TID.X","4","0","0"
"2","      LDSM.16.M88.4 R4, [R2]","4","128","16"
"3","@!PT   LDS RZ, [RZ]","4","0","0"
"4","      STS [R2], R4","4","1,004","4"
another kernel
{HEADER}
"2","      STS [R2], R4","4","4","4"
"""
    found, other = parse_source(page)
    assert [(one.address, one.access, one.excess) for one in found] == [(16, "ldmatrix.x4", 112), (48, "sts.32", 1000)]
    assert [one.access for one in residuals(found)] == ["sts.32", "ldmatrix.x4"]
    assert by_access(found) == {"ldmatrix.x4": (128, 16), "sts.32": (1004, 4)}
    assert [(one.address, one.excess) for one in other] == [(0, 0)]


@pytest.mark.parametrize(("text", "words"), [("==ERROR== no", "no source page"), (HEADER.replace(" Ideal", ""), "lacks")])
def test_source_page_refuses(text: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        parse_source(text)
