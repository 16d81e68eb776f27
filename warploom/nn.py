"""Modules: attention layers with their projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from warploom.linear.api import linear_attention, linear_attention_step
from warploom.linear.arguments import numbers
from warploom.linear.feature_maps import FeatureMaps, resolve
from warploom.linear.state import LinearState
from warploom.runtime import arguments, dispatch

_PROJECTIONS = ("query_projection", "key_projection", "value_projection", "out_projection")


class LinearAttention(nn.Module):
    """Linear attention of several heads between linear projections; every query sees all keys.

    Parameters have the names that idiap's fast-transformers gives them, so its checkpoints load: see `load_idiap`.

    Args:
        dim: channels of the inputs and of the result.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads; default: heads.
        head_dim: channels of a query or key head; default: dim / heads.
        head_dim_v: channels of a value head; default: head_dim.
        feature_map: as in `warploom.linear_attention`; one that is a module becomes a submodule.
        normalize, eps, scale: as in `warploom.linear_attention`.
        bias: of the four projections.
        backend: as in `warploom.linear_attention`.
    """

    causal = False
    query_projection: nn.Linear
    key_projection: nn.Linear
    value_projection: nn.Linear
    out_projection: nn.Linear

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        feature_map: FeatureMaps = "elu+1",
        normalize: bool = True,
        eps: float = 1e-6,
        scale: float = 1.0,
        bias: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim, heads = arguments.integer("dim", dim, 1), arguments.integer("heads", heads)
        kv_heads = heads if kv_heads is None else arguments.integer("kv_heads", kv_heads)
        head_dim = arguments.integer("head_dim", head_dim, 1, optional=True)
        head_dim_v = arguments.integer("head_dim_v", head_dim_v, 1, optional=True)
        bias, normalize = arguments.flag("bias", bias), arguments.flag("normalize", normalize)
        eps, scale = numbers(eps, scale, normalize)
        resolve(feature_map)
        if backend is not None:
            dispatch.find(backend, "linear")
        dtype = None if dtype is None else arguments.float_dtype("dtype", dtype)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads and both at least 1, got {heads} and {kv_heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim must be a multiple of heads where head_dim is not given, got {dim} and {heads}")
            head_dim = dim // heads
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.dim, self.heads, self.kv_heads, self.feature_map = dim, heads, kv_heads, feature_map
        if isinstance(feature_map, tuple):
            # Modules among them are registered, so that their parameters and buffers are this module's too.
            self.feature_maps = nn.ModuleList(each for each in feature_map if isinstance(each, nn.Module))
        self.normalize, self.eps, self.scale, self.backend = normalize, eps, scale, backend
        sizes = ((dim, heads * head_dim), (dim, kv_heads * head_dim), (dim, kv_heads * head_dim_v), (heads * head_dim_v, dim))
        for name, (inputs, outputs) in zip(_PROJECTIONS, sizes, strict=True):
            self.add_module(name, nn.Linear(inputs, outputs, bias, device=device, dtype=dtype))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        decay: Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Project, attend, project.

        Args:
            queries: (batch, seqlen_q, dim), or (total_tokens, dim) with cu_seqlens.
            keys: (batch, seqlen_k, dim); default: queries.
            values: (batch, seqlen_k, dim); default: keys.
            lengths, cu_seqlens, decay, state, return_state: as in `warploom.linear_attention`; a decay in causal layers alone.

        Returns:
            (batch, seqlen_q, dim), or that and the state after all keys.
        """
        keys = queries if keys is None else keys
        values = keys if values is None else values
        self._check(2 if cu_seqlens is not None else 3, queries=queries, keys=keys, values=values)
        result = linear_attention(
            *self._project(queries, keys, values),
            causal=self.causal,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            decay=decay,
            state=state,
            return_state=return_state,
            backend=self.backend,
            **self._options(),
        )
        if isinstance(result, tuple):
            return self.out_projection(result[0].flatten(-2)), result[1]
        return self.out_projection(result.flatten(-2))

    def _project(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query_projection(queries).unflatten(-1, (self.heads, -1))
        k = self.key_projection(keys).unflatten(-1, (self.kv_heads, -1))
        return q, k, self.value_projection(values).unflatten(-1, (self.kv_heads, -1))

    def _check(self, least: int, **inputs: Tensor) -> None:
        """The projections' inputs: (…, dim) of ``least`` or 3 dimensions, in the parameters' dtype unless autocast."""
        weight = self.query_projection.weight.dtype
        for name, t in inputs.items():
            if arguments.strided(name, t).ndim not in (least, 3) or t.shape[-1] != self.dim:
                shape = "(batch, dim)" if name == "x" else "(total_tokens, dim)" if least == 2 else "(batch, seqlen, dim)"
                raise ValueError(f"{name} must have shape {shape} with dim {self.dim}, got {tuple(t.shape)}")
            arguments.with_values(name, t)
            mixed = t.dtype != weight and weight in arguments.FLOATS and not torch.is_autocast_enabled(t.device.type)
            if t.dtype not in arguments.FLOATS or mixed:
                raise TypeError(f"{name} has dtype {t.dtype} but the module's parameters have {weight}")

    def _options(self) -> dict[str, Any]:
        return {"feature_map": self.feature_map, "normalize": self.normalize, "eps": self.eps, "scale": self.scale}

    def load_idiap(self, weights: Mapping[str, Tensor], prefix: str = "") -> None:
        """Take the projections of an idiap `AttentionLayer` (fast-transformers) from its state dict.

        Args:
            weights: a state dict that holds ``prefix`` + "query_projection.weight" and so on; what else it holds is left alone.
            prefix: of the layer within it, such as "layers.0.attention.".

        Raises:
            ValueError: a projection is missing or has another shape, naming it.
        """
        if not isinstance(weights, Mapping) or not all(isinstance(key, str) for key in weights):
            raise TypeError(f"weights must be a state dict, names to tensors, got {type(weights).__name__}")
        arguments.text("prefix", prefix, optional=False)
        own = {name: t for name, t in self.state_dict().items() if name.partition(".")[0] in _PROJECTIONS}
        for name, t in own.items():
            if prefix + name not in weights:
                near = [key for key in weights if key.endswith("query_projection.weight")]
                hint = f"; it has layers at {[key.removesuffix('query_projection.weight') for key in near]}" if near else ""
                raise ValueError(f"the state dict has no {prefix + name!r}{hint}")
            if arguments.strided(f"weights[{prefix + name!r}]", weights[prefix + name]).shape != t.shape:
                raise ValueError(
                    f"{prefix + name} has shape {tuple(weights[prefix + name].shape)}, this layer {tuple(t.shape)}: "
                    "heads, kv_heads, head_dim and head_dim_v must be the layer's"
                )
        self.load_state_dict({name: weights[prefix + name] for name in own}, strict=False)


class CausalLinearAttention(LinearAttention):
    """Linear attention of several heads between linear projections; query i sees keys j <= i.

    Arguments, parameters and results are `LinearAttention`'s. `step` generates token by token in constant time and memory.
    """

    causal = True

    def step(self, x: Tensor, state: LinearState | None = None, *, decay: Tensor | None = None) -> tuple[Tensor, LinearState]:
        """One token of each sequence.

        Args:
            x: (batch, dim).
            state: what `forward(..., return_state=True)` or the last step returned; None before the first token.
            decay: (kv_heads,) or (batch, kv_heads), as in `warploom.linear_attention_step`.

        Returns:
            (batch, dim) and the new state.
        """
        self._check(2, x=x)
        q, k, v = self._project(x, x, x)
        if state is None:
            # The maps decide E, so one token through the general call makes the first state.
            rows = (t.unsqueeze(1) for t in (q, k, v))
            logs = decay.unsqueeze(1) if isinstance(decay, Tensor) and decay.ndim == 2 else decay
            out, state = linear_attention(*rows, decay=logs, return_state=True, backend=self.backend, **self._options())
            out = out.squeeze(1)
        else:
            out, state = linear_attention_step(q, k, v, state, decay=decay, backend=self.backend, **self._options())
        return self.out_projection(out.flatten(-2)), state
