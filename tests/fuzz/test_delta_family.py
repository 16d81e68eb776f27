"""The gated delta rule's problems of a fixed seed, and what the family promises about them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.families import delta
from tests.fuzz.families.delta_draw import draw_problem, draw_variant
from tests.fuzz.oracle.delta import CHUNK, Delta, Given, Options
from tests.fuzz.problem import DTYPES

SEED = 20261123
CPU = torch.device("cpu")


@pytest.mark.parametrize(("backend", "count"), [("cpu", 24), ("reference", 12)])
def test_drawn_problems_agree_with_the_oracle(backend: str, count: int) -> None:
    for number in range(count):
        problem = delta.draw(Draw(SEED, "delta", number), None, backend)
        outcome = check("delta", problem, backend, CPU)
        assert not outcome.failed, f"Draw({SEED}, 'delta', {number}): {outcome.words}\n{problem}"


def test_the_model_is_near_the_oracle() -> None:
    """A result is judged by the model's distance: a model that is wrong would grant all errors."""
    compared = set()
    for number in range(60):
        problem = delta.draw(Draw(SEED, "model", number), None, "cpu")
        if problem.dtype != "float32" or problem.visible_nan or problem.seqlen > 150:
            continue
        for name, want in delta.expect(problem, delta.inputs(problem, CPU), delta.oracle()).items():
            if want.ref.numel() and name != "around":
                largest = max(1.0, float(want.ref.abs().max()))
                assert want.lows
                for low in want.lows:
                    assert ((low.double() - want.ref).abs() <= 2e-5 * largest).all(), (name, problem)
                compared.add(name)
    assert compared == {"out", "state", "dq", "dk", "dv", "dbeta", "ddecay", "dstate"}


def test_a_token_by_hand() -> None:
    """One of two numbers, in dyadic fractions: S = [[1, 2], [3, 4]] halves, and the key (1, 1) reads (2, 3) of it."""
    given = Given(
        q=torch.tensor([1.0, 0.0]).view(1, 1, 1, 2),
        k=torch.tensor([1.0, 1.0]).view(1, 1, 1, 2),
        v=torch.tensor([4.0, 1.0]).view(1, 1, 1, 2),
        beta=torch.full((1, 1, 1), 0.5),
        decay=torch.full((1, 1, 1), 0.5, dtype=torch.float64).log(),
        state=torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2),
    )
    for found in (Delta().exact(given, Options(scale=2.0), False), Delta().model(given, Options(scale=2.0), False, 0, CHUNK)):
        torch.testing.assert_close(found["state"].double().view(2, 2), torch.tensor([[1.5, 0.0], [2.5, 1.0]]).double())
        torch.testing.assert_close(found["out"].double().view(2), torch.tensor([3.0, 0.0]).double())


def test_a_variant_keeps_what_a_compiled_kernel_depends_on() -> None:
    for number in range(200):
        d = Draw(SEED, "variant", number)
        w = draw_variant(d, "triton")
        for _ in range(2):
            p = draw_problem(d, w, "triton")
            assert (p.dtype, p.beta_dtype, p.e, p.m, p.group, p.decay) == (w.dtype, w.beta_dtype, w.e, w.m, w.group, w.decay)
            assert (p.normalize, p.state, p.return_state, p.inplace) == (w.normalize, w.state, w.return_state, w.inplace)
            assert (p.lengths is not None, p.sequences is not None) == (w.place == "lengths", w.place == "packed")
            assert p.upstream == (w.upstream if not p.visible_nan else "") and p.steps == w.steps
            if p.batch * p.seqlen * p.heads * w.group * (p.e + p.m) > 10**5:
                continue
            given = delta.inputs(p, CPU)
            itemsize = DTYPES[p.dtype].itemsize
            for name, off in zip(("q", "k", "v", "dout"), w.off, strict=True):
                t = given[name]
                if t.numel() and w.layout != "odd" and getattr(p, f"{name}_view").kind != "contiguous":
                    assert (t.storage_offset() * itemsize % 16 != 0) == off, (p, name)
                if t.numel() and w.layout == "unit" and t.stride(-1) == 1:
                    assert not any(s % 8 for s in t.stride()[:-1]), (p, name)


@pytest.mark.parametrize("count", [1, 2, 6, 12])
def test_hopper_has_variants_that_it_takes(count: int) -> None:
    drawn = delta.variants(Draw(SEED, "variants"), "hopper", count)
    taken = [v for v in drawn if v.dtype == "bfloat16" and v.e % 8 == v.m % 8 == 0 and v.e <= 128 and not v.steps]
    assert len(drawn) == count and 6 * len(taken) >= 5 * count


def test_the_hopper_kernels_mostly_get_what_they_take() -> None:
    taken = 0
    for number in range(200):
        p = delta.draw(Draw(SEED, "hopper", number), None, "hopper")
        given = {"q": torch.empty(0, device="meta")}
        if delta.refusal(p, given, "hopper") is None:
            taken += 1
            assert delta.modules(p, "hopper") and not delta.modules(p, "triton")
    assert taken > 120
