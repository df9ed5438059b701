"""Triton kernels of `moe_route`.

A program holds the logits of some tokens, for all experts, in registers. They are read once. Values of the chosen
experts are read a second time, from the cache.

[Note: how experts are chosen] Floats are converted to integers of the same order. A warp finds the largest with one
instruction (`redux`), and then its lowest place. So equal floats are chosen in order of their places, and NaN counts as
the largest.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs, rows_of

_NUM_WARPS = 4
_TILE = 2048
"""Elements of a program's tile, 16 for each thread: a token of up to 128 experts is in one warp."""


def route(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    sigmoid: bool,
    normalize: bool,
    indices: Tensor,
    weights: Tensor,
    counts: Tensor,
    scores: Tensor,
) -> None:
    """Write `indices`, `weights`, `counts` and `scores`."""
    counts.zero_()
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    logits = rows_of(logits)
    rows, columns = _tile(num_experts)
    top_k = indices.shape[1]
    # Few programs: each adds to the counters once, for all tiles that it takes.
    _route[(num_programs(ceil_div(num_tokens, rows), logits.device),)](
        logits,
        logits.stride(0),
        None if bias is None else bias.contiguous(),
        None if chosen is None else chosen.contiguous(),
        indices,
        weights,
        counts,
        scores,
        num_tokens,
        num_experts,
        top_k,
        SIGMOID=sigmoid,
        NORMALIZE=normalize,
        HAS_BIAS=bias is not None,
        IS_CHOSEN=chosen is not None,
        HAS_SCORES=len(scores) > 0,
        ROWS=rows,
        COLUMNS=columns,
        TOP=next_power_of_2(top_k),
        num_warps=_NUM_WARPS,
    )


def backward(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    logits: Tensor | None,
    indices: Tensor,
    weights: Tensor,
    sigmoid: bool,
    normalize: bool,
    of_logits: Tensor,
) -> None:
    """Write `of_logits`."""
    num_tokens, num_experts = of_logits.shape
    if num_tokens == 0:
        return
    logits = None if logits is None else rows_of(logits)
    of_scores = None if of_scores is None else rows_of(of_scores)
    rows, columns = _tile(num_experts)
    _backward[(ceil_div(num_tokens, rows),)](
        None if of_weights is None else of_weights.contiguous(),
        of_scores,
        0 if of_scores is None else of_scores.stride(0),
        logits,
        0 if logits is None else logits.stride(0),
        indices,
        weights,
        of_logits,
        num_tokens,
        num_experts,
        TOP_K=indices.shape[1],  # loops over it are unrolled, so that all loads are in flight together
        SIGMOID=sigmoid,
        NORMALIZE=normalize,
        OF_WEIGHTS=of_weights is not None,
        OF_SCORES=of_scores is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )


def _tile(num_experts: int) -> tuple[int, int]:
    columns = next_power_of_2(num_experts)
    return max(1, min(64, _TILE // columns)), columns


@triton.jit
def _scores(logits, SIGMOID: tl.constexpr):
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    return scores


@triton.jit
def _in_order(floats):
    bits = tl.where(floats == 0.0, 0.0, floats).to(tl.int32, bitcast=True)  # both zeros are equal
    integers = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(floats != floats, 0x7FFFFFFF, integers)


@jit
def _route(
    logits,
    stride,
    bias,
    chosen,
    indices,
    weights,
    counts,
    all_scores,
    num_tokens,
    num_experts,
    top_k,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    is_expert = columns < num_experts
    places = tl.arange(0, TOP)
    hits = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        tokens = tile * ROWS + tl.arange(0, ROWS)
        is_token = tokens < num_tokens
        tokens = tokens.to(tl.int64)
        mask = is_token[:, None] & is_expert[None, :]
        values = tl.load(logits + tokens[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        values = tl.where(is_expert[None, :], values, float("-inf"))
        compared = values
        if (HAS_SCORES or HAS_BIAS) or not (NORMALIZE or SIGMOID):
            scores = _scores(values, SIGMOID)
            if HAS_SCORES:
                tl.store(all_scores + tokens[:, None] * num_experts + columns[None, :], scores, mask=mask)
            if HAS_BIAS:
                compared = scores + tl.load(bias + columns, mask=is_expert, other=0.0).to(tl.float32)[None, :]

        # [Note: how experts are chosen]. No float has the least integer: it marks experts that cannot be chosen.
        keys = tl.where(is_expert[None, :], _in_order(compared), -0x80000000)
        picked = tl.zeros([ROWS, TOP], tl.int32)
        for place in range(top_k):
            if IS_CHOSEN:
                index = tl.load(chosen + tokens * top_k + place, mask=is_token, other=0).to(tl.int32)
            else:
                is_best = keys == tl.max(keys, 1)[:, None]
                index = tl.min(tl.where(is_best, columns[None, :], COLUMNS), 1)
            is_it = columns[None, :] == index[:, None]
            keys = tl.where(is_it, -0x80000000, keys)
            hits += (is_it & is_token[:, None]).to(tl.int32)
            picked = tl.where(places[None, :] == place, index[:, None], picked)

        is_place = is_token[:, None] & (places < top_k)[None, :]
        own = tl.load(logits + tokens[:, None] * stride + picked, mask=is_place, other=0.0).to(tl.float32)
        if NORMALIZE:
            own = tl.where((places < top_k)[None, :], own, float("-inf"))
            if SIGMOID:  # 1 / (1 + exp(-x)) is exp(min(x, 0)) / (1 + exp(-|x|)), which is not zero for finite x
                below = tl.minimum(own, 0.0, tl.PropagateNan.ALL)
                own = tl.exp(below - tl.max(below, 1)[:, None]) / (1.0 + tl.exp(-tl.abs(own)))
                own = own / tl.sum(own, 1)[:, None]
            else:
                own = _scores(own, False)
        elif SIGMOID:
            own = _scores(own, True)
        else:
            # The same as in `_scores`; the compiler does not compute maximum and sum twice.
            most = tl.max(values, 1)[:, None]
            own = tl.exp(own - most) / tl.sum(tl.exp(values - most), 1)[:, None]
        target = tokens[:, None] * top_k + places[None, :]
        tl.store(indices + target, picked.to(tl.int64), mask=is_place)
        tl.store(weights + target, own, mask=is_place)
    # Sums of integers are the same in any order.
    tl.atomic_add(counts + columns, tl.sum(hits, 0).to(tl.int64), mask=is_expert, sem="relaxed")


@jit
def _backward(
    of_weights,
    of_scores,
    of_scores_stride,
    logits,
    stride,
    indices,
    weights,
    of_logits,
    num_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    OF_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    tokens = tokens.to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = is_token[:, None] & (columns < num_experts)[None, :]

    of_chosen = tl.zeros([ROWS, COLUMNS], tl.float32)
    if OF_WEIGHTS:
        mean = tl.zeros([ROWS], tl.float32)
        if NORMALIZE:
            for place in tl.static_range(TOP_K):  # type: ignore[misc]
                weight = tl.load(weights + tokens * TOP_K + place, mask=is_token, other=0.0)
                mean += weight * tl.load(of_weights + tokens * TOP_K + place, mask=is_token, other=0.0).to(tl.float32)
        for place in tl.static_range(TOP_K):  # type: ignore[misc]
            at = tokens * TOP_K + place
            index = tl.load(indices + at, mask=is_token, other=0)
            gradient = tl.load(of_weights + at, mask=is_token, other=0.0).to(tl.float32)
            if NORMALIZE:
                gradient = tl.load(weights + at, mask=is_token, other=0.0) * (gradient - mean)
                if SIGMOID:  # the derivative of log(s) is 1 - s
                    own = tl.load(logits + tokens * stride + index, mask=is_token, other=0.0).to(tl.float32)
                    gradient = gradient / (1.0 + tl.exp(own))
            of_chosen += tl.where(columns[None, :] == index[:, None], gradient[:, None], 0.0)

    # The gradient of logits if weights are normalized, of scores if not.
    result = of_chosen
    if OF_SCORES or not NORMALIZE:
        values = tl.load(logits + tokens[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scores = _scores(tl.where((columns < num_experts)[None, :], values, float("-inf")), SIGMOID)
        outgoing = tl.zeros([ROWS, COLUMNS], tl.float32)
        if OF_SCORES:
            outgoing += tl.load(
                of_scores + tokens[:, None] * of_scores_stride + columns[None, :], mask=mask, other=0.0
            ).to(tl.float32)
        if not NORMALIZE:
            outgoing += of_chosen
        if SIGMOID:
            inner = outgoing * scores * (1.0 - scores)
        else:
            inner = scores * (outgoing - tl.sum(outgoing * scores, 1)[:, None])
        result = inner + of_chosen if NORMALIZE else inner
    tl.store(of_logits + tokens[:, None] * num_experts + columns[None, :], result, mask=mask)
