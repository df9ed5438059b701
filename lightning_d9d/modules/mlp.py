from __future__ import annotations

from torch import Tensor, nn

from lightning_d9d.modules.adapters import linears_of_one_input
from lightning_d9d.modules.linear import Linear
from lightning_d9d.ops import swiglu


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, initializer_range: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, initializer_range=initializer_range)
        self.up_proj = Linear(hidden_size, intermediate_size, initializer_range=initializer_range)
        self.down_proj = Linear(intermediate_size, hidden_size, initializer_range=initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: shape `[..., hidden]` to the same shape."""
        gate, up = linears_of_one_input([self.gate_proj, self.up_proj], x)
        return self.down_proj(swiglu((gate, up)))
