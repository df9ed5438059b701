from __future__ import annotations

from torch import nn

from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal


class Linear(DrawnByRows, nn.Linear):
    """`torch.nn.Linear` whose weight starts normal with a given standard deviation, and whose bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, initializer_range: float) -> None:
        self.initializer_range = initializer_range  # nn.Linear's constructor resets the parameters
        super().__init__(in_features, out_features, bias=bias)

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return a normal weight, and zeros for the bias if there is one."""
        bias = {} if self.bias is None else {"bias": Constant(0.0)}
        return {"weight": Normal(self.initializer_range), **bias}
