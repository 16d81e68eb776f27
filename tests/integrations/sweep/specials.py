"""What the generic shrinker cannot guess, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
}


def text_and_large_images(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Feature maps of one pixel would leave their GroupNorm nothing but rounding errors to enlarge."""
    words = torch.randint(20, 99, (2, length))
    return {"input_ids": words, "pixel_values": torch.randn(2, 3, 128, 128)}


INPUTS: dict[str, Callable[[Any, int], dict[str, torch.Tensor]]] = {
    "grounding-dino": text_and_large_images,
    "mm-grounding-dino": text_and_large_images,
}
