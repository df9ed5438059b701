from __future__ import annotations

from typing import overload

from torch import Tensor, nn

from lightning_d9d.ops import rms_norm


class RMSNorm(nn.RMSNorm):
    """Scales the last dim to unit root mean square, times a weight; float32 at least, rounded to the input's dtype.

    Under autocast the input may be narrower than the weight. Without kernels (`lightning_d9d.ops.backend`) the weight
    is then rounded to the input's dtype, as autocast does with matrices. Torch has no fused kernel for two dtypes.

    Args:
        dim: Width of the last dim.
        eps: Number added to the mean square.
        zero_centered: Whether the factor is `1 + weight`, with a weight that starts at 0; otherwise the weight starts
            at 1.
    """

    weight: nn.Parameter
    eps: float  # type: ignore[assignment]

    def __init__(self, dim: int, eps: float, *, zero_centered: bool = False) -> None:
        self.zero_centered = zero_centered  # nn.RMSNorm's constructor resets the weight
        super().__init__(dim, eps=eps)

    def reset_parameters(self) -> None:
        """Set the weight to its initial value."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Norm `[..., dim]` in the same shape and dtype; with `residual` return the norm of the sum, and the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered, residual=residual)
