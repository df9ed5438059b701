from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Causal attention in which several query heads may share one head of keys and values.

    Runs on `torch.nn.functional.scaled_dot_product_attention`. Borders of documents go to it as a mask, which takes
    `batch * seq**2` numbers in the dtype of `q`, kept for the backward; calls with the same documents can have one in
    common, made with `document_mask`. Pairs that it masks are computed all the same. In 16 bits GPUs have a kernel for
    masks and shared heads together; in float32 and float64 they write out `batch * heads * seq**2` scores.

    Args:
        q: shape `[batch, heads, seq, head_dim]`.
        k: shape `[batch, kv_heads, seq, head_dim]`; `kv_heads` divides `heads`, and head h has keys of
            `h // (heads / kv_heads)`.
        v: shape of `k`.
        documents: integers, shape `[batch, seq]`: a token attends to itself and to those before it that have the same
            number; or the `document_mask` of such numbers. None is one document a row.

    Returns:
        Shape and dtype of `q`.
    """
    mask = documents
    if mask is not None and not mask.is_floating_point():
        mask = document_mask(mask, q.dtype)
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """What `attention` adds to its scores so that tokens attend causally and within their document.

    Args:
        documents: integers, shape `[batch, seq]`.
        dtype: of the queries.

    Returns:
        Shape `[batch, 1, seq, seq]`, by query and key: 0 where the key counts, else -inf.
    """
    counts = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return torch.zeros_like(counts, dtype=dtype).masked_fill_(~counts, float("-inf"))


def attention_reference(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """`attention` with all scores written out; `documents` are numbers, not a mask."""
    batch, heads, seq, head_dim = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    if documents is None:
        documents = torch.zeros(batch, seq, dtype=torch.int64, device=q.device)
    places = torch.arange(seq, device=q.device)
    counts = (documents.unsqueeze(-1) == documents.unsqueeze(-2)) & (places.unsqueeze(-1) >= places)
    scores = (q @ k.mT / head_dim**0.5).masked_fill(~counts.unsqueeze(1), float("-inf"))
    return scores.softmax(-1) @ v
