from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define

Scores = Literal["softmax", "sigmoid"]


class Routes(NamedTuple):
    """The experts that tokens visit, with their weights and counts."""

    indices: Tensor
    """The experts of each token, the best first, int64 `[tokens, top_k]`."""

    weights: Tensor
    """Factors of these experts' results, float32 `[tokens, top_k]`; float64 for logits in float64."""

    counts: Tensor
    """Number of tokens that visit each expert, int64 `[experts]`, on the device."""

    scores: Tensor | None
    """Scores of all experts, `[tokens, experts]` in the dtype of `weights`, if they were requested."""


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scores: Scores = "softmax",
    bias: Tensor | None = None,
    normalize: bool = True,
    chosen: Tensor | None = None,
    with_scores: bool = False,
) -> Routes:
    """Choose the `top_k` best experts of each token, weigh them and count the tokens of each expert.

    The scores of experts e follow from the logits l of a token:

    - softmax: `s[e] = exp(l[e]) / sum(exp(l))`,
    - sigmoid: `s[e] = 1 / (1 + exp(-l[e]))`,

    the experts i are those with the largest `s + bias`, and the weights are `s[i]`. Normalized weights are
    `s[i] / sum(s[i])`, computed as a softmax of `log(s[i])`, so scores too small for the dtype are harmless.
    Computation is in float32 for logits of any dtype but float64. Without a bias, logits are compared instead of
    scores: they have the same order, but scores may be rounded to equal ones.

    Among equal experts the kernel takes those with lower indices first; torch takes any. NaN counts as larger than all
    numbers. A token with only NaN gets valid experts, and NaN as weights. Results do not depend on the order in which
    programs run. The host does not wait.

    Differentiable: `logits` get the gradient of `weights` and of `scores`, in one kernel that recomputes scores. For
    normalized softmax weights alone, logits are not needed and not kept.

    Args:
        logits: Shape `[tokens, experts]`.
        top_k: Number of experts that a token visits.
        scores: Kind of scores.
        bias: Added to the scores for the choice only, shape `[experts]`. It does not get a gradient.
        normalize: If True, the weights of a token sum to one.
        chosen: Experts that are already chosen, int64 `[tokens, top_k]`.
        with_scores: If True, return the scores of all experts, too, for losses of routers.

    Raises:
        ConfigError: The kind of scores is unknown, or there are fewer experts than `top_k`.
    """
    if scores not in get_args(Scores):
        raise ConfigError(f"scores={scores!r} must be one of {', '.join(map(repr, get_args(Scores)))}")
    if not 0 < top_k <= logits.shape[1]:
        raise ConfigError(f"top_k={top_k} must be at least 1 and at most the number of experts, {logits.shape[1]}")
    if not runs_triton(logits):
        return moe_route_reference(
            logits, top_k, scores=scores, bias=bias, normalize=normalize, chosen=chosen, with_scores=with_scores
        )
    bias = None if bias is None else bias.detach()
    indices, weights, counts, of_all = _route_op(
        logits, top_k, bias, chosen, scores == "sigmoid", normalize, with_scores
    )
    return Routes(indices, weights, counts, of_all if with_scores else None)


def moe_route_reference(
    logits: Tensor,
    top_k: int,
    *,
    scores: Scores = "softmax",
    bias: Tensor | None = None,
    normalize: bool = True,
    chosen: Tensor | None = None,
    with_scores: bool = False,
) -> Routes:
    """Compute `moe_route` with torch's own operators."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_softmax, of_all = scores == "softmax", None
    if with_scores or not normalize or bias is not None:
        of_all = logits.softmax(-1) if is_softmax else logits.sigmoid()
    if chosen is None:
        compared = logits if of_all is None or bias is None else of_all + bias
        indices = compared.detach().topk(top_k, dim=-1).indices
    else:
        indices = chosen.clone()
    if normalize:
        logs = logits.gather(-1, indices)
        weights = (logs if is_softmax else F.logsigmoid(logs)).softmax(-1)
    else:
        assert of_all is not None
        weights = of_all.gather(-1, indices)
    flat = indices.flatten()
    counts = flat.new_zeros(logits.shape[1]).scatter_add_(0, flat, torch.ones_like(flat))
    return Routes(indices, weights, counts, of_all if with_scores else None)


def _new_results(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    chosen: Tensor | None,
    sigmoid: bool,
    normalize: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits.new_empty(num_tokens, top_k, dtype=wide),
        logits.new_empty(num_experts, dtype=torch.int64),
        logits.new_empty(num_tokens if with_scores else 0, num_experts, dtype=wide),
    )


def _route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    chosen: Tensor | None,
    sigmoid: bool,
    normalize: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from lightning_d9d.ops.kernels import moe_route as kernels

    results = _new_results(logits, top_k, bias, chosen, sigmoid, normalize, with_scores)
    kernels.route(logits, bias, chosen, sigmoid, normalize, *results)
    return results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, _, ctx.sigmoid, ctx.normalize, with_scores = inputs
    indices, weights, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.num_experts, ctx.dtype = logits.shape[1], logits.dtype
    needs_logits = with_scores or ctx.sigmoid or not ctx.normalize
    ctx.save_for_backward(logits if needs_logits else None, indices, weights)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    _, of_weights, _, of_scores = gradients
    logits, indices, weights = ctx.saved_tensors
    of_logits = None
    if of_weights is not None or of_scores is not None:
        of_logits = _gradient_op(
            of_weights, of_scores, logits, indices, weights, ctx.sigmoid, ctx.normalize, ctx.num_experts, ctx.dtype
        )
    return of_logits, *[None] * 6


def _new_gradient(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    logits: Tensor | None,
    indices: Tensor,
    weights: Tensor,
    sigmoid: bool,
    normalize: bool,
    num_experts: int,
    dtype: torch.dtype,
) -> Tensor:
    return weights.new_empty(len(weights), num_experts, dtype=dtype)


def _backward(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    logits: Tensor | None,
    indices: Tensor,
    weights: Tensor,
    sigmoid: bool,
    normalize: bool,
    num_experts: int,
    dtype: torch.dtype,
) -> Tensor:
    from lightning_d9d.ops.kernels import moe_route as kernels

    result = _new_gradient(of_weights, of_scores, logits, indices, weights, sigmoid, normalize, num_experts, dtype)
    kernels.backward(of_weights, of_scores, logits, indices, weights, sigmoid, normalize, result)
    return result


_route_op = define(
    "moe_route",
    "(Tensor logits, int top_k, Tensor? bias, Tensor? chosen, bool sigmoid, bool normalize, bool with_scores) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _route,
    _new_results,
    setup_context=_setup_context,
    backward=_differentiate,
    compiles_ahead=True,
)
_gradient_op = define(
    "moe_route_backward",
    "(Tensor? of_weights, Tensor? of_scores, Tensor? logits, Tensor indices, Tensor weights, bool sigmoid, "
    "bool normalize, SymInt num_experts, ScalarType dtype) -> Tensor",
    _backward,
    _new_gradient,
)
