"""The maps that linear attention applies to queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

FeatureMap = Callable[[torch.Tensor], torch.Tensor]


def elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, positive everywhere (Katharopoulos et al., 2020, eq. 7)."""
    return F.elu(x) + 1


def identity(x: torch.Tensor) -> torch.Tensor:
    """x itself."""
    return x


NAMED: dict[str, FeatureMap] = {"elu+1": elu_plus_one, "relu": torch.relu, "identity": identity}


def resolve(feature_map: str | FeatureMap | tuple[FeatureMap, FeatureMap]) -> tuple[FeatureMap, FeatureMap]:
    """The map of the queries and the map of the keys.

    Raises:
        ValueError: a name that is not known.
        TypeError: neither a name, nor a callable, nor a pair of callables.
    """
    if isinstance(feature_map, str):
        if feature_map not in NAMED:
            raise ValueError(
                f"feature_map is {feature_map!r}; it takes one of {', '.join(NAMED)}, a callable or a pair of them"
            )
        return NAMED[feature_map], NAMED[feature_map]
    if isinstance(feature_map, tuple) and len(feature_map) == 2 and all(callable(f) for f in feature_map):
        return feature_map
    if callable(feature_map):
        return feature_map, feature_map
    raise TypeError(f"feature_map is {feature_map!r}; it takes a name, a callable or a pair of callables (queries, keys)")
