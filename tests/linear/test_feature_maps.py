"""Feature maps by name, callable or pair, and their errors."""

from __future__ import annotations

import pytest
import torch

from warploom.linear.feature_maps import resolve


def test_names_callables_and_pairs() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    torch.testing.assert_close(resolve("elu+1")[0](x), torch.tensor([float(torch.tensor(-1.0).exp()), 1.0, 3.0]))
    assert torch.equal(resolve("relu")[1](x), x.clamp(min=0))
    assert resolve("identity")[0](x) is x
    assert resolve(torch.exp) == (torch.exp, torch.exp)
    assert resolve((torch.exp, torch.relu)) == (torch.exp, torch.relu)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="feature_map is 'elu'"):
        resolve("elu")
    for bad in (3, (torch.exp,)):
        with pytest.raises(TypeError, match="feature_map"):
            resolve(bad)  # type: ignore[arg-type]
