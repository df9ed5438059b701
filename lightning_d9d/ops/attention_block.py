"""Attention of some queries to some keys, with which attention to all keys can be put together block by block.

A block's result comes with the logarithm of the sum of its exponentiated scores, natural and in float32 (float64 for
float64), from which `merge` knows how much each of two results weighs. The backward of a block takes result and
logarithm of the whole, so gradients of blocks are parts of a sum. See https://arxiv.org/abs/2205.14135 for the
arithmetic and https://arxiv.org/abs/2310.01889 for blocks on several devices.

None of these is differentiable itself.

[Note: plans of cuDNN] torch keeps a plan of cuDNN's backward for each size and order in memory of queries, keys and
values, but not of result and gradient, and reads these as they lay when the plan was made (torch 2.11). So both are
always given as they leave the forward: in the order of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.distributed.tensor import DTensor

from lightning_d9d.ops import flash_attention
from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.backend import runs_triton

BlockKernel = Literal["flash-attn", "cudnn", "flash", "triton", "reference"]
"""What can run a block: flash-attn 4, kernels of torch, `lightning_d9d.ops.kernels.attention`, or plain torch."""

MAX_HEAD_DIM = 256
"""Of the Triton kernels."""

_MAX_SCORES = 1 << 24
"""How many scores the reference has in memory at a time, unless those of one query a head are more."""

_aten = torch.ops.aten


def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    *,
    sinks: Tensor | None = None,
    kernel: BlockKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends with queries to a block of keys; several query heads may share one head of keys and values.

    On CUDA this runs on flash-attn 4 where it is installed, or on cuDNN's or flash attention's kernels of torch, where
    these can; else, and always with documents, on Triton kernels: pairs of blocks that share no document are not
    computed. float64, heads of more than 256 numbers and other devices take `attention_block_reference`.

    Args:
        q: shape `[batch, heads, queries, head_dim]`.
        k: shape `[batch, kv_heads, keys, head_dim]`; `kv_heads` divides `heads`, and head h has keys of
            `h // (heads / kv_heads)`.
        v: shape of `k`.
        masks: which pairs of queries and keys count.
        sinks: shape `[heads]`, the score of one more key with a value of zero. The backward knows them from `lse`.
        kernel: what runs it, which must be able to (`block_kernel`); None chooses.

    Returns:
        The result, shape and dtype of `q`, and the logarithms, shape `[batch, heads, queries]`: 0 and -inf for a query
        without any key.
    """
    kernel = kernel or block_kernel(q, k, v, masks)
    if kernel == "triton":
        from lightning_d9d.ops.kernels.attention import forward

        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        if q.numel():
            forward(q, k, v, masks, sinks, out, lse)
        return out, lse
    if kernel == "flash-attn":
        out, lse = flash_attention.block(q, k, v, causal=masks.causal, window=masks.window)
    elif kernel == "cudnn":
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, masks.causal)
        lse = lse.view(q.shape[:-1])
    elif kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, masks.causal)
    else:
        out, lse = attention_block_reference(q, k, v, masks)
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(q.dtype), torch.logaddexp(lse, sinks)


def attention_block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
    *,
    kernel: BlockKernel | None = None,
    needs_q: bool = True,
    needs_kv: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block of keys contributes to the gradients of attention.

    Args:
        grad_out: gradient of the result, shape of `q`.
        q: as in `attention_block`, as are `k`, `v`, `masks` and `kernel`.
        k: see `q`.
        v: see `q`.
        out: what these queries got from all their keys, in this block and others.
        lse: the logarithms of that.
        masks: see `q`.
        kernel: see `q`.
        needs_q: whether the gradient of `q` is asked for; the Triton kernels compute no others.
        needs_kv: whether those of `k` and `v` are.

    Returns:
        The summands of the gradients of `q`, `k` and `v`, in their shapes and dtypes; those that are not asked for may
        be empty.
    """
    kernel = kernel or block_kernel(q, k, v, masks)
    if kernel == "reference":
        return attention_block_backward_reference(grad_out, q, k, v, out, lse, masks)
    if kernel == "triton":
        from lightning_d9d.ops.kernels.attention import backward

        new = torch.empty_like if q.numel() and k.numel() else torch.zeros_like
        dq = new(q) if needs_q else q.new_empty(0)
        dk, dv = (new(t) if needs_kv else t.new_empty(0) for t in (k, v))
        if q.numel() and k.numel():
            backward(grad_out, q, k, v, out, lse, masks, dq, dk, dv)
        return dq, dk, dv
    lse = lse.contiguous()  # flash attention takes it for that
    if kernel == "flash-attn":
        options = {"causal": masks.causal, "window": masks.window}
        return flash_attention.block_backward(grad_out, q, k, v, out, lse, **options)
    lengths = (q.shape[2], k.shape[2])
    no_seed = torch.empty(2, dtype=torch.int64, device=q.device)  # without dropout nothing reads it
    if kernel == "cudnn":
        grad_out, out = (in_form_of(q, each) for each in (grad_out, out))  # [Note: plans of cuDNN]
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, *lengths, 0.0, masks.causal
        )
    return _aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, *lengths, 0.0, masks.causal, no_seed, no_seed
    )


def in_form_of(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` with the dtype of `tensor` and the order in memory of what is new like it; a copy if it is otherwise."""
    form = torch.empty_like(tensor, device="meta")
    is_so = value.dtype == form.dtype and value.stride() == form.stride()
    return value if is_so else torch.empty_like(tensor).copy_(value)


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Adds the result of a further block to that of others, in place.

    Args:
        out: the others' result, shape `[batch, heads, queries, head_dim]`, in float32 (float64 for float64).
        lse: the others' logarithms, shape `[batch, heads, queries]`, in the dtype of `out`.
        out2: the further block's result, shape of `out`, in any dtype.
        lse2: its logarithms.
    """
    total = torch.logaddexp(lse, lse2)
    weight = (lse2 - _finite(total)).exp_()
    out.lerp_(out2.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which results and gradients of blocks are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attention_block_reference(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """`attention_block` in plain torch and wide arithmetic, with the scores of some queries at a time."""
    k, v = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=k.dtype)
    for rows in _chunks(q, k):
        scores = _scores(q, k, rows, masks)
        log_sums = scores.logsumexp(-1)
        out[:, :, rows] = _probabilities(scores, log_sums).matmul(v).view(q[:, :, rows].shape)
        lse[:, :, rows] = log_sums.view(lse[:, :, rows].shape)
    return out, lse


def attention_block_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_block_backward` in plain torch and wide arithmetic, with the scores of some queries at a time."""
    k_wide, v_wide = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows in _chunks(q, k):
        scores = _scores(q, k_wide, rows, masks)
        probabilities = _probabilities(scores, lse[:, :, rows].reshape(scores.shape[:-1]))
        gradient, result = (_grouped(t[:, :, rows], k_wide) for t in (grad_out, out))
        dv += probabilities.mT @ gradient
        d_scores = gradient @ v_wide.mT - (gradient * result).sum(-1, keepdim=True)
        d_scores *= probabilities * q.shape[-1] ** -0.5
        dq[:, :, rows] = d_scores.matmul(k_wide).view(q[:, :, rows].shape)
        dk += d_scores.mT @ _grouped(q[:, :, rows], k_wide)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def block_kernel(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> BlockKernel:
    """What runs a block here; `torch.nn.attention.sdpa_kernel` narrows kernels of torch down as for its own attention.

    Args:
        q: as in `attention_block`, as are `k`, `v` and `masks`.
        k: see `q`.
        v: see `q`.
        masks: see `q`.
    """
    has_documents = masks.q_documents is not None
    can_run_triton = triton_can_run(q, k, v)
    if can_run_triton and runs_triton(q, k, v, by_default=False):
        return "triton"
    if not has_documents and runs_triton(q, k, v) and flash_attention.is_faster(q, k, v):
        return "flash-attn"
    if q.is_cuda and not has_documents and masks.window is None and q.shape[-1] % 8 == 0:
        parameters = SDPAParams(q, k, v, None, 0.0, masks.causal, True)
        if can_use_cudnn_attention(parameters):
            return "cudnn"
        if can_use_flash_attention(parameters):
            return "flash"
    return "triton" if can_run_triton and runs_triton(q, k, v) else "reference"


def triton_can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the Triton kernels take such tensors."""
    is_plain = not any(isinstance(tensor, DTensor) for tensor in (q, k, v))
    return is_plain and q.dtype == k.dtype == v.dtype != torch.float64 and q.shape[-1] <= MAX_HEAD_DIM


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Of queries."""
    batch, heads, num_queries, _ = q.shape
    length = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    return (slice(start, min(start + length, num_queries)) for start in range(0, num_queries, length))


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    """As wide as `k`, `[batch, kv_heads, group * rows, head_dim]`: heads that share keys follow each other."""
    return rows.to(k.dtype).reshape(*k.shape[:2], -1, rows.shape[-1])


def _scores(q: Tensor, k: Tensor, rows: slice, masks: Masks) -> Tensor:
    """Shape `[batch, kv_heads, group * rows, keys]`, -inf where a query does not attend."""
    causal, window, q_documents, k_documents = masks
    scores = _grouped(q[:, :, rows], k) @ (k.mT * q.shape[-1] ** -0.5)
    by_row = scores.unflatten(2, (-1, rows.stop - rows.start))
    if causal:
        places = torch.arange(k.shape[2], device=k.device)
        distances = places[rows].unsqueeze(-1) - places
        is_masked = distances < 0 if window is None else (distances < 0) | (distances >= window)
        by_row.masked_fill_(is_masked, float("-inf"))
    if q_documents is not None and k_documents is not None:
        differ = q_documents[:, rows].unsqueeze(-1) != k_documents.unsqueeze(-2)
        by_row.masked_fill_(differ[:, None, None], float("-inf"))
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return scores.sub_(_finite(lse).unsqueeze(-1)).exp_()


def _finite(lse: Tensor) -> Tensor:
    """Of a query without any key +inf, which makes its probabilities 0, where -inf would make them NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))
