"""Triton kernels of `swiglu`: a program has a tile of some rows and columns, the next program the tile to the right."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, rows_of

_TILE = 1024
"""Elements of a tile, for 4 warps: 8 for each thread, so a load of 16 bytes of each argument in 16 bits. With twice as
many there are fewer programs at a time, and programs that process all columns for the weights' gradient take 20 %
longer."""
_MAX_COLUMNS = 256
"""Maximum number of columns of a tile, so that few are masked if the width is not a power of 2, such as 768."""


def forward(gate: Tensor, up: Tensor | None, weights: Tensor | None, result: Tensor) -> None:
    """Fill `result`, which is contiguous and not empty."""
    gate, up = _halves(gate, up)
    num_rows, inner = gate.shape
    rows, columns = _tile(inner)
    num_parts = ceil_div(inner, columns)
    with torch.cuda.device_of(result):
        _forward[(ceil_div(num_rows, rows) * num_parts,)](
            gate,
            up,
            None if weights is None else weights.reshape(-1).contiguous(),
            result,
            num_rows,
            inner,
            num_parts,
            gate.stride(0),
            up.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    dweights: Tensor,
) -> None:
    """Fill the gradients that are not empty; `dgate` of a fused `gate` has both halves."""
    is_fused = up is None
    dy = rows_of(dy)
    gate, up = _halves(gate, up)
    num_rows, inner = gate.shape
    rows, columns = _tile(inner)
    if is_fused and dgate.numel():
        dgate, dup = rows_of(dgate).chunk(2, dim=1)
    needs_weights = dweights.numel() > 0
    # With a gradient of weights, a program has all columns of its rows, one tile after the other.
    num_parts = 1 if needs_weights else ceil_div(inner, columns)
    with torch.cuda.device_of(dy):
        _backward[(ceil_div(num_rows, rows) * num_parts,)](
            dy,
            gate,
            up,
            None if weights is None else weights.reshape(-1).contiguous(),
            dgate if dgate.numel() else None,
            dup if dup.numel() else None,
            dweights if needs_weights else None,
            num_rows,
            inner,
            num_parts,
            dy.stride(0),
            gate.stride(0),
            up.stride(0),
            2 * inner if is_fused else inner,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up as rows."""
    if up is not None:
        return rows_of(gate), rows_of(up)
    gate, up = rows_of(gate).chunk(2, dim=1)
    return gate, up


def _tile(inner: int) -> tuple[int, int]:
    columns = min(_MAX_COLUMNS, next_power_of_2(inner))
    return _TILE // columns, columns


@jit
def _forward(
    gate_ptr,
    up_ptr,
    weights_ptr,
    result_ptr,
    num_rows,
    inner,
    num_parts,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // num_parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % num_parts * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows) & (column < inner)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    if weights_ptr is not None:
        result *= tl.load(weights_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    tl.store(result_ptr + row * inner + column, result, mask=mask)


@jit
def _backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    weights_ptr,
    dgate_ptr,
    dup_ptr,
    dweights_ptr,
    num_rows,
    inner,
    num_parts,
    dy_stride,
    gate_stride,
    up_stride,
    gradient_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // num_parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    weights = tl.full([ROWS, 1], 1.0, tl.float32)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    for start in range(tl.program_id(0) % num_parts * COLUMNS, inner, num_parts * COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = (row < num_rows) & (column < inner)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if dweights_ptr is not None:
            products += dy * silu * up
        dy *= weights
        if dgate_ptr is not None:
            dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
            tl.store(dgate_ptr + row * gradient_stride + column, dgate, mask=mask)
        if dup_ptr is not None:
            tl.store(dup_ptr + row * gradient_stride + column, dy * silu, mask=mask)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + row, tl.sum(products, axis=1)[:, None], mask=row < num_rows)
