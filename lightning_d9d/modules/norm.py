from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """Scales the last dim to unit root mean square, times a weight; computed in float32 at least, result as the input.

    Under autocast the input may be narrower than the weight, which is then rounded to the input's dtype as autocast
    does with matrices (torch has no fused kernel for two dtypes).
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `[..., dim]` to the same shape and dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
