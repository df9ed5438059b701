"""AdamW that trains bfloat16 weights without a copy in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local, local_ranges, zeros_beside
from lightning_d9d.ops.eight_bits import scale_shape
from lightning_d9d.ops.stochastic_adamw import AdamWTensors, MultiTensorAdamW, Place, Scalars
from lightning_d9d.optim.state_dtypes import SCALES, check_blocks, converted, dtype_of_states, has_codes

_DTYPES = (torch.float32, torch.bfloat16)
_STATE_DTYPES: dict[Any, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


class StochasticAdamW(Optimizer):
    """AdamW for bfloat16 weights, whose small updates are not lost.

    They are rounded up with a probability that makes the mean right (`lightning_d9d.ops.round_stochastic_`). Float32
    weights, also beside bfloat16 ones, are updated as by `torch.optim.AdamW`. On CUDA one launch updates all parameters
    of a group with the same dtypes. The host does not wait: `found_inf` and `grad_scale` are used as by torch's fused
    optimizers. On the CPU plain torch operations do the same, bit for bit, but slowly.

    The random bits of an element follow from `seed`, the step, the element's index in the whole parameter, and its
    value and gradient (`lightning_d9d.ops.stochastic_adamw`). So the same weights, gradients and seed give the same
    result on all replicas. This also holds for copies of tied weights in several pipeline stages, and on meshes that
    shard weights differently.

    The state of a parameter is `step`, a float32 scalar on its device, `exp_avg` and `exp_avg_sq`, with the same
    placements for DTensors. The groups contain the seed, and nothing else is kept. So a resumed run gets the same bits
    as an uninterrupted one. A loaded state includes its seed and all other hyperparameters except `state_dtype`. States
    of another dtype are converted if nothing is lost, also those of `torch.optim.AdamW`.

    With `torch.uint8`, parameters of two dims or more have states in eight bits (`lightning_d9d.ops.eight_bits`). Each
    32 places of a row share an exponent, in `exp_avg_scale` and `exp_avg_sq_scale`, which are sharded like their
    parameter. A row may be sharded only at multiples of 32 places. Vectors keep float32 states.

    Args:
        params: Parameters, as for any optimizer of torch; float32 or bfloat16, also DTensors of any placement beside
            plain tensors.
        lr: Learning rate; may be a scalar tensor.
        betas: Decay rates of the averages, from 0 to below 1.
        eps: Number added to the root of the second average.
        weight_decay: Decoupled weight decay: weights shrink by `lr * weight_decay`. It may be 0.
        state_dtype: Dtype of the states: `torch.bfloat16` takes half the memory, `torch.uint8` a quarter; both are
            rounded stochastically. Configuration files use names without `torch.`.
        seed: Seed, from 0 to `2**32 - 1`; equal on all ranks.

    Raises:
        ConfigError: A value is out of range, a dtype is not supported, or a row with states in eight bits is sharded
            within 32 places. In `step`: a gradient is sparse, or has other placements than its parameter.
    """

    _step_supports_amp_scaling = True  # torch's name for `grad_scale` and `found_inf`
    updates_each_alone = True
    """True because a parameter's update depends only on that parameter, so a step may come in parts."""
    takes_wide_gradients = True
    """Gradients of bfloat16 weights may be float32, as sums over microbatches and ranks are; they are not rounded."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | Literal["float32", "bfloat16", "uint8"] = torch.float32,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
            "seed": seed,
        }
        self._forget()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with separate hyperparameters if given.

        Raises:
            ConfigError: A value is out of range, a dtype or layout is not supported, or a row with eight-bit states is
                sharded within 32 places.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    def lies_by_block(self, parameter: Tensor, key: str) -> bool:
        """Return whether a state has one place for each block of a parameter's rows, and is sharded like them.

        Local.
        """
        if key not in SCALES:
            return False
        group = next(group for group in self.param_groups if any(parameter is each for each in group["params"]))
        return has_codes(parameter, group["state_dtype"])

    def state_keys(self, group: Mapping[str, Any], parameter: Tensor) -> set[str]:
        """Return the names of the states that a parameter may be given, including those that are converted. Local."""
        return {"step", "exp_avg", "exp_avg_sq", *SCALES}

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
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            tensors = [self._tensors(parameter, group["state_dtype"]) for parameter in parameters]
            for device in {each.step.device for each in tensors}:
                steps = [each.step for each in tensors if each.step.device == device]
                if found_inf is None:
                    torch._foreach_add_(steps, 1)
                else:  # without alpha torch would read the tensor on the host
                    torch._foreach_add_(steps, 1 - found_inf.to(device, non_blocking=True).reshape(()), alpha=1)
            hyperparameters = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "seed")}
            self._updates[parameters[0]](
                tensors, Scalars(**hyperparameters, grad_scale=grad_scale, found_inf=found_inf)
            )
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state, like any optimizer of torch; groups keep their `state_dtype`, to which states are converted.

        Raises:
            StateError: The saved states are float32 for bfloat16, or float32 or bfloat16 for eight bits.
        """
        handle = self.register_load_state_dict_pre_hook(_hold)  # the last one, so others see what is given
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            for parameter in group["params"]:
                own = self.state.get(parameter, {})
                own.update({name: value.tensor for name, value in own.items() if isinstance(value, _Held)})

    def _forget(self) -> None:
        self._updates: defaultdict[Tensor, MultiTensorAdamW] = defaultdict(MultiTensorAdamW)
        self._places: dict[Tensor, Place] = {}

    def _tensors(self, parameter: Tensor, state_dtype: torch.dtype) -> AdamWTensors:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        _check_gradient(parameter, gradient)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=dtype_of_states(parameter, state_dtype))
            if has_codes(parameter, state_dtype):
                state |= {name: zeros_beside(parameter, scale_shape(parameter.shape), torch.uint8) for name in SCALES}
        if parameter not in self._places:
            self._places[parameter] = Place(tuple(parameter.shape), tuple(local_ranges(parameter)))
        return AdamWTensors(
            local(parameter),
            local(gradient),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            state["step"],
            self._places[parameter],
            *(local(state[name]) for name in SCALES if name in state),
        )


class _Held:
    """A wrapper that keeps `Optimizer.load_state_dict` from casting a tensor to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _hold(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states, groups = dict(state_dict["state"]), []
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        groups.append({**saved, "state_dtype": own["state_dtype"]})
        for parameter, index in zip(own["params"], saved["params"], strict=False):
            fitting = converted(states.get(index, {}), parameter, own["state_dtype"])
            states[index] = {
                key: _Held(value) if isinstance(value, Tensor) else value for key, value in fitting.items()
            }
    return {**state_dict, "state": states, "param_groups": groups}


def _check(group: dict[str, Any]) -> None:
    given = group["state_dtype"]
    state_dtype: torch.dtype = _STATE_DTYPES.get(given, given)
    group["state_dtype"] = state_dtype
    ranges = {
        "lr": group["lr"] >= 0,
        "betas": len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]),
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "state_dtype": state_dtype in _STATE_DTYPES.values(),
        "seed": 0 <= group["seed"] < 2**32,
    }
    limits = {
        "betas": "two numbers from 0 to below 1",
        "state_dtype": "torch.float32, torch.bfloat16 or torch.uint8",
        "seed": "from 0 to 2**32 - 1",
    }
    for name, is_good in ranges.items():
        if not is_good:
            raise ConfigError(f"StochasticAdamW: {name}={group[name]} must be {limits.get(name, '0 or more')}")
    for parameter in group["params"]:
        if parameter.dtype not in _DTYPES or parameter.layout != torch.strided:
            raise ConfigError(
                f"StochasticAdamW: a parameter of shape {list(parameter.shape)} is {parameter.dtype}, "
                f"{parameter.layout}; give it dense ones in torch.float32 or torch.bfloat16, and others to another "
                "optimizer, such as torch.optim.AdamW"
            )
    for number, parameter in enumerate(group["params"]):
        if has_codes(parameter, state_dtype):
            check_blocks(parameter, group["param_names"][number] if "param_names" in group else "a parameter")


def _check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise ConfigError(
            f"StochasticAdamW: the gradient of a parameter of shape {list(parameter.shape)} is {gradient.layout}; make "
            "it dense (nn.Embedding(sparse=False)), or give the parameter to torch.optim.SparseAdam"
        )
    if gradient.dtype not in _DTYPES:
        raise ConfigError(
            f"StochasticAdamW: the gradient of a parameter of shape {list(parameter.shape)} is {gradient.dtype}; it "
            "must be torch.float32 or torch.bfloat16"
        )
    if isinstance(parameter, DTensor) and (
        not isinstance(gradient, DTensor) or gradient.placements != parameter.placements
    ):
        placed = f"placed {gradient.placements}" if isinstance(gradient, DTensor) else "no DTensor"
        raise ConfigError(
            f"StochasticAdamW: the gradient of a parameter of shape {list(parameter.shape)}, placed "
            f"{parameter.placements}, is {placed}; call "
            "parameter.grad = parameter.grad.redistribute(placements=parameter.placements) before the step"
        )
