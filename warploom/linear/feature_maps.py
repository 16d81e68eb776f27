"""The maps that linear attention applies to queries and keys, in torch.

Triton's are in warploom/kernels/triton/feature_maps.py. tests/kernels holds all of them to one answer, at NaN and infinities
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from warploom.runtime import arguments

FeatureMap = Callable[[Tensor], Tensor]
# One for both, or the queries' and the keys'.
FeatureMaps = str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap]


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, positive everywhere (Katharopoulos et al., 2020, eq. 7).

    Not by adding 1 to torch's elu: near -1 that has lost the digits of e^x.
    """
    positive = x > 0
    return torch.where(positive, x + 1, x.masked_fill(positive, 0.0).exp())


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


NAMED: dict[str, FeatureMap] = {"elu+1": elu_plus_one, "relu": torch.relu, "identity": identity}


# What turns exponents of e into those of 2.
_LOG2E = math.log2(math.e)


def map_in_place(name: str, x: Tensor, spare: Tensor) -> Tensor:
    """A map of ``NAMED`` applied to x in place, for who needs no autograd; ``spare``, of x's shape, is written over."""
    if name == "relu":
        return x.clamp_(min=0)
    if name == "identity":
        return x
    # exp(min(x, 0)) + max(x, 0). torch's exp2 takes half of exp's time; fp64 keeps its digits.
    positive = torch.clamp(x, min=0, out=spare)
    x.clamp_(max=0)
    return (x.exp_() if x.dtype == torch.float64 else x.mul_(_LOG2E).exp2_()).add_(positive)


def through_map_in_place(name: str, gradient: Tensor, mapped: Tensor, spare: Tensor) -> Tensor:
    """The gradient of x from that of ``mapped``, a map of x, in place: the slope follows from the value.

    As autograd has it, the gradient passes ReLU where x is NaN.
    """
    if name == "relu":
        return gradient.masked_fill_(mapped <= 0, 0.0)
    if name == "identity":
        return gradient
    return gradient.mul_(torch.clamp(mapped, max=1.0, out=spare))


def resolve(feature_map: FeatureMaps) -> tuple[str | FeatureMap, str | FeatureMap]:
    """The map of the queries and that of the keys, each one of the names in ``NAMED`` or a callable.

    Raises:
        ValueError: a name that is not known.
        TypeError: neither a name, nor a callable, nor a pair of these.
    """
    pair = feature_map if isinstance(feature_map, tuple) and len(feature_map) == 2 else (feature_map, feature_map)
    for each in pair:
        if isinstance(each, str) and each not in NAMED:
            raise ValueError(f"feature_map is {each!r}; it takes one of {', '.join(NAMED)}, a callable or a pair of these")
        if not isinstance(each, str) and not callable(each):
            raise TypeError(f"feature_map is {feature_map!r}; it takes a name, a callable or a pair of these (queries, keys)")
    return pair


class RandomFeatures(torch.nn.Module):
    """FAVOR+: positive random features whose products estimate exp(temperature · q · k) without bias.

    phi(x) = exp(w · x' - |x'|² / 2) / √features with x' = √temperature · x and rows w drawn once from N(0, 1), those of a
    block of head_dim orthogonal, which lowers the variance (Choromanski et al., 2021, "Rethinking Attention with Performers",
    lemma 1 and section 2.4). Attention with it estimates softmax attention of that scale. Computed in fp32.

    Args:
        head_dim: last dimension of queries and keys.
        features: last dimension of phi(x); default: head_dim · ln(head_dim) rounded up, at most 256,
            which is what the GPU kernels take.
        seed: of the draw; the same seed gives the same features on every device.
        temperature: default: 1/√head_dim, softmax attention's scale.
    """

    weight: Tensor

    def __init__(self, head_dim: int, features: int | None = None, *, seed: int = 0, temperature: float | None = None) -> None:
        super().__init__()
        head_dim, features = arguments.integer("head_dim", head_dim), arguments.integer("features", features, optional=True)
        if head_dim < 1 or (features is not None and features < 1):
            raise ValueError(f"head_dim and features must be at least 1, got {head_dim} and {features}")
        seed = arguments.integer("seed", seed, *arguments.INT64)
        if temperature is not None:
            temperature = float(arguments.number("temperature", temperature))
            if not 0 < temperature < math.inf:
                raise ValueError(f"temperature must be a positive finite number, got {temperature}")
        if features is None:
            features = min(256, math.ceil(head_dim * max(math.log(head_dim), 1.0)))
        self.temperature = head_dim**-0.5 if temperature is None else temperature
        self.register_buffer("weight", _orthogonal(features, head_dim, torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        """(…, head_dim) to (…, features), in x's dtype."""
        if arguments.strided("x", x).dtype not in arguments.FLOATS or x.ndim < 1:
            raise TypeError(f"x must be floating point (…, head_dim), got {arguments.describe(x)}")
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"these random features take head_dim {self.weight.shape[1]}, got {x.shape[-1]}")
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32)) * self.temperature**0.5
            exponent = wide @ self.weight.to(wide.dtype).mT - wide.square().sum(-1, keepdim=True) / 2
            return (exponent.exp() * self.weight.shape[0] ** -0.5).to(x.dtype)


def _orthogonal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows of N(0, 1) directions and lengths, orthogonal within each block of dim."""
    blocks = []
    for _ in range(-(-rows // dim)):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(gaussian)
        # Without the signs of the diagonal the basis is not uniformly distributed.
        directions = basis * triangle.diagonal().sign()
        lengths = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=1)
        blocks.append(directions.mT * lengths[:, None])
    return torch.cat(blocks)[:rows].float()
