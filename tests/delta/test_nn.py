"""The module: Qwen3-Next's layer, whole passes, steps, packed and padded rows, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warploom.nn import GatedDeltaNet, GatedDeltaState


def layer(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    found = GatedDeltaNet(24, 2, **{"heads_v": 4, "head_dim": 8, "head_dim_v": 6, "dtype": torch.float64, **options})
    with torch.no_grad():
        found.norm.uniform_(0.5, 1.5)
    return found


def test_it_is_qwen3_next_s_layer() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
        num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6,
    )  # fmt: skip
    ours, theirs = layer(dtype=torch.float32), qwen.Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        # Of each key head: its query, its key, its two value heads, their gates; and their b and a.
        q, k = (p.weight.view(2, 8, 24) for p in (ours.query_projection, ours.key_projection))
        v, z = (p.weight.view(2, 12, 24) for p in (ours.value_projection, ours.gate_projection))
        b, a = (p.weight.view(2, 2, 24) for p in (ours.beta_projection, ours.decay_projection))
        theirs.in_proj_qkvz.weight.copy_(torch.cat([q, k, v, z], 1).flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(torch.cat([b, a], 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(ours.convolution.unsqueeze(1))
        theirs.A_log.copy_(ours.decay_rate)
        theirs.dt_bias.copy_(ours.decay_bias)
        theirs.norm.weight.copy_(ours.norm)
        theirs.out_proj.weight.copy_(ours.out_projection.weight)
    x = torch.randn(2, 70, 24)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"decay": False, "taps": 1}, {"beta_max": 2.0, "bias": True, "taps": 3}])
def test_steps_and_pieces_equal_one_pass(options: dict[str, Any]) -> None:
    module, x = layer(**options), torch.randn(2, 30, 24, dtype=torch.float64)
    want, last = module(x, return_state=True)
    state, rows = None, []
    for i in range(2):
        row, state = module.step(x[:, i], state)
        rows.append(row.unsqueeze(1))
    for start, stop in ((2, 3), (3, 5), (5, 29)):
        piece, state = module(x[:, start:stop], state=state, return_state=True)
        rows.append(piece)
    row, state = module.step(x[:, 29:], state)
    torch.testing.assert_close(torch.cat([*rows, row], 1), want)
    for a, b in zip(state, last, strict=True):
        torch.testing.assert_close(a, b)


def gradients(module: nn.Module, results: list[Tensor]) -> list[Tensor]:
    loss = sum(t.sin().sum() for t in results)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "state"])
def test_rows_of_their_own_length(packed: bool, given: bool) -> None:
    """Padded, or packed with an empty sequence and one shorter than the convolution, each equals a call of its own."""
    module, sizes = layer(), [7, 0, 2, 11]
    parts = [torch.randn(1, size, 24, dtype=torch.float64) for size in sizes]
    state = None
    if given:
        state = GatedDeltaState(torch.randn(4, 4, 8, 6).double(), torch.randn(4, 3, 56).double())
    wanted = [
        module(part, state=None if state is None else GatedDeltaState(*(t[n : n + 1] for t in state)), return_state=True)
        for n, part in enumerate(parts)
    ]
    nan = torch.full((1, 11, 24), float("nan"), dtype=torch.float64)
    if packed:
        x = torch.cat([*parts, nan[:, :3]], 1)[0]
        starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        out, last = module(x, cu_seqlens=starts, state=state, return_state=True)
        assert not out[20:].any()
        outs = out[:20].split(sizes)
    else:
        x = torch.cat([torch.cat([part, nan[:, : 11 - part.shape[1]]], 1) for part in parts])
        out, last = module(x, lengths=torch.tensor(sizes), state=state, return_state=True)
        outs = [row[:size] for row, size in zip(out, sizes, strict=True)]
    for got, (want, _) in zip(outs, wanted, strict=True):
        torch.testing.assert_close(got, want[0])
    for a, *others in zip(last, *(state for _, state in wanted), strict=True):
        torch.testing.assert_close(a, torch.cat(others))
    alone = gradients(module, [t for want, state in wanted for t in (want, *state)])
    for a, b in zip(gradients(module, [*outs, *last]), alone, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_every_parameter_are_what_outputs_change_by() -> None:
    module, x = layer(beta_max=2.0), torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    parameters = dict(module.named_parameters())

    def call(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, tuple(parameters.values()), fast_mode=True)


def test_autocast_bfloat16_and_compile() -> None:
    module, x = layer(dtype=torch.float32), torch.randn(2, 20, 24)
    want = module(x)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), want)
    with torch.autocast("cpu", torch.bfloat16):
        cast, state = module(x, return_state=True)
    assert cast.dtype == torch.bfloat16 and state.s.dtype == torch.float32
    lower = module.bfloat16()(x.bfloat16())
    for found in (cast, lower):
        assert (found - want).norm() < 0.03 * want.norm()


def test_the_convolution_is_torch_s() -> None:
    from warploom.delta.convolution import convolve

    x, weight = torch.randn(2, 9, 5), torch.randn(5, 4)
    want = F.conv1d(x.mT, weight[:, None], groups=5, padding=3)[..., :9].mT
    out, last = convolve(x, weight, None, None, None)
    torch.testing.assert_close(out, want)
    assert torch.equal(last, x[:, 6:])


@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"dim": 0}, ValueError, "dim must be at least 1"),
        ({"heads": 5, "head_dim": None}, ValueError, "heads_v must be a multiple of heads, got 4 and 5"),
        ({"heads": 5, "heads_v": 5, "head_dim": None}, ValueError, "dim must be a multiple of heads where head_dim"),
        ({"beta_max": 3.0}, ValueError, "beta_max must be above 0 and at most 2, .* got 3.0"),
        ({"taps": 0}, ValueError, "taps must be at least 1"),
        ({"decay": 1}, TypeError, "decay must be"),
        ({"eps": 0.0}, ValueError, "eps must be a positive finite number"),
        ({"backend": "fast"}, ValueError, "backend must be one of 'cpu', 'hopper', 'triton', 'reference', got 'fast'"),
        ({"dtype": torch.int32}, TypeError, "dtype must be torch.float16"),
    ],
)
def test_wrong_modules(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GatedDeltaNet(**{"dim": 24, "heads": 2, "heads_v": 4, "head_dim": 8, **options})


@pytest.mark.parametrize(
    "given,error,words",
    [
        ({"x": torch.zeros(9, 24)}, ValueError, r"x must have shape \(batch, seqlen, dim\) with dim 24, got \(9, 24\)"),
        (
            {"x": torch.zeros(9, 23), "cu_seqlens": torch.tensor([0, 9])},
            ValueError,
            r"x must have shape \(total_tokens, dim\) with dim 24, got \(9, 23\)",
        ),
        ({"x": torch.zeros(2, 9, 24).half()}, TypeError, "x has dtype torch.float16 but the module's parameters have"),
        ({"lengths": torch.tensor([9])}, ValueError, "lengths has 1 entries but x has batch 2"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, r"with cu_seqlens x is \(total_tokens, …\) or has batch 1"),
        ({"state": 5}, TypeError, "state must be a GatedDeltaState or a pair of tensors, got int"),
        ({"state": (torch.zeros(2, 4, 8, 6), torch.zeros(2, 2, 56))}, ValueError, r"state.inputs must .* \(2, 3, 56\)"),
        ({"state": (torch.zeros(2, 4, 6, 8), torch.zeros(2, 3, 56))}, ValueError, r"state.s must have shape .* \(2, 4, 8, 6\)"),
    ],
)
def test_wrong_calls(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        layer(dtype=torch.float32)(**{"x": torch.zeros(2, 9, 24), **given})
