"""Load balance of mixtures of experts: a bias without a loss, losses of the router, and measures of the load.

`ExpertBalance` is the part of a router that does this; your own router can have one, too.

[Note: sequences on several ranks] Ranks may share sequences: each then has equally many tokens of each sequence
(`spread_sequences`). A loss on a rank is then a mean over its own tokens, with the counts of experts that one process
would have. So the mean of these losses over the ranks is the loss of one process. The model takes this mean, once for
all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules.initial_values import Constant, DrawnByRows
from lightning_d9d.ops import Routes, moe_route
from lightning_d9d.ops.once import add_once_, sum_once
from lightning_d9d.waits import waiting


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How tokens are kept evenly distributed over experts. Each part is off by default; the load is always counted.

    Raises:
        ConfigError: A number is negative or infinite, or values contradict each other.
    """

    bias_rate: float = 0.0
    """Change of an expert's bias after each optimizer step, such as 0.001. The bias rises where the expert got fewer
    tokens than the mean, and falls where it got more (https://arxiv.org/abs/2408.15664)."""

    sequence_loss: float = 0.0
    """Coefficient of the balance loss of each sequence (https://arxiv.org/abs/2412.19437), such as 0.0001. If ranks
    share sequences, it costs a small all-reduce for each layer and microbatch."""

    global_batch_loss: float = 0.0
    """Coefficient of the balance loss over the microbatches of all data ranks (https://arxiv.org/abs/2501.11873), such
    as 0.001. It costs a small all-reduce for each layer and microbatch."""

    z_loss: float = 0.0
    """Coefficient of the mean squared logsumexp of the router's logits (https://arxiv.org/abs/2202.08906), such as
    0.001."""

    forced: bool = False
    """For benchmarks: experts take turns, independent of the router. Such training gives no useful model."""

    def __post_init__(self) -> None:
        for name in ("bias_rate", "sequence_loss", "global_batch_loss", "z_loss"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"BalanceConfig.{name}={value!r} must be a number of at least 0")
        if not isinstance(self.forced, bool):
            raise ConfigError(f"BalanceConfig.forced={self.forced!r} must be true or false")
        if self.forced and self.bias_rate:
            raise ConfigError(
                f"BalanceConfig.bias_rate={self.bias_rate} has no effect if forced=True chooses the experts; leave one "
                "of them out"
            )

    @property
    def has_losses(self) -> bool:
        """True if the router has a loss."""
        return any((self.sequence_loss, self.global_batch_loss, self.z_loss))


class ExpertBalance(DrawnByRows):
    """The load of a router's experts, and the means to balance it.

    The bias is float32 whatever the model's dtype, because its steps are too small for narrower dtypes. Checkpoints
    contain the bias, but not the counts. Tokens count in forwards with gradient, but not in those that a recomputation
    (`torch.utils.checkpoint` with `use_reentrant=False`) repeats.

    Args:
        num_experts: Number of experts of the layer.
        config: Settings of the balance.
    """

    bias: Tensor | None
    """Added to the probabilities for the choice of experts, float32 `[experts]`; None without a `bias_rate`."""

    tokens_per_expert: Tensor
    """Number of tokens that this process sent to each expert since `update_expert_bias`, int64 `[experts]`."""

    def __init__(self, num_experts: int, config: BalanceConfig) -> None:
        super().__init__()
        self.config = config
        self.counts_tokens = True
        """False while tokens pass that are there for a schedule's sake."""
        self.group: dist.ProcessGroup | None = None
        """The ranks whose tokens make up the global batch; None: this process alone."""
        self.sequence_group_name: str | None = None
        """Name of the group of ranks that share this one's sequences, if there are any: `spread_sequences`."""
        self.sequence_rank = 0
        """The rank of this process in that group."""
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32) if config.bias_rate else None)
        self.register_buffer("tokens_per_expert", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Constant]:
        """Return zeros for the bias and the counts."""
        return {name: Constant(0.0) for name, _ in self.named_buffers(recurse=False)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBalance:
        """Keep the dtype of the bias in `module.to(torch.bfloat16)` and the like."""

        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            keeps_dtype = tensor is self.bias and applied.dtype != tensor.dtype
            return tensor.to(applied.device) if keeps_dtype else applied

        return super()._apply(apply, recurse)

    def forward(self, logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the experts and weights of tokens, count the tokens of each expert, and compute the router's loss.

        With a `global_batch_loss` this is collective over `group`, and with a `sequence_loss` over the ranks that share
        the sequences, except in recomputations.

        Args:
            logits: Logits of the router, shape `[..., tokens, experts]`: sequences of tokens, or this rank's part of
                each.
            top_k: Number of experts that a token visits.
            normalize: Whether the weights of a token sum to one.

        Returns:
            Indices and weights of the experts, both `[all tokens, top_k]`: `moe_route`, with softmax. Also the sum of
            all losses times their coefficients, a scalar in the dtype of the weights; None without losses, and without
            gradient. `modules/balance.py` describes sequences on several ranks.
        """
        config, is_training = self.config, torch.is_grad_enabled()
        flat = logits.flatten(0, -2)
        routes = moe_route(
            flat,
            top_k,
            bias=self.bias,
            normalize=normalize,
            chosen=self._turns(len(flat), top_k, logits) if config.forced else None,
            with_scores=is_training and bool(config.sequence_loss or config.global_batch_loss),
        )
        return routes.indices, routes.weights, self._loss(logits, routes) if is_training else None

    def _turns(self, num_tokens: int, top_k: int, logits: Tensor) -> Tensor:
        """Return forced choices: the copies of all tokens take turns.

        Copies of the first rank that shares the sequences come first, then those of the second and so on. The experts
        of a token are far apart if `top_k` divides their number, so that as many ranks as possible have some of them.
        """
        num_copies, num_experts = num_tokens * top_k, logits.shape[-1]
        copies = torch.arange(num_copies, device=logits.device) + self.sequence_rank * num_copies
        turns = copies.remainder(num_experts)
        if num_experts % top_k == 0:
            turns = turns % top_k * (num_experts // top_k) + turns // top_k
        return turns.view(num_tokens, top_k)

    def _loss(self, logits: Tensor, routes: Routes) -> Tensor | None:
        config = self.config
        if self.counts_tokens:
            add_once_(self.tokens_per_expert, routes.counts)
        losses = []
        if config.sequence_loss:
            assert routes.scores is not None
            *shape, num_experts = logits.shape
            counts = _count(routes.indices.view(*shape, routes.indices.shape[1]), num_experts)
            if self.sequence_group_name is not None:
                counts = sum_once(counts, self.sequence_group_name)
            losses.append(config.sequence_loss * sequence_balance_loss(routes.scores.view_as(logits), counts))
        if config.global_batch_loss:
            assert routes.scores is not None
            counts = routes.counts * self.counts_tokens
            if self.group is not None:
                counts = sum_once(counts, self.group.group_name)
            losses.append(config.global_batch_loss * balance_loss(routes.scores, counts))
        if config.z_loss:
            losses.append(config.z_loss * router_z_loss(logits))
        return torch.stack(losses).sum() if losses else None


def sequence_balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over sequences of `balance_loss`.

    Args:
        probabilities: Probability of each expert for each token of this rank, shape `[..., tokens, experts]`.
        counts: Number of tokens of each sequence that went to each expert, perhaps on other ranks, too; shape
            `[sequences, experts]`.
    """
    num_sequences, num_experts = counts.shape
    means = probabilities.sum(-2).view(num_sequences, num_experts) / max(1, probabilities.shape[-2])
    return _FixedProduct.apply(means, _relative(counts, means.dtype)) / max(1, num_sequences)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Return `num_experts * sum(f * P)`: 1 for an even load, more if the probable experts are the busy ones.

    `f` is each expert's fraction of all copies of tokens, without gradient, and `P` its mean probability.

    Args:
        probabilities: Probability of each expert for each token of this rank, shape `[..., experts]`.
        counts: Number of tokens that went to each expert, perhaps on other ranks, too; shape `[experts]`.
    """
    num_experts = len(counts)
    flat = probabilities.view(-1, num_experts)
    return _FixedProduct.apply(flat.sum(0) / max(1, len(flat)), _relative(counts, flat.dtype))


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared logsumexp of their logits `[..., experts]`."""
    squares = logits.logsumexp(-1).square()
    return squares.sum() / max(1, squares.numel())


def spread_sequences(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Tell each `ExpertBalance` of a module that ranks share sequences. Not collective.

    Args:
        module: Module of this rank, which sees as many tokens of each sequence as those of the other ranks.
        group: All ranks with tokens of the same sequences; if this is the only one, its sequences are whole.
    """
    for part in module.modules():
        if isinstance(part, ExpertBalance):
            part.sequence_group_name = group.group_name if group.size() > 1 else None
            part.sequence_rank = group.rank()


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, rate: float, group: dist.ProcessGroup | None = None, skip: Tensor | None = None
) -> dict[str, Tensor]:
    """Move each bias by `rate` towards an even load, and restart the counts. Call this after an optimizer step.

    An expert with fewer tokens than the mean of its layer gets `rate` more, one with more tokens `rate` less. If no
    token was counted, nothing changes. Biases stay equal on all ranks. The host does not wait.

    Collective over `group`, in one all-reduce for all layers.

    Args:
        model: Module with an `ExpertBalance` in each router; the same layers on all ranks of the group.
        rate: The step, such as 0.001.
        group: The ranks whose tokens count together; None is the default process group, if there is one.
        skip: A bool on the device, equal on all ranks: if True, restart the counts without changing the biases. None:
            never.

    Returns:
        The tokens of each expert that were counted on all ranks, int64 `[experts]`, by the name of the `ExpertBalance`.
    """
    balances = {name: part for name, part in model.named_modules() if isinstance(part, ExpertBalance)}
    if not balances:
        return {}
    counters = [balance.tokens_per_expert for balance in balances.values()]
    summed = torch.cat(counters)
    if dist.is_available() and dist.is_initialized():
        with waiting():
            dist.all_reduce(summed, group=group)
    totals = summed.split([len(counter) for counter in counters])
    for balance, counts in zip(balances.values(), totals, strict=True):
        if balance.bias is not None:
            direction = (counts.sum() - len(counts) * counts).sign().to(balance.bias.dtype)
            balance.bias.add_(direction if skip is None else direction.masked_fill(skip, 0.0), alpha=rate)
    torch._foreach_zero_(counters)
    return dict(zip(balances, totals, strict=True))


def expert_load(counts: Tensor) -> Tensor:
    """Return two measures of how even a load is; both are 1 for an even one.

    Args:
        counts: Tokens of each expert, shape `[..., experts]`.

    Returns:
        Float32 `[..., 2]`. First, the tokens of the busiest expert over the mean, up to the number of experts. Second,
        the entropy of the experts' fractions over that of an even load, down to 0 if one expert has all tokens. Both
        are 0 if nothing was counted.
    """
    num_experts = counts.shape[-1]
    fractions = counts.float() / counts.sum(-1, keepdim=True).clamp_min(1)
    entropy = torch.special.entr(fractions).sum(-1) / math.log(max(2, num_experts))
    return torch.stack([fractions.amax(-1) * num_experts, entropy], -1)


def _count(indices: Tensor, num_experts: int) -> Tensor:
    """Count each sequence's tokens by expert, int64 `[sequences, experts]`, from indices `[..., tokens, top_k]`."""
    *sequences, tokens, top_k = indices.shape
    flat = indices.reshape(math.prod(sequences), tokens * top_k)
    return flat.new_zeros(len(flat), num_experts).scatter_add_(1, flat, torch.ones_like(flat))


def _relative(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return counts over their mean along the last dim; 0 where there are none."""
    return counts.to(dtype) * counts.shape[-1] / counts.sum(-1, keepdim=True).clamp_min(1)


class _FixedProduct(torch.autograd.Function):
    """`(x * factors).sum()` with factors that a recomputation must not compute again: they may come from other ranks.

    Otherwise a recomputation would use factors from the repeated forward, in which ranks do not communicate.
    """

    @staticmethod
    def forward(ctx, x: Tensor, factors: Tensor) -> Tensor:
        ctx.factors = factors
        return (x * factors).sum()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0] * ctx.factors, None
