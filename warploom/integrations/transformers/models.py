"""Which models can run on column bounds: refusals that need only a configuration or a class, before any work."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from torch import nn

from . import alibi

NAMES: set[str] = set()  # that register() has given


def name_of(config: Any) -> str:
    """How a message names the model of this configuration, such as "bloom (BloomConfig)"."""
    kind = getattr(config, "model_type", "") or "this model"
    return kind if config is None else f"{kind} ({type(config).__name__})"


def refuse_own_scores(config: Any) -> None:
    """Refuse a model of transformers whose code computes its scores without asking for an attention function.

    Raises:
        ValueError: naming the model and what to use instead.
    """
    if config is not None and computes_own_scores(type(config)):
        raise ValueError(
            f"attn_implementation='warploom': {name_of(config)} computes attention by itself and never calls another "
            "implementation; use attn_implementation='eager' for this model"
        )


def computes_own_scores(config_class: type) -> bool:
    """Whether the modeling file beside this configuration has no way to call an attention function."""
    if alibi.is_adapted(config_class):
        return False
    known = _own_scores.get(config_class)
    if known is None:
        module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
        known = module is not None and module.__name__ != config_class.__module__ and _without_interface(module, config_class)
        _own_scores[config_class] = known
    return known


_own_scores: dict[type, bool] = {}


def _without_interface(module: Any, config_class: type) -> bool:
    models = [c for c in vars(module).values() if isinstance(c, type) and getattr(c, "config_class", None) is config_class]
    supported = any(getattr(c, "_supports_attention_backend", False) for c in models)
    return bool(models) and not supported and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def watch(name: str) -> None:
    """Prepare every model that is given this name, when it is built or later.

    Transformers asks each model, and each part that is a model, which implementation it will really use. There is no
    other place where the model itself is known before its layers are built.
    """
    from transformers import PreTrainedModel

    NAMES.add(name)
    original = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "_warploom_watches", False):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = original(self, *args, **kwargs)
        if chosen in NAMES:
            prepare(self, chosen)
        return chosen

    get_correct_attn_implementation._warploom_watches = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]


def prepare(model: nn.Module, name: str) -> None:
    """What a model that is given our name gets: refusals in words where transformers would be silent or raise KeyError."""
    for kind in type(model).__mro__:
        module = sys.modules.get(kind.__module__)
        if module is not None and kind.__module__ not in _SEEN_BASES:
            for table in vars(module).values():
                if isinstance(table, dict) and _holds_attention_classes(table):
                    table.setdefault(name, _refused([own for own in ("sdpa", "eager") if own in table]))
            alibi.adapt(module, type(model.config), name)
    if not getattr(model, "_warploom_prepared", False):
        model._warploom_prepared = True  # type: ignore[assignment]
        names = list(inspect.signature(model.forward).parameters)
        at = names.index("output_attentions") if "output_attentions" in names else -1
        model._warploom_output_attentions = at  # type: ignore[assignment]
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)


_SEEN_BASES = frozenset(("builtins", "torch.nn.modules.module", "transformers.modeling_utils", "abc"))


def _holds_attention_classes(table: dict) -> bool:
    return "eager" in table and all(isinstance(entry, type) and issubclass(entry, nn.Module) for entry in table.values())


def _refused(others: list[str]) -> type[nn.Module]:
    """What stands under our name in a model's own table of attention classes, beside the implementations it has."""
    instead = "attn_implementation=" + " or ".join(f"'{name}'" for name in others)

    class Refused(nn.Module):
        def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
            raise ValueError(
                f"attn_implementation='warploom': {name_of(config)} has attention classes of its own and none for other "
                f"implementations; use {instead} for this model"
            )

    return Refused


def _before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Attention weights never exist here, and many models would silently return none."""
    config: Any = model.config
    if config._attn_implementation not in NAMES:
        return
    at: Any = model._warploom_output_attentions
    asked = args[at] if 0 <= at < len(args) else kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(config, "output_attentions", False)
    if asked:
        raise ValueError(
            f"output_attentions: {type(model).__name__} runs with attn_implementation='warploom', where attention weights "
            "are never materialised; use attn_implementation='eager' for them"
        )
