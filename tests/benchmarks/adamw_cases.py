"""Cases of AdamW for `ops`: steps over the weights of layers of Qwen3-30B-A3B."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.eight_bits import BLOCK, scale_shape
from lightning_d9d.ops.stochastic_adamw import AdamWTensors, MultiTensorAdamW, Place, Scalars
from lightning_d9d.optim import StochasticAdamW
from tests.benchmarks.op_case import Inputs, OpCase, Sizes, Work

_SCALARS = Scalars(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, seed=1)
_SCALE = 100
"""Makes averages of `adamw_in_eight_bits` 2e-6 at most, and squares 5e-4."""


def adamw(name: str, sizes: Sizes, layers: int, dtype: torch.dtype, state_dtype: torch.dtype) -> OpCase:
    """Make a case of states in float32 or bfloat16."""
    shapes = shapes_of_layer(sizes) * max(1, layers)
    count = sum(map(math.prod, shapes))

    def inputs(make: Inputs) -> dict[str, Any]:
        def tensors(shape: Sequence[int]) -> AdamWTensors:
            p, g = (make.fixed(*shape, dtype=dtype).mul_(0.02) for _ in range(2))
            m, v = (make.fixed(*shape, dtype=state_dtype).mul_(0.02) for _ in range(2))
            return AdamWTensors(p, g, m, v.square_(), torch.full((), 10.0, device=make.device), _whole(shape))

        return {"update": MultiTensorAdamW(), "tensors": [tensors(shape) for shape in shapes]}

    def fused(update: MultiTensorAdamW, tensors: list[AdamWTensors]) -> None:
        p, g, m, v, steps = map(list, zip(*(each[:5] for each in tensors), strict=True))
        beta1, beta2 = _SCALARS.betas
        options: dict[str, Any] = {"amsgrad": False, "maximize": False, "lr": _SCALARS.lr}
        options |= {"beta1": beta1, "beta2": beta2, "weight_decay": _SCALARS.weight_decay, "eps": _SCALARS.eps}
        torch._fused_adamw_(p, g, m, v, [], steps, **options)

    per_element = 3 * dtype.itemsize + 4 * state_dtype.itemsize  # the gradient is not written
    return OpCase(
        name=name,
        inputs=inputs,
        ours=_update,
        peers={"fused": fused} if dtype == state_dtype else {},
        work={"forward": Work(per_element * count)},
        shares_inputs=True,
        graphed=False,
        note=f"{count / 1e9:.2f} B parameters in {len(shapes)} tensors; `fused` is torch's, which rounds to nearest",
    )


def adamw_in_eight_bits(sizes: Sizes, layers: int) -> OpCase:
    """Make a case of states in eight bits, beside ours in bfloat16 and other packages' in eight bits."""
    shapes = shapes_of_layer(sizes) * layers
    matrices, vectors = (sum(math.prod(s) for s in shapes if (len(s) > 1) == wanted) for wanted in (True, False))

    def inputs(make: Inputs) -> dict[str, Any]:
        def tensors(shape: Sequence[int]) -> AdamWTensors:
            p, g = (make.fixed(*shape).mul_(0.02) for _ in range(2))
            step = torch.full((), 10.0, device=make.device)
            if len(shape) < 2:
                m, v = (torch.full_like(p, 1e-3, dtype=torch.float32) for _ in range(2))
                return AdamWTensors(p, g, m, v, step, _whole(shape))
            states = [torch.randint(1, 255, shape, device=make.device, dtype=torch.uint8) for _ in range(2)]
            scales = [torch.full(scale_shape(tuple(shape)), _SCALE, device=make.device).byte() for _ in range(2)]
            return AdamWTensors(p, g, *states, step, _whole(shape), *scales)

        return {"update": MultiTensorAdamW(), "tensors": [tensors(shape) for shape in shapes]}

    peers = {
        "bfloat16 states": lambda p, options: StochasticAdamW(p, state_dtype=torch.bfloat16, **options),
        "torchao": lambda p, options: _class("torchao.optim", "AdamW8bit")(p, bf16_stochastic_round=True, **options),
        "bitsandbytes": lambda p, options: _class("bitsandbytes.optim", "AdamW8bit")(p, **options),
        "flashoptim": lambda p, options: _class("flashoptim", "FlashAdamW")(p, **options),
    }
    width = sizes.dtype.itemsize
    return OpCase(
        name="stochastic_adamw, 8-bit states",
        inputs=inputs,
        ours=_update,
        peers={name: _stepped(make) for name, make in peers.items()},
        work={"forward": Work(int(matrices * (3 * width + 4 + 4 / BLOCK)) + vectors * (3 * width + 16))},
        shares_inputs=True,
        graphed=False,
        note=f"{(matrices + vectors) / 1e9:.2f} B parameters in {len(shapes)} tensors; ours and torchao round weights "
        "at random, bitsandbytes to nearest, flashoptim keeps 8 more bits of them",
    )


def _stepped(make: Callable[[list[nn.Parameter], dict[str, Any]], Optimizer]) -> Callable[..., None]:
    """The step of an optimizer, which is made at its first step."""
    made: list[Optimizer] = []

    def step(update: MultiTensorAdamW, tensors: list[AdamWTensors]) -> None:
        if not made:
            parameters = [nn.Parameter(each.parameter) for each in tensors]
            for parameter, each in zip(parameters, tensors, strict=True):
                parameter.grad = each.gradient
            names = ("lr", "betas", "eps", "weight_decay")
            made.append(make(parameters, {name: getattr(_SCALARS, name) for name in names}))
        with using_kernels("auto"):
            made[0].step()

    return step


def _class(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _update(update: MultiTensorAdamW, tensors: list[AdamWTensors]) -> None:
    update(tensors, _SCALARS)


def _whole(shape: Sequence[int]) -> Place:
    return Place(tuple(shape), tuple(map(range, shape)))


def shapes_of_layer(sizes: Sizes) -> list[tuple[int, ...]]:
    """Sizes of the weights of a layer."""
    q, kv, dim = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.hidden
    of_attention = [(q, dim), (kv, dim), (kv, dim), (dim, q), (sizes.head_dim,), (sizes.head_dim,)]
    of_experts = [(sizes.experts, dim), (sizes.experts, 2 * sizes.width, dim), (sizes.experts, dim, sizes.width)]
    return [*of_attention, *of_experts, (dim,), (dim,)]
