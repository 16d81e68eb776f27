"""The public functions' arguments, drawn from a seed, and all gradients of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.delta.cases import Case

TENSORS = ("q", "k", "v", "beta", "decay", "state")


def drawn(case: Case) -> dict[str, Any]:
    """gated_delta_rule()'s arguments; all tensors of numbers require grad."""
    call, _, _ = case.call()
    found = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return {n: v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in found.items()}


def detached(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def leaves(arguments: dict[str, Any]) -> list[Tensor]:
    return [arguments[name] for name in TENSORS if arguments[name] is not None]


def gradients(out: Tensor, state: Tensor, arguments: dict[str, Any]) -> list[Tensor]:
    """Of a function of both results, in everything."""
    loss = out.double().sin().sum() + state.double().cos().sum()
    return list(torch.autograd.grad(loss, leaves(arguments), materialize_grads=True))
