"""The search for faults in machine code finds those that were met, and none in kernels as they are now."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tools import kernel_resources as tool  # noqa: E402
from tools.machine_code import described_twice, faults, overwritten, undefined, waited_twice  # noqa: E402
from warploom.kernels.triton.widths import tile_widths  # noqa: E402

HEAD = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
"""


def test_a_register_that_nothing_wrote() -> None:
    lost = HEAD + "        /*0030*/ UIADD3 UR22, UP0, UR22, 0x20, URZ ;\n.L_x_1:\n        /*0040*/ EXIT ;"
    assert undefined(lost) == ["UIADD3 UR22, UP0, UR22, 0x20, URZ (UR22)"]
    assert faults("", "", lost) == ["reads what was never written: UIADD3 UR22, UP0, UR22, 0x20, URZ (UR22)"]


def test_a_register_that_one_way_leaves_unwritten() -> None:
    one = "        /*0030*/ UMOV UR8, UR4 ;\n.L_x_1:\n        /*0040*/ STG.E desc[UR4][R2.64], R8 ;\n"
    assert undefined(HEAD + one + "        /*0050*/ UMOV UR9, UR8 ;\n        /*0060*/ EXIT ;") == ["UMOV UR9, UR8 (UR8)"]
    assert undefined(HEAD + one + "        /*0050*/ UMOV UR9, UR5 ;\n        /*0060*/ EXIT ;") == []


def test_a_loop_is_followed_once_around() -> None:
    loop = "        /*0030*/ UMOV UR8, UR4 ;\n.L_x_1:\n        /*0040*/ UIADD3 UR8, UR8, 0x40, URZ ;\n"
    end = "        /*0050*/ @P1 BRA `(.L_x_1) ;\n        /*0060*/ EXIT ;"
    assert undefined("        /*0000*/ ULDC UR4, c[0x0][0x28] ;\n" + loop + end) == []


def test_descriptors_of_a_product() -> None:
    head = "        /*0000*/ UMOV UR10, 0x1 ;\n        /*0010*/ UMOV UR11, 0x40000040 ;\n"
    registers = head + "        /*0020*/ HGMMA.64x16x16.F32 R96, R24, gdesc[UR8].tnspB, R96 ;\n        /*0030*/ EXIT ;"
    assert undefined(registers) == []
    both = head + "        /*0020*/ HGMMA.64x64x16.F32 R96, gdesc[UR8], R96 ;\n        /*0030*/ EXIT ;"
    assert undefined(both) == ["HGMMA.64x64x16.F32 R96, gdesc[UR8], R96 (UR8, UR9)"]


def test_the_stack_pointer_in_arithmetic() -> None:
    head = "        /*0000*/ LDC R1, c[0x0][0x28] ;\n        /*0010*/ VIADD R1, R1, 0xffffff80 ;\n"
    head += "        /*0020*/ STL [R1+0x4], R4 ;\n"
    assert undefined(head + "        /*0030*/ EXIT ;") == []
    lost = head + "        /*0030*/ IADD3.X R6, R1, -0x7fffffe0, RZ, P2, !PT ;\n        /*0040*/ EXIT ;"
    assert undefined(lost) == ["IADD3.X R6, R1, -0x7fffffe0, RZ, P2, !PT (R1)"]


def test_one_address_described_in_two_ways() -> None:
    keys = "or.b64 %rd467, %rd433, 4611686293305294848;\nadd.s64 %rd469, %rd433, 4611686293305294850;\n"
    assert described_twice(keys) == []
    assert described_twice(keys + "add.s64 \t%rd489, %rd433, -4611685949707911136;\n") == ["%rd433"]


def test_a_product_that_is_waited_for_twice() -> None:
    product = "%s = ttng.warp_group_dot %a, %b, %c {isAsync = true} : x\n"
    wait = "%w = ttng.warp_group_dot_wait %s {pendings = 0 : i32} : x\n"
    assert waited_twice(product + wait + wait) == ["%s"]
    # Loops of their own may give their products one name.
    empty = "        /*0000*/ EXIT ;"
    assert faults(product + wait + product + wait, "", empty) == []
    assert faults(product + wait + wait, "", empty) == ["waits twice for %s_1"]


def test_a_buffer_too_few() -> None:
    loop = """
    %buffer = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xf16, #shared>
    scf.for %i = %a to %b step %c {
      %k = ttg.memdesc_index %buffer[%i] : x
      %s = ttng.warp_group_dot %q, %k, %zero {isAsync = true} : x
      %w = ttng.warp_group_dot_wait %s, %k {pendings = 1 : i32} : x
      %to = ttg.memdesc_index %buffer[%j] : x
      %copy = ttg.async_copy_global_to_local %p, %to : x
    } {tt.num_stages = 3 : i32}
    """
    assert overwritten(loop) == ["%buffer"]
    assert overwritten(loop.replace("<2x64", "<3x64")) == []


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_unequal_tiles_are_swizzled_alike(itemsize: int) -> None:
    for d in range(16, 264, 8):
        for dv in range(16, 264, 8):
            width, width_v = tile_widths(d, dv, itemsize)
            assert min(width, 128 // itemsize) == min(width_v, 128 // itemsize)
            assert width >= d and width_v >= dv and width & (width - 1) == width_v & (width_v - 1) == 0
            if d == dv and d * itemsize >= 128:
                assert width == width_v < 2 * d


@pytest.mark.parametrize("feature", ["odd strides", "columns"])
def test_unequal_head_dims_lost_a_descriptor(feature: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Out was wrong by up to 1e7 bounds, or the kernel read past its shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = next(c for c in tool.cases() if (c.head_dim, c.head_dim_v, c.feature) == (64, 16, feature))
    assert tool.compile_launch(tool.recorded(case)[f"{case} forward"], case.architecture).faults == 0


def test_decode_of_many_fp32_queries_lost_a_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found by the fuzzer: 56 rows of head dims 160 and 48 were wrong, or read past their shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = next(c for c in tool.cases() if (c.head_dim, c.head_dim_v, c.feature) == (160, 48, "decode, queries"))
    assert tool.compile_launch(tool.recorded(case)[f"{case} split"], case.architecture).faults == 0


def test_dropout_at_head_dim_256_asked_for_too_much_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """OutOfResources, 233,984 bytes on a device of 232,448."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = next(c for c in tool.cases() if (c.head_dim, c.feature) == (256, "dropout"))
    found = tool.compile_launch(tool.recorded(case)[f"{case} dk"], case.architecture)
    assert found.shared <= tool.SHARED_LIMIT[90]
