"""Random inputs for a model, guessed from its forward's arguments and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .specials import INPUTS
from .tiny import SPECIAL_TOKENS, VOCABULARY

BATCH, LENGTH, SHORT = 2, 11, 4  # four tokens: there bounds and a dense mask have one shape
PADDING = 3


def find(config: Any, *names: str) -> Any:
    """The first of these fields that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}) or {})]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def tokens(config: Any, length: int, batch: int = BATCH) -> torch.Tensor:
    vocabulary = find(config.get_text_config(), "vocab_size") or find(config, "vocab_size") or VOCABULARY
    vocabulary = min(v for v in (vocabulary, 10**9) if isinstance(v, int))
    return torch.randint(min(SPECIAL_TOKENS, vocabulary - 1), vocabulary, (batch, length))


def padding(kind: str, length: int) -> torch.Tensor:
    """(batch, length), the first row shorter by PADDING tokens."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    cut = min(PADDING, length - 1)
    if kind == "right":
        mask[0, length - cut :] = 0
    elif kind == "left":
        mask[0, :cut] = 0
    return mask


def pixels(config: Any, *lead: int) -> torch.Tensor:
    size = find(config, "image_size", "img_size", "crop_size", "input_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = find(config, "num_channels", "in_channels", "in_chans") or 3
    return torch.randn(BATCH, *lead, channels, height, width)


def field(name: str, config: Any, length: int) -> torch.Tensor | None:
    if name in ("input_ids", "decoder_input_ids"):
        return tokens(config, length)
    if name in ("pixel_values", "images"):
        return pixels(config)
    if name in ("pixel_values_videos", "pixel_values_video"):
        return pixels(config, find(config, "num_frames", "frames_per_clip") or 2)
    if name == "input_values":
        mel = find(config, "num_mel_bins")
        return torch.randn(BATCH, find(config, "max_length") or 64, mel) if mel else torch.randn(BATCH, 16000)
    if name == "input_features":
        frames = find(config, "max_source_positions")
        bins = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "num_mels") or 80
        return torch.randn(BATCH, bins, 2 * frames if frames else 64)
    if name == "bbox":
        box = torch.randint(0, 30, (BATCH, length, 4)).sort(-1).values
        return box[..., [0, 1, 2, 3]]
    if name == "inputs_embeds":
        return torch.randn(BATCH, length, find(config, "hidden_size", "d_model") or 32)
    return None


def candidates(model: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sets of inputs to try, the likeliest first; none carries a mask yet."""
    config, names = model.config, list(inspect.signature(model.forward).parameters)
    special = INPUTS.get(getattr(config, "model_type", "")) or INPUTS.get(type(model).__name__)
    if special is not None:
        yield special(model, length)
    if "ForMultipleChoice" in type(model).__name__ and "input_ids" in names:
        yield {"input_ids": torch.stack([tokens(config, length), tokens(config, length)], 1)}
    if "grid_thw" in names:
        yield from patches(config, names)
    main = model.main_input_name if isinstance(model.main_input_name, str) else "input_ids"
    words = [n for n in ("input_ids", "bbox") if n in names]
    target = ["decoder_input_ids"] if "decoder_input_ids" in names else []
    others = [n for n in ("pixel_values", "pixel_values_videos", "input_values", "input_features", "images") if n in names]
    sets: list[list[str]] = []
    if words:
        sets += [words + target, words]
    if main not in words and main in names:
        sets += [[main, *target], [main]]
    for other in others:
        sets += [[other], [other, *target], [*words, other], [*words, other, *target]]
    if "inputs_embeds" in names:
        sets.append(["inputs_embeds"])
    seen = set()
    for chosen in sets:
        if tuple(chosen) in seen:
            continue
        seen.add(tuple(chosen))
        made = {n: field(n, config, length) for n in chosen}
        if all(v is not None for v in made.values()):
            if "input_ids" in made and "ForSequenceClassification" in type(model).__name__ and config.is_encoder_decoder:
                made["input_ids"][:, -1] = config.eos_token_id
            yield made
            turned = "input_features" in made
            if turned:
                yield made | {"input_features": made["input_features"].transpose(1, 2).contiguous()}
            if "pixel_values" in made and len(made) == 1:
                yield {"pixel_values": pixels(config, find(config, "num_frames") or 2)}


def patches(config: Any, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Two images of 4 x 4 patches in one row, as vision towers with `grid_thw` take them."""
    channels, size = find(config, "in_channels", "in_chans", "num_channels") or 3, find(config, "patch_size") or 8
    for frames in (find(config, "temporal_patch_size") or 1, 1):
        flat = torch.randn(2 * 16, channels * frames * size * size)
        first = next((n for n in ("hidden_states", "pixel_values") if n in names), names[0])
        yield {first: flat, "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}


def with_padding(model: Any, inputs: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The same inputs with an attention_mask of this kind, or None: the model takes none."""
    names = inspect.signature(model.forward).parameters
    if "attention_mask" not in names or "input_ids" not in inputs or inputs["input_ids"].dim() != 2:
        return None
    return inputs | {"attention_mask": padding(kind, inputs["input_ids"].shape[1])}
