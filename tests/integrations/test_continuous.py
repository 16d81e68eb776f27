"""transformers' continuous batching under our name: what plain generate() of an eager model gives, or words."""

from __future__ import annotations

import copy
import logging
import random
import types

import pytest
import torch

import warploom
from tests.integrations.tiny_models import DECODER, build, close
from warploom.integrations.transformers import continuous

pytest.importorskip("transformers.generation.continuous_batching")
pytestmark = [
    pytest.mark.skipif(not continuous.understood(), reason="this transformers hands over another paged cache"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NEW = 7


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def served(model, prompts, **options):
    """Tokens and their log-probabilities of each request; of 16 tokens a batch, so that long prompts come in chunks."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "return_logprobs": True}
    how = ContinuousBatchingConfig(**(sizes | options))
    found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=how, warmup=False)
    assert [result.error for result in found.values()] == [None] * len(prompts)
    return [(result.generated_tokens, result.logprobs) for result in found.values()]


def generated(model, prompt):
    """The same of plain generate()."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options)
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, [logits[0].log_softmax(-1)[t].item() for logits, t in zip(out.logits, tokens, strict=True)]


def drawn_prompts(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (23, 3, 1, 12)
    return [torch.randint(1, 90, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def calls(monkeypatch):
    """Counts layers that ran over a paged cache."""
    seen, original = [], continuous.attend

    def attend(*args):
        seen.append(args[0].layer_idx)
        return original(*args)

    monkeypatch.setattr(continuous, "attend", attend)
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_equal_to_generate(name, calls):
    seed = random.randrange(2**31)
    eager, ours = build(name, seed)
    prompts = drawn_prompts(seed)
    for prompt, (tokens, logprobs) in zip(prompts, served(ours, prompts), strict=True):
        want, want_logprobs = generated(eager, prompt)
        assert tokens == want, (seed, prompt)
        assert torch.allclose(torch.tensor(logprobs), torch.tensor(want_logprobs), rtol=1e-4, atol=1e-4), (seed, prompt)
    assert set(calls) == {0, 1} and ours.config._attn_implementation == "warploom"


def test_under_the_name_with_paged_before_it(calls):
    seed = random.randrange(2**31)
    eager, ours = build("llama", seed)
    ours.set_attn_implementation("eager")
    ours.set_attn_implementation("paged|warploom")
    made = type(ours)._from_config(copy.deepcopy(ours.config), attn_implementation="paged|warploom")
    assert made.config._attn_implementation == ours.config._attn_implementation == "warploom"
    prompts = drawn_prompts(seed)[1:3]
    assert [tokens for tokens, _ in served(ours, prompts)] == [generated(eager, prompt)[0] for prompt in prompts], seed
    assert calls


def test_requests_share_the_blocks_of_a_common_beginning(calls):
    seed = random.randrange(2**31)
    eager, ours = build("llama", seed)
    first, second = drawn_prompts(seed)[:2]
    prompts = [first, first + second, first]
    results = served(ours, prompts, max_requests_per_batch=1)
    assert [tokens for tokens, _ in results] == [generated(eager, prompt)[0] for prompt in prompts], seed


def test_batch_invariant_attention_is_served_too(calls):
    seed = random.randrange(2**31)
    eager, ours = build("gpt_oss", seed)
    prompts = drawn_prompts(seed)[1:3]
    with warploom.batch_invariant():
        assert [tokens for tokens, _ in served(ours, prompts)] == [generated(eager, prompt)[0] for prompt in prompts], seed
    assert calls


def test_other_implementations_go_their_own_way(calls):
    seed = random.randrange(2**31)
    eager, _ = build("llama", seed)
    prompts = drawn_prompts(seed)[1:3]
    want = [generated(eager, prompt)[0] for prompt in prompts]
    assert [tokens for tokens, _ in served(eager, prompts)] == want and not calls, seed


def test_chunked_layers_are_refused_before_any_request():
    _, ours = build("llama4")
    words = "continuous batching of llama4_text .* is not supported: it has layers of chunked_attention"
    with pytest.raises(ValueError, match=words):
        served(ours, [[1, 2, 3]])


def test_models_that_are_not_causal_decoders_are_refused():
    from transformers import Gemma3TextConfig, T5Config

    both_ways = Gemma3TextConfig(**DECODER, num_hidden_layers=1, use_bidirectional_attention=True)
    for config, words in ((T5Config(), "it has an encoder"), (both_ways, "it is not causal")):
        with pytest.raises(ValueError, match=f"continuous batching of .* is not supported: {words}.*use generate"):
            continuous.refuse(types.SimpleNamespace(config=config))


def test_a_paged_cache_of_another_kind_is_refused():
    from warploom.integrations.transformers.attention import attention_forward

    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"cache: object \(continuous batching.*not supported in this call.*use generate"):
        attention_forward(torch.nn.Module(), q, q, q, None, cache=object())


def test_positions_of_int32_make_the_same_mask():
    """Continuous batching counts positions in 32 bits, and the number that stands for infinity has more."""
    eager, ours = build("llama")
    ids, positions = torch.arange(1, 10)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        results = [m(ids, position_ids=p, use_cache=False).logits for m, p in ((ours, positions.int()), (eager, positions))]
    close(*results)
