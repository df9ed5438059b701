"""Triton kernels of attention: the forward, and a backward of one kernel by queries and one by keys.

[Note: numbers] Products are summed in float32, and exponentials are of base two. Gradients recompute probabilities from
the logarithms. One program sums each number of a gradient in a fixed order, over all query heads that share a head of
keys. If that gives too few programs, each sums over some of these heads, and the float32 sums are added up.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.kernels.attention_plan import SIZES, Blocks, ids_from, plan_blocks
from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, num_programs, padded_for_products, shared_memory

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LARGE_MEMORY = 120 * 1024
"""Bytes of shared memory that a program needs for the larger blocks; Hopper has 227 KiB."""


def forward(q: Tensor, k: Tensor, v: Tensor, masks: Masks, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Fill `out` and the contiguous `lse`. Queries are not empty."""
    q, k, v = (_with_rows(t) for t in (q, k, v))
    batch, heads, num_queries, head_dim = q.shape
    blocks = _blocks_of(q, "forward")
    result = _target(out)
    with torch.cuda.device_of(q):
        masks = _in_rows(masks)
        plan = plan_blocks(masks, num_queries, k.shape[2], blocks, rows_are_queries=True, device=q.device)
        _forward[(batch * heads, plan.shape[1])](
            q,
            k,
            v,
            None if sinks is None else sinks.contiguous(),
            result,
            lse,
            *_arguments_of(masks, plan),
            *_strides(q, k, v, result),
            num_queries,
            k.shape[2],
            heads,
            heads // k.shape[1],
            head_dim**-0.5,
            **_constants(q, k.shape[2], masks, blocks),
        )
    if result is not out:
        out.copy_(result)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill the gradients that are not empty; either both `dk` and `dv` are empty or neither.

    Queries and keys are not empty.
    """
    grad_out, q, k, v, out = (_with_rows(t) for t in (grad_out, q, k, v, out))
    batch, heads, num_queries, _ = q.shape
    gradients = dq, dk, dv
    dq, dk, dv = (_target(gradient) for gradient in gradients)
    with torch.cuda.device_of(q):
        masks = _in_rows(masks)
        numbers = torch.empty(batch, heads, num_queries, 2, dtype=torch.float32, device=q.device)
        _prepare[(batch * heads, ceil_div(num_queries, 64))](
            out,
            grad_out,
            lse.contiguous(),
            numbers,
            *_strides(out, grad_out),
            num_queries,
            heads,
            HEAD_DIM=q.shape[-1],
            WIDTH=padded_for_products(q.shape[-1]),
            ROWS=64,
        )
        tensors = grad_out, q, k, v, numbers
        if dq.numel():
            _queries_backward(*tensors, masks, dq)
        if dk.numel():
            _keys_backward(*tensors, masks, dk, dv)
    for gradient, result in zip(gradients, (dq, dk, dv), strict=True):
        if result is not gradient:
            gradient.copy_(result)


def _queries_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, masks: Masks, dq: Tensor
) -> None:
    batch, heads, num_queries, head_dim = q.shape
    blocks = _blocks_of(q, "dq")
    plan = plan_blocks(masks, num_queries, k.shape[2], blocks, rows_are_queries=True, device=q.device)
    _dq[(batch * heads, plan.shape[1])](
        q,
        k,
        v,
        grad_out,
        dq,
        numbers,
        *_arguments_of(masks, plan),
        *_strides(q, k, v, grad_out, dq),
        num_queries,
        k.shape[2],
        heads,
        heads // k.shape[1],
        head_dim**-0.5,
        **_constants(q, k.shape[2], masks, blocks),
    )


def _keys_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    masks: Masks,
    dk: Tensor,
    dv: Tensor,
) -> None:
    (batch, heads, num_queries, head_dim), (kv_heads, num_keys) = q.shape, k.shape[1:3]
    blocks = _blocks_of(q, "dk_dv")
    plan = plan_blocks(masks, num_keys, num_queries, blocks, rows_are_queries=False, device=q.device)
    parts = _num_parts(heads // kv_heads, batch * kv_heads * plan.shape[1], q.device)
    dk_parts, dv_parts = dk.unsqueeze(0), dv.unsqueeze(0)
    if parts > 1:
        dk_parts, dv_parts = torch.empty(2, parts, *dk.shape, dtype=torch.float32, device=dk.device)
    _dk_dv[(batch * kv_heads * parts, plan.shape[1])](
        q,
        k,
        v,
        grad_out,
        dk_parts,
        dv_parts,
        numbers,
        *_arguments_of(masks, plan),
        *_strides(q, k, v, grad_out, dk_parts[0], dv_parts[0]),
        dk_parts.stride(0),
        dv_parts.stride(0),
        num_queries,
        num_keys,
        heads,
        heads // kv_heads,
        parts,
        head_dim**-0.5,
        **_constants(q, num_queries, masks, blocks),
    )
    if parts > 1:
        dk.copy_(dk_parts.sum(0))
        dv.copy_(dv_parts.sum(0))


def _num_parts(group: int, num_groups: int, device: torch.device) -> int:
    """Return the number of programs for the query heads of a group, so that all processors have a few programs."""
    wanted = num_programs(num_groups * group, device) // 2
    return next(n for n in range(1, group + 1) if group % n == 0 and (num_groups * n >= wanted or n == group))


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with the elements of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _target(tensor: Tensor) -> Tensor:
    """Return a tensor to which kernels can write the values of `tensor`."""
    return tensor if tensor.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _in_rows(masks: Masks) -> Masks:
    q_documents, k_documents = (
        None if ids is None else ids if ids.stride(-1) == 1 else ids.contiguous()
        for ids in (masks.q_documents, masks.k_documents)
    )
    return masks._replace(q_documents=q_documents, k_documents=k_documents)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, heads and sequence of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _blocks_of(q: Tensor, kernel: Literal["forward", "dq", "dk_dv"]) -> Blocks:
    width = padded_for_products(q.shape[-1])
    if q.dtype == torch.float32:
        return Blocks(32, 32, 4, 2)
    if shared_memory(q.device) < _LARGE_MEMORY or width > 128:
        return Blocks(64, 32, 8 if width > 128 and kernel != "forward" else 4, 2)
    if width < 128 or kernel == "forward":
        return Blocks(64, 64, 4, 3)
    return Blocks(64, 64, 4, 2) if kernel == "dq" else Blocks(64, 32, 4, 3)


def _constants(q: Tensor, num_columns: int, masks: Masks, blocks: Blocks) -> dict[str, Any]:
    return {
        "HEAD_DIM": q.shape[-1],
        "WIDTH": padded_for_products(q.shape[-1]),
        "CAUSAL": masks.causal,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
        "EVEN": num_columns % blocks.columns == 0,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _arguments_of(masks: Masks, plan: Tensor) -> list[Any]:
    q_ids, k_ids = masks.q_documents, masks.k_documents
    return [
        plan,
        q_ids,
        k_ids,
        plan.stride(0) if len(plan) > 1 else 0,
        0 if q_ids is None else q_ids.stride(0),
        0 if k_ids is None else k_ids.stride(0),
        masks.window,
    ]


@triton.jit
def _rows(
    ptr, first, length, stride, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows from `first` on, `[SIZE, WIDTH]`, 0 outside of the tensor; only with `MASKED` may rows be outside."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    pointers = ptr + (tl.full([], 1, tl.int64) * first) * stride + (row * stride + column)
    if MASKED:
        return tl.load(pointers, mask=(first + row < length) & (column < HEAD_DIM), other=0.0)
    elif HEAD_DIM < WIDTH:
        return tl.load(pointers, mask=column < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(values, ptr, first, length, stride, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    pointers = ptr + (tl.full([], 1, tl.int64) * first) * stride + (row * stride + column)
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=(first + row < length) & (column < HEAD_DIM))


@triton.jit
def _counts(queries, keys, q_ids, k_ids, num_keys, window, CAUSAL: tl.constexpr):
    """Return which pairs count; ids are None or have the layout of `queries` and `keys`."""
    counts = keys < num_keys
    if CAUSAL:
        counts = counts & (keys <= queries)
        if window is not None:
            counts = counts & (queries - keys < window)
    if q_ids is not None:
        counts = counts & (q_ids == k_ids)
    return counts


@jit(do_not_specialize=SIZES)
def _forward(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr,
    plan_ptr, q_ids_ptr, k_ids_ptr,
    plan_stride, q_ids_stride, k_ids_stride, window,
    q_batch, q_head, q_stride,
    k_batch, k_head, k_stride,
    v_batch, v_head, v_stride,
    out_batch, out_head, out_stride,
    num_queries, num_keys, heads, group, scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # those with most keys first
    first_query = block * ROWS
    plan_ptr += batch * plan_stride + block * 4
    start, end = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    full_start, full_end = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    scale *= _LOG2E

    q = _rows(q_ptr + batch * q_batch + head * q_head, first_query, num_queries, q_stride, ROWS, HEAD_DIM, WIDTH, True)
    queries = first_query + tl.arange(0, ROWS)
    q_ids = None
    if q_ids_ptr is not None:
        k_ids_ptr += batch * k_ids_stride
        q_ids = ids_from(q_ids_ptr + batch * q_ids_stride, first_query, num_queries, ROWS)[:, None]
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks_ptr is not None:  # one more key, whose value is zero
        total += 1.0
        largest = tl.zeros([ROWS], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
    for visit in range(start, end):
        first_key = visit * COLUMNS
        k = _rows(k_ptr, first_key, num_keys, k_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
        v = _rows(v_ptr, first_key, num_keys, v_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if (visit < full_start) | (visit >= full_end):
            keys = first_key + tl.arange(0, COLUMNS)
            k_ids = None
            if q_ids_ptr is not None:
                k_ids = ids_from(k_ids_ptr, first_key, num_keys, COLUMNS)[None, :]
            counts = _counts(queries[:, None], keys[None, :], q_ids, k_ids, num_keys, window, CAUSAL)
            scores = tl.where(counts, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # of a query without any key so far
        p = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
        largest = new_largest
    total = tl.where(largest == float("-inf"), 1.0, total)  # NaN stays what it is
    _store(
        out / total[:, None],
        out_ptr + batch * out_batch + head * out_head,
        first_query,
        num_queries,
        out_stride,
        ROWS,
        HEAD_DIM,
        WIDTH,
    )
    lse_ptr += tl.program_id(0).to(tl.int64) * num_queries
    tl.store(lse_ptr + queries, (largest + tl.log2(total)) * _LN2, mask=queries < num_queries)


@jit(do_not_specialize=SIZES)
def _prepare(
    out_ptr,
    grad_ptr,
    lse_ptr,
    numbers_ptr,
    out_batch,
    out_head,
    out_stride,
    grad_batch,
    grad_head,
    grad_stride,
    num_queries,
    heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute for each query the base-two logarithm, +inf without a key, and its result times the gradient."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    first = tl.program_id(1) * ROWS
    out_ptr += batch * out_batch + head * out_head
    grad_ptr += batch * grad_batch + head * grad_head
    out = _rows(out_ptr, first, num_queries, out_stride, ROWS, HEAD_DIM, WIDTH, True)
    grad = _rows(grad_ptr, first, num_queries, grad_stride, ROWS, HEAD_DIM, WIDTH, True)
    queries = first + tl.arange(0, ROWS)
    inside = queries < num_queries
    places = tl.program_id(0).to(tl.int64) * num_queries + queries
    lse = tl.load(lse_ptr + places, mask=inside, other=0.0)
    log_sum = tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)
    tl.store(numbers_ptr + 2 * places, log_sum, mask=inside)
    tl.store(numbers_ptr + 2 * places + 1, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), mask=inside)


@jit(do_not_specialize=SIZES)
def _dq(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, numbers_ptr,
    plan_ptr, q_ids_ptr, k_ids_ptr,
    plan_stride, q_ids_stride, k_ids_stride, window,
    q_batch, q_head, q_stride,
    k_batch, k_head, k_stride,
    v_batch, v_head, v_stride,
    grad_batch, grad_head, grad_stride,
    dq_batch, dq_head, dq_stride,
    num_queries, num_keys, heads, group, scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_query = block * ROWS
    plan_ptr += batch * plan_stride + block * 4
    start, end = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    full_start, full_end = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    log2_scale = scale * _LOG2E

    q = _rows(q_ptr + batch * q_batch + head * q_head, first_query, num_queries, q_stride, ROWS, HEAD_DIM, WIDTH, True)
    grad_ptr += batch * grad_batch + head * grad_head
    grad = _rows(grad_ptr, first_query, num_queries, grad_stride, ROWS, HEAD_DIM, WIDTH, True)
    queries = first_query + tl.arange(0, ROWS)
    numbers_ptr += 2 * tl.program_id(0).to(tl.int64) * num_queries
    log_sum = tl.load(numbers_ptr + 2 * queries, mask=queries < num_queries, other=0.0)[:, None]
    delta = tl.load(numbers_ptr + 2 * queries + 1, mask=queries < num_queries, other=0.0)[:, None]
    q_ids = None
    if q_ids_ptr is not None:
        k_ids_ptr += batch * k_ids_stride
        q_ids = ids_from(q_ids_ptr + batch * q_ids_stride, first_query, num_queries, ROWS)[:, None]
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for visit in range(start, end):
        first_key = visit * COLUMNS
        k = _rows(k_ptr, first_key, num_keys, k_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
        v = _rows(v_ptr, first_key, num_keys, v_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        if (visit < full_start) | (visit >= full_end):
            keys = first_key + tl.arange(0, COLUMNS)
            k_ids = None
            if q_ids_ptr is not None:
                k_ids = ids_from(k_ids_ptr, first_key, num_keys, COLUMNS)[None, :]
            counts = _counts(queries[:, None], keys[None, :], q_ids, k_ids, num_keys, window, CAUSAL)
            scores = tl.where(counts, scores, float("-inf"))
        p = tl.exp2(scores - log_sum)
        d_scores = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta)
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)
    dq_ptr += batch * dq_batch + head * dq_head
    _store(dq * scale, dq_ptr, first_query, num_queries, dq_stride, ROWS, HEAD_DIM, WIDTH)


@jit(do_not_specialize=SIZES)
def _dk_dv(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, numbers_ptr,
    plan_ptr, q_ids_ptr, k_ids_ptr,
    plan_stride, q_ids_stride, k_ids_stride, window,
    q_batch, q_head, q_stride,
    k_batch, k_head, k_stride,
    v_batch, v_head, v_stride,
    grad_batch, grad_head, grad_stride,
    dk_batch, dk_head, dk_stride,
    dv_batch, dv_head, dv_stride,
    dk_part, dv_part,
    num_queries, num_keys, heads, group, parts, scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute gradients of keys and values; scores are by key and query, so that nothing is transposed."""
    kv_heads = heads // group
    part = (tl.program_id(0) % parts).to(tl.int64)
    kv_head = (tl.program_id(0) // parts % kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // parts // kv_heads).to(tl.int64)
    block = tl.program_id(1)  # those with most queries first
    first_key = block * ROWS
    plan_ptr += batch * plan_stride + block * 4
    start, end = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    full_start, full_end = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    log2_scale = scale * _LOG2E

    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    k = _rows(k_ptr, first_key, num_keys, k_stride, ROWS, HEAD_DIM, WIDTH, True)
    v = _rows(v_ptr, first_key, num_keys, v_stride, ROWS, HEAD_DIM, WIDTH, True)
    keys = first_key + tl.arange(0, ROWS)
    k_ids = None
    if q_ids_ptr is not None:
        q_ids_ptr += batch * q_ids_stride
        k_ids = ids_from(k_ids_ptr + batch * k_ids_stride, first_key, num_keys, ROWS)[:, None]
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dv = tl.zeros([ROWS, WIDTH], tl.float32)
    for member in range(0, group // parts):
        head = kv_head * group + part * (group // parts) + member
        head_q_ptr = q_ptr + batch * q_batch + head * q_head
        head_grad_ptr = grad_ptr + batch * grad_batch + head * grad_head
        head_numbers_ptr = numbers_ptr + 2 * (batch * heads + head) * num_queries
        for visit in range(start, end):
            first_query = visit * COLUMNS
            queries = first_query + tl.arange(0, COLUMNS)
            q = _rows(head_q_ptr, first_query, num_queries, q_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
            grad = _rows(head_grad_ptr, first_query, num_queries, grad_stride, COLUMNS, HEAD_DIM, WIDTH, not EVEN)
            log_sum, delta = tl.split(_rows(head_numbers_ptr, first_query, num_queries, 2, COLUMNS, 2, 2, not EVEN))
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * log2_scale
            if (visit < full_start) | (visit >= full_end):
                q_ids = None
                if q_ids_ptr is not None:
                    q_ids = ids_from(q_ids_ptr, first_query, num_queries, COLUMNS)[None, :]
                counts = _counts(queries[None, :], keys[:, None], q_ids, k_ids, num_keys, window, CAUSAL)
                scores = tl.where(counts, scores, float("-inf"))
            p = tl.exp2(scores - log_sum[None, :])
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            d_scores = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    dk_ptr += part * dk_part + batch * dk_batch + kv_head * dk_head
    dv_ptr += part * dv_part + batch * dv_batch + kv_head * dv_head
    _store(dk * scale, dk_ptr, first_key, num_keys, dk_stride, ROWS, HEAD_DIM, WIDTH)
    _store(dv, dv_ptr, first_key, num_keys, dv_stride, ROWS, HEAD_DIM, WIDTH)
