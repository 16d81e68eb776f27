"""The FP8 forward without a GPU: its order of keys, what it is compiled into, and what the host hands over."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.hopper.test_plan import OVERHEAD, SHARED, problem
from tests.compiled import Built, machine_code
from tests.plain import parameters
from tests.sources import imported
from warploom import attention, attention_varlen, explain
from warploom.attention import fp8, hopper
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.features import Features
from warploom.attention.fp8 import checked
from warploom.attention.hopper import fp8_run
from warploom.attention.hopper.fp8_config import FP8_SOURCES, Fp8ForwardConfig
from warploom.attention.hopper.fp8_plan import fp8_config, fp8_set, problem_refusal
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.bias import ALiBi
from warploom.fp8 import Fp8Tensor, quantize
from warploom.masks import ColumnMask
from warploom.runtime import module_spec, modules, traced

needs_dsl = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Inputs = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Variants


def test_sources_are_what_the_kernel_imports() -> None:
    here = "attention/hopper"
    built = f"{here}/fp8_build.py", "kernels/cute/arguments.py", "runtime/compile.py"
    assert {*built, *imported(f"{here}/fp8_forward.py")} == set(FP8_SOURCES) == imported(f"{here}/fp8_build.py")


def test_variants_have_names_and_fit() -> None:
    found = fp8_set()
    assert len({c.name for c in found}) == len(found) and all(c.name.isidentifier() and "fp8" in c.name for c in found)
    for variant in found:
        assert variant.shared_bytes + OVERHEAD <= SHARED and 128 % variant.tile_n == 0
        told = module_spec.from_json(module_spec.to_json(variant.spec))
        assert Fp8ForwardConfig(**dict(told.config)) == variant and told == variant.spec


def test_what_the_kernel_refuses() -> None:
    def refused(**changes: object) -> str | None:
        return problem_refusal(problem(dtype=E4M3, **changes))

    assert refused() is None and refused(left=5, right=0, sink=True, softcap=True, layout="varlen") is None
    assert refused(head_dim=72) == "takes FP8 with head_dim from 16 to 256 in steps of 16, not 72"
    assert refused(head_dim_v=272) == "takes FP8 with head_dim_v from 16 to 256 in steps of 16, not 272"
    assert refused(columns=("lts",)) is None
    assert refused(columns=("lts",), layout="varlen") == "has no FP8 kernel with a packed column mask"
    assert refused(dropout=True) == "has no FP8 kernel with dropout" and refused(bias="alibi") is not None
    assert refused(layout="paged") == "takes no FP8 in pages, or with query offsets"


@needs_dsl
@pytest.mark.parametrize("tile_n", [64, 128])
def test_threads_have_the_keys_that_their_operand_wants(tile_n: int) -> None:
    """From accumulator to key by the order in which K is loaded, to where an 8-bit left operand has that key."""
    from warploom.attention.hopper.fp8_consumers import Fp8Consumers

    consumers = Fp8Consumers(Fp8ForwardConfig("bfloat16", 128, 128, tile_n))
    for thread in range(4):
        for c in range(tile_n // 4):
            at = consumers.element(c)
            column = 8 * (at // 2) + 2 * thread + at % 2
            half, row = divmod(column, tile_n // 2)
            key = 4 * (row // 2) + 2 * half + row % 2
            # Four bytes of a word are keys 4t on, and words follow each other by sixteen keys.
            assert key == 16 * (c // 4) + consumers.first_column(thread) + c % 4
            pair, byte = divmod(c, 4)
            assert at == (2 * pair, 2 * pair + 1, 2 * (tile_n // 16 + pair), 2 * (tile_n // 16 + pair) + 1)[byte]


CORE = {
    "head_dim 64": fp8_config(Features(E4M3, 64, 64, right=True), BF16),
    "head_dim 128, masked": fp8_config(Features(E4M3, 128, 128, right=True, columns=True), BF16),
    "head_dim 256": fp8_config(Features(E4M3, 256, 256, right=True, varlen=True), BF16),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@needs_dsl
@pytest.mark.parametrize("name", CORE)
def test_machine_code(name: str, built: Built) -> None:
    """No spills; K by TMA of five dimensions, V and Q of four or fewer; both products of e4m3, none serialised."""
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    listing = machine_code(cubin)
    assert "UTMALDG.5D" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    products = len(re.findall(r"QGMMA\S*E4M3\.E4M3", listing))
    pieces = variant.head_dim_v // (variant.pv_columns or variant.head_dim_v)
    loops, scores, values = 2, variant.head_dim // 32, pieces * variant.tile_n // 32
    assert products == (loops + 1) * (scores + values)
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", listing))
    assert waits == (loops + 1) * (1 + pieces)


# What the host hands over


def test_keys_are_put_together() -> None:
    v = drawn(1, 2, 37, 3, 32).to(E4M3)
    found = fp8_run.keys_together(v)
    assert torch.equal(found, v.view(torch.uint8)) and found.stride() == (3 * 32 * 48, 1, 32 * 48, 48)
    assert fp8_run.keys_together(found.view(E4M3)).data_ptr() == found.data_ptr()


def test_the_last_quad_of_keys_is_readable() -> None:
    packed = torch.arange(8 * 3 * 16).to(torch.uint8).view(8, 3, 16)
    found = fp8_run.quads_readable(packed)
    assert torch.equal(found, packed) and found.untyped_storage().nbytes() >= 11 * 3 * 16
    for seqlen in (8, 9, 11):
        k = torch.arange(2 * seqlen * 3 * 16).to(torch.uint8).view(2, seqlen, 3, 16)
        for batch in (slice(0, 1), slice(1, 2)):
            found = fp8_run.quads_readable(k[batch])
            end = found.storage_offset() + -(-seqlen // 4) * 4 * found.stride(1)
            assert torch.equal(found, k[batch]) and end <= found.untyped_storage().nbytes()
            assert (found.data_ptr() == k[batch].data_ptr()) == (seqlen % 4 == 0 or batch.start == 0)


def test_rows_that_tma_cannot_read_are_copied() -> None:
    t = drawn(2, 2, 5, 3, 32).to(E4M3)
    assert fp8_run.read_by_tma(t).data_ptr() == t.data_ptr()
    for strided in (drawn(2, 2, 5, 3, 40).to(E4M3)[..., :32], drawn(2, 2, 5, 3, 64).to(E4M3)[..., ::2]):
        assert torch.equal(fp8_run.read_by_tma(strided), strided.view(torch.uint8))
        assert fp8_run.read_by_tma(strided).is_contiguous()


def shown(mask: Any, seqlen_k: int) -> ColumnMask:
    """The mask that a module is handed."""
    *vectors, bounds, present = mask
    assert bounds.shape == (1, 1, -(-seqlen_k // 64) + -(-seqlen_k // 2048), 8)
    return ColumnMask(
        **{n: t for i, (n, t) in enumerate(zip(("lts", "lte", "uts", "ute"), vectors, strict=True)) if present >> i & 1}
    )


def stand_in(seen: list[Fp8ForwardConfig]) -> Callable[[Any], Callable[..., None]]:
    """In the place of compiled modules: the specification over what they are handed."""

    def load(spec: Any) -> Callable[..., None]:
        config = Fp8ForwardConfig(**dict(spec.config))

        def call(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor,
            sink: Any, cu_q: Any, cu_k: Any, used_k: Any, counter: Any, parts: Any, mask: Any, scale: float,
            softcap: float, left: int, right: int, pair_heads: int, split: int, blocks: int,
        ) -> None:  # fmt: skip
            seen.append(config)
            scales = (scale_q, scale_k, scale_v)
            window = (left if config.left else None, right if config.right else None)
            options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink, "return_lse": True}
            options |= {"window": window, "backend": "reference"}
            if config.varlen:
                values = torch.zeros(k.shape[0], *v.shape[1:], dtype=torch.uint8)
                for n in range(len(cu_k) - 1):
                    begin, end = int(cu_k[n]), int(cu_k[n + 1])
                    at = (begin // 128 + n) * 128
                    values[begin:end] = v[at : at + end - begin]
                given = zip((q, k, values), scales, (cu_q, cu_k, cu_k), strict=True)
                x = [Fp8Tensor(t.view(E4M3), s, cu).dequantize() for t, s, cu in given]
                found = attention_varlen(*x, cu_q, cu_k, seqused_k=used_k, **options)
            else:
                # Keys that no query sees are gone, and their scales are not read; the band counts from the last that is left.
                scales = (scale_q, *(s[:, : -(-k.shape[1] // 128)] for s in scales[1:]))
                x = [Fp8Tensor(t.view(E4M3), s).dequantize() for t, s in zip((q, k, v), scales, strict=True)]
                found = attention(*x, mask=None if mask is None else shown(mask, k.shape[1]), **options)
            out.copy_(found[0])
            lse.copy_(found[1])

        call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
        return call

    return load


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Fp8ForwardConfig]:
    seen: list[Fp8ForwardConfig] = []
    monkeypatch.setattr(fp8_run.modules, "fetch", stand_in(seen))
    monkeypatch.setattr(fp8_run, "_ready", {})
    monkeypatch.setattr(fp8_run, "_first_launch", lambda *_: None)
    monkeypatch.setattr(fp8_run, "launch_on", lambda index, function, given: function(*given))
    monkeypatch.setattr(fp8_run, "processors", lambda index: 132)
    monkeypatch.setattr(fp8_run, "counter_on", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(fp8_run, "with_bounds", lambda args: args._replace(bounds=torch.zeros(1, 1, 4, 8)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def handed(x: Inputs, make: Callable[..., AttentionArgs], *starts: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What the host makes of a call that no kernel may be asked for here."""
    packed = (starts[0], starts[-1]) if starts else None
    call = checked(*x, None, None, None, {"sink": options.get("sink"), "bias": None}, packed)
    args = call.as_e4m3(make(*call.stand_ins(), *starts, **options))
    assert problem_refusal(AttentionProblem.from_args(args, False)) is None
    return fp8_run.forward(args, call.scales, torch.bfloat16, call.fast)


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (150, -20)}, {"softcap": 3.0, "sink": drawn(1, 4), "scale": 0.3}], ids=str
)
def test_a_dense_call(played: list[Fp8ForwardConfig], granularity: Any, options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    x = quantize(
        drawn(drawing, 2, 150, 4, 16), drawn(drawing + 1, 2, 139, 2, 16), drawn(drawing + 2, 2, 139, 2, 32),
        granularity=granularity,
    )  # fmt: skip
    out, lse = handed(x, dense_args, **options)
    want = attention(*x, return_lse=True, out_dtype=torch.bfloat16, backend="reference", **options)
    assert len(played) == 1
    torch.testing.assert_close(out, want[0], atol=1e-4, rtol=2.0**-7, msg=str(drawing))
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5, msg=str(drawing))


@pytest.mark.parametrize("granularity", ["block", "head"])
@pytest.mark.parametrize("band", [{"causal": True}, {"window": (20, 5)}], ids=str)
def test_a_packed_call(played: list[Fp8ForwardConfig], granularity: Any, band: dict[str, Any]) -> None:
    """NaN among values that no query sees stays where it is."""
    drawing = random.randrange(2**31)
    starts_q, starts_k = torch.tensor([0, 40, 40, 200]).int(), torch.tensor([0, 150, 300, 511]).int()
    used = torch.tensor([149, 3, 211]).int()
    q, k, v = drawn(drawing, 200, 6, 32), drawn(drawing + 1, 520, 2, 32), drawn(drawing + 2, 520, 2, 48)
    v[149], v[515] = float("nan"), float("nan")
    x = quantize(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, granularity=granularity)
    options: dict[str, Any] = {"seqused_k": used, **band}
    out, lse = handed(x, varlen_args, starts_q, starts_k, **options)
    want = attention_varlen(*x, starts_q, starts_k, return_lse=True, out_dtype=BF16, backend="reference", **options)
    assert played[0].varlen and played[0].used and played[0].right and not want[0].isnan().any()
    torch.testing.assert_close(out, want[0], atol=1e-4, rtol=2.0**-7, msg=str(drawing))
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5, msg=str(drawing))


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_under_a_column_mask(played: list[Fp8ForwardConfig], causal: bool) -> None:
    drawing = random.randrange(2**31)
    x = quantize(drawn(drawing, 2, 150, 4, 16), drawn(drawing + 1, 2, 139, 2, 16), drawn(drawing + 2, 2, 139, 2, 32))
    lts = torch.randint(0, 150, (2, 2, 139), generator=torch.Generator().manual_seed(drawing), dtype=torch.int32)
    mask = ColumnMask(lts, lts + 40, causal=causal)
    out, lse = handed(x, dense_args, mask=mask)
    want = attention(*x, mask=mask, return_lse=True, out_dtype=BF16, backend="reference")
    assert played[0].columns and played[0].right == causal
    torch.testing.assert_close(out, want[0], atol=1e-4, rtol=2.0**-7, msg=str(drawing))
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5, msg=str(drawing))


def test_who_asks_for_fast_sums_gets_them(multiplied: list[Fp8ForwardConfig]) -> None:
    x = quantize(*three(1), accumulate="fast")
    attention(*x, out_dtype=BF16)
    assert [config.fast for config in multiplied] == [True] and "fast" in multiplied[0].name
    told = explain(*x, out_dtype=BF16).reason
    assert "summed by tensor cores (fast)" in told and multiplied[0].name in told
    with pytest.raises(ValueError, match="accumulate must be one of 'fp32', 'fast', got 'slow'"):
        quantize(*three(1), accumulate="slow")  # type: ignore[arg-type]


def test_the_stand_in_takes_what_the_kernel_takes() -> None:
    names = list(inspect.signature(stand_in([])(CORE["head_dim 64"].spec)).parameters)
    assert [*names, "stream"] == parameters("attention/hopper/fp8_forward.py", "Fp8Forward.__call__")


@pytest.mark.parametrize(
    "options,hides",
    [({"window": (300, 0)}, False), ({"window": (100, 0)}, True), ({"causal": True}, False), ({"scale": -1.0}, True)],
    ids=str,
)
def test_bands_that_hide_first_keys(options: dict[str, Any], hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_run.modules, "cannot_build", lambda: None)
    x = quantize(drawn(1, 1, 30, 2, 32), drawn(2, 1, 203, 2, 32), drawn(3, 1, 203, 2, 32))
    call = checked(*x, None, None, None, {})
    args = call.as_e4m3(dense_args(*call.stand_ins(), **options))
    assert (fp8_run.refusal(args, BF16, False) is not None) == hides
    assert fp8_run.refusal(args, torch.float32, False) is not None


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 0), "softcap": 8.0}], ids=str)
def test_the_module_looked_for_is_the_one_that_a_build_writes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of its file, in which False and 0 differ, though a config with one is equal to that with the other."""
    found: list[str] = []
    monkeypatch.setattr(modules, "cannot_build", lambda: "no compiler")
    monkeypatch.setattr(modules, "absence", lambda spec: found.append(spec.stem()))
    monkeypatch.setattr(fp8_run, "_found", traced.Found())
    x = quantize(drawn(1, 1, 203, 2, 128), drawn(2, 1, 203, 2, 128), drawn(3, 1, 203, 2, 128))
    call = checked(*x, None, None, None, {})
    args = call.as_e4m3(dense_args(*call.stand_ins(), **options))
    fp8_config.cache_clear()
    assert fp8_run.refusal(args, BF16, False) is None
    fp8_config.cache_clear()
    band = {"right": bool(options), "left": "window" in options}
    features = Features(torch.float8_e4m3fn, 128, 128, **band, softcap="softcap" in options)
    assert found == [fp8_config(features, BF16).spec.stem()]


# Under torch's machinery


@pytest.fixture
def multiplied(played: list[Fp8ForwardConfig], monkeypatch: pytest.MonkeyPatch) -> list[Fp8ForwardConfig]:
    """Calls of attention() go to the stand-in, as on a GPU they go to the kernel."""
    monkeypatch.setattr(fp8, "DEVICE", "cpu")
    monkeypatch.setattr(hopper.BACKEND, "available", lambda: None)
    monkeypatch.setattr(fp8_run.modules, "cannot_build", lambda: None)
    return played


def three(drawing: int, seqlen_k: int = 139) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(drawing, 2, 150, 4, 16), drawn(drawing + 1, 2, seqlen_k, 2, 16), drawn(drawing + 2, 2, seqlen_k, 2, 32)


def test_the_op_holds_its_contract(multiplied: list[Fp8ForwardConfig]) -> None:
    """But for its schema, which is checked by arithmetic that e4m3 has not."""
    call = checked(*quantize(*three(1)), None, None, None, {})
    options: dict[str, Any] = {"window": (150, -20), "softcap": 3.0, "sink": drawn(1, 4)}
    args = call.as_e4m3(dense_args(*call.stand_ins(), **options))._replace(backend="hopper")
    flat = (*args, *call.scales, torch.float16, False)
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.warploom.attention_fp8.default, flat, test_utils=utils)
    assert multiplied


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_run_the_kernel(multiplied: list[Fp8ForwardConfig], dynamic: bool) -> None:
    """They were dequantised, as no compiler saw what the kernel did."""

    def call(q: Fp8Tensor, k: Fp8Tensor, v: Fp8Tensor) -> tuple[Tensor, ...]:
        scales = (q.scale, k.scale, v.scale)
        given = attention(q.data, k.data, v.data, causal=True, descale=scales, out_dtype=torch.float16)
        return (*attention(q, k, v, causal=True, return_lse=True, out_dtype=torch.bfloat16), given)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_k in (139, 260):
        given = quantize(*three(random.randrange(2**31), seqlen_k))
        multiplied.clear()
        got = compiled(*given)
        assert len(multiplied) == 2
        for a, b in zip(got, call(*given), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_what_the_kernel_does_not_take_is_dequantised_under_a_compiler(multiplied: list[Fp8ForwardConfig]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*quantize(q, k, v), bias=ALiBi.standard(4))

    torch._dynamo.reset()
    given = three(random.randrange(2**31))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given)) and not multiplied


def test_a_call_is_counted(multiplied: list[Fp8ForwardConfig]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = quantize(*three(1))
    with FlopCounterMode(display=False) as counted:
        attention(*x, out_dtype=torch.bfloat16)
    assert counted.get_total_flops() == 2 * 2 * 4 * 150 * 139 * (16 + 32) and multiplied
