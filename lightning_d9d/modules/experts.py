from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_d9d.modules.adapters import adapter_of
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.ops import grouped_gemm, swiglu


class GroupedExperts(DrawnByRows):
    """SwiGLU experts whose matrices are stacked, so that all of them run as two grouped products.

    `gate_up_proj` has shape `[experts, 2 * intermediate, hidden]`, the gate's rows first; `down_proj` has shape
    `[experts, hidden, intermediate]`. `lightning_d9d.peft` gives them adapters, `gate_up_lora` and `down_lora`.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, initializer_range: float) -> None:
        super().__init__()
        self.initializer_range = initializer_range
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Normal matrices; each expert has random streams of its own."""
        return {"gate_up_proj": Normal(self.initializer_range), "down_proj": Normal(self.initializer_range)}

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Applies each row's expert.

        Args:
            x: rows sorted by expert, shape `[rows, hidden]`.
            weights: factor of each row's result, shape `[rows]`.
            offsets: int32, shape `[experts]`: the row after the last one of each expert.

        Returns:
            Shape `[rows, hidden]`.
        """
        gate_up = grouped_gemm(x, self.gate_up_proj, offsets)
        if (adapter := adapter_of(self, "gate_up_lora")) is not None:
            gate_up = gate_up + adapter(x, offsets)
        # down_proj is linear, so the factor may come before it: there the rows are narrower, and no result is kept.
        inner = swiglu(gate_up, weights)
        y = grouped_gemm(inner, self.down_proj, offsets)
        if (adapter := adapter_of(self, "down_lora")) is not None:
            y = y + adapter(inner, offsets)
        return y
