"""Triton kernels of `moe_permute` and `moe_unpermute`.

[Note: sorting] Copies are counted in blocks (`_count`), the counts are summed up over blocks (`_sum_up`), and then each
copy goes to the first row of its expert and block, plus the number of those before it in the block with the same expert
(`_place`). All sums are of integers, so their order does not matter.

[Note: copying] A program reads rows of some tokens once and writes all their copies, as tokens are near each other and
copies are not: a kernel by copies would read each token `top_k` times. Summing reads the copies, and writes once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.rows import num_programs

_NUM_WARPS = 4
_TILE_BYTES = 4096
"""Of a program's tile: two accesses of 16 bytes for each thread, times the number of copies in flight."""
_DOT_TILE_BYTES = 2048
"""Of products of rows, which read two of these at a time."""
_BLOCK = 128
"""Copies that a program sorts. Fewer make more counts to sum up, more are compared with more others."""
_AT_ONCE = 32
"""How many of these a copy is compared with at once."""
_EXPERTS = 8
"""Whose counts a program sums up: 32 bytes of each block's, the least that memory reads."""


def sort(indices: Tensor, multiple: int, places: Tensor, counts: Tensor, offsets: Tensor) -> None:
    """Writes the last three; see [Note: sorting]."""
    indices, num_experts, num_copies = indices.contiguous(), len(counts), indices.numel()
    num_blocks = triton.cdiv(num_copies, _BLOCK)
    of_blocks = counts.new_empty(num_blocks, num_experts)
    counts.zero_()
    if num_experts == 0:
        return
    experts = triton.next_power_of_2(num_experts)
    if num_blocks > 0:
        _count[(num_blocks,)](indices, of_blocks, counts, num_copies, num_experts, BLOCK=_BLOCK, EXPERTS=2 * experts)
    _sum_up[(triton.cdiv(num_experts, _EXPERTS),)](
        counts, of_blocks, offsets, num_blocks, num_experts, multiple, BLOCKS=256, OWN=_EXPERTS, EXPERTS=experts
    )
    if num_blocks > 0:
        _place[(num_blocks,)](indices, of_blocks, places, num_copies, num_experts, BLOCK=_BLOCK, AT_ONCE=_AT_ONCE)


def sort_sources(counts: Tensor, places: Tensor, summed: Tensor, offsets: Tensor) -> None:
    """Writes the last three."""
    num_sources, num_experts = counts.shape
    if counts.numel() == 0:
        return
    _place_groups[(counts.numel(), 4)](
        counts,
        counts.stride(0),
        counts.stride(1),
        places,
        summed,
        offsets,
        num_sources,
        num_experts,
        GROUPS=triton.next_power_of_2(counts.numel()),
        BLOCK=1024,
        num_warps=_NUM_WARPS,
    )


def copy_rows(x: Tensor, places: Tensor, weights: Tensor | None, rows: Tensor) -> None:
    """Writes the last, but for padding; see [Note: copying]."""
    if places.numel() == 0 or rows.numel() == 0:
        return
    matrix = _matrix(x)
    grid, tile = _tiles(matrix)
    _copy[grid](
        matrix,
        matrix.stride(0),
        places,
        None if weights is None else weights.contiguous(),
        rows,
        *matrix.shape,
        TOP_K=places.shape[1],
        HAS_WEIGHTS=weights is not None,
        **tile,
        num_warps=_NUM_WARPS,
    )


def clear_padding(counts: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Writes the last where there is padding."""
    if rows.numel() == 0:
        return
    width = rows.numel() // len(rows)
    columns = min(triton.next_power_of_2(width), _TILE_BYTES // rows.element_size())
    tail = num_programs(len(rows), rows.device)
    _clear[(len(counts) + tail,)](counts, offsets, rows, len(rows), width, len(counts), TAIL=tail, COLUMNS=columns)


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, sums: Tensor) -> None:
    """Writes the last; see [Note: copying]."""
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
        TOP_K=places.shape[1],
        HAS_WEIGHTS=weights is not None,
        **tile,
        num_warps=_NUM_WARPS,
    )


def dot_rows(x: Tensor, rows: Tensor, places: Tensor, products: Tensor) -> None:
    """Writes the last."""
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
        TOP_K=places.shape[1],
        **tile,
        num_warps=_NUM_WARPS,
    )


def _matrix(tensor: Tensor) -> Tensor:
    """Shape `[len, width]`, elements of a row side by side: a view if strides allow it. `rows_of` cuts the last dim."""
    matrix = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    return matrix if matrix.shape[1] == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _tiles(matrix: Tensor, tile_bytes: int = _TILE_BYTES) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of programs over a matrix, and their tiles."""
    size = tile_bytes // matrix.element_size()
    columns = min(triton.next_power_of_2(matrix.shape[1]), size)
    rows = min(size // columns, triton.next_power_of_2(len(matrix)))
    grid = triton.cdiv(len(matrix), rows), triton.cdiv(matrix.shape[1], columns)
    return grid, {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def _count(indices, of_blocks, counts, num_copies, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    copies = block * BLOCK + tl.arange(0, BLOCK)
    # What is past the end counts for an expert that there is not: EXPERTS is more than their number.
    experts = tl.load(indices + copies, mask=copies < num_copies, other=num_experts).to(tl.int32)
    histogram = tl.histogram(experts, EXPERTS)
    bins = tl.arange(0, EXPERTS)
    tl.store(of_blocks + block * num_experts + bins, histogram, mask=bins < num_experts)
    tl.atomic_add(counts + bins, histogram, mask=(bins < num_experts) & (histogram > 0), sem="relaxed")


@triton.jit
def _sum_up(
    counts,
    of_blocks,
    offsets,
    num_blocks,
    num_experts,
    multiple,
    BLOCKS: tl.constexpr,
    OWN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Turns the counts of blocks to the first row of each expert and block, for some experts."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    is_own = own < num_experts
    experts = tl.arange(0, EXPERTS)
    padded = tl.load(counts + experts, mask=experts < num_experts, other=0)
    padded = (padded + multiple - 1) // multiple * multiple
    first = tl.sum(tl.where(experts[None, :] < own[:, None], padded[None, :], 0), 1)
    last = tl.sum(tl.where(experts[None, :] <= own[:, None], padded[None, :], 0), 1)
    tl.store(offsets + own, last, mask=is_own)
    for start in range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        at = of_blocks + blocks.to(tl.int64)[:, None] * num_experts + own[None, :]
        mask = (blocks < num_blocks)[:, None] & is_own[None, :]
        values = tl.load(at, mask=mask, other=0)
        tl.store(at, first[None, :] + tl.cumsum(values, 0) - values, mask=mask)
        first += tl.sum(values, 0)


@triton.jit
def _place(indices, starts, places, num_copies, num_experts, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, BLOCK)
    mask = block * BLOCK + own < num_copies
    experts = tl.load(indices + block * BLOCK + own, mask=mask, other=0).to(tl.int32)
    rows = tl.load(starts + block * num_experts + experts, mask=mask, other=0)
    for start in range(0, BLOCK, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        of_others = tl.load(indices + block * BLOCK + others, mask=block * BLOCK + others < num_copies, other=-1)
        is_before = (of_others.to(tl.int32)[None, :] == experts[:, None]) & (others[None, :] < own[:, None])
        rows += tl.sum(is_before.to(tl.int32), 1)
    tl.store(places + block * BLOCK + own, rows, mask=mask)


@triton.jit
def _place_groups(
    counts,
    stride,
    expert_stride,
    places,
    summed,
    offsets,
    num_sources,
    num_experts,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program moves a part of the rows of one source and expert, which stay side by side."""
    group = tl.program_id(0)
    source, expert = group // num_experts, group % num_experts
    groups = tl.arange(0, GROUPS)
    sources, experts = groups // num_experts, groups % num_experts
    is_group = groups < num_sources * num_experts
    sizes = tl.load(counts + sources.to(tl.int64) * stride + experts * expert_stride, mask=is_group, other=0)
    sizes = sizes.to(tl.int32)
    is_before = (experts < expert) | ((experts == expert) & (sources < source))
    origin = tl.sum(tl.where(groups < group, sizes, 0), 0)
    target = tl.sum(tl.where(is_before, sizes, 0), 0)
    size = tl.sum(tl.where(groups == group, sizes, 0), 0)
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tl.store(places + origin + rows, target + rows, mask=rows < size)
    if (source == 0) & (tl.program_id(1) == 0):
        of_expert = tl.sum(tl.where(experts == expert, sizes, 0), 0)
        tl.store(summed + expert, of_expert)
        tl.store(offsets + expert, target + of_expert)


@triton.jit
def _copy(
    x,
    stride,
    places,
    weights,
    rows,
    num_tokens,
    width,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
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
        tl.store(rows + place[:, None] * width + columns[None, :], copies, mask=mask)


@triton.jit
def _clear(counts, offsets, rows, num_rows, width, num_experts, TAIL: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    # Programs of experts clear what follows their rows, the others share what follows all.
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


@triton.jit
def _sum(
    rows,
    stride,
    places,
    weights,
    sums,
    num_tokens,
    width,
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
        copies = tl.load(rows + place[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights + tokens * TOP_K + k, mask=is_token, other=0.0).to(tl.float32)
            copies = copies * weight[:, None]
        total += copies
    tl.store(sums + tokens[:, None] * width + columns[None, :], total, mask=mask)


@triton.jit
def _dot(
    x,
    x_stride,
    rows,
    stride,
    places,
    products,
    num_tokens,
    width,
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
            copies = tl.load(rows + place[:, None] * stride + columns[None, :], mask=mask, other=0.0)
            total += own * copies.to(tl.float32)
        tl.store(products + tokens * TOP_K + k, tl.sum(total, 1), mask=is_token)
