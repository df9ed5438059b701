"""The states of AdamW in float32, bfloat16 and eight bits: their choice by parameter, and conversions between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.sharding import local, local_ranges, ranges_of_ranks
from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, SQUARE, decoded

SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
"""Names of the scales that belong to codes."""
_KINDS = {"exp_avg": AVERAGE, "exp_avg_sq": SQUARE}


def has_codes(parameter: Tensor, state_dtype: torch.dtype) -> bool:
    """Return whether a parameter has states in eight bits; vectors do not, because meshes shard them at any element.

    Local.
    """
    return state_dtype == torch.uint8 and parameter.dim() > 1


def dtype_of_states(parameter: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's averages. Local."""
    return torch.float32 if state_dtype == torch.uint8 and parameter.dim() < 2 else state_dtype


def check_blocks(parameter: Tensor, name: str) -> None:
    """Refuse a part of a row on a rank that begins or ends within a block. Local; all ranks get the same result.

    Raises:
        ConfigError: A part begins or ends within a block.
    """
    if not isinstance(parameter, DTensor):
        return
    dim, columns = parameter.dim() - 1, parameter.shape[-1]
    for rank, held in ranges_of_ranks(parameter, dim):
        if held and (held.start % BLOCK or (held.stop % BLOCK and held.stop != columns)):
            raise ConfigError(
                f"StochasticAdamW(state_dtype=torch.uint8): {name} of shape {list(parameter.shape)} is sharded within "
                f"a block of {BLOCK} places. Rank {rank} holds {held.start} to {held.stop - 1} of dim {dim}. Shard it "
                f"over fewer ranks, such that parts are multiples of {BLOCK}, or give it to a group with "
                "state_dtype=torch.bfloat16"
            )


def converted(state: Mapping[str, Any], parameter: Tensor, state_dtype: torch.dtype) -> dict[str, Any]:
    """Convert a saved state of a parameter to its new dtype, and move it to the parameter's device. Local.

    Args:
        state: State with `exp_avg` and `exp_avg_sq` in any dtype, and their scales if they are codes. Scales are whole
            if they are not sharded like the parameter.
        parameter: Parameter of the state; the tensors are DTensors if it is one.
        state_dtype: Dtype, as for `StochasticAdamW`.

    Raises:
        StateError: The dtype cannot represent the saved values.
    """
    dtype, result = dtype_of_states(parameter, state_dtype), dict(state)
    for key in filter(state.__contains__, _KINDS):  # in this order on all ranks
        value = state[key]
        if value.dtype == torch.uint8 != dtype:
            value = _decoded(key, state, parameter).to(dtype)  # bfloat16 holds all
            del result[f"{key}_scale"]
        if torch.promote_types(value.dtype, dtype) != dtype or (value.dtype != dtype == torch.uint8):
            raise StateError(
                f"{key} of a parameter of shape {list(parameter.shape)} was saved as {value.dtype}, and would lose "
                f"digits with state_dtype={state_dtype}. Set StochasticAdamW(state_dtype={value.dtype}), or begin with "
                "only the weights (callbacks.InitialWeights)"
            )
        result[key] = value.to(dtype)
    moved = {key: value.to(parameter.device) for key, value in result.items() if isinstance(value, Tensor)}
    step = {"step": moved["step"].float()} if "step" in moved else {}
    return result | moved | step


def _decoded(key: str, state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    codes, scales = state[key], state[f"{key}_scale"]
    if isinstance(scales, DTensor) or not isinstance(codes, DTensor):
        values = decoded(local(codes), local(scales), _KINDS[key])
    else:
        *rows, columns = local_ranges(parameter)
        of_rows = scales.to(local(codes).device)[tuple(slice(held.start, held.stop) for held in rows)]
        of_places = of_rows.repeat_interleave(BLOCK, -1)[..., columns.start : columns.stop]
        values = decoded(local(codes).unsqueeze(-1), of_places.unsqueeze(-1), _KINDS[key]).squeeze(-1)
    if not isinstance(codes, DTensor):
        return values
    whole = {"shape": codes.shape, "stride": codes.stride()}
    placed = DTensor.from_local(
        values.to(codes.device_mesh.device_type), codes.device_mesh, codes.placements, run_check=False, **whole
    )
    return placed.to(codes.device)
