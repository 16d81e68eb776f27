"""Decode problems of a fixed seed, and what the family promises about them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.families import decode
from tests.fuzz.families.decode_draw import draw_problem, draw_variant
from tests.fuzz.oracle.decode import Bias, Decode
from tests.fuzz.problem import DTYPES

SEED = 20261122
CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drawn_problems_agree_with_the_oracle(backend: str) -> None:
    for number in range(45):
        problem = decode.draw(Draw(SEED, "decode", number), None, backend)
        outcome = check("decode", problem, backend, CPU)
        assert not outcome.failed, f"Draw({SEED}, 'decode', {number}): {outcome.words}\n{problem}"


def test_the_model_is_near_the_oracle() -> None:
    """A result is judged by the model's distance: a model that is wrong would grant all errors."""
    compared = set()
    for number in range(150):
        problem = decode.draw(Draw(SEED, "model", number), None, "cpu")
        if problem.dtype != "float32" or problem.visible_nan:
            continue
        for name, want in decode.expect(problem, decode.inputs(problem, CPU), decode.oracle()).items():
            for low in want.lows if want.ref.numel() else ():
                finite = want.ref.isfinite()
                error = (low.double() - want.ref)[finite].abs()
                largest = want.ref[finite].abs().max() if finite.any() else 0.0
                assert torch.equal(finite, low.isfinite()), (name, problem)
                assert (error <= 1e-4 * max(1.0, float(largest))).all(), (name, problem)
                compared.add(name)
    assert compared == {"out", "lse", "switched", "switched_lse"}


def test_hidden_memory_is_hostile_and_what_queries_see_is_not() -> None:
    hostile = 0
    for number in range(100):
        problem = decode.draw(Draw(SEED, "hostile", number), None, "cpu")
        if problem.visible_nan or problem.appended is not None:
            continue
        given = decode.inputs(problem, CPU)
        k, v = given["k"], given["v"]
        if problem.fp8:
            k, v = (Decode().widened(t, scale) for t, scale in zip((k, v), given["scales"], strict=True))
        found = Decode().attend(
            given["q"].double(), k, v, given["lengths"], given["table"],
            window=(problem.left, problem.right) if problem.windowed else None, tree=given["tree"],
            bias=None if given["bias"] is None else Bias(problem.bias, given["bias"]),
        )  # fmt: skip
        assert found.out.isfinite().all(), problem
        hostile += not k.isfinite().all()
    assert hostile > 20


def test_a_tree_shows_a_token_its_path() -> None:
    """Five keys, the last three of a root and two guesses after it."""
    oracle, lengths = Decode(), torch.tensor([5])
    kin = oracle.kin(torch.tensor([[-1, 0, 0]]))
    assert oracle.visible(lengths, 3, 5, None, kin)[0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    # A guess sits right behind the root, whatever its number.
    found = oracle.visible(lengths, 3, 5, (1, None), kin)[0].int().tolist()
    assert found == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]


@pytest.mark.parametrize("dim", [16, 24, 40, 9])
def test_the_format_of_fp8(dim: int) -> None:
    """A rotation is orthogonal, rounding is that of torch's type, and SplitMix64 gives the published words for 1234567."""
    oracle, x = Decode(), torch.randn(50, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    turned = oracle.rotated(x, 7)
    torch.testing.assert_close(turned @ turned.mT, x @ x.mT)
    assert not torch.equal(turned, oracle.rotated(x, 8))
    numbers, scale = oracle.quantized(x, None)
    assert torch.equal(numbers, (x.float() / scale[:, None]).to(torch.float8_e4m3fn).float()) and numbers.abs().amax() == 448
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert oracle.signs(5, 1234567).tolist() == [-1.0 if word >> 63 else 1.0 for word in words]


def test_a_variant_keeps_what_a_compiled_kernel_depends_on() -> None:
    for number in range(300):
        d = Draw(SEED, "variant", number)
        variant = draw_variant(d, "triton")
        for _ in range(2):
            p = draw_problem(d, variant)
            assert (p.dtype, p.queries, p.heads_kv, p.group) == (
                variant.dtype, variant.queries, variant.heads_kv, variant.group
            )  # fmt: skip
            assert (p.dim, p.dim_v, p.sink, p.softcap != 0) == (variant.dim, variant.dim_v, variant.sink, variant.softcap)
            assert (p.tree, p.fp8, p.bias_dtype) == (variant.tree, variant.fp8, variant.bias_dtype)
            assert (p.left is not None) == variant.left and (p.appended is not None) == variant.append
            assert (p.page_size > 0, p.width == 1) == (variant.paging != "none", variant.paging == "one")
            capacity = p.capacity or p.page_size * p.width
            given = decode.inputs(p, CPU) if capacity < 2000 and p.lengths and len(p.lengths) < 9 else None
            if given is None or given["q"].numel() == 0:
                continue
            itemsize = DTYPES[p.dtype].itemsize
            for name, off in zip(("q", "k", "v"), variant.off, strict=True):
                t = given[name]
                assert (t.storage_offset() * itemsize % 16 != 0) == off or variant.layout == "odd", (p, name)
                assert variant.layout != "unit" or not any(s % 8 for s in t.stride()[:3]), (p, name)
