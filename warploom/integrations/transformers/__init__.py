"""Warploom as an attention implementation of Hugging Face transformers.

from warploom.integrations.transformers import register
register()
model = AutoModel.from_pretrained(name, attn_implementation="warploom")
"""

from __future__ import annotations

from .delta import use_gated_delta_rule

RESERVED = ("eager", "sdpa", "flex_attention")
OLDEST = (5, 16)  # passes `python -m tests.integrations.sweep --core`, and its gated delta rule is one that is known


def register(name: str = "warploom") -> str:
    """Make `attn_implementation=name` known to transformers: the attention and its mask function.

    Idempotent. Needs transformers 5.16 or newer (`pip install 'warploom[transformers]'`). Models that are given this name
    also learn to refuse in words what they cannot do with it: attention weights, attention classes of their own.

    Args:
        name: how models will ask for it. A name containing "flash" would make transformers load flash-attn
            and "|" means paged attention to it, so both are refused, as are transformers' own names.

    Returns:
        `name`.

    Raises:
        ImportError: transformers is missing or older than 5.16.
        ValueError: the name cannot be used.
    """
    if not isinstance(name, str) or not name or "flash" in name or "|" in name or name in RESERVED:
        raise ValueError(
            f"name: got {name!r}; it must be a word of your own: without 'flash' (transformers would load "
            f"flash-attn for it), without '|' (paged attention), and none of {', '.join(RESERVED)}"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"register() needs transformers {_oldest()} or newer: pip install 'warploom[transformers]'"
        ) from error
    if _release(transformers.__version__) < OLDEST:
        raise ImportError(
            f"register() needs transformers {_oldest()} or newer, and {transformers.__version__} is installed: "
            "pip install 'warploom[transformers]'"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    from . import continuous, models
    from .attention import attention_forward
    from .masks import mask_bounds

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_bounds)
    models.watch(name)
    continuous.watch()
    return name


def _oldest() -> str:
    return ".".join(str(part) for part in OLDEST)


def _release(version: str) -> tuple[int, ...]:
    """(5, 23) of "5.23.0", "5.23.0.dev0" or "5.23"."""
    return tuple(int(part) for part in version.split(".")[:2])


__all__ = ["register", "use_gated_delta_rule"]
