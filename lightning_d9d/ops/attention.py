from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.attention_block import (
    MAX_HEAD_DIM,
    attention_block,
    attention_block_backward,
    in_form_of,
    triton_can_run,
    wide,
)
from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.flash_attention import flash_attention, flash_attention_package, is_faster, runs_blocks
from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.operator import define

AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math", "triton", "flash-attn"]
"""Kernels that compute attention: see `attention`."""

_BACKENDS = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, can_use_cudnn_attention),
    "flash": (SDPBackend.FLASH_ATTENTION, can_use_flash_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, can_use_efficient_attention),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    kernel: AttentionKernel = "auto",
) -> Tensor:
    """Attend causally: `softmax(q @ k.T / sqrt(head_dim)) @ v` over the keys up to a token's own.

    Several query heads may share one head of keys and values (https://arxiv.org/abs/2305.13245). The choices of
    `kernel`:

    - "auto": flash-attn 4 for causal attention and windows over 2048 tokens or more, on Hopper. It must be installed,
      and heads must have 64 or 128 numbers. Other causal attention runs on torch's choice: cuDNN on Hopper, flash
      attention on other GPUs. Documents, other windows, and float32 with shared heads run on Triton kernels on CUDA.
      Other devices, float64 and heads of more than 256 numbers use torch, with a mask of `batch * seq**2` numbers that
      is kept for the backward.
    - "cudnn", "flash", "efficient", "math": torch's kernel of that name. The first two support neither documents nor a
      window, and "efficient" neither sinks nor shared heads. Documents or a window need a mask.
    - "triton": kernels that compute only blocks of tokens with documents in common, for any shape.
    - "flash-attn": the newest installed version of that package or of `flash-attn-4`; no sinks. With documents the host
      waits for the device.

    Two runs of the Triton kernels give equal bits; backwards of other kernels, cuDNN's too, do not promise this. One
    operator, `torch.ops.lightning_d9d.attention`, covers these kernels, those of flash-attn 4 that "auto" chooses, and
    all attention with sinks on CUDA. Its backward recomputes probabilities from the logarithms of their sums, one
    float32 number for each query and head. The host does not wait.

    Args:
        q: Shape `[batch, heads, seq, head_dim]`.
        k: Shape `[batch, kv_heads, seq, head_dim]`; `kv_heads` divides `heads`, and head h uses the keys of
            `h // (heads / kv_heads)`.
        v: Shape of `k`.
        documents: Integers, shape `[batch, seq]`: a token attends to itself and to earlier tokens with the same number.
            None means one document for each row.
        window: Maximum number of tokens that a token sees, itself and those before it. None sets no limit.
        sinks: Shape `[heads]`, differentiable: the score of an additional key, whose value is zero
            (https://arxiv.org/abs/2309.17453). None adds no such key.
        kernel: see above.

    Returns:
        Shape and dtype of `q`. On CUDA, a result of torch's kernels ("auto" and "cudnn") that has a gradient cannot be
        changed in place.

    Raises:
        ConfigError: A shape does not fit, the window is empty, or the kernel does not support the arguments.
    """
    q, k, v = (t.to(autocast_dtype(t)) for t in (q, k, v))
    _check(q, k, v, documents, window, sinks, kernel)
    if window is not None and window >= q.shape[2]:
        window = None
    if kernel == "auto":
        chosen = _choice(q, k, v, documents, window, sinks)
    elif reason := _why_not(kernel, q, k, v, documents, window, sinks):
        others = [
            name for name in get_args(AttentionKernel)[1:] if not _why_not(name, q, k, v, documents, window, sinks)
        ]
        raise ConfigError(
            f"kernel={kernel!r} does not support this attention: {reason}. Supported: 'auto', "
            f"{', '.join(map(repr, others))}"
        )
    else:
        chosen = kernel
    if chosen == "flash-attn" and (documents is not None or not runs_blocks(q, k, v)):
        return flash_attention(q, k, v, documents, window)
    if chosen in ("triton", "block", "flash-attn") or (chosen in ("cudnn", "flash") and sinks is not None):
        return _attend_op(q, k, v, documents, sinks, window, chosen)[0]
    if sinks is not None:
        return attention_reference(q, k, v, documents, window=window, sinks=sinks)
    backend = SDPBackend.MATH if chosen == "math" else _BACKENDS[chosen][0] if chosen in _BACKENDS else None
    mask = None if documents is None and window is None else _mask(q, documents, window)
    is_grouped = q.shape[1] != k.shape[1]
    with nullcontext() if backend is None else sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)
    may_be_cudnn = chosen in ("torch", "cudnn") and out.is_cuda
    return _TakesGradientInOneForm.apply(out) if may_be_cudnn and out.requires_grad else out


class _TakesGradientInOneForm(torch.autograd.Function):
    """Ensures only what [Note: plans of cuDNN] requires.

    Its result is a view, which torch does not allow to be changed in place.
    """

    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:
        ctx.strides = out.stride()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        if gradient.stride() == ctx.strides:
            return gradient
        return gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention` with all scores written out."""
    heads, seq, head_dim = q.shape[1:]
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / head_dim**0.5).masked_fill(~_counts(seq, q.device, documents, window), float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _counts(seq: int, device: torch.device, documents: Tensor | None, window: int | None) -> Tensor:
    """Return True for keys that count, by query and key: shape `[1 or batch, 1, seq, seq]`."""
    counts = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device)
    if documents is not None:
        counts = documents[:, None, :, None] == documents[:, None, None, :]
    counts = counts.tril()
    return counts if window is None else counts.triu(1 - window)


def _mask(q: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Return the mask that is added to scores."""
    counts = _counts(q.shape[2], q.device, documents, window)
    return torch.zeros_like(counts, dtype=q.dtype).masked_fill_(~counts, float("-inf"))


def _choice(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None) -> str:
    """Choose for "auto": "torch" is torch's choice; "block" the operator's, which the compiler cannot trace."""
    can_run_triton = triton_can_run(q, k, v)
    if can_run_triton and runs_triton(q, k, v, by_default=False):
        return "triton"
    if not can_run_triton or not runs_triton(q, k, v):
        return "torch"
    if documents is None and is_faster(q, k, v):
        return "flash-attn"
    # In float32 torch has no kernel for shared heads, and writes all scores.
    if documents is not None or window is not None or (q.dtype == torch.float32 and q.shape[1] != k.shape[1]):
        return "triton"
    return "torch" if sinks is None else "block"


def _check(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None, kernel: str
) -> None:
    (batch, heads, seq, head_dim), kv_heads = q.shape, k.shape[1]
    if k.shape != (batch, kv_heads, seq, head_dim) or v.shape != k.shape or heads % max(1, kv_heads):
        raise ConfigError(
            f"k {list(k.shape)} and v {list(v.shape)} must have the shape of q {list(q.shape)}, except for a number of "
            "heads that divides that of q"
        )
    if documents is not None and (documents.shape != (batch, seq) or documents.is_floating_point()):
        raise ConfigError(
            f"documents {list(documents.shape)} of {documents.dtype} must be integers of shape [batch, seq], here "
            f"{[batch, seq]}"
        )
    if window is not None and window < 1:
        raise ConfigError(f"window={window} must be 1 or more, because a token sees itself")
    if sinks is not None and sinks.shape != (heads,):
        raise ConfigError(f"sinks {list(sinks.shape)} must have one number for each head of q, here {heads}")
    if kernel not in get_args(AttentionKernel):
        raise ConfigError(f"kernel={kernel!r} must be one of {', '.join(map(repr, get_args(AttentionKernel)))}")


def _why_not(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None
) -> str | None:
    """Return why a kernel does not support these arguments."""
    is_masked = documents is not None or window is not None
    of_what = f"{q.dtype} on {q.device.type} with head_dim {q.shape[-1]}"
    if kernel == "math":
        return None
    if kernel == "triton":
        if not triton_can_run(q, k, v):
            return f"it takes float32, bfloat16 and float16 up to head_dim {MAX_HEAD_DIM}, not {of_what}"
        is_there = q.is_cuda or runs_triton(q, k, v, by_default=False)
        return None if is_there else f"it takes CUDA tensors, not {of_what}"
    if kernel == "flash-attn":
        if flash_attention_package() is None:
            return "there is no package for it; pip install 'lightning-d9d[flash-attn]'"
        if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16 on CUDA, not {of_what}"
        return None if sinks is None else "it takes no sinks"
    if is_masked and kernel != "efficient":
        return "it takes neither documents nor a window"
    if sinks is not None and kernel == "efficient":
        return "it takes no sinks"
    mask = torch.empty(1, 1, 1, 1, dtype=q.dtype, device=q.device).expand(-1, -1, q.shape[2], -1) if is_masked else None
    can_use = _BACKENDS[kernel][1]
    can_run = q.is_cuda and (  # the compiler cannot trace the question
        torch.compiler.is_compiling() or can_use(SDPAParams(q, k, v, mask, 0.0, mask is None, q.shape[1] != k.shape[1]))
    )
    return None if can_run else f"torch has it not for {of_what} and {q.shape[1]} heads on {k.shape[1]}"


class _Given(NamedTuple):
    """Arguments of the backward's operator after the gradient of the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    documents: Tensor | None
    sinks: Tensor | None
    window: int | None
    kernel: Any
    needs_q: bool
    needs_kv: bool
    needs_sinks: bool


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    kernel: Any,
) -> tuple[Tensor, Tensor]:
    masks = Masks(True, window, documents, documents)
    out, lse = attention_block(q, k, v, masks, sinks=sinks, kernel=None if kernel == "block" else kernel)
    return _in_form_of(q, out, kernel), lse


def _new_results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = _Given(*arguments)
    q, k, v, out, lse = given[:5]
    dq, dk, dv, dsinks = _empty_gradients(given)
    if given.needs_q or given.needs_kv:
        of_block = attention_block_backward(
            grad_out,
            *given[:5],
            Masks(True, given.window, given.documents, given.documents),
            kernel=None if given.kernel == "block" else given.kernel,
            needs_q=given.needs_q,
            needs_kv=given.needs_kv,
        )
        if given.needs_q:
            dq = _in_form_of(q, of_block[0], given.kernel)
        if given.needs_kv:
            dk, dv = _in_form_of(k, of_block[1], given.kernel), _in_form_of(v, of_block[2], given.kernel)
    if given.needs_sinks:
        assert given.sinks is not None
        deltas = (grad_out.to(lse.dtype) * out).sum(-1)
        dsinks.copy_(-((given.sinks.to(lse.dtype).unsqueeze(-1) - lse).exp() * deltas).sum((0, 2)))
    return dq, dk, dv, dsinks


def _new_gradients(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(_Given(*arguments))


def _empty_gradients(given: _Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the gradients of `q`, `k`, `v` and `sinks`; without elements for those not requested."""
    sinks = given.q if given.sinks is None else given.sinks
    needs_kv = given.needs_kv
    parts = ((given.q, given.needs_q), (given.k, needs_kv), (given.v, needs_kv), (sinks, given.needs_sinks))
    dq, dk, dv, dsinks = (torch.empty_like(t) if needed else t.new_empty(0) for t, needed in parts)
    return dq, dk, dv, dsinks


def _in_form_of(tensor: Tensor, value: Tensor, kernel: str) -> Tensor:
    """Give results the strides that the compiler expects; those of the Triton kernels have them."""
    return value if kernel == "triton" else in_form_of(tensor, value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, sinks, ctx.window, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output, documents, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros are written for that of the logarithms


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 7
    needs_q, needs_k, needs_v, _, needs_sinks, *_ = ctx.needs_input_grad
    needed = needs_q, needs_k or needs_v, needs_sinks
    dq, dk, dv, dsinks = _gradient_op(grad_out, *ctx.saved_tensors, ctx.window, ctx.kernel, *needed)
    asked = ((dq, needs_q), (dk, needs_k), (dv, needs_v))
    return *(d if needed else None for d, needed in asked), None, dsinks if needs_sinks else None, None, None


_attend_op = define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, int? window, str kernel) -> (Tensor, Tensor)",
    _forward,
    _new_results,
    setup_context=_setup_context,
    backward=_differentiate,
    compiles_ahead=lambda *args: args[-1] == "triton",
)
_gradient_op = define(
    "attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents, Tensor? sinks, "
    "int? window, str kernel, bool needs_q, bool needs_kv, bool needs_sinks) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _new_gradients,
)
