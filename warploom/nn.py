"""Modules: attention layers with their projections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warploom.delta.api import gated_delta_rule, gated_delta_step
from warploom.delta.arguments import check_packing
from warploom.delta.arguments import numbers as delta_numbers
from warploom.delta.convolution import convolve
from warploom.linear.api import linear_attention, linear_attention_step
from warploom.linear.arguments import numbers
from warploom.linear.feature_maps import FeatureMaps, resolve
from warploom.linear.state import LinearState
from warploom.runtime import arguments, dispatch

_PROJECTIONS = ("query_projection", "key_projection", "value_projection", "out_projection")


def _check_rows(name: str, t: Tensor, dim: int, dtype: torch.dtype, least: int, step: bool = False) -> None:
    """A projection's input: (…, dim) of ``least`` or 3 dimensions, in the parameters' ``dtype`` unless autocast."""
    if arguments.strided(name, t).ndim not in (least, 3) or t.shape[-1] != dim:
        shape = "(batch, dim)" if step else "(total_tokens, dim)" if least == 2 else "(batch, seqlen, dim)"
        raise ValueError(f"{name} must have shape {shape} with dim {dim}, got {tuple(t.shape)}")
    arguments.with_values(name, t)
    mixed = t.dtype != dtype and dtype in arguments.FLOATS and not torch.is_autocast_enabled(t.device.type)
    if t.dtype not in arguments.FLOATS or mixed:
        raise TypeError(f"{name} has dtype {t.dtype} but the module's parameters have {dtype}")


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
        for name, t in (("queries", queries), ("keys", keys), ("values", values)):
            _check_rows(name, t, self.dim, self.query_projection.weight.dtype, 2 if cu_seqlens is not None else 3)
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
        _check_rows("x", x, self.dim, self.query_projection.weight.dtype, 2, step=True)
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


class GatedDeltaState(NamedTuple):
    """What a `GatedDeltaNet` remembers of the tokens it has seen; a pytree, never changed in place.

    Attributes:
        s: the rule's state, (batch, heads_v, E, M), fp32 (fp64 for fp64 inputs).
        inputs: the convolution's last inputs, (batch, taps - 1, channels), in the projections' dtype.
    """

    s: Tensor
    inputs: Tensor


class GatedDeltaNet(nn.Module):
    """A causal layer of the gated delta rule (Yang et al., 2024, "Gated Delta Networks", arXiv 2412.06464, section 3.4).

    Queries, keys and values are linear in the inputs, then pass a short causal convolution and SiLU; queries and keys are
    normalized. A value head writes by beta = beta_max · sigmoid(b) and keeps exp(-exp(decay_rate) · softplus(a + decay_bias))
    of its state, a and b linear in the inputs. What is read is RMS-normalized, gated by SiLU and projected. These are the
    layers of Qwen3-Next; with decay=False those of DeltaNet (arXiv 2406.06484).

    Args:
        dim: channels of the inputs and of the result.
        heads: query and key heads.
        heads_v: value heads, a multiple of heads; default: heads.
        head_dim: channels E of a query or key head; default: dim / heads.
        head_dim_v: channels M of a value head; default: head_dim.
        taps: tokens that the convolution sees, the token itself among them; 1 is none before it.
        decay: whether states decay.
        beta_max: the largest beta: 2 lets a state's eigenvalues be negative.
        eps: added to squared norms: those of queries and keys, and the mean square of what is read.
        bias: of the projections.
        backend: as in `warploom.gated_delta_rule`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        heads_v: int | None = None,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        taps: int = 4,
        decay: bool = True,
        beta_max: float = 1.0,
        eps: float = 1e-6,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim, heads = arguments.integer("dim", dim, 1), arguments.integer("heads", heads, 1)
        heads_v = arguments.integer("heads_v", heads if heads_v is None else heads_v, 1)
        head_dim = arguments.integer("head_dim", head_dim, 1, optional=True)
        head_dim_v, taps = arguments.integer("head_dim_v", head_dim_v, 1, optional=True), arguments.integer("taps", taps, 1)
        decay, bias = arguments.flag("decay", decay), arguments.flag("bias", bias)
        _, self.eps = delta_numbers(None, eps, 1)
        self.beta_max = float(arguments.number("beta_max", beta_max))
        if not 0 < self.beta_max <= 2:
            raise ValueError(f"beta_max must be above 0 and at most 2, past which states grow without bound, got {beta_max}")
        if heads_v % heads:
            raise ValueError(f"heads_v must be a multiple of heads, got {heads_v} and {heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim must be a multiple of heads where head_dim is not given, got {dim} and {heads}")
            head_dim = dim // heads
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        if backend is not None:
            dispatch.find(backend, "delta")
        options: dict[str, Any] = {"device": device, "dtype": None if dtype is None else arguments.float_dtype("dtype", dtype)}
        self.dim, self.heads, self.heads_v, self.head_dim, self.head_dim_v = dim, heads, heads_v, head_dim, head_dim_v
        self.backend = backend
        self.query_projection = nn.Linear(dim, heads * head_dim, bias, **options)
        self.key_projection = nn.Linear(dim, heads * head_dim, bias, **options)
        self.value_projection = nn.Linear(dim, heads_v * head_dim_v, bias, **options)
        self.gate_projection = nn.Linear(dim, heads_v * head_dim_v, bias, **options)
        self.beta_projection = nn.Linear(dim, heads_v, bias, **options)
        self.out_projection = nn.Linear(heads_v * head_dim_v, dim, bias, **options)
        channels = 2 * heads * head_dim + heads_v * head_dim_v
        self.convolution = nn.Parameter(torch.empty(channels, taps, **options).uniform_(-(taps**-0.5), taps**-0.5))
        self.norm = nn.Parameter(torch.ones(head_dim_v, **options))
        if decay:
            self.decay_projection: nn.Linear | None = nn.Linear(dim, heads_v, bias, **options)
            # As Mamba-2 (arXiv 2405.21060): steps from 0.001 to 0.1, rates from 1 to 16.
            steps = torch.exp(torch.empty(heads_v, **options).uniform_(math.log(1e-3), math.log(1e-1)))
            self.decay_bias = nn.Parameter(torch.log(torch.expm1(steps)))
            self.decay_rate = nn.Parameter(torch.log(torch.empty(heads_v, **options).uniform_(1.0, 16.0)))
        else:
            self.decay_projection = None

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: GatedDeltaState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, GatedDeltaState]:
        """Project, convolve, apply the rule, normalize, gate, project.

        Args:
            x: (batch, seqlen, dim), or (total_tokens, dim) with cu_seqlens.
            lengths, cu_seqlens: as in `warploom.gated_delta_rule`; what tokens that do not count hold changes nothing.
            state: what the tokens before left.
            return_state: also return the state after the last token.

        Returns:
            Of x's shape, or that and the state.
        """
        _check_rows("x", x, self.dim, self.norm.dtype, 2 if cu_seqlens is not None else 3)
        return_state = arguments.flag("return_state", return_state)
        rows = x.unsqueeze(0) if x.ndim == 2 else x
        lengths = arguments.int32("lengths", lengths, 1, x, "x")
        cu_seqlens = arguments.int32("cu_seqlens", cu_seqlens, 1, x, "x")
        check_packing("x", rows, lengths, cu_seqlens)
        state = self._checked(state, rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        ends = lengths if cu_seqlens is None else cu_seqlens[-1:]
        if ends is not None:
            # Zero times what a hidden token holds would be NaN in the projections' gradients.
            hidden = torch.arange(rows.shape[1], device=x.device) >= ends[:, None]
            rows = rows.masked_fill(hidden.unsqueeze(-1), 0.0)
        mixed, inputs = self._mixed(rows, state, lengths, cu_seqlens)
        out, s = gated_delta_rule(
            *self._rule(rows, mixed),
            normalize_qk=True,
            eps=self.eps,
            state=None if state is None else state.s,
            return_state=True,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        out = self._read(rows, out)
        out = out.squeeze(0) if x.ndim == 2 else out
        return (out, GatedDeltaState(s, inputs)) if return_state else out

    def step(self, x: Tensor, state: GatedDeltaState | None = None) -> tuple[Tensor, GatedDeltaState]:
        """One token of each sequence, in time and memory independent of what came before.

        Args:
            x: (batch, dim).
            state: what `forward(..., return_state=True)` or the last step returned; None before the first token.

        Returns:
            (batch, dim) and the new state.
        """
        _check_rows("x", x, self.dim, self.norm.dtype, 2, step=True)
        rows = x.unsqueeze(1) if x.ndim == 2 else x
        if rows.shape[1] != 1:
            raise ValueError(f"a step takes one token a sequence, got x {tuple(x.shape)}")
        state = self._checked(state, rows.shape[0])
        mixed, inputs = self._mixed(rows, state, None, None)
        q, k, v, beta, decay = self._rule(rows, mixed)
        if state is None:
            wide = torch.promote_types(q.dtype, torch.float32)
            s = q.new_zeros(x.shape[0], self.heads_v, self.head_dim, self.head_dim_v, dtype=wide)
        else:
            s = state.s
        out, s = gated_delta_step(q, k, v, beta, s, decay, normalize_qk=True, eps=self.eps, backend=self.backend)
        out = self._read(rows, out)
        return out.squeeze(1) if x.ndim == 2 else out, GatedDeltaState(s, inputs)

    def _checked(self, state: Any, sequences: int) -> GatedDeltaState | None:
        if state is None:
            return None
        if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(t, Tensor) for t in state):
            raise TypeError(f"state must be a GatedDeltaState or a pair of tensors, got {type(state).__name__}")
        channels, taps = self.convolution.shape
        wanted = {
            "s": ("(batch, heads_v, E, M)", (sequences, self.heads_v, self.head_dim, self.head_dim_v)),
            "inputs": ("(batch, taps - 1, channels)", (sequences, taps - 1, channels)),
        }
        for (name, (words, shape)), t in zip(wanted.items(), state, strict=True):
            if arguments.strided(f"state.{name}", t).shape != shape:
                raise ValueError(f"state.{name} must have shape {words} = {shape}, got {tuple(t.shape)}")
            if t.device != self.convolution.device:
                raise ValueError(f"state.{name} is on {t.device} but the module is on {self.convolution.device}")
        return GatedDeltaState(*state)

    def _mixed(
        self, x: Tensor, state: GatedDeltaState | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of all heads side by side, and the convolution's last inputs."""
        mixed = torch.cat([self.query_projection(x), self.key_projection(x), self.value_projection(x)], -1)
        before = None if state is None else state.inputs.to(mixed.dtype)
        out, inputs = convolve(mixed, self.convolution.to(mixed.dtype), before, lengths, cu_seqlens)
        return F.silu(out), inputs

    def _rule(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v, beta and decay."""
        keys = self.heads * self.head_dim
        q, k, v = mixed.split([keys, keys, self.heads_v * self.head_dim_v], -1)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t, heads in ((q, self.heads), (k, self.heads), (v, self.heads_v)))
        wide = torch.promote_types(q.dtype, torch.float32)
        beta = self.beta_max * self.beta_projection(x).to(wide).sigmoid()
        if self.decay_projection is None:
            return q, k, v, beta, None
        steps = F.softplus(self.decay_projection(x).to(wide) + self.decay_bias.to(wide))
        return q, k, v, beta, -self.decay_rate.to(wide).exp() * steps

    def _read(self, x: Tensor, out: Tensor) -> Tensor:
        """What was read, normalized a head, gated and projected."""
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        gate = F.silu(self.gate_projection(x).to(wide.dtype)).unflatten(-1, (self.heads_v, -1))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm.to(wide.dtype)
        return self.out_projection((normal * gate).to(out.dtype).flatten(-2))
