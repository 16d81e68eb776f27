"""Models that Warploom cannot run say so in words: what used to be silently wrong, a KeyError, or torch's own message."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.integrations.sweep.compare import construct
from tests.integrations.sweep.tiny import tiny_config
from tests.integrations.test_models import inputs
from tests.integrations.tiny_models import build, close
from warploom.integrations.transformers import models
from warploom.integrations.transformers.guard import Bounds, guard, plain
from warploom.integrations.transformers.masks import mask_bounds
from warploom.masks import ColumnMask


def tiny(name: str, implementation: str = "warploom") -> nn.Module:
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return construct(model_class, tiny_config(model_class.config_class), implementation).eval()


def words(length: int) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) + 20


def padded(length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -1] = 0
    return mask


# --- bounds as scores -----------------------------------------------------------------------------------------------

OWN_SCORES = [
    ("MPNetModel", "mpnet"),
    ("XGLMModel", "xglm"),
    ("RemBertModel", "rembert"),
]


@pytest.mark.parametrize("length", [4, 7])  # at 4 tokens bounds have a dense mask's shape, and the result was silently wrong
@pytest.mark.parametrize(("name", "kind"), OWN_SCORES)
def test_bounds_are_not_added_to_a_models_own_scores(name, kind, length):
    with pytest.raises(ValueError, match=rf"{kind} \(\w+Config\).*use attn_implementation='eager'"):
        tiny(name)(words(length), attention_mask=padded(length))


class OwnScores(nn.Module):
    """A model from elsewhere: asks transformers for a mask, then adds it to scores of its own."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(128, config.hidden_size)

    def forward(self, ids):
        from transformers.masking_utils import create_causal_mask

        x = self.embed(ids)
        mask = create_causal_mask(self.config, inputs_embeds=x, attention_mask=None, past_key_values=None)
        return (x @ x.mT + mask[:, 0]).softmax(-1) @ x


@pytest.mark.parametrize("compiled", [False, True])
def test_an_unknown_model_with_scores_of_its_own_is_told_so(compiled):
    _, llama = build("llama")
    model = OwnScores(llama.config)
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match=r"llama \(LlamaConfig\).*use attn_implementation='eager'"):
        call(words(4))


@pytest.mark.parametrize("name", ["DogeForCausalLM", "DeepseekV32ForCausalLM", "T5Gemma2ForConditionalGeneration"])
def test_models_that_edit_their_masks_work_or_are_refused_in_words(name):
    ids = words(5)
    given = {"input_ids": ids, "decoder_input_ids": ids} if "ConditionalGeneration" in name else {"input_ids": ids}
    with pytest.raises(ValueError, match=r"works on its attention mask by itself.*use attn_implementation='eager'"):
        tiny(name)(**given)


# --- the guard ------------------------------------------------------------------------------------------------------


def guarded(length=6, batch=2) -> Bounds:
    _, llama = build("llama")
    padding = torch.ones(batch, length, dtype=torch.bool)
    padding[0, :2] = False
    return mask_bounds(batch, length, length, attention_mask=padding, config=llama.config)


READ_AS_DENSE = {
    "added to scores": lambda t: torch.randn(2, 4, 6, 4) + t,
    "added, mask first": lambda t: t + 1.0,
    "added in place": lambda t: torch.zeros(2, 1, 6, 4).add_(t),
    "baddbmm": lambda t: torch.baddbmm(t, torch.ones(2, 6, 3), torch.ones(2, 3, 4)),
    "multiplied": lambda t: t * -1e9,
    "compared": lambda t: t == 0,
    "inverted": lambda t: ~t,
    "bool": lambda t: t.bool(),
    "to a float": lambda t: t.to(torch.float32),
    "type": lambda t: t.type(torch.float32),
    "where": lambda t: torch.where(t, 0.0, -1.0),
    "masked_fill": lambda t: torch.zeros(2, 1, 6, 4).masked_fill(t, 1.0),
    "joined over keys": lambda t: torch.cat([t, t], -1),
    "padded": lambda t: nn.functional.pad(t, (0, 3)),
    "sdpa": lambda t: nn.functional.scaled_dot_product_attention(*[torch.randn(2, 1, 6, 4)] * 3, attn_mask=t),
    "expanded to scores": lambda t: t.expand(2, 4, 6, 6),
    "squeezed": lambda t: t.squeeze(1),
    "transposed": lambda t: t.mT,
    "some rows": lambda t: t[:, :, :3],
    "one head": lambda t: t[:, 0],
    "one row": lambda t: t[0],
    "new axis": lambda t: t[:, None],
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "item": lambda t: t[:1, :, :, :1].max(),
    "written to": lambda t: t.fill_(0),
    "assigned to": lambda t: t.__setitem__(0, 1),
}


@pytest.mark.parametrize("what", READ_AS_DENSE)
def test_guarded_bounds_refuse_what_a_dense_mask_is_for(what):
    with pytest.raises(ValueError, match=r"llama \(LlamaConfig\).*column bounds.*use attn_implementation='eager'"):
        READ_AS_DENSE[what](guarded())


def copied_by_saving(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "clone": torch.clone,
    "contiguous": torch.Tensor.contiguous,  # generate()
    "to a device": lambda t: t.to("cpu", copy=True),
    "to its dtype": lambda t: t.to(torch.int32, copy=True),
    "detach": torch.Tensor.detach,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": copied_by_saving,
    "deepcopy": copy.deepcopy,
    "all of a dense mask": lambda t: t[:, :, :, : t.shape[2]],
    "more than a dense mask": lambda t: t[:, :, :6, :99],
    "ellipsis": lambda t: t[..., :6],
}


@pytest.mark.parametrize("what", COPIES)
def test_copies_of_guarded_bounds_are_guarded_and_equal(what):
    bounds = guarded()
    copied = COPIES[what](bounds)
    assert isinstance(copied, Bounds) and copied.model == bounds.model and copied.seqlen_q == 6
    assert torch.equal(plain(copied), plain(bounds))
    with pytest.raises(ValueError, match="llama"):
        copied + 1


def test_rows_of_the_batch_of_guarded_bounds():
    # What a trainer's scatter, beams and a batch filter do.
    bounds = guarded()
    for part in (bounds[1:], bounds.chunk(2)[1], bounds.index_select(0, torch.tensor([1])), bounds[torch.tensor([1])]):
        assert isinstance(part, Bounds) and torch.equal(plain(part), plain(bounds)[1:])
    joined = torch.cat([bounds[:1], bounds[1:]])
    assert isinstance(joined, Bounds) and torch.equal(plain(joined), plain(bounds))
    assert torch.equal(plain(bounds.repeat_interleave(2, 0)), plain(bounds).repeat_interleave(2, 0))
    with pytest.raises(ValueError, match="llama"):
        bounds.chunk(2, 2)


@pytest.mark.parametrize("keys", [1, 2, 3, 5])
def test_a_dense_masks_slice_over_keys_slices_keys(keys):
    # With fewer than four keys it used to cut off bounds: two of them are read another way.
    bounds = guarded(length=6)
    cut = bounds[:, :, :, :keys]
    assert cut.shape == (2, 1, keys, 4) and torch.equal(plain(cut), plain(bounds)[:, :, :keys])
    dense = ColumnMask.from_startend_row_indices(plain(cut), causal=False).dense(6, keys)
    whole = ColumnMask.from_startend_row_indices(plain(bounds), causal=False).dense(6, 6)
    assert torch.equal(dense, whole[..., :keys])


def test_guarded_bounds_are_unwrapped_on_request():
    bounds = guarded()
    tensor = bounds.as_subclass(torch.Tensor)
    assert type(tensor) is torch.Tensor and tensor.data_ptr() == bounds.data_ptr()
    assert type(guard(tensor, "a model", 6)) is Bounds and type(tensor) is torch.Tensor


def test_generate_with_a_compiled_static_cache_gets_plain_bounds():
    # What torch.compile's machinery does to its inputs (copies into static buffers, say) a guard would refuse.
    _, llama = build("llama")
    bounds = mask_bounds(1, 1, 8, q_offset=torch.tensor(3), config=llama.config)
    assert type(bounds) is torch.Tensor


def test_a_first_forward_that_is_compiled_in_one_graph():
    # Nothing is known of the configuration yet: looking it up has to be traceable too.
    models._own_scores.clear()
    batch, real = inputs("llama", "left", seed=1)
    batch["use_cache"] = False
    eager, ours = build("llama")
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(compiled(**batch).logits[real], eager(**batch).logits[real])


# --- tables of attention classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "instead"),
    [("FalconModel", "falcon", "'sdpa' or 'eager'"), ("GPTNeoModel", "gpt_neo", "'eager'"), ("GitModel", "git", "'eager'")],
)
def test_a_model_with_a_table_of_attention_classes_is_no_key_error(name, kind, instead):
    with pytest.raises(ValueError, match=rf"{kind} \(\w+Config\).*use attn_implementation={instead}"):
        tiny(name)
    tiny(name, "eager")


# --- attention weights ----------------------------------------------------------------------------------------------

WITH_WEIGHTS = ["GPT2Model", "OPTModel", "StableLmModel", "BertModel", "LlamaModel"]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_output_attentions_is_refused_and_never_silently_empty(name):
    model = tiny(name)
    with pytest.raises(ValueError, match=r"output_attentions: \w+.*use attn_implementation='eager'"):
        model(words(5), output_attentions=True)
    model(words(5), output_attentions=False)


def test_output_attentions_of_an_image_tower_is_refused():
    model = tiny("SiglipVisionModel")
    with pytest.raises(ValueError, match=r"output_attentions: Siglip\w+.*use attn_implementation='eager'"):
        model(torch.randn(1, 3, 32, 32), output_attentions=True)


@pytest.mark.parametrize("name", ["GPT2Model", "LlamaModel"])
def test_output_attentions_in_the_configuration_is_refused(name):
    model = tiny(name, "eager")
    model.config.output_attentions = True
    ours = construct(type(model), model.config, "warploom")
    with pytest.raises(ValueError, match=r"output_attentions: .*use attn_implementation='eager'"):
        ours(words(5))


def test_a_model_set_to_eager_again_gives_attention_weights():
    model = tiny("LlamaModel")
    model.set_attn_implementation("eager")
    assert len(model(words(5), output_attentions=True).attentions) == model.config.num_hidden_layers
    model.set_attn_implementation("warploom")
    with pytest.raises(ValueError, match="output_attentions"):
        model(words(5), output_attentions=True)


def test_a_model_given_our_name_can_be_copied_and_pickled():
    model = tiny("LlamaModel")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(other(words(5)).last_hidden_state, model(words(5)).last_hidden_state)
        with pytest.raises(ValueError, match="output_attentions"):
            other(words(5), output_attentions=True)


# --- generate -------------------------------------------------------------------------------------------------------


def test_assisted_generation():
    batch, _ = inputs("llama", "none", seed=2)
    batch = {name: value[:1] for name, value in batch.items()}
    made = []
    for model in build("llama"):
        options = dict(assistant_model=copy.deepcopy(model), max_new_tokens=6, do_sample=False, eos_token_id=None)
        made.append(model.generate(**batch, **options))
    assert torch.equal(made[0], made[1])
