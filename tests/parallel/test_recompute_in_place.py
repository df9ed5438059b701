"""Kept results are computed again if a recomputed module has modified them in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_d9d import ParallelConfig
from lightning_d9d.parallel import recompute_activations
from tests.harness.compare import assert_tensors_close

HIDDEN = 4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [2, 3])
def test_products_that_are_modified_are_made_again(bias: bool, dims: int) -> None:
    """With three dims the module gets another view of the product, which need not count its changes."""
    results = {}
    for kind in ("none", "selective"):
        torch.manual_seed(0)
        model = Modified(bias).double()
        recompute_activations(model, ParallelConfig(recompute=kind), [model])
        x = torch.randn(*(2, 5, HIDDEN)[-dims:], dtype=torch.float64)
        model(x).sum().backward()
        results[kind] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_tensors_close(results["selective"], results["none"])


class Modified(nn.Module):
    """The result of a product is modified in place before anything saves it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += 1
        return self.second(y.tanh().square())
