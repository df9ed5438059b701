"""Attention of some queries to some keys; attention to all keys is merged from such blocks.

A block's result comes with the natural logarithm of the sum of its exponentiated scores, in float32 (float64 for
float64). `merge` uses it to weigh two results. The backward of a block takes the result and logarithm of the whole, so
gradients of blocks can be summed. See https://arxiv.org/abs/2205.14135 for the arithmetic and
https://arxiv.org/abs/2310.01889 for blocks on several devices.

These functions are not differentiable themselves.

[Note: plans of cuDNN] torch caches a plan of cuDNN's backward by the sizes and memory order of queries, keys and
values. The order of result and gradient is not part of the key: they are read in the order of the first call (torch
2.11). So both always get the memory order of the queries, which the forward's result has.
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
"""Kernels that can run a block: flash-attn 4, torch's, `lightning_d9d.ops.kernels.attention`, or plain torch."""

MAX_HEAD_DIM = 256
"""The largest head dim of the Triton kernels."""

_MAX_SCORES = 1 << 24
"""Maximum number of scores that the reference holds at a time, unless those of one query for each head exceed it."""

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
    """Attend with queries to a block of keys; several query heads may share one head of keys and values.

    On CUDA this runs on flash-attn 4 if it is installed, or on torch's cuDNN or flash attention kernels, if they
    support the arguments. Otherwise, and always with documents, it runs on Triton kernels, which skip pairs of blocks
    without a common document. Float64 tensors, heads of more than 256 numbers and other devices use
    `attention_block_reference`.

    Args:
        q: Shape `[batch, heads, queries, head_dim]`.
        k: Shape `[batch, kv_heads, keys, head_dim]`; `kv_heads` divides `heads`, and head h uses the keys of
            `h // (heads / kv_heads)`.
        v: Shape of `k`.
        masks: Masks that say which pairs of queries and keys count.
        sinks: Shape `[heads]`, the score of an additional key with a value of zero. The backward gets the sinks from
            `lse`.
        kernel: Kernel that runs it, which must support the arguments (`block_kernel`); None chooses one.

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
    """Return the contribution of a block of keys to the gradients of attention.

    Args:
        grad_out: Gradient of the result, shape of `q`.
        q: Arguments as in `attention_block`, like `k`, `v`, `masks` and `kernel`.
        k: see `q`.
        v: see `q`.
        out: Result of these queries for all their keys, in this block and others.
        lse: Logarithms of that result.
        masks: see `q`.
        kernel: see `q`.
        needs_q: If True, compute the gradient of `q`; the Triton kernels compute only requested ones.
        needs_kv: If True, compute the gradients of `k` and `v`.

    Returns:
        The summands of the gradients of `q`, `k` and `v`, in their shapes and dtypes; those that are not requested may
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
    lse = lse.contiguous()  # flash attention assumes it
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
    """Return `value` in the dtype and memory order of `empty_like(tensor)`; a copy if it differs."""
    form = torch.empty_like(tensor, device="meta")
    is_so = value.dtype == form.dtype and value.stride() == form.stride()
    return value if is_so else torch.empty_like(tensor).copy_(value)


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Add the result of a further block to that of others, in place.

    Args:
        out: The others' result, shape `[batch, heads, queries, head_dim]`, in float32 (float64 for float64).
        lse: The others' logarithms, shape `[batch, heads, queries]`, in the dtype of `out`.
        out2: The further block's result, shape of `out`, in any dtype.
        lse2: its logarithms.
    """
    total = torch.logaddexp(lse, lse2)
    weight = (lse2 - _finite(total)).exp_()
    out.lerp_(out2.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results and gradients of blocks are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attention_block_reference(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """Compute `attention_block` in plain torch and wide arithmetic, with the scores of some queries at a time."""
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
    """Compute `attention_block_backward` in plain torch and wide arithmetic, some queries at a time."""
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
    """Return the kernel that runs a block here; `torch.nn.attention.sdpa_kernel` restricts torch's kernels as usual.

    Args:
        q: Arguments as in `attention_block`, like `k`, `v` and `masks`.
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
    """Return True if the Triton kernels support these tensors."""
    is_plain = not any(isinstance(tensor, DTensor) for tensor in (q, k, v))
    return is_plain and q.dtype == k.dtype == v.dtype != torch.float64 and q.shape[-1] <= MAX_HEAD_DIM


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of queries."""
    batch, heads, num_queries, _ = q.shape
    length = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    return (slice(start, min(start + length, num_queries)) for start in range(0, num_queries, length))


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    """Return rows as `[batch, kv_heads, group * rows, head_dim]`: heads that share keys are consecutive."""
    return rows.to(k.dtype).reshape(*k.shape[:2], -1, rows.shape[-1])


def _scores(q: Tensor, k: Tensor, rows: slice, masks: Masks) -> Tensor:
    """Return scores of shape `[batch, kv_heads, group * rows, keys]`, -inf where a query does not attend."""
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
    """Replace -inf of a query without any key by +inf, so that its probabilities are 0 instead of NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))
