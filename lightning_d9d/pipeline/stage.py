"""From a stage built on the meta device to one with storage and initial weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError


def materialize(stage: nn.Module, device: torch.device, seed: int) -> None:
    """Give every meta parameter and buffer of `stage` storage on `device` and its initial value, in place.

    Values are made by the `reset_parameters()` of the submodule that owns them, on the CPU in at least float32, with a
    random generator seeded by (seed, submodule name) alone: equal on every device and wherever the stage lies. Tensors
    that are not on the meta device (a pretrained part, say) keep their value and move to `device`. Parameters that
    several submodules share stay shared.

    Raises:
        ConfigError: A submodule owns meta tensors but has no `reset_parameters`.
    """
    shared: dict[int, nn.Parameter] = {}
    for name, module in reversed(list(stage.named_modules())):  # children first, so that a parent's reset has its way
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in shared:
                module._parameters[key] = shared[id(parameter)]
        owned = {
            k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None and t.is_meta
        }
        if owned:
            _allocate(module, owned)
            _reset(module, name, seed)
            _move(module, owned, device)
            shared |= {id(t): module._parameters[k] for k, t in owned.items() if isinstance(t, nn.Parameter)}  # type: ignore[misc]
    stage.to(device)


def _allocate(module: nn.Module, owned: dict[str, Tensor]) -> None:
    for key, meta in owned.items():
        dtype = torch.promote_types(meta.dtype, torch.float32) if meta.is_floating_point() else meta.dtype
        _assign(module, key, torch.empty(meta.shape, dtype=dtype, device="cpu"), meta)


def _reset(module: nn.Module, name: str, seed: int) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"submodule {name!r} ({type(module).__name__}) owns parameters or buffers built on the meta device but has "
            "no reset_parameters() to give them values; add one, or build that part under torch.device('cpu')"
        )
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        reset()


def _move(module: nn.Module, owned: dict[str, Tensor], device: torch.device) -> None:
    for key, meta in owned.items():
        value = module._parameters.get(key)
        if value is None:
            value = module._buffers[key]
        assert value is not None
        _assign(module, key, value.detach().to(device=device, dtype=meta.dtype), meta)


def _assign(module: nn.Module, key: str, value: Tensor, like: Tensor) -> None:
    if isinstance(like, nn.Parameter):
        module._parameters[key] = nn.Parameter(value, requires_grad=like.requires_grad)
    else:
        module._buffers[key] = value
