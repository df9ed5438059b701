"""Muon for matrices and AdamW for the rest, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local, sharding_of
from lightning_d9d.optim.whole_matrices import on_whole_matrices

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The polynomial that each iteration applies to singular values; Muon's author found it."""
_ITERATIONS = 5
_DTYPES = (torch.float32, torch.float64)
_SCALE = 0.2
"""Root mean square of AdamW's updates, to which those of matrices are scaled."""


def orthogonalized(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices close to 1, by five Newton-Schulz iterations. Local.

    Args:
        matrices: `[..., rows, columns]`; each is taken by itself.

    Returns:
        Matrices of the same shape and dtype; those of zeros stay. Singular values come to lie between about 0.7 and
        1.2, unless they are far below the matrix's norm.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class MuonAdamW(Optimizer):
    """Muon for matrices, AdamW for vectors and what a group says.

    The update of a matrix is its momentum with singular values near 1 (`orthogonalized`), times
    `0.2 * sqrt(max(rows, columns))`. An element then changes about as much as by AdamW, so AdamW's learning rate and
    weight decay carry over (Moonlight, arXiv 2502.16982). A parameter of more than two dims is a stack of matrices,
    such as experts.

    Iterations are in bfloat16, for float64 weights in float64. Matrices are whole where they are computed:
    `lightning_d9d.optim.whole_matrices` tells which ranks send what. Ranks that share a matrix must have gradients for
    the same parameters; `step` is collective over them.

    The state of a matrix is `momentum`, that of other parameters `step`, a number, `exp_avg` and `exp_avg_sq`.
    Tensors lie as their parameter does.

    Args:
        params: As for any optimizer of torch; float32 or float64, also DTensors.
        lr: Learning rate of both.
        weight_decay: Decoupled: weights shrink by `lr * weight_decay`.
        momentum: Decay rate of the momentum of matrices, which is Nesterov's.
        betas: Decay rates of AdamW's averages.
        eps: Of AdamW, added to the root of the second average.
        matrices: For a group: False gives its matrices to AdamW, too, as is usual for embeddings and heads.
        num_parts: For a group: how many matrices lie below each other in each, such as 2 for gate and up in one.

    Raises:
        ConfigError: A value is out of range, a dtype is another, or (in `step`) a gradient is placed otherwise than its
            parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        matrices: bool = True,
        num_parts: int = 1,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**settings, "matrices": matrices, "num_parts": num_parts})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with hyperparameters of their own where given.

        Raises:
            ConfigError: A value is out of range, or a dtype is another.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. Collective over the ranks that share matrices.

        Args:
            closure: Called first; computes gradients.

        Returns:
            What the closure returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                _check_gradient(parameter)
            matrices = [parameter for parameter in parameters if group["matrices"] and parameter.ndim >= 2]
            for dtype in dict.fromkeys(parameter.dtype for parameter in matrices):
                self._step_matrices([each for each in matrices if each.dtype == dtype], group)
            for parameter in parameters:
                if not group["matrices"] or parameter.ndim < 2:
                    self._step_adamw(parameter, group)
        return result

    def _step_matrices(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        momentum, num_parts, lr = group["momentum"], group["num_parts"], group["lr"]
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            gradient, average = local(parameter.grad), local(state["momentum"])
            average.mul_(momentum).add_(gradient)
            direction = gradient + momentum * average
            directions.append(direction if parameter.dtype == torch.float64 else direction.bfloat16())

        def update(_: int, whole: Tensor) -> Tensor:
            return orthogonalized(whole.unflatten(-2, (num_parts, -1))).flatten(-3, -2)

        for parameter, direction in zip(parameters, on_whole_matrices(directions, parameters, update), strict=True):
            scale = _SCALE * math.sqrt(max(parameter.shape[-2] // num_parts, parameter.shape[-1]))
            weight = local(parameter)
            weight.mul_(1 - lr * group["weight_decay"]).sub_(direction.to(weight.dtype) * (lr * scale))

    def _step_adamw(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state, (first, second), lr = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["step"] += 1
        step = state["step"]
        weight, gradient = local(parameter), local(parameter.grad)
        average, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().div_(math.sqrt(1 - second**step)).add_(group["eps"])
        weight.mul_(1 - lr * group["weight_decay"]).sub_(average / root * (lr / (1 - first**step)))


def _check(group: Mapping[str, Any]) -> None:
    limits = {
        "lr": (group["lr"] >= 0, "0 or more"),
        "weight_decay": (group["weight_decay"] >= 0, "0 or more"),
        "momentum": (0 <= group["momentum"] < 1, "from 0 to below 1"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers from 0 to below 1"),
        "eps": (group["eps"] >= 0, "0 or more"),
        "num_parts": (group["num_parts"] >= 1, "1 or more"),
    }
    for name, (is_good, limit) in limits.items():
        if not is_good:
            raise ConfigError(f"MuonAdamW: {name}={group[name]} must be {limit}")
    for parameter in group["params"]:
        shape = list(parameter.shape)
        if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
            raise ConfigError(
                f"MuonAdamW: a parameter of shape {shape} is {parameter.dtype}, {parameter.layout}; give it dense ones "
                "in torch.float32 or torch.float64 (precision 32-true or bf16-mixed), or train with StochasticAdamW"
            )
        if group["matrices"] and parameter.ndim >= 2 and parameter.shape[-2] % group["num_parts"]:
            raise ConfigError(
                f"MuonAdamW: num_parts={group['num_parts']} does not divide the {shape[-2]} rows of a parameter of "
                f"shape {shape}; leave it out for that one"
            )


def _check_gradient(parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided or sharding_of(gradient) != sharding_of(parameter):
        raise ConfigError(
            f"MuonAdamW: the gradient of a parameter of shape {list(parameter.shape)}, {sharding_of(parameter)}, is "
            f"{gradient.layout}, {sharding_of(gradient)}; bring it to the parameter's placements before the step"
        )
