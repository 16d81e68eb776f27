"""What the generic shrinker cannot guess, by model type."""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
INPUTS: dict[str, Any] = {}
