"""A tiny configuration of any model: the defaults of its class, shrunk by the names of their fields."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from typing import Any

from .specials import CONFIGS

VOCABULARY, SPECIAL_TOKENS, WINDOW = 99, 20, 4  # ordinary tokens are SPECIAL_TOKENS ... VOCABULARY - 1
LEVELS = ("everything", "eight layers", "layers")  # what is shrunk; the first that builds and runs is taken

# Field name -> value for an integer default. The first pattern that matches the whole name decides.
LAYER_RULES: list[tuple[str, int]] = [
    (r"num_hidden_layers|num_layers|n_layers?|layers|depth|num_blocks|.*_layers|.*_depth|.*num_blocks", 2),
    (
        r"num_(nextn_predict|kv_shared|dense|mtp|deepstack|resampler)_layers|.*kv_shared_layers|first_k_dense.*|max_window_layers",
        1,
    ),
    (r"(char_|t2u_|unit_hifi_gan_)?vocab_size(_per_layer_input)?|.*vocab_size", VOCABULARY),
    (r"(moe_|text_)?(num_|n_)?(local_|routed_|total_)?experts|moe_num_experts|.*num_experts", 4),
    (r".*experts_per_tok(en)?|moe_k|moe_topk|.*top_k_experts|expert_top_k|moe_top_k", 2),
]
SIZE_RULES: list[tuple[str, int]] = [
    (r"rotary_dim", 4),
    (r"n_group|topk_group|n_groups|num_groups|.*conv.*groups", 1),
    (r"head_dim|.*_head_dim|d_kv|.*head_size|.*key_head_dim", 8),
    (
        r".*(num_key_value_heads|num_kv_heads|n_kv_heads|key_value_heads|kv_heads|multi_query_group_num|swa_num_key_value_heads)",
        2,
    ),
    (r"num_heads|n_heads?|.*attention_heads|.*num_heads|.*n_heads|.*_heads", 4),
    (r".*lora_rank|.*_rank", 16),
    (
        r".*(intermediate|ffn|feedforward|feed_forward|mlp|inner)_?(size|dim|hidden_size|channels)|d_ff|d_inner|n_inner|mlp_dim|ffn_dim",
        48,
    ),
    (
        r"hidden_dim|hidden_size.*|.*hidden_size|d_model|n_embd|emb_dim|dim|.*embed(ding)?_(dim|size)|.*hidden_dim|.*embed_dim|"
        r"projection_dim|.*_dim|.*embeds_hidden_size|width|model_in_dim|.*_hidden_dim",
        32,
    ),
    (
        r"max_position_embeddings|n_positions|n_ctx|context_length|max_seq(uence)?_len(gth)?|.*max_.*positions?.*|seq_length|max_target_positions",
        64,
    ),
    (r"image_size|input_size|pretrain_image_size|max_img_size|img_size|crop_size", 32),
    (r"patch_size|spatial_patch_size", 8),
    (
        r"sliding_window|.*chunk_size|local_attention|.*attention_window|sliding_window_size|attention_chunk_size|.*sliding_window|window_size",
        WINDOW,
    ),
    (
        r"num_queries|num_query_tokens|.*num_latents|.*n_latents|mm_tokens_per_image|.*num_negatives|index_topk|.*num_register_tokens",
        4,
    ),
    (r".*_channels|.*_units|.*upsample_initial_channel|base_channels", 32),
    (r"codebook_size|num_embeddings|.*codebook_dim|num_mel_bins|num_mels", 16),
]
KEEP = re.compile(
    r"num_channels|in_channels|num_labels|in_chans|.*kernel.*|.*stride.*|.*expand.*|.*ratio.*|.*factor.*|.*_period|.*_offset|"
    r"eval_idx|input_dim_.*|quantization_dim|decoder_n_points|.*_feature_dim"
)
TOKEN = re.compile(r".*(_token_id|_token_index|_token_ids)|.*_id|mask_index")


def tiny_config(config_class: type, level: str = "everything") -> Any:
    """A small configuration of `config_class`; `level` "layers" keeps its widths."""
    values = shrunk(config_class, level)
    sub_configs = getattr(config_class, "sub_configs", {}) or {}
    default = config_class() if sub_configs else None
    for name in sub_configs:
        inner = getattr(default, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            values[name] = tiny_config(type(inner), level)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)  # latent attention repeats no heads
    values.update(copy.deepcopy(CONFIGS.get(getattr(config_class, "model_type", ""), {})))
    config = config_class(**values)
    fit(config)
    return config


def shrunk(config_class: type, level: str) -> dict[str, Any]:
    rules = LAYER_RULES + ([] if level == "layers" else SIZE_RULES)
    if level == "eight layers":
        rules = [(LAYER_RULES[0][0], 8), *rules]
    values: dict[str, Any] = {}
    token = 3
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        default = parameter.default
        if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if default is not inspect.Parameter.empty:
                values[name] = {"pad": 0, "bos": 1, "eos": 2, "dec": 1}[name[:3]]
        elif TOKEN.fullmatch(name) and isinstance(default, int) and not isinstance(default, bool) and default >= SPECIAL_TOKENS:
            values[name], token = token, token + 1
        elif isinstance(default, bool) or default is None or KEEP.fullmatch(name):
            continue
        elif isinstance(default, int):
            new = next((value for pattern, value in rules if re.fullmatch(pattern, name)), None)
            if new is not None and new < default:
                values[name] = new
        elif isinstance(default, (list, tuple)) and level != "layers" and default and all(type(x) is int for x in default):
            new_list = shrunk_list(name, list(default))
            if new_list is not None:
                values[name] = type(default)(new_list)
    return values


def shrunk_list(name: str, default: list[int]) -> list[int] | None:
    if re.fullmatch(r"depths?|num_blocks|.*layers|layer_depths", name):
        return [1] * len(default)
    if re.fullmatch(r".*heads", name):
        return [2] * len(default)
    if re.fullmatch(r"hidden_sizes|embed_dims?|dims|.*hidden_sizes|.*channels|conv_dim|encoder_hidden_sizes", name):
        return [16] * len(default)
    if name in ("image_size",):
        return [32] * len(default)
    return None


def fit(config: Any) -> None:
    """Lists that describe layers are as long as there are layers, and rotary sections fit the heads."""
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "attention_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
            chosen = list(dict.fromkeys(kinds))[:layers]
            setattr(config, name, (chosen + kinds)[:layers])
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and ("mrope_section" in rope or speaks_of(config, "mrope_section")):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def speaks_of(config: Any, word: str) -> bool:
    module = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return module is not None and word in inspect.getsource(module)
