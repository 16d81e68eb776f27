"""Warploom as an attention implementation of Hugging Face transformers.

from warploom.integrations.transformers import register
register()
model = AutoModel.from_pretrained(name, attn_implementation="warploom")
"""

from __future__ import annotations

RESERVED = ("eager", "sdpa", "flex_attention")


def register(name: str = "warploom") -> str:
    """Make `attn_implementation=name` known to transformers: the attention and its mask function.

    Idempotent. Needs transformers 5 (`pip install warploom[transformers]`).

    Args:
        name: how models will ask for it. A name containing "flash" would make transformers load flash-attn
            and "|" means paged attention to it, so both are refused, as are transformers' own names.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is missing or older than 5.
        ValueError: the name cannot be used.
    """
    if not isinstance(name, str) or not name or "flash" in name or "|" in name or name in RESERVED:
        raise ValueError(
            f"name: got {name!r}; it must be a word of your own: without 'flash' (transformers would load "
            f"flash-attn for it), without '|' (paged attention), and none of {', '.join(RESERVED)}"
        )
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register() needs transformers 5 or newer with AttentionInterface and AttentionMaskInterface: "
            "pip install 'warploom[transformers]'"
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(
            f"register() needs transformers 5 or newer, and {transformers.__version__} is installed: "
            "pip install 'warploom[transformers]'"
        )
    from . import models
    from .attention import attention_forward
    from .masks import mask_bounds

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_bounds)
    models.watch(name)
    return name


__all__ = ["register"]
