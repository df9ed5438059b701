from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_d9d.modules.adapters import ExpertsAdapter, adapter_of
from lightning_d9d.modules.halves import Halves
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.ops import Permutation, adapted_down, adapted_gate_up, adapted_swiglu, grouped_gemm, swiglu


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
        """Return normal matrices; each expert has its own random streams."""
        return {"gate_up_proj": Normal(self.initializer_range), "down_proj": Normal(self.initializer_range)}

    @property
    def has_adapters(self) -> bool:
        """True while adapters are applied."""
        return self._adapters != (None, None)

    @property
    def _adapters(self) -> tuple[ExpertsAdapter | None, ExpertsAdapter | None]:
        """The adapters of both products; None if there is none, or a merged one."""
        return adapter_of(self, "gate_up_lora"), adapter_of(self, "down_lora")

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        offsets: Tensor,
        copies: Permutation | None = None,
        second: Halves | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply each row's expert.

        Args:
            x: Rows sorted by expert, shape `[rows, hidden]`; with `copies` the tokens, `[tokens, hidden]`.
            weights: Factor of each row's result, shape `[rows]`.
            offsets: One past the last row of each expert, int32, shape `[experts]`.
            copies: Permutation from tokens to rows, without padding. Adapters then need fewer passes.
            second: Second half of the tokens. Both halves are computed in one call, for which weights are gathered
                once.

        Returns:
            Shape `[rows, hidden]`; with `copies` the sums of tokens' results, `[tokens, hidden]`. With `second`, what
            its `end` returned for the results of both halves.
        """
        if second is None:
            return self._results(x, weights, offsets, copies)
        second.begin(0)
        first_results = second.end(0, self._results(x, weights, offsets, None))
        second.begin(1)
        return first_results, second.end(1, self._results(second.x, second.weights, second.offsets, None))

    def _results(self, x: Tensor, weights: Tensor, offsets: Tensor, copies: Permutation | None) -> Tensor:
        up, down = self._adapters
        # down_proj is linear, so the factor may come before it: there the rows are narrower, and no result is kept.
        inner, h = self._inner(x, weights, offsets, copies, up, down)
        if down is not None and h is not None:
            return adapted_down(inner, self.down_proj, h, down.b, offsets, copies)
        y = grouped_gemm(inner, self.down_proj, offsets)
        return y if copies is None else copies.sum(y)

    def _inner(
        self,
        x: Tensor,
        weights: Tensor,
        offsets: Tensor,
        copies: Permutation | None,
        up: ExpertsAdapter | None,
        down: ExpertsAdapter | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input of the second product, and its hidden state of `down`."""
        if up is None or up.drops:
            rows = x if copies is None else copies.copy(x)
            gate_up, h = grouped_gemm(rows, self.gate_up_proj, offsets), up and up.hidden(rows, offsets)
        else:
            gate_up, h = adapted_gate_up(x, self.gate_up_proj, up.a, offsets, up.scale, copies)
        if up is None and down is None:
            return swiglu(gate_up, weights), None
        a, scale = (None, 1.0) if down is None or down.drops else (down.a, down.scale)
        inner, projected = adapted_swiglu(gate_up, h, up and up.b, a, weights, offsets, scale)
        return inner, down.hidden(inner, offsets) if down is not None and down.drops else projected
