from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight starts normal with a given standard deviation, and whose bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, initializer_range: float) -> None:
        self.initializer_range = initializer_range  # nn.Linear's constructor resets the parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weight anew."""
        nn.init.normal_(self.weight, std=self.initializer_range)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
