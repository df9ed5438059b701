"""Triton kernels of `rope` and `norm_rope`: a program has whole heads of some tokens in registers.

Pairs are in two tiles, one of their first elements and one of their second; elements that are not turned are in a
third, which is one column and masked where all are.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.rows import num_programs

_TILE = 4096
"""Elements that a program works on at a time; 16 a thread, so two loads of 16 bytes in 16 bits."""


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
    num_tiles, sizes, options = _tiles(x, cos)
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
    num_tiles, sizes, options = _tiles(x, cos)
    needs_weight = dweight.numel() > 0
    programs = num_programs(num_tiles, x.device) if needs_weight else num_tiles
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
        dweight.copy_(partial.sum(0))


def _dense(tensor: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tables(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """With equal strides, and those of rows of the batch and of tokens."""
    cos, sin = _dense(cos), _dense(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))


def _tiles(x: Tensor, cos: Tensor) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """How many tiles there are, the sizes that kernels take, and how large a tile is."""
    batch, seq, num_heads, dim = x.shape
    pairs = cos.shape[-1]
    half = triton.next_power_of_2(pairs)
    rest = triton.next_power_of_2(max(1, dim - 2 * pairs))
    width = triton.next_power_of_2(2 * half + (rest if dim > 2 * pairs else 0))
    rows = max(1, _TILE // width)
    heads = min(rows, triton.next_power_of_2(num_heads))
    tokens = rows // heads
    seq_tiles, head_tiles = triton.cdiv(seq, tokens), triton.cdiv(num_heads, heads)
    warps = min(32, max(8, width // 512))
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
        both = tl.load(ptr + column, mask=mask & (column < 2 * pairs), other=0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [ROWS, HALF, 2]))
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = mask & (column < pairs)
        first = tl.load(ptr + column, mask=mask, other=0).to(tl.float32)
        second = tl.load(ptr + pairs + column, mask=mask, other=0).to(tl.float32)
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
def _load_angles(cos_ptr, sin_ptr, offset, mask, pairs, HALF: tl.constexpr):
    column = tl.arange(0, HALF)[None, :]
    mask = mask & (column < pairs)
    cos = tl.load(cos_ptr + offset + column, mask=mask, other=0).to(tl.float32)
    sin = tl.load(sin_ptr + offset + column, mask=mask, other=0).to(tl.float32)
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
    column = 2 * pairs + tl.arange(0, REST)[None, :]
    rest = tl.load(x_ptr + column, mask=mask & (column < dim), other=0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares[:, None] / dim + eps)
        one_row = tl.full([1, 1], 1, tl.int1)
        weight_ptr += tl.zeros([1, 1], tl.int32)
        first_weight, second_weight = _load_pairs(weight_ptr, one_row, pairs, INTERLEAVED, 1, HALF)
        if ZERO_CENTERED:
            first_weight += 1
            second_weight += 1
        first *= scale * first_weight
        second *= scale * second_weight
        rest_weight = tl.load(weight_ptr + column, mask=column < dim, other=0).to(tl.float32)
        if ZERO_CENTERED:
            rest_weight += 1
        rest *= scale * rest_weight
    table_offset = batch * table_batch_stride + token * table_token_stride
    cos, sin = _load_angles(cos_ptr, sin_ptr, table_offset, token < seq, pairs, HALF)
    if BACK:
        sin = -sin
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    _store_pairs(result_ptr, mask, turned_first, turned_second, pairs, INTERLEAVED, ROWS, HALF)
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
    one_row = tl.full([1, 1], 1, tl.int1)
    weight_ptr += tl.zeros([1, 1], tl.int32)
    first_weight, second_weight = _load_pairs(weight_ptr, one_row, pairs, INTERLEAVED, 1, HALF)
    if ZERO_CENTERED:
        first_weight += 1
        second_weight += 1
    first_sum = tl.zeros([ROWS, HALF], tl.float32)
    second_sum = tl.zeros([ROWS, HALF], tl.float32)
    column = 2 * pairs + tl.arange(0, REST)[None, :]
    rest_weight = tl.load(weight_ptr + column, mask=column < dim, other=0).to(tl.float32)
    if ZERO_CENTERED:
        rest_weight += 1
    rest_sum = tl.zeros([ROWS, REST], tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        batch, token, head = _places(tile, seq_tiles, head_tiles, TOKENS, HEADS)
        mask = (token < seq) & (head < num_heads)
        x_row = x_ptr + batch * x_batch_stride + token * x_token_stride + head * x_head_stride
        gradient_row = gradient_ptr + batch * gradient_batch_stride
        gradient_row += token * gradient_token_stride + head * gradient_head_stride
        first, second = _load_pairs(x_row, mask, pairs, INTERLEAVED, ROWS, HALF)
        turned_first, turned_second = _load_pairs(gradient_row, mask, pairs, INTERLEAVED, ROWS, HALF)
        table_offset = batch * table_batch_stride + token * table_token_stride
        cos, sin = _load_angles(cos_ptr, sin_ptr, table_offset, token < seq, pairs, HALF)
        first_gradient = turned_first * cos + turned_second * sin
        second_gradient = turned_second * cos - turned_first * sin
        squares = tl.sum(first * first + second * second, axis=1)
        rest = tl.load(x_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
        rest_gradient = tl.load(gradient_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares[:, None] / dim + eps)
        first *= scale
        second *= scale
        rest *= scale
        if partial_ptr is not None:
            first_sum += first_gradient * first
            second_sum += second_gradient * second
            rest_sum += rest_gradient * rest
        if dx_ptr is not None:
            first_gradient *= first_weight
            second_gradient *= second_weight
            product = tl.sum(first_gradient * first + second_gradient * second, axis=1)
            rest_gradient *= rest_weight
            product += tl.sum(rest_gradient * rest, axis=1)
            mean = product[:, None] / dim
            dx_row = dx_ptr + ((batch * seq + token) * num_heads + head) * dim
            dfirst = (first_gradient - first * mean) * scale
            dsecond = (second_gradient - second * mean) * scale
            _store_pairs(dx_row, mask, dfirst, dsecond, pairs, INTERLEAVED, ROWS, HALF)
            drest = (rest_gradient - rest * mean) * scale
            tl.store(dx_row + column, drest, mask=mask & (column < dim))
    if partial_ptr is not None:
        partial_row = partial_ptr + tl.program_id(0) * tl.full([1, 1], 1, tl.int64) * dim
        first_total = tl.sum(first_sum, axis=0)[None, :]
        second_total = tl.sum(second_sum, axis=0)[None, :]
        _store_pairs(partial_row, one_row, first_total, second_total, pairs, INTERLEAVED, 1, HALF)
        tl.store(partial_row + column, tl.sum(rest_sum, axis=0)[None, :], mask=column < dim)
