"""Triton kernels of `rope` and `norm_rope`: a program holds whole heads of some tokens in registers.

A launch is for queries and keys, or for a single tensor: the first programs process queries, the others keys. A tile
has some heads of some tokens in one row of the batch. Both numbers are powers of two; the number of heads divides the
tensor's. So all tiles have the same layout, and only the beginning of each has to be computed.

Pairs are in two blocks, one of their first elements and one of their second. A third block has the elements that are
not rotated, if there are any.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from operator import mul
from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.rows import add_up
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs

_TILE = 4096
"""Elements that a program processes at a time."""
_FORWARD_ELEMENTS = 32
"""Elements of a thread: four loads of 16 bytes in 16 bits."""
_BACKWARD_ELEMENTS = 16
"""Elements of a thread, which has equally many of the gradient, of the next tile and of sums."""


def forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    results: tuple[Tensor, Tensor],
    interleaved: bool,
    *,
    back: bool = False,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
    zero_centered: bool = False,
) -> None:
    """Fill the contiguous `results`: the inputs are normed, if there are weights, then rotated.

    Queries and keys, if there are any, have one dtype, and so do their weights. `back` rotates by the negative angles.
    """
    q, k, (cos, sin, table_strides) = _dense(q), _dense(k), _tables(cos, sin)
    q_tiles, k_tiles, options = _tiles(q, k, cos, _FORWARD_ELEMENTS)
    options["WIDE"] = _is_wide(q, k, cos)
    if not q_tiles + k_tiles:
        return
    q_weight, k_weight = weights
    with torch.cuda.device_of(q):
        _forward[(q_tiles + k_tiles,)](
            q,
            k,
            None if q_weight is None else q_weight.contiguous(),
            None if k_weight is None else k_weight.contiguous(),
            cos,
            sin,
            results[0],
            None if k is None else results[1],
            q_tiles,
            *_sizes(q, k, cos),
            *_strides(q),
            *_strides(k),
            *table_strides,
            eps,
            BACK=back,
            ZERO_CENTERED=zero_centered,
            INTERLEAVED=interleaved,
            **options,
        )


def backward(
    dq_turned: Tensor,
    dk_turned: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    zero_centered: bool,
    inputs: tuple[Tensor, Tensor] | None,
    weights: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill gradients of queries and keys, `inputs`, and those of their `weights`, if there are any.

    The arguments are those of `forward`, and the gradients of its results.
    """
    q, k, (cos, sin, table_strides) = _dense(q), _dense(k), _tables(cos, sin)
    dq_turned, dk_turned = _dense(dq_turned), _dense(dk_turned)
    q_tiles, k_tiles, options = _tiles(q, k, cos, _BACKWARD_ELEMENTS)
    options["WIDE"] = _is_wide(q, k, cos, dq_turned, dk_turned)
    q_programs, k_programs = q_tiles, k_tiles
    partial = None
    if weights is not None:
        q_programs, k_programs = _shared_programs(q_tiles, k_tiles, q.device)
        partial = torch.empty(q_programs + k_programs, len(q_weight), dtype=torch.float32, device=q.device)
    if q_tiles + k_tiles:
        with torch.cuda.device_of(q):
            _backward[(q_programs + k_programs,)](
                dq_turned,
                dk_turned,
                q,
                k,
                q_weight.contiguous(),
                None if k_weight is None else k_weight.contiguous(),
                cos,
                sin,
                None if inputs is None else inputs[0],
                None if inputs is None or k is None else inputs[1],
                partial,
                q_programs,
                q_tiles,
                None if k is None else k_tiles,
                *_sizes(q, k, cos),
                *_strides(dq_turned),
                *_strides(dk_turned),
                *_strides(q),
                *_strides(k),
                *table_strides,
                eps,
                ZERO_CENTERED=zero_centered,
                INTERLEAVED=interleaved,
                **options,
            )
    if partial is not None and weights is not None:
        add_up(partial, weights[0], None if k is None else weights[1], num_first=q_programs, at_once=True)


@overload
def _dense(tensor: Tensor) -> Tensor: ...


@overload
def _dense(tensor: Tensor | None) -> Tensor | None: ...


def _dense(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor with the elements of a head side by side."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return both tables with equal strides, and the strides of rows of the batch and of tokens."""
    cos, sin = _dense(cos), _dense(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))


def _tiles(q: Tensor, k: Tensor | None, cos: Tensor, elements: int) -> tuple[int, int, dict[str, Any]]:
    """Return the number of tiles of queries and keys, and the kernels' sizes; `elements` are a thread's."""
    dim, pairs = q.shape[-1], cos.shape[-1]
    half = next_power_of_2(pairs)
    rest = next_power_of_2(dim - 2 * pairs) if dim > 2 * pairs else 0
    width = next_power_of_2(2 * half + rest)
    rows = max(1, _TILE // width)
    warps = min(32, max(_TILE, width) // (32 * elements))
    q_tiles, q_heads = _num_tiles(q, rows)
    k_tiles, k_heads = (0, 1) if k is None else _num_tiles(k, rows)
    sizes = {"ROWS": rows, "Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": half, "REST": rest}
    return q_tiles, k_tiles, {**sizes, "num_warps": warps}


def _num_tiles(x: Tensor, rows: int) -> tuple[int, int]:
    """Return the number of tiles of `rows` rows that a tensor has, and the heads of each."""
    batch, seq, num_heads, _ = x.shape
    heads = min(rows, max(num_heads & -num_heads, 1))
    return batch * ceil_div(seq, rows // heads) * (num_heads // heads), heads


def _is_wide(*tensors: Tensor | None) -> bool:
    """Return True if offsets in these tensors, or contiguous ones of their shapes, need 64 bits, which are slower."""
    most = max(max(x.numel(), sum(map(mul, x.shape, x.stride()))) for x in tensors if x is not None)
    return most >= 2**31


def _shared_programs(q_tiles: int, k_tiles: int, device: torch.device) -> tuple[int, int]:
    """Return the numbers of programs for queries and keys: in proportion to tiles, at least one if there are any."""
    num_tiles = q_tiles + k_tiles
    programs = num_programs(num_tiles, device, a_processor=2)
    of_keys = round(programs * k_tiles / max(num_tiles, 1))
    of_keys = min(max(of_keys, min(k_tiles, 1)), programs - min(q_tiles, 1))
    return programs - of_keys, of_keys


def _sizes(q: Tensor, k: Tensor | None, cos: Tensor) -> tuple[int | None, ...]:
    """Return the numbers of tokens of a row, of heads of queries and of keys, the width of a head, and its pairs."""
    _, seq, heads, dim = q.shape
    return seq, heads, None if k is None else k.shape[2], dim, cos.shape[-1]


def _strides(x: Tensor | None) -> tuple[int | None, ...]:
    """Return the strides of rows of the batch, tokens and heads."""
    return (None, None, None) if x is None else x.stride()[:3]


@triton.jit
def _place(tile, seq, heads, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return a tile's row of the batch, and its first token and head there."""
    head_tiles, seq_tiles = heads // HEADS, tl.cdiv(seq, TOKENS)
    batch = tile // head_tiles // seq_tiles
    token = tile // head_tiles % seq_tiles * TOKENS
    head = tile % head_tiles * HEADS
    if WIDE:
        batch, token, head = batch.to(tl.int64), token.to(tl.int64), head.to(tl.int64)
    return batch, token, head


@triton.jit
def _first(place, strides):
    batch, token, head = place
    return batch * strides[0] + token * strides[1] + head * strides[2]


@triton.jit
def _rows(strides, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return the offsets of a tile's rows from its first, which are the same in every tile."""
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    if WIDE:
        row = row.to(tl.int64)
    return row // HEADS * strides[1] + row % HEADS * strides[2]


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
def _load_angles(cos_ptr, sin_ptr, mask, pairs, HALF: tl.constexpr):
    column = tl.arange(0, HALF)[None, :]
    mask = mask & (column < pairs)
    return tl.load(cos_ptr + column, mask=mask, other=0), tl.load(sin_ptr + column, mask=mask, other=0)


@jit
def _forward(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_result_ptr,
    k_result_ptr,
    q_tiles,
    seq,
    q_heads,
    k_heads,
    dim,
    pairs,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    table_batch_stride,
    table_token_stride,
    eps,
    BACK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    tile = tl.program_id(0)
    q_strides = q_batch_stride, q_token_stride, q_head_stride
    k_strides = k_batch_stride, k_token_stride, k_head_stride
    tables = cos_ptr, sin_ptr, (table_batch_stride, table_token_stride, 0)
    sizes = seq, dim, pairs, eps
    if tile < q_tiles:
        q = q_ptr, q_weight_ptr, q_result_ptr, q_heads, q_strides
        _forward_tile(
            tile, q, tables, sizes, BACK, ZERO_CENTERED, INTERLEAVED, WIDE, ROWS // Q_HEADS, Q_HEADS, HALF, REST
        )
    elif k_ptr is not None:
        k = k_ptr, k_weight_ptr, k_result_ptr, k_heads, k_strides
        k_tile = tile - q_tiles
        _forward_tile(
            k_tile, k, tables, sizes, BACK, ZERO_CENTERED, INTERLEAVED, WIDE, ROWS // K_HEADS, K_HEADS, HALF, REST
        )


@triton.jit
def _forward_tile(
    tile,
    tensor,
    tables,
    sizes,
    BACK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * HEADS
    x_ptr, weight_ptr, result_ptr, heads, strides = tensor
    cos_ptr, sin_ptr, table_strides = tables
    seq, dim, pairs, eps = sizes
    place = _place(tile, seq, heads, WIDE, TOKENS, HEADS)
    batch, token, head = place
    mask = token + _rows((0, 1, 0), WIDE, TOKENS, HEADS) < seq
    x_row = x_ptr + _first(place, strides) + _rows(strides, WIDE, TOKENS, HEADS)
    result_row = result_ptr + ((batch * seq + token) * heads + head) * dim
    result_row += _rows((0, heads * dim, dim), WIDE, TOKENS, HEADS)
    first, second = _load_pairs(x_row, mask, pairs, INTERLEAVED, ROWS, HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
    column = 2 * pairs + tl.arange(0, max(REST, 1))[None, :]
    if REST > 0:
        rest = tl.load(x_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
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
    angles = _first(place, table_strides) + _rows(table_strides, WIDE, TOKENS, HEADS)
    cos, sin = _load_angles(cos_ptr + angles, sin_ptr + angles, mask, pairs, HALF)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if BACK:
        sin = -sin
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    _store_pairs(result_row, mask, turned_first, turned_second, pairs, INTERLEAVED, ROWS, HALF)
    if REST > 0:
        tl.store(result_row + column, rest, mask=mask & (column < dim))


@jit
def _backward(
    dq_turned_ptr,
    dk_turned_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dk_ptr,
    partial_ptr,
    q_programs,
    q_tiles,
    k_tiles,
    seq,
    q_heads,
    k_heads,
    dim,
    pairs,
    dq_batch_stride,
    dq_token_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    table_batch_stride,
    table_token_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    program = tl.program_id(0)
    tables = cos_ptr, sin_ptr, (table_batch_stride, table_token_stride, 0)
    sizes = seq, dim, pairs, eps
    if program < q_programs:
        q_strides = q_batch_stride, q_token_stride, q_head_stride
        dq_strides = dq_batch_stride, dq_token_stride, dq_head_stride
        q = q_ptr, dq_turned_ptr, q_weight_ptr, dq_ptr, q_heads, q_strides, dq_strides
        tiles = program, q_tiles, q_programs
        _backward_tiles(
            tiles, q, tables, partial_ptr, sizes, ZERO_CENTERED, INTERLEAVED, WIDE, ROWS // Q_HEADS, Q_HEADS, HALF, REST
        )
    elif k_ptr is not None:
        k_strides = k_batch_stride, k_token_stride, k_head_stride
        dk_strides = dk_batch_stride, dk_token_stride, dk_head_stride
        k = k_ptr, dk_turned_ptr, k_weight_ptr, dk_ptr, k_heads, k_strides, dk_strides
        tiles = program - q_programs, k_tiles, tl.num_programs(0) - q_programs
        _backward_tiles(
            tiles, k, tables, partial_ptr, sizes, ZERO_CENTERED, INTERLEAVED, WIDE, ROWS // K_HEADS, K_HEADS, HALF, REST
        )


@triton.jit
def _load(
    tile,
    num_tiles,
    rows,
    tensor,
    tables,
    sizes,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Load a tile: which rows exist, the places of the rows and of their gradients, and their values."""
    _x_ptr, _gradient_ptr, _weight_ptr, _dx_ptr, heads, strides, gradient_strides = tensor
    row_token, x_rows, gradient_rows, angle_rows = rows
    cos_ptr, sin_ptr, table_strides = tables
    seq, dim, pairs, _eps = sizes
    place = _place(tile, seq, heads, WIDE, TOKENS, HEADS)
    batch, token, head = place
    mask = token + row_token < tl.where(tile < num_tiles, seq, 0)
    x_row = x_rows + _first(place, strides)
    gradient_row = gradient_rows + _first(place, gradient_strides)
    dx_offset = ((batch * seq + token) * heads + head) * dim
    angles = angle_rows + _first(place, table_strides)
    cos, sin = _load_angles(cos_ptr + angles, sin_ptr + angles, mask, pairs, HALF)
    first, second = _load_pairs(x_row, mask, pairs, INTERLEAVED, TOKENS * HEADS, HALF)
    turned_first, turned_second = _load_pairs(gradient_row, mask, pairs, INTERLEAVED, TOKENS * HEADS, HALF)
    return mask, x_row, gradient_row, dx_offset, cos, sin, first, second, turned_first, turned_second


@triton.jit
def _backward_tiles(
    tiles, tensor, tables, partial_ptr, sizes,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TOKENS * HEADS
    first_tile, num_tiles, step = tiles
    x_ptr, gradient_ptr, weight_ptr, dx_ptr, heads, strides, gradient_strides = tensor
    _cos_ptr, _sin_ptr, table_strides = tables
    _seq, dim, pairs, eps = sizes
    first_weight, second_weight = _load_weight(weight_ptr, pairs, ZERO_CENTERED, INTERLEAVED, HALF)
    first_sum = tl.zeros([ROWS, HALF], tl.float32)
    second_sum = tl.zeros([ROWS, HALF], tl.float32)
    column = 2 * pairs + tl.arange(0, max(REST, 1))[None, :]
    if REST > 0:
        rest_weight = _load_rest_weight(weight_ptr, column, dim, ZERO_CENTERED)
        rest_sum = tl.zeros([ROWS, REST], tl.float32)
    inverse = 1.0 / dim
    row_token = _rows((0, 1, 0), WIDE, TOKENS, HEADS)
    x_rows = x_ptr + _rows(strides, WIDE, TOKENS, HEADS)
    gradient_rows = gradient_ptr + _rows(gradient_strides, WIDE, TOKENS, HEADS)
    rows = row_token, x_rows, gradient_rows, _rows(table_strides, WIDE, TOKENS, HEADS)
    dx_rows = _rows((0, heads * dim, dim), WIDE, TOKENS, HEADS)
    mask, x_row, gradient_row, dx_offset, raw_cos, raw_sin, raw_first, raw_second, turned_first, turned_second = _load(
        first_tile, num_tiles, rows, tensor, tables, sizes, INTERLEAVED, WIDE, TOKENS, HEADS, HALF
    )
    for tile in range(first_tile, num_tiles, step):
        # The next tile is loaded while this one is computed: sums over rows make threads wait.
        following = _load(tile + step, num_tiles, rows, tensor, tables, sizes, INTERLEAVED, WIDE, TOKENS, HEADS, HALF)
        cos, sin = raw_cos.to(tl.float32), raw_sin.to(tl.float32)
        first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
        first_gradient = turned_first.to(tl.float32) * cos + turned_second.to(tl.float32) * sin
        second_gradient = turned_second.to(tl.float32) * cos - turned_first.to(tl.float32) * sin
        squares = tl.sum(first * first + second * second, axis=1)
        weighted_first, weighted_second = first_gradient * first_weight, second_gradient * second_weight
        product = tl.sum(weighted_first * first + weighted_second * second, axis=1)
        if REST > 0:
            rest = tl.load(x_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
            rest_gradient = tl.load(gradient_row + column, mask=mask & (column < dim), other=0).to(tl.float32)
            weighted_rest = rest_gradient * rest_weight
            squares += tl.sum(rest * rest, axis=1)
            product += tl.sum(weighted_rest * rest, axis=1)
        # without eps it is infinite for rows that do not exist, and the sums would be NaN
        scale = tl.where(mask, tl.rsqrt(squares[:, None] * inverse + eps), 0)
        first *= scale
        second *= scale
        if REST > 0:
            rest *= scale
        if partial_ptr is not None:
            first_sum += first_gradient * first
            second_sum += second_gradient * second
            if REST > 0:
                rest_sum += rest_gradient * rest
        if dx_ptr is not None:
            mean = product[:, None] * scale * inverse
            dx_row = dx_ptr + dx_offset + dx_rows
            dfirst = (weighted_first - first * mean) * scale
            dsecond = (weighted_second - second * mean) * scale
            _store_pairs(dx_row, mask, dfirst, dsecond, pairs, INTERLEAVED, ROWS, HALF)
            if REST > 0:
                tl.store(dx_row + column, (weighted_rest - rest * mean) * scale, mask=mask & (column < dim))
        mask, x_row, gradient_row, dx_offset, raw_cos, raw_sin, raw_first, raw_second, turned_first, turned_second = (
            following
        )
    if partial_ptr is not None:
        partial_row = partial_ptr + tl.program_id(0) * tl.full([1, 1], 1, tl.int64) * dim
        first_total = tl.sum(first_sum, axis=0)[None, :]
        second_total = tl.sum(second_sum, axis=0)[None, :]
        one_row = tl.full([1, 1], 1, tl.int1)
        _store_pairs(partial_row, one_row, first_total, second_total, pairs, INTERLEAVED, 1, HALF)
        if REST > 0:
            tl.store(partial_row + column, tl.sum(rest_sum, axis=0)[None, :], mask=column < dim)
