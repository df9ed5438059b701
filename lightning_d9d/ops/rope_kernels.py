"""Triton kernels of `rope` and `norm_rope`: a program has whole heads of some tokens in registers.

Pairs are in two tiles, one of their first elements and one of their second; elements that are not turned, if there are
any, are in a third.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs
from lightning_d9d.ops.rows_kernels import add_up

_TILE = 4096
"""Elements that a program works on at a time."""
_FORWARD_ELEMENTS = 32
"""A thread's: four loads of 16 bytes in 16 bits."""
_BACKWARD_ELEMENTS = 16
"""It has as many of the gradient, of the next tile and of sums."""


def forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    result: Tensor,
    interleaved: bool,
    *,
    back: bool = False,
    weight: Tensor | None = None,
    eps: float = 0.0,
    zero_centered: bool = False,
) -> None:
    """Fill `result`, which has memory without gaps: `x` normed, if there is a weight, then turned. There are elements.

    `back` turns by the negative angles.
    """
    x, (cos, sin, table_strides) = _dense(x), _tables(x, cos, sin)
    num_tiles, sizes, options = _tiles(x, cos, _FORWARD_ELEMENTS)
    with torch.cuda.device_of(x):
        _forward[(num_tiles,)](
            x,
            None if weight is None else weight.contiguous(),
            cos,
            sin,
            result,
            *sizes,
            *x.stride()[:3],
            *table_strides,
            eps,
            BACK=back,
            ZERO_CENTERED=zero_centered,
            INTERLEAVED=interleaved,
            **options,
        )


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    zero_centered: bool,
    dx: Tensor,
    dweight: Tensor,
) -> None:
    """Fill `dx` and `dweight`, unless they are empty. There are elements."""
    gradient, x, (cos, sin, table_strides) = _dense(gradient), _dense(x), _tables(x, cos, sin)
    num_tiles, sizes, options = _tiles(x, cos, _BACKWARD_ELEMENTS)
    needs_weight = dweight.numel() > 0
    programs = num_programs(num_tiles, x.device, a_processor=2) if needs_weight else num_tiles
    partial = torch.empty(programs, len(weight), dtype=torch.float32, device=x.device) if needs_weight else None
    with torch.cuda.device_of(x):
        _backward[(programs,)](
            gradient,
            x,
            weight.contiguous(),
            cos,
            sin,
            dx if dx.numel() else None,
            partial,
            num_tiles,
            *sizes,
            *gradient.stride()[:3],
            *x.stride()[:3],
            *table_strides,
            eps,
            ZERO_CENTERED=zero_centered,
            INTERLEAVED=interleaved,
            **options,
        )
    if partial is not None:
        add_up(partial, dweight, at_once=True)


def _dense(tensor: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tables(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """With equal strides, and those of rows of the batch and of tokens."""
    cos, sin = _dense(cos), _dense(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))


def _tiles(x: Tensor, cos: Tensor, elements: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """How many tiles there are, the sizes that kernels take, and how large a tile is; `elements` are a thread's."""
    batch, seq, num_heads, dim = x.shape
    pairs = cos.shape[-1]
    half = next_power_of_2(pairs)
    rest = next_power_of_2(dim - 2 * pairs) if dim > 2 * pairs else 0
    width = next_power_of_2(2 * half + rest)
    rows = max(1, _TILE // width)
    heads = min(rows, next_power_of_2(num_heads))
    tokens = rows // heads
    seq_tiles, head_tiles = ceil_div(seq, tokens), ceil_div(num_heads, heads)
    warps = min(32, max(_TILE, width) // (32 * elements))
    options = {"TOKENS": tokens, "HEADS": heads, "HALF": half, "REST": rest, "num_warps": warps}
    return batch * seq_tiles * head_tiles, (seq, num_heads, dim, pairs, seq_tiles, head_tiles), options


@triton.jit
def _places(tile, seq_tiles, head_tiles, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Row of the batch, token and head of each row of a tile."""
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    head = tile % head_tiles * HEADS + row % HEADS
    token = tile // head_tiles % seq_tiles * TOKENS + row // HEADS
    batch = tile // head_tiles // seq_tiles * tl.full([1, 1], 1, tl.int64)
    return batch, token.to(tl.int64), head.to(tl.int64)


@triton.jit
def _load_pairs(ptr, mask, pairs, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(ptr + column, mask=mask & (column < 2 * pairs), other=0)
        first, second = tl.split(tl.reshape(both, [ROWS, HALF, 2]))
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = mask & (column < pairs)
        first = tl.load(ptr + column, mask=mask, other=0)
        second = tl.load(ptr + pairs + column, mask=mask, other=0)
    return first, second


@triton.jit
def _store_pairs(ptr, mask, first, second, pairs, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first, second), [ROWS, 2 * HALF])
        tl.store(ptr + column, both, mask=mask & (column < 2 * pairs))
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = mask & (column < pairs)
        tl.store(ptr + column, first, mask=mask)
        tl.store(ptr + pairs + column, second, mask=mask)


@triton.jit
def _load_weight(ptr, pairs, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    one_row = tl.full([1, 1], 1, tl.int1)
    first, second = _load_pairs(ptr + tl.zeros([1, 1], tl.int32), one_row, pairs, INTERLEAVED, 1, HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if ZERO_CENTERED:
        first += 1
        second += 1
    return first, second


@triton.jit
def _load_rest_weight(ptr, column, dim, ZERO_CENTERED: tl.constexpr):
    weight = tl.load(ptr + column, mask=column < dim, other=0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1
    return weight


@triton.jit
def _load_angles(cos_ptr, sin_ptr, offset, mask, pairs, HALF: tl.constexpr):
    column = tl.arange(0, HALF)[None, :]
    mask = mask & (column < pairs)
    cos = tl.load(cos_ptr + offset + column, mask=mask, other=0)
    sin = tl.load(sin_ptr + offset + column, mask=mask, other=0)
    return cos, sin


@triton.jit
def _forward(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    result_ptr,
    seq,
    num_heads,
    dim,
    pairs,
    seq_tiles,
    head_tiles,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    table_batch_stride,
    table_token_stride,
    eps,
    BACK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * HEADS
    batch, token, head = _places(tl.program_id(0), seq_tiles, head_tiles, TOKENS, HEADS)
    mask = (token < seq) & (head < num_heads)
    x_ptr += batch * x_batch_stride + token * x_token_stride + head * x_head_stride
    result_ptr += ((batch * seq + token) * num_heads + head) * dim
    first, second = _load_pairs(x_ptr, mask, pairs, INTERLEAVED, ROWS, HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
    column = 2 * pairs + tl.arange(0, max(REST, 1))[None, :]
    if REST > 0:
        rest = tl.load(x_ptr + column, mask=mask & (column < dim), other=0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares[:, None] / dim + eps)
        first_weight, second_weight = _load_weight(weight_ptr, pairs, ZERO_CENTERED, INTERLEAVED, HALF)
        first *= scale * first_weight
        second *= scale * second_weight
        if REST > 0:
            rest *= scale * _load_rest_weight(weight_ptr, column, dim, ZERO_CENTERED)
    table_offset = batch * table_batch_stride + token * table_token_stride
    cos, sin = _load_angles(cos_ptr, sin_ptr, table_offset, token < seq, pairs, HALF)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if BACK:
        sin = -sin
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    _store_pairs(result_ptr, mask, turned_first, turned_second, pairs, INTERLEAVED, ROWS, HALF)
    if REST > 0:
        tl.store(result_ptr + column, rest, mask=mask & (column < dim))


@triton.jit
def _backward(
    gradient_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    partial_ptr,
    num_tiles,
    seq,
    num_heads,
    dim,
    pairs,
    seq_tiles,
    head_tiles,
    gradient_batch_stride,
    gradient_token_stride,
    gradient_head_stride,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    table_batch_stride,
    table_token_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * HEADS
    first_weight, second_weight = _load_weight(weight_ptr, pairs, ZERO_CENTERED, INTERLEAVED, HALF)
    first_sum = tl.zeros([ROWS, HALF], tl.float32)
    second_sum = tl.zeros([ROWS, HALF], tl.float32)
    column = 2 * pairs + tl.arange(0, max(REST, 1))[None, :]
    if REST > 0:
        rest_weight = _load_rest_weight(weight_ptr, column, dim, ZERO_CENTERED)
        rest_sum = tl.zeros([ROWS, REST], tl.float32)
    batch, token, head = _places(tl.program_id(0), seq_tiles, head_tiles, TOKENS, HEADS)
    mask = (token < seq) & (head < num_heads)
    x_row = x_ptr + batch * x_batch_stride + token * x_token_stride + head * x_head_stride
    gradient_row = gradient_ptr + batch * gradient_batch_stride
    gradient_row += token * gradient_token_stride + head * gradient_head_stride
    dx_offset = ((batch * seq + token) * num_heads + head) * dim
    table_offset = batch * table_batch_stride + token * table_token_stride
    raw_cos, raw_sin = _load_angles(cos_ptr, sin_ptr, table_offset, token < seq, pairs, HALF)
    raw_first, raw_second = _load_pairs(x_row, mask, pairs, INTERLEAVED, ROWS, HALF)
    turned_first, turned_second = _load_pairs(gradient_row, mask, pairs, INTERLEAVED, ROWS, HALF)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The next tile is on its way while this one is computed: sums over rows make threads wait.
        next_tile = tl.full([1, 1], 0, tl.int32) + tile + tl.num_programs(0)
        batch, token, head = _places(next_tile, seq_tiles, head_tiles, TOKENS, HEADS)
        is_token = (next_tile < num_tiles) & (token < seq)
        next_mask = is_token & (head < num_heads)
        next_x = x_ptr + batch * x_batch_stride + token * x_token_stride + head * x_head_stride
        next_gradient = gradient_ptr + batch * gradient_batch_stride
        next_gradient += token * gradient_token_stride + head * gradient_head_stride
        next_dx_offset = ((batch * seq + token) * num_heads + head) * dim
        table_offset = batch * table_batch_stride + token * table_token_stride
        next_cos, next_sin = _load_angles(cos_ptr, sin_ptr, table_offset, is_token, pairs, HALF)
        next_first, next_second = _load_pairs(next_x, next_mask, pairs, INTERLEAVED, ROWS, HALF)
        next_turned_first, next_turned_second = _load_pairs(next_gradient, next_mask, pairs, INTERLEAVED, ROWS, HALF)
        cos, sin = raw_cos.to(tl.float32), raw_sin.to(tl.float32)
        first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
        first_gradient = turned_first.to(tl.float32) * cos + turned_second.to(tl.float32) * sin
        second_gradient = turned_second.to(tl.float32) * cos - turned_first.to(tl.float32) * sin
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            rest = tl.load(x_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
            rest_gradient = tl.load(gradient_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares[:, None] / dim + eps)
        first *= scale
        second *= scale
        if partial_ptr is not None:
            first_sum += first_gradient * first
            second_sum += second_gradient * second
        if REST > 0:
            rest *= scale
            rest_sum += rest_gradient * rest
        if dx_ptr is not None:
            first_gradient *= first_weight
            second_gradient *= second_weight
            product = tl.sum(first_gradient * first + second_gradient * second, axis=1)
            if REST > 0:
                rest_gradient *= rest_weight
                product += tl.sum(rest_gradient * rest, axis=1)
            mean = product[:, None] / dim
            dx_row = dx_ptr + dx_offset
            dfirst = (first_gradient - first * mean) * scale
            dsecond = (second_gradient - second * mean) * scale
            _store_pairs(dx_row, mask, dfirst, dsecond, pairs, INTERLEAVED, ROWS, HALF)
            if REST > 0:
                tl.store(dx_row + column, (rest_gradient - rest * mean) * scale, mask=mask & (column < dim))
        mask, x_row, gradient_row, dx_offset = next_mask, next_x, next_gradient, next_dx_offset
        raw_cos, raw_sin, raw_first, raw_second = next_cos, next_sin, next_first, next_second
        turned_first, turned_second = next_turned_first, next_turned_second
    if partial_ptr is not None:
        partial_row = partial_ptr + tl.program_id(0) * tl.full([1, 1], 1, tl.int64) * dim
        first_total = tl.sum(first_sum, axis=0)[None, :]
        second_total = tl.sum(second_sum, axis=0)[None, :]
        one_row = tl.full([1, 1], 1, tl.int1)
        _store_pairs(partial_row, one_row, first_total, second_total, pairs, INTERLEAVED, 1, HALF)
        if REST > 0:
            tl.store(partial_row + column, tl.sum(rest_sum, axis=0)[None, :], mask=column < dim)
