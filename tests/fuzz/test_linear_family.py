"""Linear attention's problems of a fixed seed, and what the family promises about them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.families import linear
from tests.fuzz.families.linear_draw import draw_problem, draw_variant
from tests.fuzz.problem import DTYPES

SEED = 20261122
CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drawn_problems_agree_with_the_oracle(backend: str) -> None:
    for number in range(30):
        problem = linear.draw(Draw(SEED, "linear", number), None, backend)
        outcome = check("linear", problem, backend, CPU)
        assert not outcome.failed, f"Draw({SEED}, 'linear', {number}): {outcome.words}\n{problem}"


def test_the_model_is_near_the_oracle() -> None:
    """A result is judged by the model's distance: a model that is wrong would grant all errors."""
    compared = set()
    for number in range(120):
        problem = linear.draw(Draw(SEED, "model", number), None, "cpu")
        if problem.dtype != "float32" or problem.visible_nan or problem.seqlen_q * problem.seqlen_k > 10**4:
            continue
        for name, want in linear.expect(problem, linear.inputs(problem, CPU), linear.oracle()).items():
            assert want.lows
            if want.ref.numel():
                largest = max(1.0, float(want.ref.abs().max()))
                for low in want.lows:
                    assert ((low.double() - want.ref).abs() <= 1e-3 * largest).all(), (name, problem)
                compared.add(name)
    assert compared == {"out", "s", "z", "dq", "dk", "dv", "ds", "dz", "ddecay"}


def test_a_variant_keeps_what_a_compiled_kernel_depends_on() -> None:
    for number in range(300):
        d = Draw(SEED, "variant", number)
        w = draw_variant(d, "triton")
        for _ in range(2):
            p = draw_problem(d, w, "triton")
            assert (p.dtype, p.e, p.m, p.group, p.map_q, p.map_k) == (w.dtype, w.e, w.m, w.group, w.map_q, w.map_k)
            assert (p.causal, p.normalize, p.state, p.return_state) == (w.causal, w.normalize, w.state, w.return_state)
            assert p.decay == w.decay
            assert (p.lengths is not None, p.sequences is not None) == (w.place == "lengths", w.place == "packed")
            assert p.upstream == (w.upstream if not p.visible_nan else "") and p.steps == w.steps
            if w.long or p.batch * p.seqlen_q * p.seqlen_k > 10**5:
                continue
            given = linear.inputs(p, CPU)
            itemsize = DTYPES[p.dtype].itemsize
            for name, off in zip(("q", "k", "v", "dout"), w.off, strict=True):
                t = given[name]
                if t.numel() and w.layout != "odd" and getattr(p, f"{name}_view").kind != "contiguous":
                    assert (t.storage_offset() * itemsize % 16 != 0) == off, (p, name)
                if t.numel() and w.layout == "unit" and t.stride(-1) == 1:
                    assert not any(s % 8 for s in t.stride()[:-1]), (p, name)


def test_walks_are_what_the_hopper_backend_takes() -> None:
    for number in range(200):
        p = linear.draw(Draw(SEED, "walks", number), None, "hopper")
        assert p.dtype == "bfloat16" and min(p.e, p.m) >= 64 and p.causal and not p.state
        assert max(p.e, p.m) >= (136 if p.normalize else 64 if p.decay else 72) and not (p.normalize and p.decay)
        assert p.seqlen_q == p.seqlen_k and p.group == 1 and p.lengths is None and p.sequences is None
        assert p.batch * p.heads_kv * (1 if max(p.e, p.m) <= 128 else -(-min(p.e, p.m) // 64)) >= 32
        assert linear.modules(p, "hopper") and not linear.modules(p, "triton")
