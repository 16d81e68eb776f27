"""Models with Gated DeltaNet layers by the switch, against the torch functions that transformers falls back to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from tests.integrations.tiny_models import close, close_gradients
from warploom.integrations.transformers import use_gated_delta_rule

TEXT: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "pad_token_id": 0, "eos_token_id": 96, "bos_token_id": 95, "num_hidden_layers": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
INDEXER: dict[str, Any] = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64, "indexer_compress_ratio": 4},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**TEXT, **EXPERTS}),
    "Qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", TEXT),
    "Qwen3.5 MoE": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**TEXT, **EXPERTS}),
    "Qwen4-Exp": ("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", {**TEXT, **EXPERTS, "hc_count": 2, "hc_lowrank": 4, **INDEXER}),
    "Olmo Hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**TEXT, "linear_num_key_heads": 4}),
}


def build(name: str) -> nn.Module:
    kind, config, options = MODELS[name]
    if not hasattr(t, kind):
        pytest.skip(f"the installed transformers has no {kind}")
    torch.manual_seed(0)
    model = getattr(t, kind)(getattr(t, config)(**options)).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.5)
            if "A_log" in each:
                # Of sums of strong decays transformers' own functions, which add them up in fp32, lose the digits.
                parameter.sub_(3.0)
    return model


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    found = build(request.param)
    yield found
    use_gated_delta_rule(found, False)


def batch(padding: int) -> tuple[Tensor, Tensor]:
    """More tokens than a chunk, the first of the second row padding."""
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 90, (2, 70)), torch.ones(2, 70, dtype=torch.long)
    mask[1, :padding] = 0
    return ids * mask, mask


def test_forward_gradients_and_generate(model: nn.Module) -> None:
    ids, mask = batch(9)
    weights = torch.randn(*ids.shape, 97)

    def run() -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        (logits * weights)[mask.bool()].sum().backward()
        with torch.no_grad():
            written = model.generate(ids[:, :20], attention_mask=mask[:, :20], max_new_tokens=8, do_sample=False)
        return logits.detach(), {n: p.grad for n, p in model.named_parameters()}, written

    logits, gradients, written = run()
    assert use_gated_delta_rule(model) == 1
    before = _calls(model)
    found, own, same = run()
    assert _calls(model) == before  # the switch stays
    close(found[mask.bool()], logits[mask.bool()], "logits")
    close_gradients(own, gradients)
    assert torch.equal(same, written)


def _calls(model: nn.Module) -> list[Any]:
    """What the model's module looks up."""
    import sys

    home = vars(sys.modules[type(model).__module__])
    return [home[name] for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule") if name in home]


def test_what_runs_is_the_op(model: nn.Module) -> None:
    """And after switching back, is not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ids, _ = batch(0)
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def names() -> set[str]:
        seen.clear()
        with torch.no_grad(), Record():
            model.generate(ids[:, :5], max_new_tokens=3, do_sample=False)
        return {name for name in seen if name.startswith("warploom.gated_delta")}

    assert names() == set()
    use_gated_delta_rule(model)
    use_gated_delta_rule(model)
    assert names() == {"warploom.gated_delta_rule.default", "warploom.gated_delta_step.default"}
    use_gated_delta_rule(model, enabled=False)
    assert names() == set()


def test_a_layer_that_keeps_the_functions_itself() -> None:
    """As in older releases."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = _never

        def forward(self, q: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            rule = self.chunk_gated_delta_rule if state is None else self.recurrent_gated_delta_rule
            return rule(q, q, v, g=g, beta=-g, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def _never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    layer = Layer()
    assert use_gated_delta_rule(nn.Sequential(layer)) == 1
    q, v, g = torch.randn(2, 5, 2, 8).bfloat16(), torch.randn(2, 5, 4, 8).bfloat16(), -torch.rand(2, 5, 4)
    out, state = layer(q, v, g, None)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    row, _ = layer(q[:, :1], v[:, :1], g[:, :1], state.bfloat16())  # a cache of the model's dtype
    assert row.shape == (2, 1, 4, 8)
    use_gated_delta_rule(layer, False)
    assert layer.chunk_gated_delta_rule is _never


def test_packed_sequences_are_kept_apart() -> None:
    """Which transformers' own torch functions refuse."""
    from warploom.integrations.transformers.delta import chunk_gated_delta_rule

    q, v, beta = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 4, 8), torch.rand(1, 9, 4)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, last = chunk_gated_delta_rule(q, q, v, -beta, beta, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    alone, _ = chunk_gated_delta_rule(q[:, 4:], q[:, 4:], v[:, 4:], -beta[:, 4:], beta[:, 4:], use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out[:, 4:], alone)
    assert last is None


def test_packed_rows_of_a_model(model: nn.Module) -> None:
    """The convolution reads no other sequence either; a cache, which training may have, changes nothing."""
    ids, _ = batch(0)
    use_gated_delta_rule(model)
    ends, weights = [0, 2, 33, 70], torch.randn(1, 70, 97)
    starts = torch.tensor(ends, dtype=torch.int32)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    lengths = {"max_length_q": 37, "max_length_k": 37, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}

    def gradients(run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        logits = run()
        (logits * weights).sum().backward()
        return logits.detach(), {n: p.grad for n, p in model.named_parameters()}

    def alone() -> Tensor:
        return torch.cat([model(ids[:1, a:b], use_cache=False).logits for a, b in pairwise(ends)], 1)

    expected, own = gradients(alone)
    found, packed = gradients(lambda: model(ids[:1], position_ids=places, use_cache=False, **lengths).logits)
    close(found, expected, "logits")
    close_gradients(packed, own)


def test_packed_rows_of_a_convolution() -> None:
    """As a cache gives them to it: with zeros in front where there are few, with the last inputs where it has some."""
    from warploom.integrations.transformers.delta import _convolution

    def never(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    x, weight, bias = torch.randn(1, 6, 9), torch.randn(6, 4), torch.randn(6)

    def plain(t: Tensor) -> Tensor:
        return nn.functional.silu(nn.functional.conv1d(nn.functional.pad(t, (3, 0)), weight[:, None], bias, groups=6))

    run = _convolution(never)
    for starts, front in (([0, 4, 9], 0), ([0, 1, 1, 5], 4)):
        at = torch.tensor(starts, dtype=torch.int32)
        found = run(x, weight, bias=bias, activation="silu", cu_seq_lens_q=at, cu_seq_lens_k=at)
        bounds = [0, *(n + front for n in starts[1:])]
        torch.testing.assert_close(found, torch.cat([plain(x[..., a:b]) for a, b in pairwise(bounds) if a < b], 2))
    given: list[Any] = []
    assert _convolution(lambda *args, **kwargs: given.append((args, kwargs)) or x)(x, weight, None, activation="silu") is x
    assert given[0][1]["activation"] == "silu"


def test_models_without_such_layers_and_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="Linear has no layer that computes the gated delta rule"):
        use_gated_delta_rule(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        use_gated_delta_rule("Qwen/Qwen3-Next")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enabled must be"):
        use_gated_delta_rule(build("Qwen3-Next"), 1)  # type: ignore[arg-type]
