"""Triton kernels of `moe_permute` and `moe_unpermute`.

[Note: sorting] A program processes a block of copies and gives each copy its number among those of its expert in the
block. It counts the copies of each expert (`_rank`). Each copy then adds the first row of its expert and block to that
number. For this every program sums the counts of all blocks before its own (`_finish`), which is faster than a third
launch. All sums are of integers, so their order does not matter.

[Note: copying] A program reads rows of some tokens once and writes all their copies, because tokens are adjacent and
copies are not. A kernel over copies would read each token `top_k` times. The sum reads the copies, and writes once.
Copies and products with rows of the same tokens may both be needed. A program then holds all rows of one token while it
writes the copies.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs

NUMBERS = ["num_tokens", "num_rows"]
"""Arguments that differ from step to step if tokens come from other ranks: they do not recompile kernels."""
_NUM_WARPS = 4
_TILE_BYTES = 4096
"""Bytes of a program's tile: two accesses of 16 bytes for each thread, times the number of copies in flight."""
_DOT_TILE_BYTES = 2048
"""Bytes of a tile for products of rows, which read two tiles at a time."""
_BOTH_TILE_BYTES = 16384
"""Bytes of a tile of copies and products at once: all rows of a token."""
_STREAMED_BYTES = 2**28
"""Smallest size, several times that of caches, for which copies are written past the cache: they would be evicted
before the next product reads them. Smaller ones stay in the cache.
"""
_STEP = 64
"""Number of copies that are ranked at a time. With a larger number, each copy is compared with more others."""
_AT_ONCE = 32
"""Number of these with which a copy is compared at once."""
_MOST_STEPS = 64
"""Maximum number of steps of a block: at the end its copies are in a program's registers."""
_MOST_BLOCKS = 256
"""Maximum number of blocks, if possible. Fewer blocks need more steps, and more blocks have more counts to sum."""
_MOST_COUNTS = 65536
"""Maximum number of counts that a program sums over all blocks: with more than 256 experts there are fewer blocks."""
_BLOCKS_TO_FINISH = 2
"""Number of blocks that a program finishes. With a larger number, fewer programs sum the counts, and each waits
longer."""
_SOURCES = 1024
"""Number of copies for whose rows a program writes the token."""
_COUNTS_AT_ONCE = 8192
"""Number of counts of all experts and some blocks at a time: eight loads of 16 bytes for each thread."""


def sort(indices: Tensor, multiple: int, places: Tensor, counts: Tensor, offsets: Tensor) -> None:
    """Write the last three tensors; see [Note: sorting]."""
    indices, num_experts, num_copies = indices.contiguous(), len(counts), indices.numel()
    if num_copies == 0 or num_experts == 0:
        counts.zero_()
        offsets.zero_()
        return
    experts = max(32, next_power_of_2(num_experts))
    most_blocks = max(1, min(_MOST_BLOCKS, _MOST_COUNTS // experts))
    num_steps = min(_MOST_STEPS, next_power_of_2(ceil_div(num_copies, most_blocks * _STEP)))
    num_blocks = ceil_div(num_copies, num_steps * _STEP)
    of_blocks = counts.new_empty(num_blocks, num_experts)
    _rank[(num_blocks,)](
        indices,
        of_blocks,
        places,
        num_copies,
        num_experts,
        num_steps,
        STEP=_STEP,
        AT_ONCE=_AT_ONCE,
        EXPERTS=2 * experts,
        num_warps=_NUM_WARPS,
    )
    _finish[(ceil_div(num_blocks, _BLOCKS_TO_FINISH),)](
        indices,
        of_blocks,
        places,
        counts,
        offsets,
        num_copies,
        num_experts,
        num_blocks,
        multiple,
        BLOCK=num_steps * _STEP,
        TO_FINISH=_BLOCKS_TO_FINISH,
        BLOCKS=max(1, _COUNTS_AT_ONCE // experts),
        EXPERTS=experts,
        num_warps=2 * _NUM_WARPS,
    )


def fill_sources(places: Tensor, sources: Tensor) -> None:
    """Write the last tensor."""
    if places.numel():
        grid = (ceil_div(places.numel(), _SOURCES),)
        _fill_sources[grid](places.contiguous(), sources, places.numel(), places.shape[1], BLOCK=_SOURCES)


def copy_rows(x: Tensor, places: Tensor, weights: Tensor | None, rows: Tensor) -> None:
    """Write the last tensor, except padding; see [Note: copying]."""
    if places.numel() == 0 or rows.numel() == 0:
        return
    matrix = _matrix(x)
    grid, tile = _tiles(matrix)
    is_streamed = weights is None and rows.numel() * rows.element_size() >= _STREAMED_BYTES
    _copy[grid](
        matrix,
        matrix.stride(0),
        places,
        None if weights is None else weights.contiguous(),
        rows,
        *matrix.shape,
        len(rows),
        TOP_K=places.shape[1],
        HAS_WEIGHTS=weights is not None,
        STORE_CACHE=".cs" if is_streamed else "",
        **tile,
        num_warps=_NUM_WARPS,
    )


def clear_padding(counts: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Clear the padding of the last tensor."""
    if rows.numel() == 0:
        return
    width = rows.numel() // len(rows)
    columns = min(next_power_of_2(width), _TILE_BYTES // rows.element_size())
    tail = num_programs(len(rows), rows.device)
    _clear[(len(counts) + tail,)](counts, offsets, rows, len(rows), width, len(counts), TAIL=tail, COLUMNS=columns)


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, sums: Tensor) -> None:
    """Write the last tensor; see [Note: copying]."""
    if sums.numel() == 0:
        return
    if places.shape[1] == 0:
        sums.zero_()
        return
    matrix, target = _matrix(rows), _matrix(sums)
    grid, tile = _tiles(target)
    _sum[grid](
        matrix,
        matrix.stride(0),
        places,
        None if weights is None else weights.contiguous(),
        sums,
        *target.shape,
        len(rows),
        TOP_K=places.shape[1],
        HAS_WEIGHTS=weights is not None,
        **tile,
        num_warps=_NUM_WARPS,
    )


def dot_rows(x: Tensor, rows: Tensor, places: Tensor, products: Tensor) -> None:
    """Write the last tensor."""
    if products.numel() == 0:
        return
    if rows.numel() == 0:
        products.zero_()
        return
    x, matrix = _matrix(x), _matrix(rows)
    grid, tile = _tiles(x, _DOT_TILE_BYTES)
    _dot[grid[:1]](
        x,
        x.stride(0),
        matrix,
        matrix.stride(0),
        places,
        products,
        *x.shape,
        len(rows),
        TOP_K=places.shape[1],
        **tile,
        num_warps=_NUM_WARPS,
    )


def copy_and_dot_rows(
    x: Tensor, rows: Tensor, places: Tensor, weights: Tensor, copies: Tensor, products: Tensor
) -> None:
    """Write the last two tensors, copies without padding: `copy_rows` and `dot_rows` in one; see [Note: copying]."""
    if products.numel() == 0:
        return
    if rows.numel() == 0:
        products.zero_()
        return
    x, matrix = _matrix(x), _matrix(rows)
    (num_tokens, width), top_k = x.shape, places.shape[1]
    ks = next_power_of_2(top_k)
    columns = min(next_power_of_2(width), max(1, _BOTH_TILE_BYTES // (ks * x.element_size())))
    _copy_and_dot[(num_tokens,)](
        x,
        x.stride(0),
        matrix,
        matrix.stride(0),
        places,
        weights.contiguous(),
        copies,
        products,
        width,
        len(rows),
        TOP_K=top_k,
        KS=ks,
        COLUMNS=columns,
        PARTS=ceil_div(width, columns),
        num_warps=_NUM_WARPS,
    )


def _matrix(tensor: Tensor) -> Tensor:
    """Return shape `[len, width]`, elements of a row side by side: a view if strides allow it.

    `rows_of` keeps the last dim as columns instead.
    """
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    return matrix if matrix.shape[1] == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _tiles(matrix: Tensor, tile_bytes: int = _TILE_BYTES) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs over a matrix, and their tiles."""
    (num_rows, width), size = matrix.shape, tile_bytes // matrix.element_size()
    columns = min(next_power_of_2(width), size)
    rows = min(size // columns, next_power_of_2(num_rows))
    return (ceil_div(num_rows, rows), ceil_div(width, columns)), {"ROWS": rows, "COLUMNS": columns}


@jit
def _rank(
    indices,
    of_blocks,
    ranks,
    num_copies,
    num_experts,
    num_steps,
    STEP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    own, bins = tl.arange(0, STEP), tl.arange(0, EXPERTS)
    first = block * num_steps * STEP
    end = tl.minimum(first + num_steps * STEP, num_copies)
    # Copies past the end count for an expert that does not exist: EXPERTS is more than their number.
    experts = tl.load(indices + first + own, mask=first + own < end, other=num_experts).to(tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    for step in range(0, num_steps):
        start = first + step * STEP
        copies = start + own
        # The next ones are loaded while these are compared.
        next_experts = tl.load(indices + copies + STEP, mask=copies + STEP < end, other=num_experts).to(tl.int32)
        rank = tl.gather(counts, experts, 0)
        for other in range(0, STEP, AT_ONCE):
            others = other + tl.arange(0, AT_ONCE)
            of_others = tl.load(indices + start + others, mask=start + others < end, other=num_experts).to(tl.int32)
            is_before = (of_others[None, :] == experts[:, None]) & (others[None, :] < own[:, None])
            rank += tl.sum(is_before.to(tl.int32), 1)
        tl.store(ranks + copies, rank, mask=copies < end)
        counts += tl.histogram(experts, EXPERTS)
        experts = next_experts
    tl.store(of_blocks + block * num_experts + bins, counts, mask=bins < num_experts)


@jit
def _finish(
    indices,
    of_blocks,
    places,
    counts,
    offsets,
    num_copies,
    num_experts,
    num_blocks,
    multiple,
    BLOCK: tl.constexpr,
    TO_FINISH: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Turn ranks into places, and write counts and offsets of all experts."""
    first_block = tl.program_id(0) * TO_FINISH
    bins = tl.arange(0, EXPERTS)
    total = tl.zeros([BLOCKS, EXPERTS], tl.int32)
    before = tl.zeros([BLOCKS, EXPERTS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)[:, None]
        mask = (blocks < num_blocks) & (bins < num_experts)[None, :]
        values = tl.load(of_blocks + blocks.to(tl.int64) * num_experts + bins[None, :], mask=mask, other=0)
        total += values
        before += tl.where(blocks < first_block, values, 0)
    count = tl.sum(total, 0)
    padded = (count + multiple - 1) // multiple * multiple
    last = tl.cumsum(padded, 0)
    first = last - padded + tl.sum(before, 0)
    for own in tl.static_range(TO_FINISH):
        block = first_block + own
        copies = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        experts = tl.load(indices + copies, mask=copies < num_copies, other=0).to(tl.int32)
        ranks = tl.load(places + copies, mask=copies < num_copies, other=0)
        tl.store(places + copies, ranks + tl.gather(first, experts, 0), mask=copies < num_copies)
        numbers = block.to(tl.int64) * num_experts + bins
        first += tl.load(of_blocks + numbers, mask=(bins < num_experts) & (numbers < num_blocks * num_experts), other=0)
    if first_block == 0:
        tl.store(counts + bins, count, mask=bins < num_experts)
        tl.store(offsets + bins, last, mask=bins < num_experts)


@jit
def _fill_sources(places, sources, num_copies, top_k, BLOCK: tl.constexpr):
    copies = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = copies < num_copies
    tl.store(sources + tl.load(places + copies, mask=mask, other=0), copies // top_k, mask=mask)


@jit(do_not_specialize=NUMBERS)
def _copy(
    x,
    stride,
    places,
    weights,
    rows,
    num_tokens,
    width,
    num_rows,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < width)[None, :]
    values = tl.load(x + tokens[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + tokens * TOP_K + k, mask=is_token, other=0).to(tl.int64)
        copies = values
        if HAS_WEIGHTS:
            weight = tl.load(weights + tokens * TOP_K + k, mask=is_token, other=0.0).to(tl.float32)
            copies = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
        is_row = mask & (place < num_rows)[:, None]
        tl.store(rows + place[:, None] * width + columns[None, :], copies, mask=is_row, cache_modifier=STORE_CACHE)


@jit
def _clear(counts, offsets, rows, num_rows, width, num_experts, TAIL: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    # Programs of experts clear the padding after their rows; the others share the rest.
    first = tl.load(offsets + program - 1, mask=(program > 0) & (program <= num_experts), other=0)
    first += tl.load(counts + program, mask=program < num_experts, other=0)
    last = tl.load(offsets + program, mask=program < num_experts, other=num_rows)
    step = 1
    if program >= num_experts:
        first = tl.load(offsets + num_experts - 1) + program - num_experts
        step = TAIL
    for row in range(first, last, step):
        for start in range(0, width, COLUMNS):
            at = start + columns
            zeros = tl.zeros([COLUMNS], rows.dtype.element_ty)
            tl.store(rows + (tl.zeros([COLUMNS], tl.int64) + row) * width + at, zeros, mask=at < width)


@jit(do_not_specialize=NUMBERS)
def _sum(
    rows,
    stride,
    places,
    weights,
    sums,
    num_tokens,
    width,
    num_rows,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + tokens * TOP_K + k, mask=is_token, other=0).to(tl.int64)
        is_row = mask & (place < num_rows)[:, None]
        copies = tl.load(rows + place[:, None] * stride + columns[None, :], mask=is_row, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights + tokens * TOP_K + k, mask=is_token, other=0.0).to(tl.float32)
            copies = copies * weight[:, None]
        total += copies
    tl.store(sums + tokens[:, None] * width + columns[None, :], total, mask=mask)


@jit(do_not_specialize=NUMBERS)
def _dot(
    x,
    x_stride,
    rows,
    stride,
    places,
    products,
    num_tokens,
    width,
    num_rows,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    for k in tl.static_range(TOP_K):
        place = tl.load(places + tokens * TOP_K + k, mask=is_token, other=0).to(tl.int64)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            mask = is_token[:, None] & (columns < width)[None, :]
            own = tl.load(x + tokens[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            is_row = mask & (place < num_rows)[:, None]
            copies = tl.load(rows + place[:, None] * stride + columns[None, :], mask=is_row, other=0.0)
            total += own * copies.to(tl.float32)
        tl.store(products + tokens * TOP_K + k, tl.sum(total, 1), mask=is_token)


@jit(do_not_specialize=NUMBERS[1:])
def _copy_and_dot(
    x,
    x_stride,
    rows,
    stride,
    places,
    weights,
    copies,
    products,
    width,
    num_rows,
    TOP_K: tl.constexpr,
    KS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, KS)
    place = tl.load(places + token * TOP_K + ks, mask=ks < TOP_K, other=0).to(tl.int64)
    weight = tl.load(weights + token * TOP_K + ks, mask=ks < TOP_K, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([KS, COLUMNS], tl.float32)
    for part in range(PARTS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = ((ks < TOP_K) & (place < num_rows))[:, None] & (columns < width)
        own = tl.load(x + token * x_stride + columns, mask=columns < width, other=0.0)
        of_rows = tl.load(rows + place[:, None] * stride + columns, mask=mask, other=0.0)
        wide = own.to(tl.float32)
        tl.store(copies + place[:, None] * width + columns, (wide * weight).to(own.dtype), mask=mask)
        total += wide * of_rows.to(tl.float32)
    tl.store(products + token * TOP_K + ks, tl.sum(total, 1), mask=ks < TOP_K)
