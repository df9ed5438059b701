from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles (https://arxiv.org/abs/2104.09864).

    Args:
        position_ids: integer positions, shape `[batch, seq]`; batch may be 1 for all rows.
        head_dim: width of a head; pair i turns by `position * theta ** (-2 i / head_dim)`.
        theta: base of the frequencies.
        dtype: of the model; the tables have float32 at least, for bfloat16 cannot count positions beyond 256.

    Returns:
        Two tensors of shape `[batch, seq, 1, head_dim / 2]`, to be shared by all layers and heads.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=dtype) / head_dim
    angles = position_ids[:, :, None, None].to(dtype) * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head by its position, in half style: element i pairs with element i + head_dim / 2.

    Args:
        x: shape `[batch, seq, heads, head_dim]`.
        cos: from `rope_tables`.
        sin: from `rope_tables`.

    Returns:
        Shape and dtype of `x`, computed in the dtype of the tables.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
