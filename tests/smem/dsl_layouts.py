"""A program that prints what the CuTe DSL makes of layouts: offsets; wgmma's operands; its accumulator and A in registers."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

KINDS = {"none": "INTER", "32": "SW32", "64": "SW64", "128": "SW128"}


@cute.jit
def show() -> None:
    nested = cute.make_layout(((8, 2), (8, 8)), stride=((8, 512), (1, 64)))
    flat = cute.make_layout((8, 64), stride=(64, 1))
    layouts = [nested, flat, cute.make_layout((4, (2, 3), 5))]
    layouts += [cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, one) for one in (nested, flat)]
    layouts += [cute.make_composed_layout(cute.make_swizzle(2, 1, 4), 16, nested)]
    print(";".join(f"{one}={' '.join(str(cute.crd2idx(n, one)) for n in range(40))}" for one in layouts))

    tiled = []
    for mode, kind in KINDS.items():
        for major, shape in (("K", (64, 64)), ("MN", (128 if mode == "128" else 64, 16))):
            atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, f"{major}_{kind}"), cutlass.BFloat16)
            tiled.append(f"{major}-{mode}={cute.tile_to_shape(atom, shape, order=(0, 1))}")
    print(";".join(tiled))

    operation = warpgroup.MmaF16BF16Op(
        cutlass.BFloat16,
        cutlass.Float32,
        (64, 32, 16),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    product = cute.make_tiled_mma(operation)
    print(f"{product.tv_layout_C};{product.tv_layout_A}")


if __name__ == "__main__":
    show()
