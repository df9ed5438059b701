"""Adam and AdamW whose moments advance once in several steps, for small local batches of decentralised replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local


class AccumAdam(Optimizer):
    """Adam whose moments advance once in `accum_iter` steps, by the mean of their gradients.

    Each step uses the current gradient beside the moments, so weights move in every step. With one gradient in `s`, a
    step uses K = `accum_iter`, step t and tau = ceil(t / K):

        s = s + g / K
        weight = weight - lr / (1 - beta1^tau) * (m + (1 - beta1) g)
                          / (sqrt(v + (1 - beta2) g^2) / sqrt(1 - beta2^tau) + eps)
        where K divides t: m = beta1 (m + (1 - beta1) s), v = beta2 (v + (1 - beta2) s^2), s = 0

    Stored moments are already multiplied by their beta. With `accum_iter=1` this is Adam. The published method
    (Decent-DP) is for replicas that mix their weights. It runs on any mesh: each rank updates its part of a DTensor.
    The state of a parameter is `step`, a float32 scalar, and three tensors of its shape. They are float32, or float64
    for float64 weights. Weights in bfloat16 are updated in float32 and rounded to nearest.

    Args:
        params: Parameters, as for any optimizer of torch.
        lr: The learning rate.
        betas: Decay rates of the moments, from 0 to below 1.
        eps: Number added to the root of the second moment.
        weight_decay: Number that is multiplied with the weight and added to the gradient (L2).
        accum_iter: Number of steps for one step of the moments.

    Raises:
        ConfigError: A value is out of range, or `step` is called with a sparse gradient.
    """

    decoupled = False
    """True if weight decay shrinks weights; False if it is added to gradients."""
    updates_each_alone = True
    """True because a parameter's update depends only on that parameter."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        accum_iter: int = 4,
    ) -> None:
        limits = {
            "lr": (lr >= 0, "0 or more"),
            "betas": (len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
            "eps": (eps >= 0, "0 or more"),
            "weight_decay": (weight_decay >= 0, "0 or more"),
            "accum_iter": (isinstance(accum_iter, int) and accum_iter >= 1, "an integer of at least 1"),
        }
        for name, (is_good, limit) in limits.items():
            if not is_good:
                raise ConfigError(f"{type(self).__name__}: {name}={locals()[name]!r} must be {limit}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; those without keep their state.

        Args:
            closure: Function that is called first and computes gradients.

        Returns:
            The result of the closure.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return result

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None or parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"{type(self).__name__}: the gradient of a parameter of shape {list(parameter.shape)} is sparse; make "
                "it dense (nn.Embedding(sparse=False))"
            )
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", "grad_sum"):
                state[name] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        step, size = int(state["step"]), group["accum_iter"]
        (beta1, beta2), rounds = group["betas"], -(-step // size)
        weight, gradient = local(parameter).to(wide), local(parameter.grad).to(wide)
        first, second, total = (local(state[name]) for name in ("exp_avg", "exp_avg_sq", "grad_sum"))
        if self.decoupled:
            weight = weight * (1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * weight
        total.add_(gradient / size)
        fresh = first + (1 - beta1) * gradient
        root = (second + (1 - beta2) * gradient**2).sqrt() / (1 - beta2**rounds) ** 0.5
        local(parameter).copy_(weight - group["lr"] / (1 - beta1**rounds) * fresh / (root + group["eps"]))
        if step % size == 0:
            first.add_(total, alpha=1 - beta1).mul_(beta1)
            second.addcmul_(total, total, value=1 - beta2).mul_(beta2)
            total.zero_()


class AccumAdamW(AccumAdam):
    """`AccumAdam` with decoupled weight decay: weights shrink by `lr * weight_decay`, and gradients do not change.

    Args:
        params: Parameters, as for `AccumAdam`.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Number added to the root of the second moment.
        weight_decay: Weight decay; may be 0.
        accum_iter: Number of steps for one step of the moments.

    Raises:
        ConfigError: A value is out of range, or `step` is called with a sparse gradient.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        accum_iter: int = 4,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter=accum_iter)
