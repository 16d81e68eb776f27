"""What problems are made of: views, draws, JSON, numbers, the judge."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fuzz import families, plan
from tests.fuzz.draw import Draw
from tests.fuzz.judge import judge
from tests.fuzz.plan import Options
from tests.fuzz.problem import Expected, from_json, to_json
from tests.fuzz.views import KINDS, View, place

NAN = float("nan")


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_shows_its_values_and_nothing_hostile(kind: str) -> None:
    for n in range(30):
        d = Draw("views", kind, n)
        shape = (d.integer(1, 3), d.integer(1, 6), d.integer(1, 3), d.integer(2, 9))
        view = d.view(shape, kinds=[kind])
        values = torch.randn(shape)
        hidden = torch.rand(shape[:2])[..., None, None] < 0.4 if d.chance(0.5) else None
        placed = place(values, view, hidden, "nan")
        shown = torch.ones(shape, dtype=torch.bool) if hidden is None else ~hidden.expand(shape)
        assert placed.tensor[shown].isfinite().all()
        if view.aliased:
            continue
        assert torch.equal(placed.tensor[shown], values[shown])
        assert placed.tensor[~shown].isnan().all()
        assert int(placed.buffer.isfinite().sum()) == int(shown.sum())


def test_an_unaligned_view_begins_at_its_offset() -> None:
    placed = place(torch.zeros(1, 4, 2, 8, dtype=torch.float16), View("contiguous", 0, 3))
    assert placed.tensor.data_ptr() - placed.buffer.data_ptr() == 6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_problem_is_drawn_from_seed_and_number_alone_and_survives_json(device: str) -> None:
    options = Options(device=device, seed=5, variants=40)
    for number in range(0, 400, 7):
        job, problem = plan.problem(options, number)
        assert plan.problem(options, number)[1] == problem
        assert from_json(json.loads(json.dumps(to_json(problem)))) == problem
        assert families.load(job.family).features(problem)


def test_a_variant_keeps_what_a_compiled_kernel_depends_on() -> None:
    options = Options("cuda", ("attention",), ("triton",), 0, 100)
    for number in range(0, 1500, 3):
        job, problem = plan.problem(options, number)
        variant = job.variant
        assert (problem.dtype, problem.head_dim, problem.head_dim_v) == (variant.dtype, variant.head_dim, variant.head_dim_v)
        assert (problem.softcap != 0, problem.sink, problem.dropout_p != 0) == (variant.softcap, variant.sink, variant.dropout)
        assert bool(problem.lse_gradient) == variant.lse_gradient
        for name, shape in problem.shapes.items():
            strides, first = problem.views[name].strides(shape)
            if variant.unit == 8:
                assert not any(s % 8 for s in strides[:-1]), (number, name)
            size = 4 if problem.dtype == "float32" else 2
            assert (first * size % 16 != 0) == (name in variant.unaligned), (number, name)


@pytest.mark.parametrize("family", ["attention", "varlen"])
def test_hopper_meets_biases_and_largest_logits_that_it_computes_itself(family: str) -> None:
    options, kinds = Options("cuda", (family,), ("hopper",), 0, 400), set()
    for number in range(0, 900, 3):
        _, problem = plan.problem(options, number)
        names = [spec.name for spec in families.load(family).modules(problem, "hopper")]
        assert not (problem.bias and names) or ("alibi" if problem.bias.startswith("alibi") else "distance") in names[0]
        assert not (problem.stats and names) or any("largest" in name for name in names)
        kinds |= {problem.bias, *problem.stats}
    assert kinds >= {"alibi", "alibi of batches", "relative", "relative, one side", "relative, buckets", ""}
    assert ("max_logits" in kinds) == (family == "attention")


def test_a_job_of_fp8_quantises_in_one_way_and_jobs_in_all() -> None:
    """When each problem quantised in a way of its own, 300 problems compiled 356 kernels."""
    options, ways, modules = Options("cuda", ("fp8",), ("hopper",), 0, 200), {}, set()
    for number in range(600):
        job, problem = plan.problem(options, number)
        unaligned = []
        for name, shape in problem.base.shapes.items():
            view = problem.base.views[name]
            strides, first = view.strides(shape)
            assert job.variant.way.unit == 1 or not any(s % 8 for s in strides[:-1]), (number, name)
            unaligned += [name] if first % 8 else []
        assert tuple(unaligned) == job.variant.way.unaligned, number
        way = problem.granularity, problem.rotation is not None, problem.padding
        assert ways.setdefault(job.index, way) == way
        modules |= {spec.name for spec in families.load("fp8").modules(problem, "hopper")}
    assert job.compiles and len(modules) <= 10
    for part in range(3):
        pairs = {(*way[:part], *way[part + 1 :]) for way in ways.values()}
        assert len(pairs) == (4, 6, 6)[part], pairs


def verdict(got: torch.Tensor, ref: torch.Tensor, **more: object) -> str:
    (found,) = judge({"out": got}, {"out": Expected(ref.double(), (ref.double(),), **more)}, torch.float32)  # type: ignore[arg-type]
    return "right" if found.right else str(found)


def test_the_judge() -> None:
    ref = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    assert verdict(ref, ref) == "right"
    assert "bounds" in verdict(ref + 1e-4, ref)
    assert "shape" in verdict(ref[:3], ref)
    assert "dtype" in verdict(ref, ref, like=torch.float16)
    lost, held = ref.clone(), ref.clone()
    lost[3, 3], held[4, 4] = NAN, NAN
    assert "should be numbers" in verdict(lost, ref)
    assert verdict(lost, ref, loose=True) == "right"
    assert "should be" in verdict(ref, held) and "should be" in verdict(ref, held, loose=True)
    assert verdict(held, held) == "right"
    lucky = Expected(ref.double(), (ref.double(), ref.double() + 1e-4))
    assert judge({"out": ref + 1e-4}, {"out": lucky}, torch.float32)[0].right
    assert not judge({"out": ref + 1e-3}, {"out": lucky}, torch.float32)[0].right
    assert "missing" in str(judge({}, {"out": Expected(ref)}, torch.float32)[0])
    assert not judge({"out": ref, "more": ref}, {"out": Expected(ref)}, torch.float32)[1].right
    infinite = ref.clone()
    infinite[0, 0] = float("-inf")
    assert verdict(infinite, infinite) == "right" and "should be" in verdict(ref, infinite)
