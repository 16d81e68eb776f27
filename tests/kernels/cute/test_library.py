"""The CuTe DSL library's plain parts: named barriers that do not overlap, classes that take the fields they declare."""

from __future__ import annotations

from typing import Any

import pytest

from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")


def test_named_barriers_of_a_kernel_do_not_overlap() -> None:
    from warploom.kernels.cute import barriers as found

    kernels = [
        (found.ForwardBarrier,),
        (found.BackwardBarrier, found.StepBarrier),
        (found.BackwardBarrier, found.RolesBarrier),
        (found.BackwardBarrier, found.PairBarrier),
        (found.WalkBarrier,),
        (found.DecodeBarrier,),
        (found.LatentBarrier,),
        (found.DeltaBarrier,),
    ]
    known = {kind for kinds in kernels for kind in kinds}
    assert known == set(found.NamedBarriers.__subclasses__())
    for kinds in kernels:
        numbers = [number for kind in kinds for b in kind for number in range(b, b + b.count)]
        assert len(set(numbers)) == len(numbers) and min(numbers) > 0 and max(numbers) < 16, kinds


def test_fields_are_those_that_a_class_declares() -> None:
    from warploom.kernels.cute.fields import Fields

    class Base(Fields):
        a: Any

    class Both(Base):
        b: Any

    both = Both(a=1, b=2)
    assert vars(both.but(b=3)) == {"a": 1, "b": 3} and vars(both) == {"a": 1, "b": 2}
    for wrong in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(TypeError, match="Both"):
            Both(**wrong)
    with pytest.raises(TypeError, match="'c'"):
        both.but(c=3)
    with pytest.raises(AttributeError, match="but"):
        both.a = 2


def test_barriers_are_handed_out_one_after_the_other() -> None:
    from warploom.kernels.cute.rings import Mbarriers

    barriers = Mbarriers(100)
    assert [barriers.take(3), barriers.take(), barriers.take(2), barriers.take()] == [100, 103, 104, 106]
