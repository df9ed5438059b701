from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_positions(document_ids: Tensor) -> Tensor:
    """Return positions that begin at 0 with each document; the host does not wait.

    Args:
        document_ids: Integers, shape `[batch, seq]`. A document is a run of equal ids.

    Returns:
        Int64 of the same shape.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.where(document_ids[:, 1:] != document_ids[:, :-1], places[1:], 0)
    return places - F.pad(begins.cummax(1).values, (1, 0))  # where the latest document begins, at each place


def rope_tables(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary angles (https://arxiv.org/abs/2104.09864).

    Args:
        position_ids: Integer positions, shape `[batch, seq]`; batch may be 1 for all rows.
        head_dim: Width of a head; pair i is rotated by `position * theta ** (-2 i / head_dim)`.
        theta: Base of the frequencies.
        dtype: Dtype of the model; the tables have float32 at least, because bfloat16 cannot count positions beyond 256.

    Returns:
        Two tensors of shape `[batch, seq, 1, head_dim / 2]`, shared by all layers and heads, for
        `lightning_d9d.ops.rope`.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=dtype) / head_dim
    angles = position_ids[:, :, None, None].to(dtype) * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()
