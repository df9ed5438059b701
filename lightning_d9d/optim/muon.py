"""Muon for matrices and AdamW for the rest, in one optimizer.

[Note: plain products] An iteration is x' = (a + b g + c g^2) x with the Gram matrix g = x x^T. Sums of matrices would
take passes over memory beside the products. So the square is completed, and numbers are added only to diagonals. With y
= c^(1/4) x and h = y y^T it is three plain products:

    y' = ((h + b / (2 sqrt(c)))^2 + a - b^2 / (4 c)) y

The input matrices are divided by their norms. The square of a norm is the sum of the Gram matrix's diagonal. So the
first Gram matrix is multiplied instead of the larger x. A factor f of x multiplies it by f^(5/2), and the numbers on
its diagonal by sqrt(f). So the square of their sum has the other f. Tall matrices are multiplied from the right, so
that nothing is transposed in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local, local_ranges, sharding_of
from lightning_d9d.ops.momentum import descend_, momentum_direction_, scale_
from lightning_d9d.optim.whole_matrices import is_whole, on_whole_matrices

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that each iteration applies to singular values; Muon's author found them. [Note: plain
products]."""
_ITERATIONS = 5
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_SCALE = 0.2
"""Root mean square of AdamW's updates, to which those of matrices are scaled."""


def orthogonalized(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices close to 1, by five Newton-Schulz iterations. Local.

    Args:
        matrices: Matrices `[..., rows, columns]`; each is processed separately.

    Returns:
        Matrices of the same shape and dtype; those of zeros do not change. Singular values are then between about 0.7
        and 1.2, unless they are far below the matrix's norm.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    y = matrices.reshape(-1, *matrices.shape[-2:])
    for iteration in range(_ITERATIONS):  # [Note: plain products]
        gram = y.mT @ y if is_tall else y @ y.mT
        shift: float | Tensor = b / (2 * math.sqrt(c))
        rest: float | Tensor = a - b * b / (4 * c)
        if iteration == 0:
            wide = torch.promote_types(gram.dtype, torch.float32)
            norms = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True, dtype=wide).sqrt()
            factors = c**0.25 / (norms + 1e-7)
            scale_(gram, factors[:, 0] ** 2.5)
            shift, rest = shift * factors.sqrt(), rest * factors
        gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        step = gram @ gram
        step.diagonal(dim1=-2, dim2=-1).add_(rest)
        last = c**-0.25 if iteration == _ITERATIONS - 1 else 1.0
        left, right = (y, step) if is_tall else (step, y)
        y = torch.baddbmm(y, left, right, beta=0, alpha=last)
    return y.view(matrices.shape)


class MuonAdamW(Optimizer):
    """Muon for matrices, and AdamW for vectors and selected groups.

    The update of a matrix is its momentum with singular values near 1 (`orthogonalized`), times
    `0.2 * sqrt(max(rows, columns))`. An element then changes about as much as by AdamW, so AdamW's learning rate and
    weight decay carry over (Moonlight, arXiv 2502.16982). A parameter of more than two dims is a stack of matrices,
    such as experts.

    Iterations are in bfloat16, for float64 weights in float64. Matrices are whole on the rank that computes them:
    `lightning_d9d.optim.whole_matrices` describes the messages. Ranks that share a matrix must have gradients for the
    same parameters; `step` is collective over them.

    Bfloat16 weights need no copy in float32: they are updated in float32 and rounded stochastically
    (`lightning_d9d.ops.momentum.descend_`). The random bits of an element follow from `seed`, the step, and where the
    element is in the whole parameter. So all meshes have the bits of one process.

    The state of a matrix is `momentum`, and that of other parameters `exp_avg` and `exp_avg_sq`; both have a number
    `step`. State tensors are sharded like their parameter, in float32 for bfloat16 weights.

    Args:
        params: Parameters, as for any optimizer of torch; float32, float64 or bfloat16, also DTensors.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay: weights shrink by `lr * weight_decay`.
        momentum: Decay rate of the momentum of matrices (Nesterov momentum).
        betas: Decay rates of AdamW's averages.
        eps: Number that AdamW adds to the root of the second average.
        matrices: For a group: False gives its matrices to AdamW, too, as is usual for embeddings and heads. True
            declares that all are matrices. None selects those that are matrices.
        num_parts: For a group: number of matrices that are stacked along the rows of each parameter, such as 2 for gate
            and up in one.
        seed: Seed for rounding bfloat16 weights, from 0 to `2**31 - 1`; equal on all ranks.

    Raises:
        ConfigError: A value is out of range, a dtype is not supported, or a vector is among `matrices`. In `step`: a
            gradient has other placements than its parameter.
    """

    takes_wide_gradients = True
    """Gradients of bfloat16 weights may be float32, as sums over microbatches and ranks are; they are not rounded."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        matrices: bool | None = None,
        num_parts: int = 1,
        seed: int = 0,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**settings, "matrices": matrices, "num_parts": num_parts, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with separate hyperparameters if given.

        Raises:
            ConfigError: A value is out of range, or a dtype is not supported.
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
            closure: Function that is called first and computes gradients.

        Returns:
            The result of the closure.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                _check_gradient(parameter)
            matrices = [parameter for parameter in parameters if is_matrix(parameter, group)]
            for parameter in matrices:
                if is_whole(parameter):  # one at a time, which takes the least memory
                    self._step_matrices([parameter], group)
            cut = [parameter for parameter in matrices if not is_whole(parameter)]
            for dtype in dict.fromkeys(parameter.dtype for parameter in cut):
                self._step_matrices([each for each in cut if each.dtype == dtype], group)
            for parameter in parameters:
                if not is_matrix(parameter, group):
                    self._step_adamw(parameter, group)
        return result

    def state_keys(self, group: Mapping[str, Any], parameter: Tensor) -> set[str]:
        """Return the names of the states of a parameter of a group. Local."""
        return {"step", "momentum"} if is_matrix(parameter, group) else {"step", "exp_avg", "exp_avg_sq"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state, like any optimizer of torch; it stays in float32 for bfloat16 weights."""
        seen: list[dict[str, Any]] = []
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))  # the last one
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        [given] = seen
        for group, saved in zip(self.param_groups, given["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for key, value in given["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        self.state[parameter][key] = value.to(parameter.device, dtype_of_states(parameter))

    def _begun(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, with its step increased by one."""
        state = self.state[parameter]
        if not state:
            dtype, keys = dtype_of_states(parameter), self.state_keys(group, parameter) - {"step"}
            state |= {"step": 0} | {key: torch.zeros_like(parameter, dtype=dtype) for key in sorted(keys)}
        state["step"] += 1
        return state

    def _step_matrices(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        momentum, num_parts, lr = group["momentum"], group["num_parts"], group["lr"]
        directions = []
        for parameter in parameters:
            average = local(self._begun(parameter, group)["momentum"])
            assert parameter.grad is not None
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.bfloat16
            directions.append(momentum_direction_(average, local(parameter.grad), momentum, dtype))

        def update(_: int, whole: Tensor) -> Tensor:
            return orthogonalized(whole.unflatten(-2, (num_parts, -1))).flatten(-3, -2)

        for parameter, direction in zip(parameters, on_whole_matrices(directions, parameters, update), strict=True):
            scale = _SCALE * math.sqrt(max(parameter.shape[-2] // num_parts, parameter.shape[-1]))
            self._move(parameter, direction, lr * scale, group)

    def _step_adamw(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state, (first, second), lr = self._begun(parameter, group), group["betas"], group["lr"]
        assert parameter.grad is not None
        step, average, square = state["step"], local(state["exp_avg"]), local(state["exp_avg_sq"])
        gradient = local(parameter.grad).to(average.dtype)
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().div_(math.sqrt(1 - second**step)).add_(group["eps"])
        self._move(parameter, average / root, lr / (1 - first**step), group)

    def _move(self, parameter: Tensor, direction: Tensor, size: float | Tensor, group: Mapping[str, Any]) -> None:
        """Decay a weight, and take a step of a size against a direction."""
        weight, keep = local(parameter), 1 - group["lr"] * group["weight_decay"]
        if weight.dtype == torch.bfloat16:
            seed = group["seed"] << 32 | self.state[parameter]["step"]
            _descend_rounded(parameter, direction, keep, size, seed)
        else:
            weight.mul_(keep).sub_(direction.to(weight.dtype) * size)


def _descend_rounded(
    parameter: Tensor, direction: Tensor, keep: float | Tensor, size: float | Tensor, seed: int
) -> None:
    """Update a rank's part of a bfloat16 parameter, with the same bits as in one process. Local."""
    weight, (rows, *others) = local(parameter), local_ranges(parameter)
    inner = parameter.shape[1:]
    offset = rows.start * math.prod(inner)
    if weight.shape[1:] == inner:
        descend_(weight, direction, keep, size, seed, offset)
        return
    held = (slice(None), *(slice(each.start, each.stop) for each in others))
    whole, its_direction = (part.new_zeros(len(rows), *inner) for part in (weight, direction))
    whole[held], its_direction[held] = weight, direction  # whole rows: places are counted along them
    descend_(whole, its_direction, keep, size, seed, offset)
    weight.copy_(whole[held])


def dtype_of_states(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's states. Local."""
    return torch.promote_types(parameter.dtype, torch.float32)


def is_matrix(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether Muon updates a parameter of a group, instead of AdamW. Local."""
    return group["matrices"] is not False and parameter.ndim >= 2


def _check(group: Mapping[str, Any]) -> None:
    limits = {
        "lr": (group["lr"] >= 0, "0 or more"),
        "weight_decay": (group["weight_decay"] >= 0, "0 or more"),
        "momentum": (0 <= group["momentum"] < 1, "from 0 to below 1"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers from 0 to below 1"),
        "eps": (group["eps"] >= 0, "0 or more"),
        "num_parts": (group["num_parts"] >= 1, "1 or more"),
        "seed": (0 <= group["seed"] < 2**31, "from 0 to 2**31 - 1"),
    }
    for name, (is_good, limit) in limits.items():
        if not is_good:
            raise ConfigError(f"MuonAdamW: {name}={group[name]} must be {limit}")
    for parameter in group["params"]:
        shape = list(parameter.shape)
        if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
            raise ConfigError(
                f"MuonAdamW: a parameter of shape {shape} is {parameter.dtype}, {parameter.layout}; give it dense ones "
                "in torch.float32, torch.float64 or torch.bfloat16, or train with torch.optim.AdamW"
            )
        if group["matrices"] and parameter.ndim < 2:
            raise ConfigError(
                f"MuonAdamW: a parameter of shape {shape} is a vector in a group with matrices=True. Leave "
                "matrices=True out, so that AdamW updates it, or move it to another group"
            )
        if is_matrix(parameter, group) and parameter.shape[-2] % group["num_parts"]:
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
            f"{gradient.layout}, {sharding_of(gradient)}; redistribute it to the parameter's placements before the step"
        )
